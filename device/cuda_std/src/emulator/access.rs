//! The emulator's checks of memory accesses, called before device code accesses memory.
//!
//! Code that moves memory for kernels calls [`global`], [`slice()`] and [`shared`]: `vector.rs` and
//! `tile.rs` of `device/src` do. An access that does not call them is not checked here, but
//! `guards.rs` compares the bytes around outputs.
//!
//! Invariant: in each entry point, [`assume_watched`] informs the compiler if race detection is on.
//! In an entry point without it, only the bounds of pointers are checked. A faulty access does not
//! return.

use super::arguments::Span;
use super::bounds::{Bounds, Reach, SHIFT, Slot};
use super::{CURRENT, Kind};
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
use core::arch::asm;
use std::cell::Cell;
use std::mem::offset_of;
use std::ops::Range;
use std::panic::{Location, resume_unwind};

/// The checks for the kernel threads that an OS thread runs next.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Watch {
    /// The race detection flag. 1 checks for races too, and 0 only checks bounds.
    pub(super) watched: u64,
    pub(super) bounds: *const Bounds,
}

/// The checks outside a launch: no bounds.
pub(super) const NOBODY: Watch = Watch { watched: 0, bounds: &Bounds::NONE };

thread_local! {
    static WATCH: Cell<Watch> = const { Cell::new(NOBODY) };
}

/// Sets the checks for the kernel threads that this OS thread runs next. The bounds must live until
/// the next call.
#[inline(never)]
pub(super) fn watch(watch: Watch) {
    WATCH.set(watch);
}

/// Returns the address of this OS thread's checks. `with` would be a call where codegen units are
/// not optimized together, as in profile `dev`. The compiler could then not merge two reads, and
/// each of a kernel's versions would contain the code for all.
#[inline(always)]
fn thread_watch() -> *mut Watch {
    WATCH.try_with(Cell::as_ptr).unwrap_or(std::ptr::null_mut())
}

/// True if race detection is on for the running kernel thread. Within one call of a kernel the
/// compiler merges all reads of it.
#[inline(always)]
fn is_watched() -> bool {
    let word = thread_watch().cast::<u64>();
    let watched: u64;
    #[allow(
        clippy::pointers_in_nomem_asm_block,
        reason = "the word does not change between two reads that can be merged"
    )]
    // SAFETY: the assembly reads one word that lives as long as the OS thread. `nomem` claims more
    // than is true: that no write to memory changes the result. No write of a kernel does. Only
    // `watch` sets the word, between kernel calls, in a function that is never inlined.
    unsafe {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        asm!("mov {0}, qword ptr [{1}]", lateout(reg) watched, in(reg) word, options(pure, nomem, nostack, preserves_flags));
        #[cfg(all(target_arch = "aarch64", not(miri)))]
        asm!("ldr {0}, [{1}]", lateout(reg) watched, in(reg) word, options(pure, nomem, nostack, preserves_flags));
        #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
        {
            watched = word.read();
        }
    }
    watched != 0
}

