//! A kernel's panic is a [`Fault`](super::Fault), and says nothing by the way.
//!
//! Invariant: a panic of anything but a running kernel thread reaches the hook that was set before, unchanged.

use super::CURRENT;
use super::block::Block;
use std::panic::{set_hook, take_hook};
use std::sync::atomic::{AtomicBool, Ordering};

/// Wraps the process's panic hook, once. A hook that the program sets later hears of kernels' panics too, unless it calls
/// this one.
pub(super) fn keep_quiet() {
    static DONE: AtomicBool = AtomicBool::new(false);
    // A thread that panics may not set a hook; the next launch does.
    if std::thread::panicking() || DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    let other = take_hook();
    set_hook(Box::new(move |info| {
        // SAFETY: a block that is set is alive: this OS thread is in the middle of its work, and panics there.
        let block = unsafe { CURRENT.get().as_ref() };
        // What ends the process must say why: a panic where none may pass, and a second one while the first does. The standard
        // library tells of the former to readers alone.
        let quiet = |block: &Block| !block.panicked.replace(true) && !format!("{info:?}").contains("can_unwind: false");
        if !block.is_some_and(quiet) {
            other(info);
        }
    }));
}
