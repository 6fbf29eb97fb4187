//! A shared library for Python that exchanges buffers with NumPy arrays through DLPack.
//! `numpy_peer.py` loads it.
//!
//! ```text
//! cargo build --features dlpack --example dlpack
//! python3 examples/dlpack/numpy_peer.py target/debug/examples/libdlpack.so     # needs numpy
//! ```

use dlpark::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use dlpark::{Managed, ManagedTensorBase};
use stepscope::{Arena, Buffer, Capacity, Device, DeviceKind, Result, ops};

/// Returns half of `0, 1, 2, ..` as a tensor `[rows, cols]`, computed by a kernel; null on failure.
#[unsafe(no_mangle)]
extern "C" fn give_halves(rows: usize, cols: usize) -> *mut DLManagedTensorVersioned {
    let give = || {
        let device = Device::open(DeviceKind::Emulated)?;
        let mut halves = Buffer::<f32>::zeros(&device, rows * cols)?;
        Arena::builder(&device).capacity(Capacity::mib(1)).build()?.step(|step| {
            let numbers: Vec<f32> = (0..rows * cols).map(|number| number as f32).collect();
            let numbers = step.upload(&numbers, [rows, cols])?;
            ops::copy_into(step, &ops::scale(step, &numbers, 0.5)?, &mut step.lend_mut(&mut halves, [rows, cols])?)
        })?;
        halves.into_dlpack([rows, cols])
    };
    printed(give()).map_or(std::ptr::null_mut(), Managed::into_raw)
}

/// Copies a tensor to a buffer, releases the tensor, and writes the buffer's elements to `out`.
/// Returns their number, or -1.
///
/// # Safety
/// The caller owns the tensor and passes that ownership; `out` has room for its elements.
#[unsafe(no_mangle)]
unsafe extern "C" fn take(tensor: *mut DLManagedTensorVersioned, out: *mut f32) -> isize {
    // SAFETY: this function has the same contract as `taken`.
    printed(unsafe { taken(tensor, out) }).unwrap_or(-1)
}

/// Does the same as [`take`] for a tensor from before DLPack 1.0.
///
/// # Safety
/// See [`take`].
#[unsafe(no_mangle)]
unsafe extern "C" fn take_legacy(tensor: *mut DLManagedTensor, out: *mut f32) -> isize {
    // SAFETY: this function has the same contract as `taken`.
    printed(unsafe { taken(tensor, out) }).unwrap_or(-1)
}

/// # Safety
/// See [`take`].
unsafe fn taken<M: ManagedTensorBase>(tensor: *mut M, out: *mut f32) -> Result<isize> {
    // SAFETY: the caller passes ownership, so nothing else uses the tensor meanwhile.
    let buffer = unsafe {
        let tensor = Managed::from_raw(tensor).expect("a tensor of DLPack 1");
        Buffer::<f32>::from_dlpack(&Device::open(DeviceKind::Emulated)?, tensor)?
    };
    let values = buffer.read()?;
    // SAFETY: the caller guarantees that `out` has room for all values, and `values` is a separate
    // vector.
    unsafe { values.as_ptr().copy_to_nonoverlapping(out, values.len()) };
    Ok(values.len() as isize)
}

fn printed<R>(result: Result<R>) -> Option<R> {
    result.inspect_err(|error| eprintln!("{error}")).ok()
}
