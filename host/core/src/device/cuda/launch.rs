//! A launch with attributes, which the bindings are too old for.
//!
//! Invariant: the types have the layout of cuda.h since 11.8.

use super::modules::Function;
use cuda_std::launch::{Entry, Grid, Words};
use cust::sys::{self, CUfunction, CUresult};
use std::ffi::c_void;

unsafe extern "C" {
    fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> CUresult;
}

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: sys::CUstream,
    attributes: *mut LaunchAttribute,
    attributes_len: u32,
}

/// `CUlaunchAttribute`: an identifying number, and 64 bytes for any value.
#[repr(C, align(8))]
struct LaunchAttribute {
    id: u32,
    padding: u32,
    value: [u32; 16],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`, enabled.
    const OVERLAP: Self = {
        let mut value = [0; 16];
        value[0] = 1;
        Self { id: 6, padding: 0, value }
    };
}

static_assertions::const_assert_eq!(size_of::<LaunchConfig>(), 56);
static_assertions::const_assert_eq!(size_of::<LaunchAttribute>(), 72);

/// Queues a kernel.
///
/// # Safety
/// The requirements of `Driver::launch`. The function belongs to the entry, and the stream is
/// alive.
pub(super) unsafe fn launch(
    function: Function,
    entry: &Entry,
    grid: Grid,
    words: &Words,
    stream: sys::CUstream,
) -> CUresult {
    // A parameter is read from the start of its word, because the host is little-endian.
    const { assert!(cfg!(target_endian = "little")) };
    let mut parameters: Vec<*mut c_void> =
        words.as_slice().iter().map(|word| std::ptr::from_ref(word).cast_mut().cast()).collect();
    let mut attributes = [LaunchAttribute::OVERLAP];
    let config = LaunchConfig {
        grid: [grid.x, grid.y, grid.z],
        block: [entry.block, 1, 1],
        shared_bytes: entry.shared_bytes,
        stream,
        attributes: attributes.as_mut_ptr(),
        // Only kernels that wait for their predecessor may start early.
        attributes_len: u32::from(function.overlaps),
    };
    // SAFETY: the words are this entry's parameters, in order, as `Kernel::pack` wrote them. The
    // driver reads them, the configuration and its attributes before the call returns.
    unsafe { cuLaunchKernelEx(&config, function.name, parameters.as_mut_ptr(), std::ptr::null_mut()) }
}
