//! What follows the sums of a matrix multiply: bias, old content, gelu, and the write.
//!
//! Invariant: in this order, each rounded once, whichever kernel has summed.

use super::{GELU, KEEP};
use crate::vector::{F4, Part};
#[cfg(not(target_arch = "nvptx64"))]
use crate::vector::{load_run, load_run_raw, store_run};
use crate::{map4, math};
use cuda_std::GpuFloat;

/// Where sums go, and what is done with them before; the parameters are those of the [module](super).
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<'p> {
    pub(crate) bias: &'p [f32],
    pub(crate) bias_start: usize,
    pub(crate) c: *const f32,
    pub(crate) out: *mut f32,
    pub(crate) pre: *mut f32,
    pub(crate) start: usize,
    pub(crate) n: u32,
    pub(crate) ldc: u32,
    pub(crate) beta: f32,
    pub(crate) flags: u32,
}

impl Epilogue<'_> {
    /// Finishes the sums of up to `width` neighbours at (`i`, `j`).
    ///
    /// # Safety
    /// Row `i` and column `j` lie inside the output, and the contract has accepted the arguments.
    #[inline(always)]
    pub(crate) unsafe fn finish(&self, i: u32, j: u32, width: usize, mut sum: F4) {
        let Self { bias, bias_start, c, out, pre, start, n, ldc, beta, flags } = *self;
        let left = (n - j) as usize;
        let count = if width < left { width } else { left };
        let at = start + i as usize * ldc as usize + j as usize;
        let own = part(at, count);
        // SAFETY: row `i` and these columns lie in `out`, `c`, `pre` and `bias`, which the contract checked.
        unsafe {
            if !bias.is_empty() {
                let at = bias_start + j as usize;
                let bias = F4::load_part(bias, at, part(at, count), 0.0);
                sum = sum.zip(bias, |sum, bias| sum + bias);
            }
            if beta != 0.0 {
                sum = sum.zip(F4::load_part_raw(c, at, own, 0.0), |sum, c| GpuFloat::mul_add(beta, c, sum));
            }
            if flags & KEEP != 0 {
                sum.store_part(pre, at, own);
            }
            if flags & GELU != 0 {
                sum = map4!(sum, math::gelu);
            }
            sum.store_part(out, at, own);
        }
    }

    /// The same of `N` neighbours that all lie inside the output, on the CPU.
    ///
    /// # Safety
    /// As above.
    #[cfg(not(target_arch = "nvptx64"))]
    #[inline(always)]
    pub(super) unsafe fn finish_run<const N: usize>(&self, i: u32, j: u32, mut sum: [f32; N]) {
        let Self { bias, bias_start, c, out, pre, start, ldc, beta, flags, .. } = *self;
        let at = start + i as usize * ldc as usize + j as usize;
        // SAFETY: as above.
        unsafe {
            if !bias.is_empty() {
                let bias = load_run::<N>(bias, bias_start + j as usize);
                sum.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
            }
            if beta != 0.0 {
                let c = load_run_raw::<N>(c, at);
                sum.iter_mut().zip(c).for_each(|(sum, c)| *sum = GpuFloat::mul_add(beta, c, *sum));
            }
            if flags & KEEP != 0 {
                store_run(pre, at, sum);
            }
            if flags & GELU != 0 {
                sum.iter_mut().for_each(|sum| *sum = math::gelu(*sum));
            }
            store_run(out, at, sum);
        }
    }
}

/// How `count` elements, up to four, at `index` are moved: at once where that is a vector.
#[inline(always)]
pub(crate) fn part(index: usize, count: usize) -> Part {
    if count >= F4::LEN && index.is_multiple_of(F4::LEN) { Part::Whole } else { Part::first(count) }
}
