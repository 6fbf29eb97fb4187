//! The floating-point mode of an OS thread: how it rounds, whether it flushes subnormal numbers to
//! zero, and which exceptions trap.
//!
//! Rust and this project's kernels assume IEEE 754's default mode: to nearest, nothing is flushed,
//! nothing traps. A program may run its threads in another one: a shared library that gcc has
//! linked with `-Ofast` flushes subnormal numbers in the thread that loads it, and every new thread
//! inherits the mode of the one that starts it. Code that computes results therefore runs within
//! [`in_default`], and threads of the library begin with [`set_default`].
//!
//! Invariant: when [`in_default`] returns or panics, the thread has the mode that it had before.

use std::marker::PhantomData;

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod register {
    //! MXCSR, which all of Rust's arithmetic on x86-64 obeys. The x87 unit has another register,
    //! and Rust does not compute there.

    use std::arch::asm;

    pub(super) type Mode = u32;
    /// To nearest, nothing flushed, all six exceptions masked.
    pub(super) const DEFAULT: Mode = 0x1f80;
    /// Flags of exceptions that occurred. They change no result.
    const FLAGS: Mode = 0x3f;

    pub(super) fn is_default(mode: Mode) -> bool {
        mode & !FLAGS == DEFAULT
    }

    pub(super) fn read() -> Mode {
        let mut mode: Mode = 0;
        // SAFETY: writes four bytes, which `mode` has.
        unsafe { asm!("stmxcsr dword ptr [{}]", in(reg) &mut mode, options(nostack, preserves_flags)) };
        mode
    }

    /// # Safety
    /// `mode` is the default, or was read from this thread and is put back. Between the two only
    /// the code of [`super::in_default`] runs in it.
    pub(super) unsafe fn write(mode: Mode) {
        // SAFETY: reads four bytes, which `mode` has. The value comes from `read` or is the
        // default, so no reserved bit is set.
        unsafe { asm!("ldmxcsr dword ptr [{}]", in(reg) &mode, options(nostack, readonly)) };
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod register {
    //! FPCR. The exceptions that there were stand in another register, which changes no result.

    use std::arch::asm;

    pub(super) type Mode = u64;
    /// To nearest, nothing flushed, NaNs keep their payload, nothing traps.
    pub(super) const DEFAULT: Mode = 0;

    pub(super) fn is_default(mode: Mode) -> bool {
        mode == DEFAULT
    }

    pub(super) fn read() -> Mode {
        let mode: Mode;
        // SAFETY: reads a register that every thread may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) mode, options(nostack, preserves_flags)) };
        mode
    }

    /// # Safety
    /// As on x86-64.
    pub(super) unsafe fn write(mode: Mode) {
        // SAFETY: the value comes from `read` or is the default, so the processor accepts it.
        unsafe { asm!("msr fpcr, {}", in(reg) mode, options(nostack)) };
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod register {
    //! No register is known here: every thread is taken to be in the default mode.

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

/// Puts a mode back when it is dropped, on the thread that had it.
struct Restore {
    mode: register::Mode,
    of_thread: PhantomData<*mut ()>,
}

impl Drop for Restore {
    fn drop(&mut self) {
        // SAFETY: `in_default` read it from this thread, which the pointer keeps this value on, and
        // its code has ended.
        unsafe { register::write(self.mode) };
    }
}

/// Runs `code` in IEEE 754's default mode, and returns in the mode that the thread had before. In a
/// thread that is in the default mode this costs one read of a register.
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

/// Not inlined: the compiler may move arithmetic across an instruction that sets the mode, but not
/// across a call.
#[inline(never)]
fn apart<R>(code: impl FnOnce() -> R) -> R {
    code()
}

/// Sets IEEE 754's default mode for the rest of this thread's life. For threads that the library
/// starts: they inherit whatever mode the starting thread is in.
pub fn set_default() {
    if !register::is_default(register::read()) {
        // SAFETY: the default mode is the one that Rust assumes.
        unsafe { register::write(register::DEFAULT) };
    }
}
