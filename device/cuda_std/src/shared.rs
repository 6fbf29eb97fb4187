//! The block's dynamic shared memory, sized by the launch.
//!
//! Invariant: each block has one region, 16-byte aligned. Its initial content is undefined (NaN on
//! the emulator).

use crate::machine;

/// Returns the start of the block's dynamic shared memory, the same pointer at every call.
#[inline(always)]
pub fn dynamic_shared_mem<T>() -> *mut T {
    const { assert!(align_of::<T>() <= 16, "dynamic shared memory is aligned to 16 bytes") };
    machine::shared_start().cast()
}

/// Returns the bytes of dynamic shared memory that this launch gave the block.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
pub fn dynamic_shared_bytes() -> usize {
    crate::emulator::current(|block| block.shared_bytes())
}
