//! Four numbers moved as one access: 16 bytes of f32, 8 of BF16.
//!
//! ```text
//!            10 elements                               rows of 6, which need not start on 16 bytes
//! x          | 0  1  2  3 | 4  5  6  7 | 8  9 |        | 0  1  2  3 | 4  5 | 6  7  8  9 | 10 11 |
//! VectorPart           Whole         Whole   First(2)          First(4)  First(2)   First(4)  First(2)
//! accesses         1             1        2                  4         2          4         2
//! ```
//! Invariant: a vector access has an element index that is a multiple of four, and a base on a
//! 16-byte boundary. (The host's arena aligns to 256 bytes, and a launch checks other bases.) The
//! remainder at the end is moved element by element. A kernel's result never depends on which of
//! the two moved an element.
//!
//! Every global memory access of a kernel goes through this file or [`flat`](crate::flat): kernels
//! pass the pointer they received, and an index. On the CPU a read outside a slice panics with the
//! index and the length. The emulator rejects an access through a pointer that leaves its argument,
//! and a misaligned vector. The GPU checks nothing. [`machine`](crate::machine) has both sides.

use crate::machine::memory::{
    check_range, reads, reads_at_once, reads_slice, write_words, write4, writes, writes_at_once,
};
use crate::map4;
use crate::stored::Stored;
use core::ops::{Add, Div, Mul, Neg, Sub};
use cuda_std::GpuFloat;
use half::bf16;

/// Four floats. In memory they may be any [`Stored`] type: they are widened by loads, and rounded
/// by stores.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(16))]
pub struct F4(pub [f32; 4]);

impl F4 {
    /// The floats in one vector.
    pub const LEN: usize = 4;

    /// Returns the same value four times.
    #[inline(always)]
    pub fn splat(value: f32) -> Self {
        Self([value; 4])
    }

    /// Applies `f` to each float. For a long `f` see [`map4`].
    #[inline(always)]
    pub fn map(self, f: impl Fn(f32) -> f32) -> Self {
        map4!(self, f)
    }

