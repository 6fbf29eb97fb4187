//! The floating-point mode of an OS thread: its rounding, its flushing of subnormals to zero, and
//! its exception traps.
//!
//! Rust and this project's kernels assume IEEE 754's default mode: round to nearest, no flushing,
//! no traps. A program may run its threads in another mode. For example, a shared library that gcc
//! has linked with `-Ofast` flushes subnormals in the thread that loads it. Every new thread
//! inherits the mode of the thread that starts it. Code that computes results therefore runs within
//! [`in_default`], and the library's threads begin with [`set_default`].
//!
//! Invariant: when [`in_default`] returns or panics, the thread has its previous mode again.

use std::marker::PhantomData;

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod register {
    //! MXCSR, which controls all of Rust's arithmetic on x86-64. The x87 unit has another register,
    //! but Rust does not compute there.

    use std::arch::asm;

    pub(super) type Mode = u32;
    /// The default mode: to nearest, nothing flushed, all six exceptions masked.
    pub(super) const DEFAULT: Mode = 0x1f80;
    /// The flags of exceptions that occurred. They change no result.
    const FLAGS: Mode = 0x3f;

    pub(super) fn is_default(mode: Mode) -> bool {
        mode & !FLAGS == DEFAULT
    }

    pub(super) fn read() -> Mode {
        let mut mode: Mode = 0;
        // SAFETY: the instruction writes four bytes, the size of `mode`.
        unsafe { asm!("stmxcsr dword ptr [{}]", in(reg) &mut mode, options(nostack, preserves_flags)) };
        mode
    }

    /// # Safety
    /// `mode` is the default, or was read from this thread and is being restored. In between, only
    /// the code of [`super::in_default`] runs in it.
    pub(super) unsafe fn write(mode: Mode) {
        // SAFETY: the instruction reads four bytes, the size of `mode`. The value comes from `read`
        // or is the default, so no reserved bit is set.
        unsafe { asm!("ldmxcsr dword ptr [{}]", in(reg) &mode, options(nostack, readonly)) };
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod register {
    //! FPCR. Another register, which changes no result, holds the exceptions that occurred.

    use std::arch::asm;

    pub(super) type Mode = u64;
    /// The default mode: to nearest, nothing flushed, NaNs keep their payload, nothing traps.
    pub(super) const DEFAULT: Mode = 0;

    pub(super) fn is_default(mode: Mode) -> bool {
        mode == DEFAULT
    }

    pub(super) fn read() -> Mode {
        let mode: Mode;
        // SAFETY: the instruction reads a register that every thread may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) mode, options(nostack, preserves_flags)) };
        mode
    }

    /// # Safety
    /// The caller meets the requirements on x86-64.
    pub(super) unsafe fn write(mode: Mode) {
        // SAFETY: the value comes from `read` or is the default, so the processor accepts it.
        unsafe { asm!("msr fpcr, {}", in(reg) mode, options(nostack)) };
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod register {
    //! A stub for other processors: every thread is assumed to be in the default mode.

    pub(super) type Mode = u32;
    pub(super) const DEFAULT: Mode = 0;

    pub(super) fn is_default(mode: Mode) -> bool {
        mode == DEFAULT
    }

    pub(super) fn read() -> Mode {
        DEFAULT
    }

    /// # Safety
    /// Always safe.
    pub(super) unsafe fn write(_: Mode) {}
}

/// Restores a mode when it is dropped, on the thread that had it.
struct Restore {
    mode: register::Mode,
    of_thread: PhantomData<*mut ()>,
}

impl Drop for Restore {
    fn drop(&mut self) {
        // SAFETY: `in_default` read the mode from this thread, and its code has ended. The pointer
        // keeps this value on that thread.
        unsafe { register::write(self.mode) };
    }
}

/// Runs `code` in IEEE 754's default mode, and restores the thread's previous mode. If the thread
/// is already in the default mode, this costs one register read.
pub fn in_default<R>(code: impl FnOnce() -> R) -> R {
    let mode = register::read();
    if register::is_default(mode) {
        return apart(code);
    }
    let _restore = Restore { mode, of_thread: PhantomData };
    // SAFETY: the default mode is the one that Rust assumes.
    unsafe { register::write(register::DEFAULT) };
    apart(code)
}

/// Calls `code` without inlining. The compiler may move arithmetic across an instruction that sets
/// the mode, but not across a call.
#[inline(never)]
fn apart<R>(code: impl FnOnce() -> R) -> R {
    code()
}

/// Sets IEEE 754's default mode for the rest of this thread's life. It is meant for threads that
/// the library starts, which inherit the mode of the starting thread.
pub fn set_default() {
    if !register::is_default(register::read()) {
        // SAFETY: the default mode is the one that Rust assumes.
        unsafe { register::write(register::DEFAULT) };
    }
}
