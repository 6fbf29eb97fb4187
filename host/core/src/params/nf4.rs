//! Matrices in NF4: quantisation and decoding on the host, and the launches that decode.
//!
//! A parameter `[inputs, outputs]` consists of one or more matrices of a file, which hold some of
//! its outputs each and are quantised separately. q, k and v are an example. Each matrix is `[its
//! outputs, inputs]` in the file, and blocks of weights run along its rows, and from one row into
//! the next. [`kernels::nf4_format`] has the format.
//!
//! Invariant: the codes of weights are those of bitsandbytes. A scale has the code of the nearest
//! value, as in bitsandbytes on a GPU.

#![forbid(unsafe_code)]

use super::spec::ParameterEntry;
use crate::error::{Error, Result, short};
use crate::processors::have_threads;
use crate::step::Step;
use crate::tensor::{Memory, Stored, Target, Tensor};
use cuda_std::float_mode;
use kernels::nf4::nf4_decode;
use kernels::nf4_format::{BLOCK, GROUP, Layout, NF4, PER_WORD, scale, shift, weight};
use rayon::prelude::*;

/// The parts of a matrix in NF4, as a file of bitsandbytes has them.
#[derive(Clone, Copy, Debug)]
pub struct Nf4Matrix<'m> {
    /// The codes of the weights of `[outputs, inputs]`, two in a byte, the first in the high half.
    pub codes: &'m [u8],
    /// The codes of the scales: one for 64 weights.
    pub scales: &'m [u8],
    /// The factors of the scales: one for 256 scales.
    pub factors: &'m [f32],
    /// The number that is added to each scale.
    pub offset: f32,
}

impl Nf4Matrix<'_> {
    /// Returns the values of the codes of weights, and of the codes of scales.
    pub fn code_values() -> [Vec<f32>; 2] {
        [NF4.to_vec(), scale_values().to_vec()]
    }

    /// Checks that the parts have the lengths of a matrix `[outputs, inputs]`.
    ///
    /// # Errors
    /// The expected and the actual lengths.
    pub fn check(&self, [outputs, inputs]: [usize; 2]) -> std::result::Result<(), String> {
        let text = |[codes, scales, factors]: [usize; 3]| {
            format!("{codes} bytes of codes, {scales} scales and {factors} factors")
        };
        let weights = inputs * outputs;
        let blocks = weights.div_ceil(BLOCK);
        let wanted = [weights.div_ceil(2), blocks, blocks.div_ceil(GROUP)];
        let got = [self.codes.len(), self.scales.len(), self.factors.len()];
        if got == wanted {
            return Ok(());
        }
        Err(format!("expected {} for [{outputs}, {inputs}], got {}", text(wanted), text(got)))
    }

    /// Returns the weights, row by row, of a matrix whose parts have been checked. All codes have
    /// weights.
    pub fn decode<S: Stored>(&self) -> Vec<S> {
        let words = self.words();
        decode(&words, 2 * self.codes.len()).into_iter().map(S::narrow).collect()
    }

    /// Returns the words of a matrix whose parts have been checked.
    fn words(&self) -> Vec<u32> {
        let layout = Layout::new(2 * self.codes.len());
        let mut words = vec![0; layout.words];
        let mut place = |first: usize, bytes: &[u8]| {
            for (at, byte) in bytes.iter().enumerate() {
                words[first + at / 4] |= u32::from(*byte) << (8 * (at % 4));
            }
        };
        place(0, self.codes);
        place(layout.scales, self.scales);
        for (word, factor) in words[layout.factors..].iter_mut().zip(self.factors) {
            *word = factor.to_bits();
        }
        words[layout.offset] = self.offset.to_bits();
        words
    }
}

/// The unit of a matrix's inputs and outputs: the kernel decodes squares.
pub(super) const UNIT: usize = PER_WORD;

/// The least scale by which bitsandbytes divides.
const LEAST: f32 = 1e-38;

/// Returns the codes' boundaries: a value has the code of the number of boundaries below it.
fn boundaries<const N: usize>(values: [f32; N]) -> Vec<f32> {
    values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect()
}

