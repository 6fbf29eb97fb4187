//! The new contents of flat regions of trained parameters, to be uploaded.
//!
//! Invariant: padding is zero, and each parameter's bytes lie at its place, whatever the type in
//! which the region stores elements.

#![forbid(unsafe_code)]

use super::spec::{ParameterEntry, ParameterSpec};
use super::weights::draw;
use crate::buffer::Buffer;
use crate::device::{Device, Fill};
use crate::error::Result;
use crate::tensor::{Element, Memory};
use crate::upload::{Content, Transfer};
use kernels::update::RUN;
use std::fmt;

/// The new contents of a flat region, which is borrowed for writing.
pub struct RegionContents<'r> {
    device: Device,
    memory: Memory<u8>,
    element_bytes: usize,
    run_bytes: usize,
    write: Box<WriteRegion<'r>>,
}

/// Writes a part of a parameter's bytes, the same each time. The arguments are the parameter's
/// index among the entries, its entry, the first byte within it, and the place of the part. Several
/// threads call it at a time.
pub type WriteRegion<'w> = dyn Fn(usize, &ParameterEntry, usize, &mut [u8]) + Sync + 'w;

impl<'r> RegionContents<'r> {
    /// Describes the bytes that `write` writes for each parameter.
    pub fn new<T: Element>(spec: &ParameterSpec, region: &'r mut Buffer<T>, write: Box<WriteRegion<'r>>) -> Self {
        let memory = region.memory().bytes();
        let run_bytes = memory.len() / (spec.elements() / RUN);
        let element_bytes = size_of::<T>();
        Self { device: region.device().clone(), memory, element_bytes, run_bytes, write }
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
    let bytes_of = |run_bytes: usize| move |entry: &ParameterEntry| entry.bytes_in(run_bytes);
    let fills: Vec<Box<Fill<'_>>> = contents
        .iter()
        .map(|content| -> Box<Fill<'_>> {
            Box::new(|offset, place| {
                spec.trained().fill_as(bytes_of(content.run_bytes), offset, place, &content.write);
            })
        })
        .collect();
    let names: Vec<_> = contents
        .iter()
        .map(|content| move |offset: usize| spec.trained().name_as(bytes_of(content.run_bytes), offset))
        .collect();
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
