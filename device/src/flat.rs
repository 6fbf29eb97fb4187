//! 16 bytes of each flat array of a kernel: four f32 or eight BF16, kept as memory stores them
//! until they are used.
//!
//! ```text
//! x, BF16    | 0  1  2  3 | 4  5  6  7 | 8  9 |      Fours<bf16, 2>: one access of 16 bytes
//! x, f32     | 0  1  2  3 | 4  5 |                   Fours<f32, 1>:  one access of 16 bytes
//! at the end              four by four, then one by one: `load_part`, `store_part`
//! ```
//! [`write_own_vectors`](crate::write_own_vectors) uses these for a thread's share of the arrays.
//!
//! Invariant: an access of 16 bytes has an index that is a multiple of its elements, and a base on
//! a 16-byte boundary. A result does not depend on which access moved an element.

use crate::machine::memory::{reads, reads_at_once};
use crate::stored::Stored;
use crate::vector::{F4, VectorPart, store8};

/// A flat operand of a kernel: a slice, or the pointer to an output that the kernel also reads.
pub trait Flat {
    /// The type of its elements.
    type Element: Stored;

    /// Returns the pointer to the first element.
    fn start(self) -> *const Self::Element;
}

impl<S: Stored> Flat for &[S] {
    type Element = S;

    #[inline(always)]
    fn start(self) -> *const S {
        self.as_ptr()
    }
}

impl<S: Stored> Flat for *mut S {
    type Element = S;

    #[inline(always)]
    fn start(self) -> *const S {
        self
    }
}

/// `N` vectors of four elements that lie next to each other, as memory stores them.
#[derive(Clone, Copy)]
pub struct Fours<S: Stored, const N: usize>([S::Four; N]);

impl<S: Stored, const N: usize> Fours<S, N> {
    /// Loads `x[index..index + 4 N]`, with accesses of 16 bytes, or of 8 bytes for four BF16.
    ///
    /// # Safety
    /// `x` is valid for reads of these elements and starts on a 16-byte boundary. `index` is a
    /// multiple of `4 N`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load(x: *const S, index: usize) -> Self {
        reads(x, index, F4::LEN * N);
        reads_at_once(x, index, if N == 2 { 16 / size_of::<S>() } else { F4::LEN });
        // SAFETY: the elements may be read, and lie on a boundary of `4 N`.
        unsafe { Self(S::read_fours(x.add(index))) }
    }

    /// Returns vector `at`.
    #[inline(always)]
    pub fn get(self, at: usize) -> F4 {
        F4(S::widen4(self.0[at]))
    }
}

impl<S: Stored> Fours<S, 1> {
    /// Loads the elements of `x[index..index + 4]` that lie below `length`, with zeros in the
    /// others.
    ///
    /// # Safety
    /// `x` is valid for reads of `length` elements and starts on a 16-byte boundary. `index` is a
    /// multiple of four.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_part(x: *const S, index: usize, length: usize) -> Self {
        // SAFETY: only elements below `length` are read. Four of them lie on a boundary of four.
        unsafe {
            if index + F4::LEN <= length {
                return Self::load(x, index);
            }
            let count = length.saturating_sub(index);
            reads(x, index, count);
            let element = |at: usize| if at < count { x.add(index + at).read() } else { S::narrow(0.0) };
            Self([S::four([element(0), element(1), element(2), element(3)])])
        }
    }
}

/// The outputs of a kernel on flat arrays: one pointer, or two.
pub trait Outputs: Copy {
    /// A vector for each output.
    type Vectors: Copy;

    /// Returns vectors of zeros.
    fn zeros(self) -> Self::Vectors;

    /// Writes elements `index..index + 4 N`: the counterpart of [`Fours::load`].
    ///
    /// # Safety
    /// Each output is valid for writes of these elements, in global memory, and starts on a 16-byte
    /// boundary. `index` is a multiple of `4 N`.
    unsafe fn store<const N: usize>(self, values: [Self::Vectors; N], index: usize);

    /// Writes those of the elements `index..index + 4` that lie below `length`.
    ///
    /// # Safety
    /// Each output is valid for writes of `length` elements, in global memory, and starts on a
    /// 16-byte boundary. `index` is a multiple of four.
    unsafe fn store_part(self, values: Self::Vectors, index: usize, length: usize);
}

impl<S: Stored> Outputs for *mut S {
    type Vectors = F4;

    #[inline(always)]
    fn zeros(self) -> F4 {
        F4::splat(0.0)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store<const N: usize>(self, values: [F4; N], index: usize) {
        // SAFETY: the elements may be written, and lie on a boundary of `4 N`.
        unsafe {
            match values.as_slice() {
                [first, second] => store8([*first, *second], self, index),
                values => values[0].store(self, index),
            }
        }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_part(self, values: F4, index: usize, length: usize) {
        let part =
            if index + F4::LEN <= length { VectorPart::Whole } else { VectorPart::First(length.saturating_sub(index)) };
        // SAFETY: only elements below `length` are written. Four of them lie on a boundary of four.
        unsafe { values.store_part(self, index, part) }
    }
}

impl<S: Stored> Outputs for [*mut S; 2] {
    type Vectors = [F4; 2];

    #[inline(always)]
    fn zeros(self) -> [F4; 2] {
        [F4::splat(0.0); 2]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store<const N: usize>(self, values: [[F4; 2]; N], index: usize) {
        // SAFETY: the caller guarantees it for both outputs.
        unsafe {
            self[0].store(values.map(|[first, _]| first), index);
            self[1].store(values.map(|[_, second]| second), index);
        }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_part(self, [first, second]: [F4; 2], index: usize, length: usize) {
        // SAFETY: the caller guarantees it for both outputs.
        unsafe {
            self[0].store_part(first, index, length);
            self[1].store_part(second, index, length);
        }
    }
}
