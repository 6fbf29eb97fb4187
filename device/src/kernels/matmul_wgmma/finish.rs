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
//! Outputs whose rows do not begin on 16 bytes are written in parts of 16 columns. If rows begin on
//! four elements or an activation follows, [`finish_any`](crate::matmul_bf16::finish::finish_any)
//! writes those of BF16 without staging. The others are staged as f32, and sixteen lanes write a
//! row of a part, element by element.

use crate::block::{launder_index, launder_reg};
use crate::machine::mma::{put_floats, put_words};
use crate::matmul::epilogue::{Epilogue, Places};
use crate::matmul_bf16::finish::{finish_any, finish_whole, is_plain, read_row, reads_c, scale_and_add};
use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::{F4, VectorPart, load, load_raw, store, store_chunk};
use crate::warp::Converged;
use crate::wgmma::CHUNKS;
use cuda_std::{GpuFloat, warp};
use half::bf16;

/// The unit, in elements, on which rows of whole parts begin: 16 bytes of BF16.
const CHUNK: usize = 8;
/// The mma tiles of a part of BF16 outputs.
const PART: usize = 8;
/// The mma tiles of a part of BF16 outputs that an activation follows, which needs more registers.
const LONG: usize = 4;
/// The mma tiles of a part of f32 outputs.
const F32_PART: usize = 4;
/// The mma tiles of a part of BF16 outputs at an edge, which needs the most registers, and the
/// chunks of its f32 rows.
const EDGE: usize = 2;
const EDGE_CHUNKS: u32 = 4;

