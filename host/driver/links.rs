//! Links between the devices of a group's ranks.
//!
//! Invariant: an exchange runs behind the work queued before, and beside what is queued next until that is told to follow it. Meanwhile no
//! replay is queued that writes what is sent or touches what is received. A link ends when its owner lets it go, and not before
//! the device has done what uses it; on a lost device it stays. While there is a link, no wait for the device is longer than its group's
//! for another rank, as what the device waits for may be an exchange.

use super::calls::{Link, Piece, Wire};
use super::device::Device;
use super::lends::Lending;
use super::retired::Retired;
use crate::error::Result;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
    /// What exchanges beside other work use.
    lent: Mutex<Lending>,
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
        let link = device.call("join_link", deadline.saturating_add(MARGIN), join)?;
        device.links().push(deadline);
        Ok(Self { device: device.clone(), link, deadline, lent: Mutex::new(device.lending()) })
    }

    /// The device whose link it is.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Ends the link whatever hangs, on a thread of its own: exchanges that wait for other ranks end with it. The link is of no use then.
    pub(crate) fn give_up(&self) {
        let link = self.link;
        // What still travels is of no use to anybody.
        self.lent().end();
        // SAFETY: an exchange by a link that has ended is refused by the driver, and ending it twice does nothing.
        self.device.call_beside_lane(move |driver| unsafe { driver.leave_link(link) });
    }

    /// The time that a call of the link may take on the lane.
    fn call_deadline(&self) -> Duration {
        self.deadline.saturating_add(MARGIN)
    }

    fn lent(&self) -> MutexGuard<'_, Lending> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues copies between this rank and others, behind all work queued before and beside what follows, until [`DeviceLink::follow`].
    ///
    /// # Safety
    /// The pieces are memory of this device that stays until the copies are done or the device is lost, and no received piece overlaps
    /// another piece. Until the link is followed, launches and copies write no piece, and read none that is received; replays are kept from
    /// it here.
    pub(crate) unsafe fn exchange(&self, sends: Vec<Piece>, receives: Vec<Piece>) -> Result<()> {
        let link = self.link;
        for (pieces, written) in [(&sends, false), (&receives, true)] {
            // What lies between the pieces of one kind may be lent, too: there are few lends to look at then.
            let start = pieces.iter().map(|piece| piece.address).min();
            let end = pieces.iter().map(|piece| piece.address + piece.bytes as u64).max();
            if let (Some(start), Some(end)) = (start, end) {
                self.lent().add(start, (end - start) as usize, written);
            }
        }
        // SAFETY: what this function asks for is what the driver asks for; replays ask for the lends.
        let exchange = move |driver: &dyn super::Driver| unsafe { driver.exchange(link, &sends, &receives) };
        self.device.call("exchange", self.call_deadline(), exchange).inspect_err(|_| self.lent().end())
    }

    /// What is queued next runs behind all exchanges so far.
    pub(crate) fn follow(&self) -> Result<()> {
        self.device.call("follow_exchanges", self.call_deadline(), |driver| driver.follow_exchanges())?;
        self.lent().end();
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::super::description::DeviceKind;
    use super::super::lends::Use;
    use super::*;
    use std::ops::Range;

    /// Of one rank, which has nobody to talk to.
    #[derive(Debug)]
    struct Nobody;

    impl Wire for Nobody {
        fn send(&self, _: usize, _: &[u8]) -> Result<()> {
            unreachable!("there is one rank")
        }

        fn receive(&self, _: usize, _: &mut [u8]) -> Result<()> {
            unreachable!("there is one rank")
        }
    }

    #[test]
    fn no_replay_changes_what_travels() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let link = DeviceLink::join(&device, Vec::new(), (0, 1), Arc::new(Nobody), device.deadline()).unwrap();
        let memory = device.allocate(1024).unwrap();
        let piece = |at: u64| vec![Piece { rank: 0, address: memory + at, bytes: 256 }];
        // SAFETY: both pieces are of this memory, which stays, and apart; nothing is launched.
        let exchange = || unsafe { link.exchange(piece(0), piece(512)) }.unwrap();
        let replays = |bytes: Range<u64>, written| {
            let used = Use { bytes: memory + bytes.start..memory + bytes.end, written };
            device.replay(&[used], |_| Ok(())).is_ok()
        };
        exchange();
        assert!(replays(0..512, false) && replays(256..512, true), "it reads what is sent, and writes beside it");
        assert!(!replays(255..256, true) && !replays(767..1024, false), "it writes what is sent, or reads what comes");
        link.follow().unwrap();
        assert!(replays(0..1024, true), "it runs behind the exchange");
        exchange();
        link.give_up();
        assert!(replays(0..1024, true), "the link has ended, and the exchange with it");
        // SAFETY: nothing uses it any more.
        unsafe { device.retire(Retired::Memory { address: memory, bytes: 1024 }) };
    }
}
