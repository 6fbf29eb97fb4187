//! The bytes around what a launch writes. A kernel that changes them has left an argument, whatever pointer it used.
//!
//! [`access`](super::access) sees the pointers that kernels pass to `vector.rs`. But a kernel may also write through a pointer of
//! its own.
//!
//! ```text
//! an allocation   | ..  | compared: 1024 bytes | output | compared | another output | compared: 1024 bytes |  .. |
//!                                                        fewer, where the next output or the allocation's end is nearer
//! ```
//! Invariant: after a launch the bytes around its outputs are as they were. Where a kernel changed them they are put back, and the
//! launch is an error. Nothing is compared where another output begins.

use super::fault::Cause;
use crate::launch::{Entry, Extent, Words};
use std::ops::Range;

/// Bytes on either side of an output.
const REACH: usize = 1024;

/// What lay around the outputs of a launch before the launch.
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
    /// `memory` says which range around an address the device has as one allocation.
    ///
    /// # Safety
    /// The ranges that `memory` names can be read and written as bytes. Until [`Guards::check`] only the launch writes there.
    pub(super) unsafe fn new(entry: &Entry, words: &Words, memory: &dyn Fn(u64) -> Option<Range<u64>>) -> Self {
        let outputs = || words.extents().iter().filter(|extent| extent.written && extent.bytes() > 0);
        let mut guards = Self { zones: Vec::new(), before: Vec::new() };
        for (name, &extent) in entry.pointers.iter().zip(words.extents()) {
            if !extent.written || extent.bytes() == 0 {
                continue;
            }
            let Some(home) = memory(extent.address) else { continue };
            let [start, end] = ends(&extent);
            // As far as the next output on either side.
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

    /// Compares, and puts back what the launch changed.
    ///
    /// # Errors
    /// The first element of an argument's surroundings that was changed.
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
            // The changed byte that is next to the argument.
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

/// The addresses of an extent's first byte, and of the first byte behind it.
fn ends(extent: &Extent) -> [usize; 2] {
    let start = extent.address as usize;
    [start, start.saturating_add(extent.bytes())]
}
