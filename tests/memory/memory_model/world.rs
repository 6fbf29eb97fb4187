//! Runs a program on a device and checks every answer against the reference.
//!
//! Every tensor is filled with its own pattern, and each scope checks all its tensors before it
//! ends. If two of them shared a byte, the one written first would show it. Every call is timed,
//! and its outcome must follow from the reference and from the fault that it met.
//!
//! Invariant: the first violation ends the program, which returns it.

use super::program::{Action, Ending, KEPT, Kind, LENGTHS, Op, Planned, Program, STALL_DEADLINE};
use super::reference::Reference;
use super::rules::{Planted, Rule, Tally, Violation};
use crate::support::bits;
use crate::support::witness::Watch;
use scopes::Live;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::memory::{Growth, Overflow};
use stepscope::report::{ArenaReport, Cause};
use stepscope::{Arena, Buffer, Capacity, Device, DeviceKind, EagerStep, Error, Result, ops};

#[path = "judge.rs"]
mod judge;
#[path = "scopes.rs"]
mod scopes;

/// The deadline of every call of a program without stalls.
const LONG: Duration = Duration::from_secs(20);

/// The driver calls that allocate, and those that free.
const TAKE_AND_GIVE: [(Call, Call); 3] =
    [(Call::Allocate, Call::Free), (Call::PoolAllocate, Call::PoolFree), (Call::CreatePool, Call::DestroyPool)];

/// A device with the buffers that outlive steps. Programs without faults share one.
pub(crate) struct Rig {
    device: Device,
    plan: FaultPlan,
    /// One buffer for each of [`LENGTHS`], through which a scratch's values are read.
    mirrors: Vec<Buffer<f32>>,
    kept: Buffer<f32>,
    kept_values: Vec<f32>,
}

impl Rig {
    pub(crate) fn open(device: DeviceKind, kind: Kind) -> Self {
        let plan = FaultPlan::new();
        let deadline = if kind == Kind::Stalling { STALL_DEADLINE } else { LONG };
        let device = Device::builder(device).deadline(deadline).layer(plan.clone()).open().unwrap();
        let mirrors = LENGTHS.map(|length| Buffer::zeros(&device, length).unwrap()).into();
        let kept = Buffer::zeros(&device, LENGTHS[KEPT]).unwrap();
        Self { device, plan, mirrors, kept, kept_values: vec![0.0; LENGTHS[KEPT]] }
    }

    /// True if nothing is left on the device that could affect a later program.
    pub(crate) fn is_clean(&self, program: &Program) -> bool {
        program.kind == Kind::Sound && self.device.lost().is_none()
    }
}

/// A program in progress.
pub(crate) struct Execution<'r> {
    rig: &'r mut Rig,
    program: &'r Program,
    planted: Option<Planted>,
    reference: Reference,
    deadline: Duration,
    /// The coming fault, by the number of its call on the device.
    pending: Option<Planned>,
    lost: bool,
    names: u32,
    /// The start of the step, if it has a deadline. Its calls wait no longer than the rest of it.
    step: Option<Watch>,
    closing: Option<(Begin, End)>,
    stale: Option<Live<'static>>,
    violation: Option<Violation>,
    watch: Watch,
    tally: Tally,
}

/// The time before a call.
#[derive(Clone, Copy)]
struct Begin(Watch);

/// The end of a scope's closure.
enum End {
    Returned,
    Failed(Error),
    Panicked,
}

/// The payload of a scope's planned panic.
struct Thrown;

/// The expected outcome of a call without faults.
#[derive(Clone, Copy)]
enum Want {
    Success,
    Misuse,
    Full { padded: usize, cause: Cause },
}

