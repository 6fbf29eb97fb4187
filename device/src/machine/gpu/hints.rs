//! Hints that keep the compiler and the assembler from using too many registers.

/// Tells the compiler that `divisor` is not 0, so that it adds no call of a panic.
///
/// # Safety
/// `divisor` is not 0.
#[inline(always)]
pub unsafe fn assume_not_zero(divisor: usize) {
    // SAFETY: `divisor` is not 0: the function's contract.
    unsafe { core::hint::assert_unchecked(divisor != 0) };
}

/// Declares the threads of a block, and the least blocks of a multiprocessor, for which a thread's
/// registers must leave room. It is a comment, which `cuda_builder` makes the kernel's `.maxntid`
/// and `.minnctapersm`.
#[inline(always)]
pub fn block_bounds<const THREADS: u32, const BLOCKS: u32>() {
    // SAFETY: the assembly is a comment.
    unsafe {
        core::arch::asm!(
            "// block_threads {0} {1}", const THREADS, const BLOCKS, options(nomem, nostack, preserves_flags)
        );
    }
}

/// Prevents the assembler from unrolling the loop at whose head it stands.
#[inline(always)]
pub fn no_unroll() {
    // SAFETY: a directive, not an instruction.
    unsafe { core::arch::asm!(".pragma \"nounroll\";", options(nomem, nostack, preserves_flags)) };
}

/// Returns the same value, about which the compiler can infer nothing.
#[inline(always)]
pub fn launder_reg(value: u32) -> u32 {
    let same: u32;
    // SAFETY: a copy of a register. Not `pure`, or the compiler would move it out of a loop.
    unsafe { core::arch::asm!("mov.u32 {0}, {1};", out(reg32) same, in(reg32) value, options(nomem, nostack)) };
    same
}

/// Returns the same index, about which the compiler can infer nothing.
#[inline(always)]
pub fn launder_index(place: usize) -> usize {
    let mut place = place;
    // SAFETY: the assembly has no instruction.
    unsafe { core::arch::asm!("// {0}", inout(reg64) place, options(pure, nomem, nostack, preserves_flags)) };
    place
}
