//! The GPU's side: intrinsics.

use core::arch::nvptx;
use core::mem::{size_of, transmute_copy};

#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shuffle_xor_word(mask: i32, value: i32, lanes: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    fn shuffle_down_word(mask: i32, value: i32, delta: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shuffle_idx_word(mask: i32, value: i32, lane: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.vote.all.sync"]
    fn vote_all_lanes(mask: i32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    fn vote_any_lane(mask: i32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot_lanes(mask: i32, predicate: bool) -> i32;
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: i32);
    #[link_name = "llvm.nvvm.read.ptx.sreg.laneid"]
    fn read_lane_id() -> i32;
    #[link_name = "llvm.nvvm.activemask"]
    fn read_active_mask() -> i32;
    #[link_name = "llvm.nvvm.barrier0.popc"]
    fn barrier_popc(predicate: i32) -> i32;
    #[link_name = "llvm.nvvm.barrier0.and"]
    fn barrier_and_all(predicate: i32) -> i32;
    #[link_name = "llvm.nvvm.barrier0.or"]
    fn barrier_or_any(predicate: i32) -> i32;
    #[link_name = "llvm.nvvm.membar.cta"]
    fn membar_cta();
    #[link_name = "llvm.nvvm.membar.gl"]
    fn membar_gl();
    #[link_name = "llvm.nvvm.membar.sys"]
    fn membar_sys();
}

macro_rules! registers {
    ($($name:ident: $intrinsic:path;)*) => {$(
        #[inline(always)]
        pub(crate) fn $name() -> u32 {
            // SAFETY: the intrinsic reads a special register.
            unsafe { $intrinsic() as u32 }
        }
    )*};
}
registers! {
    thread_idx_x: nvptx::_thread_idx_x;
    thread_idx_y: nvptx::_thread_idx_y;
    thread_idx_z: nvptx::_thread_idx_z;
    block_idx_x: nvptx::_block_idx_x;
    block_idx_y: nvptx::_block_idx_y;
    block_idx_z: nvptx::_block_idx_z;
    block_dim_x: nvptx::_block_dim_x;
    block_dim_y: nvptx::_block_dim_y;
    block_dim_z: nvptx::_block_dim_z;
    grid_dim_x: nvptx::_grid_dim_x;
    grid_dim_y: nvptx::_grid_dim_y;
    grid_dim_z: nvptx::_grid_dim_z;
    lane_id: read_lane_id;
    active_mask: read_active_mask;
}

#[inline(always)]
pub(crate) fn barrier() {
    // SAFETY: a barrier; the intrinsic is convergent.
    unsafe { nvptx::_syncthreads() };
}

macro_rules! barriers {
    ($($name:ident: $intrinsic:ident;)*) => {$(
        #[inline(always)]
        pub(crate) fn $name(predicate: u32) -> u32 {
            // SAFETY: a barrier; the intrinsic is convergent.
            unsafe { $intrinsic(predicate as i32) as u32 }
        }
    )*};
}
barriers! {
    barrier_count: barrier_popc;
    barrier_and: barrier_and_all;
    barrier_or: barrier_or_any;
}

macro_rules! fences {
    ($($name:ident: $intrinsic:ident;)*) => {$(
        #[inline(always)]
        pub(crate) fn $name() {
            // SAFETY: a memory fence.
            unsafe { $intrinsic() };
        }
    )*};
}
fences! {
    fence_block: membar_cta;
    fence_device: membar_gl;
    fence_system: membar_sys;
}

/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
pub(crate) unsafe fn sync_warp(mask: u32) {
    // SAFETY: all lanes in `mask` execute this, this one among them.
    unsafe { bar_warp_sync(mask as i32) };
}

/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
pub(crate) unsafe fn vote_all(mask: u32, predicate: bool) -> bool {
    // SAFETY: all lanes in `mask` execute this, this one among them.
    unsafe { vote_all_lanes(mask as i32, predicate) }
}

/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
pub(crate) unsafe fn vote_any(mask: u32, predicate: bool) -> bool {
    // SAFETY: all lanes in `mask` execute this, this one among them.
    unsafe { vote_any_lane(mask as i32, predicate) }
}

/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them.
#[inline(always)]
pub(crate) unsafe fn vote_ballot(mask: u32, predicate: bool) -> u32 {
    // SAFETY: all lanes in `mask` execute this, this one among them.
    unsafe { vote_ballot_lanes(mask as i32, predicate) as u32 }
}

macro_rules! shuffles {
    ($($name:ident: $intrinsic:ident;)*) => {$(
        /// Returns the value of the source lane, or the caller's own if that lies outside its
        /// segment. The instruction finds the source from `operand` and `width`.
        ///
        /// # Safety
        /// Every lane in `mask` makes this call, the caller and its source lane are among them, and
        /// one lane's `T`, of 4 or 8 bytes without padding, is valid for the others.
        #[inline(always)]
        pub(crate) unsafe fn $name<T: Copy>(mask: u32, value: T, operand: u32, width: u32, _source: u32) -> T {
            let clamp = (((32 - width) << 8) | 31) as i32;
            let (mask, operand) = (mask as i32, operand as i32);
            // SAFETY: all lanes in `mask` execute this with a `T` of these bytes. The result is
            // another lane's value, or this lane's own.
            unsafe {
                if size_of::<T>() == 4 {
                    let moved = $intrinsic(mask, transmute_copy(&value), operand, clamp);
                    transmute_copy(&moved)
                } else {
                    let words: [i32; 2] = transmute_copy(&value);
                    let moved = [$intrinsic(mask, words[0], operand, clamp), $intrinsic(mask, words[1], operand, clamp)];
                    transmute_copy(&moved)
                }
            }
        }
    )*};
}
shuffles! {
    shuffle_xor: shuffle_xor_word;
    shuffle_down: shuffle_down_word;
    shuffle_idx: shuffle_idx_word;
}

core::arch::global_asm!(".extern .shared .align 16 .b8 stepscope_dynamic_shared[];");

/// Returns the start of the block's dynamic shared memory.
#[inline(always)]
pub(crate) fn shared_start() -> *mut u8 {
    let address: u64;
    // SAFETY: the assembly takes the generic address of a symbol, and accesses no memory.
    unsafe {
        core::arch::asm!(
            "{{ .reg .u64 %window; mov.u64 %window, stepscope_dynamic_shared; cvta.shared.u64 {address}, %window; }}",
            address = out(reg64) address,
            options(pure, nomem, preserves_flags, nostack)
        );
    }
    address as *mut u8
}

/// Returns `a * b + c`, rounded once.
#[inline(always)]
pub(crate) fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    core::intrinsics::fmaf32(a, b, c)
}

/// Returns the square root.
#[inline(always)]
pub(crate) fn sqrt(x: f32) -> f32 {
    core::intrinsics::sqrtf32(x)
}

// A kernel cannot report a panic: the trap ends the launch, and the host observes a lost context.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: `trap` ends the grid; nothing after it runs.
    unsafe { nvptx::trap() }
}
