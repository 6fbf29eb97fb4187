//! Typed windows into the block's dynamic shared memory.
//!
//! A kernel lays out its shared memory as tiles at fixed byte offsets, and its contract declares
//! their sum. On the GPU a tile is a 32-bit shared address, and every access is one unchecked
//! `ld.shared` or `st.shared`. On the CPU a tile is a pointer, and an access outside it panics with
//! the index and the tile's length. If the emulator's race detector is on, it checks every access
//! first. [`machine`](crate::machine) has both sides.
//!
//! ```text
//! 32 banks of 4 bytes: the word at index i of a tile at byte 0 lies in bank i mod 32
//!   lanes that access different words of one bank conflict: their accesses take turns
//!   16 bytes a lane: eight lanes fill the 32 banks, so a warp takes at least four turns,
//!   unless lanes read the same words
//! ```
//! Invariant: a thread reads what another thread wrote only after a barrier. The tile itself orders
//! nothing.

use crate::machine::shared::Window;
pub use crate::machine::shared::{SharedElement, commit_copies, wait_copies};
use crate::stored::Stored;
use crate::vector::F4;
use crate::warp::Converged;

/// A tile of values of type `T` in the block's shared memory.
///
/// The caller of [`SharedTile::new`] guarantees that the tile lies inside that memory, and that
/// every index lies inside the tile, on the boundary that a method requires.
#[derive(Clone, Copy)]
pub struct SharedTile<T>(pub(crate) Window<T>);

impl<T: SharedElement> SharedTile<T> {
    /// Returns the tile of `len` values that starts `byte_offset` bytes into the block's dynamic
    /// shared memory. For access four values wide, `byte_offset` is a multiple of 16.
    ///
    /// # Safety
    /// The tile lies inside the shared memory that the kernel's contract declares. Tiles of
    /// different types do not overlap. Every index passed to a method lies inside the tile, and is
    /// aligned as that method requires. The CPU checks that it lies inside; the GPU checks nothing.
    #[inline(always)]
    pub unsafe fn new(byte_offset: u32, len: u32) -> Self {
        Self(Window::new(byte_offset, len))
    }

    /// Returns the value at `index`.
    #[inline(always)]
    #[track_caller]
    pub fn get(self, index: u32) -> T {
        // SAFETY: the index lies inside the tile.
        unsafe { self.0.read(index) }
    }

    /// Writes `value` at `index`.
    #[inline(always)]
    #[track_caller]
    pub fn set(self, index: u32, value: T) {
        // SAFETY: the index lies inside the tile.
        unsafe { self.0.write(index, value) };
    }

    /// Returns the four values from `index`, a multiple of four.
    #[inline(always)]
    #[track_caller]
    pub fn chunk(self, index: u32) -> [T; 4] {
        // SAFETY: the values lie inside the tile, on a 16-byte boundary.
        unsafe { self.0.read4(index) }
    }

    /// Writes four values from `index`, a multiple of four.
    #[inline(always)]
    #[track_caller]
    pub fn set_chunk(self, index: u32, values: [T; 4]) {
        // SAFETY: the values lie inside the tile, on a 16-byte boundary.
        unsafe { self.0.write4(index, values) };
    }
}

impl SharedTile<f32> {
    /// Returns the four values from `index`, a multiple of four, as a vector.
    #[inline(always)]
    #[track_caller]
    pub fn get4(self, index: u32) -> F4 {
        F4(self.chunk(index))
    }

    /// Returns the two values from `index`, a multiple of two.
    #[inline(always)]
    #[track_caller]
    pub fn get2(self, index: u32) -> [f32; 2] {
        // SAFETY: the values lie inside the tile, on an 8-byte boundary.
        unsafe { self.0.read2(index) }
    }

    /// Writes a vector of four values from `index`, a multiple of four.
    #[inline(always)]
    #[track_caller]
    pub fn set4(self, index: u32, value: F4) {
        self.set_chunk(index, value.0);
    }
}

