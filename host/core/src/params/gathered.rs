//! Weights of which the ranks of a group keep slices: each unit, such as a block of a model, is
//! gathered into a slot before an op reads it.
//!
//! ```text
//! stored here      slices of all units
//! slot 0           | all of unit 3 |      read by the ops that are queued now
//! slot 1           | all of unit 2 |      overwritten by the next unit, in stream order
//! ```
//! An op pins the units whose weights it lends, until all its launches are queued. A slot of a
//! pinned unit is not overwritten.
//!
//! Invariant: a lent weight is in its slot until the launches of its op are queued. The compiler
//! ensures that nothing that an op lends outlives it.

#![forbid(unsafe_code)]

use super::masters::Masters;
use super::matrix::MatrixWeights;
use super::spec::{Parameter, StackedParameters};
use super::weights::Parameters;
use crate::buffer::AnyBuffer;
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Shape, Stored};
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The number of units that are gathered at a time.
const SLOTS: usize = 2;

/// The exchange that gathers weights from the ranks that keep them.
pub trait GatherWeights: fmt::Debug + Send + Sync {
    /// Queues copies of a unit's weights from all ranks. `own` are the regions that this rank
    /// keeps, and `into` the regions of the slot, which begins with the unit.
    fn gather(&self, unit: &Range<usize>, own: &[AnyBuffer<'_>], into: &[AnyBuffer<'_>]) -> Result<()>;
}

/// The slots, and the units that they contain.
#[derive(Debug)]
pub(super) struct Gathered {
    /// The elements of each unit, ascending. They cover the region.
    units: Vec<Range<usize>>,
    slots: Vec<Masters>,
    contents: Mutex<Contents>,
    gather: Arc<dyn GatherWeights>,
}

/// The contents of all slots.
#[derive(Debug)]
struct Contents {
    /// The number of lends so far.
    lends: u64,
    slots: Vec<Slot>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    unit: Option<usize>,
    /// The number of the last lend.
    lent: u64,
    /// The number of ops that lend from it.
    pins: usize,
}

impl Gathered {
    /// Makes empty slots for these units.
    pub(super) fn new(own: &Masters, units: Vec<Range<usize>>, gather: Arc<dyn GatherWeights>) -> Result<Self> {
        let most = units.iter().map(Range::len).max().unwrap_or(0);
        let slots = (0..SLOTS.min(units.len())).map(|_| own.slot(most)).collect::<Result<Vec<_>>>()?;
        let contents = Mutex::new(Contents { lends: 0, slots: vec![Slot::default(); slots.len()] });
        Ok(Self { units, slots, contents, gather })
    }

    /// Adds a BF16 copy to the slots, which are empty then.
    pub(super) fn with_bf16_copy(self) -> Result<Self> {
        self.forget();
        let slots = self.slots.into_iter().map(Masters::with_unrounded_copy).collect::<Result<_>>()?;
        Ok(Self { slots, ..self })
    }

    pub(super) fn units(&self) -> &[Range<usize>] {
        &self.units
    }

    /// True if the slots have weights in BF16.
    pub(super) fn has_bf16(&self) -> bool {
        self.slots.iter().any(|slot| slot.bf16().is_some())
    }

    /// The bytes of the slots.
    pub(super) fn bytes(&self) -> usize {
        let bytes = |slot: &Masters| slot.all_regions().into_iter().map(AnyBuffer::bytes).sum::<usize>();
        self.slots.iter().map(bytes).sum()
    }

