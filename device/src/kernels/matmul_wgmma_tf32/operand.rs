//! A block's operand A, on its way from shared memory to registers.
//!
//! Along k, a warp has 16 neighboring rows of a stage, which it reads by `ldmatrix`. Across k, a
//! stage has panels of 32 rows, each 32 k of 128 bytes, in swizzled chunks of four rows. A warp has
//! 16 rows of a panel, in two runs of eight, so that lanes read their words from all 32 banks:
//!
//! ```text
//! chunk of k 0..3     0          1          2          3          4          5     ..
//! rows                0..3       4..7       8..11      12..15     16..19     20..23
//! warp                even       even       odd        odd        even       even
//! lanes 4 g + t, g    0, 1       4, 5       0, 1       4, 5       2, 3       6, 7
//! ```
//! A lane reads rows 2 x and 2 x + 1 at once, which are the instruction's rows g and g + 8.

use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::warp::Converged;
use crate::wgmma::{CHUNKS, ROW_WORDS};
use cuda_std::warp;

/// The k of a stage: a row of 128 bytes.
pub(super) const DEPTH: u32 = ROW_WORDS;
/// The rows of a panel of A.
const PANEL: u32 = 32;

/// Returns the first of the rows of the tile that a warp multiplies, and the number of rows from
/// this one to its last.
#[inline(always)]
pub(super) fn rows_of<const ALONG: bool>(warp: u32) -> [u32; 2] {
    if ALONG { [16 * warp, 16] } else { [warp / 2 * PANEL + warp % 2 * 8, 24] }
}

/// Returns the distance of a warp's run of four rows from its first row.
#[inline(always)]
pub(super) fn run<const ALONG: bool>(number: u32) -> u32 {
    if ALONG { 4 * number } else { number % 2 * 4 + number / 2 * 16 }
}

/// Returns the instruction's row that has a row of a warp's run.
#[inline(always)]
pub(super) fn staged_row<const ALONG: bool>(number: u32, row: u32) -> u32 {
    if ALONG { 4 * number + row } else { number % 2 * 4 + number / 2 * 2 + row / 2 + row % 2 * 8 }
}

/// Reads a lane's words of A for two instructions, 16 k from `first_k` of the stage on: its
/// elements t and t + 4 along k, in the instruction's rows g and g + 8 of a warp's.
#[inline(always)]
#[track_caller]
pub(super) fn fragments<const ALONG: bool>(
    converged: Converged,
    stage: SharedTile<u32>,
    warp: u32,
    first_k: u32,
) -> [[u32; 4]; 2] {
    let lane = warp::lane_id();
    let (g, t) = (lane / 4, lane % 4);
    let chunk = warp % 2 * 2 + g / 2 % 2 * 4 + g / 4;
    let mut fragments = [[0; 4]; 2];
    unroll_on_gpu!(step < 2 => {
        let first_k = first_k + 8 * step as u32;
        if ALONG {
            let place = swizzled(CHUNKS, 16 * warp + lane % 16, first_k / CHUNK_WORDS + lane / 16);
            fragments[step] = stage.matrices(converged.again(), place * CHUNK_WORDS, false);
        } else {
            unroll_on_gpu!(half < 2 => {
                let k = first_k + 4 * half as u32 + t;
                let at = warp / 2 * PANEL * DEPTH + swizzled(CHUNKS, k, chunk) * CHUNK_WORDS + g % 2 * 2;
                [fragments[step][2 * half], fragments[step][2 * half + 1]] = stage.pair(at);
            });
        }
    });
    fragments
}
