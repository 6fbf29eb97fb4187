//! Copies between the host and the memory of tensors and buffers.
//!
//! Invariant: a copy is of no more bytes than the memory has, and its wait has a deadline.

use crate::driver::{Device, DeviceLink, Fill, Landing, Piece};
use crate::error::Result;
use crate::tensor::{Memory, Stored};
use bytemuck::Pod;
use std::time::Duration;

impl<T: Pod + Send> Memory<T> {
    /// Queues a copy of `values` to the start of the memory.
    ///
    /// # Panics
    /// When they do not fit.
    pub(crate) fn copy_from(self, device: &Device, values: &[T], deadline: Duration) -> Result<()> {
        self.bytes().copy_bytes(None, device, bytemuck::cast_slice(values), deadline)
    }

    /// Waits for the work queued before, until the deadline, and returns all elements.
    pub(crate) fn download(self, device: &Device, deadline: Duration) -> Result<Vec<T>> {
        // SAFETY: the memory is valid by this type's invariant; at the deadline the device is lost, and memory leaks
        // rather than being freed under a copy that may still run.
        unsafe { device.download(self.address(), self.len(), deadline) }
    }
}

impl Memory<u8> {
    /// Queues a copy of `bytes` to the start of the memory; by way of `transit`, which nothing else uses, beside the work queued
    /// before, but for the last step.
    ///
    /// # Panics
    /// When they do not fit into either.
    pub(crate) fn copy_bytes(
        self,
        transit: Option<Self>,
        device: &Device,
        bytes: &[u8],
        deadline: Duration,
    ) -> Result<()> {
        let room = transit.map_or(self.len(), |transit| transit.len().min(self.len()));
        assert!(bytes.len() <= room, "{} bytes into {room}", bytes.len());
        // SAFETY: both memories are valid by this type's invariant, and large enough.
        unsafe { device.stage(self.address(), transit.map(Self::address), bytes, deadline) }
    }

    /// Queues copies of what `fill` writes over all of the memory; see [`Device::stage_with`].
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

/// Memory of a group's exchange, and the rank that gets it or gives it.
pub(crate) type OfRank = (usize, Memory<f32>);

/// Queues copies between the devices of a group: each of `sends` to its rank, and over each of `receives` what its rank sends. Memory of no
/// elements takes no part. The copies run beside what is queued next, until [`DeviceLink::follow`]: before that, nothing may write this
/// memory or read what is received.
///
/// # Panics
/// When memory is another device's, or what is received overlaps anything else.
pub(crate) fn exchange(link: &DeviceLink, sends: &[OfRank], receives: &[OfRank]) -> Result<()> {
    let identity = link.device().identity();
    let piece = |&(rank, memory): &OfRank| {
        assert!(memory.is_of(identity), "memory of the link's device");
        Piece { rank, address: memory.address(), bytes: memory.len() * size_of::<f32>() }
    };
    let is_some = |(_, memory): &&OfRank| memory.len() > 0;
    let sends: Vec<Piece> = sends.iter().filter(is_some).map(piece).collect();
    let receives: Vec<Piece> = receives.iter().filter(is_some).map(piece).collect();
    let mut all: Vec<(&Piece, bool)> = sends.iter().map(|piece| (piece, false)).collect();
    all.extend(receives.iter().map(|piece| (piece, true)));
    all.sort_by_key(|(piece, _)| piece.address);
    // The ends of what lies before a piece, and of what of that is received.
    let (mut end, mut received) = (0, 0);
    for (piece, written) in all {
        let apart = piece.address >= if written { end } else { received };
        assert!(apart, "what is received lies apart from all else");
        end = end.max(piece.address + piece.bytes as u64);
        received = if written { end } else { received };
    }
    // SAFETY: the memories are valid by their type's invariant, of this device, and what is written lies apart; at the deadline the
    // device is lost, and memory leaks rather than being freed under a copy. What goes on before the link
    // is followed is an update whose gradients travel (`trainer/shards.rs`). It launches the folding of those that do not yet, and replays,
    // which ask for the lends. What an exchange receives is read by the sum alone, which follows the link; the update before has read what it
    // received by then, for an exchange runs behind all work queued before.
    unsafe { link.exchange(sends, receives) }
}

impl<S: Stored> Memory<S> {
    /// Queues a copy of the only element to the next word of `landing`.
    ///
    /// # Panics
    /// When it is not one element.
    pub(crate) fn land(self, landing: &mut Landing) -> Result<()> {
        assert_eq!(self.len(), 1, "a result of one element");
        // SAFETY: the memory is valid by this type's invariant, and has the bytes of a number.
        unsafe { landing.queue(self.address(), size_of::<S>()) }
    }
}
