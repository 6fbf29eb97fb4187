//! Copies between the host and the memory of tensors and buffers.
//!
//! Invariant: a copy is of no more bytes than the memory has, and its wait has a deadline.

use crate::driver::{Device, Fill, Landing};
use crate::error::Result;
use crate::tensor::{Memory, Stored};
use bytemuck::Pod;
use std::time::Duration;

impl<T: Pod> Memory<T> {
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
        let bytes = unsafe { device.download(self.address(), self.len() * size_of::<T>(), deadline)? };
        Ok(bytemuck::allocation::pod_collect_to_vec(&bytes))
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
