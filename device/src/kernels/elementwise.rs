//! Sums and products, element by element.
//!
//! Invariant: each output element is one or two rounded operations on the same element of the inputs.

use crate::block::divide;
use crate::vector::{F4, load};
use crate::{contract, for_own_vector};
use cuda_std::prelude::*;

/// out = a + b; `a`, `b`, `out`: `[n]`. Overwrites `out`.
#[kernel]
pub unsafe fn add(a: &[f32], b: &[f32], out: *mut f32) {
    for_own_vector!(a.len(), |index, part| {
        // SAFETY: the vector lies inside `a`, and the others are as long.
        unsafe {
            let a = F4::load_part(a, index, part, 0.0);
            let b = F4::load_part(b, index, part, 0.0);
            (a + b).store_part(out, index, part);
        }
    });
}

// SAFETY: a thread touches the four elements from its own index on, as far as `a` has them; `b` and `out` are as long.
contract! { unsafe add { block: crate::block::BLOCK } |k| {
    Violation::unless_length("b", k.a.len(), k.b.len())?;
    Violation::unless_length("out", k.a.len(), k.out.len())?;
    crate::block::vector_grid(k.a.len())
}}

/// out += a; `a`, `out`: `[n]`. Adds to `out`.
#[kernel]
pub unsafe fn add_assign(a: &[f32], out: *mut f32) {
    for_own_vector!(a.len(), |index, part| {
        // SAFETY: the vector lies inside `a`, and `out` is as long.
        unsafe {
            let a = F4::load_part(a, index, part, 0.0);
            (F4::load_part_raw(out, index, part, 0.0) + a).store_part(out, index, part);
        }
    });
}

// SAFETY: a thread touches the four elements from its own index on, as far as `a` has them; `out` is as long.
contract! { unsafe add_assign { block: crate::block::BLOCK } |k| {
    Violation::unless_length("out", k.a.len(), k.out.len())?;
    crate::block::vector_grid(k.a.len())
}}

/// out = factor x; `x`, `out`: `[n]`. Overwrites `out`.
#[kernel]
pub unsafe fn scale(x: &[f32], factor: f32, out: *mut f32) {
    for_own_vector!(x.len(), |index, part| {
        // SAFETY: the vector lies inside `x`, and `out` is as long.
        unsafe {
            (F4::load_part(x, index, part, 0.0) * F4::splat(factor)).store_part(out, index, part);
        }
    });
}

// SAFETY: a thread touches the four elements from its own index on, as far as `x` has them; `out` is as long.
contract! { unsafe scale { block: crate::block::BLOCK } |k| {
    Violation::unless_length("out", k.x.len(), k.out.len())?;
    crate::block::vector_grid(k.x.len())
}}

/// out = factor x, with a factor from device memory; `x`, `out`: `[n]`, `factor`: `[1]`. Overwrites `out`.
#[kernel]
pub unsafe fn scale_by(x: &[f32], factor: &[f32], out: *mut f32) {
    for_own_vector!(x.len(), |index, part| {
        // SAFETY: the vector lies inside `x`, and `out` is as long.
        unsafe {
            (F4::load_part(x, index, part, 0.0) * F4::splat(load(factor, 0))).store_part(out, index, part);
        }
    });
}

// SAFETY: a thread touches the four elements from its own index on, as far as `x` has them; `out` is as long, and `factor` has its one
// element.
contract! { unsafe scale_by { block: crate::block::BLOCK } |k| {
    Violation::unless_length("factor", 1, k.factor.len())?;
    Violation::unless_length("out", k.x.len(), k.out.len())?;
    crate::block::vector_grid(k.x.len())
}}

/// out = x + bias, the bias added to every row; `x`, `out`: `[rows, cols]`, `bias`: `[cols]`. Overwrites `out`.
#[kernel]
pub unsafe fn add_bias(x: &[f32], bias: &[f32], cols: usize, out: *mut f32) {
    for_own_vector!(x.len(), |index, part| {
        // SAFETY: the vector lies inside `x`, `out` is as long, and a column is below `cols`, the length of `bias`.
        unsafe {
            let (_, column) = divide(index, cols);
            let bias = if cols.is_multiple_of(F4::LEN) {
                F4::load(bias, column)
            } else {
                F4([0, 1, 2, 3].map(|at| load(bias, divide(column + at, cols).1)))
            };
            (F4::load_part(x, index, part, 0.0) + bias).store_part(out, index, part);
        }
    });
}

// SAFETY: a thread touches the four elements from its own index on, as far as `x` has them; `out` is as long. A column is a remainder by
// `cols`, which is not 0, so `bias` has it.
contract! { unsafe add_bias { block: crate::block::BLOCK } |k| {
    crate::warp::rows_in("x", k.x.len(), k.cols)?;
    Violation::unless_length("bias", k.cols, k.bias.len())?;
    Violation::unless_length("out", k.x.len(), k.out.len())?;
    crate::block::vector_grid(k.x.len())
}}
