//! Bulk copies by the emulator's copy engine, which makes them at once.

use crate::mma::fragments::CHUNK_WORDS;
use crate::tile::SharedTile;
use cuda_std::emulator::mbarrier;

/// If `condition` is true, arrives at the barrier at a byte of shared memory, and copies runs of
/// `length` words, which begin with these words of `x`, one after another into `to`. Race detection
/// sees accesses of the copy engine.
///
/// # Safety
/// See the GPU's version. The emulator checks it.
#[track_caller]
pub unsafe fn copy_runs_if<const RUNS: usize>(
    condition: bool,
    barrier: u32,
    to: SharedTile<u32>,
    length: u32,
    x: &[f32],
    from: [usize; RUNS],
) {
    if !condition {
        return;
    }
    mbarrier::arrive_expecting(barrier, 4 * length * RUNS as u32);
    for (run, from) in (0..).zip(from) {
        mbarrier::bring(barrier, 4 * length, || {
            for word in (0..length).step_by(CHUNK_WORDS as usize) {
                // SAFETY: the words lie inside `x`, on a 16-byte boundary: the function's contract.
                unsafe { to.copy_chunk(run * length + word, x, from + word as usize) };
            }
        });
    }
}
