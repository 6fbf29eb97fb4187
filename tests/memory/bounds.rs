//! Writes of a kernel outside its arguments are errors of the launch, in plain runs and in release
//! builds. Accesses through `vector.rs` are checked everywhere. Writes through raw pointers are
//! detected near the kernel's outputs and where there is no memory. Neighbouring tensors keep their
//! bytes.

use crate::support::open;
use cuda_std::emulator::{Cause, Kind, MemoryLocation};
use cuda_std::prelude::*;
use kernels::contract;
use kernels::vector::{F4, VectorPart, put, store};
use stepscope::tensor::{Source, Target};
use stepscope::{Arena, Capacity, DeviceKind, EagerStep, Error, HostInputs, Result, Tensor};

/// The length of a tensor as large as its place in the arena, so that tensors touch.
const LENGTH: usize = 1024;
const ONE: i32 = LENGTH as i32;

/// Defines kernels in which one thread of the last block writes at `at`, which wraps if it is
/// negative.
macro_rules! writers {
    ($($name:ident: |$y:ident, $at:ident| $write:expr;)*) => {$(
        #[kernel]
        unsafe fn $name($at: i32, $y: *mut f32) {
            if thread::block_idx_x() == 2 && thread::thread_idx_x() == 5 {
                // SAFETY: none: this is the planted bug.
                unsafe { $write };
            }
        }

        // SAFETY: none, on purpose: the kernel leaves its arguments, and the emulator reports it.
        contract! { unsafe $name { block: 64 } |k| {
            Violation::unless_length("y", LENGTH, k.y.len())?;
            Grid::new(3, 1, 1)
        }}
    )*};
}

writers! {
    by_store: |y, at| store(y, at as isize as usize, 7.0);
    by_put: |y, at| put(y, at as isize as usize, 7.0, 0);
    by_vector: |y, at| F4::splat(7.0).store(y, at as isize as usize);
    by_part: |y, at| F4::splat(7.0).store_part(y, at as isize as usize, VectorPart::First(3));
    by_moved: |y, at| store(y.add(100), (at as isize - 100) as usize, 7.0);
    by_element: |y, at| *y.wrapping_offset(at as isize) = 7.0;
    by_write: |y, at| y.wrapping_add(at as isize as usize).write(7.0);
    by_pointer: |y, at| {
        let own = y.wrapping_offset(at as isize);
        *own = 7.0;
    };
}

/// Returns the result of launching a kernel between two other tensors, which must not change.
fn outcome(launch: impl for<'s> FnOnce(&mut EagerStep<'s>, &mut Tensor<'s>) -> Result<()>) -> Result<Vec<f32>> {
    let device = open(DeviceKind::Emulated);
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    arena.step(|step| {
        let before = step.upload(&[1.0; LENGTH], [LENGTH])?;
        let mut y = step.upload(&[2.0; LENGTH], [LENGTH])?;
        let after = step.upload(&[3.0; LENGTH], [LENGTH])?;
        let outcome = launch(step, &mut y);
        assert_eq!((step.read(&before)?, step.read(&after)?), (vec![1.0; LENGTH], vec![3.0; LENGTH]));
        outcome?;
        step.read(&y)
    })
}

/// Launches the kernel with each of several `at`, and passes the report to `check`.
macro_rules! each {
    ($kernel:ident, $places:expr, $check:expr) => {
        for at in $places {
            let mut line = 0;
            let error = outcome(|step, y| {
                // The line of the whole macro call.
                line = line!();
                step.launch($kernel { at, y: y.out() })
            });
            let Err(Error::Kernel(fault)) = error else { panic!("{} at {at}: {error:?}", stringify!($kernel)) };
            let text = fault.to_string();
            assert_eq!((fault.kernel, fault.launched_at.line()), (stringify!($kernel), line), "{text}");
            assert!(text.contains(&format!("launched at {}:{line}:", file!())), "{text}");
            $check(at, fault.block, fault.thread, fault.cause, text);
        }
    };
}

/// Checks that the report names the place, the block, the thread and the line of the write.
fn exact(at: i32, block: [u32; 3], thread: u32, cause: Cause, text: String) {
    let Cause::OutOfBounds { place, bounds, access } = cause else { panic!("{text}") };
    assert_eq!(
        (place, bounds),
        (MemoryLocation::Argument { name: "y", element: at.into() }, 0..LENGTH as i64),
        "{text}"
    );
    assert_eq!((block, thread, access.kind), ([2, 0, 0], 5, Kind::Write), "{text}");
    assert!(
        text.contains(&format!("out of bounds: `y`[{at}] of 1024 elements written by thread 5 of block (2, 0, 0)")),
        "{text}"
    );
    assert_eq!(access.location.file(), file!(), "{text}");
}

#[test]
fn stores_out_of_bounds_are_refused() {
    let everywhere = [ONE, ONE + 3, ONE + 63, ONE + 100_000, i32::MAX, -1, -4, -64, -100_000, i32::MIN];
    each!(by_store, everywhere, exact);
    each!(by_put, everywhere, exact);
    each!(by_part, everywhere, exact);
    each!(by_moved, everywhere, exact);
    each!(by_element, everywhere, exact);
    each!(by_write, everywhere, exact);
    each!(by_vector, [ONE, ONE + 64, ONE + 100_000, -4, -64, -100_000], exact);
}

#[test]
fn partly_outside_vectors_are_refused() {
    each!(by_part, [ONE - 2, ONE - 1], |_, block, thread, cause, text| exact(ONE, block, thread, cause, text));
    each!(by_part, [-2, -1], exact);
}

