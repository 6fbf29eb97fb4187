//! Elementwise sums and products.
//!
//! Invariant: each output element is one or two rounded operations on the same element of the
//! inputs.

use crate::block::divide;
use crate::vector::{F4, load};
use crate::{family, write_own_vectors};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes out = a + b. Shapes: `a`, `b`, `out`: `[n]`. Overwrites `out`.
    add<S: Stored> { add_f32: f32; add_bf16: bf16; }
    unsafe fn(a: &[S], b: &[S], out: *mut S) {
        // SAFETY: the vector lies inside `a`, and the others are as long.
        unsafe {
            write_own_vectors!(S, a.len(), out, [a, b] |_index| a + b);
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `a`; `b` and `out` are as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("b", k.a.len(), k.b.len())?;
        Violation::unless_length("out", k.a.len(), k.out.len())?;
        crate::block::own_grid::<S>(k.a.len())
    }
}

family! {
    /// Computes out = a - b. Shapes: `a`, `b`, `out`: `[n]`. Overwrites `out`.
    sub<S: Stored> { sub_f32: f32; sub_bf16: bf16; }
    unsafe fn(a: &[S], b: &[S], out: *mut S) {
        // SAFETY: the vector lies inside `a`, and the others are as long.
        unsafe {
            write_own_vectors!(S, a.len(), out, [a, b] |_index| a - b);
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `a`; `b` and `out` are as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("b", k.a.len(), k.b.len())?;
        Violation::unless_length("out", k.a.len(), k.out.len())?;
        crate::block::own_grid::<S>(k.a.len())
    }
}

family! {
    /// Computes out = a b. Shapes: `a`, `b`, `out`: `[n]`. Overwrites `out`.
    mul<S: Stored> { mul_f32: f32; mul_bf16: bf16; }
    unsafe fn(a: &[S], b: &[S], out: *mut S) {
        // SAFETY: the vector lies inside `a`, and the others are as long.
        unsafe {
            write_own_vectors!(S, a.len(), out, [a, b] |_index| a * b);
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `a`; `b` and `out` are as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("b", k.a.len(), k.b.len())?;
        Violation::unless_length("out", k.a.len(), k.out.len())?;
        crate::block::own_grid::<S>(k.a.len())
    }
}

family! {
    /// Computes out += a. Shapes: `a`, `out`: `[n]`. Adds to `out`.
    add_assign<S: Stored> { add_assign_f32: f32; add_assign_bf16: bf16; }
    unsafe fn(a: &[S], out: *mut S) {
        // SAFETY: the vector lies inside `a`, and `out` is as long.
        unsafe {
            let old = out;
            write_own_vectors!(S, a.len(), out, [a, old] |_index| old + a);
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `a`; `out` is as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("out", k.a.len(), k.out.len())?;
        crate::block::own_grid::<S>(k.a.len())
    }
}

family! {
    /// Computes out = factor x. Shapes: `x`, `out`: `[n]`. Overwrites `out`.
    scale<S: Stored> { scale_f32: f32; scale_bf16: bf16; }
    unsafe fn(x: &[S], factor: f32, out: *mut S) {
        // SAFETY: the vector lies inside `x`, and `out` is as long.
        unsafe {
            write_own_vectors!(S, x.len(), out, [x] |_index| x * F4::splat(factor));
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `out` is as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("out", k.x.len(), k.out.len())?;
        crate::block::own_grid::<S>(k.x.len())
    }
}

family! {
    /// Computes out = factor x, with a factor from device memory. Shapes: `x`, `out`: `[n]`,
    /// `factor`: `[1]`. Overwrites `out`, or adds to it by one fused multiply-add if `accumulate`
    /// is 1.
    scale_by<S: Stored> { scale_by_f32: f32; scale_by_bf16: bf16; }
    unsafe fn(x: &[S], factor: &[f32], accumulate: u32, out: *mut S) {
        // SAFETY: the vector lies inside `x`, and `out` is as long.
        unsafe {
            let (old, factor) = (out, F4::splat(load(factor, 0)));
            if accumulate == 0 {
                write_own_vectors!(S, x.len(), out, [x] |_index| x * factor);
            } else {
                write_own_vectors!(S, x.len(), out, [x, old] |_index| old.fma(factor, x));
            }
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `out` is as long, and `factor` has
    // its one element.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("factor", 1, k.factor.len())?;
        Violation::unless_length("out", k.x.len(), k.out.len())?;
        crate::block::own_grid::<S>(k.x.len())
    }
}

family! {
    /// Computes out = x + bias, the bias added to every row. Shapes: `x`, `out`: `[rows, cols]`,
    /// `bias`: `[cols]`. Overwrites `out`.
    add_bias<S: Stored> { add_bias_f32: f32; add_bias_bf16: bf16; }
    unsafe fn(x: &[S], bias: &[f32], cols: usize, out: *mut S) {
        // SAFETY: the vector lies inside `x`, `out` is as long, and a column is below `cols`, the
        // length of `bias`.
        unsafe {
            write_own_vectors!(S, x.len(), out, [x] |index| {
                let (_, column) = divide(index, cols);
                let bias = if cols.is_multiple_of(F4::LEN) {
                    F4::load(bias, column)
                } else {
                    F4([0, 1, 2, 3].map(|at| load(bias, divide(column + at, cols).1)))
                };
                x + bias
            });
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `out` is as long. A column is a
    // remainder modulo `cols`, which is not 0, so it lies inside `bias`.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless_length("bias", k.cols, k.bias.len())?;
        Violation::unless_length("out", k.x.len(), k.out.len())?;
        crate::block::own_grid::<S>(k.x.len())
    }
}
