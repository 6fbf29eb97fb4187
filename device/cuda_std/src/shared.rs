//! The block's dynamic shared memory, sized by the launch.
//!
//! Invariant: each block has one region, 16-byte aligned. Its initial content is undefined (NaN on
//! the emulator).

#[cfg(target_arch = "nvptx64")]
core::arch::global_asm!(".extern .shared .align 16 .b8 stepscope_dynamic_shared[];");

/// Returns the start of the block's dynamic shared memory, the same pointer at every call.
#[inline(always)]
pub fn dynamic_shared_mem<T>() -> *mut T {
    const { assert!(align_of::<T>() <= 16, "dynamic shared memory is aligned to 16 bytes") };
    #[cfg(target_arch = "nvptx64")]
    {
        let address: u64;
        // SAFETY: the assembly takes the generic address of a symbol, and accesses no memory.
        unsafe {
            core::arch::asm!(
                "{{ .reg .u64 %window; mov.u64 %window, stepscope_dynamic_shared; cvta.shared.u64 {address}, %window; }}",
                address = out(reg64) address,
                options(pure, nomem, preserves_flags, nostack)
            );
        }
        address as *mut T
    }
    #[cfg(not(target_arch = "nvptx64"))]
    crate::emulator::current(|block| block.shared_start()).cast()
}

/// Returns the bytes of dynamic shared memory that this launch gave the block.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
pub fn dynamic_shared_bytes() -> usize {
    crate::emulator::current(|block| block.shared_bytes())
}
