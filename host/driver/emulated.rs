//! The CPU as a device: host memory, and the same kernels run by the emulator.
//!
//! Invariant: each call has happened when it returns, which is the strictest order that a stream allows.

use super::{Description, DeviceKind, Driver};
use crate::error::{Error, Result};
use cuda_std::emulator;
use cuda_std::launch::{Entry, Grid, Words};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::time::Duration;

/// The alignment of device memory, as CUDA gives it.
const ALIGN: usize = 256;

#[derive(Debug)]
pub(super) struct Emulated {
    description: Description,
}

impl Emulated {
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u32);
        let name = format!("emulator on {processors} CPU threads");
        // Memory comes as it is touched; the host's allocator is the only judge of how much there is.
        let kind = DeviceKind::Emulated;
        Self { description: Description { kind, name, memory_bytes: 0, processors, capability: None } }
    }

    fn refuse(&self, requested_bytes: usize) -> Error {
        let reason = "the host's allocator refused".into();
        Error::DeviceMemory { device: self.description.name.clone(), requested_bytes, free_bytes: 0, reason }
    }
}

// SAFETY: memory comes from the global allocator at 256-byte alignment and lives until `free`; calls are synchronous.
unsafe impl Driver for Emulated {
    fn description(&self) -> &Description {
        &self.description
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let layout = Layout::from_size_align(bytes, ALIGN).map_err(|_| self.refuse(bytes))?;
        // SAFETY: callers ask for more than zero bytes.
        let address = unsafe { alloc_zeroed(layout) };
        if address.is_null() { Err(self.refuse(bytes)) } else { Ok(address as u64) }
    }

    unsafe fn free(&self, address: u64, bytes: usize) {
        // SAFETY: the caller's promise: this layout, this address, once.
        unsafe { dealloc(address as *mut u8, Layout::from_size_align_unchecked(bytes, ALIGN)) };
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise; no kernel runs between calls.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn download(&self, from: u64, to: &mut [u8], _: Duration) -> Result<()> {
        // SAFETY: the caller's promise; no kernel runs between calls.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { emulator::launch(entry, grid, words.as_slice()) }.map_err(Error::from)
    }

    fn synchronize(&self, _: Duration) -> Result<()> {
        Ok(())
    }
}
