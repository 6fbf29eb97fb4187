//! Lane exchange within a warp of 32 threads.
//!
//! Shuffles use LLVM's intrinsics, because rust-cuda's `warp_shuffle_*` crash libNVVM for
//! `compute_121`. The signatures are rust-cuda's.
//!
//! Invariant: every lane in `mask` calls the same function at the same source line. The emulator
//! reports anything else as an error.

use crate::machine;
use core::mem::size_of;

/// Returns this thread's lane, 0 to 31.
#[inline(always)]
pub fn lane_id() -> u32 {
    machine::lane_id()
}

/// Returns the lanes of this warp that currently run together. The emulator returns the lanes that
/// have not ended.
#[inline(always)]
pub fn activemask() -> u32 {
    machine::active_mask()
}

/// Waits for the lanes in `mask` and makes their writes visible to each other.
///
/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
#[track_caller]
pub unsafe fn sync_warp(mask: u32) {
    // SAFETY: all lanes in `mask` execute this, this one among them.
    unsafe { machine::sync_warp(mask) };
}

/// Returns true if every lane in `mask` passed true.
///
/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
#[track_caller]
pub unsafe fn warp_vote_all(mask: u32, predicate: bool) -> bool {
    // SAFETY: all lanes in `mask` execute this, this one among them.
    unsafe { machine::vote_all(mask, predicate) }
}

/// Returns true if any lane in `mask` passed true.
///
/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
#[track_caller]
pub unsafe fn warp_vote_any(mask: u32, predicate: bool) -> bool {
    // SAFETY: all lanes in `mask` execute this, this one among them.
    unsafe { machine::vote_any(mask, predicate) }
}

/// Returns the lanes in `mask` that passed true, one bit each.
///
/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
#[track_caller]
pub unsafe fn warp_vote_ballot(mask: u32, predicate: bool) -> u32 {
    // SAFETY: all lanes in `mask` execute this, this one among them.
    unsafe { machine::vote_ballot(mask, predicate) }
}

macro_rules! shuffle {
    ($($(#[$doc:meta])* $name:ident: $shuffle:ident, |$lane:ident, $operand:ident, $width:ident| $source:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// `T` is 4 or 8 bytes, and `width` a power of two up to 32. Returns the value, and true if
        /// the source lane lies in this lane's segment of `width` lanes. If not, the value is the
        /// caller's own.
        ///
        /// # Safety
        /// Every lane in `mask` makes this call, and the caller and its source lane are among them.
        /// No byte of `T` is padding, and one lane's value is a valid value for the others.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $name<T: Copy>(mask: u32, value: T, $operand: u32, $width: u32) -> (T, bool) {
            const { assert!(size_of::<T>() == 4 || size_of::<T>() == 8, "a shuffle moves 4 or 8 bytes") };
            let $lane = lane_id();
            let source: u32 = $source;
            let inside = source < 32 && source / $width == $lane / $width;
            let source = if inside { source } else { $lane };
            // SAFETY: all lanes in `mask` execute this with a `T` of 4 or 8 bytes without padding.
            (unsafe { machine::$shuffle(mask, value, $operand, $width, source) }, inside)
        }
    )*};
}

shuffle! {
    /// Returns the value of the lane whose number is this lane's xor `lanes`.
    warp_shuffle_xor: shuffle_xor, |lane, lanes, width| lane ^ lanes;
    /// Returns the value of the lane `delta` above this one.
    warp_shuffle_down: shuffle_down, |lane, delta, width| lane + delta;
    /// Returns the value of lane `index` of this lane's segment.
    warp_shuffle_idx: shuffle_idx, |lane, index, width| (lane & !(width - 1)) | (index & (width - 1));
}