#[test]
fn raw_overrun_is_reported_and_undone() {
    each!(by_pointer, [ONE, ONE + 3, ONE + 63, -1, -4, -64], |at: i32, _, _, cause, text: String| {
        assert_eq!(cause, Cause::Overrun { name: "y", element: at.into(), length: LENGTH }, "{text}");
        assert!(text.contains(&format!("out of bounds: `y`[{at}] of 1024 elements written")), "{text}");
    });
}

#[test]
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn raw_write_to_nowhere_is_reported() {
    #[kernel]
    unsafe fn to_nowhere(address: u64, y: *mut f32) {
        if thread::index_1d() == 70 {
            // SAFETY: none: this is the planted bug.
            unsafe { *y.wrapping_byte_sub(y as usize).wrapping_byte_add(address as usize) = 7.0 };
        }
    }
    // SAFETY: none, on purpose: the kernel leaves its arguments, and the emulator reports it.
    contract! { unsafe to_nowhere { block: 64 } |k| {
        Violation::unless_length("y", LENGTH, k.y.len())?;
        Grid::new(3, 1, 1)
    }}
    // The first page, and an address that no processor has.
    for (address, is_told) in [(8, true), (1 << 62, false)] {
        let error = outcome(|step, y| step.launch(to_nowhere { address, y: y.out() }));
        let Err(Error::Kernel(fault)) = error else { panic!("{address}: {error:?}") };
        assert_eq!((fault.kernel, fault.block, fault.thread), ("to_nowhere", [1, 0, 0], 6), "{fault}");
        let Cause::NoMemory { place } = fault.cause else { panic!("{fault}") };
        assert!(
            !is_told || matches!(place, Some(MemoryLocation::Argument { name: "y", element }) if element < 0),
            "{place:?}"
        );
    }
}

#[test]
fn writes_inside_succeed() {
    for at in [0, 4, ONE - 4] {
        let mut expected = vec![2.0; LENGTH];
        expected[at as usize] = 7.0;
        assert_eq!(outcome(|step, y| step.launch(by_store { at, y: y.out() })).unwrap(), expected);
        assert_eq!(outcome(|step, y| step.launch(by_pointer { at, y: y.out() })).unwrap(), expected);
        assert_eq!(outcome(|step, y| step.launch(by_element { at, y: y.out() })).unwrap(), expected);
        expected[at as usize..][..4].fill(7.0);
        assert_eq!(outcome(|step, y| step.launch(by_vector { at, y: y.out() })).unwrap(), expected);
    }
}

/// Writes through one output's pointer into the other, which touches it. This is an error too.
#[kernel]
unsafe fn into_the_other(a: *mut f32, b: *mut f32) {
    if thread::thread_idx_x() == 0 {
        // SAFETY: none: this is the planted bug.
        unsafe {
            store(b, 0, 1.0);
            store(a, LENGTH, 2.0);
        }
    }
}

// SAFETY: none, on purpose: the kernel leaves its arguments, and the emulator reports it.
contract! { unsafe into_the_other { block: 64 } |k| {
    Violation::unless_length("a", LENGTH, k.a.len())?;
    Violation::unless_length("b", LENGTH, k.b.len())?;
    Grid::new(1, 1, 1)
}}

#[test]
fn writes_into_another_output_fail() {
    let error = outcome(|step, y| {
        let mut other = step.empty([LENGTH])?;
        step.launch(into_the_other { a: y.out(), b: other.out() })
    });
    let Err(Error::Kernel(fault)) = error else { panic!("{error:?}") };
    let Cause::OutOfBounds { place, .. } = fault.cause else { panic!("{fault}") };
    assert_eq!(place, MemoryLocation::Argument { name: "a", element: LENGTH as i64 });
}

/// Reads through a pointer, not a slice.
#[kernel]
unsafe fn reads_beyond(x: *const f32, y: *mut f32) {
    if thread::thread_idx_x() == 0 {
        // SAFETY: none: this is the planted bug.
        unsafe { store(y, 0, F4::load_part_raw(x, LENGTH, VectorPart::First(1), 0.0).0[0]) };
    }
}

// SAFETY: none, on purpose: the kernel leaves its arguments, and the emulator reports it.
contract! { unsafe reads_beyond { block: 64 } |k| {
    Violation::unless_length("y", LENGTH, k.y.len())?;
    Grid::new(1, 1, 1)
}}

#[test]
fn pointer_reads_are_checked() {
    let error = outcome(|step, y| {
        let x = step.upload(&[0.0; LENGTH], [LENGTH])?;
        step.launch(reads_beyond { x: x.pointer(), y: y.out() })
    });
    let Err(Error::Kernel(fault)) = error else { panic!("{error:?}") };
    let Cause::OutOfBounds { place, access, .. } = fault.cause else { panic!("{fault}") };
    assert_eq!((place, access.kind), (MemoryLocation::Argument { name: "x", element: LENGTH as i64 }, Kind::Read));
}

#[test]
fn replay_reports_recorded_line() {
    const LINE: u32 = line!() + 7;
    let device = open(DeviceKind::Emulated);
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let mut captured = arena
        .capture((), &HostInputs::new(), |step, (), _| {
            let mut y = step.empty([LENGTH])?;
            // The next line is the reported one.
            step.launch(by_store { at: ONE, y: y.out() })
        })
        .unwrap();
    let Err(Error::Kernel(fault)) = captured.replay(&HostInputs::new()) else { panic!("no fault") };
    assert_eq!((fault.launched_at.file(), fault.launched_at.line()), (file!(), LINE), "{fault}");
}