impl<'r> Execution<'r> {
    /// Runs a program.
    pub(crate) fn run(rig: &'r mut Rig, program: &'r Program, planted: Option<Planted>) -> Result<Tally, Violation> {
        let stalls = program.kind == Kind::Stalling || planted == Some(Planted::LateReturn);
        let deadline = if stalls { STALL_DEADLINE } else { LONG };
        let count = |planned: Planned| Planned { number: rig.plan.count(planned.call) + planned.number, ..planned };
        let pending = program.fault.map(count);
        let unexpected = match planted {
            Some(Planted::WrongOutcome) => Some((Call::Upload, Fault::Fail)),
            _ => None,
        };
        // The fault that is not pending is unexpected.
        let unexpected = unexpected.map(|(call, fault)| count(Planned { call, number: 1, fault }));
        for Planned { call, number, fault } in pending.into_iter().chain(unexpected) {
            let _ = rig.plan.clone().on(call, number, fault);
        }
        let cap_bytes = program.pool.map(|(cap, _)| cap);
        let reference = Reference::new(program.capacity_bytes, cap_bytes, program.checked);
        let mut execution = Execution {
            rig,
            program,
            planted,
            reference,
            deadline,
            pending,
            lost: false,
            names: 0,
            step: None,
            closing: None,
            stale: None,
            violation: None,
            watch: Watch::start(),
            tally: Tally { programs: 1, ..Tally::default() },
        };
        execution.all();
        let Execution { mut tally, reference, violation, lost, .. } = execution;
        (tally.overflows, tally.growths, tally.lost) = (reference.overflows, reference.growths, u64::from(lost));
        tally.refusals = reference.refusals;
        violation.map_or(Ok(tally), Err)
    }

    /// Runs from the building of the arena to its end.
    fn all(&mut self) {
        let before = self.counts();
        let Some(mut arena) = self.build().or_else(|| if self.over() { None } else { self.build() }) else { return };
        for action in &self.program.actions {
            match action {
                Action::Step(ops, ending) => self.step(&mut arena, ops, *ending),
                Action::Trim => {
                    let begin = self.begin();
                    let trimmed = arena.trim();
                    self.judge("trim", begin, &trimmed, Want::Success, true, &[]);
                }
                Action::Write => self.write_kept(),
            }
            self.compare(&arena);
            if self.over() {
                break;
            }
        }
        if self.lost && self.violation.is_none() {
            let begin = self.begin();
            let refused = arena.step(|step| ops::fill(step, [1], 0.0).map(drop));
            self.judge("a step on a lost device", begin, &refused, Want::Success, false, &[]);
        }
        let begin = self.begin();
        drop(arena);
        self.judge("drop", begin, &Ok(()), Want::Success, false, &[Call::Free, Call::DestroyPool]);
        if self.lost || self.violation.is_some() {
            return;
        }
        // All memory of the driver has been freed, call for call.
        let given = self.counts();
        for (at, (call, _)) in TAKE_AND_GIVE.into_iter().enumerate() {
            let failed = self.tally.met.contains(&(call, Fault::Fail));
            let taken = given[at].0 - before[at].0 - u64::from(failed);
            let returned = given[at].1 - before[at].1;
            if taken != returned {
                self.violated(
                    Rule::Returned,
                    format!("{call:?} succeeded {taken} times, but {returned} of its results were freed"),
                );
            }
        }
    }

    /// Returns the numbers of calls that allocate, and of those that free.
    fn counts(&self) -> [(u64, u64); 3] {
        TAKE_AND_GIVE.map(|(take, give)| (self.rig.plan.count(take), self.rig.plan.count(give)))
    }

    fn build(&mut self) -> Option<Arena> {
        let Program { capacity_bytes, pool, growth, checked, step_deadline, .. } = *self.program;
        let mut builder = Arena::builder(&self.rig.device)
            .capacity(Capacity::Bytes(capacity_bytes))
            .checked(checked)
            .reserve_bytes(0);
        if let Some((cap_bytes, prime_bytes)) = pool {
            builder = builder.overflow(Overflow::Pool { cap_bytes, prime_bytes, deadline: self.deadline });
        }
        if let Some(max_bytes) = growth {
            builder = builder.growth(Growth::AtBoundary { max_bytes });
        }
        if step_deadline {
            builder = builder.step_deadline(self.deadline);
        }
        let begin = self.begin();
        let built = builder.build();
        self.judge("build", begin, &built, Want::Success, false, &[Call::Free, Call::DestroyPool]);
        built.ok()
    }

