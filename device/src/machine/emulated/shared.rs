//! Shared memory by pointers. Every access is checked, and copies are synchronous.

use super::memory;
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{F4, load};
use crate::warp::Converged;
use cuda_std::emulator::{Kind, access, lanes, meet};
use cuda_std::{shared, warp};

/// A 32-bit element type of shared memory.
pub trait SharedElement: Copy {}
impl SharedElement for f32 {}
impl SharedElement for u32 {}

/// Four values on a 16-byte boundary.
#[repr(C, align(16))]
struct Chunk<T>([T; 4]);

/// A part of the block's dynamic shared memory.
///
/// The methods with an `index` are unsafe. Each requires that the window lies inside the shared
/// memory of the launch. An index outside the window panics, and the emulator reports a misaligned
/// access.
#[derive(Clone, Copy)]
pub struct Window<T> {
    pointer: *mut T,
    len: u32,
}

impl<T> Window<T> {
    /// Returns the window of `len` values that starts `byte_offset` bytes into the memory.
    #[inline(always)]
    pub fn new(byte_offset: u32, len: u32) -> Self {
        Self { pointer: shared::dynamic_shared_mem::<u8>().wrapping_add(byte_offset as usize).cast(), len }
    }

    /// Checks an access to `count` values from `index` on, and reports it to the race detector.
    #[inline(always)]
    #[track_caller]
    fn check(self, kind: Kind, index: u32, count: u32) {
        access::shared(kind, self.pointer, self.len, index, count);
        if self.len < count || index > self.len - count {
            out_of_range(index, self.len);
        }
    }

    /// Checks that an access to `count` values lies on a boundary of as many.
    #[inline(always)]
    #[track_caller]
    fn at_once(self, kind: Kind, index: u32, count: usize) {
        access::at_once(kind, self.pointer, index as usize, count * size_of::<T>());
    }
}

#[cold]
#[inline(never)]
fn out_of_range(index: u32, len: u32) -> ! {
    panic!("shared memory: index {index} of {len}")
}

impl<T: SharedElement> Window<T> {
    /// Reads the value at `index`.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn read(self, index: u32) -> T {
        self.check(Kind::Read, index, 1);
        // SAFETY: inside the window, as just checked.
        unsafe { self.pointer.add(index as usize).read() }
    }

    /// Writes the value at `index`.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn write(self, index: u32, value: T) {
        self.check(Kind::Write, index, 1);
        // SAFETY: inside the window, as just checked.
        unsafe { self.pointer.add(index as usize).write(value) };
    }

    /// Reads the four values from `index` on.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn read4(self, index: u32) -> [T; 4] {
        self.check(Kind::Read, index, 4);
        self.at_once(Kind::Read, index, 4);
        // SAFETY: inside the window and on a 16-byte boundary, as just checked.
        unsafe { self.pointer.add(index as usize).cast::<Chunk<T>>().read().0 }
    }

    /// Writes four values from `index` on.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn write4(self, index: u32, values: [T; 4]) {
        self.check(Kind::Write, index, 4);
        self.at_once(Kind::Write, index, 4);
        // SAFETY: inside the window and on a 16-byte boundary, as just checked.
        unsafe { self.pointer.add(index as usize).cast::<Chunk<T>>().write(Chunk(values)) };
    }
}

impl Window<f32> {
    /// Reads the two values from `index` on.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn read2(self, index: u32) -> [f32; 2] {
        self.at_once(Kind::Read, index, 2);
        // SAFETY: the window lies inside shared memory: the function's contract.
        unsafe { [self.read(index), self.read(index + 1)] }
    }

    /// Writes `N` values from `index` on, with one check and one write.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn write_run<const N: usize>(self, index: u32, values: [f32; N]) {
        self.check(Kind::Write, index, N as u32);
        // SAFETY: inside the window, as just checked; the write takes any alignment.
        unsafe { self.pointer.add(index as usize).cast::<[f32; N]>().write_unaligned(values) };
    }

    /// Copies `x[from]` to `index`.
    ///
    /// # Safety
    /// See [`Window`]. `from < x.len()`, which is checked.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy4(self, index: u32, x: &[f32], from: usize) {
        // SAFETY: both are checked.
        unsafe { self.write(index, load(x, from)) };
    }

    /// Copies `x[from]` to `index`, or writes zero if `there` is false.
    ///
    /// # Safety
    /// See [`Window`]. If `there` is true, `from < x.len()`, which is checked.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy4_or_zero(self, index: u32, x: &[f32], from: usize, there: bool) {
        // SAFETY: both are checked.
        unsafe { self.write(index, if there { load(x, from) } else { 0.0 }) };
    }

    /// Copies `x[from..from + 4]` to `index`.
    ///
    /// # Safety
    /// See [`Window`]. `from + 4 <= x.len()`, which is checked.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy16<S: Stored>(self, index: u32, x: &[S], from: usize) {
        // SAFETY: both are checked.
        unsafe { self.write4(index, F4::load(x, from).0) };
    }

    /// Copies `x[from..from + 4]` to `index`, or writes zeros if `there` is false.
    ///
    /// # Safety
    /// See [`Window`]. If `there` is true, `from + 4 <= x.len()`, which is checked.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy16_or_zero(self, index: u32, x: &[f32], from: usize, there: bool) {
        // SAFETY: both are checked.
        unsafe { self.write4(index, if there { F4::load(x, from).0 } else { [0.0; 4] }) };
    }
}

