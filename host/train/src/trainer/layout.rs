//! The slices that each rank of a group keeps, and their copies between the ranks: to all before
//! their weights are read, and to rank 0 for a checkpoint.
//!
//! Invariant: all ranks have the same layout, which depends only on the spec and their number. They
//! compare each exchange before it is queued.

use super::units;
use crate::checkpoint::ReadRegion;
use kernels::update::RUN;
use std::ops::Range;
use std::panic::Location;
use stepscope_core::internals::{GatherWeights, Memory, OfRank, PIECE_BYTES};
use stepscope_core::{AnyBuffer, Buffer, Device, Kept, ParameterSpec, Result};
use stepscope_group::{Group, Slices};

/// The units, and the slices that each rank keeps.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) group: Group,
    pub(super) spec: ParameterSpec,
    /// The elements of each unit, ascending.
    pub(super) units: Vec<Range<usize>>,
    /// The elements that each rank keeps.
    pub(super) kept: Vec<Kept>,
    pub(super) chunks: usize,
    /// The most elements of a unit that a rank keeps.
    pub(super) pitch: usize,
}

impl Layout {
    pub(super) fn new(group: &Group, spec: &ParameterSpec) -> Self {
        let (units, ranks) = (units::of(spec), group.ranks());
        let slices = Slices::of_units(units.iter().map(|unit| unit.start), spec.elements(), ranks);
        let kept: Vec<Kept> = (0..ranks).map(|rank| Kept::of(slices.of(rank))).collect();
        let lens = kept.iter().flat_map(|kept| units.iter().map(|unit| kept.places(unit).len()));
        let pitch = lens.max().unwrap_or(0);
        Self { group: group.clone(), spec: spec.clone(), units, kept, chunks: slices.chunks(), pitch }
    }

    /// Returns the elements that this rank keeps.
    pub(super) fn own(&self) -> &Kept {
        &self.kept[self.group.rank()]
    }

    /// Agrees on an exchange of elements that end here.
    pub(super) fn agree(&self, op: &'static str, end: usize) -> Result<()> {
        self.group.agree(op, end, &[], Location::caller()).map(drop)
    }

    /// Returns copies of this rank's slices of a range to rank `to`, from a region that stores what
    /// it keeps.
    fn sends(&self, region: AnyBuffer<'_>, range: &Range<usize>, to: usize) -> Vec<OfRank> {
        let own = self.own();
        let runs = own.stored_elements() / RUN;
        own.within(range).map(|(part, place)| (to, run_words(region, runs, place..place + part.len()))).collect()
    }

    /// Returns copies of all ranks' slices of a range into a region that begins with the range.
    fn receives(&self, region: AnyBuffer<'_>, runs: usize, range: &Range<usize>) -> Vec<OfRank> {
        let of_rank = |(rank, kept): (usize, &Kept)| {
            let place = |part: Range<usize>| part.start - range.start..part.end - range.start;
            kept.within(range).map(|(part, _)| (rank, run_words(region, runs, place(part)))).collect::<Vec<_>>()
        };
        self.kept.iter().enumerate().flat_map(of_rank).collect()
    }
}

/// Returns the words of elements of a region, which has words for this many runs. The elements are
/// whole runs.
fn run_words(region: AnyBuffer<'_>, runs: usize, elements: Range<usize>) -> Memory<f32> {
    let words = region.words();
    let of_run = words.len() / runs;
    words.part(elements.start / RUN * of_run, elements.len() / RUN * of_run)
}

impl GatherWeights for Layout {
    fn gather(&self, unit: &Range<usize>, own: &[AnyBuffer<'_>], into: &[AnyBuffer<'_>]) -> Result<()> {
        self.agree("gather_weights", unit.end)?;
        let runs = self.units.iter().map(Range::len).max().unwrap_or(0) / RUN;
        let to_all = |&region: &AnyBuffer<'_>| {
            (0..self.group.ranks()).flat_map(|to| self.sends(region, unit, to)).collect::<Vec<_>>()
        };
        let sends: Vec<_> = own.iter().flat_map(to_all).collect();
        let receives: Vec<_> = into.iter().flat_map(|&region| self.receives(region, runs, unit)).collect();
        // SAFETY: the regions are buffers of the weights, which a device frees in stream order.
        unsafe { self.group.exchange(&sends, &receives) }
    }
}

/// Sends slices of regions to rank 0, which reads them.
pub(super) struct Pieces<'p> {
    pub(super) layout: &'p Layout,
    pub(super) device: &'p Device,
}

impl ReadRegion for Pieces<'_> {
    fn writes(&self) -> bool {
        self.layout.group.rank() == 0
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn for_each_piece(
        &self,
        region: AnyBuffer<'_>,
        run_bytes: usize,
        bytes: Range<usize>,
        each: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let Self { layout, device } = self;
        // A parameter begins with a run. Its last run may be cut.
        let (first, end) = (bytes.start / run_bytes, bytes.end.div_ceil(run_bytes));
        let (most, mut left) = (PIECE_BYTES / run_bytes, bytes.len());
        for start in (first..end).step_by(most) {
            let runs = most.min(end - start);
            let range = start * RUN..(start + runs) * RUN;
            layout.agree("checkpoint piece", range.end)?;
            let sends = layout.sends(region, &range, 0);
            if !self.writes() {
                // SAFETY: the region is a buffer of this train state, which a device frees in
                // stream order.
                unsafe { layout.group.exchange(&sends, &[])? };
                continue;
            }
            let piece = Buffer::<u32>::zeros(device, runs * run_bytes / size_of::<u32>())?;
            let receives = layout.receives(AnyBuffer::U32(&piece), runs, &range);
            // SAFETY: as above, for the region and the piece.
            unsafe { layout.group.exchange(&sends, &receives)? };
            let words = piece.read()?;
            let read: &[u8] = bytemuck::cast_slice(&words);
            let read = &read[..left.min(read.len())];
            left -= read.len();
            each(read)?;
        }
        Ok(())
    }
}
