//! Copies between the host and the memory of tensors and buffers.
//!
//! Invariant: a copy never exceeds the memory, and every wait for a copy has a deadline.

use crate::device::{Device, DeviceLink, Fill, Piece, PinnedReadback};
use crate::error::Result;
use crate::tensor::{Memory, Source, Stored};
use bytemuck::Pod;
use std::time::Duration;

impl<T: Pod + Send> Memory<T> {
    /// Queues a copy of `values` to the start of the memory.
    ///
    /// # Panics
    /// Panics if they do not fit.
    pub(crate) fn copy_from(self, device: &Device, values: &[T], deadline: Duration) -> Result<()> {
        self.bytes().copy_bytes(None, device, bytemuck::cast_slice(values), deadline)
    }

    /// Waits for the work queued before, until the deadline, and returns all elements.
    pub(crate) fn download(self, device: &Device, deadline: Duration) -> Result<Vec<T>> {
        // SAFETY: the memory is valid by this type's invariant. At the deadline the device is lost,
        // and memory leaks rather than being freed under a copy that may still run.
        unsafe { device.download(self.address(), self.len(), deadline) }
    }
}

impl Memory<u8> {
    /// Queues a copy of `bytes` to the start of the memory. A `bounce` buffer, which nothing else
    /// may use, lets all but the last hop of the copy run concurrently with the work queued before.
    ///
    /// # Panics
    /// Panics if they do not fit into either.
    pub(crate) fn copy_bytes(
        self,
        bounce: Option<Self>,
        device: &Device,
        bytes: &[u8],
        deadline: Duration,
    ) -> Result<()> {
        let room = bounce.map_or(self.len(), |bounce| bounce.len().min(self.len()));
        assert!(bytes.len() <= room, "{} bytes do not fit into {room}", bytes.len());
        // SAFETY: both memories are valid by this type's invariant, and large enough by the
        // assertion above.
        unsafe { device.stage(self.address(), bounce.map(Self::address), bytes, deadline) }
    }

    /// Queues copies of what `fill` writes to all of the memory; see [`Device::stage_with`].
    pub(crate) fn copy_with(
        self,
        device: &Device,
        fill: &Fill<'_>,
        deadline: Duration,
        staged: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        // SAFETY: the memory is valid by this type's invariant.
        unsafe { device.stage_with(self.address(), None, self.len(), fill, deadline, staged) }
    }
}

/// Memory of a group's exchange, and the rank that receives or sends it.
pub type OfRank = (usize, Memory<f32>);

/// Queues copies between the devices of a group. Each of `sends` goes to its rank. Each of
/// `receives` is overwritten with what its rank sends. Empty memory takes no part. The copies run
/// concurrently with what is queued next, until [`DeviceLink::follow`]. Before that, nothing may
/// write this memory or read what is received.
///
/// # Panics
/// Panics if memory belongs to another device, or received memory overlaps any other.
///
/// # Safety
/// Until the link is followed, nothing frees this memory, writes it, or reads what is received.
pub unsafe fn exchange(link: &DeviceLink, sends: &[OfRank], receives: &[OfRank]) -> Result<()> {
    let identity = link.device().identity();
    let piece = |&(rank, memory): &OfRank| {
        assert!(memory.is_of(identity), "the memory must be on the link's device");
        Piece { rank, address: memory.address(), bytes: memory.len() * size_of::<f32>() }
    };
    let is_some = |(_, memory): &&OfRank| memory.len() > 0;
    let sends: Vec<Piece> = sends.iter().filter(is_some).map(piece).collect();
    let receives: Vec<Piece> = receives.iter().filter(is_some).map(piece).collect();
    let mut all: Vec<(&Piece, bool)> = sends.iter().map(|piece| (piece, false)).collect();
    all.extend(receives.iter().map(|piece| (piece, true)));
    all.sort_by_key(|(piece, _)| piece.address);
    // The end of all pieces so far, and the end of the received ones among them.
    let (mut end, mut received) = (0, 0);
    for (piece, written) in all {
        let apart = piece.address >= if written { end } else { received };
        assert!(apart, "received memory overlaps other memory of the exchange");
        end = end.max(piece.address + piece.bytes as u64);
        received = if written { end } else { received };
    }
    // SAFETY: the memories belong to this device, the received ranges overlap no other, and the
    // caller keeps them valid and unused. At the deadline the device is lost, and memory leaks
    // rather than being freed under a copy.
    unsafe { link.exchange(sends, receives) }
}

impl PinnedReadback {
    /// Queues a copy of a tensor of one element to the next word.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) if the readback is full or sealed, and for a tensor that has
    /// another number of elements or is on another device. Otherwise the device's.
    pub fn queue_copy<'s, S: Stored>(&mut self, tensor: &impl Source<'s, S>) -> Result<()> {
        let memory = tensor.memory();
        self.queue(memory.owner(), memory)
    }
}
