//! Rotary position embedding (Su et al., "RoFormer: Enhanced Transformer with Rotary Position
//! Embedding", 2021). It pairs columns i and i + width / 2, as GPT-NeoX and Llama do.
//!
//! Pair i of a token at position t rotates by `t base^(-2 i / width)` radians. The angle is a
//! fraction of a turn in 64-bit fixed point. A product with the position is exact there, except
//! that whole turns are dropped:
//!
//! ```text
//! 1 / (2 pi)                     0.0010100010111110..   turns at position 1, of pair 0
//! times base^(-2 / width)^i      0.0000000101101010..   of pair i
//! times the position          (1)0.1110001011010100..   what is left is exact
//! ```
//! A distant position therefore costs no accuracy, and a layer needs neither a table nor memory.
//! Sine and cosine are within 2 ulp.
//!
//! Contexts are extended by dividing slow frequencies by a factor, with a linear ramp between slow
//! and fast ones: over the frequency in Llama 3.1, over the pair's index in YaRN (Peng et al.,
//! "YaRN: Efficient Context Window Extension of Large Language Models", 2023). LongRoPE (Ding et
//! al., 2024) divides each frequency by a factor of its own. The frequencies are then arguments of
//! a second kernel, 16 in each launch.
//!
//! Invariant: the angle is computed in integers only, so every device has the same one.

use crate::block::divide;
use crate::qkv_layout::QkvLayout;
use crate::vector::F4;
use crate::{family, unroll};
use cuda_std::{GpuFloat, prelude::*};
use half::bf16;

/// The threads of a block.
const BLOCK: u32 = 128;
/// 2^64 / (2 pi): one radian in units of 2^-64 turns.
pub const RADIAN: u64 = 0x28be_60db_9391_054a;
/// 2 pi / 2^64 in two parts.
const TURN_HI: f32 = f32::from_bits(0x20c9_0fdb);
const TURN_LO: f32 = f32::from_bits(0x943b_bd2e);

family! {
    /// Rotates each pair of columns `(x, y)` of q and k to `(x cos - y sin, y cos + x sin)`. If
    /// `back` is not 0, it rotates by the opposite angle.
    ///
    /// `x`, `out`: q, k and v as for
    /// [`flash_forward`](struct@crate::flash_attention::flash_forward), with heads of `width`
    /// columns, of which the first `rotated` rotate. Token t has the position `offset + t`. Sine
    /// and cosine are multiplied by `gain`. v and the columns that do not rotate are copied, unless
    /// `out` is `x` itself. Overwrites `out`.
    rotary<S: Stored> { rotary_f32: f32; rotary_bf16: bf16; }
    unsafe fn(
        x: *const S,
        layout: QkvLayout,
        rotated: u32,
        frequencies: Frequencies,
        gain: f32,
        offset: u32,
        back: u32,
        samples: u32,
        out: *mut S,
    ) {
        let QkvLayout { tokens, heads, kv_heads, width, .. } = layout;
        let half = width as usize / 2;
        let index = thread::block_idx_x() as usize * BLOCK as usize + thread::thread_idx_x() as usize;
        // SAFETY: the contract has checked that no size is 0, and that `x` and `out` hold all heads
        // of all tokens of the samples.
        unsafe {
            let (row, quad) = divide(index, half / F4::LEN);
            if row >= samples as usize * tokens as usize {
                return;
            }
            let (_, token) = divide(row, tokens as usize);
            let pair = quad * F4::LEN;
            let rotates = pair < rotated as usize / 2;
            // The column of the pair's first half, and the distance to the second.
            let (column, distance) = if rotates {
                (pair, rotated as usize / 2)
            } else {
                (rotated as usize / 2 + pair, half - rotated as usize / 2)
            };
            let (mut cos, mut sin) = (F4::splat(1.0), F4::splat(0.0));
            unroll!(at < 4 => {
                let frequency = frequencies.of((pair + at) as u32);
                let (c, s) = cos_sin(frequency.wrapping_mul(offset as u64 + token as u64));
                (cos.0[at], sin.0[at]) = (c * gain, s * gain);
            });
            if back != 0 {
                sin = -sin;
            }
            let is_copy = !core::ptr::eq(x, out.cast_const());
            let turned = if rotates { heads + kv_heads } else { 0 };
            let all = if is_copy { heads + 2 * kv_heads } else { turned };
            let mut head = 0;
            while head < all {
                let start = start_of(head, row, layout, samples);
                let (low, high) = (start + column, start + column + distance);
                let (a, b) = (F4::load_raw(x, low), F4::load_raw(x, high));
                let (turned_a, turned_b) = ((-(b * sin)).fma(a, cos), (a * sin).fma(b, cos));
                let (a, b) = if head < turned { (turned_a, turned_b) } else { (a, b) };
                a.store(out, low);
                b.store(out, high);
                head += 1;
            }
        }
    }
    // SAFETY: `x` and `out` hold the heads of q, k and v of each token. A thread accesses only its
    // own columns of each head of its own token, and only if that token exists.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        let QkvLayout { tokens, width, .. } = k.layout;
        Violation::unless(tokens > 0, "tokens", "at least 1", tokens)?;
        let heads = k.layout.check(2 * F4::LEN, u32::MAX as usize)?;
        Violation::unless_aligned("rotated", k.rotated, 2 * F4::LEN)?;
        Violation::unless(k.rotated <= width, "rotated", "at most `width`", k.rotated)?;
        let shift = k.frequencies.shift;
        Violation::unless(shift < u64::BITS, "frequencies", "a shift below 64", shift)?;
        let rows = Size::of(k.samples).times(tokens);
        Violation::unless_length("x", rows.times(heads).times(width), k.x.len())?;
        Violation::unless_length("out", rows.times(heads).times(width), k.out.len())?;
        Grid::cover(rows.times(Size::of(width).div_ceil(2 * 4)), BLOCK as usize)
    }
}

