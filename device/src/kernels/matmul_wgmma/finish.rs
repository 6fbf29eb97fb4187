//! The epilogue of a warp's sums: 16 rows of all columns of the tile.
//!
//! The steps are those of [`matmul_bf16`](crate::matmul_bf16). The warp's columns are finished in
//! parts. Parts are staged in shared memory, so that neighboring lanes write whole lines:
//!
//! ```text
//! BF16, 16 x 64     lane 4 g + t: words t of each chunk of rows g, g + 8             staged, swizzled
//!                   lane l: chunk l mod 8 of rows l / 8, + 4, + 8, + 12              16 bytes to memory
//! f32, 16 x 32      lane 4 g + t: half of chunk t / 2 of each pair, rows g, g + 8    staged, swizzled
//!                   lane l: as above
//! ```
//! BF16 outputs whose rows do not begin on 16 bytes are written by
//! [`finish_any`](crate::matmul_bf16::finish::finish_any), without staging.

use crate::block::launder_reg;
use crate::machine::mma::{put_floats, put_words};
use crate::matmul::epilogue::{Epilogue, Places};
use crate::matmul_bf16::finish::{finish_any, finish_whole, is_plain, scale_and_add};
use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::{F4, Part, store_chunk};
use crate::warp::Converged;
use crate::wgmma::CHUNKS;
use cuda_std::warp;
use half::bf16;

/// The mma tiles of a part of BF16 outputs.
const PART: usize = 8;
/// The mma tiles of a part of f32 outputs.
const F32_PART: usize = 4;
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
    const { assert!(TILES.is_multiple_of(PART)) };
    // SAFETY: the contract has accepted the problem.
    unsafe {
        // After each part the next part's sums move into its place. The epilogue is long code, so
        // it is instantiated once.
        macro_rules! parts {
            ($PART:ident, |$first:ident, $now:ident| $finish:expr) => {
                for part in 0..launder_reg((TILES / $PART) as u32) {
                    let mut $now = [[[0.0; 4]; $PART]];
                    unroll_on_gpu!(tile < $PART => { $now[0][tile] = sums[tile]; });
                    let $first = [first[0], first[1] + 8 * $PART as u32 * part];
                    $finish;
                    unroll_on_gpu!(tile < TILES - $PART, at most 32 => { sums[tile] = sums[tile + $PART]; });
                }
            };
        }
        if const { size_of::<S>() == size_of::<f32>() } {
            parts!(F32_PART, |first, now| finish_rows(warp, epilogue, first, now[0], staging));
        } else {
            parts!(EDGE, |first, now| finish_any::<1, EDGE, { EDGE / 2 }, S>(warp, epilogue, first, now));
        }
    }
}

