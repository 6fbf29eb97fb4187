//! The work that the half warp of a head shares: the location of its rows, their dot products, and
//! sums of its columns over tokens.
//!
//! Dot products: a lane's place in a 4 x 4 tile selects its pair (i, j) of tokens. It also has the
//! pairs 4, 8 and 12 further in each direction.
//!
//! ```text
//!            j = 0   1   2   3   4   5 ..  a step reads 16 bytes of a row of a and of b;
//! i = 0   lane   0   1   4   5   0   1     rows start 4 banks apart
//!     1          2   3   6   7   2   3     a: lanes 0 1 4 5 read one row, lanes 2 3 6 7 the next
//!     2          8   9  12  13   8   9     b: lanes 0 2 8 10 read one row, lanes 1 3 9 11 the next
//!     3         10  11  14  15  10  11     so half a warp reads 4 rows: 16 different banks
//!     4          0   1   4   5   0   1     head 2 b: rows start in banks 0, 4, 8, 12, ..
//!     ..                                   head 2 b + 1: in banks 16, 20, 24, 28, ..
//! ```
//! Sums over tokens: lane l has columns 4 l to 4 l + 3. All lanes read the same pairs, and each
//! reads its own columns.

use super::{HEAD, HEADS, MAX_TOKENS};
use crate::block::{divide, no_unroll};
use crate::rescale;
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::sum4;
use cuda_std::{prelude::*, warp};

/// The lanes of a head.
pub(super) const OWN_LANES: u32 = (HEAD / F4::LEN) as u32;
const _: () = assert!(OWN_LANES as usize == MAX_TOKENS);
/// The floats from one token's row to the next in shared memory: the head's width and a pad of 4.
/// Each row then starts 4 banks after the last.
pub(super) const ROW: u32 = HEAD as u32 + 4;
/// The floats from one row of a tokens x tokens matrix to the next.
pub(super) const PAIR_ROW: u32 = MAX_TOKENS as u32 + 4;
pub(super) const ROWS_LEN: u32 = MAX_TOKENS as u32 * ROW;
pub(super) const PAIRS_LEN: u32 = MAX_TOKENS as u32 * PAIR_ROW;
/// The floats of an array with one value for each token.
pub(super) const NUMBERS_LEN: u32 = MAX_TOKENS as u32;
pub(super) const GAINS_LEN: u32 = 2 * HEAD as u32;

/// Runs the block for each token, ascending, with the token's number as a constant. Only the last
/// three of the 4 x `groups` tokens may not exist, so only these are compared with the count.
macro_rules! for_each_token {
    ($groups:expr, $tokens:expr, |$token:ident| $body:block) => {
        $crate::unroll_on_gpu!($token < 4 * $groups, at most 16 => {
            if $token < 4 * $groups - 3 || ($token as u32) < $tokens $body
        })
    };
}
pub(super) use for_each_token;

/// Calls `function::<GROUPS, _>(arguments)` with the number of groups of four that `tokens` fill.
macro_rules! with_groups {
    ($tokens:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $tokens.div_ceil(4) {
            1 => $function::<1, _>($($argument),*),
            2 => $function::<2, _>($($argument),*),
            3 => $function::<3, _>($($argument),*),
            _ => $function::<4, _>($($argument),*),
        }
    };
}
pub(super) use with_groups;

/// One (sample, head) pair: the location of its rows and its probabilities.
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// The index of token 0's first element in q.
    first: usize,
    /// The elements from one token to the next.
    stride: usize,
    /// The elements of each of q, k and v.
    pub(super) length: usize,
    /// The head's number among those of all samples.
    pub(super) number: usize,
    pub(super) tokens: u32,
    /// This lane's number among the head's lanes, and its first column.
    pub(super) lane: u32,
    pub(super) column: u32,
    /// True if the head exists. The last warp may have only one head: its other half then
    /// recomputes head 0, so that the warp stays converged.
    pub(super) exists: bool,
}

impl Head {
    /// Returns the head of this half warp. q, k and v have `length` elements in all.
    ///
    /// # Safety
    /// `tokens` and `heads` are not 0.
    #[inline(always)]
    pub(super) unsafe fn new(length: usize, tokens: u32, heads: u32) -> Self {
        let (thread, length, stride) = (thread::thread_idx_x(), length / 3, heads as usize * HEAD);
        let number = (thread::block_idx_x() * HEADS + thread / OWN_LANES) as usize;
        // SAFETY: `heads` is not 0, as the caller guarantees.
        let (sample, head) = unsafe { divide(number, heads as usize) };
        let first = sample * tokens as usize * stride + head * HEAD;
        let exists = first < length;
        let (first, number) = if exists { (first, number) } else { (0, 0) };
        let lane = thread % OWN_LANES;
        Self { first, stride, length, number, tokens, lane, column: lane * F4::LEN as u32, exists }
    }

