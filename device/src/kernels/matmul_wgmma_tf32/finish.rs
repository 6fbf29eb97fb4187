//! The epilogue of a warp's sums: 16 rows of all columns of the tile.
//!
//! Sums are staged in shared memory in parts of 32 columns, so that neighboring lanes write
//! contiguous bytes. If the operands are swapped, the tile is transposed: its rows are columns of
//! the output. Then a lane reads words of four staged rows, and four lanes write 64 bytes, or twice
//! 32 bytes if A is stored across k.
//!
//! Invariant: the steps and their order are those of every kernel's [`Epilogue`].

use super::operand::{run, staged_row};
use crate::block::launder_reg;
use crate::machine::mma::put_floats;
use crate::matmul::epilogue::{Epilogue, Places};
use crate::matmul_bf16::finish::is_plain;
use crate::matmul_wgmma::tile::{STAGING_LEN, Tile};
use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::{F4, VectorPart};
use crate::warp::Converged;
use crate::wgmma::CHUNKS;
use cuda_std::warp;

/// The mma tiles of a part, and its columns.
const TILES_OF_PART: usize = 4;
const PART: u32 = 8 * TILES_OF_PART as u32;

/// Applies the epilogue to a warp's sums and writes them. `first` is the warp's first row and
/// column in the order of the tiles, which is that of the output unless `is_swapped`. From its
/// first row to its last there are `height` rows. `number` is the warp's among those that multiply.
///
/// # Safety
/// The contract has accepted the problem.
#[inline(always)]
pub(super) unsafe fn finish<const ALONG: bool, const TILES: usize>(
    warp: Converged,
    epilogue: Epilogue<'_, f32>,
    [row, column]: [u32; 2],
    height: u32,
    mut sums: [[f32; 4]; TILES],
    tile: Tile,
    number: u32,
    is_swapped: bool,
) {
    const { assert!(TILES.is_multiple_of(TILES_OF_PART)) };
    // SAFETY: the warps' parts follow the stages in the shared memory that the contract declares.
    let staging = unsafe { SharedTile::<u32>::new(tile.staging(number) * 4, STAGING_LEN) };
    let columns = 8 * TILES as u32;
    let (first, extent) =
        if is_swapped { ([column, row], [columns, height]) } else { ([row, column], [height, columns]) };
    // SAFETY: the contract has accepted the problem. Outputs for which `has_whole` is true exist,
    // in rows that begin on 16 bytes.
    unsafe {
        if is_plain(epilogue.flags) && epilogue.has_whole(first, extent) {
            macro_rules! parts {
                ($read:ident) => {
                    unroll_on_gpu!(part < TILES / TILES_OF_PART => {
                        let mut now = [[0.0; 4]; TILES_OF_PART];
                        unroll_on_gpu!(tile < TILES_OF_PART => { now[tile] = sums[part * TILES_OF_PART + tile]; });
                        stage(warp, staging, now);
                        let (places, rows) = $read::<ALONG>(staging, [row, column + PART * part as u32]);
                        finish_plain(epilogue, places, rows);
                    })
                };
            }
            if is_swapped {
                parts!(read_columns);
            } else {
                parts!(read_rows);
            }
            return;
        }
        // After each part the next part's sums move into its place. The epilogue is long code, so
        // it is instantiated once.
        for part in 0..launder_reg((TILES / TILES_OF_PART) as u32) {
            let mut now = [[0.0; 4]; TILES_OF_PART];
            unroll_on_gpu!(tile < TILES_OF_PART => { now[tile] = sums[tile]; });
            stage(warp, staging, now);
            let first = [row, column + PART * part];
            let (places, rows) =
                if is_swapped { read_columns::<ALONG>(staging, first) } else { read_rows::<ALONG>(staging, first) };
            epilogue.finish(places, rows);
            unroll_on_gpu!(tile < TILES - TILES_OF_PART, at most 32 => { sums[tile] = sums[tile + TILES_OF_PART]; });
        }
    }
}

/// Writes a part's sums to the warp's part of shared memory, in 16 rows of eight chunks.
#[inline(always)]
fn stage(converged: Converged, staging: SharedTile<u32>, sums: [[f32; 4]; TILES_OF_PART]) {
    const { assert!(TILES_OF_PART as u32 * 2 == CHUNKS) };
    // The compiler would keep the addresses in registers throughout the products.
    let lane = launder_reg(warp::lane_id());
    sync_lanes(converged);
    unroll_on_gpu!(pair < TILES_OF_PART / 2 => {
        put_floats(staging, CHUNKS, pair as u32, lane, [sums[2 * pair], sums[2 * pair + 1]]);
    });
    sync_lanes(converged);
}

/// Returns four columns of four rows of a staged part. Eight lanes have 128 bytes of a row.
#[inline(always)]
fn read_rows<const ALONG: bool>(staging: SharedTile<u32>, first: [u32; 2]) -> (Places<1>, [[F4; 1]; 4]) {
    // The compiler would keep the addresses in registers throughout the products.
    let lane = launder_reg(warp::lane_id());
    let mut rows = [[F4::splat(0.0)]; 4];
    unroll_on_gpu!(pass < 4 => {
        let row = staged_row::<ALONG>(lane / 8, pass as u32);
        rows[pass] = [F4(staging.chunk(swizzled(CHUNKS, row, lane % 8) * CHUNK_WORDS).map(f32::from_bits))];
    });
    let columns = [first[1] + lane % 8 * F4::LEN as u32];
    (Places::new(first[0] + run::<ALONG>(lane / 8), columns, F4::LEN as u32), rows)
}

/// Returns four columns of four rows of the output, whose columns are the rows of a staged part.
#[inline(always)]
fn read_columns<const ALONG: bool>(staging: SharedTile<u32>, first: [u32; 2]) -> (Places<1>, [[F4; 1]; 4]) {
    // The compiler would keep the addresses in registers throughout the products.
    let lane = launder_reg(warp::lane_id());
    let (number, column) = (lane % 4, lane / 4);
    let mut rows = [[F4::splat(0.0)]; 4];
    unroll_on_gpu!(pass < 4 => {
        let column = column + 8 * pass as u32;
        unroll_on_gpu!(i < 4 => {
            let chunk = swizzled(CHUNKS, staged_row::<ALONG>(number, i as u32), column / CHUNK_WORDS);
            rows[pass][0].0[i] = f32::from_bits(staging.get(chunk * CHUNK_WORDS + column % CHUNK_WORDS));
        });
    });
    let columns = [first[0] + run::<ALONG>(number)];
    (Places { row: first[1] + column, apart: 8, columns, width: F4::LEN as u32 }, rows)
}

/// Implements [`Epilogue::finish`] without an activation, for outputs that exist, in vectors.
///
/// # Safety
/// The contract has accepted the problem, and the outputs exist.
#[inline(always)]
unsafe fn finish_plain(epilogue: Epilogue<'_, f32>, places: Places<1>, mut rows: [[F4; 1]; 4]) {
    let Epilogue { bias, bias_start, c, out, start, ldc, alpha, beta, .. } = epilogue;
    let column = places.columns[0] as usize;
    let first = start + places.row as usize * ldc as usize + column;
    let at = |row: usize| first + row * places.apart as usize * ldc as usize;
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

/// Orders the accesses of the warp's lanes to shared memory.
#[inline(always)]
fn sync_lanes(_: Converged) {
    // SAFETY: the token shows that all lanes of the warp execute this.
    unsafe { warp::sync_warp(u32::MAX) };
}
