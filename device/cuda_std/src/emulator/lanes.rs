//! What the lanes of a warp show each other: how matrix instructions, which are warp-wide, are emulated.
//!
//! Invariant: a lane has all addresses only when every lane of the warp has come to the same place.

use super::{Collective, WARP, current};

/// Waits for all lanes of the warp, each with a `value`, and returns where the value of each is.
///
/// The values are there until the lanes meet again, which the caller sees to, by
/// [`sync_warp`](crate::warp::sync_warp), before its own may go.
#[track_caller]
pub fn lanes<T>(value: &T) -> [*const T; WARP as usize] {
    Collective::Gather(u32::MAX).wait(core::ptr::from_ref(value) as u64);
    current(|block| core::array::from_fn(|lane| block.brought(lane as u32) as *const T))
}
