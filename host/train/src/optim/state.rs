//! A part of an optimizer's state, such as a moment, in the type in which it is stored.
//!
//! Invariant: a run of 64 elements begins at a multiple of its words, so slices of whole runs can
//! be lent, kept and gathered in every type.

#![forbid(unsafe_code)]

use kernels::update::RUN;
use std::ops::Range;
use stepscope_core::{
    AnyBuffer, Buffer, Device, Element, LentState, ParameterSpec, RegionContents, Result, StateType, Step, WriteRegion,
};

/// A part of an optimizer's state for all weights, or for slices of them.
#[derive(Debug)]
pub(crate) enum State {
    F32(Buffer<f32>),
    /// Codes of 8 bits and scales, packed into words; see [`kernels::companded`].
    Bits8(Buffer<u32>),
}

impl State {
    /// Makes a state of zeros for this many elements.
    pub(crate) fn zeros(device: &Device, stored: StateType, elements: usize) -> Result<Self> {
        Ok(match stored {
            StateType::F32 => Self::F32(Buffer::zeros(device, elements.max(1))?),
            StateType::Bits8 => Self::Bits8(Buffer::zeros(device, words(stored, &(0..elements)).len().max(1))?),
        })
    }

    /// The buffer of the state.
    pub(crate) fn buffer(&self) -> AnyBuffer<'_> {
        match self {
            Self::F32(state) => AnyBuffer::F32(state),
            Self::Bits8(state) => AnyBuffer::U32(state),
        }
    }

    /// Lends the state of these elements, which are whole runs unless they are all elements.
    pub(super) fn lend_mut<'b, 's>(&'b mut self, step: &Step<'s>, elements: Range<usize>) -> Result<LentState<'b, 's>> {
        Ok(match self {
            Self::F32(state) => {
                let all = [state.len()];
                LentState::F32(step.lend_mut(state, all)?.part(elements))
            }
            Self::Bits8(state) => {
                let all = [state.len()];
                LentState::Bits8(step.lend_mut(state, all)?.part(words(StateType::Bits8, &elements)))
            }
        })
    }

    /// Copies whole runs from another state of the same type.
    pub(super) fn copy(&mut self, to: usize, from: &Self, elements: Range<usize>) -> Result<()> {
        fn run<T: Element>(
            stored: StateType,
            (target, to): (&mut Buffer<T>, usize),
            source: &Buffer<T>,
            elements: &Range<usize>,
        ) -> Result<()> {
            let from = words(stored, elements);
            target.write(words(stored, &(to..to)).start, &source.read_range(from.start, from.len())?)
        }
        match (self, from) {
            (Self::F32(target), Self::F32(source)) => run(StateType::F32, (target, to), source, &elements),
            (Self::Bits8(target), Self::Bits8(source)) => run(StateType::Bits8, (target, to), source, &elements),
            _ => unreachable!("an optimizer's state has one type"),
        }
    }

    /// Describes new contents of the whole state, from the writer of its bytes.
    pub(crate) fn contents<'r>(&'r mut self, spec: &ParameterSpec, write: Box<WriteRegion<'r>>) -> RegionContents<'r> {
        match self {
            Self::F32(state) => RegionContents::new(spec, state, write),
            Self::Bits8(state) => RegionContents::new(spec, state, write),
        }
    }
}

/// Returns the words in which a type stores these elements.
pub(crate) fn words(stored: StateType, elements: &Range<usize>) -> Range<usize> {
    let place = |element: usize| match stored {
        StateType::F32 => element,
        StateType::Bits8 => element.div_ceil(RUN) * stored.run_words(),
    };
    place(elements.start)..place(elements.end)
}
