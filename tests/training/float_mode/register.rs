//! Floating-point modes in which a program may call the library. They are set by a shared library
//! built with `-Ofast`, by `fesetround` or by `feenableexcept`.

use std::arch::asm;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

#[cfg(target_arch = "x86_64")]
mod bits {
    pub(super) type Register = u32;
    pub(super) const DEFAULT: Register = 0x1f80;
    /// The sticky flags of past exceptions.
    pub(super) const FLAGS: Register = 0x3f;
    pub(super) const FLUSH: Register = DEFAULT | 1 << 15 | 1 << 6;
    pub(super) const DOWN: Register = DEFAULT | 1 << 13;
    pub(super) const UP: Register = DEFAULT | 1 << 14;
    pub(super) const TO_ZERO: Register = DEFAULT | 3 << 13;
    /// No exception is masked: an inexact result ends the process.
    pub(super) const TRAPS: Register = 0;
}

#[cfg(target_arch = "aarch64")]
mod bits {
    pub(super) type Register = u64;
    pub(super) const DEFAULT: Register = 0;
    pub(super) const FLAGS: Register = 0;
    pub(super) const FLUSH: Register = 1 << 24;
    pub(super) const UP: Register = 1 << 22;
    pub(super) const DOWN: Register = 2 << 22;
    pub(super) const TO_ZERO: Register = 3 << 22;
    /// Processors without traps ignore these bits.
    pub(super) const TRAPS: Register = 0x9f00;
}

use bits::*;

/// A mode other than the default.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mode(pub(crate) &'static str, Register);

pub(crate) const MODES: [Mode; 6] = [
    Mode("flush to zero", FLUSH),
    Mode("round up", UP),
    Mode("round down", DOWN),
    Mode("round toward zero", TO_ZERO),
    Mode("every exception traps", TRAPS),
    Mode("flush to zero, round up and trap", FLUSH & !(DEFAULT) | UP & !(DEFAULT) | TRAPS),
];

fn read() -> Register {
    #[allow(unused_mut)]
    let mut register: Register = 0;
    // SAFETY: reads the register of this thread, on x86-64 through the variable's memory.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("stmxcsr dword ptr [{}]", in(reg) &mut register, options(nostack))
    };
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("mrs {}, fpcr", lateout(reg) register, options(nostack))
    };
    register
}

fn write(register: Register) {
    // SAFETY: every value passed here is valid. Only the library runs in a mode other than the
    // default, and it must support that: this is what the tests check.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("ldmxcsr dword ptr [{}]", in(reg) &register, options(nostack))
    };
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("msr fpcr, {}", in(reg) register, options(nostack))
    };
}

impl Mode {
    /// Runs `code` in this mode, and checks that the thread is still in it afterwards, also if
    /// `code` panics.
    pub(crate) fn within<R>(self, code: impl FnOnce() -> R) -> R {
        write(self.1);
        // The part of the mode that a processor without traps keeps.
        let set = read();
        let outcome = catch_unwind(AssertUnwindSafe(apart(code)));
        let after = read();
        write(DEFAULT);
        assert_eq!(set & !FLAGS, after & !FLAGS, "the caller's mode, {}, has changed", self.0);
        outcome.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// Keeps the compiler from moving the code's arithmetic out of the mode.
fn apart<R>(code: impl FnOnce() -> R) -> impl FnOnce() -> R {
    #[inline(never)]
    fn call<R>(code: impl FnOnce() -> R) -> R {
        code()
    }
    move || call(code)
}
