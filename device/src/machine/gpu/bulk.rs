//! Bulk copies: contiguous bytes from global to shared memory, by the copy engine.

use super::shared::Window;
use crate::tile::SharedTile;
use core::arch::asm;

/// If `condition` is true, arrives at the barrier at a byte of shared memory, and starts to copy
/// runs of `length` words, which begin with these words of `x`, one after another into `to`. The
/// barrier's phase ends when all threads have arrived and all bytes have come. Instructions that
/// read operands from shared memory see them without a fence.
///
/// # Safety
/// The barrier is initialized, and one thread's condition is true. The runs lie inside `x` and, one
/// after another, inside `to`. They begin on 16 bytes, and `length` is a multiple of four. Nothing
/// accesses their destination before a wait for the barrier.
#[inline(always)]
pub unsafe fn copy_runs_if<const RUNS: usize>(
    condition: bool,
    barrier: u32,
    to: SharedTile<u32>,
    length: u32,
    x: &[f32],
    from: [usize; RUNS],
) {
    let (barrier, run, condition) = (Window::<u32>::new(barrier, 2).address(), 4 * length, u32::from(condition));
    // No branch: the compiler could copy instructions of the whole warp into one.
    // SAFETY: the function's contract.
    unsafe {
        asm!(
            "{{ .reg .pred %p; setp.ne.u32 %p, {0}, 0;",
            "@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [{1}], {2}; }}",
            in(reg32) condition, in(reg32) barrier, in(reg32) run * RUNS as u32, options(nostack)
        );
        crate::unroll!(at < RUNS => {
            asm!(
                "{{ .reg .pred %p; .reg .u64 %global; setp.ne.u32 %p, {0}, 0; cvta.to.global.u64 %global, {1};",
                "@%p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{2}], [%global], {3}, [{4}]; }}",
                in(reg32) condition, in(reg64) x.as_ptr().wrapping_add(from[at]),
                in(reg32) to.0.address() + at as u32 * run, in(reg32) run, in(reg32) barrier, options(nostack)
            );
        });
    }
}
