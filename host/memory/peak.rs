//! The most bytes of an arena that were in use at once: by a step and its overflow, and by captured steps beside it.
//!
//! Invariant: what captured steps own changes between steps alone, so a peak is what they owned then and the most that a step had since.

#![forbid(unsafe_code)]

use std::cell::Cell;

#[derive(Debug, Default)]
pub(super) struct Peak {
    /// The most that a step had since captured steps own what they own now.
    recent: Cell<usize>,
    /// The same, before.
    steps: Cell<usize>,
    /// With what captured steps owned, before.
    whole: Cell<usize>,
}

impl Peak {
    /// A step has so many bytes in use, its overflow included.
    #[inline]
    pub(super) fn step_has(&self, bytes: usize) {
        self.recent.set(self.recent.get().max(bytes));
    }

    /// Captured steps, which owned so many bytes until now, will own more or less.
    pub(super) fn captured_changes(&self, captured_bytes: usize) {
        self.whole.set(self.whole_bytes(captured_bytes));
        self.steps.set(self.step_bytes());
        self.recent.set(0);
    }

    /// The most that a step had.
    pub(super) fn step_bytes(&self) -> usize {
        self.steps.get().max(self.recent.get())
    }

    /// The most that all had together, where captured steps own so many bytes now.
    pub(super) fn whole_bytes(&self, captured_bytes: usize) -> usize {
        self.whole.get().max(captured_bytes.saturating_add(self.recent.get()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_is_what_was_in_use_at_one_time() {
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
