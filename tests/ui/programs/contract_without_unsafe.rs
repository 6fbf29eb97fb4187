//! A contract is its author's promise and must be marked `unsafe`.

use cuda_std::prelude::*;

/// Writes one element.
#[kernel]
pub unsafe fn store_at(out: *mut f32, index: usize) {
    // SAFETY: the contract checks the index.
    unsafe { kernels::vector::store(out, index, 1.0) }
}

kernels::contract! { store_at { block: 1, align: 4 } |k| {
    Violation::unless(k.index < k.out.len(), "index", "a place in `out`", k.index)?;
    Grid::new(1, 1, 1)
}}

fn main() {}