/// Asynchronous copies from global memory (cp.async). After [`wait_copies`] the same thread may
/// read the copied data. After a barrier that follows, all threads of its block may. The emulator
/// copies synchronously.
impl SharedTile<f32> {
    /// Starts to copy `x[from]` to `index`.
    ///
    /// # Safety
    /// `from < x.len()`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy(self, index: u32, x: &[f32], from: usize) {
        // SAFETY: inside the tile and inside `x`.
        unsafe { self.0.copy4(index, x, from) };
    }

    /// Starts to copy `x[from]` to `index`, or writes zero if `there` is false.
    ///
    /// # Safety
    /// If `there` is true, `from < x.len()`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy_or_zero(self, index: u32, x: &[f32], from: usize, there: bool) {
        // SAFETY: inside the tile and, if `there` is true, inside `x`.
        unsafe { self.0.copy4_or_zero(index, x, from, there) };
    }

    /// Starts to copy `x[from..from + 4]` to `index`, or writes zeros if `there` is false. Both
    /// indices are multiples of four, and `x` starts on a 16-byte boundary.
    ///
    /// # Safety
    /// If `there` is true, `from + 4 <= x.len()`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy4_or_zero(self, index: u32, x: &[f32], from: usize, there: bool) {
        // SAFETY: inside the tile and, if `there` is true, inside `x`, both on 16-byte boundaries.
        unsafe { self.0.copy16_or_zero(index, x, from, there) };
    }

    /// Starts to copy `x[from..from + 4]` to `index`. Both indices are multiples of four, and `x`
    /// starts on a 16-byte boundary.
    ///
    /// # Safety
    /// S is f32, and `from + 4 <= x.len()`. The CPU checks the range, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy4<S: Stored>(self, index: u32, x: &[S], from: usize) {
        // SAFETY: inside the tile and inside `x`, both on 16-byte boundaries.
        unsafe { self.0.copy16(index, x, from) };
    }
}

impl SharedTile<u32> {
    /// Starts to copy the 16 bytes of `x` that begin with `x[from]` to the four words from `index`
    /// on. `index` is a multiple of four, and `x[from]` lies on a 16-byte boundary.
    ///
    /// # Safety
    /// The elements lie inside `x`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy_chunk<S: Stored>(self, index: u32, x: &[S], from: usize) {
        // SAFETY: inside the tile and inside `x`, both on 16-byte boundaries.
        unsafe { self.0.copy16(index, x, from) };
    }

    /// Starts the copy of [`copy_chunk`](Self::copy_chunk), or writes zeros if `there` is false.
    ///
    /// # Safety
    /// If `there` is true, the elements lie inside `x`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy_chunk_or_zero<S: Stored>(self, index: u32, x: &[S], from: usize, there: bool) {
        // SAFETY: inside the tile and, if `there` is true, inside `x`, both on 16-byte boundaries.
        unsafe { self.0.copy16_or_zero(index, x, from, there) };
    }

    /// Starts the copy of the first `count` elements of [`copy_chunk`](Self::copy_chunk), with zeros
    /// in place of the others. `x[from]` lies on a 16-byte boundary if `count` is not 0.
    ///
    /// # Safety
    /// `count` elements from `x[from]` on lie inside `x`, and at most 16 bytes. The CPU checks it,
    /// the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy_chunk_part<S: Stored>(self, index: u32, x: &[S], from: usize, count: u32) {
        // SAFETY: inside the tile and, as far as `count` reaches, inside `x`, both on 16-byte
        // boundaries.
        unsafe { self.0.copy16_part(index, x, from, count) };
    }

    /// Returns the two values from `index`, a multiple of two.
    #[inline(always)]
    #[track_caller]
    pub fn pair(self, index: u32) -> [u32; 2] {
        // SAFETY: the values lie inside the tile, on an 8-byte boundary.
        unsafe { self.0.read_pair(index) }
    }

    /// Reads four matrices of 8 x 8 16-bit elements by `ldmatrix.x4`. Lane `8 q + r` supplies the
    /// address of row r of matrix q: its first word, `index`, a multiple of four. Lane `4 g + t`
    /// gets elements 2 t and 2 t + 1 of row g of each matrix, or of column g if `transposed`, the
    /// same constant in every lane.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn matrices(self, warp: Converged, index: u32, transposed: bool) -> [u32; 4] {
        // SAFETY: the lane's row lies inside the tile, on a 16-byte boundary.
        unsafe { self.0.matrices(warp, index, transposed) }
    }
}
