//! Names that only the other crates of the workspace use.
//!
//! Programs depend on `stepscope`, which does not export this module. Its names may change in any
//! version. Any function here that could break memory safety is an `unsafe fn`.

use crate::arena::{Arena, ArenaBuilder, Measured};
use crate::capture::{HostInputs, Record};
use crate::device::{Description, Device};
use crate::error::Result;
use crate::host_memory::MemoryShortage;
use crate::step::{EagerStep, Step};
use cuda_std::launch::Extent;
use std::sync::Arc;
use std::time::Duration;

/// Invariant: each tensor of an arena begins on a multiple of this.
pub use crate::arena::ALIGN_BYTES;
/// Invariant: an observer changes nothing of the arena, and is detached when it panics.
pub use crate::arena::{ArenaObserver, ArenaTool};
/// Invariant: a caller that reads a region by pieces of this size needs no other host memory.
pub use crate::buffer::PIECE_BYTES;
/// Invariant: received memory overlaps no other memory of the exchange.
pub use crate::copies::{OfRank, exchange};
/// Invariant: a deadline too far to be expressed never passes.
pub use crate::deadline::{after, later};
/// Invariant: a listed launch has passed its kernel's contract.
pub use crate::device::Launch;
/// Invariant: the value of the panic is not dropped, because that can panic in turn.
pub use crate::device::panic_message;
/// Invariant: every wait of a link or a readback has a deadline.
pub use crate::device::{DeviceLink, Piece, PinnedReadback, Wire};
/// Invariant: a layer passes each call on to its driver at most once, and only on the driver
/// thread.
pub use crate::device::{Driver, DriverLayer, Fence, Graph, Link, Nodes, Pool};
/// Invariant: a GPU is opened only after its tests passed, unless the program skips them.
pub use crate::device::{KernelTest, Tested, remembered};
/// Invariant: two digests are equal only if their bytes are.
pub use crate::digest::hex;
/// Invariant: a shortened name has no control characters, whatever the file contains.
pub use crate::error::short;
/// Invariant: a path leads to the old file or to the new one, never to a part of it.
pub use crate::files::{MAX_HEADER_BYTES, Replacement, is_at, open_without_links, remove_file, replace_file_by, sweep};
/// Invariant: copies stay within both matrices, or panic.
pub use crate::host_matrix::{Columns, copy, transpose};
/// Invariant: no more memory is requested than the host has available.
pub use crate::host_memory::zeros;
/// Invariant: a value is judged by its bits, in any floating-point mode.
pub use crate::non_finite::{all_finite, are_finite};
/// Invariant: the lists contain each op that is declared by one expression, once.
pub use crate::ops::declare::{ChosenArguments, ChosenLaunch, Declared, Operands, UNARY, UnaryOp, choose_number};
/// Invariant: the list contains each declared pointwise function, once.
pub use crate::ops::pointwise::{POINTWISE, PointwiseOp};
/// Invariant: the sum of the partial sums has the bits of the squared norm.
pub use crate::ops::reduce::squared_norms_into;
/// Invariant: no parameter has the name of a file's notes.
pub use crate::params::{NOTES, Scope};
/// Invariant: a replay takes all preconditions of its step, or none, before it queues any work.
pub use crate::preconditions::ReplayPrecondition;
/// Invariant: each part is visited once, whatever the number of threads.
pub use crate::processors::for_each_part;
/// Invariant: the memory is valid as long as the value that lends it.
pub use crate::tensor::Memory;
/// Invariant: a value is judged by its bits, in any floating-point mode.
pub use crate::tensor::is_finite;
/// Invariant: the sum does not depend on the parts in which the bytes are read.
pub use crate::upload::checksum_of_part;

/// Measures a step like [`Arena::measure`], as if the device were `other`, and lists the step's
/// launches in order. `stepscope predict` computes from the list how long the step takes on a GPU
/// that is not present. Invariant: nothing on the device changes.
pub fn launches<R>(
    arena: &Arena,
    other: Description,
    run: impl for<'s> FnOnce(&mut EagerStep<'s>) -> Result<R>,
) -> Result<(Measured, Vec<Launch>)> {
    arena.run_listed(other, |region| run(&mut EagerStep::new(region)))
}

/// Measures what [`Arena::capture`] would reserve. Invariant: nothing on the device changes.
pub fn measure_capture<S, R>(
    arena: &Arena,
    state: &mut S,
    inputs: &HostInputs<'_>,
    record: Record<S, R>,
) -> Result<Measured> {
    arena.measure_capture(state, inputs, record)
}

/// Returns an arena of almost no memory. Its steps need as many bytes as the steps of the arena
/// that the builder builds. Invariant: steps are only measured on it.
///
/// # Errors
/// [`Error::DeviceMemory`](crate::Error::DeviceMemory) if the driver is out of memory.
pub fn build_to_measure(builder: &ArenaBuilder) -> Result<Arena> {
    builder.build_to_measure()
}

/// Grows an arena now if its steps may fill less than `bytes` and its settings let it grow.
/// Invariant: if there is no memory, the arena keeps its size.
pub fn make_room(arena: &mut Arena, bytes: usize) -> Result<()> {
    arena.make_room(bytes)
}

/// Returns the shortage if the host will have less memory than the arena's floor after the run has
/// taken another `still_wanted_bytes`.
pub fn shortage_for(arena: &Arena, still_wanted_bytes: u64) -> Option<MemoryShortage> {
    arena.shortage_for(still_wanted_bytes)
}

/// Passes the events of an arena's memory to an observer from now on.
pub fn observe(arena: &mut Arena, observer: Box<dyn ArenaObserver>) {
    arena.observe(observer);
}

/// Returns a handle whose waits for launched work take at most `time` in all, and each launch at
/// most the rest of it, whatever the deadlines. Invariant: only waits for the device use up this
/// time, so a slow host cannot make a device appear stuck.
pub fn with_wait_budget(device: &Device, time: Duration) -> Device {
    device.with_wait_budget(time)
}

/// Runs code that needs the thread's CUDA context, which exists only on the driver thread.
///
/// # Safety
/// `run` leaves the device, its memory and the thread's current context as they are.
pub unsafe fn in_context<R: Send + 'static>(
    device: &Device,
    name: &'static str,
    run: impl FnOnce() -> R + Send + 'static,
) -> Result<R> {
    // SAFETY: as the caller promises.
    unsafe { device.in_context(name, run) }
}

/// Calls `queue`, and returns its result and the memory that the queued launches use.
pub fn watch_launches<Q>(step: &Step<'_>, queue: impl FnOnce() -> Q) -> (Q, Vec<Extent>) {
    step.region().launches().watch(queue)
}

/// Returns true if the step is being recorded: its launches run in replays, not now.
pub fn is_recorded(step: &Step<'_>) -> bool {
    step.region().is_lent()
}

/// Returns true if the step only lists its launches, which never run.
pub fn is_dry_run(step: &Step<'_>) -> bool {
    step.device().is_dry_run()
}

/// Registers a precondition that each replay of this recorded step takes before any of its work is
/// queued. Returns false if the step has registered it before.
pub fn require_each_replay(step: &Step<'_>, condition: Arc<dyn ReplayPrecondition>) -> bool {
    step.region().conditions().require(condition)
}