/// Returns the values of the codes of scales.
fn scale_values() -> [f32; 256] {
    std::array::from_fn(|code| scale(code as u32, 1.0, 0.0))
}

fn code(boundaries: &[f32], value: f32) -> u32 {
    boundaries.partition_point(|&boundary| boundary < value) as u32
}

/// Quantises the weights of a matrix `[outputs, inputs]`, and returns its words.
fn encode(weights: &[f32]) -> Vec<u32> {
    float_mode::in_default(|| {
        let layout = Layout::new(weights.len());
        let mut words = vec![0; layout.words];
        let of_weights = boundaries(NF4);
        let mut scales = vec![0.0; weights.len().div_ceil(BLOCK)];
        let block = |(weights, (words, scale)): (&[f32], (&mut [u32], &mut f32))| {
            float_mode::in_default(|| *scale = encode_block(&of_weights, weights, words));
        };
        let codes = &mut words[..layout.scales];
        match have_threads() {
            true => {
                let blocks = codes.par_chunks_mut(BLOCK / PER_WORD).zip(&mut scales);
                weights.par_chunks(BLOCK).zip(blocks).with_min_len(1024).for_each(block);
            }
            false => {
                let blocks = codes.chunks_mut(BLOCK / PER_WORD).zip(&mut scales);
                weights.chunks(BLOCK).zip(blocks).for_each(block);
            }
        }
        let offset = (scales.iter().map(|&scale| f64::from(scale)).sum::<f64>() / scales.len() as f64) as f32;
        let of_scales = boundaries(scale_values());
        for (group, scales) in scales.chunks(GROUP).enumerate() {
            let factor = scales.iter().fold(0.0f32, |largest, scale| largest.max((scale - offset).abs()));
            let inverse = 1.0 / factor.max(LEAST);
            words[layout.factors + group] = factor.to_bits();
            for (at, scale) in scales.iter().enumerate() {
                let at = group * GROUP + at;
                let scaled = ((scale - offset) * inverse).clamp(-1.0, 1.0);
                words[layout.scales + at / 4] |= code(&of_scales, scaled) << (8 * (at % 4));
            }
        }
        words[layout.offset] = offset.to_bits();
        words
    })
}

/// Writes the codes of a block, and returns its scale.
fn encode_block(boundaries: &[f32], weights: &[f32], words: &mut [u32]) -> f32 {
    let largest = weights.iter().fold(0.0f32, |largest, weight| largest.max(weight.abs()));
    let (is_whole, divisor) = (weights.len() == BLOCK, largest.max(LEAST));
    let inverse = 1.0 / divisor;
    for (at, &weight) in weights.iter().enumerate() {
        // As bitsandbytes does it: the weights of a last block that is shorter are divided.
        let scaled = if is_whole { weight * inverse } else { weight / divisor };
        words[at / PER_WORD] |= code(boundaries, scaled.clamp(-1.0, 1.0)) << shift(at);
    }
    if is_whole { largest } else { divisor }
}

/// Returns the weights of a matrix of this many, row by row.
fn decode(words: &[u32], weights: usize) -> Vec<f32> {
    let layout = Layout::new(weights);
    let offset = f32::from_bits(words[layout.offset]);
    float_mode::in_default(|| {
        let of_block = |block: usize| {
            let code = words[layout.scales + block / 4] >> (8 * (block % 4));
            scale(code, f32::from_bits(words[layout.factors + block / GROUP]), offset)
        };
        let scales: Vec<f32> = (0..weights.div_ceil(BLOCK)).map(of_block).collect();
        (0..weights).map(|at| weight(words[at / PER_WORD] >> shift(at), scales[at / BLOCK])).collect()
    })
}

/// A matrix of a parameter: its first word, and its outputs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) word: usize,
    pub(super) first: usize,
    pub(super) outputs: usize,
}

/// Returns the matrices of a parameter of `inputs`.
pub(super) fn places(inputs: usize, matrices: &[usize]) -> impl Iterator<Item = Place> {
    let (mut word, mut first) = (0, 0);
    matrices.iter().map(move |&outputs| {
        let place = Place { word, first, outputs };
        word += Layout::new(inputs * outputs).words;
        first += outputs;
        place
    })
}

