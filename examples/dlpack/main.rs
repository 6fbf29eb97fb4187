//! A library for Python: buffers as NumPy's arrays and arrays as buffers, by DLPack. `numpy_peer.py` loads it.
//!
//! ```text
//! cargo build --features dlpack --example dlpack
//! python3 examples/dlpack/numpy_peer.py target/debug/examples/libdlpack.so     # needs numpy
//! ```

use dlpark::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use dlpark::{Managed, ManagedTensorBase};
use stepscope::{Arena, Buffer, Capacity, Device, DeviceKind, Result, ops};

/// Halves of `0, 1, 2, ..` as a tensor `[rows, cols]`, made by a kernel; nothing where that failed.
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
    told(give()).map_or(std::ptr::null_mut(), Managed::into_raw)
}

/// Copies a tensor to a buffer, gives it back, and writes the buffer's elements to `out`. Returns their number, or -1.
///
/// # Safety
/// The tensor is the caller's to give; `out` has room for its elements.
#[unsafe(no_mangle)]
unsafe extern "C" fn take(tensor: *mut DLManagedTensorVersioned, out: *mut f32) -> isize {
    // SAFETY: the caller's promise.
    told(unsafe { taken(tensor, out) }).unwrap_or(-1)
}

/// The same for a tensor from before DLPack 1.0.
///
/// # Safety
/// As for [`take`].
#[unsafe(no_mangle)]
unsafe extern "C" fn take_legacy(tensor: *mut DLManagedTensor, out: *mut f32) -> isize {
    // SAFETY: the caller's promise.
    told(unsafe { taken(tensor, out) }).unwrap_or(-1)
}

/// # Safety
/// As for [`take`].
unsafe fn taken<M: ManagedTensorBase>(tensor: *mut M, out: *mut f32) -> Result<isize> {
    // SAFETY: the caller's promise: a tensor that nobody else uses meanwhile.
    let buffer = unsafe {
        let tensor = Managed::from_raw(tensor).expect("a tensor of DLPack 1");
        Buffer::<f32>::from_dlpack(&Device::open(DeviceKind::Emulated)?, tensor)?
    };
    let values = buffer.read()?;
    // SAFETY: the caller's promise.
    unsafe { values.as_ptr().copy_to_nonoverlapping(out, values.len()) };
    Ok(values.len() as isize)
}

fn told<R>(result: Result<R>) -> Option<R> {
    result.inspect_err(|error| eprintln!("{error}")).ok()
}