    /// Returns `f(self[i], other[i])` for each of the four. For a long `f` see [`map4`].
    #[inline(always)]
    pub fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let [a, b, c, d] = self.0;
        let [e, g, h, i] = other.0;
        Self([f(a, e), f(b, g), f(c, h), f(d, i)])
    }

    /// Returns `self[i] + a[i] * b[i]`, each rounded once.
    #[inline(always)]
    pub fn fma(self, a: Self, b: Self) -> Self {
        let ([c0, c1, c2, c3], [a0, a1, a2, a3], [b0, b1, b2, b3]) = (self.0, a.0, b.0);
        let fma = GpuFloat::mul_add;
        Self([fma(a0, b0, c0), fma(a1, b1, c1), fma(a2, b2, c2), fma(a3, b3, c3)])
    }

    /// Returns the square roots.
    #[inline(always)]
    pub fn sqrt(self) -> Self {
        map4!(self, GpuFloat::sqrt)
    }

    /// Loads `x[index..index + 4]`. `index` is a multiple of four and `x` starts on a 16-byte
    /// boundary.
    ///
    /// # Safety
    /// `index + 4 <= x.len()`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load<S: Stored>(x: &[S], index: usize) -> Self {
        reads_slice(x, index, Self::LEN);
        check_range(index, Self::LEN, x.len());
        reads_at_once(x.as_ptr(), index, Self::LEN);
        // SAFETY: the range lies inside `x`, which starts on a 16-byte boundary, and `index` is a
        // multiple of four.
        unsafe { Self::at(x.as_ptr(), index) }
    }

    /// Loads like [`F4::load`], from a pointer.
    ///
    /// # Safety
    /// `x` is valid for reads of elements `index..index + 4`, and `x + index` lies on a boundary of
    /// four elements.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_raw<S: Stored>(x: *const S, index: usize) -> Self {
        reads(x, index, Self::LEN);
        reads_at_once(x, index, Self::LEN);
        // SAFETY: the elements may be read and lie on a boundary of four.
        unsafe { Self::at(x, index) }
    }

    /// Loads the part of `x[index..index + 4]` that exists, with `fill` in the other elements.
    ///
    /// # Safety
    /// If `part` is whole, the caller meets the requirements of [`F4::load`]; otherwise `index +
    /// count <= x.len()`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_part<S: Stored>(x: &[S], index: usize, part: VectorPart, fill: f32) -> Self {
        reads_slice(x, index, part.count());
        check_range(index, part.count(), x.len());
        if part == VectorPart::Whole {
            reads_at_once(x.as_ptr(), index, Self::LEN);
        }
        // SAFETY: the elements lie inside `x`, and a whole vector lies on a boundary of four.
        unsafe { Self::part_at(x.as_ptr(), index, part, fill) }
    }

    /// Loads like [`F4::load_part`], from a pointer.
    ///
    /// # Safety
    /// `x` is valid for reads of these elements, and a whole vector lies on a boundary of four.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_part_raw<S: Stored>(x: *const S, index: usize, part: VectorPart, fill: f32) -> Self {
        reads(x, index, part.count());
        if part == VectorPart::Whole {
            reads_at_once(x, index, Self::LEN);
        }
        // SAFETY: the elements may be read, and a whole vector lies on a boundary of four.
        unsafe { Self::part_at(x, index, part, fill) }
    }

    /// # Safety
    /// The caller meets the requirements of [`F4::load_raw`].
    #[inline(always)]
    unsafe fn at<S: Stored>(x: *const S, index: usize) -> Self {
        // SAFETY: the four elements may be read and lie on a boundary of four.
        Self(unsafe { S::read4(x.add(index)) })
    }

    /// # Safety
    /// The caller meets the requirements of [`F4::load_part_raw`].
    #[inline(always)]
    unsafe fn part_at<S: Stored>(x: *const S, index: usize, part: VectorPart, fill: f32) -> Self {
        // SAFETY: the elements of the part may be read. No other is read.
        unsafe {
            match part {
                VectorPart::Whole => Self::at(x, index),
                VectorPart::First(count) => {
                    let x = x.add(index);
                    let element = |at: usize| if at < count { x.add(at).read().widen() } else { fill };
                    Self([element(0), element(1), element(2), element(3)])
                }
            }
        }
    }

    /// Returns each value after rounding to S.
    #[inline(always)]
    pub fn rounded<S: Stored>(self) -> Self {
        let [a, b, c, d] = self.0;
        let round = |value| S::narrow(value).widen();
        Self([round(a), round(b), round(c), round(d)])
    }

    /// Returns the elements of the part, with zero in the others.
    #[inline(always)]
    pub fn only(self, part: VectorPart) -> Self {
        let VectorPart::First(count) = part else { return self };
        let [a, b, c, d] = self.0;
        let element = |at: usize, value: f32| if at < count { value } else { 0.0 };
        Self([element(0, a), element(1, b), element(2, c), element(3, d)])
    }

    /// Writes `out[index..index + 4]`. `index` is a multiple of four and `out` starts on a 16-byte
    /// boundary.
    ///
    /// # Safety
    /// `out` is valid for writes of these elements, in global memory.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store<S: Stored>(self, out: *mut S, index: usize) {
        writes(out, index, Self::LEN);
        writes_at_once(out, index, Self::LEN);
        // SAFETY: the four elements may be written and lie on a boundary of four.
        unsafe { S::write4(out.add(index), self.0) }
    }

    /// Writes the part of `out[index..index + 4]` that exists: the counterpart of
    /// [`F4::load_part`].
    ///
    /// # Safety
    /// `out` is valid for writes of these elements, and a whole vector lies on a boundary of four.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_part<S: Stored>(self, out: *mut S, index: usize, part: VectorPart) {
        // SAFETY: the elements of the part may be written. No other is written.
        unsafe {
            match part {
                VectorPart::Whole => self.store(out, index),
                VectorPart::First(count) => {
                    writes(out, index, count);
                    let out = out.add(index);
                    let [a, b, c, d] = self.0;
                    if count > 0 {
                        *out = S::narrow(a);
                    }
                    if count > 1 {
                        *out.add(1) = S::narrow(b);
                    }
                    if count > 2 {
                        *out.add(2) = S::narrow(c);
                    }
                    if count > 3 {
                        *out.add(3) = S::narrow(d);
                    }
                }
            }
        }
    }
}

