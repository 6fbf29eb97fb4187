//! Kernels that stepscope does not contain: a pointwise op, the leaky rectifier, and two kernels
//! with planted bugs. The build script of `downstream` compiles them to PTX. The CPU uses them as
//! they are.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

use cuda_std::prelude::*;
use kernels::contract;

kernels::pointwise_op! {
    /// The leaky rectifier: x above zero, and slope x elsewhere.
    pub struct LeakyRelu(x, slope);
    value: leaky_relu { leaky_relu_f32, leaky_relu_bf16 } = if x > 0.0 { x } else { slope * x };
    gradient(x, dy): leaky_relu_dx { leaky_relu_dx_f32, leaky_relu_dx_bf16 } =
        if x > 0.0 { dy } else { slope * dy };
}

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
