//! Copies of kernels with a bug planted in their use of shared memory, and two sound ones.

use cuda_std::{GpuFloat, prelude::*, warp};
use kernels::block::{BLOCK, CHUNK, REDUCTION_BYTES, chunk_fold};
use kernels::contract;
use kernels::tile::SharedTile;
use kernels::vector::{F4, load, store};
use kernels::warp::{LANES, add, combine_lanes, sum4};

/// A copy of `block_combine`, with a barrier if `BARRIER` is set.
#[inline(always)]
unsafe fn combine<const BARRIER: bool>(tile: SharedTile<f32>, value: f32) -> f32 {
    // SAFETY: whole warps.
    let value = unsafe { combine_lanes(u32::MAX, LANES, value, add) };
    if warp::lane_id() == 0 {
        tile.set(thread::thread_idx_x() / LANES, value);
    }
    if BARRIER {
        thread::sync_threads();
    }
    let mut total = tile.get(0);
    let mut at = 1;
    while at < BLOCK / LANES {
        total += tile.get(at);
        at += 1;
    }
    total
}

/// A copy of `sum_all` whose warps do not wait for each other's sums.
#[kernel]
pub(crate) unsafe fn missing_barrier(x: &[f32], out: *mut f32) {
    // SAFETY: as in `sum_all`.
    unsafe {
        let sum = chunk_fold(x, F4::splat(0.0), 0.0, add);
        let total = combine::<false>(SharedTile::new(0, REDUCTION_BYTES / 4), sum4(sum));
        if thread::thread_idx_x() == 0 {
            store(out, thread::block_idx_x() as usize, total);
        }
    }
}

/// Computes sum and sum of squares through one tile, without a barrier before the tile is reused.
#[kernel]
pub(crate) unsafe fn missing_last_barrier(x: &[f32], out: *mut f32) {
    // SAFETY: as in `sum_all`; two places per block.
    unsafe {
        let tile = SharedTile::new(0, REDUCTION_BYTES / 4);
        let sum = chunk_fold(x, F4::splat(0.0), 0.0, add);
        let squares = chunk_fold(x, F4::splat(0.0), 0.0, |sum, x| GpuFloat::mul_add(x, x, sum));
        let sum = combine::<true>(tile, sum4(sum));
        let squares = combine::<true>(tile, sum4(squares));
        if thread::thread_idx_x() == 0 {
            store(out, 2 * thread::block_idx_x() as usize, sum);
            store(out, 2 * thread::block_idx_x() as usize + 1, squares);
        }
    }
}

