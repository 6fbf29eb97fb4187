//! A module that forbids unsafe code cannot write a contract, which is its author's promise.

mod kernel {
    use cuda_std::prelude::*;

    /// Writes one element.
    #[kernel]
    pub unsafe fn store_at(out: *mut f32, index: usize) {
        // SAFETY: the contract checks the index.
        unsafe { kernels::vector::store(out, index, 1.0) }
    }
}

mod contract {
    #![forbid(unsafe_code)]

    use super::kernel::store_at;

    kernels::contract! { unsafe store_at { block: 1, align: 4 } |k| {
        Violation::unless(k.index < k.out.len(), "index", "a place in `out`", k.index)?;
        Grid::new(1, 1, 1)
    }}
}

fn main() {}
