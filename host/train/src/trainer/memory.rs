//! The memory of a trainer's steps: an arena of the caller's, or one that the trainer sizes.

#![forbid(unsafe_code)]

use super::model::{Model, TrainState};
use crate::optim::UpdateRule;
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use stepscope_core::internals::{build_to_measure, make_room, measure_capture};
use stepscope_core::ops::Cast;
use stepscope_core::{Arena, ArenaBuilder, Capacity, Device, Growth, HostInputs, Measured, Overflow, Result};

/// The bytes of a sized arena in addition to the captured step's, for the small steps between two
/// updates.
const ROOM_BYTES: usize = 1 << 20;

/// The memory on which a [`Trainer`](super::Trainer) runs its steps. It is made from one of three
/// values:
///
/// | value | memory |
/// |---|---|
/// | `&Device` | An arena that the trainer makes. It measures the captured step in a dry run, and takes the bytes that the step needs and 1 MiB. It measures and grows again for larger evaluations. If any other step needs more, an overflow pool provides it, and the arena grows after that step. |
/// | [`ArenaBuilder`] | An arena of these settings, with the measured capacity instead of the builder's. |
/// | `&mut Arena` | This arena, which the program may also use for other steps. |
#[derive(Debug)]
pub struct StepMemory<'a>(Source<'a>);

#[derive(Debug)]
enum Source<'a> {
    Lent(&'a mut Arena),
    Measured(Box<ArenaBuilder>),
}

impl From<&Device> for StepMemory<'_> {
    fn from(device: &Device) -> Self {
        // Admission still limits what the pool takes.
        let overflow = Overflow::Pool { cap_bytes: usize::MAX, prime_bytes: 0, deadline: Duration::from_secs(1) };
        Arena::builder(device).overflow(overflow).growth(Growth::AtBoundary { max_bytes: usize::MAX }).into()
    }
}

impl From<ArenaBuilder> for StepMemory<'_> {
    fn from(builder: ArenaBuilder) -> Self {
        Self(Source::Measured(Box::new(builder)))
    }
}

impl<'a> From<&'a mut Arena> for StepMemory<'a> {
    fn from(arena: &'a mut Arena) -> Self {
        Self(Source::Lent(arena))
    }
}

impl<'a> StepMemory<'a> {
    /// Returns the arena, sized for a captured step on these inputs if it is not the caller's.
    pub(super) fn for_capture<S: Cast, M: Model<S>, R: UpdateRule>(
        self,
        state: &mut TrainState<M, R>,
        inputs: &HostInputs<'_>,
    ) -> Result<TrainerArena<'a>> {
        match self.0 {
            Source::Lent(arena) => Ok(TrainerArena::Lent(arena)),
            Source::Measured(builder) => {
                let step = measure_capture(&build_to_measure(&builder)?, state, inputs, TrainState::record)?;
                // In a group, an eager step makes the update after the captured ones.
                let update = if state.sync.is_group() { state.parameters.spec().converted_bytes() } else { 0 };
                let bytes = step.high_water_bytes().saturating_add(update + ROOM_BYTES);
                Ok(TrainerArena::Owned(Box::new(builder.capacity(Capacity::Bytes(bytes)).build()?)))
            }
        }
    }
}

/// A pointer to the arena of a trainer.
#[derive(Debug)]
pub(super) enum TrainerArena<'a> {
    Lent(&'a mut Arena),
    Owned(Box<Arena>),
}

impl TrainerArena<'_> {
    /// Grows the trainer's own arena to the bytes that an eager step needs, if its settings allow
    /// growth.
    pub(super) fn make_room(&mut self, measure: impl FnOnce(&Arena) -> Result<Measured>) -> Result<()> {
        match self {
            Self::Lent(_) => Ok(()),
            Self::Owned(arena) => {
                let bytes = measure(arena)?.high_water_bytes().saturating_add(ROOM_BYTES);
                make_room(arena, bytes)
            }
        }
    }
}

impl Deref for TrainerArena<'_> {
    type Target = Arena;

    fn deref(&self) -> &Arena {
        match self {
            Self::Lent(arena) => arena,
            Self::Owned(arena) => arena,
        }
    }
}

impl DerefMut for TrainerArena<'_> {
    fn deref_mut(&mut self) -> &mut Arena {
        match self {
            Self::Lent(arena) => arena,
            Self::Owned(arena) => arena,
        }
    }
}
