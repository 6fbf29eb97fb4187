//! Counts of the argument bytes that watched launches access. `tests/predict.rs` compares the cost
//! model's bytes with them.
//!
//! Invariant: only launches within [`tally`] are counted, and a launch's counts are complete when
//! the launch is over.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

static LAUNCHES: Mutex<Option<Vec<Touched>>> = Mutex::new(None);

/// The bytes that a launch accessed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touched {
    /// The kernel's name.
    pub kernel: &'static str,
    /// The pointers to memory: name, and the bytes that were read or written at least once.
    pub arguments: Vec<(&'static str, usize)>,
}

/// Runs `code`, and returns the accesses of every launch of the process meanwhile that had race
/// detection on.
pub fn tally<R>(code: impl FnOnce() -> R) -> (R, Vec<Touched>) {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            *launches() = None;
        }
    }
    *launches() = Some(Vec::new());
    let _end = End;
    let result = code();
    let touched = launches().take().unwrap_or_default();
    (result, touched)
}

fn launches() -> std::sync::MutexGuard<'static, Option<Vec<Touched>>> {
    LAUNCHES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// True if launches are counted.
pub(super) fn is_on() -> bool {
    launches().is_some()
}

/// Records the accesses of a launch.
pub(super) fn note(touched: Touched) {
    if let Some(launches) = &mut *launches() {
        launches.push(touched);
    }
}

/// The accessed bytes of an argument.
#[derive(Default)]
pub(super) struct Bytes(Vec<AtomicBool>);

impl Bytes {
    pub(super) fn of(count: usize) -> Self {
        Self((0..count).map(|_| AtomicBool::new(false)).collect())
    }

    pub(super) fn touch(&self, start: usize, count: usize) {
        let end = self.0.len().min(start + count);
        self.0[start.min(end)..end].iter().for_each(|byte| byte.store(true, Ordering::Relaxed));
    }

    pub(super) fn count(&self) -> usize {
        self.0.iter().filter(|byte| byte.load(Ordering::Relaxed)).count()
    }
}