    /// Returns the index in q of this lane's four columns of a row.
    #[inline(always)]
    pub(super) fn index(self, row: usize) -> usize {
        self.first + row * self.stride + self.column as usize
    }

    /// Returns the index in q of the first column of a row.
    #[inline(always)]
    pub(super) fn row(self, row: u32) -> usize {
        self.first + row as usize * self.stride
    }

    /// Returns the index of the inverse root mean square of row `lane` of q (`part` 0) or k (1).
    #[inline(always)]
    pub(super) fn scale_index(self, part: usize) -> usize {
        (part * self.length + self.first + self.lane as usize * self.stride) / HEAD
    }

    /// Returns the index of the probability of the pair (`i`, `lane`).
    #[inline(always)]
    pub(super) fn probability_index(self, i: usize) -> usize {
        (self.number * self.tokens as usize + i) * self.tokens as usize + self.lane as usize
    }

    /// True if there is a token with this lane's number.
    #[inline(always)]
    pub(super) fn has_row(self) -> bool {
        self.lane < self.tokens
    }

    /// Returns the tile that starts `offset` floats into the head's shared memory, which has
    /// `whole` floats.
    ///
    /// # Safety
    /// The caller meets the requirements of [`SharedTile::new`].
    #[inline(always)]
    pub(super) unsafe fn tile(self, whole: u32, offset: u32, len: u32) -> SharedTile<f32> {
        let start = thread::thread_idx_x() / OWN_LANES * whole;
        // SAFETY: the tile is part of the head's memory, which lies inside the block's, as the
        // caller guarantees.
        unsafe { SharedTile::new((start + offset) * 4, len) }
    }

    /// Starts to copy this lane's columns of every token. BF16 is widened, so it has been copied on
    /// return. The rows start `from` elements into `x`.
    ///
    /// # Safety
    /// The head lies inside `x` from there.
    #[inline(always)]
    pub(super) unsafe fn copy<const GROUPS: usize, S: Stored>(self, to: SharedTile<f32>, x: &[S], from: usize) {
        let place = |row: usize| row as u32 * ROW + self.column;
        if const { size_of::<S>() == size_of::<f32>() } {
            for_each_token!(GROUPS, self.tokens, |row| {
                // SAFETY: the caller guarantees that the head's rows lie inside `x` from `from` on,
                // and this lane's four columns lie in each row. They are 16 bytes.
                unsafe { to.copy4(place(row), x, from + self.index(row)) };
            });
            return;
        }
        // All reads are issued before the first write waits for one.
        let mut columns = [F4::splat(0.0); MAX_TOKENS];
        for_each_token!(GROUPS, self.tokens, |row| {
            // SAFETY: as before.
            columns[row] = unsafe { F4::load(x, from + self.index(row)) };
        });
        for_each_token!(GROUPS, self.tokens, |row| { to.set4(place(row), columns[row]) });
    }

    /// Returns the token's number, or the last token's number if `token` is past it, so that lanes
    /// read only rows that were written.
    #[inline(always)]
    fn at_most_last(self, token: u32) -> u32 {
        if token < self.tokens { token } else { self.tokens - 1 }
    }

    /// Sets `pairs[i, j] = sum_d a[i, d] b[j, d]`, for the lane's pairs in the module's picture. A
    /// lane's pairs are 4 apart in each direction, so each row that it reads serves `GROUPS` of
    /// them. A 16-byte read of half a warp has no bank conflict.
    #[inline(always)]
    pub(super) fn qk_scores<const GROUPS: usize>(self, a: SharedTile<f32>, b: SharedTile<f32>, pairs: SharedTile<f32>) {
        let (mut i, mut j) = ([0; GROUPS], [0; GROUPS]);
        unroll_on_gpu!(at < GROUPS => {
            i[at] = self.lane / 8 * 2 + self.lane / 2 % 2 + 4 * at as u32;
            j[at] = self.lane / 4 % 2 * 2 + self.lane % 2 + 4 * at as u32;
        });
        let start = |row: u32| self.at_most_last(row) * ROW;
        let mut sums = [[F4::splat(0.0); GROUPS]; GROUPS];
        let mut column = 0;
        while column < HEAD as u32 {
            no_unroll();
            unroll_on_gpu!(step < 4 => {
                let column = column + (step * F4::LEN) as u32;
                let (mut x, mut y) = ([F4::splat(0.0); GROUPS], [F4::splat(0.0); GROUPS]);
                unroll_on_gpu!(at < GROUPS => {
                    x[at] = a.get4(start(i[at]) + column);
                    y[at] = b.get4(start(j[at]) + column);
                });
                unroll_on_gpu!(m < GROUPS => {
                    unroll_on_gpu!(n < GROUPS => { sums[m][n] = sums[m][n].fma(x[m], y[n]); });
                });
            });
            column += 4 * F4::LEN as u32;
        }
        unroll_on_gpu!(m < GROUPS => {
            unroll_on_gpu!(n < GROUPS => { pairs.set(i[m] * PAIR_ROW + j[n], sum4(sums[m][n])) });
        });
    }

