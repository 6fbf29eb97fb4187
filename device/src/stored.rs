//! The types in which memory stores the numbers that kernels compute: f32, or BF16 for half the
//! bytes.
//!
//! ```text
//! memory     registers     memory
//! f32    -->    f32    --> f32     unchanged
//! bf16   -->    f32    --> bf16    loads are exact; stores round to nearest, ties to even
//! ```
//! Invariant: arithmetic is f32 for every stored type, and has the same bits on every device. A
//! kernel writes as BF16 what it would write as f32 for the same operands, rounded once. The
//! exception is [`Activations`], whose accuracy matches the stored type.

use crate::activations::Activations;
use crate::format::{Bf16, Format, round_bf16};
use crate::machine::memory::{write_words, write4};
use half::bf16;

/// A type in which memory stores f32 numbers.
pub trait Stored: Activations + Copy + core::fmt::Debug + 'static {
    /// The type's name, by which a family of kernels finds its variant.
    const NAME: &'static str;

    /// Returns the number, exactly.
    fn widen(self) -> f32;

    /// Returns the nearest number of this type, ties to even.
    fn narrow(value: f32) -> Self;

    /// Reads four numbers, in one access.
    ///
    /// # Safety
    /// `x` is valid for reads of four elements and lies on a boundary of four elements.
    unsafe fn read4(x: *const Self) -> [f32; 4];

    /// Writes the nearest of four numbers, in one access.
    ///
    /// # Safety
    /// `out` is valid for writes of four elements, in global memory, and lies on a boundary of four
    /// elements.
    unsafe fn write4(out: *mut Self, values: [f32; 4]);

    /// Writes the nearest of eight numbers, with accesses of 16 bytes.
    ///
    /// # Safety
    /// `out` is valid for writes of eight elements, in global memory, and lies on a boundary of
    /// eight elements.
    unsafe fn write8(out: *mut Self, values: [[f32; 4]; 2]);
}

#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Quad([f32; 4]);

impl Stored for f32 {
    const NAME: &'static str = "f32";

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }

    #[inline(always)]
    unsafe fn read4(x: *const Self) -> [f32; 4] {
        // SAFETY: the caller guarantees that the four elements may be read and lie on a 16-byte
        // boundary.
        unsafe { x.cast::<Quad>().read().0 }
    }

    #[inline(always)]
    unsafe fn write4(out: *mut Self, values: [f32; 4]) {
        // SAFETY: the four elements may be written, on a 16-byte boundary.
        unsafe { write4(out, values) };
    }

    #[inline(always)]
    unsafe fn write8(out: *mut Self, [first, second]: [[f32; 4]; 2]) {
        // SAFETY: the eight elements may be written, each four on a 16-byte boundary.
        unsafe {
            write4(out, first);
            write4(out.add(4), second);
        }
    }
}

/// Four BF16, two in each word.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Words([u32; 2]);

impl Stored for bf16 {
    const NAME: &'static str = "bf16";

    #[inline(always)]
    fn widen(self) -> f32 {
        Bf16::value(u32::from(self.to_bits()), 0)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_bits(round_bf16(value, 0.0) as u16)
    }

    #[inline(always)]
    unsafe fn read4(x: *const Self) -> [f32; 4] {
        // SAFETY: the caller guarantees that the four elements may be read and lie on an 8-byte
        // boundary.
        let Words([low, high]) = unsafe { x.cast::<Words>().read() };
        [Bf16::value(low, 0), Bf16::value(low, 1), Bf16::value(high, 0), Bf16::value(high, 1)]
    }

    #[inline(always)]
    unsafe fn write4(out: *mut Self, values: [f32; 4]) {
        // SAFETY: the caller guarantees that the four elements may be written and lie on an 8-byte
        // boundary.
        unsafe { write_words(out, Bf16::words(values)) };
    }

    #[inline(always)]
    unsafe fn write8(out: *mut Self, [first, second]: [[f32; 4]; 2]) {
        let ([a, b], [c, d]) = (Bf16::words(first), Bf16::words(second));
        // Moved as floats, bit by bit.
        // SAFETY: the eight elements may be written, and lie on a 16-byte boundary.
        unsafe { write4(out.cast(), [a, b, c, d].map(f32::from_bits)) };
    }
}
