//! What watched launches touch of their arguments: `tests/predict.rs` holds the bytes of the cost model against it.
//!
//! Invariant: only what [`tally`] runs is counted, and what a launch touched is there when the launch is over.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

static LAUNCHES: Mutex<Option<Vec<Touched>>> = Mutex::new(None);

/// What a launch touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touched {
    /// The kernel.
    pub kernel: &'static str,
    /// Its pointers that point to memory: name, and the bytes that were read or written at least once.
    pub arguments: Vec<(&'static str, usize)>,
}

/// Runs `code`, and tells what every launch of the process touched meanwhile, as far as it was watched for races.
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

/// Whether launches are counted.
pub(super) fn is_on() -> bool {
    launches().is_some()
}

/// Notes what a launch touched.
pub(super) fn note(touched: Touched) {
    if let Some(launches) = &mut *launches() {
        launches.push(touched);
    }
}

/// The bytes of an argument that were touched.
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