    /// Returns this lane's columns of every token.
    #[inline(always)]
    pub(super) fn columns<const GROUPS: usize>(self, rows: SharedTile<f32>) -> [F4; MAX_TOKENS] {
        let mut columns = [F4::splat(0.0); MAX_TOKENS];
        for_each_token!(GROUPS, self.tokens, |row| { columns[row] = rows.get4(row as u32 * ROW + self.column) });
        columns
    }

    /// Returns `sum_j pairs[i, j] columns[j]`, j ascending, for i = `row` and the next. Two chains
    /// overlap each other's read latency.
    #[inline(always)]
    pub(super) fn pv_accumulate<const GROUPS: usize>(
        self,
        pairs: SharedTile<f32>,
        row: u32,
        columns: &[F4; MAX_TOKENS],
    ) -> [F4; 2] {
        let factors = [pair_row::<GROUPS>(pairs, row), pair_row::<GROUPS>(pairs, self.at_most_last(row + 1))];
        let mut sums = [F4::splat(0.0); 2];
        for_each_token!(GROUPS, self.tokens, |j| {
            unroll_on_gpu!(at < 2 => {
                sums[at] = sums[at].fma(F4::splat(factors[at][j / 4].0[j % 4]), columns[j]);
            });
        });
        sums
    }
}

/// Reads a row of pairs. Its values past the tokens are unspecified.
#[inline(always)]
pub(super) fn pair_row<const GROUPS: usize>(pairs: SharedTile<f32>, row: u32) -> [F4; GROUPS] {
    let mut values = [F4::splat(0.0); GROUPS];
    unroll_on_gpu!(at < GROUPS => { values[at] = pairs.get4(row * PAIR_ROW + 4 * at as u32) });
    values
}

/// Writes a row of pairs.
#[inline(always)]
pub(super) fn set_pair_row<const GROUPS: usize>(pairs: SharedTile<f32>, row: u32, values: &[F4; GROUPS]) {
    unroll_on_gpu!(at < GROUPS => { pairs.set4(row * PAIR_ROW + 4 * at as u32, values[at]) });
}

/// Multiplies a row by `gains`, and by the factor that keeps its squares from overflowing. Returns
/// that factor, and `1 / sqrt(mean x^2 + epsilon)` of the original row, divided by the factor.
///
/// # Safety
/// The row's elements begin at `from` in `x`, and are those in the tile.
#[inline(always)]
pub(super) unsafe fn apply_gains<S: Stored>(
    (rows, row): (SharedTile<f32>, u32),
    (x, from): (&[S], usize),
    (gains, part): (SharedTile<f32>, u32),
    epsilon: f32,
) -> [f32; 2] {
    let mut squares = F4::splat(0.0);
    let mut column = 0;
    while column < HEAD as u32 {
        // All reads first: a read after a write would wait, because the write might alias it.
        let (mut x, mut gain) = ([F4::splat(0.0); 8], [F4::splat(0.0); 8]);
        unroll_on_gpu!(at < 8 => {
            let column = column + (at * F4::LEN) as u32;
            x[at] = rows.get4(row * ROW + column);
            gain[at] = gains.get4(part * HEAD as u32 + column);
        });
        unroll_on_gpu!(at < 8 => {
            squares = squares.fma(x[at], x[at]);
            rows.set4(row * ROW + column + (at * F4::LEN) as u32, x[at] * gain[at]);
        });
        column += 8 * F4::LEN as u32;
    }
    let (mut sum, mut factor) = (sum4(squares), rescale::FIRST);
    if let Some(smaller) = rescale::again(sum, factor) {
        (factor, squares) = (smaller, F4::splat(0.0));
        let mut column = 0;
        while column < HEAD as u32 {
            no_unroll();
            // SAFETY: the columns lie inside the row, which lies in `x`, as the caller guarantees.
            let x = unsafe { F4::load(x, from + column as usize) } * F4::splat(factor);
            squares = squares.fma(x, x);
            rows.set4(row * ROW + column, x * gains.get4(part * HEAD as u32 + column));
            column += F4::LEN as u32;
        }
        sum = sum4(squares);
    }
    [factor, rescale::inverse_root(sum, HEAD, epsilon, factor)]
}

/// Waits for the lanes of the warp, and makes their writes visible to each other.
#[inline(always)]
#[track_caller]
pub(super) fn sync() {
    // SAFETY: the block is one warp, and all its lanes reach this: the half warp of a missing head
    // computes head 0.
    unsafe { warp::sync_warp(u32::MAX) }
}
