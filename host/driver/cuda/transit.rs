//! Uploads beside the work of the main stream: host bytes come to a transit place on a stream of copies, and go on from there in
//! the main stream's order.
//!
//! Invariant: a transit place is written only when what was there has been copied on, and read only when it has been written.
//! Both waits are the GPU's; no call here waits.

use super::{check, create_event};
use crate::error::Result;
use cust::stream::Stream;
use cust::sys::{self, CUevent, CUstream};
use std::sync::{Mutex, PoisonError};

/// The stream of copies, and how it and the main stream wait for each other.
pub(super) struct Transit {
    stream: Stream,
    events: Mutex<Events>,
}

/// The newest copy to a transit place, and the newest one from there.
struct Events {
    landed: CUevent,
    gone: CUevent,
}

// SAFETY: plain names within their context; calls on them are serialised by the mutex around them.
unsafe impl Send for Events {}

impl Transit {
    /// The context is current.
    pub(super) fn new(stream: Stream) -> Result<Self> {
        let landed = create_event()?;
        let gone = create_event().inspect_err(|_| destroy(landed))?;
        Ok(Self { stream, events: Mutex::new(Events { landed, gone }) })
    }

    /// Queues the copies. What is queued on `main` before runs beside the first of them.
    ///
    /// # Safety
    /// `to` and `transit` are device memory of at least `from.len()` bytes; `from` is page-locked, and neither written nor freed
    /// until `main` has come past this call.
    pub(super) unsafe fn copy(&self, to: u64, from: &[u8], transit: u64, main: CUstream) -> Result<()> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let Events { landed, gone } = *events;
        let copies = self.stream.as_inner();
        // SAFETY: streams and events are alive; the memory by the caller's promise.
        unsafe {
            check("cuStreamWaitEvent", sys::cuStreamWaitEvent(copies, gone, 0))?;
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

/// That an event may stay is the smaller evil.
fn destroy(event: CUevent) {
    // SAFETY: it is used no more; the driver keeps it until what waits for it is done.
    let _ = unsafe { sys::cuEventDestroy_v2(event) };
}