/// The pairs of one launch of [`rotary_pairs`].
pub const PAIRS: usize = 16;

family! {
    /// Rotates 16 neighboring pairs of columns of q and k in place like [`rotary`], each by a
    /// frequency of its own.
    ///
    /// `out`: q, k and v as for [`rotary`]. Pair `first + i` turns by `turns[i]` per position, in
    /// units of 2^-64 turns. Pairs beyond those of `rotated` columns do not exist.
    rotary_pairs<S: Stored> { rotary_pairs_f32: f32; rotary_pairs_bf16: bf16; }
    unsafe fn(
        layout: QkvLayout,
        rotated: u32,
        first: u32,
        turns: [u64; 16],
        gain: f32,
        offset: u32,
        back: u32,
        samples: u32,
        out: *mut S,
    ) {
        let index = thread::block_idx_x() as usize * BLOCK as usize + thread::thread_idx_x() as usize;
        let QkvLayout { tokens, heads, kv_heads, .. } = layout;
        let (row, quad) = (index / (PAIRS / F4::LEN), index % (PAIRS / F4::LEN));
        let (pair, distance) = (first as usize + quad * F4::LEN, rotated as usize / 2);
        if row >= samples as usize * tokens as usize || pair >= distance {
            return;
        }
        // A constant index reads the parameter where it is.
        let frequencies = match quad {
            0 => [turns[0], turns[1], turns[2], turns[3]],
            1 => [turns[4], turns[5], turns[6], turns[7]],
            2 => [turns[8], turns[9], turns[10], turns[11]],
            _ => [turns[12], turns[13], turns[14], turns[15]],
        };
        // SAFETY: the contract has checked that no size is 0, and that `out` holds all heads of all
        // tokens of the samples. A quad of pairs begins at a multiple of 4, as their number is.
        unsafe {
            let (_, token) = divide(row, tokens as usize);
            let (mut cos, mut sin) = (F4::splat(1.0), F4::splat(0.0));
            unroll!(at < 4 => {
                let (c, s) = cos_sin(frequencies[at].wrapping_mul(offset as u64 + token as u64));
                (cos.0[at], sin.0[at]) = (c * gain, s * gain);
            });
            if back != 0 {
                sin = -sin;
            }
            let mut head = 0;
            while head < heads + kv_heads {
                let low = start_of(head, row, layout, samples) + pair;
                let high = low + distance;
                let (a, b) = (F4::load_raw(out.cast_const(), low), F4::load_raw(out.cast_const(), high));
                (-(b * sin)).fma(a, cos).store(out, low);
                (a * sin).fma(b, cos).store(out, high);
                head += 1;
            }
        }
    }
    // SAFETY: `out` holds the heads of q, k and v of each token. A thread accesses only its own
    // columns of each head of its own token, and only if that token and those columns exist.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        let QkvLayout { tokens, width, .. } = k.layout;
        Violation::unless(tokens > 0, "tokens", "at least 1", tokens)?;
        let heads = k.layout.check(2 * F4::LEN, u32::MAX as usize)?;
        Violation::unless_aligned("rotated", k.rotated, 2 * F4::LEN)?;
        Violation::unless(k.rotated <= width, "rotated", "at most `width`", k.rotated)?;
        Violation::unless_aligned("first", k.first, F4::LEN)?;
        let rows = Size::of(k.samples).times(tokens);
        Violation::unless_length("out", rows.times(heads).times(width), k.out.len())?;
        Grid::cover(rows.times(PAIRS / F4::LEN), BLOCK as usize)
    }
}

