//! The rules, the planted bugs that test them, and counts of what programs did.

use std::time::Duration;
use stepscope::check::faults::{Call, Fault};

/// A rule that a program broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) rule: Rule,
    pub(crate) detail: String,
    /// The time for which the machine itself stood still meanwhile.
    pub(crate) pauses: Duration,
}

/// The rules that must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// A tensor holds the values that were written to it, so no two live ones overlap.
    Disjoint,
    /// A saved tensor does not change.
    Saved,
    /// A buffer that outlives steps holds the values that were written to it.
    Persistent,
    /// A step's memory has been freed when it is over.
    Returned,
    /// Every outcome follows from the request, the arena and the fault.
    Typed,
    /// No call lasts longer than its deadline and [`SLACK`].
    InTime,
    /// The report is correct.
    Reported,
}

/// A bug that is planted where the library could have it, to check that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    /// A tensor shares the place of a live one: its handle is a copy.
    DoubleHandOut,
    /// A saved tensor is written, through an earlier copy of its handle.
    SavedOverwritten,
    /// A reset with a live saved tensor: its handle is used in the next scope.
    ResetUnderSaved,
    /// A step writes a persistent buffer, and the program does not record it.
    BufferOverwritten,
    /// A block of the pool is not freed: the driver fails, and the reference knows the error, but
    /// not the block.
    LeakedBlock,
    /// A call ends after its deadline: an upload, which no worker thread bounds, is delayed.
    LateReturn,
    /// A call fails unexpectedly.
    WrongOutcome,
    /// A tensor is made that the reference does not count.
    Miscounted,
}

/// Counts of what programs did, to check that they covered enough.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) programs: u64,
    pub(crate) steps: u64,
    pub(crate) scratches: u64,
    pub(crate) tensors: u64,
    pub(crate) looks: u64,
    pub(crate) overflows: u64,
    pub(crate) refusals: u64,
    pub(crate) growths: u64,
    pub(crate) failures: u64,
    pub(crate) panics: u64,
    pub(crate) lost: u64,
    /// The faults that were met, by call.
    pub(crate) met: Vec<(Call, Fault)>,
}

impl Tally {
    pub(crate) fn add(&mut self, other: Self) {
        let Self {
            programs,
            steps,
            scratches,
            tensors,
            looks,
            overflows,
            refusals,
            growths,
            failures,
            panics,
            lost,
            met,
        } = other;
        self.programs += programs;
        self.steps += steps;
        self.scratches += scratches;
        self.tensors += tensors;
        self.looks += looks;
        self.overflows += overflows;
        self.refusals += refusals;
        self.growths += growths;
        self.failures += failures;
        self.panics += panics;
        self.lost += lost;
        self.met.extend(met);
    }
}
