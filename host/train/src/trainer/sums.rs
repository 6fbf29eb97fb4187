//! The sums of the gradients of a group's shards, in the type in which gradients are stored.
//!
//! A rank folds the gradients of its shards with [`Sums::fold`]. It then receives its slice of each
//! rank's sum, and adds them with `sum_ranks_into`.
//!
//! Invariant: a sum of two neighbors is computed in f32 and rounded to the stored type, whether one
//! rank has both or each comes from another rank. The bits therefore depend only on the shards.

#![forbid(unsafe_code)]

use half::bf16;
use std::ops::Range;
use stepscope_core::{
    AnyBuffer, Buffer, Error, GradientType, Gradients, LentMut, Parameters, Result, Source, Step, Stored, ops,
};
use stepscope_group::Slices;

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
    parts: Vec<Buffer<S>>,
}

impl AnySums {
    /// Creates the memory of a rank that owns `own` shards, a power of two.
    pub(super) fn zeros(parameters: &Parameters, own: usize, ranks: usize, slices: &Slices) -> Result<Self> {
        match parameters.spec().gradients() {
            GradientType::F32 => Sums::zeros(parameters, own, ranks, slices).map(Self::F32),
            GradientType::Bf16 => Sums::zeros(parameters, own, ranks, slices).map(Self::Bf16),
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
    fn zeros(parameters: &Parameters, own: usize, ranks: usize, slices: &Slices) -> Result<Self> {
        let zeros = |elements| Buffer::zeros(parameters.device(), elements);
        let waiting = (0..own.ilog2()).map(|_| zeros(slices.elements())).collect::<Result<_>>()?;
        let buckets = 0..if ranks > 1 { slices.buckets().len() } else { 0 };
        let parts = buckets.map(|bucket| zeros(ranks * slices.pitch(bucket))).collect::<Result<_>>()?;
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
        let elements = [gradients.spec().elements()];
        let mut gradients = gradients.lend_flat_mut::<S>(step)?.part(part.clone());
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

impl Sums<f32> {
    /// Writes the sum of this rank's slices of a bucket, of which there are `[ranks, pitch]`.
    pub(super) fn sum_ranks_into<'s>(
        &mut self,
        step: &Step<'s>,
        bucket: usize,
        extents: [usize; 2],
        sum: &mut LentMut<'_, 's>,
    ) -> Result<()> {
        ops::launch::sum_parts_into(step, &step.lend(&self.parts[bucket], extents)?, sum)
    }
}

impl Sums<bf16> {
    /// Writes the sum of this rank's slices of a bucket, of which there are `[ranks, pitch]`. Each
    /// sum of two is a launch, which rounds it, in the tree of [`ops::launch::sum_parts_into`].
    pub(super) fn sum_ranks_into<'s>(
        &mut self,
        step: &Step<'s>,
        bucket: usize,
        [ranks, pitch]: [usize; 2],
        sum: &mut LentMut<'_, 's, bf16>,
    ) -> Result<()> {
        let own = 0..sum.shape().elements();
        let mut parts = step.lend_mut(&mut self.parts[bucket], [ranks * pitch])?;
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
