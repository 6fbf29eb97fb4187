//! Memory that outlives steps: weights, gradients, moments, hyperparameters.
//!
//! Invariant: a buffer owns its memory in whole words, and no reset frees it.

use crate::device::{DeferredFree, Device};
use crate::error::{Error, Result};
use crate::launch::launch_on;
use crate::tensor::{Element, Memory};
use half::bf16;
use kernels::fill::fill;
use sha2::{Digest, Sha256};
use std::marker::PhantomData;
use std::ops::Range;

/// The bytes of a word. A buffer's last word may be partly unused.
const WORD: usize = size_of::<u32>();
/// The bytes that are read at once from a region that may exceed host memory.
pub const PIECE_BYTES: usize = 16 << 20;

/// An owned buffer of `len` elements in device memory.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    device: Device,
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// Creates a buffer of `len` zeros.
    ///
    /// # Errors
    /// [`Error::Refused`] if a MiB or more is requested and not available, with all figures.
    /// [`Error::DeviceMemory`] if the driver is out of memory. [`Error::Misuse`] if `len` is zero.
    pub fn zeros(device: &Device, len: usize) -> Result<Self> {
        let buffer = Self::allocate(device, len)?;
        // Zero has the same bits in every element type.
        let memory = buffer.memory().words().cast::<f32>();
        launch_on(device, &fill { out: memory.as_out(), length: memory.len(), value: 0.0 })?;
        Ok(buffer)
    }

    /// Creates a buffer with unspecified contents.
    pub(crate) fn allocate(device: &Device, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_next_multiple_of(WORD));
        let Some(bytes) = bytes.filter(|&bytes| bytes > 0) else {
            return Err(Error::misuse(
                "buffer",
                "at least one element, and a size that fits the address space",
                len.to_string(),
            ));
        };
        device.admit(bytes)?;
        let address = device.allocate(bytes)?;
        Ok(Self { device: device.clone(), address, len, element: PhantomData })
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false, because a buffer has at least one element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the device that owns this memory.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Returns the bytes that the buffer owns.
    pub(crate) fn bytes(&self) -> usize {
        (self.len * size_of::<T>()).next_multiple_of(WORD)
    }

    /// Returns the whole buffer as memory. The caller must hold a borrow of the buffer as long as
    /// it uses the result.
    pub fn memory(&self) -> Memory<T> {
        // SAFETY: the buffer owns the words of `len` elements at its address until it is dropped.
        unsafe { Memory::new(self.device.identity(), self.address, self.len) }
    }

    /// Waits for the work queued before and returns all elements.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if the host has too little memory for the result. [`Error::Timeout`]
    /// after the device's deadline.
    pub fn read(&self) -> Result<Vec<T>> {
        self.read_range(0, self.len)
    }

    /// Waits for the work queued before and returns `len` elements from `start` on.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the range exceeds the buffer.
    pub fn read_range(&self, start: usize, len: usize) -> Result<Vec<T>> {
        self.check("buffer.read", start, len)?;
        self.memory().part(start, len).download(&self.device, self.device.deadline())
    }

    /// Reads an existing range piece by piece. Waits for each piece.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Result<Vec<T>>> {
        let most = PIECE_BYTES / size_of::<T>();
        let starts = range.clone().step_by(most);
        starts.map(move |start| self.read_range(start, most.min(range.end - start)))
    }

    /// Returns an error in the name of `op` unless the buffer has `len` elements from `start` on.
    pub(crate) fn check(&self, op: &'static str, start: usize, len: usize) -> Result<()> {
        if start.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        Err(Error::misuse(op, format!("a range inside 0..{}", self.len), format!("{len} elements from {start} on")))
    }
}

impl<T: Element> Buffer<T> {
    /// Adds the little-endian bytes of an existing range to a digest, piece by piece. Waits for
    /// each piece.
    pub fn hash_into(&self, hash: &mut Sha256, range: Range<usize>) -> Result<()> {
        // Every host of a supported GPU has this byte order.
        const { assert!(cfg!(target_endian = "little")) };
        self.pieces(range).try_for_each(|piece| {
            hash.update(bytemuck::cast_slice::<T, u8>(&piece?));
            Ok(())
        })
    }
}

/// A buffer of any type of elements.
#[derive(Clone, Copy, Debug)]
pub enum AnyBuffer<'b> {
    /// A buffer of f32.
    F32(&'b Buffer<f32>),
    /// A buffer of BF16.
    Bf16(&'b Buffer<bf16>),
    /// A buffer of u32, or of what is packed into them.
    U32(&'b Buffer<u32>),
}

impl AnyBuffer<'_> {
    /// Returns the bytes that the buffer owns.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32(buffer) => buffer.bytes(),
            Self::Bf16(buffer) => buffer.bytes(),
            Self::U32(buffer) => buffer.bytes(),
        }
    }

    /// Returns the whole buffer as words, to be moved bit by bit. The caller must hold a borrow of
    /// the buffer as long as it uses the result.
    pub fn words(self) -> Memory<f32> {
        match self {
            Self::F32(buffer) => buffer.memory(),
            Self::Bf16(buffer) => buffer.memory().words().cast(),
            Self::U32(buffer) => buffer.memory().cast(),
        }
    }

    /// Returns the whole words that contain these elements, like [`AnyBuffer::words`].
    ///
    /// # Panics
    /// Panics if the range exceeds the buffer.
    pub fn words_of(self, elements: Range<usize>) -> Memory<f32> {
        let (start, len) = (elements.start, elements.len());
        match self {
            Self::F32(buffer) => buffer.memory().part(start, len),
            Self::Bf16(buffer) => buffer.memory().part(start, len).words().cast(),
            Self::U32(buffer) => buffer.memory().part(start, len).cast(),
        }
    }

    /// Passes the bytes of a range to `each`, piece by piece. Waits for each piece.
    pub fn for_each_piece(self, bytes: Range<usize>, each: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        fn run<T: Element>(
            buffer: &Buffer<T>,
            bytes: Range<usize>,
            each: &mut dyn FnMut(&[u8]) -> Result<()>,
        ) -> Result<()> {
            // The last element may be packed, and only partly in the range.
            let elements = bytes.start / size_of::<T>()..bytes.end.div_ceil(size_of::<T>());
            let mut left = bytes.len();
            buffer.pieces(elements).try_for_each(|piece| {
                let piece = piece?;
                let piece: &[u8] = bytemuck::cast_slice(&piece);
                let piece = &piece[..left.min(piece.len())];
                left -= piece.len();
                each(piece)
            })
        }
        match self {
            Self::F32(buffer) => run(buffer, bytes, each),
            Self::Bf16(buffer) => run(buffer, bytes, each),
            Self::U32(buffer) => run(buffer, bytes, each),
        }
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        let memory = DeferredFree::Memory { address: self.address, bytes: self.bytes() };
        // SAFETY: `allocate` took this memory and the buffer owns it. All work that used it was
        // queued before, and graphs pin it.
        unsafe { self.device.retire(memory) };
    }
}
