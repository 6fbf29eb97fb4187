//! The work in steps and scratches: tensors are made, written, saved and checked, and the scope
//! ends.
//!
//! Invariant: every tensor is checked before its scope ends, however it ends.

use super::super::program::{Ending, HUGE, KEPT, LENGTHS, Op, STALL_DEADLINE};
use super::super::reference::{Block, Mark};
use super::super::rules::{Planted, Rule};
use super::judge::{reports, same};
use super::{Begin, End, Execution, Thrown, Want};
use crate::support::witness::SLACK;
use std::any::Any;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use stepscope::check::faults::{Call, Fault};
use stepscope::tensor::{Saved, ScratchStep, Source};
use stepscope::{EagerStep, Error, Result, Step, Tensor, ops};

/// A live tensor, and its expected contents.
pub(super) struct Live<'s> {
    handle: Handle<'s>,
    want: Vec<f32>,
    name: u32,
    /// The place that it got.
    place: Block,
}

pub(super) enum Handle<'s> {
    Unique(Tensor<'s>),
    Saved(Saved<'s>),
}

/// Calls an expression generic over sources with either kind of handle.
macro_rules! with {
    ($handle:expr, |$source:ident| $body:expr) => {
        match $handle {
            Handle::Unique($source) => $body,
            Handle::Saved($source) => $body,
        }
    };
}

/// A step or a scratch.
pub(super) trait Scope<'s> {
    fn step(&self) -> &Step<'s>;
    /// Uploads values, or returns `None` in a scratch, which cannot.
    fn upload(&self, values: &[f32]) -> Option<Result<Tensor<'s>>>;
    fn read(&self, source: &impl Source<'s, f32>) -> Option<Result<Vec<f32>>>;
    fn scratch(&mut self, run: impl for<'i> FnOnce(&mut ScratchStep<'i, 's>) -> Result<()>) -> Result<()>;
}

impl<'s> Scope<'s> for EagerStep<'s> {
    fn step(&self) -> &Step<'s> {
        self
    }

    fn upload(&self, values: &[f32]) -> Option<Result<Tensor<'s>>> {
        Some(EagerStep::upload(self, values, [values.len()]))
    }

    fn read(&self, source: &impl Source<'s, f32>) -> Option<Result<Vec<f32>>> {
        Some(EagerStep::read(self, source))
    }

    fn scratch(&mut self, run: impl for<'i> FnOnce(&mut ScratchStep<'i, 's>) -> Result<()>) -> Result<()> {
        EagerStep::scratch(self, run)
    }
}

impl<'s> Scope<'s> for ScratchStep<'s, '_> {
    fn step(&self) -> &Step<'s> {
        self
    }

    fn upload(&self, _: &[f32]) -> Option<Result<Tensor<'s>>> {
        None
    }

    fn read(&self, _: &impl Source<'s, f32>) -> Option<Result<Vec<f32>>> {
        None
    }

    fn scratch(&mut self, run: impl for<'i> FnOnce(&mut ScratchStep<'i, 's>) -> Result<()>) -> Result<()> {
        ScratchStep::scratch(self, run)
    }
}

/// A scope's access to the scope around it.
pub(super) type Outer<'b, 's, S> = &'b mut dyn FnMut(&mut Execution<'_>, &S, &mut Vec<Live<'s>>, &Op) -> Result<()>;

