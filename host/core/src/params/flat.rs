//! A flat region of trained parameters: weights or gradients, all of them or the slices of a rank.
//!
//! Invariant: each parameter's position is the spec's, and elements that are not stored here are
//! never lent.

#![forbid(unsafe_code)]

use super::kept::Kept;
use super::spec::{Parameter, ParameterSpec, StackedParameters};
use crate::buffer::Buffer;
use crate::elementary;
use crate::error::{Error, Result};
use crate::non_finite::are_finite;
use crate::step::Step;
use crate::tensor::{Lent, Memory, Shape, Stored};
use std::ops::Range;

/// A flat region of a spec, accessed by parameter.
#[derive(Debug)]
pub(super) struct Flat<S: Stored = f32> {
    pub(super) spec: ParameterSpec,
    /// The elements of the region that `values` stores.
    pub(super) kept: Kept,
    pub(super) values: Buffer<S>,
}

impl<S: Stored> Flat<S> {
    /// Returns the memory of a range.
    ///
    /// # Errors
    /// [`Error::Misuse`] unless all of it is stored here.
    fn memory(&self, range: &Range<usize>) -> Result<Memory<S>> {
        let places = self.kept.places(range);
        if places.len() == range.len() {
            return Ok(self.values.memory().part(places.start, places.len()));
        }
        let expected = "elements that this rank keeps, because the ranks of the group keep slices";
        Err(Error::misuse("flat region", expected, format!("elements {range:?} of {:?}", self.kept.ranges())))
    }

    /// Lends a range for reading.
    pub(super) fn lend<'b, 's>(&'b self, step: &Step<'s>, range: &Range<usize>) -> Result<Lent<'b, 's, S>> {
        step.borrow(&self.values, false)?;
        Ok(Lent::new(self.memory(range)?, [range.len()].into()))
    }

    /// Queues zeroing.
    pub(super) fn zero(&mut self, step: &Step<'_>) -> Result<()> {
        let all = [self.values.len()];
        elementary::fill_into(step, &mut step.lend_mut(&mut self.values, all)?, 0.0)
    }

    /// Waits, and returns a range.
    pub(super) fn read_range(&self, range: &Range<usize>) -> Result<Vec<S>> {
        self.memory(range)?;
        self.values.read_range(self.kept.places(range).start, range.len())
    }

    /// Returns one parameter's memory. The caller borrows the region according to its use.
    pub(super) fn part(&self, step: &Step<'_>, parameter: Parameter, written: bool) -> Result<(Memory<S>, Shape)> {
        step.borrow(&self.values, written)?;
        let entry = self.spec.trained_entry(parameter)?;
        Ok((self.memory(&entry.range())?, entry.shape()))
    }

    /// Returns a stack's memory from the first member's start to the last member's end, in the same
    /// way.
    pub(super) fn stack(
        &self,
        step: &Step<'_>,
        stack: &StackedParameters,
        written: bool,
    ) -> Result<(Memory<S>, Shape)> {
        step.borrow(&self.values, written)?;
        let span = self.spec.trained_span(stack)?;
        Ok((self.memory(&span)?, [span.len()].into()))
    }

    pub(super) fn read(&self, parameter: Parameter) -> Result<Vec<S>> {
        self.read_range(&self.spec.trained_entry(parameter)?.range())
    }

    /// Finds the first parameter that is not finite. Waits. Needs host memory for one piece.
    pub(super) fn first_not_finite(&self) -> Result<Option<&str>> {
        for entry in self.spec.entries() {
            for piece in self.values.pieces(self.kept.places(&entry.range())) {
                if !are_finite(&piece?) {
                    return Ok(Some(entry.name()));
                }
            }
        }
        Ok(None)
    }
}
