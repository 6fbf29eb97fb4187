//! Memory that outlives steps: weights, gradients, moments, hyperparameters.
//!
//! Invariant: a buffer owns its memory, whole words of it, and no reset reaches it.

use super::situation::admit;
use crate::driver::{Device, Retired};
use crate::error::{Error, Result};
use crate::launch::launch_on;
use crate::tensor::{Element, Memory};
use kernels::fill::fill;
use sha2::{Digest, Sha256};
use std::marker::PhantomData;
use std::ops::Range;

/// Bytes of a word, which a buffer's last elements may leave room in.
const WORD: usize = size_of::<u32>();
/// What is read at once of a region that may be larger than the host's memory.
pub(crate) const PIECE_BYTES: usize = 16 << 20;

/// `len` elements of device memory, owned.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    device: Device,
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// A buffer of `len` zeros.
    ///
    /// # Errors
    /// [`Error::Refused`] for a MiB or more that is not available, with every number; [`Error::DeviceMemory`] when the driver has no room;
    /// [`Error::Misuse`] for no elements.
    pub fn zeros(device: &Device, len: usize) -> Result<Self> {
        let buffer = Self::allocate(device, len)?;
        // The bits of zero are the same in every element type.
        let memory = buffer.memory().words().cast::<f32>();
        launch_on(device, &fill { out: memory.as_out(), length: memory.len(), value: 0.0 })?;
        Ok(buffer)
    }

    /// A buffer that holds whatever was there.
    pub(crate) fn allocate(device: &Device, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_next_multiple_of(WORD));
        let Some(bytes) = bytes.filter(|&bytes| bytes > 0) else {
            return Err(Error::misuse(
                "buffer",
                "at least one element, and bytes that fit an address",
                len.to_string(),
            ));
        };
        admit(device, bytes)?;
        let address = device.allocate(bytes)?;
        Ok(Self { device: device.clone(), address, len, element: PhantomData })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a buffer has at least one element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device whose memory this is.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Bytes that the buffer owns.
    pub(crate) fn bytes(&self) -> usize {
        (self.len * size_of::<T>()).next_multiple_of(WORD)
    }

    /// The whole buffer as memory; whoever holds it must hold a borrow of the buffer too.
    pub(crate) fn memory(&self) -> Memory<T> {
        // SAFETY: the buffer owns the words of `len` elements at its address until it is dropped.
        unsafe { Memory::new(self.device.identity(), self.address, self.len) }
    }

    /// Waits for the work queued before and returns all elements.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when the host has less memory than they take; [`Error::Timeout`]
    /// after the device's deadline.
    pub fn read(&self) -> Result<Vec<T>> {
        self.read_range(0, self.len)
    }

    /// Waits for the work queued before and returns `len` elements from `start` on.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they do not exist; as for [`Buffer::read`].
    pub fn read_range(&self, start: usize, len: usize) -> Result<Vec<T>> {
        self.check("buffer.read", start, len)?;
        self.memory().part(start, len).download(&self.device, self.device.deadline())
    }

    /// The elements of a range that exist, read piece by piece. Waits for each.
    pub(crate) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Result<Vec<T>>> {
        let most = PIECE_BYTES / size_of::<T>();
        let starts = range.clone().step_by(most);
        starts.map(move |start| self.read_range(start, most.min(range.end - start)))
    }

    /// An error in the name of `op` unless so many elements from `start` on exist.
    pub(crate) fn check(&self, op: &'static str, start: usize, len: usize) -> Result<()> {
        if start.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        Err(Error::misuse(op, format!("a range inside 0..{}", self.len), format!("{len} elements from {start} on")))
    }
}

impl Buffer<f32> {
    /// Adds the little-endian bytes of a range that exists to a digest, piece by piece. Waits for
    /// each.
    pub(crate) fn hash_into(&self, hash: &mut Sha256, range: Range<usize>) -> Result<()> {
        self.pieces(range).try_for_each(|piece| {
            let words: Vec<[u8; 4]> = piece?.iter().map(|value| value.to_le_bytes()).collect();
            hash.update(words.as_flattened());
            Ok(())
        })
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        let memory = Retired::Memory { address: self.address, bytes: self.bytes() };
        // SAFETY: this is what `allocate` took; the buffer owns it, work that used it was queued before, and graphs pin it.
        unsafe { self.device.retire(memory) };
    }
}