impl Execution<'_> {
    /// Runs a scope's own work, from its beginning to its ending.
    pub(super) fn body<'s, S: Scope<'s>>(
        &mut self,
        scope: &mut S,
        ops: &[Op],
        ending: Ending,
        outer: Outer<'_, 's, S>,
    ) -> Result<()> {
        let mut values = Vec::new();
        let mut outcome = Ok(());
        if let Some(stale) = self.stale.take() {
            // SAFETY: none, on purpose: the tensor's step is over. Its memory, the arena's, is
            // still there, so reading it is harmless on both devices.
            values.push(unsafe { mem::transmute::<Live<'static>, Live<'s>>(stale) });
        }
        for op in ops {
            let done = self.op(scope, &mut values, op, outer);
            if self.violation.is_some() {
                break;
            }
            if done.is_err() && self.program.stops_at_errors {
                outcome = done;
                break;
            }
        }
        self.look_at_all(scope, &values);
        if self.planted == Some(Planted::Miscounted) {
            let _ = ops::fill(scope.step(), [1], 0.0);
        }
        if self.planted == Some(Planted::ResetUnderSaved) {
            self.stale = values.into_iter().rfind(|live| matches!(live.handle, Handle::Saved(_))).map(|live| {
                // SAFETY: none; see above.
                unsafe { mem::transmute::<Live<'s>, Live<'static>>(live) }
            });
        }
        let end = match (&outcome, ending) {
            (Err(error), _) => End::Failed(error.clone()),
            (Ok(()), Ending::Returns) => End::Returned,
            (Ok(()), Ending::Fails) => End::Failed(failure()),
            (Ok(()), Ending::Panics) => End::Panicked,
        };
        let outcome = if let End::Failed(error) = &end { Err(error.clone()) } else { Ok(()) };
        let panics = matches!(end, End::Panicked);
        self.closing = Some((self.begin(), end));
        // Bypasses the panic hook, which would print.
        if panics { resume_unwind(Box::new(Thrown)) } else { outcome }
    }

    /// Performs an operation. An error is the library's.
    fn op<'s, S: Scope<'s>>(
        &mut self,
        scope: &mut S,
        values: &mut Vec<Live<'s>>,
        op: &Op,
        outer: Outer<'_, 's, S>,
    ) -> Result<()> {
        let planted = self.planted;
        match *op {
            Op::Upload(length) => {
                let want = self.pattern(LENGTHS[length]);
                let begin = self.begin();
                if planted == Some(Planted::LateReturn) {
                    std::thread::sleep(STALL_DEADLINE + 2 * SLACK);
                }
                match scope.upload(&want) {
                    Some(made) => self.made("upload", begin, made, want, values),
                    None => self.fill(scope, values, LENGTHS[length]),
                }
            }
            Op::Fill(length) if planted == Some(Planted::DoubleHandOut) => {
                let want = vec![self.next_value(); LENGTHS[length]];
                let same = values.iter().find_map(|live| match &live.handle {
                    Handle::Unique(tensor) if live.want.len() == want.len() => Some((tensor, live.place)),
                    _ => None,
                });
                // SAFETY: none, on purpose: two handles of one place. A handle has no destructor,
                // and both end before their step does.
                let same = same.map(|(tensor, place)| (unsafe { std::ptr::read(tensor) }, place));
                let Some((mut same, place)) = same else { return self.fill(scope, values, LENGTHS[length]) };
                ops::fill_into(scope.step(), &mut same, want[0])?;
                values.push(Live { handle: Handle::Unique(same), want, name: self.names, place });
                Ok(())
            }
            Op::Fill(length) => self.fill(scope, values, LENGTHS[length]),
            Op::Copy(pick) => {
                let Some(live) = pick_from(values, pick) else { return Ok(()) };
                let begin = self.begin();
                let made = with!(&live.handle, |source| ops::copy(scope.step(), source));
                let want = live.want.clone();
                self.made("copy", begin, made, want, values)
            }
            Op::Overwrite(pick) => {
                let value = self.next_value();
                let Some(live) = pick_from(values, pick) else { return Ok(()) };
                let Handle::Unique(tensor) = &mut live.handle else { return Ok(()) };
                let begin = self.begin();
                let done = ops::fill_into(scope.step(), tensor, value);
                if done.is_ok() {
                    live.want.fill(value);
                }
                self.judge("fill_into", begin, &done, Want::Success, false, &[]);
                done
            }
            Op::Save(pick) => {
                if values.is_empty() {
                    return Ok(());
                }
                let at = pick % values.len();
                let Live { handle, want, name, place } = values.remove(at);
                let handle = match handle {
                    Handle::Unique(tensor) => {
                        // SAFETY: none, on purpose: a handle that can still write a saved tensor.
                        let writable = (planted == Some(Planted::SavedOverwritten))
                            .then(|| unsafe { std::ptr::read(&raw const tensor) });
                        let saved = Handle::Saved(tensor.save());
                        if let Some(mut writable) = writable {
                            ops::fill_into(scope.step(), &mut writable, -1.0)?;
                        }
                        saved
                    }
                    saved => saved,
                };
                values.insert(at, Live { handle, want, name, place });
                Ok(())
            }
            Op::GiveBack(pick) => {
                let Some(at) = pick.checked_rem(values.len()) else { return Ok(()) };
                if matches!(values[at].handle, Handle::Unique(_)) {
                    let Live { handle: Handle::Unique(tensor), place, .. } = values.remove(at) else { unreachable!() };
                    scope.step().free(tensor);
                    self.reference.give_back(place);
                }
                Ok(())
            }
            Op::Look(pick) => match pick_from(values, pick) {
                Some(live) => self.look(scope, live),
                None => Ok(()),
            },
            Op::Huge(at) => {
                let begin = self.begin();
                let made = scope.step().empty::<f32>([HUGE[at]]);
                let (want, _) = self.predict(HUGE[at]);
                self.asked(HUGE[at], &want);
                self.judge("empty", begin, &made, want, true, reports(&want));
                made.map(drop)
            }
            // Only the buffer itself may show it.
            Op::FromKept if planted == Some(Planted::BufferOverwritten) => Ok(()),
            Op::FromKept => {
                let begin = self.begin();
                let step = scope.step();
                let made = step.lend(&self.rig.kept, [LENGTHS[KEPT]]).and_then(|kept| ops::copy(step, &kept));
                let want = self.rig.kept_values.clone();
                self.made("copy", begin, made, want, values)
            }
            Op::ToKept(_) if planted == Some(Planted::BufferOverwritten) => {
                let step = scope.step();
                ops::fill_into(step, &mut step.lend_mut(&mut self.rig.kept, [LENGTHS[KEPT]])?, -1.0)
            }
            Op::ToKept(pick) => {
                let Some(live) = pick_from(values, pick) else { return Ok(()) };
                if live.want.len() != LENGTHS[KEPT] {
                    return Ok(());
                }
                let begin = self.begin();
                let (step, kept) = (scope.step(), &mut self.rig.kept);
                let done = with!(&live.handle, |source| step
                    .lend_mut(kept, [LENGTHS[KEPT]])
                    .and_then(|mut kept| ops::copy_into(step, source, &mut kept)));
                if done.is_ok() {
                    self.rig.kept_values.clone_from(&live.want);
                }
                self.judge("copy_into", begin, &done, Want::Success, false, &[]);
                done
            }
            Op::FromOuter(_) | Op::ToOuter(_) => outer(self, scope, values, op),
            Op::Scratch(ref ops, ending) => {
                self.tally.scratches += 1;
                let mark = self.reference.begin();
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    scope.scratch(|inner| {
                        self.body(inner, ops, ending, &mut |world, inner, inner_values, op| {
                            world.across(inner, inner_values, values, op)
                        })
                    })
                }));
                let done = self.closed("scratch", outcome, mark, false, &[]);
                match done {
                    // A panic continues, or is caught and the outer scope continues.
                    None if self.program.stops_at_errors => {
                        self.look_at_all(scope, values);
                        self.closing = Some((self.begin(), End::Panicked));
                        resume_unwind(Box::new(Thrown))
                    }
                    None => Ok(()),
                    Some(done) => done,
                }
            }
        }
    }

    /// Copies between a scratch and the scope around it.
    fn across<'i, 'o>(
        &mut self,
        inner: &ScratchStep<'i, 'o>,
        values: &mut Vec<Live<'i>>,
        outer: &mut [Live<'o>],
        op: &Op,
    ) -> Result<()> {
        match *op {
            Op::FromOuter(pick) => {
                let Some(live) = pick_from(outer, pick) else { return Ok(()) };
                let begin = self.begin();
                let made = with!(&live.handle, |source| ops::copy(inner, &inner.lend(source)));
                let want = live.want.clone();
                self.made("copy", begin, made, want, values)
            }
            Op::ToOuter(pick) => {
                let Some(live) = pick_from(values, pick) else { return Ok(()) };
                let unique = |other: &&mut Live<'_>| matches!(other.handle, Handle::Unique(_));
                let Some(target) = outer.iter_mut().filter(unique).find(|other| other.want.len() == live.want.len())
                else {
                    return Ok(());
                };
                let Handle::Unique(tensor) = &mut target.handle else { return Ok(()) };
                let begin = self.begin();
                let done = with!(&live.handle, |source| ops::copy_into(inner, source, &mut inner.lend_mut(tensor)));
                if done.is_ok() {
                    target.want.clone_from(&live.want);
                }
                self.judge("copy_into", begin, &done, Want::Success, false, &[]);
                done
            }
            _ => Ok(()),
        }
    }

    fn fill<'s, S: Scope<'s>>(&mut self, scope: &S, values: &mut Vec<Live<'s>>, length: usize) -> Result<()> {
        let value = self.next_value();
        let begin = self.begin();
        let made = ops::fill(scope.step(), [length], value);
        self.made("fill", begin, made, vec![value; length], values)
    }

    /// Records the result of a request for a tensor with the contents `want`.
    fn made<'s>(
        &mut self,
        what: &str,
        begin: Begin,
        made: Result<Tensor<'s>>,
        want: Vec<f32>,
        values: &mut Vec<Live<'s>>,
    ) -> Result<()> {
        self.tally.tensors += 1;
        let (predicted, block) = self.predict(want.len());
        self.asked(want.len(), &predicted);
        let met = self.judge(what, begin, &made, predicted, true, reports(&predicted));
        let not_given = matches!(met, Some((Call::FreeBytes | Call::PoolAllocate, Fault::Fail)));
        let place = block.filter(|_| !not_given);
        if let Some(block) = place {
            self.reference.take(block);
        }
        let tensor = made?;
        // Without a prediction, no tensor was expected, which is a violation.
        let Some(place) = place else { return Ok(()) };
        values.push(Live { handle: Handle::Unique(tensor), want, name: self.names, place });
        Ok(())
    }

    /// Returns the arena's expected answer to a request, and the tensor's place.
    fn predict(&self, elements: usize) -> (Want, Option<Block>) {
        let Some(padded) = self.reference.padded(elements) else { return (Want::Misuse, None) };
        match self.reference.place(padded) {
            Ok(block) => (Want::Success, Some(block)),
            Err(cause) => (Want::Full { padded, cause }, None),
        }
    }

    fn asked(&mut self, elements: usize, want: &Want) {
        if let Some(padded) = self.reference.padded(elements) {
            self.reference.need(padded);
        }
        if matches!(want, Want::Full { .. }) && self.reference.cap_bytes.is_some() && !self.lost {
            self.reference.refusals += 1;
        }
    }

    fn look_at_all<'s, S: Scope<'s>>(&mut self, scope: &S, values: &[Live<'s>]) {
        for live in values {
            // An error has been judged; the scope ends as its program plans.
            let _ = self.look(scope, live);
        }
    }

    /// Checks the contents of a tensor.
    fn look<'s, S: Scope<'s>>(&mut self, scope: &S, live: &Live<'s>) -> Result<()> {
        if self.over() {
            return Ok(());
        }
        self.tally.looks += 1;
        let begin = self.begin();
        let read = with!(&live.handle, |source| scope.read(source));
        let in_step = read.is_some();
        let read = read.unwrap_or_else(|| {
            // A scratch cannot read, so the values pass through a buffer.
            let at = LENGTHS
                .iter()
                .position(|&length| length == live.want.len())
                .expect("the length is one of the program's");
            let (step, mirror) = (scope.step(), &mut self.rig.mirrors[at]);
            with!(&live.handle, |source| ops::copy_into(step, source, &mut step.lend_mut(mirror, [LENGTHS[at]])?))?;
            mirror.read()
        });
        self.judge("read", begin, &read, Want::Success, in_step, &[]);
        let saved = matches!(live.handle, Handle::Saved(_));
        let rule = if saved { Rule::Saved } else { Rule::Disjoint };
        self.holds(rule, live.name, &read?, &live.want);
        Ok(())
    }

    /// Judges the end of a scope: `None` if it panicked as planned. See [`Execution::judge`] for
    /// the last two arguments.
    pub(super) fn closed(
        &mut self,
        what: &str,
        outcome: std::thread::Result<Result<()>>,
        mark: Mark,
        of_arena: bool,
        absorbed: &[Call],
    ) -> Option<Result<()>> {
        let Some((begin, end)) = self.closing.take() else {
            self.violated(
                Rule::Typed,
                format!("{what}: the closure never ran: {:?}", outcome.map_err(|panic| panic_text(&*panic))),
            );
            return Some(Ok(()));
        };
        self.reference.rewind(mark);
        let faults = self.tally.met.len();
        let closed = match (end, outcome) {
            (End::Panicked, Err(panic)) if panic.is::<Thrown>() => {
                self.tally.panics += 1;
                self.late(what, begin);
                self.meet();
                None
            }
            (_, Err(panic)) => {
                self.violated(Rule::Typed, format!("{what}: an unexpected panic: {}", panic_text(&*panic)));
                Some(Ok(()))
            }
            (End::Panicked, Ok(got)) => {
                self.violated(Rule::Typed, format!("{what}: the panic became {got:?}"));
                Some(got)
            }
            (End::Failed(want), Ok(got)) => {
                self.tally.failures += 1;
                self.late(what, begin);
                self.meet();
                if !got.as_ref().is_err_and(|got| same(got, &want)) {
                    self.violated(
                        Rule::Typed,
                        format!("{what}: the closure failed with `{want}`, but the call returned {got:?}"),
                    );
                }
                Some(got)
            }
            (End::Returned, Ok(got)) => {
                self.judge(what, begin, &got, Want::Success, of_arena, absorbed);
                Some(got)
            }
        };
        let kept = self.tally.met[faults..].contains(&(Call::PoolFree, Fault::Fail));
        self.reference.leaked += u64::from(kept && self.planted != Some(Planted::LeakedBlock));
        closed
    }
}

fn pick_from<'v, 's>(values: &'v mut [Live<'s>], pick: usize) -> Option<&'v mut Live<'s>> {
    let count = values.len();
    values.get_mut(pick.checked_rem(count)?)
}

fn failure() -> Error {
    Error::Misuse { op: "program", expected: "this error".into(), got: "it".into() }
}

/// Returns the message of a panic.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "something".into())
}
