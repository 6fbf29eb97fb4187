//! The epilogue of a warp's accumulators: scale, bias, beta C, activation or gate, and the store.
//!
//! A warp whose outputs all exist, with S = BF16, applies the epilogue in the accumulator layout of
//! the mma instructions. The read of C for one row of squares overlaps the computation of the row
//! before. Lanes exchange only the values that they store, after rounding.
//!
//! ```text
//! sums of ROWS x PAIRS squares:
//!   alpha * -> + bias -> + beta C -> pre -> gelu, silu, gate or gelu'(C) -> out
//!   all        all       all         one row of squares after another
//! ```
//! The other warps use [`Epilogue::finish`].
//!
//! Invariant: the steps and their order are as in [`Epilogue::finish`], so the bits are the same.

use crate::block::launder_reg;
use crate::format::{Bf16, Format};
use crate::matmul::epilogue::{Epilogue, Places};
use crate::matmul::{ACTIVATIONS, GELU, GELU_DERIVATIVE, SILU, STORE_PREACT, SWIGLU};
use crate::mma::fragments::{Sums, Words, quads, quads_place, read_bias, read_words, write_quads};
use crate::stored::Stored;
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::Converged;
use cuda_std::{GpuFloat, warp};
use half::bf16;

/// Applies the epilogue to a warp's accumulators and writes them. `first` is the warp's first row
/// and column.
///
/// # Safety
/// The contract has accepted the problem.
#[inline(always)]
pub(crate) unsafe fn finish<const ROWS: usize, const TILES: usize, const PAIRS: usize, S: Stored>(
    warp: Converged,
    epilogue: Epilogue<'_, S>,
    first: [u32; 2],
    sums: Sums<ROWS, TILES>,
) {
    const { assert!(TILES == 2 * PAIRS) };
    // SAFETY: the contract has accepted the problem.
    unsafe {
        if const { size_of::<S>() == size_of::<bf16>() }
            && epilogue.has_whole(first, [16 * ROWS as u32, 16 * PAIRS as u32])
        {
            let read = || read_row::<ROWS, TILES, PAIRS, S>(&epilogue, first, 0);
            finish_whole::<ROWS, TILES, PAIRS, S>(epilogue, first, sums, read, |of, to, row| {
                unroll_on_gpu!(pair < PAIRS => {
                    let at = place(&epilogue, own_lane::<ROWS>(), first, row, pair);
                    write_quads(warp, [of[2 * pair], of[2 * pair + 1]], to, at);
                });
            });
        } else {
            finish_any::<ROWS, TILES, PAIRS, S>(warp, epilogue, first, sums);
        }
    }
}

/// Implements [`finish`] if S is BF16 and all of the warp's outputs exist. `read` returns C at the
/// first row of squares, if the epilogue reads it. `write` writes a row of squares to `out` or
/// `pre`.
///
/// # Safety
/// The caller meets the requirements of [`finish`].
#[inline(always)]
pub(crate) unsafe fn finish_whole<const ROWS: usize, const TILES: usize, const PAIRS: usize, S: Stored>(
    epilogue: Epilogue<'_, S>,
    first: [u32; 2],
    mut sums: Sums<ROWS, TILES>,
    read: impl FnOnce() -> [Words; TILES],
    write: impl Fn([[f32; 4]; TILES], *mut bf16, usize),
) {
    let Epilogue { out, pre, flags, .. } = epilogue;
    let (out, pre) = (out.cast::<bf16>(), pre.cast::<bf16>());
    macro_rules! for_each {
        (|$tile:ident, $at:ident| $body:expr) => {
            unroll_on_gpu!($tile < TILES => { unroll_on_gpu!($at < 4 => { $body }); })
        };
    }
    // SAFETY: the outputs exist. The contract has checked that they then lie in `out`, and in `c`,
    // `pre` and `bias` where they are used. They hold S, which is BF16.
    unsafe {
        scale_and_add::<ROWS, TILES, PAIRS, S>(epilogue, first, &mut sums);
        if is_plain(flags) {
            unroll_on_gpu!(row < ROWS => { write(sums[row], out, row); });
            return;
        }
        let reads = reads_c(flags);
        let mut next = [[0; 2]; TILES];
        if reads {
            next = read();
        }
        // One row of squares at a time; then the other rows move up. An activation is long code, so
        // it is instantiated once.
        for row in 0..(if ROWS == 1 { 1 } else { launder_reg(ROWS as u32) }) as usize {
            let inputs = next;
            if reads && row + 1 < ROWS {
                next = read_row::<ROWS, TILES, PAIRS, S>(&epilogue, first, row + 1);
            }
            let mut done = sums[0];
            if flags & STORE_PREACT != 0 {
                write(done, pre, row);
            }
            if flags & GELU != 0 {
                for_each!(|tile, at| done[tile][at] = S::gelu(done[tile][at]));
            } else if flags & GELU_DERIVATIVE != 0 {
                for_each!(|tile, at| done[tile][at] *= S::gelu_derivative(value(&inputs[tile], at)));
            } else if flags & SWIGLU != 0 {
                for_each!(|tile, at| done[tile][at] *= S::silu(value(&inputs[tile], at)));
            } else if flags & SILU != 0 {
                for_each!(|tile, at| done[tile][at] = S::silu(done[tile][at]));
            }
            write(done, out, row);
            unroll_on_gpu!(row < ROWS - 1 => { sums[row] = sums[row + 1]; });
        }
    }
}

