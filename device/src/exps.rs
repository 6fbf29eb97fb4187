//! exp(x - m) of a row, where m is its largest element: the basis of softmax and cross-entropy.
//!
//! The lanes of a row make two passes over it (see [`warp`](crate::warp) for their columns):
//!
//! ```text
//!              lane 0        lane 1     ..       between the lanes
//! pass 1       larger of its vectors             tree of `larger`  ->  m in every lane
//! pass 2       exp(x - m), held; their sum       tree of sums      ->  the row's sum in every lane
//! ```
//! Invariant: the order of the sum depends only on the row's length. A row that has a NaN, or
//! nothing above -infinity, has the sum NaN.

use crate::math;
use crate::stored::Stored;
use crate::vector::{F4, VectorPart};
use crate::warp::{Row, RowFragment, larger};
use crate::{for_each_vector, map4};

/// A lane's share of a row's exponentials. If lanes hold their share (see [`RowFragment`]), they
/// compute the exponentials once.
#[derive(Clone, Copy)]
pub struct Exps<'k, const REGS: usize, S> {
    /// The row's maximum m.
    pub largest: f32,
    /// The sum of the row's exponentials.
    pub sum: f32,
    /// The exponentials if they are held; otherwise the row, to be read again.
    share: RowFragment<'k, REGS, S>,
}

impl<'k, const REGS: usize, S: Stored> Exps<'k, REGS, S> {
    /// Computes the exponentials of a row of `x`.
    ///
    /// # Safety
    /// The row lies inside `x` and meets the requirements of [`RowFragment::new`] for `REGS`.
    #[inline(always)]
    pub unsafe fn new(row: Row, x: &'k [S], cols: usize) -> Self {
        let mut largest = F4::splat(f32::NEG_INFINITY);
        let mut sum = F4::splat(0.0);
        // SAFETY: the row lies inside `x` and suits `REGS`.
        unsafe {
            let mut share = RowFragment::<REGS, S>::new(row, x, row.start, cols, f32::NEG_INFINITY);
            for_each_vector!(REGS, row, cols, |at, column, part| {
                largest = largest.zip(share.get(at, column, part), larger);
            });
            // `larger` may drop a NaN. The sum propagates it.
            let [a, b, c, d] = largest.0;
            let largest = row.combine(larger(larger(a, b), larger(c, d)), larger);
            for_each_vector!(REGS, row, cols, |at, column, part| {
                let exp = map4!(share.get(at, column, part) - F4::splat(largest), math::exp_negative);
                share.hold(at, exp);
                sum = sum + exp;
            });
            Self { largest, sum: row.sum(sum), share }
        }
    }

    /// Returns the exponentials at `column`, the lane's vector `at`. They are 0 past the row.
    ///
    /// # Safety
    /// The caller meets the requirements of [`RowFragment::get`].
    #[inline(always)]
    pub unsafe fn get(&self, at: usize, column: usize, part: VectorPart) -> F4 {
        // SAFETY: column and number are those of `for_each_vector` over the row.
        let value = unsafe { self.share.get(at, column, part) };
        if REGS > 0 { value } else { map4!(value - F4::splat(self.largest), math::exp_negative) }
    }
}