/// Writes `out[index..index + 8]`: 16 bytes of BF16 in one access, or two accesses of f32. `index`
/// is a multiple of eight and `out` starts on a 16-byte boundary.
///
/// # Safety
/// `out` is valid for writes of these elements, in global memory.
#[inline(always)]
#[track_caller]
pub unsafe fn store8<S: Stored>(values: [F4; 2], out: *mut S, index: usize) {
    writes(out, index, 2 * F4::LEN);
    writes_at_once(out, index, 16 / size_of::<S>());
    // SAFETY: the eight elements may be written and lie on a boundary of eight.
    unsafe { S::write8(out.add(index), values.map(|four| four.0)) }
}

/// Applies a function to each element of a vector. It is a macro, because a function passed as a
/// value may stay a call that is compiled without the CPU's fused multiply-add.
#[macro_export]
macro_rules! map4 {
    ($vector:expr, $function:path) => {{
        let [a, b, c, d] = ($vector).0;
        $crate::vector::F4([$function(a), $function(b), $function(c), $function(d)])
    }};
}

macro_rules! operator {
    ($($trait:ident, $method:ident, $symbol:tt;)*) => {$(
        impl $trait for F4 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                let ([a, b, c, d], [e, f, g, h]) = (self.0, other.0);
                Self([a $symbol e, b $symbol f, c $symbol g, d $symbol h])
            }
        }
    )*};
}

operator! {
    Add, add, +;
    Sub, sub, -;
    Mul, mul, *;
    Div, div, /;
}

impl Neg for F4 {
    type Output = Self;
    #[inline(always)]
    fn neg(self) -> Self {
        let [a, b, c, d] = self.0;
        Self([-a, -b, -c, -d])
    }
}

/// The part of a vector that exists, and how it is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VectorPart {
    /// All four elements, at a multiple of four, in one access.
    Whole,
    /// The first few elements, up to four, at any index, in one access each.
    First(usize),
}

impl VectorPart {
    /// The number of elements that exist.
    #[inline(always)]
    pub fn count(self) -> usize {
        match self {
            Self::Whole => F4::LEN,
            Self::First(count) => count,
        }
    }

    /// Returns the first `count` elements, at most four, moved one by one.
    #[inline(always)]
    pub fn first(count: usize) -> Self {
        Self::First(if count < F4::LEN { count } else { F4::LEN })
    }
}

/// Reinterprets words of any type as floats, to be moved bit by bit.
#[inline(always)]
pub fn words<T: Copy>(values: &[T]) -> &[f32] {
    const { assert!(size_of::<T>() == 4 && align_of::<T>() == 4) };
    // SAFETY: the same memory in elements of the same size; every word is a valid float.
    unsafe { core::slice::from_raw_parts(values.as_ptr().cast(), values.len()) }
}

/// Loads `x[index]`.
///
/// # Safety
/// `index < x.len()`. The CPU checks it, the GPU does not.
#[inline(always)]
#[track_caller]
pub unsafe fn load<T: Copy>(x: &[T], index: usize) -> T {
    reads_slice(x, index, 1);
    check_range(index, 1, x.len());
    // SAFETY: `index` lies inside `x`.
    unsafe { *x.as_ptr().add(index) }
}

/// Loads like [`load`], from a pointer.
///
/// # Safety
/// `x` is valid for reads of this element.
#[inline(always)]
#[track_caller]
pub unsafe fn load_raw<T: Copy>(x: *const T, index: usize) -> T {
    reads(x, index, 1);
    // SAFETY: the element may be read.
    unsafe { *x.add(index) }
}

