//! Checksums of words. Checked mode uses them to verify that an upload arrived intact.
//!
//! ```text
//! a warp, a chunk of 4096 words  lane 0         lane 1         ..  lane 31
//!   words                        0, 32, 64, ..  1, 33, 65, ..      31, 63, 95, ..
//!   weights                      1, 65, 129, .. 3, 67, 131, ..     63, 127, 191, ..
//!   then the tree of a warp
//! ```
//! Invariant: the sums are integer sums, the same in any order, so host and device agree for any
//! grid. A chunk's sum changes if any one of its words changes, or if two different words are
//! swapped. All weights differ, and the sum cannot wrap.

use crate::contract;
use crate::vector::{load, store};
use crate::warp::{LANES, combine_lanes};
use cuda_std::{prelude::*, warp};

/// The words of a chunk, which share a sum.
pub const CHUNK: usize = 4096;
/// The threads in a block. Each warp processes one chunk.
const BLOCK: u32 = 256;
const WARPS: usize = (BLOCK / LANES) as usize;

/// Returns the contribution of the word at `index` to the sum of its chunk: the word times `2
/// (index mod CHUNK) + 1`. A whole chunk's sum is below 2^57.
#[inline(always)]
pub fn weighted(index: usize, word: u32) -> u64 {
    word as u64 * (2 * (index % CHUNK) as u64 + 1)
}

/// Computes `out[i]` = low and high word of the sum of [`weighted`] over chunk i of x. Shapes: `x`:
/// `[n]`, `out`: `[ceil(n / CHUNK), 2]`. The masks `first` and `last` select the bits of the first
/// and last word of x that count. An upload may begin and end inside a word. Overwrites `out`.
#[kernel]
pub unsafe fn checksum(x: &[u32], first: u32, last: u32, out: *mut u32) {
    let chunk = thread::block_idx_x() as usize * WARPS + (thread::thread_idx_x() / LANES) as usize;
    let start = chunk * CHUNK;
    if start >= x.len() {
        return;
    }
    let end = if x.len() - start < CHUNK { x.len() } else { start + CHUNK };
    let mut index = start + warp::lane_id() as usize;
    let mut sum = 0;
    // SAFETY: the words lie inside `x`, and the chunk has its elements in `out`. All lanes of the
    // warp have the same chunk and reach this.
    unsafe {
        while index < end {
            let mut word = load(x, index);
            if index == 0 {
                word &= first;
            }
            if index + 1 == x.len() {
                word &= last;
            }
            sum += weighted(index, word);
            index += LANES as usize;
        }
        let sum: u64 = combine_lanes(u32::MAX, LANES, sum, |a, b| a + b);
        if warp::lane_id() == 0 {
            store(out, 2 * chunk, sum as u32);
            store(out, 2 * chunk + 1, (sum >> 32) as u32);
        }
    }
}

// SAFETY: a warp reads the part of its own chunk inside `x`, and writes the chunk's two words of
// `out`. A warp without a chunk returns.
contract! { unsafe checksum { block: BLOCK, align: 4 } |k| {
    Violation::unless_length("out", Size::of(k.x.len()).div_ceil(CHUNK).times(2), k.out.len())?;
    Grid::cover(k.x.len(), WARPS * CHUNK)
}}
