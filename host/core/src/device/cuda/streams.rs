//! The streams next to the main one, and the status codes of driver calls.
//!
//! Exchanges run on a side stream. Uploads that run concurrently with the main stream take two
//! copies: a copy stream brings host bytes to a bounce buffer, and the main stream copies them
//! from there in its own order.
//!
//! Invariants, whose waits the GPU makes, so that no call here waits:
//!
//! - Work queued on the side stream after a fork runs after the main stream's work at the time of
//!   the fork. Work queued on the main stream after a join runs after all work queued on the side
//!   stream.
//! - A bounce buffer is written only after its former contents were copied on, and read only after
//!   it was written. A copy to a free bounce buffer waits for nothing, so all pieces of a large
//!   upload run concurrently with the main stream.
//! - A failure that makes the context unusable is marked fatal.

use crate::error::{Error, Result};
use cust::stream::Stream;
use cust::sys::{self, CUevent, CUresult, CUstream};
use std::ffi::CStr;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The stream, and the newest events of both directions.
pub(super) struct SideStream {
    stream: Stream,
    events: Mutex<SideEvents>,
}

struct SideEvents {
    /// The event that is recorded on the main stream.
    begun: CUevent,
    /// The event that is recorded on this stream.
    done: CUevent,
}

// SAFETY: these are plain handles within their context, and the mutex around them serializes calls
// on them.
unsafe impl Send for SideEvents {}

impl SideStream {
    /// Creates the side stream. The context must be current.
    pub(super) fn new(stream: Stream) -> Result<Self> {
        let begun = create_event()?;
        let done = create_event().inspect_err(|_| destroy(begun))?;
        Ok(Self { stream, events: Mutex::new(SideEvents { begun, done }) })
    }

    fn events(&self) -> MutexGuard<'_, SideEvents> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the stream, after making it wait for all work that `main` has so far.
    pub(super) fn fork(&self, main: CUstream) -> Result<CUstream> {
        let (events, stream) = (self.events(), self.stream.as_inner());
        // SAFETY: the event is alive as long as `self`, and both streams as long as the driver.
        unsafe {
            check("cuEventRecord", sys::cuEventRecord(events.begun, main))?;
            check("cuStreamWaitEvent", sys::cuStreamWaitEvent(stream, events.begun, 0))?;
        }
        Ok(stream)
    }

    /// Makes `main` wait for all work that the stream has so far.
    pub(super) fn join(&self, main: CUstream) -> Result<()> {
        let events = self.events();
        // SAFETY: as for `fork`.
        unsafe {
            check("cuEventRecord", sys::cuEventRecord(events.done, self.stream.as_inner()))?;
            check("cuStreamWaitEvent", sys::cuStreamWaitEvent(main, events.done, 0))
        }
    }

    /// Returns true if all work queued on the stream is done. The context must be current.
    pub(super) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream lives as long as `self`, and its driver has made its context current.
        unsafe { is_idle(self.stream.as_inner()) }
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        destroy(events.begun);
        destroy(events.done);
    }
}

/// The stream of copies, and the events by which it and the main stream wait for each other.
pub(super) struct StagingCopy {
    stream: Stream,
    events: Mutex<CopyEvents>,
}

/// The newest copy to a bounce buffer, the newest one from there, and the buffers that copies may
/// still have to leave.
struct CopyEvents {
    filled: CUevent,
    drained: CUevent,
    occupied: Occupied,
}

// SAFETY: these are plain handles within their context, and the mutex around them serializes calls
// on them.
unsafe impl Send for CopyEvents {}

/// The bounce buffers' ranges whose copies the copy stream has not waited for.
#[derive(Default)]
struct Occupied(Vec<Range<u64>>);

impl Occupied {
    /// The most ranges that are stored.
    const MOST: usize = 256;

