//! Arithmetic that is one instruction, and conversions to the formats of mma operands.

use cuda_std::GpuFloat;

/// Returns the larger of two, or NaN if either is NaN. 0 is larger than -0.
#[inline(always)]
pub fn larger_or_nan(a: f32, b: f32) -> f32 {
    let larger: f32;
    // SAFETY: arithmetic between registers.
    unsafe {
        core::arch::asm!(
            "max.NaN.f32 {0}, {1}, {2};",
            out(reg32) larger, in(reg32) a, in(reg32) b, options(pure, nomem, preserves_flags, nostack)
        );
    }
    larger
}

/// Returns the larger of `-|a|` and `b`, or NaN if either is NaN.
#[inline(always)]
pub fn larger_of_minus(a: f32, b: f32) -> f32 {
    let larger: f32;
    // The assembler makes one instruction of these three. The compiler would set the sign by an
    // instruction of its own.
    // SAFETY: arithmetic between registers.
    unsafe {
        core::arch::asm!(
            "abs.f32 {0}, {1}; neg.f32 {0}, {0}; max.NaN.f32 {0}, {0}, {2};",
            out(reg32) larger, in(reg32) a, in(reg32) b, options(pure, nomem, preserves_flags, nostack)
        );
    }
    larger
}

/// Returns `negative` if the sign bit of `x` is set, else `positive`.
#[inline(always)]
pub fn by_sign(x: f32, negative: f32, positive: f32) -> f32 {
    let chosen: f32;
    // The assembler makes a predicate of a select. It then computes one number after another, so
    // that each instruction waits for the one before.
    // SAFETY: arithmetic between registers.
    unsafe {
        core::arch::asm!(
            "{{ .reg .b32 %sign; shr.s32 %sign, {1}, 31; lop3.b32 {0}, {2}, {3}, %sign, 0xe4; }}",
            out(reg32) chosen, in(reg32) x, in(reg32) negative, in(reg32) positive,
            options(pure, nomem, preserves_flags, nostack)
        );
    }
    chosen
}

/// Returns 2^(`score` `factor` + `base`), within 2^-17 of itself up to 2^8, for attention. Below
/// 2^-126 it is 0. A NaN gives NaN.
#[inline(always)]
pub fn exp2_weight(score: f32, factor: f32, base: f32) -> f32 {
    let weight: f32;
    // SAFETY: arithmetic between registers.
    unsafe {
        core::arch::asm!(
            "ex2.approx.ftz.f32 {0}, {1};",
            out(reg32) weight, in(reg32) GpuFloat::mul_add(score, factor, base),
            options(pure, nomem, preserves_flags, nostack)
        );
    }
    weight
}

/// Rounds `x` to the nearest TF32, ties to even, and returns its f32 bits.
#[inline(always)]
pub fn round_tf32(x: f32) -> u32 {
    let rounded: u32;
    // SAFETY: a conversion between registers.
    unsafe {
        core::arch::asm!(
            "cvt.rn.tf32.f32 {0}, {1};",
            out(reg32) rounded, in(reg32) x, options(pure, nomem, preserves_flags, nostack)
        );
    }
    rounded
}

/// Rounds two numbers to the nearest BF16, ties to even, and packs them in one word: `low` in the
/// lower half.
#[inline(always)]
pub fn round_bf16(low: f32, high: f32) -> u32 {
    let pair: u32;
    // SAFETY: a conversion between registers.
    unsafe {
        core::arch::asm!(
            "cvt.rn.bf16x2.f32 {0}, {1}, {2};",
            out(reg32) pair, in(reg32) high, in(reg32) low, options(pure, nomem, preserves_flags, nostack)
        );
    }
    pair
}
