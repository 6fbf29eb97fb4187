//! Split masters: a trained weight as a BF16, which products read, and a correction of 8 bits.
//!
//! ```text
//! f32       s eeeeeeee mmmmmmm mmmmmmmm mmmmmmmm   rounded to the nearest 24 bits, ties to even
//! 24 bits   s eeeeeeee mmmmmmm mmmmmmmm            = 256 bf16 + correction, as integers
//! bf16      s eeeeeeee mmmmmmm                     the nearest, ties away from zero
//! correction                   -128 ..= 127        in units of 1/256 of the BF16's last place
//! ```
//! The sum is one of integers, so a correction carries into the exponent as a rounding does: the
//! BF16 next above a weight may be a power of 2, or infinite. Zeros keep their signs, and
//! subnormal numbers need no case of their own. From `0x7f7f_ff80` on a magnitude is infinite.
//!
//! Invariant: every f32 whose last 8 bits are zero is its own join of its split, infinities
//! included. All NaNs become one NaN. Both directions use only integers, so they have the same bits
//! on every device.

use crate::vector::{F4, load_raw, store, store_words};
use half::bf16;

/// The bits of the BF16 of a NaN. Its correction is 0.
const NAN: u32 = 0x7fff;

/// Returns the bits of a weight's BF16, and its correction in two's complement.
#[inline(always)]
pub const fn split(weight: f32) -> (u32, u32) {
    let bits = weight.to_bits();
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return (NAN, 0);
    }
    // No number but a NaN is large enough to wrap.
    let rounded = bits.wrapping_add(0x7f + (bits >> 8 & 1)) >> 8;
    (rounded.wrapping_add(0x80) >> 8, rounded & 0xff)
}

/// Returns the weight of the bits of a BF16 and a correction in two's complement. Higher bits of
/// the correction are ignored.
#[inline(always)]
pub const fn join(bf16: u32, correction: u32) -> f32 {
    // The correction's sign fills the bits above it.
    let correction = ((correction << 24) as i32 >> 16) as u32;
    f32::from_bits((bf16 << 16).wrapping_add(correction))
}

/// Returns four weights of their BF16, widened, and a word of their corrections, of which the first
/// has the lowest bits.
#[inline(always)]
pub fn join4(halves: F4, corrections: u32) -> F4 {
    let [a, b, c, d] = halves.0;
    let join = |half: f32, correction| join(half.to_bits() >> 16, correction);
    F4([join(a, corrections), join(b, corrections >> 8), join(c, corrections >> 16), join(d, corrections >> 24)])
}

/// Split masters of a flat region.
#[derive(Clone, Copy)]
pub struct SplitMasters {
    /// The BF16 of each weight.
    pub halves: *mut bf16,
    /// The corrections, four in a word. The first has the lowest bits.
    pub corrections: *mut u32,
}

impl SplitMasters {
    /// Loads four weights from `index` on.
    ///
    /// # Safety
    /// `index` is a multiple of four, and the weights may be read.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load(self, index: usize) -> F4 {
        // SAFETY: the caller guarantees that the four weights may be read, on a boundary of four.
        unsafe { join4(F4::load_raw(self.halves, index), load_raw(self.corrections, index / F4::LEN)) }
    }

    /// Writes four weights from `index` on.
    ///
    /// # Safety
    /// `index` is a multiple of four, and the weights may be written.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store(self, weights: F4, index: usize) {
        let [(a, e), (b, f), (c, g), (d, h)] = weights.0.map(split);
        // SAFETY: the caller guarantees that the four weights may be written, on a boundary of
        // four.
        unsafe {
            store_words(self.halves, index, [a | b << 16, c | d << 16]);
            store(self.corrections, index / F4::LEN, e | f << 8 | g << 16 | h << 24);
        }
    }
}
