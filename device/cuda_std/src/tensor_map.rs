//! Tensor maps: matrices in global memory from which the copy engine (TMA) copies boxes.
//!
//! ```text
//! a map: `extents[2]` matrices of `extents[1]` rows x `extents[0]` elements
//! a box: 128 bytes, 64 elements of BF16 or 32 of f32, of each of the map's number of rows, of
//!        one matrix, from any place on
//! ```
//! A kernel gets a map as a parameter, by value. The host describes it as a
//! `launch::TensorMap`, and the driver encodes that for the GPU when it launches the kernel.
//!
//! f32 is rounded to TF32 on the way.
//!
//! Invariant: a box never reads past the extents. What lies there is copied as zero.

use core::marker::PhantomData;

/// The bytes of a row of a box.
pub const BOX_BYTES: u32 = 128;

/// A kernel's parameter as the GPU gets it: 128 bytes, which only the copy engine reads.
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Parameter([u64; 16]);

/// A tensor map of elements `T`: on the GPU its address.
#[cfg(target_arch = "nvptx64")]
pub struct TensorMap<T> {
    address: u64,
    element: PhantomData<T>,
}

#[cfg(target_arch = "nvptx64")]
impl<T> TensorMap<T> {
    /// Returns the map at the generic address of a kernel's parameter.
    #[doc(hidden)]
    #[inline(always)]
    pub fn at(address: u64) -> Self {
        Self { address, element: PhantomData }
    }

    /// Returns the map's generic address.
    #[inline(always)]
    pub fn address(&self) -> u64 {
        self.address
    }
}

/// A tensor map of elements `T`: on the CPU what the host has described.
#[cfg(not(target_arch = "nvptx64"))]
pub struct TensorMap<T> {
    pub(crate) memory: *const T,
    pub(crate) length: usize,
    pub(crate) extents: [u32; 3],
    pub(crate) strides: [usize; 2],
    pub(crate) box_rows: u32,
    pub(crate) element: PhantomData<T>,
}

#[cfg(not(target_arch = "nvptx64"))]
impl<T> TensorMap<T> {
    /// Returns the memory of the matrices, as pointer and length.
    pub fn memory(&self) -> (*const T, usize) {
        (self.memory, self.length)
    }

    /// Returns the elements of a row, the rows of a matrix, and the matrices.
    pub fn extents(&self) -> [u32; 3] {
        self.extents
    }

    /// Returns the rows of a box.
    pub fn box_rows(&self) -> u32 {
        self.box_rows
    }

    /// Returns the index in the memory of an element, at its place in the row, row and matrix.
    pub fn index(&self, [element, row, matrix]: [u32; 3]) -> usize {
        element as usize + row as usize * self.strides[0] + matrix as usize * self.strides[1]
    }
}

impl<T> Clone for TensorMap<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for TensorMap<T> {}