/// Implements [`finish`] for a warp whose outputs all exist, and which begin on 16 bytes. Only the
/// outputs from row and column `new` on are written and, in C, read. Chunks of eight columns are
/// all new or all old. If S is f32 or C is read, so are 16 rows, and parts of 64 columns.
///
/// # Safety
/// The caller meets the requirements of [`finish`].
#[inline(always)]
pub(super) unsafe fn finish_inside<const TILES: usize, S: Stored>(
    warp: Converged,
    epilogue: Epilogue<'_, S>,
    first: [u32; 2],
    new: [u32; 2],
    mut sums: [[f32; 4]; TILES],
    staging: SharedTile<u32>,
) {
    const { assert!(TILES.is_multiple_of(PART)) };
    let Epilogue { start, ldc, flags, out, .. } = epilogue;
    let at = |column: u32| start + first[0] as usize * ldc as usize + column as usize;
    // The old rows and columns of the part from this column on.
    let old = |column: u32| [new[0].saturating_sub(first[0]), new[1].saturating_sub(column)];
    let has_new = |column: u32, width: usize| old(column)[0] < 16 && old(column)[1] < 8 * width as u32;
    // SAFETY: the contract has accepted the problem, all outputs exist, and their rows begin on 16
    // bytes.
    unsafe {
        if is_plain(flags) {
            macro_rules! parts {
                ($PART:ident, |$column:ident, $now:ident| $finish:expr) => {
                    unroll_on_gpu!(part < TILES / $PART => {
                        let $column = first[1] + (8 * $PART * part) as u32;
                        if has_new($column, $PART) {
                            let mut $now = [[[0.0; 4]; $PART]];
                            unroll_on_gpu!(tile < $PART => { $now[0][tile] = sums[part * $PART + tile]; });
                            $finish;
                        }
                    });
                };
            }
            if const { size_of::<S>() == size_of::<bf16>() } {
                parts!(PART, |column, now| {
                    scale_and_add::<1, PART, { PART / 2 }, S>(epilogue, [first[0], column], &mut now);
                    write_rows(warp, staging, now[0], out.cast(), at(column), ldc, old(column));
                });
            } else {
                parts!(F32_PART, |column, now| {
                    let (places, rows) = stage_rows(warp, [first[0], column], now[0], staging);
                    finish_plain(epilogue, places, rows);
                });
            }
            return;
        }
        // After each part the next part's sums move into its place. The epilogue is long code, so
        // it is instantiated once.
        macro_rules! parts {
            ($PART:ident, |$column:ident, $now:ident| $finish:expr) => {
                for part in 0..launder_reg((TILES / $PART) as u32) {
                    let $column = first[1] + 8 * $PART as u32 * part;
                    if has_new($column, $PART) {
                        let mut $now = [[[0.0; 4]; $PART]];
                        unroll_on_gpu!(tile < $PART => { $now[0][tile] = sums[tile]; });
                        $finish;
                    }
                    unroll_on_gpu!(tile < TILES - $PART, at most 32 => { sums[tile] = sums[tile + $PART]; });
                }
            };
        }
        if const { size_of::<S>() == size_of::<bf16>() } {
            parts!(PART, |column, now| {
                finish_whole::<1, PART, { PART / 2 }, S>(epilogue, [first[0], column], now, |of, to, _| {
                    write_rows(warp, staging, of, to, at(column), ldc, old(column));
                });
            });
        } else {
            parts!(F32_PART, |column, now| finish_rows(warp, epilogue, [first[0], column], now[0], staging));
        }
    }
}

/// Applies the epilogue to 16 rows of f32 sums, `F32_PART` mma tiles, and writes them.
///
/// # Safety
/// The caller meets the requirements of [`finish`].
#[inline(always)]
unsafe fn finish_rows<S: Stored>(
    warp: Converged,
    epilogue: Epilogue<'_, S>,
    first: [u32; 2],
    sums: [[f32; 4]; F32_PART],
    staging: SharedTile<u32>,
) {
    let (places, rows) = stage_rows(warp, first, sums, staging);
    // SAFETY: the contract has accepted the problem.
    unsafe { epilogue.finish(places, rows) };
}

/// Moves 16 rows of `F32_PART` mma tiles through the warp's part of shared memory. A lane gets four
/// columns of four rows, so that eight lanes have a line of a row.
#[inline(always)]
fn stage_rows(
    warp: Converged,
    first: [u32; 2],
    sums: [[f32; 4]; F32_PART],
    staging: SharedTile<u32>,
) -> (Places<1>, [[F4; 1]; 4]) {
    const { assert!(F32_PART as u32 * 2 == CHUNKS) };
    // The compiler would keep the addresses in registers throughout the products.
    let lane = launder_reg(warp::lane_id());
    sync_lanes(warp);
    unroll_on_gpu!(pair < F32_PART / 2 => {
        put_floats(staging, CHUNKS, pair as u32, [sums[2 * pair], sums[2 * pair + 1]]);
    });
    sync_lanes(warp);
    let mut rows = [[F4::splat(0.0)]; 4];
    unroll_on_gpu!(pass < 4 => {
        let chunk = staging.chunk(swizzled(CHUNKS, 4 * pass as u32 + lane / 8, lane % 8) * CHUNK_WORDS);
        rows[pass] = [F4(chunk.map(f32::from_bits))];
    });
    let columns = [first[1] + lane % 8 * F4::LEN as u32];
    (Places { row: first[0] + lane / 8, apart: 4, columns, width: F4::LEN as u32 }, rows)
}

