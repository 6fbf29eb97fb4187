//! A window of an array: the same columns of each row.
//!
//! ```text
//! rows of stride 8, a window of 3 columns from 4 on          as an array of its own
//!   0  1  2  3 [4  5  6] 7                                   [ 4  5  6]
//!   8  9 10 11 [12 13 14] 15                                 [12 13 14]
//! ```
//! Invariant: four elements of the window move as one access if no vector crosses a row or a
//! boundary of four, otherwise one by one. The result is the same.

use crate::block::divide;
use crate::stored::Stored;
use crate::vector::{F4, VectorPart, load, store};

/// The location of the elements of a `[rows, cols]` array inside another array.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// The columns of the window. It is not 0.
    pub cols: usize,
    /// The distance in elements from a row of the other array to the next.
    pub stride: usize,
    /// The index of the first element.
    pub start: usize,
}

impl Window {
    #[inline(always)]
    fn is_whole(self) -> bool {
        self.stride == self.cols && self.start == 0
    }

    #[inline(always)]
    fn has_vectors(self) -> bool {
        (self.cols | self.stride | self.start).is_multiple_of(F4::LEN)
    }

    /// Returns the index in the other array of element `index` of the window.
    #[inline(always)]
    unsafe fn place(self, index: usize) -> usize {
        // SAFETY: `cols` is not 0, as its field documents.
        let (row, column) = unsafe { divide(index, self.cols) };
        self.start + row * self.stride + column
    }

    /// Loads the four elements from `index`, a multiple of four, that `part` selects, with zeros
    /// for the others.
    ///
    /// # Safety
    /// `x` has the elements of the window. `part` is whole, or ends at the window's end.
    #[inline(always)]
    pub unsafe fn load<S: Stored>(self, x: &[S], index: usize, part: VectorPart) -> F4 {
        // SAFETY: `x` has the elements of the window, and no others are read.
        unsafe {
            if self.is_whole() {
                return F4::load_part(x, index, part, 0.0);
            }
            if self.has_vectors() {
                return F4::load_part(x, self.place(index), part, 0.0);
            }
            let element = |at: usize| if at < part.count() { load(x, self.place(index + at)).widen() } else { 0.0 };
            F4([element(0), element(1), element(2), element(3)])
        }
    }

    /// Writes the elements that [`Window::load`] reads.
    ///
    /// # Safety
    /// `out` is valid for writes of the elements. `part` meets the requirements of
    /// [`Window::load`].
    #[inline(always)]
    pub unsafe fn store<S: Stored>(self, value: F4, out: *mut S, index: usize, part: VectorPart) {
        // SAFETY: `out` has the elements of the window, and no others are written.
        unsafe {
            if self.is_whole() {
                return value.store_part(out, index, part);
            }
            if self.has_vectors() {
                return value.store_part(out, self.place(index), part);
            }
            let element = |at: usize, value: f32| {
                if at < part.count() {
                    store(out, self.place(index + at), S::narrow(value));
                }
            };
            let [a, b, c, d] = value.0;
            element(0, a);
            element(1, b);
            element(2, c);
            element(3, d);
        }
    }

    /// Checks that an argument of `length` elements has a window of `rows` rows that do not
    /// overlap.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn check(self, argument: &'static str, rows: usize, length: usize) -> Result<(), cuda_std::launch::Violation> {
        use cuda_std::launch::{Size, Violation};
        Violation::unless(self.cols > 0, "cols", "at least 1", self.cols)?;
        Violation::unless(self.stride >= self.cols, "stride", "at least the columns of the window", self.stride)?;
        let Some(before) = rows.checked_sub(1) else { return Ok(()) };
        let end = Size::of(before).times(self.stride).plus(self.start).plus(self.cols);
        Violation::unless(end.at_most(length), argument, "the elements of the window", length)
    }
}