    fn step(&mut self, arena: &mut Arena, ops: &[Op], ending: Ending) {
        self.tally.steps += 1;
        let mark = self.reference.begin();
        self.step = self.program.step_deadline.then(Watch::start);
        let run = |step: &mut EagerStep<'_>| self.body(step, ops, ending, &mut |_, _, _, _| Ok(()));
        let outcome = catch_unwind(AssertUnwindSafe(|| arena.step(run)));
        // After a panic the step does not grow the arena; the next step that ends does.
        let due = self.program.growth.filter(|_| !self.lost && outcome.is_ok()).filter(|&max| {
            self.reference.needed > self.reference.capacity_bytes && max > self.reference.capacity_bytes
        });
        let met = self.tally.met.len();
        // An arena that cannot grow stays as it is. The step may or may not report that.
        let growth = [Call::Free, Call::FreeBytes, Call::Allocate, Call::TrimPool, Call::Poll];
        let tolerated = if due.is_some() && matches!(outcome, Ok(Ok(()))) { &growth[..] } else { &growth[..1] };
        let _ = self.closed("step", outcome, mark, due.is_none(), tolerated);
        self.reference.resets += 1;
        if let Some(max_bytes) = due.filter(|_| !self.lost && self.violation.is_none()) {
            let no_memory = |met: &(Call, Fault)| matches!(met, (Call::FreeBytes | Call::Allocate, Fault::Fail));
            if !self.tally.met[met..].iter().any(no_memory) {
                let capacity_bytes = self.report(arena).capacity_bytes;
                let least = self.reference.needed.min(max_bytes);
                if !(least..=max_bytes).contains(&capacity_bytes) {
                    self.violated(
                        Rule::Reported,
                        format!("the arena grew to {capacity_bytes}, outside {least}..={max_bytes}"),
                    );
                }
                (self.reference.capacity_bytes, self.reference.growths) = (capacity_bytes, self.reference.growths + 1);
            }
        }
        if let Some(watch) = self.step.take() {
            self.late("step", Begin(watch));
        }
        self.check_kept();
    }

    fn write_kept(&mut self) {
        let want = self.pattern(LENGTHS[KEPT]);
        let begin = self.begin();
        let written = self.rig.kept.write(0, &want);
        if written.is_ok() {
            self.rig.kept_values = want;
        }
        self.judge("write", begin, &written, Want::Success, false, &[]);
    }

    fn check_kept(&mut self) {
        if self.over() {
            return;
        }
        let begin = self.begin();
        let read = self.rig.kept.read();
        self.judge("read", begin, &read, Want::Success, false, &[]);
        if let Ok(read) = read {
            let want = self.rig.kept_values.clone();
            self.holds(Rule::Persistent, 0, &read, &want);
        }
    }

    fn holds(&mut self, rule: Rule, name: u32, got: &[f32], want: &[f32]) {
        if bits(got) == bits(want) {
            return;
        }
        let wrong = got.iter().zip(want).position(|(got, want)| got.to_bits() != want.to_bits());
        let at = wrong.unwrap_or(0);
        let (got, want, length) = (got.get(at), want.get(at), want.len());
        self.violated(rule, format!("tensor {name} of {length} elements has {got:?} at {at}, not {want:?}"));
    }

    fn report(&mut self, arena: &Arena) -> ArenaReport {
        let begin = self.begin();
        let report = arena.report();
        self.judge("report", begin, &Ok(()), Want::Success, false, &[Call::FreeBytes]);
        report
    }

    /// Compares the arena's own report with the reference, between two steps.
    fn compare(&mut self, arena: &Arena) {
        if self.over() {
            return;
        }
        let report = self.report(arena);
        if self.over() {
            return;
        }
        let live = report.overflow.live_blocks;
        if live != self.reference.leaked {
            let want = self.reference.leaked;
            self.violated(Rule::Returned, format!("{live} blocks of the pool are live, but {want} should be"));
        }
        if let Some(difference) = self.reference.differs(&report) {
            self.violated(Rule::Reported, difference);
        }
    }

    /// True if nothing more can be checked.
    fn over(&self) -> bool {
        self.lost || self.violation.is_some()
    }

    /// Returns a value that no other tensor of the program holds.
    fn next_value(&mut self) -> f32 {
        self.names += 1;
        self.names as f32
    }

    /// Returns values that no other tensor of the program holds.
    fn pattern(&mut self, length: usize) -> Vec<f32> {
        let name = self.next_value();
        (0..length).map(|at| name + at as f32 / 4096.0).collect()
    }
}
