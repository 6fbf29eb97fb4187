//! The epilogue of a warp's sums: 16 rows of all columns of the tile.
//!
//! The steps are those of [`matmul_bf16`](crate::matmul_bf16). The warp's columns are finished in
//! parts. Rows of BF16 that begin on 16 bytes are staged in shared memory, so that neighboring
//! lanes write whole lines:
//!
//! ```text
//! a part, 16 x 64     lane 4 g + t: words t of each chunk of rows g, g + 8    staged, swizzled
//!                     lane l: chunk l mod 8 of rows l / 8, + 4, + 8, + 12     16 bytes to memory
//! ```

use crate::block::launder_reg;
use crate::machine::mma::put_words;
use crate::matmul::epilogue::Epilogue;
use crate::matmul_bf16::finish::{finish_any, finish_whole, is_plain, scale_and_add};
use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::store_chunk;
use crate::warp::Converged;
use cuda_std::warp;
use half::bf16;

/// The mma tiles of a part that is only stored.
const PLAIN: usize = 8;
/// The mma tiles of a part with an activation, or at an edge. Its code is long, so it has fewer.
const PART: usize = 4;
/// The mma tiles of a part of BF16 outputs at an edge, which needs the most registers.
const EDGE: usize = 2;

/// Applies the epilogue to a warp's sums and writes them. `first` is the warp's first row and
/// column.
///
/// # Safety
/// The contract has accepted the problem. `staging` is the warp's own.
#[inline(always)]
pub(super) unsafe fn finish<const TILES: usize, S: Stored>(
    warp: Converged,
    epilogue: Epilogue<'_, S>,
    first: [u32; 2],
    mut sums: [[f32; 4]; TILES],
    staging: SharedTile<u32>,
) {
    const { assert!(TILES.is_multiple_of(PLAIN)) };
    let Epilogue { start, ldc, flags, out, .. } = epilogue;
    let is_whole = const { size_of::<S>() == size_of::<bf16>() }
        && epilogue.has_whole(first, [16, 8 * TILES as u32])
        && (start | ldc as usize).is_multiple_of(8);
    let at = |column: u32| start + first[0] as usize * ldc as usize + (first[1] + column) as usize;
    // SAFETY: the contract has accepted the problem. If it is whole, all outputs exist, they are
    // BF16, and their rows begin on 16 bytes.
    unsafe {
        if is_whole && is_plain(flags) {
            unroll_on_gpu!(part < TILES / PLAIN => {
                let mut now = [[[0.0; 4]; PLAIN]];
                unroll_on_gpu!(tile < PLAIN => { now[0][tile] = sums[part * PLAIN + tile]; });
                let column = (8 * PLAIN * part) as u32;
                scale_and_add::<1, PLAIN, { PLAIN / 2 }, S>(epilogue, [first[0], first[1] + column], &mut now);
                write_rows(warp, staging, now[0], out.cast(), at(column), ldc);
            });
            return;
        }
        // After each part the next part's sums move into its place. The epilogue is long code, so
        // it is instantiated once.
        macro_rules! parts {
            ($PART:ident, |$column:ident, $first:ident, $now:ident| $finish:expr) => {
                for part in 0..launder_reg((TILES / $PART) as u32) {
                    let mut $now = [[[0.0; 4]; $PART]];
                    unroll_on_gpu!(tile < $PART => { $now[0][tile] = sums[tile]; });
                    let $column = 8 * $PART as u32 * part;
                    let $first = [first[0], first[1] + $column];
                    $finish;
                    unroll_on_gpu!(tile < TILES - $PART, at most 32 => { sums[tile] = sums[tile + $PART]; });
                }
            };
        }
        if is_whole {
            parts!(PART, |column, first, now| {
                finish_whole::<1, PART, { PART / 2 }, S>(epilogue, first, now, |of, to, _| {
                    write_rows(warp, staging, of, to, at(column), ldc);
                });
            });
        } else if const { size_of::<S>() == size_of::<bf16>() } {
            parts!(EDGE, |column, first, now| finish_any::<1, EDGE, { EDGE / 2 }, S>(warp, epilogue, first, now));
        } else {
            parts!(PART, |column, first, now| finish_any::<1, PART, { PART / 2 }, S>(warp, epilogue, first, now));
        }
    }
}

/// Rounds 16 rows of `TILES` mma tiles and writes them to `out`, whose first row begins at `at`,
/// through the warp's part of shared memory.
///
/// # Safety
/// The elements may be written, and rows begin on 16 bytes.
#[inline(always)]
unsafe fn write_rows<const TILES: usize>(
    warp: Converged,
    staging: SharedTile<u32>,
    sums: [[f32; 4]; TILES],
    out: *mut bf16,
    at: usize,
    ldc: u32,
) {
    let chunks = TILES as u32;
    // The compiler would keep the addresses in registers throughout the products.
    let lane = launder_reg(warp::lane_id());
    sync_lanes(warp);
    unroll_on_gpu!(pair < TILES / 2 => {
        put_words(staging, chunks, pair as u32, [sums[2 * pair], sums[2 * pair + 1]]);
    });
    sync_lanes(warp);
    unroll_on_gpu!(pass < TILES / 2 => {
        let row = pass as u32 * (32 / chunks) + lane / chunks;
        let chunk = staging.chunk(swizzled(chunks, row, lane % chunks) * CHUNK_WORDS);
        // SAFETY: the elements may be written, on a 16-byte boundary.
        unsafe { store_chunk(out, at + row as usize * ldc as usize + (lane % chunks * 8) as usize, chunk) };
    });
}

/// Orders the accesses of the warp's lanes to shared memory.
#[inline(always)]
fn sync_lanes(_: Converged) {
    // SAFETY: the token shows that all lanes of the warp execute this.
    unsafe { warp::sync_warp(u32::MAX) };
}
