//! The hints of `gpu/hints.rs`, which mean nothing to a CPU.

/// Does nothing: a CPU checks every division.
///
/// # Safety
/// `divisor` is not 0.
#[inline(always)]
pub unsafe fn assume_not_zero(_divisor: usize) {}

/// Does nothing.
#[inline(always)]
pub fn block_bounds<const THREADS: u32, const BLOCKS: u32>() {}

/// Does nothing.
#[inline(always)]
pub fn no_unroll() {}

/// Returns the value.
#[inline(always)]
pub fn launder_reg(value: u32) -> u32 {
    value
}

/// Returns the index.
#[inline(always)]
pub fn launder_index(place: usize) -> usize {
    place
}
