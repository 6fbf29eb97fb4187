//! What the half warp of a head does together: where its rows lie, their products, and sums of its columns over tokens.

use super::{HEAD, HEADS, MAX_TOKENS};
use crate::block::{divide, stay_rolled};
use crate::math;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::sum4;
use cuda_std::{prelude::*, warp};

/// Lanes of a head.
pub(super) const OWN_LANES: u32 = (HEAD / F4::LEN) as u32;
const _: () = assert!(OWN_LANES as usize == MAX_TOKENS);
/// Floats from one token's row to the next in shared memory: 4 more than the head, so that rows start in other banks.
pub(super) const ROW: u32 = HEAD as u32 + 4;
/// Floats from one row of the tokens x tokens matrices to the next.
pub(super) const PAIR_ROW: u32 = MAX_TOKENS as u32 + 4;
pub(super) const ROWS_LEN: u32 = MAX_TOKENS as u32 * ROW;
pub(super) const PAIRS_LEN: u32 = MAX_TOKENS as u32 * PAIR_ROW;
/// A number for each token.
pub(super) const NUMBERS_LEN: u32 = MAX_TOKENS as u32;
pub(super) const GAINS_LEN: u32 = 2 * HEAD as u32;

/// Runs the block for each token, ascending, its number a constant: of 4 `groups` only the last three may be missing.
macro_rules! for_each_token {
    ($groups:expr, $tokens:expr, |$token:ident| $body:block) => {
        $crate::unroll_on_gpu!($token < 4 * $groups, at most 16 => {
            if $token < 4 * $groups - 3 || ($token as u32) < $tokens $body
        })
    };
}
pub(super) use for_each_token;

/// Calls `function::<GROUPS>(arguments)` for so many tokens.
macro_rules! with_groups {
    ($tokens:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $tokens.div_ceil(4) {
            1 => $function::<1>($($argument),*),
            2 => $function::<2>($($argument),*),
            3 => $function::<3>($($argument),*),
            _ => $function::<4>($($argument),*),
        }
    };
}
pub(super) use with_groups;

/// One (sample, head): where its rows and its probabilities lie.
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// The index of token 0's first float in q.
    first: usize,
    /// Floats from one token to the next.
    stride: usize,
    /// Floats of q, of k and of v.
    pub(super) length: usize,
    /// Its number among all.
    pub(super) number: usize,
    pub(super) tokens: u32,
    /// This lane among the head's, and the first of its columns.
    pub(super) lane: u32,
    pub(super) column: u32,
    /// Whether it exists. The last warp may have one too few, and then computes the first again, to keep its lanes together.
    pub(super) exists: bool,
}

impl Head {
    /// This half warp's, of q, k and v of `length` floats in all.
    ///
    /// # Safety
    /// `tokens` and `heads` are not 0.
    #[inline(always)]
    pub(super) unsafe fn new(length: usize, tokens: u32, heads: u32) -> Self {
        let (thread, length, stride) = (thread::thread_idx_x(), length / 3, heads as usize * HEAD);
        let number = (thread::block_idx_x() * HEADS + thread / OWN_LANES) as usize;
        // SAFETY: `heads` is not 0, as is asked.
        let (sample, head) = unsafe { divide(number, heads as usize) };
        let first = sample * tokens as usize * stride + head * HEAD;
        let exists = first < length;
        let (first, number) = if exists { (first, number) } else { (0, 0) };
        let lane = thread % OWN_LANES;
        Self { first, stride, length, number, tokens, lane, column: lane * F4::LEN as u32, exists }
    }

    /// The index in q of this lane's vector of a row.
    #[inline(always)]
    pub(super) fn index(self, row: usize) -> usize {
        self.first + row * self.stride + self.column as usize
    }

    /// The index of the inverse root mean square of this lane's row of q (`part` 0) or k (1).
    #[inline(always)]
    pub(super) fn scale_index(self, part: usize) -> usize {
        (part * self.length + self.first + self.lane as usize * self.stride) / HEAD
    }

    /// The index of the probability of `i` and this lane.
    #[inline(always)]
    pub(super) fn probability_index(self, i: usize) -> usize {
        (self.number * self.tokens as usize + i) * self.tokens as usize + self.lane as usize
    }