/// Loads `x[index]` and `x[index + 1]`, in one access. `index` is even and `x` starts on an 8-byte
/// boundary.
///
/// # Safety
/// `index + 2 <= x.len()`. The CPU checks it, the GPU does not.
#[inline(always)]
#[track_caller]
pub unsafe fn load_pair(x: &[f32], index: usize) -> [f32; 2] {
    #[derive(Clone, Copy)]
    #[repr(C, align(8))]
    struct Pair([f32; 2]);

    reads_slice(x, index, 2);
    check_range(index, 2, x.len());
    reads_at_once(x.as_ptr(), index, 2);
    // SAFETY: both elements lie inside `x`, on an 8-byte boundary because `index` is even.
    unsafe { x.as_ptr().add(index).cast::<Pair>().read().0 }
}

/// Loads `x[index]` and `x[index + 1]` as one word. `index` is even, and `x` starts on a 4-byte
/// boundary.
///
/// # Safety
/// `index + 2 <= x.len()`. The CPU checks it, the GPU does not.
#[inline(always)]
#[track_caller]
pub unsafe fn load_word(x: &[bf16], index: usize) -> u32 {
    reads_slice(x, index, 2);
    check_range(index, 2, x.len());
    reads_at_once(x.as_ptr(), index, 2);
    // SAFETY: both elements lie inside `x`, on a 4-byte boundary because `index` is even.
    unsafe { x.as_ptr().add(index).cast::<u32>().read() }
}

/// Loads like [`load_word`], from a pointer.
///
/// # Safety
/// `x` is valid for reads of elements `index` and `index + 1`, which lie on a 4-byte boundary.
#[inline(always)]
#[track_caller]
pub unsafe fn load_word_raw(x: *const bf16, index: usize) -> u32 {
    reads(x, index, 2);
    reads_at_once(x, index, 2);
    // SAFETY: both may be read, and lie on a 4-byte boundary.
    unsafe { x.add(index).cast::<u32>().read() }
}

/// Writes four BF16, two in each word, in one access.
///
/// # Safety
/// `out` is valid for writes of elements `index..index + 4`, in global memory, and `out + index`
/// lies on a boundary of four elements.
#[inline(always)]
#[track_caller]
pub unsafe fn store_words(out: *mut bf16, index: usize, words: [u32; 2]) {
    writes(out, index, F4::LEN);
    writes_at_once(out, index, F4::LEN);
    // SAFETY: the elements may be written and lie on an 8-byte boundary.
    unsafe { write_words(out.add(index), words) };
}

/// Writes eight BF16, two in each word, in one access.
///
/// # Safety
/// `out` is valid for writes of elements `index..index + 8`, in global memory, and `out + index`
/// lies on a boundary of eight elements.
#[inline(always)]
#[track_caller]
pub unsafe fn store_chunk(out: *mut bf16, index: usize, words: [u32; 4]) {
    writes(out, index, 2 * F4::LEN);
    writes_at_once(out, index, 2 * F4::LEN);
    // SAFETY: the elements may be written and lie on a 16-byte boundary.
    unsafe { write4(out.add(index).cast(), words.map(f32::from_bits)) };
}

/// Writes `out[index] = value`.
///
/// # Safety
/// `out` is valid for writes of this element.
#[inline(always)]
#[track_caller]
pub unsafe fn store<T: Copy>(out: *mut T, index: usize, value: T) {
    writes(out, index, 1);
    // SAFETY: the element may be written.
    unsafe { *out.add(index) = value }
}

/// Writes `out[index] = value`. If `accumulate` is not 0, adds to `out[index]` instead.
///
/// # Safety
/// `out` is valid for reads and writes of this element.
#[inline(always)]
#[track_caller]
pub unsafe fn put(out: *mut f32, index: usize, value: f32, accumulate: u32) {
    if accumulate != 0 {
        reads(out, index, 1);
    }
    writes(out, index, 1);
    // SAFETY: the element may be read and written.
    unsafe {
        let out = out.add(index);
        *out = if accumulate == 0 { value } else { *out + value }
    }
}
