//! Each planted bug is found, with a report that locates it.

use super::global::*;
use super::shared::*;
use crate::support;
use cuda_std::emulator::{Cause, Fault, Kind, MemoryLocation, Mode};
use stepscope::tensor::{Source, Target};
use stepscope::{Arena, Capacity, DeviceKind, EagerStep, Error, Result};

/// Launches in race mode and returns the report.
fn reported(launch: impl for<'s> FnOnce(&mut EagerStep<'s>) -> Result<()>) -> Option<Fault> {
    let device = support::open(DeviceKind::Emulated);
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(4)).build().expect("an arena");
    match Mode::RACES.scope(|| arena.step(launch)) {
        Ok(()) => None,
        Err(Error::Kernel(fault)) => Some(*fault),
        Err(other) => panic!("{other}"),
    }
}

/// Launches a kernel of `x` and `out`, with these elements of each, and further arguments after
/// them.
macro_rules! report {
    ($kernel:ident, $x:expr, $out:expr $(, $argument:ident: $value:expr)*) => {
        reported(|step| {
            let x = step.upload(&vec![1.0; $x], [$x])?;
            let mut out = step.empty::<f32>([$out])?;
            step.launch($kernel { x: x.slice(), out: out.out() $(, $argument: $value)* })
        })
    };
}

/// Returns the checked parts of a report: the place, the kinds (earlier, later), and true if the
/// threads are of one block.
#[track_caller]
fn race(fault: Option<Fault>) -> (MemoryLocation, [Kind; 2], bool) {
    let fault = fault.expect("a report");
    let text = fault.to_string();
    let Cause::Race { place, earlier, later } = fault.cause else { panic!("expected a race, got {text}") };
    assert_eq!((later.block, later.thread), (fault.block, fault.thread), "{text}");
    let same_block = earlier.block == later.block;
    assert!(!same_block || (earlier.thread != later.thread && earlier.epoch == later.epoch), "{text}");
    for part in [earlier.to_string(), later.to_string(), place.to_string(), format!("kernel `{}`", fault.kernel)] {
        assert!(text.contains(&part), "\"{part}\" is not in: {text}");
    }
    (place, [earlier.kind, later.kind], same_block)
}

const READ_WRITE: [Kind; 2] = [Kind::Read, Kind::Write];
const WRITE_READ: [Kind; 2] = [Kind::Write, Kind::Read];
const WRITE_WRITE: [Kind; 2] = [Kind::Write, Kind::Write];

fn shared(byte: i64) -> MemoryLocation {
    MemoryLocation::Shared { byte }
}

fn out(element: i64) -> MemoryLocation {
    MemoryLocation::Argument { name: "out", element }
}

#[test]
fn sound_code_is_not_reported() {
    assert_eq!(report!(sound_warp_sync, 256, 256), None);
    assert_eq!(report!(sound_rows, 64, 64), None);
}

#[test]
fn missing_barrier_is_found() {
    // Warp 0 is the first to read, before the others have written.
    let fault = report!(missing_barrier, 5000, 2).expect("a report");
    assert!(matches!(fault.cause, Cause::Unwritten { place: MemoryLocation::Shared { byte: 4 }, .. }), "{fault}");
    let text = fault.to_string();
    assert!(text.contains("never written: shared byte 4 read by thread 0 of block (0, 0, 0) in epoch 0 at "), "{text}");
    assert!(text.contains("tests/races/shared.rs:"), "{text}");
}

#[test]
fn missing_last_barrier_is_found() {
    assert_eq!(race(report!(missing_last_barrier, 4096, 2)), (shared(0), READ_WRITE, true));
}

#[test]
fn missing_warp_sync_is_found() {
    let fault = report!(missing_warp_sync, 64, 64).expect("a report");
    assert!(matches!(fault.cause, Cause::Unwritten { place: MemoryLocation::Shared { byte: 4 }, .. }), "{fault}");
}

#[test]
fn shuffle_as_fence_is_found() {
    assert_eq!(race(report!(shuffle_as_fence, 64, 64)), (shared(4), WRITE_READ, true));
}

#[test]
fn swapped_index_is_found() {
    // Thread 0 has written the start of row 1 before thread 1, to which the row belongs, reads it.
    assert_eq!(race(report!(swapped_index, 64, 64)), (shared(32), WRITE_READ, true));
}

