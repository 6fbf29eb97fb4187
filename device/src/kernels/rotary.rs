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
//! Invariant: the angle is computed in integers only, so every device has the same one.

use crate::block::divide;
use crate::vector::F4;
use crate::{family, unroll};
use cuda_std::{GpuFloat, prelude::*};
use half::bf16;

/// The threads of a block.
const BLOCK: u32 = 128;
/// 2^64 / (2 pi): one radian in units of 2^-64 turns.
const RADIAN: u64 = 0x28be_60db_9391_054a;
/// 2 pi / 2^64 in two parts.
const TURN_HI: f32 = f32::from_bits(0x20c9_0fdb);
const TURN_LO: f32 = f32::from_bits(0x943b_bd2e);

family! {
    /// Rotates each pair of columns `(x, y)` of q and k to `(x cos - y sin, y cos + x sin)`. If
    /// `back` is not 0, it rotates by the opposite angle.
    ///
    /// `x`, `out`: q, k and v as for
    /// [`flash_forward`](struct@crate::flash_attention::flash_forward), with heads of `width`
    /// columns. Token t has the position `offset + t`. Pair i rotates by `ratio^i` radians per
    /// position, with `ratio` in units of 2^-64. v is copied, unless `out` is `x` itself.
    /// Overwrites `out`.
    rotary<S: Stored> { rotary_f32: f32; rotary_bf16: bf16; }
    unsafe fn(
        x: *const S,
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        width: u32,
        stacked: u32,
        ratio: u64,
        offset: u32,
        back: u32,
        samples: u32,
        out: *mut S,
    ) {
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
            let column = quad * F4::LEN;
            let (mut cos, mut sin) = (F4::splat(0.0), F4::splat(0.0));
            unroll!(at < 4 => {
                let frequency = times(RADIAN, power(ratio, (column + at) as u32));
                (cos.0[at], sin.0[at]) = cos_sin(frequency.wrapping_mul(offset as u64 + token as u64));
            });
            if back != 0 {
                sin = -sin;
            }
            let is_copy = !core::ptr::eq(x, out.cast_const());
            let rotated = heads + kv_heads;
            let all = if is_copy { rotated + kv_heads } else { rotated };
            let mut head = 0;
            while head < all {
                let start = if stacked == 0 {
                    (row * (rotated + kv_heads) as usize + head as usize) * width as usize
                } else {
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
                };
                let (low, high) = (start + column, start + half + column);
                let (a, b) = (F4::load_raw(x, low), F4::load_raw(x, high));
                let (turned_a, turned_b) = ((-(b * sin)).fma(a, cos), (a * sin).fma(b, cos));
                let (a, b) = if head < rotated { (turned_a, turned_b) } else { (a, b) };
                a.store(out, low);
                b.store(out, high);
                head += 1;
            }
        }
    }
    // SAFETY: `x` and `out` hold the heads of q, k and v of each token. A thread accesses only its
    // own columns of each head of its own token, and only if that token exists.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        Violation::unless(k.tokens > 0, "tokens", "at least 1", k.tokens)?;
        Violation::unless(k.heads > 0, "heads", "at least 1", k.heads)?;
        let suits = k.kv_heads > 0 && (k.stacked == 0 || k.kv_heads == k.heads);
        Violation::unless(suits, "kv_heads", "at least 1; `heads` if q, k and v are stacked", k.kv_heads)?;
        Violation::unless_aligned("width", k.width, 2 * F4::LEN)?;
        Violation::unless(k.width > 0, "width", "at least 1", k.width)?;
        let heads = Size::of(k.kv_heads).times(2).plus(k.heads);
        Violation::unless(heads.at_most(u32::MAX as usize), "heads", "fewer than 2^32 heads in all", k.heads)?;
        let rows = Size::of(k.samples).times(k.tokens);
        Violation::unless_length("x", rows.times(heads).times(k.width), k.x.len())?;
        Violation::unless_length("out", rows.times(heads).times(k.width), k.out.len())?;
        Grid::cover(rows.times(Size::of(k.width).div_ceil(2 * 4)), BLOCK as usize)
    }
}

/// Returns the upper half of a product of two words.
#[inline(always)]
fn times(a: u64, b: u64) -> u64 {
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