/// Returns the index of the first column of a head. `row` is the number of the token among those
/// of all samples, and `head` counts those of q, of k and of v.
#[inline(always)]
fn start_of(head: u32, row: usize, layout: QkvLayout, samples: u32) -> usize {
    let QkvLayout { tokens, heads, kv_heads, width, stacked } = layout;
    if stacked == 0 {
        return (row * (heads + 2 * kv_heads) as usize + head as usize) * width as usize;
    }
    // There are as many heads of q as of k and of v.
    let part = if head < heads {
        0
    } else if head < 2 * heads {
        1
    } else {
        2
    };
    let rows = part * samples as usize * tokens as usize + row;
    (rows * heads as usize + head as usize - part * heads as usize) * width as usize
}

/// The turns per position of each pair of columns, in units of 2^-64 turns.
///
/// Pair i has `start ratio^i`, with `ratio` in units of 2^-64. Unless `shrink` is 0, a pair whose
/// place is at most `low` has the fraction `shrink` of that, in units of 2^-64. A pair whose place
/// is at least `low + span` has all of it, and between these places the fraction rises linearly.
/// The place is the frequency itself or, by pair, the index in units of 2^-32, counted from the
/// slow end: then the fraction falls.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(cuda_std::launch::Pod, cuda_std::launch::Zeroable))]
#[repr(C)]
pub struct Frequencies {
    /// The frequency of pair 0.
    pub start: u64,
    /// The ratio of two neighbors.
    pub ratio: u64,
    /// The factor of slow pairs, or 0 if no pair is scaled.
    pub shrink: u64,
    /// The place at which the ramp begins.
    pub low: u64,
    /// The length of the ramp, at least 1 if pairs are scaled.
    pub span: u64,
    /// `2^127` divided by `span << shift`.
    pub inverse: u64,
    /// The number of zeros above the highest bit of `span`.
    pub shift: u32,
    /// Not 0 if the place is the index.
    pub by_pair: u32,
}

impl Frequencies {
    /// Returns the frequency of a pair.
    #[inline(always)]
    pub fn of(self, pair: u32) -> u64 {
        let full = times(self.start, power(self.ratio, pair));
        if self.shrink == 0 {
            return full;
        }
        let place = if self.by_pair != 0 { (pair as u64) << 32 } else { full };
        let above = place.saturating_sub(self.low);
        let share = if above >= self.span { u64::MAX } else { times(above << self.shift, self.inverse) << 1 };
        let share = if self.by_pair != 0 { !share } else { share };
        let slow = times(full, self.shrink);
        slow + times(full - slow, share)
    }
}

/// Returns the upper half of a product of two words.
#[inline(always)]
pub fn times(a: u64, b: u64) -> u64 {
    const LOW: u64 = u32::MAX as u64;
    let (a1, a0, b1, b0) = (a >> 32, a & LOW, b >> 32, b & LOW);
    let middle = a1 * b0 + ((a0 * b0) >> 32);
    a1 * b1 + (middle >> 32) + ((a0 * b1 + (middle & LOW)) >> 32)
}

/// Returns `ratio^exponent`, in units of 2^-64.
#[inline(always)]
fn power(ratio: u64, exponent: u32) -> u64 {
    let (mut product, mut square, mut left) = (u64::MAX, ratio, exponent);
    while left > 0 {
        if left & 1 != 0 {
            product = times(product, square);
        }
        square = times(square, square);
        left >>= 1;
    }
    product
}

/// Returns cosine and sine of an angle in units of 2^-64 turns.
///
/// The nearest quarter turn is subtracted. The rest, up to an eighth in either direction, is
/// converted to radians. Its sine and cosine are Cephes' polynomials (Moshier, `sinf.c`), whose own
/// error is below 2^-27.
#[inline(always)]
fn cos_sin(angle: u64) -> (f32, f32) {
    let fma = GpuFloat::mul_add;
    let quarters = angle.wrapping_add(1 << 61) >> 62;
    let left = angle.wrapping_sub(quarters << 62) as i64 as f32;
    let x = fma(left, TURN_HI, left * TURN_LO);
    let square = x * x;
    let mut p = f32::from_bits(0xb94c_a1f9);
    p = fma(p, square, f32::from_bits(0x3c08_839e));
    p = fma(p, square, f32::from_bits(0xbe2a_aaa3));
    let sin = fma(square * x, p, x);
    let mut q = f32::from_bits(0x37cc_f5ce);
    q = fma(q, square, f32::from_bits(0xbab6_061a));
    q = fma(q, square, f32::from_bits(0x3d2a_aaa5));
    let cos = fma(square * square, q, fma(square, -0.5, 1.0));
    match quarters {
        0 => (cos, sin),
        1 => (-sin, cos),
        2 => (-cos, -sin),
        _ => (sin, -cos),
    }
}
