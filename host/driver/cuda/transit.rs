//! Uploads beside the work of the main stream: host bytes come to a transit place on a stream of copies, and go on from there in
//! the main stream's order.
//!
//! Invariant: a transit place is written only when what was there has been copied on, and read only when it has been written.
//! Both waits are the GPU's; no call here waits. Copies to places that nothing is left to leave wait for nothing, so the pieces of a
//! large upload all come beside what the main stream does.

use super::status::check;
use crate::error::Result;
use cust::stream::Stream;
use cust::sys::{self, CUevent, CUstream};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The stream of copies, and how it and the main stream wait for each other.
pub(super) struct Transit {
    stream: Stream,
    events: Mutex<Events>,
}

/// The newest copy to a transit place, the newest one from there, and the places that copies may still have to leave.
struct Events {
    landed: CUevent,
    gone: CUevent,
    occupied: Occupied,
}

// SAFETY: plain names within their context; calls on them are serialised by the mutex around them.
unsafe impl Send for Events {}

/// Places whose copies the stream of copies has not waited for.
#[derive(Default)]
struct Occupied(Vec<Range<u64>>);

impl Occupied {
    /// More are not remembered one by one.
    const MOST: usize = 256;

    /// Takes a place; whether the stream must wait first, which frees all others.
    fn take(&mut self, place: Range<u64>) -> bool {
        let meets = |other: &Range<u64>| place.start < other.end && other.start < place.end;
        let must_wait = self.0.len() == Self::MOST || self.0.iter().any(meets);
        if must_wait {
            self.0.clear();
        }
        self.0.push(place);
        must_wait
    }
}

impl Transit {
    /// The context is current.
    pub(super) fn new(stream: Stream) -> Result<Self> {
        let landed = create_event()?;
        let gone = create_event().inspect_err(|_| destroy(landed))?;
        Ok(Self { stream, events: Mutex::new(Events { landed, gone, occupied: Occupied::default() }) })
    }

    /// Queues the copies. What is queued on `main` before runs beside the first of them, unless the place was taken since.
    ///
    /// # Safety
    /// `to` and `transit` are device memory of at least `from.len()` bytes; `from` is page-locked, and neither written nor freed
    /// until `main` has come past this call.
    pub(super) unsafe fn copy(&self, to: u64, from: &[u8], transit: u64, main: CUstream) -> Result<()> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let Events { landed, gone, ref mut occupied } = *events;
        let must_wait = occupied.take(transit..transit + from.len() as u64);
        let copies = self.stream.as_inner();
        // SAFETY: the streams and events are alive as long as `self` and the driver; `to`, `from` and `transit` are of one length, as
        // this function asks, and the waits keep each place from being written before it is read.
        unsafe {
            if must_wait {
                check("cuStreamWaitEvent", sys::cuStreamWaitEvent(copies, gone, 0))?;
            }
            check("cuMemcpyHtoDAsync", sys::cuMemcpyHtoDAsync_v2(transit, from.as_ptr().cast(), from.len(), copies))?;
            check("cuEventRecord", sys::cuEventRecord(landed, copies))?;
            check("cuStreamWaitEvent", sys::cuStreamWaitEvent(main, landed, 0))?;
            check("cuMemcpyDtoDAsync", sys::cuMemcpyDtoDAsync_v2(to, transit, from.len(), main))?;
            check("cuEventRecord", sys::cuEventRecord(gone, main))
        }
    }
}

impl Drop for Transit {
    fn drop(&mut self) {
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        destroy(events.landed);
        destroy(events.gone);
    }
}

/// An event that has been passed. The context is current.
pub(super) fn create_event() -> Result<sys::CUevent> {
    let mut event = std::ptr::null_mut();
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: `event` is valid for a write.
    check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) }).map(|()| event)
}

/// That an event may stay is the smaller evil.
pub(super) fn destroy(event: CUevent) {
    // SAFETY: it is used no more; the driver keeps it until what waits for it is done.
    let _ = unsafe { sys::cuEventDestroy_v2(event) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two replays of an input in three pieces and a small one: each waits once, for what the one before has queued.
    #[test]
    fn a_place_is_waited_for_once() {
        let mut occupied = Occupied::default();
        let pieces = [0..8, 8..16, 16..20, 64..65];
        assert_eq!(pieces.clone().map(|piece| occupied.take(piece)), [false; 4]);
        assert_eq!(pieces.clone().map(|piece| occupied.take(piece)), [true, false, false, false]);
        // A part of a place, and a place around it.
        assert_eq!([15..16, 0..64, 64..65, 65..70].map(|piece| occupied.take(piece)), [true, true, false, false]);
    }

    #[test]
    fn places_are_not_remembered_without_end() {
        let mut occupied = Occupied::default();
        let waits = (0..3 * Occupied::MOST as u64).filter(|&at| occupied.take(at..at + 1)).count();
        assert_eq!((waits, occupied.0.len()), (2, Occupied::MOST));
    }
}
