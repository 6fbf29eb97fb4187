//! The sums of the gradients of a group's shards, in the type in which gradients are stored.
//!
//! A rank folds the gradients of its shards with [`Sums::fold`]. It then receives its slice of each
//! rank's sum, and adds them with [`Summed::sum_ranks_into`]. A rank that keeps slices folds only
//! these, after the sum over ranks.
//!
//! Invariant: a sum of two neighbors is computed in f32 and rounded to the stored type, whether one
//! rank has both or each comes from another rank. The bits therefore depend only on the shards.

#![forbid(unsafe_code)]

use half::bf16;
use kernels::cast::cast_to_bf16;
use std::ops::Range;
use stepscope_core::{
    AnyBuffer, Buffer, Error, GradientType, Gradients, Lent, LentMut, Parameters, Result, Source, Step, Stored, Target,
    ops,
};

/// The sums in either type.
#[derive(Debug)]
pub(super) enum AnySums {
    F32(Sums<f32>),
    Bf16(Sums<bf16>),
}

/// The memory of a rank for sums of gradients of type S.
#[derive(Debug)]
pub(super) struct Sums<S: Stored> {
    /// The sums of 1, 2, 4, .. shards that wait for their neighbors.
    waiting: Vec<Buffer<S>>,
    /// This rank's slice of each rank's sum, `[ranks, pitch]`, one per bucket. Empty for one rank.
    pub(super) parts: Vec<Buffer<S>>,
}

impl AnySums {
    /// Creates the memory of a rank that owns `own` shards, a power of two. `parts` are the lengths
    /// of the buffers that receive slices.
    pub(super) fn zeros(parameters: &Parameters, own: usize, parts: &[usize]) -> Result<Self> {
        match parameters.spec().gradients() {
            GradientType::F32 => Sums::zeros(parameters, own, parts).map(Self::F32),
            GradientType::Bf16 => Sums::zeros(parameters, own, parts).map(Self::Bf16),
            GradientType::Released => {
                let expected = "gradients that are stored, because ranks exchange them: use `GradientType::Bf16`";
                Err(Error::misuse("in_group", expected, "released gradients"))
            }
        }
    }

    /// Returns the memory that receives this rank's slices of a bucket.
    pub(super) fn parts(&self, bucket: usize) -> AnyBuffer<'_> {
        match self {
            Self::F32(sums) => AnyBuffer::F32(&sums.parts[bucket]),
            Self::Bf16(sums) => AnyBuffer::Bf16(&sums.parts[bucket]),
        }
    }
}

impl<S: Stored> Sums<S> {
    fn zeros(parameters: &Parameters, own: usize, parts: &[usize]) -> Result<Self> {
        let (device, stored) = (parameters.device(), parameters.kept().stored_elements());
        let waiting = (0..own.ilog2()).map(|_| Buffer::zeros(device, stored)).collect::<Result<_>>()?;
        let parts = parts.iter().map(|&elements| Buffer::zeros(device, elements)).collect::<Result<_>>()?;
        Ok(Self { waiting, parts })
    }

    /// Adds a part of the gradients of this rank's shard `number` to those of its earlier
    /// neighbors, as far up the tree as they are complete. Keeps sums that must wait for a later
    /// neighbor.
    pub(super) fn fold(
        &mut self,
        step: &Step<'_>,
        gradients: &mut Gradients,
        number: usize,
        part: Range<usize>,
    ) -> Result<()> {
        let flat = gradients.lend_flat_mut::<S>(step)?;
        let (elements, mut gradients) = (flat.shape(), flat.part(part.clone()));
        let ready = number.trailing_ones() as usize;
        for waiting in &self.waiting[..ready.min(self.waiting.len())] {
            let waiting = step.lend(waiting, elements)?.part(part.clone());
            ops::add_assign(step, &mut gradients, &waiting)?;
        }
        // All have been added to the last of 2^waiting shards.
        match self.waiting.get_mut(ready) {
            Some(waiting) => ops::copy_into(step, &gradients, &mut step.lend_mut(waiting, elements)?.part(part)),
            None => Ok(()),
        }
    }
}

/// A type in which gradients are stored and summed.
pub(super) trait Summed: Stored {
    /// Returns a buffer as one of any type.
    fn any(buffer: &Buffer<Self>) -> AnyBuffer<'_>;

    /// Rounds gradients in f32 to this type.
    fn round_into<'s>(step: &Step<'s>, gradient: &Lent<'_, 's>, out: &mut LentMut<'_, 's, Self>) -> Result<()>;

    /// Writes the sum of a rank's slices of a bucket, of which there are `[ranks, pitch]`.
    fn sum_ranks_into<'s>(
        step: &Step<'s>,
        parts: &mut Buffer<Self>,
        extents: [usize; 2],
        sum: &mut LentMut<'_, 's, Self>,
    ) -> Result<()>;
}

impl Summed for f32 {
    fn any(buffer: &Buffer<Self>) -> AnyBuffer<'_> {
        AnyBuffer::F32(buffer)
    }

    fn round_into<'s>(step: &Step<'s>, gradient: &Lent<'_, 's>, out: &mut LentMut<'_, 's>) -> Result<()> {
        ops::copy_into(step, gradient, out)
    }

    fn sum_ranks_into<'s>(
        step: &Step<'s>,
        parts: &mut Buffer<Self>,
        extents: [usize; 2],
        sum: &mut LentMut<'_, 's>,
    ) -> Result<()> {
        ops::launch::sum_parts_into(step, &step.lend(parts, extents)?, sum)
    }
}

impl Summed for bf16 {
    fn any(buffer: &Buffer<Self>) -> AnyBuffer<'_> {
        AnyBuffer::Bf16(buffer)
    }

    fn round_into<'s>(step: &Step<'s>, gradient: &Lent<'_, 's>, out: &mut LentMut<'_, 's, Self>) -> Result<()> {
        step.launch(cast_to_bf16 { x: gradient.slice(), out: out.out() })
    }

    /// Each sum of two is a launch, which rounds it, in the tree of
    /// [`ops::launch::sum_parts_into`].
    fn sum_ranks_into<'s>(
        step: &Step<'s>,
        parts: &mut Buffer<Self>,
        [ranks, pitch]: [usize; 2],
        sum: &mut LentMut<'_, 's, Self>,
    ) -> Result<()> {
        let own = 0..sum.shape().elements();
        let mut parts = step.lend_mut(parts, [ranks * pitch])?;
        let mut apart = 1;
        while apart < ranks {
            for first in (0..ranks).step_by(2 * apart) {
                let pair = parts.part_mut(first * pitch..(first + 2 * apart) * pitch);
                let [mut left, right] = pair.split(apart * pitch).map(|part| part.part(own.clone()));
                ops::add_assign(step, &mut left, &right)?;
            }
            apart *= 2;
        }
        ops::copy_into(step, &parts.part(own), sum)
    }
}