/// Applies the epilogue to a warp's sums and writes them. `first` is the warp's first row and
/// column.
///
/// # Safety
/// The contract has accepted the problem. `staging` is the warp's own. Parts use it alternately, so
/// that the next part is staged while lanes still read this one.
#[inline(always)]
pub(super) unsafe fn finish<const TILES: usize, S: Stored>(
    warp: Converged,
    epilogue: Epilogue<'_, S>,
    first: [u32; 2],
    sums: [[f32; 4]; TILES],
    staging: [SharedTile<u32>; 2],
) {
    const { assert!(TILES.is_multiple_of(PART)) };
    let Epilogue { bias, bias_start, start, m, n, ldc, flags, out, .. } = epilogue;
    let at = |column: u32| start + first[0] as usize * ldc as usize + column as usize;
    let is_aligned =
        (start | ldc as usize).is_multiple_of(CHUNK) && (bias.is_empty() || bias_start.is_multiple_of(CHUNK));
    // True if four columns of a row are one access.
    let has_fours = (start | ldc as usize).is_multiple_of(F4::LEN);
    // The columns whose 16 rows all exist and begin on 16 bytes.
    let whole = if is_aligned && first[0] + 16 <= m { n - first[1] } else { 0 };
    // SAFETY: the contract has accepted the problem. Outputs below `whole` exist, and their rows
    // begin on 16 bytes.
    unsafe {
        if is_plain(flags) && whole >= 8 * TILES as u32 {
            macro_rules! parts {
                ($PART:ident, |$part:ident, $column:ident, $now:ident| $finish:expr) => {
                    unroll_on_gpu!($part < TILES / $PART => {
                        let $column = first[1] + (8 * $PART * $part) as u32;
                        let mut $now = [[[0.0; 4]; $PART]];
                        unroll_on_gpu!(tile < $PART => { $now[0][tile] = sums[$part * $PART + tile]; });
                        $finish;
                    });
                };
            }
            if const { size_of::<S>() == size_of::<bf16>() } {
                parts!(PART, |part, column, now| {
                    scale_and_add::<1, PART, { PART / 2 }, S>(epilogue, [first[0], column], &mut now);
                    write_rows(warp, staging[part % 2], part == 0, now[0], out.cast(), at(column), ldc);
                });
            } else {
                parts!(F32_PART, |part, column, now| {
                    let (places, rows) = stage_rows(warp, staging[part % 2], part == 0, [first[0], column], now[0]);
                    finish_plain(epilogue, places, rows);
                });
            }
            return;
        }
        // The epilogue is long code, so it is instantiated once. A branch selects the sums of a
        // part: moving all sums down would take more instructions.
        macro_rules! parts {
            ($PART:ident while |$column:ident| $exists:expr, |$now:ident| $finish:expr) => {
                while $exists {
                    let mut $now = [[[0.0; 4]; $PART]];
                    let number = ($column - first[1]) / (8 * $PART as u32);
                    unroll_on_gpu!(part < TILES / $PART, at most 16 => {
                        if number == part as u32 {
                            unroll_on_gpu!(tile < $PART => { $now[0][tile] = sums[part * $PART + tile]; });
                            // Without this, the compiler would select all parts, one after another.
                            $now[0][0][0] = f32::from_bits(launder_reg($now[0][0][0].to_bits()));
                        }
                    });
                    $finish;
                    $column = launder_reg($column + 8 * $PART as u32);
                }
            };
        }
        let mut column = first[1];
        let end = if first[0] < m { n.min(first[1] + 8 * TILES as u32) } else { 0 };
        if const { size_of::<S>() == size_of::<bf16>() } {
            let end_of_whole = end.min(first[1] + whole);
            let exists = |column: u32| column + 8 * LONG as u32 <= end_of_whole;
            // C at the part that follows, which is read while this one is computed.
            let read = |column: u32| {
                let mut words = [[0; 2]; LONG];
                if reads_c(flags) && exists(column) {
                    words = read_row::<1, LONG, { LONG / 2 }, S>(&epilogue, [first[0], column], 0);
                }
                words
            };
            let mut next = read(column);
            parts!(LONG while |column| exists(column), |now| {
                let inputs = next;
                next = read(column + 8 * LONG as u32);
                finish_whole::<1, LONG, { LONG / 2 }, S>(epilogue, [first[0], column], now, || inputs, |of, to, _| {
                    write_rows(warp, staging[0], true, of, to, at(column), ldc);
                });
            });
            if is_plain(flags) && !has_fours {
                parts!(EDGE while |column| column < end, |now| {
                    finish_columns(warp, epilogue, [first[0], column], now[0], staging[0]);
                });
                return;
            }
            parts!(EDGE while |column| column < end, |now| {
                finish_any::<1, EDGE, { EDGE / 2 }, S>(warp, epilogue, [first[0], column], now);
            });
        } else {
            if is_plain(flags) && !has_fours {
                parts!(EDGE while |column| column < end, |now| {
                    finish_columns(warp, epilogue, [first[0], column], now[0], staging[0]);
                });
                return;
            }
            parts!(F32_PART while |column| column < end, |now| {
                finish_rows(warp, epilogue, [first[0], column], now[0], staging[0]);
            });
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
    let (places, rows) = stage_rows(warp, staging, true, first, sums);
    // SAFETY: the contract has accepted the problem.
    unsafe { epilogue.finish(places, rows) };
}

/// Applies the epilogue without an activation to 16 rows of two mma tiles, and writes those that
/// exist. Sixteen lanes have a row, so that their accesses are adjacent wherever it begins.
///
/// # Safety
/// The caller meets the requirements of [`finish`].
#[inline(always)]
unsafe fn finish_columns<S: Stored>(
    warp: Converged,
    epilogue: Epilogue<'_, S>,
    first: [u32; 2],
    sums: [[f32; 4]; EDGE],
    staging: SharedTile<u32>,
) {
    const { assert!(EDGE == 2) };
    let Epilogue { bias, bias_start, c, out, start, m, n, ldc, alpha, beta, .. } = epilogue;
    // The compiler would keep what follows from these in registers throughout the products.
    let (lane, ldc) = (launder_reg(warp::lane_id()), launder_reg(ldc));
    sync_lanes(warp);
    put_floats(staging, EDGE_CHUNKS, 0, lane, sums);
    sync_lanes(warp);
    let [row, column] = [first[0] + lane / 16, first[1] + lane % 16];
    let mut values = [0.0; 8];
    unroll_on_gpu!(pair < 8 => {
        let chunk = swizzled(EDGE_CHUNKS, 2 * pair as u32 + lane / 16, lane % 16 / CHUNK_WORDS);
        values[pair] = f32::from_bits(staging.get(chunk * CHUNK_WORDS + lane % CHUNK_WORDS));
    });
    let rows = if column < n && row < m { launder_reg(m - row) as usize } else { 0 };
    let first_place = start + row as usize * ldc as usize + column as usize;
    // Advanced step by step, so that one register holds the index for all rows.
    macro_rules! for_each {
        (|$pair:ident, $at:ident| $body:expr) => {
            let mut $at = launder_index(first_place);
            unroll_on_gpu!($pair < 8 => {
                if 2 * $pair < rows {
                    $body
                }
                $at = launder_index($at.wrapping_add(2 * ldc as usize));
            });
        };
    }
    // SAFETY: the outputs exist, so the contract has checked that they lie in `out`, and in `bias`
    // and `c` where they are used.
    unsafe {
        if alpha != 1.0 {
            unroll_on_gpu!(pair < 8 => { values[pair] *= alpha; });
        }
        if !bias.is_empty() && rows > 0 {
            let bias = load(bias, bias_start + column as usize);
            unroll_on_gpu!(pair < 8 => { values[pair] += bias; });
        }
        if beta != 0.0 {
            for_each!(|pair, at| values[pair] = GpuFloat::mul_add(beta, load_raw(c, at).widen(), values[pair]));
        }
        for_each!(|pair, at| store(out, at, S::narrow(values[pair])));
    }
}

/// Moves 16 rows of `F32_PART` mma tiles through the warp's part of shared memory. A lane gets four
/// columns of four rows, so that eight lanes have a line of a row. Other lanes may still read that
/// memory if `is_read`.
#[inline(always)]
fn stage_rows(
    warp: Converged,
    staging: SharedTile<u32>,
    is_read: bool,
    first: [u32; 2],
    sums: [[f32; 4]; F32_PART],
) -> (Places<1>, [[F4; 1]; 4]) {
    let lane = put_rows(warp, staging, is_read, sums);
    let mut rows = [[F4::splat(0.0)]; 4];
    unroll_on_gpu!(pass < 4 => {
        let chunk = staging.chunk(swizzled(CHUNKS, 4 * pass as u32 + lane / 8, lane % 8) * CHUNK_WORDS);
        rows[pass] = [F4(chunk.map(f32::from_bits))];
    });
    let columns = [first[1] + lane % 8 * F4::LEN as u32];
    (Places { row: first[0] + lane / 8, apart: 4, columns, width: F4::LEN as u32 }, rows)
}

/// Writes 16 rows of `F32_PART` mma tiles to the warp's part of shared memory, which other lanes
/// may still read if `is_read`. Returns the lane's number.
#[inline(always)]
fn put_rows(warp: Converged, staging: SharedTile<u32>, is_read: bool, sums: [[f32; 4]; F32_PART]) -> u32 {
    const { assert!(F32_PART as u32 * 2 == CHUNKS) };
    // The compiler would keep the addresses in registers throughout the products.
    let lane = launder_reg(warp::lane_id());
    if is_read {
        sync_lanes(warp);
    }
    unroll_on_gpu!(pair < F32_PART / 2 => {
        put_floats(staging, CHUNKS, pair as u32, lane, [sums[2 * pair], sums[2 * pair + 1]]);
    });
    sync_lanes(warp);
    lane
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
            let biases = F4::load_part(bias, bias_start + column, VectorPart::Whole, 0.0);
            unroll_on_gpu!(row < 4 => { rows[row][0] = rows[row][0] + biases; });
        }
        if beta != 0.0 {
            let mut old = [F4::splat(0.0); 4];
            unroll_on_gpu!(row < 4 => { old[row] = F4::load_part_raw(c, at(row), VectorPart::Whole, 0.0); });
            unroll_on_gpu!(row < 4 => { rows[row][0] = rows[row][0].fma(F4::splat(beta), old[row]); });
        }
        unroll_on_gpu!(row < 4 => { rows[row][0].store_part(out, at(row), VectorPart::Whole); });
    }
}