/// Returns the reach of the launch's argument that begins at `base`, or none if no argument begins
/// there. Within one call of a kernel the compiler merges all lookups, as it does with assembly
/// that has one result.
#[inline(always)]
fn reach(base: u64) -> Reach {
    const { assert!(offset_of!(Bounds, factor) == 0 && offset_of!(Bounds, slots) == 8) };
    const { assert!(offset_of!(Slot, base) == 0 && offset_of!(Slot, reach) == 8 && size_of::<Slot>() == 16) };
    let watch = thread_watch().cast_const();
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    #[allow(
        clippy::pointers_in_nomem_asm_block,
        reason = "the words do not change between two reads that can be merged"
    )]
    // SAFETY: the assembly reads a word of this OS thread, as in `is_watched`, and the `Bounds` to
    // which it points. `watch` requires that they live, unchanged, as long as kernels run. The
    // highest bits of the product are a slot's index.
    unsafe {
        let reach: u64;
        #[cfg(target_arch = "x86_64")]
        asm!(
            "mov r11, qword ptr [{watch} + {bounds}]",
            "mov {reach}, qword ptr [r11]",
            "imul {reach}, {base}",
            "shr {reach}, {shift}",
            "shl {reach}, 4",
            "lea r11, [r11 + {reach} + 8]",
            "xor {reach:e}, {reach:e}",
            "cmp qword ptr [r11], {base}",
            "cmove {reach}, qword ptr [r11 + 8]",
            watch = in(reg) watch, base = in(reg) base, reach = out(reg) reach, out("r11") _,
            bounds = const offset_of!(Watch, bounds), shift = const SHIFT,
            options(pure, nomem, nostack)
        );
        #[cfg(target_arch = "aarch64")]
        asm!(
            "ldr x17, [{watch}, #{bounds}]",
            "ldr {reach}, [x17], #8",
            "mul {reach}, {reach}, {base}",
            "lsr {reach}, {reach}, #{shift}",
            "add x17, x17, {reach}, lsl #4",
            "ldr {reach}, [x17]",
            "cmp {reach}, {base}",
            "ldr {reach}, [x17, #8]",
            "csel {reach}, {reach}, xzr, eq",
            watch = in(reg) watch, base = in(reg) base, reach = out(reg) reach, out("x17") _,
            bounds = const offset_of!(Watch, bounds), shift = const SHIFT,
            options(pure, nomem, nostack)
        );
        Reach(reach)
    }
    #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
    // SAFETY: the argument for the assembly above holds here too.
    unsafe {
        (*(*watch).bounds).reach(base)
    }
}

/// Returns the number of elements from `base` on that a kernel may access, if it is known without a
/// search.
#[inline(always)]
fn length<T>(kind: Kind, base: *const T) -> usize {
    let reach = reach(base as u64);
    let bytes = match kind {
        Kind::Read => reach.readable(),
        Kind::Write => reach.writable(),
    };
    bytes / size_of::<T>().max(1)
}

/// Looks up the reach of an output, at the start of an entry point. The compiler then uses the
/// result for every access.
#[inline(always)]
pub fn look_up<T>(base: *mut T) {
    let _reach = reach(base as u64).0;
    // SAFETY: the assembly is only a comment. It uses the result; otherwise the compiler would drop
    // it before it merges it with others.
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    unsafe {
        asm!("/* {0} */", in(reg) _reach, options(nomem, nostack, preserves_flags));
    }
}

/// Tells the compiler, at the start of a kernel's entry point, whether race detection is on for its
/// launches.
///
/// # Safety
/// `watched` is true if and only if race detection is on for the running kernel thread.
#[inline(always)]
pub unsafe fn assume_watched(watched: bool) {
    // SAFETY: the caller guarantees it: `Runner::run` selects a version that matches the word that
    // it sets.
    unsafe { core::hint::assert_unchecked(is_watched() == watched) }
}

/// Checks an access of the running thread to `base[index..index + count]` in global memory. `base`
/// is a pointer that the launch passed. The access must stay inside that argument.
#[inline(always)]
#[track_caller]
pub fn global<T>(kind: Kind, base: *const T, index: usize, count: usize) {
    if is_watched() || index >= (length(kind, base) + 1).saturating_sub(count) {
        touch_global(kind, Span::new(base, index, count), Location::caller());
    }
}

/// A pointer of either mutability that a kernel may dereference.
pub trait Follow: Copy {
    /// Returns `self.add(index)`, after the emulator has checked the running thread's `kind` of
    /// access there. A pointer into no argument of the launch is not checked: it may point to
    /// shared memory, or to the thread's own memory.
    fn element(self, kind: Kind, index: usize) -> Self;
}

