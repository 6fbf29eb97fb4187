//! The new contents of flat regions of trained parameters, to be uploaded.
//!
//! Invariant: padding is zero, and each parameter's bytes lie at its place, whatever the type in
//! which the region stores elements.

#![forbid(unsafe_code)]

use super::kept::Kept;
use super::spec::{ParameterEntry, ParameterSpec};
use super::weights::draw;
use crate::buffer::Buffer;
use crate::device::{Device, Fill};
use crate::error::Result;
use crate::tensor::{Element, Memory};
use crate::upload::{Content, Transfer};
use kernels::update::RUN;
use std::fmt;
use std::ops::Range;

/// The new contents of a flat region, which is borrowed for writing.
pub struct RegionContents<'r> {
    device: Device,
    memory: Memory<u8>,
    element_bytes: usize,
    run_bytes: usize,
    kept: Kept,
    write: Box<WriteRegion<'r>>,
}

/// Writes a part of a parameter's bytes, the same each time. The arguments are the parameter's
/// index among the entries, its entry, the first byte within it, and the place of the part. Several
/// threads call it at a time.
pub type WriteRegion<'w> = dyn Fn(usize, &ParameterEntry, usize, &mut [u8]) + Sync + 'w;

impl<'r> RegionContents<'r> {
    /// Describes the bytes that `write` writes for each parameter. The region stores the elements
    /// that are kept.
    pub fn new<T: Element>(kept: &Kept, region: &'r mut Buffer<T>, write: Box<WriteRegion<'r>>) -> Self {
        let memory = region.memory().bytes();
        let run_bytes = memory.len() / (kept.stored_elements() / RUN);
        let (element_bytes, kept) = (size_of::<T>(), kept.clone());
        Self { device: region.device().clone(), memory, element_bytes, run_bytes, kept, write }
    }

    /// Returns each range that is kept, as its bytes in the memory and its first byte in the whole
    /// region.
    fn ranges(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let bytes = |element: usize| element / RUN * self.run_bytes;
        self.kept.ranges().iter().scan(0, move |place, kept| {
            let start = *place;
            *place += bytes(kept.end) - bytes(kept.start);
            Some((start..*place, bytes(kept.start)))
        })
    }

    /// Fills `place` with the bytes of the memory from byte `offset` on.
    fn fill(&self, spec: &ParameterSpec, offset: usize, mut place: &mut [u8]) {
        let mut at = offset;
        for (bytes, whole) in self.ranges().filter(|(bytes, _)| bytes.end > offset) {
            let len = place.len().min(bytes.end - at);
            let (part, rest) = std::mem::take(&mut place).split_at_mut(len);
            spec.trained().fill_as(|entry| entry.bytes_in(self.run_bytes), whole + at - bytes.start, part, &self.write);
            (at, place) = (at + part.len(), rest);
            if place.is_empty() {
                return;
            }
        }
        place.fill(0);
    }

    /// Returns the parameter of a byte of the memory, and the byte's offset within it.
    fn name(&self, spec: &ParameterSpec, offset: usize) -> (String, usize) {
        let whole = self.ranges().find(|(bytes, _)| bytes.contains(&offset));
        let whole = whole.map_or(offset, |(bytes, whole)| whole + offset - bytes.start);
        spec.trained().name_as(|entry| entry.bytes_in(self.run_bytes), whole)
    }
}

impl fmt::Debug for RegionContents<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionContents({} bytes)", self.memory.len())
    }
}

/// Uploads contents of regions of a spec, one after another.
pub(super) fn upload(spec: &ParameterSpec, contents: &[RegionContents<'_>], transfer: Transfer<'_>) -> Result<()> {
    let Some(RegionContents { device, .. }) = contents.first() else { return Ok(()) };
    let fills: Vec<Box<Fill<'_>>> = contents
        .iter()
        .map(|content| -> Box<Fill<'_>> { Box::new(|offset, place| content.fill(spec, offset, place)) })
        .collect();
    let names: Vec<_> = contents.iter().map(|content| move |offset: usize| content.name(spec, offset)).collect();
    let uploads: Vec<_> = contents
        .iter()
        .zip(fills.iter().zip(&names))
        .map(|(content, (fill, name))| Content::of_bytes(content.memory, content.element_bytes, fill, name))
        .collect();
    transfer.run(device, &uploads)
}

/// The values of all trained weights in f32.
pub(super) enum Values<'v> {
    /// Values that the initializers draw from a seed. For each parameter, the numbers that the
    /// parameters before it have used.
    Drawn(u64, &'v [u64]),
    /// Little-endian bytes of each parameter, in the order of the entries.
    Bytes(&'v [&'v [u8]]),
}

impl Values<'_> {
    /// Writes the values of a parameter from element `first` on, each as `encode` encodes it.
    pub(super) fn write<const N: usize>(
        &self,
        (number, entry): (usize, &ParameterEntry),
        first: usize,
        place: &mut [u8],
        encode: impl Fn(f32) -> [u8; N],
    ) {
        let place = place.as_chunks_mut().0;
        match self {
            Self::Drawn(seed, drawn) => draw(entry, first, *seed, drawn, place, encode),
            Self::Bytes(sources) => {
                let values = sources[number].as_chunks().0;
                for (place, &value) in place.iter_mut().zip(&values[first..]) {
                    *place = encode(f32::from_le_bytes(value));
                }
            }
        }
    }
}