macro_rules! pairwise {
    ($($(#[$doc:meta])* $name:ident: $lane:ident => { $($between:tt)* };)*) => {$(
        $(#[$doc])*
        #[kernel]
        pub(crate) unsafe fn $name(x: &[f32], out: *mut f32) {
            let ($lane, index) = (warp::lane_id(), thread::index_1d() as usize);
            // SAFETY: the contract checks both lengths; all lanes meet.
            unsafe {
                let tile = SharedTile::<f32>::new(0, 64);
                let own = thread::thread_idx_x();
                tile.set(own, load(x, index));
                $($between)*
                store(out, index, tile.get(own ^ 1) + tile.get(own));
            }
        }
        // SAFETY: each thread has its own element of `x` and of `out`, which are whole blocks of
        // 64; the tile fills the shared memory.
        contract! { unsafe $name { block: 64, shared: 256 } |k| {
            Violation::unless(k.x.len().is_multiple_of(64), "x", "a multiple of 64 elements", k.x.len())?;
            Violation::unless_length("out", k.x.len(), k.out.len())?;
            Grid::cover(k.x.len(), 64)
        }}
    )*};
}

pairwise! {
    /// A sound kernel: each thread adds its neighbour's value after the warp has synchronised.
    sound_warp_sync: lane => { warp::sync_warp(if lane < 16 { 0xffff } else { 0xffff_0000 }); };
    /// Each thread adds its neighbour's value, and the lanes do not wait for each other.
    missing_warp_sync: _lane => {};
    /// A shuffle replaces the synchronisation: it moves values, and orders no memory.
    shuffle_as_fence: lane => { let _ = warp::warp_shuffle_xor(u32::MAX, lane, 1, 32); };
}

/// The tokens of an attention matrix.
const TOKENS: u32 = 8;

macro_rules! attention {
    ($($(#[$doc:meta])* $name:ident: |$i:ident, $j:ident| $place:expr, staged from $first:literal;)*) => {$(
        $(#[$doc])*
        #[kernel]
        pub(crate) unsafe fn $name(x: &[f32], out: *mut f32) {
            let thread = thread::thread_idx_x();
            // SAFETY: the contract checks both lengths.
            unsafe {
                let pairs = SharedTile::<f32>::new(0, TOKENS * TOKENS);
                if thread + 1 > $first {
                    pairs.set(thread, load(x, thread as usize));
                }
                thread::sync_threads();
                if thread < TOKENS {
                    let ($i, mut $j) = (thread, 0);
                    while $j < TOKENS {
                        let exp = kernels::math::exp(pairs.get($i * TOKENS + $j));
                        pairs.set($place, exp);
                        $j += 1;
                    }
                }
                thread::sync_threads();
                store(out, thread as usize, pairs.get(thread));
            }
        }
        // SAFETY: one block of 64 threads, each with its own element of `x` and `out`; the tile
        // fills the shared memory.
        contract! { unsafe $name { block: TOKENS * TOKENS, shared: TOKENS * TOKENS * 4 } |k| {
            Violation::unless_length("x", 64, k.x.len())?;
            Violation::unless_length("out", 64, k.out.len())?;
            Grid::new(1, 1, 1)
        }}
    )*};
}

attention! {
    /// A sound kernel: the exponentials of the scores, one row per thread, as in
    /// `attention_forward`.
    sound_rows: |i, j| i * TOKENS + j, staged from 0;
    /// Swaps row and column when the scores are written back.
    swapped_index: |i, j| j * TOKENS + i, staged from 0;
    /// The first score is never staged.
    unwritten_shared: |i, j| i * TOKENS + j, staged from 1;
}

/// The floats of one stage of [`double_buffer_index`].
const STAGE: u32 = 64;

/// Sums 64 columns, staged through two buffers as in `matmul`, but never switches the buffer.
#[kernel]
pub(crate) unsafe fn double_buffer_index(x: &[f32], depths: u32, out: *mut f32) {
    let thread = thread::thread_idx_x();
    let mut sum = 0.0;
    let stage = 0;
    let mut depth = 0;
    // SAFETY: the contract checks both lengths; two stages fill the shared memory.
    unsafe {
        while depth < depths {
            let tile = SharedTile::<f32>::new(stage * STAGE * 4, STAGE);
            tile.set(thread, load(x, (depth * STAGE + thread) as usize));
            thread::sync_threads();
            sum += tile.get(STAGE - 1 - thread);
            depth += 1;
        }
        store(out, thread as usize, sum);
    }
}

// SAFETY: one block, with as many threads as a depth has elements; `x` has `depths` of them, `out`
// one.
contract! { unsafe double_buffer_index { block: STAGE, shared: 2 * STAGE * 4 } |k| {
    Violation::unless_length("x", Size::of(k.depths).times(STAGE), k.x.len())?;
    Violation::unless_length("out", STAGE as usize, k.out.len())?;
    Grid::new(1, 1, 1)
}}

// SAFETY: a block reads its own chunk of `x` and writes the element that `out` has for it.
contract! { unsafe missing_barrier { block: BLOCK, shared: REDUCTION_BYTES } |k| {
    Violation::unless_length("out", k.x.len().div_ceil(CHUNK), k.out.len())?;
    Grid::cover(k.x.len(), CHUNK)
}}

// SAFETY: a block reads its own chunk of `x` and writes the two elements that `out` has for it.
contract! { unsafe missing_last_barrier { block: BLOCK, shared: REDUCTION_BYTES } |k| {
    Violation::unless_length("out", Size::of(k.x.len()).div_ceil(CHUNK).times(2), k.out.len())?;
    Grid::cover(k.x.len(), CHUNK)
}}
