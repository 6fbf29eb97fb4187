//! Uploads that run concurrently with the main stream. A copy stream brings host bytes to a transit
//! buffer, and the main stream copies them from there in its own order.
//!
//! Invariant: a transit buffer is written only after its former contents were copied on, and read
//! only after it was written. The GPU makes both waits, and no call here waits. A copy to a free
//! transit buffer waits for nothing, so all pieces of a large upload run concurrently with the main
//! stream.

use super::status::check;
use crate::error::Result;
use cust::stream::Stream;
use cust::sys::{self, CUevent, CUstream};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The stream of copies, and the events by which it and the main stream wait for each other.
pub(super) struct StagingCopy {
    stream: Stream,
    events: Mutex<Events>,
}

/// The newest copy to a transit buffer, the newest one from there, and the buffers that copies may
/// still have to leave.
struct Events {
    landed: CUevent,
    gone: CUevent,
    occupied: Occupied,
}

// SAFETY: these are plain handles within their context, and the mutex around them serializes calls
// on them.
unsafe impl Send for Events {}

/// The transit ranges whose copies the copy stream has not waited for.
#[derive(Default)]
struct Occupied(Vec<Range<u64>>);

impl Occupied {
    /// The most ranges that are stored.
    const MOST: usize = 256;

    /// Takes a range. Returns true if the stream must wait first, which frees all other ranges.
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

impl StagingCopy {
    /// Creates the copy stream's state. The context must be current.
    pub(super) fn new(stream: Stream) -> Result<Self> {
        let landed = create_event()?;
        let gone = create_event().inspect_err(|_| destroy(landed))?;
        Ok(Self { stream, events: Mutex::new(Events { landed, gone, occupied: Occupied::default() }) })
    }

    /// Queues the copies. Work queued on `main` before runs concurrently with the first of them,
    /// unless that work still uses the transit buffer.
    ///
    /// # Safety
    /// `to` and `transit` are device memory of at least `from.len()` bytes. `from` is pinned, and
    /// neither written nor freed before `main` has passed this call.
    pub(super) unsafe fn copy(&self, to: u64, from: &[u8], transit: u64, main: CUstream) -> Result<()> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let Events { landed, gone, ref mut occupied } = *events;
        let must_wait = occupied.take(transit..transit + from.len() as u64);
        let copies = self.stream.as_inner();
        // SAFETY: the streams and events are alive as long as `self` and the driver. `to`, `from`
        // and `transit` have the same length by this function's contract, and the waits keep each
        // buffer from being written before it is read.
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

impl Drop for StagingCopy {
    fn drop(&mut self) {
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        destroy(events.landed);
        destroy(events.gone);
    }
}

/// Creates an event in the passed state. The context must be current.
pub(super) fn create_event() -> Result<sys::CUevent> {
    let mut event = std::ptr::null_mut();
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: `event` is valid for a write.
    check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) }).map(|()| event)
}

/// Destroys an event and ignores a failure, because a leaked event is the lesser harm.
pub(super) fn destroy(event: CUevent) {
    // SAFETY: it is not used again, and the driver keeps it until all waits on it are done.
    let _ = unsafe { sys::cuEventDestroy_v2(event) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates two replays of an input in three pieces and of a small one. Each waits once, for
    /// the work of the one before.
    #[test]
    fn a_place_is_waited_for_once() {
        let mut occupied = Occupied::default();
        let pieces = [0..8, 8..16, 16..20, 64..65];
        assert_eq!(pieces.clone().map(|piece| occupied.take(piece)), [false; 4]);
        assert_eq!(pieces.clone().map(|piece| occupied.take(piece)), [true, false, false, false]);
        // A part of a range, and a range that contains it.
        assert_eq!([15..16, 0..64, 64..65, 65..70].map(|piece| occupied.take(piece)), [true, true, false, false]);
    }

    #[test]
    fn places_are_not_remembered_without_end() {
        let mut occupied = Occupied::default();
        let waits = (0..3 * Occupied::MOST as u64).filter(|&at| occupied.take(at..at + 1)).count();
        assert_eq!((waits, occupied.0.len()), (2, Occupied::MOST));
    }
}