    /// Empties the slots, because the weights have changed.
    pub(super) fn forget(&self) {
        self.contents().slots.iter_mut().for_each(|slot| slot.unit = None);
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unpin(&self, slot: usize) {
        self.contents().slots[slot].pins -= 1;
    }

    /// Returns the slot that contains a range of the region, and the range within the slot. It is
    /// gathered first if it is in no slot. The slot is pinned, once for each call.
    fn pin(&self, own: &Masters, range: &Range<usize>) -> Result<(usize, Range<usize>)> {
        let number = self.units.partition_point(|unit| unit.end <= range.start);
        let Some(unit) = self.units.get(number).filter(|unit| range.end <= unit.end) else {
            let expected = "weights of one block at a time, because ranks keep slices of the weights: \
                            stack only parameters of one block";
            return Err(Error::misuse("lend", expected, format!("elements {range:?}, in several blocks")));
        };
        let mut contents = self.contents();
        let slot = match contents.slots.iter().position(|slot| slot.unit == Some(number)) {
            Some(slot) => slot,
            None => {
                let free = (0..self.slots.len()).filter(|&slot| contents.slots[slot].pins == 0);
                let Some(slot) = free.min_by_key(|&slot| contents.slots[slot].lent) else {
                    let expected = format!("an op of parameters of at most {SLOTS} blocks, because ranks keep slices");
                    return Err(Error::misuse("lend", expected, "one of more"));
                };
                contents.slots[slot].unit = None;
                self.gather.gather(unit, &own.regions(), &self.slots[slot].regions())?;
                self.slots[slot].round(0..unit.len())?;
                contents.slots[slot].unit = Some(number);
                slot
            }
        };
        contents.lends += 1;
        let lent = contents.lends;
        let of_slot = &mut contents.slots[slot];
        (of_slot.lent, of_slot.pins) = (lent, of_slot.pins + 1);
        Ok((slot, range.start - unit.start..range.end - unit.start))
    }
}

/// The weights that an op lends. Its slots are not overwritten until it is dropped or released.
#[derive(Debug)]
pub(crate) struct Pins<'p> {
    parameters: &'p Parameters,
    slots: RefCell<Vec<usize>>,
}

impl<'p> Pins<'p> {
    pub(crate) fn new(parameters: &'p Parameters) -> Self {
        Self { parameters, slots: RefCell::default() }
    }

    /// Ends the lends so far.
    pub(crate) fn release(&self) {
        if let Some(gathered) = &self.parameters.gathered {
            self.slots.borrow_mut().drain(..).for_each(|slot| gathered.unpin(slot));
        }
    }

    /// Returns the weights that contain a range, and the range within them.
    pub(super) fn place(&self, range: &Range<usize>) -> Result<(&Masters, Range<usize>)> {
        let own = &self.parameters.masters;
        let Some(gathered) = &self.parameters.gathered else { return Ok((own, range.clone())) };
        let (slot, within) = gathered.pin(own, range)?;
        self.slots.borrow_mut().push(slot);
        Ok((&gathered.slots[slot], within))
    }

    /// Lends a parameter's weights; see [`Parameters::matrix`].
    #[track_caller]
    pub(crate) fn matrix<'b, 's, S: Stored>(
        &'b self,
        step: &Step<'s>,
        parameter: Parameter,
    ) -> Result<MatrixWeights<'b, 's, S>> {
        let entry = self.parameters.spec().entry(parameter)?;
        match entry.frozen() {
            Some(stored) => self.parameters.frozen.lend(step, entry, stored),
            None => self.trained(step, entry.range(), entry.shape()),
        }
    }

    /// Lends a stack's weights; see [`Parameters::lend_stack_as`].
    #[track_caller]
    pub(crate) fn stack<'b, 's, S: Stored>(
        &'b self,
        step: &Step<'s>,
        stack: &StackedParameters,
    ) -> Result<MatrixWeights<'b, 's, S>> {
        let spec = self.parameters.spec();
        if let Some(stored) = spec.head(stack)?.frozen() {
            return self.parameters.frozen.lend_stack(step, spec, stack, stored).map(MatrixWeights::Lent);
        }
        let (span, _) = spec.span(stack)?;
        let shape = [span.len()].into();
        self.trained(step, span, shape)
    }

    #[track_caller]
    fn trained<'b, 's, S: Stored>(
        &'b self,
        step: &Step<'s>,
        range: Range<usize>,
        shape: Shape,
    ) -> Result<MatrixWeights<'b, 's, S>> {
        // A dry run has no other ranks.
        if self.parameters.gathered.is_some() && step.device().identity() != self.parameters.device().identity() {
            let expected = "an eager step, because ranks keep slices of the weights and gather them while it runs: \
                            use `Trainer::eager`";
            return Err(Error::misuse("lend", expected, "a captured or measured step"));
        }
        let (masters, range) = self.place(&range)?;
        masters.lend(step, range, shape)
    }
}

impl Drop for Pins<'_> {
    fn drop(&mut self) {
        self.release();
    }
}