    /// Whether this lane has a row.
    #[inline(always)]
    pub(super) fn has_row(self) -> bool {
        self.lane < self.tokens
    }

    /// The tile `offset` floats into the head's `whole` of shared memory.
    ///
    /// # Safety
    /// As for [`SharedTile::new`].
    #[inline(always)]
    pub(super) unsafe fn tile(self, whole: u32, offset: u32, len: u32) -> SharedTile<f32> {
        let own = thread::thread_idx_x() / OWN_LANES * whole;
        // SAFETY: the tile is part of the head's, which lies inside shared memory, as is asked.
        unsafe { SharedTile::new((own + offset) * 4, len) }
    }

    /// Starts to copy this lane's column of the rows at `from` floats into `x`.
    ///
    /// # Safety
    /// The head lies inside `x` from there.
    #[inline(always)]
    pub(super) unsafe fn copy<const GROUPS: usize>(self, to: SharedTile<f32>, x: &[f32], from: usize) {
        for_each_token!(GROUPS, self.tokens, |row| {
            // SAFETY: the head's rows lie inside `x` from `from` on, as is asked, and in each this lane's four columns.
            unsafe { to.copy4(row as u32 * ROW + self.column, x, from + self.index(row)) };
        });
    }

    /// A token's number, the last one's for those beyond, so that nothing is read that nobody wrote.
    #[inline(always)]
    fn at_most_last(self, token: u32) -> u32 {
        if token < self.tokens { token } else { self.tokens - 1 }
    }

    /// Sets `pairs[i, j] = sum_d a[i, d] b[j, d]`. A lane's pairs are 4 apart either way, so that what it reads serves several;
    /// neighbours share a row of `a`, next but one of `b`, so that a 16-byte read of half a warp is one access to the banks.
    #[inline(always)]
    pub(super) fn set_dots<const GROUPS: usize>(self, a: SharedTile<f32>, b: SharedTile<f32>, pairs: SharedTile<f32>) {
        let (mut i, mut j) = ([0; GROUPS], [0; GROUPS]);
        unroll_on_gpu!(at < GROUPS => {
            i[at] = self.lane / 8 * 2 + self.lane / 2 % 2 + 4 * at as u32;
            j[at] = self.lane / 4 % 2 * 2 + self.lane % 2 + 4 * at as u32;
        });
        let start = |row: u32| self.at_most_last(row) * ROW;
        let mut sums = [[F4::splat(0.0); GROUPS]; GROUPS];
        let mut column = 0;
        while column < HEAD as u32 {
            stay_rolled();
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

    /// This lane's column of every token.
    #[inline(always)]
    pub(super) fn columns<const GROUPS: usize>(self, rows: SharedTile<f32>) -> [F4; MAX_TOKENS] {
        let mut columns = [F4::splat(0.0); MAX_TOKENS];
        for_each_token!(GROUPS, self.tokens, |row| { columns[row] = rows.get4(row as u32 * ROW + self.column) });
        columns
    }

    /// `sum_j pairs[i, j] columns[j]`, j ascending, for i = `row` and the next: two, so that one does not wait for the
    /// other's reads.
    #[inline(always)]
    pub(super) fn mix<const GROUPS: usize>(
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

/// A row of pairs; nothing of meaning beyond the tokens.
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

/// Multiplies a row by `gains`; returns `1 / sqrt(mean x^2 + epsilon)` of what it was.
#[inline(always)]
pub(super) fn apply_gains(rows: SharedTile<f32>, row: u32, gains: SharedTile<f32>, part: u32, epsilon: f32) -> f32 {
    let mut squares = F4::splat(0.0);
    let mut column = 0;
    while column < HEAD as u32 {
        // All reads first: behind a write they would wait for it, since it might be of what they read.
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
    math::rsqrt(sum4(squares) / HEAD as f32 + epsilon)
}

/// Waits for the warp's lanes, and makes what they wrote visible to each other.
#[inline(always)]
#[track_caller]
pub(super) fn sync() {
    // SAFETY: the block is one warp, and its lanes stay together: a head that does not exist is computed all the same.
    unsafe { warp::sync_warp(u32::MAX) }
}
