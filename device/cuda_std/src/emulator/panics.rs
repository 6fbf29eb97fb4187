//! The conversion of a kernel's panic to a [`Fault`](super::Fault), without output.
//!
//! Invariant: every panic outside a running kernel thread reaches the previously set hook,
//! unchanged.

use super::CURRENT;
use super::block::Block;
use std::panic::{set_hook, take_hook};
use std::sync::atomic::{AtomicBool, Ordering};

/// Wraps the process's panic hook, once. A hook that the program sets later also receives kernels'
/// panics. It may call this one to keep them quiet.
pub(super) fn keep_quiet() {
    static DONE: AtomicBool = AtomicBool::new(false);
    // A thread that panics may not set a hook. The next launch does.
    if std::thread::panicking() || DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    let other = take_hook();
    set_hook(Box::new(move |info| {
        // SAFETY: a block that is set is alive, because this OS thread is executing the block, and
        // panics there.
        let block = unsafe { CURRENT.get().as_ref() };
        // A panic that ends the process must be printed: one where unwinding is not allowed, or a
        // second one while the first unwinds. Only the text of `info` reveals the former.
        let quiet = |block: &Block| !block.panicked.replace(true) && !format!("{info:?}").contains("can_unwind: false");
        if !block.is_some_and(quiet) {
            other(info);
        }
    }));
}