    /// Reserves a range. Returns true if the stream must wait first, which frees all other ranges.
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
        let filled = create_event()?;
        let drained = create_event().inspect_err(|_| destroy(filled))?;
        Ok(Self { stream, events: Mutex::new(CopyEvents { filled, drained, occupied: Occupied::default() }) })
    }

    /// Queues the copies. Work queued on `main` before runs concurrently with the first of them,
    /// unless that work still uses the bounce buffer.
    ///
    /// # Safety
    /// `to` and `bounce` are device memory of at least `from.len()` bytes. `from` is pinned, and
    /// neither written nor freed before `main` has passed this call.
    pub(super) unsafe fn copy(&self, to: u64, from: &[u8], bounce: u64, main: CUstream) -> Result<()> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let CopyEvents { filled, drained, ref mut occupied } = *events;
        let must_wait = occupied.take(bounce..bounce + from.len() as u64);
        let copies = self.stream.as_inner();
        // SAFETY: the streams and events are alive as long as `self` and the driver. `to`, `from`
        // and `bounce` have the same length by this function's contract, and the waits keep each
        // buffer from being written before it is read.
        unsafe {
            if must_wait {
                check("cuStreamWaitEvent", sys::cuStreamWaitEvent(copies, drained, 0))?;
            }
            check("cuMemcpyHtoDAsync", sys::cuMemcpyHtoDAsync_v2(bounce, from.as_ptr().cast(), from.len(), copies))?;
            check("cuEventRecord", sys::cuEventRecord(filled, copies))?;
            check("cuStreamWaitEvent", sys::cuStreamWaitEvent(main, filled, 0))?;
            check("cuMemcpyDtoDAsync", sys::cuMemcpyDtoDAsync_v2(to, bounce, from.len(), main))?;
            check("cuEventRecord", sys::cuEventRecord(drained, main))
        }
    }
}

impl Drop for StagingCopy {
    fn drop(&mut self) {
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        destroy(events.filled);
        destroy(events.drained);
    }
}

/// Creates an event in the passed state. The context must be current.
pub(super) fn create_event() -> Result<CUevent> {
    let mut event = std::ptr::null_mut();
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: `event` is valid for a write.
    check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) }).map(|()| event)
}

/// Destroys an event and ignores a failure, because a leaked event is the lesser harm.
fn destroy(event: CUevent) {
    // SAFETY: it is not used again, and the driver keeps it until all waits on it are done.
    let _ = unsafe { sys::cuEventDestroy_v2(event) };
}

/// Returns `Ok` on success, else an error with the driver's code and text.
pub(super) fn check(call: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let reason = describe(result);
    // All codes except these leave the context in a state that CUDA does not define.
    let fatal = !matches!(
        result,
        CUresult::CUDA_ERROR_OUT_OF_MEMORY
            | CUresult::CUDA_ERROR_INVALID_VALUE
            | CUresult::CUDA_ERROR_NOT_FOUND
            | CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
            | CUresult::CUDA_ERROR_ILLEGAL_STATE
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    );
    Err(Error::Driver { call, reason, fatal })
}

/// Returns true if all work queued on a stream is done, without waiting.
///
/// # Safety
/// The stream is alive, and its context current.
pub(super) unsafe fn is_idle(stream: CUstream) -> Result<bool> {
    // SAFETY: by this function's contract, the stream is alive and its context current.
    match unsafe { sys::cuStreamQuery(stream) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => check("cuStreamQuery", result).map(|()| true),
    }
}

/// Formats a status code with its name and its text.
pub(super) fn describe(result: CUresult) -> String {
    let text = |get: unsafe extern "C" fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: `text` is valid for a write, and the driver's strings are static.
        match unsafe { get(result, &mut text) } {
            // SAFETY: on success the driver returns a terminated string.
            CUresult::CUDA_SUCCESS if !text.is_null() => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            _ => "?".into(),
        }
    };
    format!("{} ({}): {}", text(sys::cuGetErrorName), result as i32, text(sys::cuGetErrorString))
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
