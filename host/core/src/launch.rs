//! The only place that launches kernels.
//!
//! Invariant: a kernel runs only after its contract has accepted its arguments, on memory that is
//! alive and borrowed for the call. This is why launching is safe.

use crate::device::{Device, Launch, Launches};
use crate::error::{Error, Result};
use cuda_std::launch::{Contract, Violation, Words};
use std::fmt::Debug;
use std::time::Duration;

/// Makes a launch that belongs to no step, and waits until the driver has taken it.
#[track_caller]
pub(crate) fn launch_on<K: Contract>(device: &Device, kernel: &K) -> Result<()> {
    // SAFETY: `accept` passes only launches that meet the requirements. Calls that free memory come
    // later.
    accept(device, kernel, &mut |launch| unsafe { device.launch(launch) })
}

/// Queues a kernel of a step, within the deadline. If the driver refuses it, the step gets the
/// error later, from [`Launches::settle`] or from the next launch.
#[track_caller]
pub(crate) fn launch<K: Contract>(launches: &Launches, kernel: &K, deadline: Duration) -> Result<()> {
    // SAFETY: as for `launch_on`.
    accept(launches.device(), kernel, &mut |launch| unsafe { launches.push(launch, deadline) })
}

/// Checks a kernel's contract, and passes its launch to `make` if it has blocks. The contract has
/// then accepted the arguments, and each borrows memory that is alive on this device. A tensor's
/// brand keeps it alive for its step. A buffer is borrowed, and `Step::lend` has checked its
/// device.
#[track_caller]
fn accept<K: Contract>(device: &Device, kernel: &K, make: &mut dyn FnMut(Launch) -> Result<()>) -> Result<()> {
    let entry = kernel.entry().map_err(|violation| Error::Contract { kernel: K::NAME, violation })?;
    let grid = kernel.grid().map_err(|violation| Error::Contract { kernel: entry.name, violation })?;
    make_checked(device, Launch { entry: *entry, grid, words: Words::of(kernel) }, kernel, make)
}

/// Makes a launch that its contract has accepted. It is compiled once for all kernels.
#[track_caller]
fn make_checked(
    device: &Device,
    launch: Launch,
    kernel: &dyn Debug,
    make: &mut dyn FnMut(Launch) -> Result<()>,
) -> Result<()> {
    check_memory(device, &launch, kernel)?;
    if launch.grid.blocks() == 0 {
        return Ok(());
    }
    let _span = tracing::trace_span!("launch", kernel = launch.entry.name, grid = ?launch.grid).entered();
    make(launch)
}

/// Checks that the arguments' memory is this device's, and aligned. `kernel` shows them in errors.
fn check_memory(device: &Device, Launch { entry, words, .. }: &Launch, kernel: &dyn Debug) -> Result<()> {
    let refused = |violation| Error::Contract { kernel: entry.name, violation };
    if let Some((place, owner)) = words.first_of_other(|owner| device.reaches(owner)) {
        if let Some(arena) = device.arena_of_running_step(owner) {
            let got = format!(
                "kernel `{}` with {} elements (pointer {place} of {kernel:?}) of the running step of arena {arena}; a replay would \
                 overwrite them after they are saved or freed: pass the values as an input, or keep them in a `Buffer`",
                entry.name,
                words.extents()[place].length,
            );
            return Err(Error::misuse("capture", "tensors of the recorded step, inputs and buffers", got));
        }
        let expected = format!("memory of this device, {}", device.description().name);
        return Err(refused(Violation::new("arguments", expected, "memory of another device or of a dry run")));
    }
    words.check_alignment(entry).map_err(refused)
}