/// Rounds 16 rows of `TILES` mma tiles and writes them to `out`, whose first row begins at `at`,
/// through the warp's part of shared memory, which other lanes may still read if `is_read`.
///
/// # Safety
/// The elements may be written, and rows begin on 16 bytes.
#[inline(always)]
unsafe fn write_rows<const TILES: usize>(
    warp: Converged,
    staging: SharedTile<u32>,
    is_read: bool,
    sums: [[f32; 4]; TILES],
    out: *mut bf16,
    at: usize,
    ldc: u32,
) {
    let chunks = TILES as u32;
    // The compiler would keep the addresses in registers throughout the products.
    let lane = launder_reg(warp::lane_id());
    if is_read {
        sync_lanes(warp);
    }
    unroll_on_gpu!(pair < TILES / 2 => {
        put_words(staging, chunks, pair as u32, lane, [sums[2 * pair], sums[2 * pair + 1]]);
    });
    sync_lanes(warp);
    let (row, chunk) = (lane / chunks, lane % chunks);
    let first = swizzled(chunks, row, chunk);
    // All reads first. Without checks in between, the writes are issued together.
    let mut words = [[0; 4]; TILES];
    unroll_on_gpu!(pass < TILES / 2 => {
        // The swizzle is an xor. With eight chunks, it differs in the rows of every second pass.
        let flipped = if chunks == 8 { 4 * (pass as u32 % 2) } else { 0 };
        words[pass] = staging.chunk(((first ^ flipped) + 32 * pass as u32) * CHUNK_WORDS);
    });
    let mut index = at + row as usize * ldc as usize + (8 * chunk) as usize;
    unroll_on_gpu!(pass < TILES / 2 => {
        // SAFETY: the elements may be written, on a 16-byte boundary.
        unsafe { store_chunk(out, index, words[pass]) };
        index += (32 / chunks) as usize * ldc as usize;
    });
}

/// Orders the accesses of the warp's lanes to shared memory.
#[inline(always)]
fn sync_lanes(_: Converged) {
    // SAFETY: the token shows that all lanes of the warp execute this.
    unsafe { warp::sync_warp(u32::MAX) };
}
