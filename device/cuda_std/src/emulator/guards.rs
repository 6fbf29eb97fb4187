//! Guards around the outputs of a launch. A kernel that changes them has written outside an
//! argument, through any pointer.
//!
//! [`access`](super::access) checks the pointers that kernels pass to `vector.rs`. But a kernel may
//! also write through a pointer of its own.
//!
//! ```text
//! an allocation  | ..  | 1024 bytes | output | compared | another output | 1024 bytes |  .. |
//!                       compared             fewer, if the next output or the        compared
//!                                            allocation's end is nearer
//! ```
//! Invariant: after a launch the bytes around its outputs are unchanged. If a kernel changed them,
//! they are restored, and the launch is an error. The compared bytes end where another output
//! begins.

use super::fault::Cause;
use crate::launch::{Entry, Extent, Words};
use std::ops::Range;

/// The compared bytes on either side of an output.
const REACH: usize = 1024;

/// The bytes around a launch's outputs, saved before the launch.
pub(super) struct Guards {
    zones: Vec<Zone>,
    /// The content of all zones.
    before: Vec<u8>,
}

/// Bytes near an output that the launch must not write.
struct Zone {
    name: &'static str,
    extent: Extent,
    start: usize,
    bytes: usize,
}

impl Guards {
    /// Saves the guards. `memory` returns the device's allocation that contains an address.
    ///
    /// # Safety
    /// The ranges that `memory` returns can be read and written as bytes. Until [`Guards::check`]
    /// only the launch writes there.
    pub(super) unsafe fn new(entry: &Entry, words: &Words, memory: &dyn Fn(u64) -> Option<Range<u64>>) -> Self {
        let outputs = || words.extents().iter().filter(|extent| extent.written && extent.bytes() > 0);
        let mut guards = Self { zones: Vec::new(), before: Vec::new() };
        for (name, &extent) in entry.pointers.iter().zip(words.extents()) {
            if !extent.written || extent.bytes() == 0 {
                continue;
            }
            let Some(home) = memory(extent.address) else { continue };
            let [start, end] = ends(&extent);
            // Up to the next output on either side.
            let below = outputs().map(|other| ends(other)[1]).filter(|&other| other <= start);
            let above = outputs().map(|other| ends(other)[0]).filter(|&other| other >= end);
            let from = below.fold((home.start as usize).max(start.saturating_sub(REACH)), usize::max);
            let until = above.fold((home.end as usize).min(end.saturating_add(REACH)), usize::min);
            for zone in [from..start, end..until] {
                if !zone.is_empty() {
                    guards.zones.push(Zone { name, extent, start: zone.start, bytes: zone.len() });
                    // SAFETY: the zone lies in `home`, which can be read.
                    let content = unsafe { std::slice::from_raw_parts(zone.start as *const u8, zone.len()) };
                    guards.before.extend_from_slice(content);
                }
            }
        }
        guards
    }

    /// Compares the guards, and restores the bytes that the launch changed.
    ///
    /// # Errors
    /// Returns the first element near an argument that was changed.
    pub(super) fn check(self) -> Result<(), Cause> {
        let mut outcome = Ok(());
        let mut before = &*self.before;
        for Zone { name, extent, start, bytes } in self.zones {
            let (saved, others) = before.split_at(bytes);
            before = others;
            // SAFETY: the zone lies in an allocation, as in `new`, and the launch is over.
            let now = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, bytes) };
            if now == saved {
                continue;
            }
            let differs = |at: &usize| now[*at] != saved[*at];
            // The changed byte that is closest to the argument.
            let is_below = start < extent.address as usize;
            let hit = if is_below { (0..bytes).rev().find(differs) } else { (0..bytes).find(differs) };
            let byte = start as i64 + hit.unwrap_or(0) as i64 - extent.address as i64;
            let element = byte.div_euclid(extent.element_bytes.max(1) as i64);
            now.copy_from_slice(saved);
            if outcome.is_ok() {
                outcome = Err(Cause::Overrun { name, element, length: extent.length });
            }
        }
        outcome
    }
}

/// Returns the address of an extent's first byte, and the address one past its last.
fn ends(extent: &Extent) -> [usize; 2] {
    let start = extent.address as usize;
    [start, start.saturating_add(extent.bytes())]
}
