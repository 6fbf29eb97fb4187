//! The epilogue for runs of neighboring sums, as a CPU has them.
//!
//! Invariant: the steps and their order are those of [`Epilogue::finish`].
//!
//! Loops are `for` and not `for_each`, which is a function of the standard library: where it is not
//! inlined, it lacks the kernel's processor features, and each fused multiply-add is a call.

use crate::machine::memory::{load_run, load_run_raw, prefetch_raw, store_run};
use crate::math;
use crate::matmul::epilogue::Epilogue;
use crate::matmul::{GELU, SILU, STORE_PREACT, SWIGLU};
use cuda_std::GpuFloat;

impl Epilogue<'_, f32> {
    /// Prefetches the cache lines that [`Epilogue::finish_run`] will access from (i, j) on.
    #[inline(always)]
    pub(in super::super) fn fetch_run(&self, i: u32, j: u32) {
        let Self { c, out, pre, start, ldc, beta, flags, .. } = *self;
        let at = start + i as usize * ldc as usize + j as usize;
        prefetch_raw(out, at);
        if flags & STORE_PREACT != 0 {
            prefetch_raw(pre, at);
        }
        if beta != 0.0 || flags & SWIGLU != 0 {
            prefetch_raw(c, at);
        }
    }

    /// Applies the epilogue to `N` neighboring sums that all lie inside the output, on the CPU.
    ///
    /// # Safety
    /// The caller meets the requirements of [`Epilogue::finish`].
    #[inline(always)]
    pub(in super::super) unsafe fn finish_run<const N: usize>(&self, i: u32, j: u32, mut sum: [f32; N]) {
        let Self { bias, bias_start, c, out, pre, start, ldc, alpha, beta, flags, .. } = *self;
        let at = start + i as usize * ldc as usize + j as usize;
        // SAFETY: a run inside the output lies inside `out`, and inside `c`, `pre` and `bias` where
        // they are used: the contract has checked it.
        unsafe {
            if alpha != 1.0 {
                for sum in &mut sum {
                    *sum *= alpha;
                }
            }
            if !bias.is_empty() {
                let bias = load_run::<N>(bias, bias_start + j as usize);
                for (sum, bias) in sum.iter_mut().zip(bias) {
                    *sum += bias;
                }
            }
            if beta != 0.0 {
                let c = load_run_raw::<N>(c, at);
                for (sum, c) in sum.iter_mut().zip(c) {
                    *sum = GpuFloat::mul_add(beta, c, *sum);
                }
            }
            if flags & STORE_PREACT != 0 {
                store_run(pre, at, sum);
            }
            if flags & GELU != 0 {
                for sum in &mut sum {
                    *sum = math::gelu(*sum);
                }
            } else if flags & SWIGLU != 0 {
                let gates = load_run_raw::<N>(c, at);
                for (sum, gate) in sum.iter_mut().zip(gates) {
                    *sum *= math::silu(gate);
                }
            } else if flags & SILU != 0 {
                for sum in &mut sum {
                    *sum = math::silu(*sum);
                }
            }
            store_run(out, at, sum);
        }
    }
}
