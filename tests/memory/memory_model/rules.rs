//! What must hold, what is planted to see that it is found, and what programs did.

use std::time::Duration;
use stepscope::faults::{Call, Fault};

/// What a program did that it must not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) rule: Rule,
    pub(crate) detail: String,
    /// For how long the machine itself stood still meanwhile.
    pub(crate) pauses: Duration,
}

/// What must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// A tensor holds what was written to it, so no two live ones overlap.
    Disjoint,
    /// A saved tensor does not change.
    Saved,
    /// A buffer that outlives steps holds what was written to it.
    Persistent,
    /// What a step took has been given back when it is over.
    Returned,
    /// Every outcome is the one that follows from the request, the arena and the fault.
    Typed,
    /// No call lasts longer than its deadline and [`SLACK`].
    InTime,
    /// The report says what happened.
    Reported,
}

/// A bug that is put where the library could have it, to see whether it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    /// A tensor is at the place of a live one: its handle is a copy of that one's.
    DoubleHandOut,
    /// A saved tensor is written, through a copy of its handle from before.
    SavedOverwritten,
    /// A reset with a live saved tensor: its handle is used in the scope after its own.
    ResetUnderSaved,
    /// A step writes a persistent buffer, and the program does not say so.
    BufferOverwritten,
    /// A block of the pool is not given back: the driver fails, and the reference is told of the error, not of the block.
    LeakedBlock,
    /// A call ends after its deadline: an upload, which no worker thread bounds, is delayed.
    LateReturn,
    /// A call fails that nobody was told to expect.
    WrongOutcome,
    /// A tensor is made that the reference does not count.
    Miscounted,
}

/// What programs did, to see that they did enough.
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
    /// Faults met, by call.
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
