//! The CPU as a device: host memory, and the same kernels run by the emulator.
//!
//! Invariant: each call has happened when it returns, which is the strictest order that a stream allows.

use super::{Description, DeviceKind, Driver, Pool};
use crate::error::{Error, Result};
use crate::memory::Situation;
use cuda_std::emulator;
use cuda_std::launch::{Entry, Grid, Words};
use memmap2::MmapMut;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub(super) struct Emulated {
    description: Description,
    memory: Mutex<Memory>,
}

/// Anonymous mappings: page-aligned, and backed by the system only where they are touched.
#[derive(Debug, Default)]
struct Memory {
    used: HashMap<u64, MmapMut>,
    /// What was given back to each pool, by size.
    pools: HashMap<Pool, HashMap<usize, Vec<MmapMut>>>,
    pools_made: u64,
}

impl Emulated {
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u32);
        let description = Description {
            kind: DeviceKind::Emulated,
            name: format!("emulator on {processors} CPU threads"),
            memory_bytes: None,
            integrated: true,
            processors,
            capability: None,
        };
        Self { description, memory: Mutex::default() }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn map(&self, bytes: usize) -> Result<MmapMut> {
        MmapMut::map_anon(bytes).map_err(|reason| Error::DeviceMemory {
            device: self.description.name.clone(),
            requested_bytes: bytes,
            free_bytes: self.free_bytes().unwrap_or(0),
            reason: reason.to_string(),
        })
    }
}

impl Memory {
    fn hand_out(&mut self, mut mapping: MmapMut) -> u64 {
        let address = mapping.as_mut_ptr() as u64;
        self.used.insert(address, mapping);
        address
    }

    fn take_back(&mut self, address: u64) -> Result<MmapMut> {
        self.used.remove(&address).ok_or_else(|| Error::Driver {
            call: "free",
            reason: format!("{address:#x} is not allocated"),
            fatal: false,
        })
    }
}

// SAFETY: mappings are page-aligned and live until they are taken back; calls are synchronous.
unsafe impl Driver for Emulated {
    fn description(&self) -> &Description {
        &self.description
    }

    fn free_bytes(&self) -> Result<u64> {
        // As GB10's driver does: what the host has free, whatever could be reclaimed.
        Ok(Situation::read_host().map_or(u64::MAX, |host| host.free_bytes))
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let mapping = self.map(bytes)?;
        Ok(self.memory().hand_out(mapping))
    }

    unsafe fn free(&self, address: u64, _: usize) -> Result<()> {
        self.memory().take_back(address).map(drop)
    }

    fn create_pool(&self) -> Result<Pool> {
        let mut memory = self.memory();
        memory.pools_made += 1;
        let pool = Pool(memory.pools_made);
        memory.pools.insert(pool, HashMap::new());
        Ok(pool)
    }

    fn pool_allocate(&self, pool: Pool, bytes: usize) -> Result<u64> {
        let kept = self.memory().pools.get_mut(&pool).and_then(|kept| kept.get_mut(&bytes)?.pop());
        let mapping = kept.map_or_else(|| self.map(bytes), Ok)?;
        Ok(self.memory().hand_out(mapping))
    }

    unsafe fn pool_free(&self, pool: Pool, address: u64, bytes: usize) -> Result<()> {
        let mut memory = self.memory();
        let mapping = memory.take_back(address)?;
        if let Some(kept) = memory.pools.get_mut(&pool) {
            kept.entry(bytes).or_default().push(mapping);
        }
        Ok(())
    }

    fn trim_pool(&self, pool: Pool, keep_bytes: usize) -> Result<()> {
        let mut memory = self.memory();
        let Some(kept) = memory.pools.get_mut(&pool) else { return Ok(()) };
        let mut left = keep_bytes;
        for (bytes, mappings) in kept.iter_mut() {
            let stay = mappings.len().min(left / bytes);
            mappings.truncate(stay);
            left -= stay * bytes;
        }
        Ok(())
    }

    unsafe fn destroy_pool(&self, pool: Pool) -> Result<()> {
        self.memory().pools.remove(&pool);
        Ok(())
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise; no kernel runs between calls.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's promise; no kernel runs between calls.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { emulator::launch(entry, grid, words) }.map_err(Error::from)
    }

    fn poll(&self) -> Result<bool> {
        Ok(true)
    }
}
