//! The only place that launches.
//!
//! Invariant: a kernel runs only after its contract has accepted its arguments, on memory that is alive and borrowed
//! for the call. That is why launching is safe.

use crate::driver::Device;
use crate::error::{Error, Result};
use cuda_std::launch::{Contract, Kernel, Violation, Words};
use std::time::Duration;

/// Queues a kernel on a device; for what is not a step's.
#[track_caller]
pub(crate) fn launch_on<K: Contract>(device: &Device, kernel: &K) -> Result<()> {
    launch_within(device, kernel, device.deadline())
}

/// Queues a kernel on a device, within the deadline.
#[track_caller]
pub(crate) fn launch_within<K: Contract>(device: &Device, kernel: &K, deadline: Duration) -> Result<()> {
    let refused = |violation| Error::Contract { kernel: <K as Kernel>::NAME, violation };
    let grid = kernel.grid().map_err(refused)?;
    let words = Words::of(kernel);
    if !words.all_on(|of_argument| device.reaches(of_argument)) {
        let expected = format!("memory of this device, {}", device.description().name);
        return Err(refused(Violation::new("arguments", expected, "another device's, or a rehearsal's")));
    }
    if !words.aligned_to(K::ALIGN) {
        let expected = format!("addresses that are multiples of {} bytes", K::ALIGN);
        return Err(refused(Violation::new("arguments", expected, format!("{kernel:?}"))));
    }
    if grid.blocks() == 0 {
        return Ok(());
    }
    let _span = tracing::trace_span!("launch", kernel = K::NAME, ?grid).entered();
    // SAFETY: the contract has accepted the arguments, and each borrows memory that is alive on this device: a tensor
    // by its step's brand, a buffer by its own borrow and the device check of `Step::lend`.
    unsafe { device.launch(K::ENTRY, grid, words, deadline) }
}
