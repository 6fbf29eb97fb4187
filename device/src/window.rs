//! A window of an array: the same columns of each row.
//!
//! ```text
//! rows of stride 8, a window of 3 columns from 4 on          as an array of its own
//!   0  1  2  3 [4  5  6] 7                                   [ 4  5  6]
//!   8  9 10 11 [12 13 14] 15                                 [12 13 14]
//! ```
//! Invariant: four elements of the array of its own move as one access where no vector crosses a row or a boundary of four, else one by one.
//! What is moved does not depend on that.

use crate::block::divide;
use crate::stored::Stored;
use crate::vector::{F4, Part, load, store};

/// Where the elements of an array of `[rows, cols]` stand in another.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Columns of the window; not 0.
    pub cols: usize,
    /// Elements from a row of the other array to the next.
    pub stride: usize,
    /// The place of the first element.
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

    /// The place of element `index` of the window.
    #[inline(always)]
    unsafe fn place(self, index: usize) -> usize {
        // SAFETY: `cols` is not 0, as its field says.
        let (row, column) = unsafe { divide(index, self.cols) };
        self.start + row * self.stride + column
    }

    /// The four elements from `index`, a multiple of four, as far as `part` goes; zeros beyond.
    ///
    /// # Safety
    /// `x` has the elements of the window. `part` is whole, or goes to the window's end.
    #[inline(always)]
    pub unsafe fn load<S: Stored>(self, x: &[S], index: usize, part: Part) -> F4 {
        // SAFETY: `x` has the elements, as is asked.
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

    /// Writes what [`Window::load`] reads.
    ///
    /// # Safety
    /// `out` is valid for writes of the elements; `part` as for the read.
    #[inline(always)]
    pub unsafe fn store<S: Stored>(self, value: F4, out: *mut S, index: usize, part: Part) {
        // SAFETY: `out` has the elements, as is asked.
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

    /// An error unless an argument of `length` elements has those of a window of `rows` rows, of which none overlaps the next.
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
