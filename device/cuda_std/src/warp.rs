//! Lane exchange within a warp of 32 threads.
//!
//! Shuffles use LLVM's intrinsics, because rust-cuda's `warp_shuffle_*` crash libNVVM for
//! `compute_121`. The signatures are rust-cuda's.
//!
//! Invariant: every lane in `mask` calls the same function at the same source line. The emulator
//! reports anything else as an error.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emulator::{Collective, current};
use core::mem::{size_of, transmute_copy};

#[cfg(target_arch = "nvptx64")]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shuffle_xor(mask: i32, value: i32, lanes: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    fn shuffle_down(mask: i32, value: i32, delta: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shuffle_idx(mask: i32, value: i32, lane: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.vote.all.sync"]
    fn vote_all(mask: i32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    fn vote_any(mask: i32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot(mask: i32, predicate: bool) -> i32;
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: i32);
    #[link_name = "llvm.nvvm.read.ptx.sreg.laneid"]
    fn read_lane_id() -> i32;
    #[link_name = "llvm.nvvm.activemask"]
    fn read_active_mask() -> i32;
}

/// Returns this thread's lane, 0 to 31.
#[inline(always)]
pub fn lane_id() -> u32 {
    // SAFETY: the intrinsic reads a special register.
    #[cfg(target_arch = "nvptx64")]
    return unsafe { read_lane_id() as u32 };
    #[cfg(not(target_arch = "nvptx64"))]
    current(|block| block.lane())
}

/// Returns the lanes of this warp that currently run together. The emulator returns the lanes that
/// have not ended.
#[inline(always)]
pub fn activemask() -> u32 {
    // SAFETY: the intrinsic reads a special register.
    #[cfg(target_arch = "nvptx64")]
    return unsafe { read_active_mask() as u32 };
    #[cfg(not(target_arch = "nvptx64"))]
    current(|block| block.active_lanes())
}

/// Waits for the lanes in `mask` and makes their writes visible to each other.
///
/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
#[track_caller]
pub unsafe fn sync_warp(mask: u32) {
    // SAFETY: all lanes in `mask` execute this, this one among them, as the caller guarantees.
    #[cfg(target_arch = "nvptx64")]
    unsafe {
        bar_warp_sync(mask as i32)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    Collective::Warp(mask).wait(0);
}

/// Returns true if every lane in `mask` passed true.
///
/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
#[track_caller]
pub unsafe fn warp_vote_all(mask: u32, predicate: bool) -> bool {
    // SAFETY: all lanes in `mask` execute this, this one among them, as the caller guarantees.
    #[cfg(target_arch = "nvptx64")]
    return unsafe { vote_all(mask as i32, predicate) };
    #[cfg(not(target_arch = "nvptx64"))]
    {
        Collective::Ballot(mask).wait(u64::from(predicate)) as u32 == mask
    }
}

/// Returns true if any lane in `mask` passed true.
///
/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
#[track_caller]
pub unsafe fn warp_vote_any(mask: u32, predicate: bool) -> bool {
    // SAFETY: all lanes in `mask` execute this, this one among them, as the caller guarantees.
    #[cfg(target_arch = "nvptx64")]
    return unsafe { vote_any(mask as i32, predicate) };
    #[cfg(not(target_arch = "nvptx64"))]
    {
        Collective::Ballot(mask).wait(u64::from(predicate)) != 0
    }
}

/// Returns the lanes in `mask` that passed true, one bit each.
///
/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
#[track_caller]
pub unsafe fn warp_vote_ballot(mask: u32, predicate: bool) -> u32 {
    // SAFETY: all lanes in `mask` execute this, this one among them, as the caller guarantees.
    #[cfg(target_arch = "nvptx64")]
    return unsafe { vote_ballot(mask as i32, predicate) as u32 };
    #[cfg(not(target_arch = "nvptx64"))]
    {
        Collective::Ballot(mask).wait(u64::from(predicate)) as u32
    }
}

macro_rules! shuffle {
    ($($(#[$doc:meta])* $name:ident: $gpu:ident, |$lane:ident, $operand:ident, $width:ident| $source:expr;)*) => {$(
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
            #[cfg(target_arch = "nvptx64")]
            {
                let clamp = (((32 - $width) << 8) | 31) as i32;
                let (mask, operand) = (mask as i32, $operand as i32);
                // SAFETY: the caller guarantees that all lanes in `mask` execute this with a `T` of
                // these bytes. The result is another lane's value, or this lane's own.
                unsafe {
                    if size_of::<T>() == 4 {
                        let moved = $gpu(mask, transmute_copy(&value), operand, clamp);
                        (transmute_copy(&moved), inside)
                    } else {
                        let words: [i32; 2] = transmute_copy(&value);
                        let moved = [$gpu(mask, words[0], operand, clamp), $gpu(mask, words[1], operand, clamp)];
                        (transmute_copy(&moved), inside)
                    }
                }
            }
            #[cfg(not(target_arch = "nvptx64"))]
            {
                // SAFETY: `T` has as many bytes as the word, which is checked above, and the caller
                // guarantees that none is padding.
                let word = unsafe {
                    if size_of::<T>() == 4 { u64::from(transmute_copy::<T, u32>(&value)) } else { transmute_copy::<T, u64>(&value) }
                };
                let source = if inside { source } else { $lane } as u8;
                let moved = Collective::Shuffle { mask, source }.wait(word);
                // SAFETY: the word is the `T` of this lane, or of another that made the same call.
                let moved = unsafe {
                    if size_of::<T>() == 4 { transmute_copy::<u32, T>(&(moved as u32)) } else { transmute_copy::<u64, T>(&moved) }
                };
                (moved, inside)
            }
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