macro_rules! follow {
    ($($pointer:ty)*) => {$(
        impl<T> Follow for $pointer {
            #[inline(always)]
            #[track_caller]
            fn element(self, kind: Kind, index: usize) -> Self {
                if is_watched() || index >= length(kind, self) {
                    touch_element(kind, Span::new(self, index, 1), Location::caller());
                }
                self.wrapping_add(index)
            }
        }
    )*};
}
follow! { *const T *mut T }

/// Checks an access. `#[kernel]` replaces `pointer.add(index)` by it where the kernel dereferences
/// the result.
#[inline(always)]
#[track_caller]
pub fn element<P: Follow>(kind: Kind, pointer: P, index: usize) -> P {
    pointer.element(kind, index)
}

#[cold]
#[inline(never)]
fn touch_element(kind: Kind, span: Span, location: &'static Location<'static>) {
    // SAFETY: a block that is set is alive, because this is its kernel thread. The reference is not
    // kept.
    if unsafe { CURRENT.get().as_ref() }.is_some_and(|block| block.knows(span.base)) {
        touch_global(kind, span, location);
    }
}

/// Checks a read of `x[index..index + count]` by the running thread. The caller compares the range
/// with the slice's length.
#[inline(always)]
#[track_caller]
pub fn slice<T>(x: &[T], index: usize, count: usize) {
    if is_watched() {
        touch_global(Kind::Read, Span::new(x.as_ptr(), index, count), Location::caller());
    }
}

#[cold]
#[inline(never)]
fn touch_global(kind: Kind, span: Span, location: &'static Location<'static>) {
    let block = CURRENT.get();
    // Outside a launch a vector moves the host's own memory, which the emulator does not check.
    if span.bytes > 0 && !block.is_null() {
        // SAFETY: a block that is set is alive, because this is its kernel thread. The reference is
        // not kept.
        let outcome = unsafe { &*block }.touch_global(kind, span, location);
        outcome.unwrap_or_else(|cause| resume_unwind(Box::new(cause)));
    }
}

/// Checks the alignment of an access of the running thread that moves the elements from
/// `base[index]` on at once, in global or shared memory. The address must be a multiple of `align`
/// bytes, a power of two. This check is in every build.
#[inline(always)]
#[track_caller]
pub fn at_once<T>(kind: Kind, base: *const T, index: usize, align: usize) {
    let address = base.wrapping_add(index) as usize;
    if address & (align - 1) != 0 {
        misaligned(kind, address, align, Location::caller());
    }
}

#[cold]
#[inline(never)]
fn misaligned(kind: Kind, address: usize, align: usize, location: &'static Location<'static>) -> ! {
    let block = CURRENT.get();
    assert!(!block.is_null(), "a vector at {address:#x}, which is no multiple of {align} bytes");
    // SAFETY: a block that is set is alive, because this is its kernel thread. The reference is not
    // kept.
    let cause = unsafe { &*block }.misaligned(kind, address, align, location);
    resume_unwind(Box::new(cause))
}

/// Checks an access of the running thread to `tile[index..index + count]` in shared memory. The
/// tile has `len` elements.
#[inline(always)]
#[track_caller]
pub fn shared<T>(kind: Kind, tile: *const T, len: u32, index: u32, count: u32) {
    if is_watched() {
        let [len, index, count] = [len, index, count].map(|elements| elements as usize * size_of::<T>());
        touch_shared(kind, tile as usize, len, index..index + count, Location::caller());
    }
}

#[cold]
#[inline(never)]
fn touch_shared(kind: Kind, tile: usize, len: usize, bytes: Range<usize>, location: &'static Location<'static>) {
    let outcome = super::current(|block| {
        let start = tile.wrapping_sub(block.shared_start() as usize);
        block.touch_shared(kind, start..start + len, start + bytes.start..start + bytes.end, location)
    });
    outcome.unwrap_or_else(|cause| resume_unwind(Box::new(cause)));
}
