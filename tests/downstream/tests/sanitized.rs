//! Bugs that a sanitizer finds inside an arena: writes past the end of a tensor, and reads of
//! memory not written in the current step.
//!
//! `sanitize` runs these tests under compute-sanitizer. Each test plants bugs on a GPU and
//! prints their number: the tool must report one finding for each. Without a tool the tests pass,
//! because the bugs only hit the arena's own memory.

#![forbid(unsafe_code)]
#![cfg(all(feature = "cuda", feature = "nvtx"))]

use downstream::builder;
use stepscope::tensor::{Source, Target};
use stepscope::{Arena, Capacity, DeviceKind, ops};

/// The reach of a guard, in bytes.
const OVERRUNS: usize = 256;

fn arena() -> Arena {
    let device = builder(DeviceKind::Cuda).open().unwrap();
    Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_byte_past_a_tensor() {
    let mut arena = arena();
    // Lengths that end at a multiple of 256 bytes, and in between.
    let lengths = [256, 250];
    for length in lengths {
        for past_end in 0..OVERRUNS {
            let step = arena.step(|step| {
                let mut x = step.empty([length])?;
                // The neighbour, which a write past `x` would change if nothing lay between them.
                step.empty::<f32>([2 * OVERRUNS])?;
                let byte = length * size_of::<f32>() + past_end;
                step.launch(downstream_kernels::overrun { byte, out: x.out() })
            });
            step.unwrap();
        }
    }
    println!("planted: {}", lengths.len() * OVERRUNS);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn reads_of_unwritten_memory() {
    let mut arena = arena();
    let mut planted = 0;
    for _ in 0..2 {
        let step = arena.step(|step| {
            // In the second step this memory still holds the value of the first.
            let x = step.empty::<f32>([1])?;
            ops::scale(step, &x, 2.0)?;
            // This one is written, and read correctly.
            let mut written = ops::fill(step, [1], 1.0)?;
            step.scratch(|inner| {
                let addend = ops::scale(inner, &inner.lend(&written), 2.0)?;
                ops::add_assign(inner, &mut inner.lend_mut(&mut written), &addend)
            })?;
            // The scratch scope has ended: its value is still there, but its memory belongs to
            // another tensor.
            let again = step.empty::<f32>([1])?;
            ops::scale(step, &again, 2.0).map(drop)
        });
        step.unwrap();
        planted += 2;
    }
    println!("planted: {planted}");
}
