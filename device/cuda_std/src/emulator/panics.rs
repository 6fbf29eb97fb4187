//! A kernel's panic becomes a [`Fault`](super::Fault), and prints nothing.
//!
//! Invariant: a panic of anything but a running kernel thread reaches the hook that was set before, unchanged.

use super::CURRENT;
use super::block::Block;
use std::panic::{set_hook, take_hook};
use std::sync::atomic::{AtomicBool, Ordering};

/// Wraps the process's panic hook, once. A hook that the program sets later also hears of kernels' panics; it may call this one to
/// keep them quiet.
pub(super) fn keep_quiet() {
    static DONE: AtomicBool = AtomicBool::new(false);
    // A thread that panics may not set a hook. The next launch does.
    if std::thread::panicking() || DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    let other = take_hook();
    set_hook(Box::new(move |info| {
        // SAFETY: a block that is set is alive: this OS thread is in the middle of the block's work, and panics there.
        let block = unsafe { CURRENT.get().as_ref() };
        // A panic that ends the process must say why: one where none may unwind, or a second one while the first unwinds. Only the
        // text of `info` shows the former.
        let quiet = |block: &Block| !block.panicked.replace(true) && !format!("{info:?}").contains("can_unwind: false");
        if !block.is_some_and(quiet) {
            other(info);
        }
    }));
}
