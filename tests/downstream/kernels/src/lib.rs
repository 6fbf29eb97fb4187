//! Kernels that stepscope has not: the leaky rectifier and its derivative, and two with planted bugs. Compiled to PTX by the build script of `downstream`, and as
//! they are for the CPU.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

use cuda_std::prelude::*;
use kernels::contract;
use kernels::vector::{load, store};

/// Threads of a block.
pub const BLOCK: usize = 128;

/// y[i] = x[i] above zero, else slope x[i]; `x`, `y`: `[n]`. Overwrites `y`.
#[kernel]
pub unsafe fn leaky_relu(x: &[f32], slope: f32, y: *mut f32) {
    let index = thread::index_1d() as usize;
    if index < x.len() {
        // SAFETY: the index lies inside `x`, and `y` is as long.
        unsafe {
            let x = load(x, index);
            store(y, index, if x > 0.0 { x } else { slope * x });
        }
    }
}

// SAFETY: a thread touches the element of its index, which counts up to 2^32, in each argument, and only where `x` has one; `y` is as
// long.
contract! { unsafe leaky_relu { block: BLOCK, align: 4 } |k| {
    Violation::unless_length("y", k.x.len(), k.y.len())?;
    Violation::unless(k.x.len() <= u32::MAX as usize, "x", "fewer elements than `index_1d` counts", k.x.len())?;
    Grid::cover(k.x.len(), BLOCK)
}}

/// dx[i] = dy[i] where x[i] is above zero, else slope dy[i]; `x`, `dy`, `dx`: `[n]`. Overwrites `dx`.
#[kernel]
pub unsafe fn leaky_relu_backward(x: &[f32], dy: &[f32], slope: f32, dx: *mut f32) {
    let index = thread::index_1d() as usize;
    if index < x.len() {
        // SAFETY: the index lies inside `x`, and the others are as long.
        unsafe {
            let dy = load(dy, index);
            store(dx, index, if load(x, index) > 0.0 { dy } else { slope * dy });
        }
    }
}

// SAFETY: a thread touches the element of its index, which counts up to 2^32, in each argument, and only where `x` has one; the
// others are as long.
contract! { unsafe leaky_relu_backward { block: BLOCK, align: 4 } |k| {
    Violation::unless_length("dy", k.x.len(), k.dy.len())?;
    Violation::unless_length("dx", k.x.len(), k.dx.len())?;
    Violation::unless(k.x.len() <= u32::MAX as usize, "x", "fewer elements than `index_1d` counts", k.x.len())?;
    Grid::cover(k.x.len(), BLOCK)
}}

/// Never ends, unless somebody writes 1 to `flag[0]`, which nothing that waits for it can; `flag`: `[1]`. What a stuck GPU is
/// tested with.
#[kernel]
pub unsafe fn endless(flag: *mut u32) {
    // SAFETY: the contract asks for one element, and the launch holds it alone.
    while unsafe { flag.read_volatile() } != 1 {}
}

// SAFETY: every thread reads the first element of `flag`, which has one.
contract! { unsafe endless { block: 32, align: 4 } |k| {
    Violation::unless_length("flag", 1, k.flag.len())?;
    Grid::cover(1, 1)
}}

/// Sets a byte to 1, counted from the start of `out`: one that lies behind it too, which is what a sanitizer is tested with.
#[kernel]
pub unsafe fn overrun(byte: usize, out: *mut f32) {
    if thread::index_1d() == 0 {
        // SAFETY: none where the byte lies behind `out`; this is the planted bug.
        unsafe { out.cast::<u8>().add(byte).write(1) };
    }
}

// SAFETY: none: `byte` is not looked at, and this is the planted bug.
contract! { unsafe overrun { block: 32, align: 4 } |_k| Grid::cover(1, 1) }
