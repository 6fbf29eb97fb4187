//! Exchange between the lanes of a warp, by shuffles.

use crate::warp::LANES;
use core::mem::{size_of, transmute_copy};

unsafe extern "C" {
    // LLVM's own shuffle intrinsic: rust-cuda's shuffle crashes libNVVM for `compute_121`.
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shuffle_xor(mask: i32, value: i32, lanes: i32, clamp: i32) -> i32;
}

/// Returns the `value` of the lane whose number is this lane's xor `distance`. `T` is 4 or 8 bytes.
///
/// # Safety
/// The lanes in `mask` call it together, and the other lane is among them.
#[inline(always)]
pub unsafe fn shfl_xor<T: Copy>(mask: u32, value: T, distance: u32) -> T {
    const { assert!(size_of::<T>() == 4 || size_of::<T>() == 8, "a shuffle moves 4 or 8 bytes") };
    let clamp = LANES as i32 - 1;
    // SAFETY: all lanes in `mask` execute this, the other lane among them: the function's contract.
    // The moved words have the size of `T`.
    unsafe {
        let moved = |word| shuffle_xor(mask as i32, word, distance as i32, clamp);
        if size_of::<T>() == 4 {
            transmute_copy(&moved(transmute_copy(&value)))
        } else {
            transmute_copy(&transmute_copy::<T, [i32; 2]>(&value).map(moved))
        }
    }
}

/// Combines the values of the lanes in `mask` pairwise, at distances lanes / 2, ..., 2, 1.
///
/// # Safety
/// The lanes in `mask`, a segment of `lanes`, call it together.
#[inline(always)]
pub unsafe fn combine_lanes<T: Copy>(mask: u32, lanes: u32, value: T, combine: impl Fn(T, T) -> T) -> T {
    let mut value = value;
    let mut distance = lanes / 2;
    while distance > 0 {
        // SAFETY: all lanes in `mask` execute this: the function's contract. The other lane is in
        // the same segment of `lanes`, because `distance` is smaller.
        let other = unsafe { shfl_xor(mask, value, distance) };
        value = combine(value, other);
        distance /= 2;
    }
    value
}

/// Converges the warp by a shuffle whose result is unused.
///
/// # Safety
/// All lanes of the warp make the call.
#[inline(always)]
pub unsafe fn converge() {
    // SAFETY: all lanes of the warp execute this: the function's contract. Each gets a zero.
    unsafe { shuffle_xor(-1, 0, 0, LANES as i32 - 1) };
}
