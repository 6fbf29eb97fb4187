//! Exchange of addresses between a warp's lanes, for the emulation of instructions that belong to a
//! whole warp, such as mma.
//!
//! Invariant: a lane has all addresses only when every lane of the warp has reached the same call.

use super::{Collective, WARP, current};

/// Waits for all lanes of the warp, each with a `value`. Returns the addresses of all these values,
/// by lane.
///
/// The values must live until the lanes meet again. The caller therefore calls [`meet`] before its
/// own value ends.
#[track_caller]
pub fn lanes<T>(value: &T) -> [*const T; WARP as usize] {
    Collective::Gather(u32::MAX).wait(core::ptr::from_ref(value) as u64);
    current(|block| core::array::from_fn(|lane| block.brought(lane as u32) as *const T))
}

/// Waits for all lanes of the warp, without ordering their accesses to memory.
#[track_caller]
pub fn meet() {
    Collective::Gather(u32::MAX).wait(0);
}
