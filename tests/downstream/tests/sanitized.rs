//! What a sanitizer sees inside an arena: writes behind a tensor, and reads of what nobody has written since its step began.
//!
//! Run by `ci/sanitize`, under compute-sanitizer: each test plants bugs on a GPU and prints how many, one for each finding that the tool must
//! have. Without a tool they pass, since what is hit is the arena's own.

#![forbid(unsafe_code)]
#![cfg(all(feature = "cuda", feature = "nvtx"))]

use downstream::builder;
use stepscope::{Arena, Capacity, DeviceKind, Source, Target, ops};

/// As far as a guard reaches.
const OVERRUNS: usize = 256;

fn arena() -> Arena {
    let device = builder(DeviceKind::Cuda).open().unwrap();
    Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_byte_behind_a_tensor() {
    let mut arena = arena();
    // Lengths whose last byte is, and is not, the last of its multiple of 256.
    let lengths = [256, 250];
    for length in lengths {
        for behind in 0..OVERRUNS {
            let step = arena.step(|step| {
                let mut x = step.empty([length])?;
                // The neighbour that a write behind `x` would change, if nothing lay between.
                step.empty::<f32>([2 * OVERRUNS])?;
                let byte = length * size_of::<f32>() + behind;
                step.launch(downstream_kernels::overrun { byte, out: x.out() })
            });
            step.unwrap();
        }
    }
    println!("planted: {}", lengths.len() * OVERRUNS);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_nobody_has_written_in_this_step() {
    let mut arena = arena();
    let mut planted = 0;
    for _ in 0..2 {
        let step = arena.step(|step| {
            // In the second step the first one's value is there.
            let x = step.empty::<f32>([1])?;
            ops::scale(step, &x, 2.0)?;
            // Written, and read as it should be.
            let mut written = ops::fill(step, [1], 1.0)?;
            step.scratch(|inner| {
                let addend = ops::scale(inner, &inner.lend(&written), 2.0)?;
                ops::add_assign(inner, &mut inner.lend_mut(&mut written), &addend)
            })?;
            // The scratch is over; its value is there, and its memory somebody else's.
            let again = step.empty::<f32>([1])?;
            ops::scale(step, &again, 2.0).map(drop)
        });
        step.unwrap();
        planted += 2;
    }
    println!("planted: {planted}");
}
