//! Kernels that stepscope does not contain: the leaky rectifier and its derivative, and two with
//! planted bugs. The build script of `downstream` compiles them to PTX. The CPU uses them as they
//! are.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

use cuda_std::prelude::*;
use kernels::contract;
use kernels::vector::{load, store};

/// The number of threads in a block.
pub const BLOCK: usize = 128;

/// Computes y[i] = x[i] where x[i] is above zero, and slope x[i] elsewhere; `x`, `y`: `[n]`.
/// Overwrites `y`.
#[kernel]
pub unsafe fn leaky_relu(x: &[f32], slope: f32, y: *mut f32) {
    let index = thread::index_1d() as usize;
    if index < x.len() {
        // SAFETY: the index lies inside `x`, and `y` has the same length.
        unsafe {
            let x = load(x, index);
            store(y, index, if x > 0.0 { x } else { slope * x });
        }
    }
}

// SAFETY: each thread touches only the element of its index in each argument, and only if `x` has
// that element. The index counts up to 2^32. `y` has the length of `x`.
contract! { unsafe leaky_relu { block: BLOCK, align: 4 } |k| {
    Violation::unless_length("y", k.x.len(), k.y.len())?;
    Violation::unless(k.x.len() <= u32::MAX as usize, "x", "fewer elements than `index_1d` counts", k.x.len())?;
    Grid::cover(k.x.len(), BLOCK)
}}

/// Computes dx[i] = dy[i] where x[i] is above zero, and slope dy[i] elsewhere; `x`, `dy`, `dx`:
/// `[n]`. Overwrites `dx`.
#[kernel]
pub unsafe fn leaky_relu_backward(x: &[f32], dy: &[f32], slope: f32, dx: *mut f32) {
    let index = thread::index_1d() as usize;
    if index < x.len() {
        // SAFETY: the index lies inside `x`, and the others have the same length.
        unsafe {
            let dy = load(dy, index);
            store(dx, index, if load(x, index) > 0.0 { dy } else { slope * dy });
        }
    }
}

// SAFETY: each thread touches only the element of its index in each argument, and only if `x` has
// that element. The index counts up to 2^32. The other slices have the length of `x`.
contract! { unsafe leaky_relu_backward { block: BLOCK, align: 4 } |k| {
    Violation::unless_length("dy", k.x.len(), k.dy.len())?;
    Violation::unless_length("dx", k.x.len(), k.dx.len())?;
    Violation::unless(k.x.len() <= u32::MAX as usize, "x", "fewer elements than `index_1d` counts", k.x.len())?;
    Grid::cover(k.x.len(), BLOCK)
}}

/// Loops until 1 is written to `flag[0]`; `flag`: `[1]`. No code that waits for the kernel can
/// write it, so the kernel simulates a stuck GPU.
#[kernel]
pub unsafe fn endless(flag: *mut u32) {
    // SAFETY: the contract requires one element, and only this launch holds it.
    while unsafe { flag.read_volatile() } != 1 {}
}

// SAFETY: every thread reads the first element of `flag`, which exists.
contract! { unsafe endless { block: 32, align: 4 } |k| {
    Violation::unless_length("flag", 1, k.flag.len())?;
    Grid::cover(1, 1)
}}

/// Sets the byte at this offset from the start of `out` to 1, even past its end. This overrun tests
/// a sanitizer.
#[kernel]
pub unsafe fn overrun(byte: usize, out: *mut f32) {
    if thread::index_1d() == 0 {
        // SAFETY: none if the byte lies past the end of `out`; this is the planted bug.
        unsafe { out.cast::<u8>().add(byte).write(1) };
    }
}

// SAFETY: none: `byte` is not checked, and this is the planted bug.
contract! { unsafe overrun { block: 32, align: 4 } |_k| Grid::cover(1, 1) }
