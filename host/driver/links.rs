//! Links between the devices of a group's ranks.
//!
//! Invariant: an exchange has its place in the stream's order, as a launch has. A link ends when its owner lets it go, and not before
//! the device has done what uses it; on a lost device it stays. While there is a link, no wait for the device is longer than its group's
//! for another rank, as what the device waits for may be an exchange.

use super::calls::{Link, Piece, Wire};
use super::device::Device;
use super::retired::Retired;
use crate::error::Result;
use std::sync::Arc;
use std::time::Duration;

/// What a call on the lane may take beyond the group's deadline: the wire's own error, which tells more, comes first.
const MARGIN: Duration = Duration::from_millis(500);

/// A device's way to those of other ranks.
#[derive(Debug)]
pub(crate) struct DeviceLink {
    device: Device,
    link: Link,
    /// How long an exchange may take to be queued; on the emulator, to be made.
    deadline: Duration,
}

impl DeviceLink {
    /// The name of a new link, for one rank to give to all.
    pub(crate) fn name(device: &Device) -> Result<Vec<u8>> {
        device.call("name_link", device.deadline(), |driver| driver.name_link())
    }

    /// Joins the link of this name as `rank` of `ranks`; the others' bytes may come by the wire.
    pub(crate) fn join(
        device: &Device,
        name: Vec<u8>,
        (rank, ranks): (usize, usize),
        wire: Arc<dyn Wire>,
        deadline: Duration,
    ) -> Result<Self> {
        let join = move |driver: &dyn super::Driver| driver.join_link(&name, rank, ranks, wire, deadline);
        let link = device.call("join_link", deadline + MARGIN, join)?;
        device.links().push(deadline);
        Ok(Self { device: device.clone(), link, deadline })
    }

    /// The device whose link it is.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Ends the link whatever hangs, on a thread of its own: exchanges that wait for other ranks end with it. The link is of no use then.
    pub(crate) fn give_up(&self) {
        let link = self.link;
        // SAFETY: an exchange by a link that has ended is refused by the driver, and ending it twice does nothing.
        self.device.call_beside_lane(move |driver| unsafe { driver.leave_link(link) });
    }

    /// Queues copies between this rank and others.
    ///
    /// # Safety
    /// The pieces are memory of this device that stays until the copies are done or the device is lost, and no received piece overlaps
    /// another piece.
    pub(crate) unsafe fn exchange(&self, sends: Vec<Piece>, receives: Vec<Piece>) -> Result<()> {
        let link = self.link;
        // SAFETY: what this function asks for is what the driver asks for.
        let exchange = move |driver: &dyn super::Driver| unsafe { driver.exchange(link, &sends, &receives) };
        self.device.call("exchange", self.deadline + MARGIN, exchange)
    }
}

impl Drop for DeviceLink {
    fn drop(&mut self) {
        let mut links = self.device.links();
        if let Some(own) = links.iter().position(|of_link| *of_link == self.deadline) {
            links.swap_remove(own);
        }
        drop(links);
        // SAFETY: the link is this device's, and its only name goes here; exchanges by it are queued at most.
        unsafe { self.device.retire(Retired::Link(self.link)) };
    }
}