/// Implements [`Epilogue::finish`] without an activation, for outputs that exist, in vectors.
///
/// # Safety
/// The contract has accepted the problem, and the outputs exist.
#[inline(always)]
unsafe fn finish_plain<S: Stored>(epilogue: Epilogue<'_, S>, places: Places<1>, mut rows: [[F4; 1]; 4]) {
    let Epilogue { bias, bias_start, c, out, start, ldc, alpha, beta, .. } = epilogue;
    let column = places.columns[0] as usize;
    let at = |row: usize| start + (places.row as usize + 4 * row) * ldc as usize + column;
    // SAFETY: the outputs exist, so the contract has checked that they lie in `out`, and in `bias`
    // and `c` where they are used.
    unsafe {
        if alpha != 1.0 {
            unroll_on_gpu!(row < 4 => { rows[row][0] = rows[row][0] * F4::splat(alpha); });
        }
        if !bias.is_empty() {
            let biases = F4::load_part(bias, bias_start + column, Part::Whole, 0.0);
            unroll_on_gpu!(row < 4 => { rows[row][0] = rows[row][0] + biases; });
        }
        if beta != 0.0 {
            let mut old = [F4::splat(0.0); 4];
            unroll_on_gpu!(row < 4 => { old[row] = F4::load_part_raw(c, at(row), Part::Whole, 0.0); });
            unroll_on_gpu!(row < 4 => { rows[row][0] = rows[row][0].fma(F4::splat(beta), old[row]); });
        }
        unroll_on_gpu!(row < 4 => { rows[row][0].store_part(out, at(row), Part::Whole); });
    }
}

/// Rounds 16 rows of `TILES` mma tiles and writes them to `out`, whose first row begins at `at`,
/// through the warp's part of shared memory. The first `old` rows and columns are not written.
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
    old: [u32; 2],
) {
    let chunks = TILES as u32;
    // The compiler would keep the addresses in registers throughout the products.
    let lane = launder_reg(warp::lane_id());
    sync_lanes(warp);
    unroll_on_gpu!(pair < TILES / 2 => {
        put_words(staging, chunks, pair as u32, [sums[2 * pair], sums[2 * pair + 1]]);
    });
    sync_lanes(warp);
    let place = |pass: usize| [pass as u32 * (32 / chunks) + lane / chunks, lane % chunks];
    // All reads first. Without checks in between, the writes are issued together.
    let mut words = [[0; 4]; TILES];
    unroll_on_gpu!(pass < TILES / 2 => {
        let [row, chunk] = place(pass);
        words[pass] = staging.chunk(swizzled(chunks, row, chunk) * CHUNK_WORDS);
    });
    macro_rules! write {
        (|$row:ident, $chunk:ident| $condition:expr) => {
            unroll_on_gpu!(pass < TILES / 2 => {
                let [$row, $chunk] = place(pass);
                if $condition {
                    let index = at + $row as usize * ldc as usize + (8 * $chunk) as usize;
                    // SAFETY: the elements may be written, on a 16-byte boundary.
                    unsafe { store_chunk(out, index, words[pass]) };
                }
            });
        };
    }
    if old == [0; 2] {
        write!(|row, chunk| true);
    } else {
        write!(|row, chunk| old[0] <= row && old[1] <= 8 * chunk);
    }
}

/// Orders the accesses of the warp's lanes to shared memory.
#[inline(always)]
fn sync_lanes(_: Converged) {
    // SAFETY: the token shows that all lanes of the warp execute this.
    unsafe { warp::sync_warp(u32::MAX) };
}