#[test]
fn unwritten_shared_is_found() {
    let fault = report!(unwritten_shared, 64, 64).expect("a report");
    assert_eq!((fault.kernel, fault.thread), ("unwritten_shared", 0));
    assert!(matches!(fault.cause, Cause::Unwritten { place: MemoryLocation::Shared { byte: 0 }, .. }), "{fault}");
}

#[test]
fn double_buffer_index_is_found() {
    // Thread 31 has continued to the second stage when thread 32 reads its value of the first.
    assert_eq!(race(report!(double_buffer_index, 3 * 64, 64, depths: 3)), (shared(31 * 4), WRITE_READ, true));
}

#[track_caller]
fn out_of_bounds(fault: Option<Fault>, element: i64, length: i64) {
    let fault = fault.expect("a report");
    let Cause::OutOfBounds { place, bounds, access } = &fault.cause else { panic!("{fault}") };
    assert_eq!((place, bounds, access.kind), (&out(element), &(0..length), Kind::Write), "{fault}");
    let text = fault.to_string();
    assert!(text.contains(&format!("`out`[{element}] of {length} elements written by thread")), "{text}");
    assert!(text.contains("tests/races/global.rs:"), "{text}");
}

#[test]
fn off_by_one_tail_is_found() {
    let fault = reported(|step| {
        let mut out = step.empty::<f32>([1025])?;
        step.launch(off_by_one_tail { out: out.out(), length: 1025, value: 1.0 })
    });
    out_of_bounds(fault, 1025, 1025);
}

#[test]
fn overrun_into_padding_is_found() {
    out_of_bounds(report!(overrun_into_padding, 5 * 64, 5, cols: 64), 5, 5);
}

#[test]
fn two_writers_are_found() {
    assert_eq!(race(report!(two_writers, 5 * 64, 5, cols: 64)), (out(0), WRITE_WRITE, true));
}

#[test]
fn cross_block_write_is_found() {
    let (place, kinds, same_block) = race(report!(cross_block_write, 4 * 4096, 2));
    assert!(place == out(0) || place == out(1));
    assert_eq!((kinds, same_block), (WRITE_WRITE, false));
}

#[test]
fn block_stride_overlap_is_found() {
    assert_eq!(race(report!(block_stride_overlap, 2000, 2000)), (out(1020), WRITE_WRITE, false));
}

/// The effect of a race on the result depends on the order, and the order depends only on the seed.
#[test]
fn races_show_in_shuffled_orders() {
    let device = support::open(DeviceKind::Emulated);
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(4)).build().expect("an arena");
    let mut sums = |seed: u64| {
        let sums = Mode { races: false, shuffle: Some(seed) }.scope(|| {
            arena.step(|step| {
                let values: Vec<f32> = (0..3 * 64).map(|value| value as f32).collect();
                let (x, mut out) = (step.upload(&values, [3 * 64])?, step.empty::<f32>([64])?);
                step.launch(double_buffer_index { x: x.slice(), depths: 3, out: out.out() })?;
                step.read(&out)
            })
        });
        sums.expect("sums")
    };
    let by_seed: Vec<_> = (0..4).map(&mut sums).collect();
    assert_eq!(by_seed, (0..4).map(&mut sums).collect::<Vec<_>>());
    assert!(by_seed[1..].iter().all(|sums| *sums != by_seed[0]), "{by_seed:?}");
}

/// The kernels run to their end without a report if race mode is off.
#[test]
fn plain_mode_reports_no_races() {
    let device = support::open(DeviceKind::Emulated);
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(4)).build().expect("an arena");
    let plain = Mode::default().scope(|| {
        arena.step(|step| {
            let x = step.upload(&vec![1.0; 4 * 4096], [4 * 4096])?;
            let (mut out, mut small) = (step.empty::<f32>([4 * 4096])?, step.empty::<f32>([2])?);
            step.launch(shuffle_as_fence { x: x.slice(), out: out.out() })?;
            step.launch(block_stride_overlap { x: x.slice(), out: out.out() })?;
            step.launch(cross_block_write { x: x.slice(), out: small.out() })
        })
    });
    assert_eq!(plain, Ok(()));
}
