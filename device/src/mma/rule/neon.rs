//! The rule by NEON, for four columns of both rows at a time. The steps are those of `avx2.rs`.

use super::{LEAST_FIELD, MOST_FIELD, RULE, mend};
use core::arch::aarch64::*;

/// The bits of an f32's exponent.
const EXPONENT: u32 = 0x7f80_0000;

/// Computes [`add`](super::add).
#[target_feature(enable = "neon")]
pub(super) fn add<const COLS: usize, const DEPTH: usize>(
    sums: &mut [[f32; COLS]; 2],
    rows: [&[f32; DEPTH]; 2],
    columns: &[[f32; COLS]; DEPTH],
) {
    const { assert!(COLS.is_multiple_of(4) && DEPTH.is_multiple_of(4)) };
    let of_rows = [row_operands(rows[0]), row_operands(rows[1])];
    for first in (0..COLS).step_by(4) {
        let load = |numbers: &[f32; COLS]| {
            let numbers = &numbers[first..first + 4];
            // SAFETY: there are four numbers.
            unsafe { vld1q_f32(numbers.as_ptr()) }
        };
        let old = [load(&sums[0]), load(&sums[1])];
        let mut tops = old.map(|old| vandq_u32(vreinterpretq_u32_f32(old), vdupq_n_u32(EXPONENT)));
        let mut operands = Operands::new();
        for (k, column) in columns.iter().enumerate() {
            let column = vreinterpretq_u32_f32(load(column));
            operands.add(column);
            let power = vreinterpretq_f32_u32(vandq_u32(column, vdupq_n_u32(EXPONENT)));
            for (top, row) in tops.iter_mut().zip(rows) {
                let product = vmulq_n_f32(power, f32::from_bits(row[k].to_bits() & EXPONENT));
                *top = vmaxq_u32(*top, vreinterpretq_u32_f32(product));
            }
        }
        let mut new = [[0.0; 4]; 2];
        let mut rare = [[0; 4]; 2];
        for row in 0..2 {
            let nothing = vceqzq_u32(vorrq_u32(tops[row], twice(vreinterpretq_u32_f32(old[row]))));
            let zeros = vandq_u32(nothing, vorrq_u32(vdupq_n_u32(of_rows[row][1]), vceqzq_u32(operands.any)));
            let top = vbslq_u32(zeros, vdupq_n_u32(127 << 23), tops[row]);
            let below = vcltq_u32(top, vdupq_n_u32((LEAST_FIELD as u32) << 23));
            let above = vcgtq_u32(top, vdupq_n_u32((MOST_FIELD as u32) << 23));
            let few = vorrq_u32(vdupq_n_u32(of_rows[row][0]), operands.subnormal());
            // The field of 2^(fraction - top).
            let scale = vreinterpretq_f32_u32(vsubq_u32(vdupq_n_u32((254 + RULE.fraction as u32) << 23), top));
            let mut whole = vdupq_n_s32(0);
            for (&factor, column) in rows[row].iter().zip(columns) {
                let product = vmulq_f32(vmulq_n_f32(load(column), factor), scale);
                whole = vaddq_s32(whole, vcvtq_s32_f32(product));
            }
            let sum = cut(whole, vcvtq_s32_f32(vmulq_f32(old[row], scale)), top);
            let all = vorrq_u32(vorrq_u32(below, above), few);
            // SAFETY: four numbers have room for a vector.
            unsafe {
                vst1q_f32(new[row].as_mut_ptr(), sum);
                vst1q_u32(rare[row].as_mut_ptr(), all);
            }
        }
        for (row, (new, rare)) in new.iter_mut().zip(rare).enumerate() {
            if rare != [0; 4] {
                let bits = (0..4).fold(0, |bits, at| bits | (rare[at] & 1) << at);
                mend(new, sums, rows, columns, row * COLS + first, bits);
            }
            sums[row][first..first + 4].copy_from_slice(new);
        }
    }
}

/// Returns all bits set if a row has a subnormal number, and if all its numbers are zero.
#[target_feature(enable = "neon")]
fn row_operands<const DEPTH: usize>(row: &[f32; DEPTH]) -> [u32; 2] {
    let mut operands = Operands::new();
    for chunk in row.chunks_exact(4) {
        // SAFETY: a chunk has four numbers.
        operands.add(vreinterpretq_u32_f32(unsafe { vld1q_f32(chunk.as_ptr()) }));
    }
    let all = |condition: bool| u32::from(condition).wrapping_neg();
    [all(vmaxvq_u32(operands.subnormal()) != 0), all(vmaxvq_u32(operands.any) == 0)]
}

/// The magnitudes of some operands.
struct Operands {
    /// The least of them, as twice its bits less 1: zero is the largest.
    least: uint32x4_t,
    /// The bits that any has.
    any: uint32x4_t,
}

impl Operands {
    #[target_feature(enable = "neon")]
    fn new() -> Self {
        Self { least: vdupq_n_u32(u32::MAX), any: vdupq_n_u32(0) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    fn add(&mut self, bits: uint32x4_t) {
        let size = twice(bits);
        self.least = vminq_u32(self.least, vsubq_u32(size, vdupq_n_u32(1)));
        self.any = vorrq_u32(self.any, size);
    }

    #[target_feature(enable = "neon")]
    fn subnormal(&self) -> uint32x4_t {
        vcleq_u32(self.least, vdupq_n_u32(0xff_ffff))
    }
}

/// Returns the bits of numbers without their signs, shifted left by one.
#[inline]
#[target_feature(enable = "neon")]
fn twice(bits: uint32x4_t) -> uint32x4_t {
    vaddq_u32(bits, bits)
}

/// Returns `(products + old) 2^(top - fraction)`, cut to f32.
#[inline]
#[target_feature(enable = "neon")]
fn cut(products: int32x4_t, old: int32x4_t, top: uint32x4_t) -> float32x4_t {
    // The fields of the powers as f64.
    let unit = vaddq_u32(vshrq_n_u32::<23>(top), vdupq_n_u32((1023 - 127 - RULE.fraction) as u32));
    let half = |sum: int64x2_t, unit: uint64x2_t| {
        let bits = vreinterpretq_u64_f64(vcvtq_f64_s64(sum));
        let kept = vreinterpretq_f64_u64(vandq_u64(bits, vdupq_n_u64(!0x1fff_ffff)));
        vcvt_f32_f64(vmulq_f64(kept, vreinterpretq_f64_u64(vshlq_n_u64::<52>(unit))))
    };
    let low = half(vaddl_s32(vget_low_s32(products), vget_low_s32(old)), vmovl_u32(vget_low_u32(unit)));
    vcombine_f32(low, half(vaddl_high_s32(products, old), vmovl_high_u32(unit)))
}
