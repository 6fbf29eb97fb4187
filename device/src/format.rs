//! The formats of mma operands: how f32 is rounded to them, and their layout in 32-bit words.
//!
//! ```text
//! bits of a word  | 31   | 30 .. 23 | 22 .. 16 | 15 .. 13 | 12 .. 0 |  significand  ties
//! f32             | sign | exponent |           fraction            |  24 bits
//! TF32, 1 a word  | sign | exponent |      fraction       |    0    |  11 bits      away from zero
//! BF16, 2 a word  | upper half of f32: k + 1 | upper half of f32: k |   8 bits      to even
//! (significand: with its implied bit)
//! ```
//! Infinities are preserved. A value that rounds past the largest number becomes an infinity. A NaN
//! stays a NaN, but TF32 truncates its payload: a signaling NaN with no bit left becomes an
//! infinity, as on the GPU.
//!
//! Invariant: every device gives the same bits, except for NaNs.

/// The words along k that an mma instruction multiplies.
pub const STEP: u32 = 8;
/// The formats, for code that selects one at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduced {
    /// [`Tf32`].
    Tf32,
    /// [`Bf16`].
    Bf16,
}

/// A format of mma operands.
pub trait Format {
    /// The elements in a word, along k.
    const PER_WORD: u32;
    /// The elements along k that a warp multiplies at once.
    const PER_STEP: u32 = STEP * Self::PER_WORD;

    /// Rounds elements that are neighbors along k to two words. TF32 takes the first two elements,
    /// BF16 all four.
    fn words(elements: [f32; 4]) -> [u32; 2];

    /// Returns the `part`th element of a word, as f32.
    fn value(word: u32, part: u32) -> f32;

    /// Executes one mma instruction: 16 rows by 8 columns over 8 words. Lanes hold the operands as
    /// PTX defines.
    ///
    /// # Safety
    /// All lanes of the warp make the call, [converged](crate::warp::converge_warp).
    #[cfg(target_arch = "nvptx64")]
    unsafe fn mma(a: [u32; 4], b: [u32; 2], sums: [f32; 4]) -> [f32; 4];
}

/// The TF32 format: f32 values, rounded to 11 bits of significand.
#[derive(Clone, Copy, Debug)]
pub struct Tf32;

/// The BF16 format, in pairs.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;

macro_rules! mma {
    ($instruction:literal) => {
        #[cfg(target_arch = "nvptx64")]
        #[inline(always)]
        unsafe fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
            let (d0, d1, d2, d3): (u32, u32, u32, u32);
            // Inline assembly without `pure`, because LLVM treats its own intrinsic as plain
            // arithmetic and copies it into the branches before it.
            // SAFETY: the caller of `mma` guarantees that all lanes of the warp execute this,
            // converged.
            unsafe {
                core::arch::asm!(
                    concat!($instruction, " {{{0},{1},{2},{3}}}, {{{4},{5},{6},{7}}}, {{{8},{9}}}, {{{10},{11},{12},{13}}};"),
                    out(reg32) d0, out(reg32) d1, out(reg32) d2, out(reg32) d3,
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
                    in(reg32) c[0].to_bits(), in(reg32) c[1].to_bits(), in(reg32) c[2].to_bits(), in(reg32) c[3].to_bits(),
                    options(nomem, nostack, preserves_flags)
                );
            }
            [d0, d1, d2, d3].map(f32::from_bits)
        }
    };
}

impl Format for Tf32 {
    const PER_WORD: u32 = 1;

    #[inline(always)]
    fn words([a, b, _, _]: [f32; 4]) -> [u32; 2] {
        [round_tf32(a), round_tf32(b)]
    }

    #[inline(always)]
    fn value(word: u32, _: u32) -> f32 {
        f32::from_bits(word)
    }

    mma!("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32");
}

impl Format for Bf16 {
    const PER_WORD: u32 = 2;

    #[inline(always)]
    fn words([a, b, c, d]: [f32; 4]) -> [u32; 2] {
        [round_bf16(a, b), round_bf16(c, d)]
    }

    #[inline(always)]
    fn value(word: u32, part: u32) -> f32 {
        f32::from_bits(if part == 0 { word << 16 } else { word & 0xffff_0000 })
    }

    mma!("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32");
}

/// Rounds `x` to the nearest TF32, ties away from zero, and returns its f32 bits.
#[inline(always)]
pub fn round_tf32(x: f32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let rounded: u32;
        // SAFETY: a conversion between registers.
        unsafe {
            core::arch::asm!(
                "cvt.rna.tf32.f32 {0}, {1};",
                out(reg32) rounded, in(reg32) x, options(pure, nomem, preserves_flags, nostack)
            );
        }
        rounded
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let bits = x.to_bits();
        if x.is_nan() {
            bits & !0x1fff
        } else {
            // An infinity's fraction is zero, so adding half a unit changes nothing above the cut.
            (bits + 0x1000) & !0x1fff
        }
    }
}

/// Rounds two numbers to the nearest BF16, ties to even, and packs them in one word: `low` in the
/// lower half.
#[inline(always)]
pub fn round_bf16(low: f32, high: f32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
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
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let round = |x: f32| {
            let bits = x.to_bits();
            // Adds just less than half a unit, or half a unit if the last kept bit is odd.
            if x.is_nan() { 0x7fff } else { (bits + 0x7fff + (bits >> 16 & 1)) >> 16 }
        };
        round(low) | round(high) << 16
    }
}