/// Returns the words of a parameter.
pub(super) fn words(inputs: usize, matrices: &[usize]) -> usize {
    matrices.iter().map(|outputs| Layout::new(inputs * outputs).words).sum()
}

/// Returns the extents of a parameter in NF4, and its matrices.
fn matrices(entry: &ParameterEntry) -> ([usize; 2], impl Iterator<Item = Place>) {
    let [inputs, outputs] = entry.shape().as_rows();
    ([inputs, outputs], places(inputs, entry.matrices()))
}

/// Quantises a parameter's values `[inputs, outputs]`.
pub(super) fn quantise<S: Stored>(entry: &ParameterEntry, values: &[S]) -> Vec<u32> {
    let ([inputs, columns], places) = matrices(entry);
    let mut words = Vec::with_capacity(entry.stored_elements());
    for Place { first, outputs, .. } in places {
        let mut rows = vec![0.0; inputs * outputs];
        for (input, values) in values.chunks_exact(columns).enumerate() {
            for (output, value) in values[first..first + outputs].iter().enumerate() {
                rows[output * inputs + input] = value.widen();
            }
        }
        words.extend(encode(&rows));
    }
    words
}

/// Fills a part of a parameter whose weights are zero, from a byte on.
pub(super) fn fill_zeros(entry: &ParameterEntry, from: usize, part: &mut [u8]) {
    let ([inputs, _], places) = matrices(entry);
    let zero = NF4.iter().position(|&value| value == 0.0).expect("a code of zero") as u8;
    part.fill(0);
    for Place { word, outputs, .. } in places {
        let codes = [word, word + Layout::new(inputs * outputs).scales];
        let [start, end] = codes.map(|word| (size_of::<u32>() * word).clamp(from, from + part.len()) - from);
        part[start..end].fill(zero << 4 | zero);
    }
}

/// Returns a parameter's values `[inputs, outputs]`.
pub(super) fn values<S: Stored>(entry: &ParameterEntry, words: &[u32]) -> Vec<S> {
    let ([inputs, columns], places) = matrices(entry);
    let mut values = vec![S::narrow(0.0); inputs * columns];
    for Place { word, first, outputs } in places {
        let weights = inputs * outputs;
        let rows = decode(&words[word..word + Layout::new(weights).words], weights);
        for (output, row) in rows.chunks_exact(inputs).enumerate() {
            for (input, &weight) in row.iter().enumerate() {
                values[input * columns + first + output] = S::narrow(weight);
            }
        }
    }
    values
}

/// Returns the first word of a matrix in its parameter, and its words.
pub(super) fn packed(entry: &ParameterEntry, number: usize, matrix: &Nf4Matrix<'_>) -> Result<(usize, Vec<u32>)> {
    let ([inputs, _], mut places) = matrices(entry);
    let Some(Place { word, outputs, .. }) = places.nth(number) else {
        let expected = format!("one of the {} matrices of `{}`", entry.matrices().len(), short(entry.name()));
        return Err(Error::misuse("write_nf4", expected, format!("number {number}")));
    };
    let checked = matrix.check([outputs, inputs]);
    checked.map_err(|reason| Error::misuse("write_nf4", format!("a matrix of `{}`", short(entry.name())), reason))?;
    Ok((word, matrix.words()))
}

/// Queues the decoding of a parameter, whose words begin in `memory`, into a tensor of the step.
#[track_caller]
pub(super) fn decoded<'s, S: Stored>(
    step: &Step<'s>,
    entry: &ParameterEntry,
    memory: Memory<u32>,
) -> Result<Tensor<'s, S>> {
    let mut out = step.empty::<S>(entry.shape())?;
    let ([inputs, columns], places) = matrices(entry);
    for Place { word, first, outputs } in places {
        let words = memory.part(word, Layout::new(inputs * outputs).words);
        step.launch(nf4_decode { words: words.as_slice(), inputs, outputs, columns, first, out: out.out() })?;
    }
    Ok(out)
}