impl Window<u32> {
    /// Reads the two values from `index` on.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn read_pair(self, index: u32) -> [u32; 2] {
        self.at_once(Kind::Read, index, 2);
        // SAFETY: the window lies inside shared memory: the function's contract.
        unsafe { [self.read(index), self.read(index + 1)] }
    }

    /// Copies the 16 bytes of `x` that begin with `x[from]` to `index`.
    ///
    /// # Safety
    /// See [`Window`]. The bytes lie inside `x`, which is checked.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy16<S: Stored>(self, index: u32, x: &[S], from: usize) {
        self.at_once(Kind::Write, index, 4);
        memory::reads_at_once(x.as_ptr(), from, 16 / size_of::<S>());
        // SAFETY: both are checked.
        let bits = |at: usize| unsafe { load(x, from + at) }.widen().to_bits();
        let narrow = size_of::<S>() < 4;
        for word in 0..4 {
            // The bits of a BF16 are the upper half of those of f32.
            let value = if narrow { bits(2 * word) >> 16 | bits(2 * word + 1) } else { bits(word) };
            // SAFETY: inside the window, which is checked.
            unsafe { self.write(index + word as u32, value) };
        }
    }

    /// Makes the copy of [`copy16`](Self::copy16), or writes zeros if `there` is false.
    ///
    /// # Safety
    /// See [`Window`]. If `there` is true, the bytes lie inside `x`, which is checked.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy16_or_zero<S: Stored>(self, index: u32, x: &[S], from: usize, there: bool) {
        // SAFETY: both are checked.
        unsafe {
            if there {
                self.copy16(index, x, from);
            } else {
                (0..4).for_each(|word| self.write(index + word, 0));
            }
        }
    }

    /// Makes the copy of the first `count` elements of [`copy16`](Self::copy16), with zeros in place
    /// of the others.
    ///
    /// # Safety
    /// See [`Window`]. `count` elements lie inside `x`, which is checked.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy16_part<S: Stored>(self, index: u32, x: &[S], from: usize, count: u32) {
        let per_word = 4 / size_of::<S>();
        if count as usize == 4 * per_word {
            // SAFETY: both are checked.
            return unsafe { self.copy16(index, x, from) };
        }
        // SAFETY: the elements are checked.
        let bits = |at: usize| if at < count as usize { unsafe { load(x, from + at) }.widen().to_bits() } else { 0 };
        for word in 0..4 {
            let value = if per_word == 2 { bits(2 * word) >> 16 | bits(2 * word + 1) } else { bits(word) };
            // SAFETY: inside the window, which is checked.
            unsafe { self.write(index + word as u32, value) };
        }
    }

    /// Reads four matrices of 8 x 8 16-bit elements, as `SharedTile::matrices` describes.
    ///
    /// # Safety
    /// See [`Window`]: the lane's row of four words begins at `index`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn matrices(self, _: Converged, index: u32, transposed: bool) -> [u32; 4] {
        self.at_once(Kind::Read, index, 4);
        // SAFETY: inside the window, which is checked.
        let own = [0, 1, 2, 3].map(|word| unsafe { self.read(index + word) });
        let rows = lanes(&own);
        let (g, t) = (warp::lane_id() as usize / 4, warp::lane_id() as usize % 4);
        let matrices = [0, 8, 16, 24].map(|first| {
            // SAFETY: each lane's row lives until `meet` below, which all lanes reach, as
            // they reached this.
            let word = |row: usize, word: usize| unsafe { (*rows[first + row])[word] };
            let element = |row: usize| word(row, g / 2) >> (16 * (g % 2)) & 0xffff;
            if transposed { element(2 * t) | element(2 * t + 1) << 16 } else { word(g, t) }
        });
        meet();
        matrices
    }
}

impl SharedTile<f32> {
    /// Writes `N` values from `index` on, with one check and one write.
    #[inline(always)]
    #[track_caller]
    pub fn set_run<const N: usize>(self, index: u32, values: [f32; N]) {
        // SAFETY: the caller of `SharedTile::new` guarantees that the tile lies inside shared
        // memory.
        unsafe { self.0.write_run(index, values) };
    }
}

impl SharedTile<u32> {
    /// Reports a read of the whole tile to the race detector.
    #[track_caller]
    pub fn reread(self) {
        access::shared(Kind::Read, self.0.pointer, self.0.len, 0, self.0.len);
    }
}

/// Does nothing: copies have ended when they return.
#[inline(always)]
pub fn commit_copies() {}

/// Does nothing: copies have ended when they return.
#[inline(always)]
pub fn wait_copies<const PENDING: u32>() {}
