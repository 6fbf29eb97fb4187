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

    /// Four numbers as memory stores them.
    type Four: Copy;

    /// Returns the number, exactly.
    fn widen(self) -> f32;

    /// Returns the nearest number of this type, ties to even.
    fn narrow(value: f32) -> Self;

    /// Returns four elements as [`Self::Four`].
    fn four(elements: [Self; 4]) -> Self::Four;

    /// Returns the four numbers, exactly.
    fn widen4(four: Self::Four) -> [f32; 4];

    /// Reads `4 N` elements, with accesses of 16 bytes. Four elements of 2 bytes are one access of
    /// 8 bytes. `N` is 1 or 2.
    ///
    /// # Safety
    /// `x` is valid for reads of `4 N` elements and lies on a boundary of `4 N` elements.
    unsafe fn read_fours<const N: usize>(x: *const Self) -> [Self::Four; N];

    /// Reads four numbers, in one access.
    ///
    /// # Safety
    /// `x` is valid for reads of four elements and lies on a boundary of four elements.
    #[inline(always)]
    unsafe fn read4(x: *const Self) -> [f32; 4] {
        // SAFETY: the caller guarantees that the four elements may be read and lie on a boundary
        // of four.
        let [four] = unsafe { Self::read_fours::<1>(x) };
        Self::widen4(four)
    }

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
    type Four = [f32; 4];

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn four(elements: [Self; 4]) -> [f32; 4] {
        elements
    }

    #[inline(always)]
    fn widen4(four: [f32; 4]) -> [f32; 4] {
        four
    }

    #[inline(always)]
    unsafe fn read_fours<const N: usize>(x: *const Self) -> [[f32; 4]; N] {
        let mut fours = [[0.0; 4]; N];
        let mut at = 0;
        while at < N {
            // SAFETY: the caller guarantees that the elements may be read, each four on a 16-byte
            // boundary.
            fours[at] = unsafe { x.add(4 * at).cast::<Quad>().read().0 };
            at += 1;
        }
        fours
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

/// Eight BF16, two in each word.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Chunk([[u32; 2]; 2]);

impl Stored for bf16 {
    const NAME: &'static str = "bf16";
    type Four = [u32; 2];

    #[inline(always)]
    fn widen(self) -> f32 {
        Bf16::value(u32::from(self.to_bits()), 0)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_bits(round_bf16(value, 0.0) as u16)
    }

    #[inline(always)]
    fn four(elements: [Self; 4]) -> [u32; 2] {
        let [a, b, c, d] = elements.map(|element| u32::from(element.to_bits()));
        [a | b << 16, c | d << 16]
    }

    #[inline(always)]
    fn widen4([low, high]: [u32; 2]) -> [f32; 4] {
        [Bf16::value(low, 0), Bf16::value(low, 1), Bf16::value(high, 0), Bf16::value(high, 1)]
    }

    #[inline(always)]
    unsafe fn read_fours<const N: usize>(x: *const Self) -> [[u32; 2]; N] {
        let mut fours = [[0; 2]; N];
        // SAFETY: the caller guarantees that the elements may be read and lie on a boundary of all
        // of them.
        unsafe {
            if N == 1 {
                fours[0] = x.cast::<Words>().read().0;
            } else {
                fours.copy_from_slice(&x.cast::<Chunk>().read().0);
            }
        }
        fours
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