/// True if the sums are stored without an activation.
#[inline(always)]
pub(crate) fn is_plain(flags: u32) -> bool {
    flags & (STORE_PREACT | ACTIVATIONS) == 0
}

/// Applies the steps up to `beta C` to a warp's accumulators, whose outputs all exist.
///
/// # Safety
/// The contract has accepted the problem, and S is BF16.
#[inline(always)]
pub(crate) unsafe fn scale_and_add<const ROWS: usize, const TILES: usize, const PAIRS: usize, S: Stored>(
    epilogue: Epilogue<'_, S>,
    first: [u32; 2],
    sums: &mut Sums<ROWS, TILES>,
) {
    let Epilogue { bias, bias_start, alpha, beta, .. } = epilogue;
    macro_rules! for_each {
        (|$tile:ident, $at:ident| $body:expr) => {
            unroll_on_gpu!($tile < TILES => { unroll_on_gpu!($at < 4 => { $body }); })
        };
    }
    // SAFETY: as in `finish_whole`.
    unsafe {
        if alpha != 1.0 {
            unroll_on_gpu!(row < ROWS => { for_each!(|tile, at| sums[row][tile][at] *= alpha); });
        }
        if !bias.is_empty() {
            unroll_on_gpu!(pair < PAIRS => {
                let biases = read_bias(bias, own_lane::<ROWS>(), bias_start + first[1] as usize + 16 * pair);
                unroll_on_gpu!(row < ROWS => {
                    unroll_on_gpu!(side < 2 => {
                        unroll_on_gpu!(at < 4 => { sums[row][2 * pair + side][at] += biases[side][at]; });
                    });
                });
            });
        }
        if beta != 0.0 {
            let mut next = read_row::<ROWS, TILES, PAIRS, S>(&epilogue, first, 0);
            unroll_on_gpu!(row < ROWS => {
                let old = next;
                if row + 1 < ROWS {
                    next = read_row::<ROWS, TILES, PAIRS, S>(&epilogue, first, row + 1);
                }
                for_each!(|tile, at| {
                    sums[row][tile][at] = GpuFloat::mul_add(beta, value(&old[tile], at), sums[row][tile][at]);
                });
            });
        }
    }
}

/// True if the activation reads C.
#[inline(always)]
pub(crate) fn reads_c(flags: u32) -> bool {
    flags & (SWIGLU | GELU_DERIVATIVE) != 0
}

/// Returns the lane's number. Callers with one row of squares finish many, one after another. The
/// compiler would keep addresses that follow from the number in registers for all of them.
#[inline(always)]
fn own_lane<const ROWS: usize>() -> u32 {
    if ROWS == 1 { launder_reg(warp::lane_id()) } else { warp::lane_id() }
}

/// Returns an element of C.
#[inline(always)]
fn value(words: &Words, at: usize) -> f32 {
    Bf16::value(words[at / 2], at as u32 % 2)
}

/// Returns the indices in a square of the first elements of the two rows of a lane.
#[inline(always)]
fn place<S>(epilogue: &Epilogue<'_, S>, lane: u32, first: [u32; 2], row: usize, pair: usize) -> [usize; 2] {
    let i = first[0] + 16 * row as u32 + lane / 4;
    [i, i + 8].map(|i| epilogue.start + i as usize * epilogue.ldc as usize + first[1] as usize + 16 * pair)
}

/// Reads C at the outputs of a row of squares.
///
/// # Safety
/// The outputs exist, and C may be read there.
#[inline(always)]
pub(crate) unsafe fn read_row<const ROWS: usize, const TILES: usize, const PAIRS: usize, S>(
    epilogue: &Epilogue<'_, S>,
    first: [u32; 2],
    row: usize,
) -> [Words; TILES] {
    let (c, lane) = (epilogue.c.cast::<bf16>(), own_lane::<ROWS>());
    let mut words = [[0; 2]; TILES];
    unroll_on_gpu!(pair < PAIRS => {
        // SAFETY: the caller guarantees that the outputs of this square exist in C.
        let read = unsafe { read_words(c, lane, place(epilogue, lane, first, row, pair)) };
        [words[2 * pair], words[2 * pair + 1]] = read;
    });
    words
}

/// Implements [`finish`] for any S and any outputs, one row of squares after another.
///
/// # Safety
/// The caller meets the requirements of [`finish`].
#[inline(always)]
pub(crate) unsafe fn finish_any<const ROWS: usize, const TILES: usize, const PAIRS: usize, S: Stored>(
    warp: Converged,
    epilogue: Epilogue<'_, S>,
    first: [u32; 2],
    mut sums: Sums<ROWS, TILES>,
) {
    let [line, column] = quads_place();
    // After each row the next row's accumulators move into its place. The epilogue is long code, so
    // it is instantiated once.
    for row in 0..ROWS as u32 {
        let (mut rows, mut columns) = ([[F4::splat(0.0); PAIRS]; 2], [0; PAIRS]);
        unroll_on_gpu!(pair < PAIRS => {
            [rows[0][pair], rows[1][pair]] = quads(warp, [sums[0][2 * pair], sums[0][2 * pair + 1]]);
            columns[pair] = first[1] + 16 * pair as u32 + column;
        });
        let places = Places { row: first[0] + 16 * row + line, apart: 8, columns, width: F4::LEN as u32 };
        // SAFETY: the contract has accepted the problem.
        unsafe { epilogue.finish(places, rows) };
        unroll_on_gpu!(at < ROWS - 1 => { sums[at] = sums[at + 1]; });
    }
}
