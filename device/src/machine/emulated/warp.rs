//! Exchange between the lanes of a warp, by gathering the values of all of them.

use crate::unroll;
use crate::warp::LANES;
use cuda_std::emulator::gather;
use cuda_std::warp;

/// Returns the `value` of the lane whose number is this lane's xor `distance`, a power of two.
///
/// # Safety
/// The lanes in `mask`, whole segments of `2 distance`, call it together with the same `T`, which
/// has no padding.
#[inline(always)]
#[track_caller]
pub unsafe fn shfl_xor<T: Copy>(mask: u32, value: T, distance: u32) -> T {
    // SAFETY: the lanes of the mask call this together with the same `T`: the function's contract.
    let segment = unsafe { gather(mask, 2 * distance, value) };
    segment[((warp::lane_id() % (2 * distance)) ^ distance) as usize]
}

/// Combines the values of the lanes in `mask` pairwise, at distances lanes / 2, ..., 2, 1. These
/// are the GPU's pairs after one wait instead of one for each distance: the waits dominate the cost
/// of a reduction here.
///
/// # Safety
/// The lanes in `mask`, a segment of `lanes`, call it together with the same `T`, which has no
/// padding.
#[inline(always)]
pub unsafe fn combine_lanes<T: Copy>(mask: u32, lanes: u32, value: T, combine: impl Fn(T, T) -> T) -> T {
    if lanes == 1 {
        return value;
    }
    // SAFETY: the lanes of the mask call this together with the same `T`: the function's contract.
    let mut values = unsafe { gather(mask, lanes, value) };
    // The distances are constants, so that the compiler adds whole registers.
    unroll!(halving < 5 => {
        let distance = LANES as usize >> (halving + 1);
        if distance < lanes as usize {
            for lane in 0..distance {
                values[lane] = combine(values[lane], values[lane + distance]);
            }
        }
    });
    values[0]
}

/// Does nothing: an exchange waits for its lanes itself.
///
/// # Safety
/// All lanes of the warp make the call.
#[inline(always)]
pub unsafe fn converge() {}
