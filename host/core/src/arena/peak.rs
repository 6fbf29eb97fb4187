//! The peak of an arena's bytes in use: those of a step and its overflow, plus those of captured
//! steps.
//!
//! Invariant: the bytes of captured steps change only between steps. A peak is therefore their
//! current bytes plus the most that a step has had since they last changed.

#![forbid(unsafe_code)]

use std::cell::Cell;

#[derive(Debug, Default)]
pub(super) struct Peak {
    /// The most that a step has had since the captured bytes last changed.
    recent: Cell<usize>,
    /// The most that a step had before that.
    steps: Cell<usize>,
    /// The peak including captured bytes before that.
    whole: Cell<usize>,
}

impl Peak {
    /// Records that a step has `bytes` in use, its overflow included.
    #[inline]
    pub(super) fn step_has(&self, bytes: usize) {
        self.recent.set(self.recent.get().max(bytes));
    }

    /// Records that the captured bytes are about to change from `captured_bytes`.
    pub(super) fn captured_changes(&self, captured_bytes: usize) {
        self.whole.set(self.whole_bytes(captured_bytes));
        self.steps.set(self.step_bytes());
        self.recent.set(0);
    }

    /// Returns the most that a step has had.
    pub(super) fn step_bytes(&self) -> usize {
        self.steps.get().max(self.recent.get())
    }

    /// Returns the total peak, given the captured bytes now.
    pub(super) fn whole_bytes(&self, captured_bytes: usize) -> usize {
        self.whole.get().max(captured_bytes.saturating_add(self.recent.get()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_counts_simultaneous_use() {
        let peak = Peak::default();
        peak.step_has(100);
        peak.step_has(70);
        assert_eq!((peak.step_bytes(), peak.whole_bytes(0)), (100, 100));
        peak.captured_changes(0);
        assert_eq!(peak.whole_bytes(40), 100, "captured steps own 40 bytes, and no step has run beside them");
        peak.step_has(50);
        assert_eq!(peak.whole_bytes(40), 100);
        peak.step_has(90);
        assert_eq!((peak.step_bytes(), peak.whole_bytes(40)), (100, 130));
        peak.captured_changes(40);
        peak.step_has(10);
        assert_eq!((peak.step_bytes(), peak.whole_bytes(0)), (100, 130), "they have ended");
    }
}
