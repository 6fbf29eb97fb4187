//! Matrices in NF4: quantisation and decoding on the host, and the launches that decode.
//!
//! A parameter `[inputs, outputs]` consists of one or more matrices of a file, which hold some of
//! its outputs each and are quantised separately. q, k and v are an example. Each matrix is `[its
//! outputs, inputs]` in the file, and blocks of weights run along its rows, and from one row into
//! the next. [`kernels::nf4_format`] has the format.
//!
//! Invariant: all codes, factors and offsets are those of bitsandbytes 0.50 on a CPU, with one
//! thread of torch. Its kernel for GPUs looks up the codes of scales more finely, so a few differ.

#![forbid(unsafe_code)]

use super::spec::ParameterEntry;
use crate::error::{Error, Result, short};
use crate::host_matrix::{Columns, transpose};
use crate::processors::for_each_part;
use crate::step::Step;
use crate::tensor::{Memory, Stored, Target, Tensor};
use cuda_std::float_mode;
use kernels::nf4::nf4_decode;
use kernels::nf4_format::{BLOCK, GROUP, Layout, NF4, PER_WORD, scale, shift, weight};
use std::convert::Infallible;

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
        decode(&self.words(), 2 * self.codes.len())
    }

    /// Returns the words of a matrix whose parts have been checked.
    fn words(&self) -> Vec<u32> {
        let layout = Layout::new(2 * self.codes.len());
        let mut words = vec![0; layout.words];
        for (first, bytes) in [(0, self.codes), (layout.scales, self.scales)] {
            let (fours, rest) = bytes.as_chunks();
            let last = [0, 1, 2, 3].map(|at| rest.get(at).copied().unwrap_or(0));
            let fours = fours.iter().chain((!rest.is_empty()).then_some(&last));
            words[first..].iter_mut().zip(fours).for_each(|(word, &four)| *word = u32::from_le_bytes(four));
        }
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

/// The blocks, or words of scales, that a thread quantises or decodes at a time.
const PART: usize = 1024;

/// Returns the values of the codes of scales.
fn scale_values() -> [f32; 256] {
    std::array::from_fn(|code| scale(code as u32, 1.0, 0.0))
}

/// Returns the boundary between two neighboring values.
fn boundary(pair: &[f32]) -> f32 {
    (pair[0] + pair[1]) / 2.0
}

/// Quantises the weights of a matrix `[outputs, inputs]`, whose extents are multiples of [`UNIT`],
/// and returns its words. Runs in the default floating-point mode.
fn encode<S: Stored>(weights: &[S]) -> Vec<u32> {
    let layout = Layout::new(weights.len());
    let (weights, []) = weights.as_chunks::<BLOCK>() else { unreachable!("the extents are multiples of 8") };
    let (mut words, mut scales) = (vec![0; layout.words], vec![0.0; weights.len()]);
    let Ok(()) = for_each_part(&mut scales, PART, |first, part| {
        part.iter_mut().zip(&weights[first..]).for_each(|(scale, block)| *scale = largest(block));
        Ok::<_, Infallible>(())
    });
    let boundaries: [f32; 15] = std::array::from_fn(|code| boundary(&NF4[code..code + 2]));
    let block_words = BLOCK / PER_WORD;
    let Ok(()) = for_each_part(&mut words[..layout.scales], PART * block_words, |first, part| {
        let first = first / block_words;
        for ((words, block), scale) in part.as_chunks_mut().0.iter_mut().zip(&weights[first..]).zip(&scales[first..]) {
            encode_block(&boundaries, block, *scale, words);
        }
        Ok::<_, Infallible>(())
    });
    let offset = torch_sum(&scales) / scales.len() as f32;
    words[layout.offset] = offset.to_bits();
    let (of_scales, of_factors) = words[layout.scales..layout.offset].split_at_mut(layout.factors - layout.scales);
    let Ok(()) = for_each_part(of_factors, PART / GROUP, |first, part| {
        for (word, scales) in part.iter_mut().zip(scales[GROUP * first..].chunks(GROUP)) {
            let factor = scales.iter().fold(0.0f32, |largest, scale| largest.max((scale - offset).abs()));
            *word = factor.to_bits();
        }
        Ok::<_, Infallible>(())
    });
    let values = scale_values();
    let boundaries: [f32; 255] = std::array::from_fn(|code| boundary(&values[code..code + 2]));
    let Ok(()) = for_each_part(of_scales, PART, |first, part| {
        for (word, (number, scales)) in part.iter_mut().zip(scales[4 * first..].chunks(4).enumerate()) {
            let factor = f32::from_bits(of_factors[4 * (first + number) / GROUP]);
            // bitsandbytes gives the code 0 to scales that all equal the offset.
            if factor == 0.0 {
                continue;
            }
            let inverse = 1.0 / factor.max(LEAST);
            for (at, scale) in scales.iter().enumerate() {
                let rounded = table_value((scale - offset) * inverse);
                let code = boundaries.partition_point(|&boundary| boundary < rounded) as u32;
                *word |= code << (8 * at);
            }
        }
        Ok::<_, Infallible>(())
    });
    words
}

/// Rounds a number from -1 to 1 to the nearest entry of the table from which bitsandbytes reads the
/// codes of scales on a CPU.
fn table_value(scaled: f32) -> f32 {
    const LAST: f32 = 65535.0;
    let entry = ((scaled.clamp(-1.0, 1.0) + 1.0) * 0.5 * LAST + 0.5).floor();
    -1.0 + 2.0 * entry / LAST
}

/// Returns the sum of numbers in the order of torch on a CPU, with one thread: in eight lanes, and
/// in one if there are fewer than eight numbers.
fn torch_sum(values: &[f32]) -> f32 {
    let (vectors, rest) = values.as_chunks::<8>();
    if vectors.is_empty() {
        let ones: Vec<[f32; 1]> = values.iter().map(|&value| [value]).collect();
        return sum_of_rows(&ones)[0];
    }
    let lanes = sum_of_rows(vectors);
    rest.iter().chain(&lanes).fold(0.0, |sum, value| sum + value)
}

/// Sums rows in four sums, of which each is a cascade of four levels.
fn sum_of_rows<const LANES: usize>(rows: &[[f32; LANES]]) -> [f32; LANES] {
    const LEVELS: usize = 4;
    let (fours, rest) = rows.as_chunks::<4>();
    let add =
        |sum: &mut [f32; LANES], row: &[f32; LANES]| sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
    let power = (fours.len().next_power_of_two().ilog2() / LEVELS as u32).max(4);
    let mut levels = [[[0.0; LANES]; 4]; LEVELS];
    for (number, four) in fours.iter().enumerate() {
        levels[0].iter_mut().zip(four).for_each(|(sum, row)| add(sum, row));
        // A level that is full moves into the next one.
        for level in 1..LEVELS {
            if !(number + 1).is_multiple_of(1 << (power * level as u32)) {
                break;
            }
            let full = std::mem::replace(&mut levels[level - 1], [[0.0; LANES]; 4]);
            levels[level].iter_mut().zip(&full).for_each(|(sum, row)| add(sum, row));
        }
    }
    let [mut sums, upper @ ..] = levels;
    upper.iter().for_each(|level| sums.iter_mut().zip(level).for_each(|(sum, row)| add(sum, row)));
    let [mut sum, others @ ..] = sums;
    rest.iter().chain(&others).for_each(|row| add(&mut sum, row));
    sum
}

/// Returns the largest magnitude of a block, which is its scale.
fn largest<S: Stored>(block: &[S; BLOCK]) -> f32 {
    let mut largest = [0.0f32; PER_WORD];
    for weights in block.as_chunks::<PER_WORD>().0 {
        for (largest, weight) in largest.iter_mut().zip(weights) {
            let magnitude = weight.widen().abs();
            *largest = if magnitude > *largest { magnitude } else { *largest };
        }
    }
    largest.into_iter().fold(0.0, f32::max)
}

/// Writes the codes of a block. A weight's code is the number of boundaries below it. They are
/// counted without branches, so that the compiler uses vectors.
fn encode_block<S: Stored>(
    boundaries: &[f32; 15],
    block: &[S; BLOCK],
    scale: f32,
    words: &mut [u32; BLOCK / PER_WORD],
) {
    let inverse = 1.0 / scale.max(LEAST);
    for (word, weights) in words.iter_mut().zip(block.as_chunks::<PER_WORD>().0) {
        let scaled = weights.map(|weight| weight.widen() * inverse);
        let mut codes = [0; PER_WORD];
        for boundary in boundaries {
            codes.iter_mut().zip(scaled).for_each(|(code, scaled)| *code += u32::from(*boundary < scaled));
        }
        *word = codes.iter().enumerate().map(|(at, code)| code << shift(at)).sum();
    }
}

/// Returns the weights of a matrix of this many, row by row.
fn decode<S: Stored>(words: &[u32], weights: usize) -> Vec<S> {
    let layout = Layout::new(weights);
    let offset = f32::from_bits(words[layout.offset]);
    let mut all = bytemuck::zeroed_vec(weights);
    let Ok(()) = for_each_part(&mut all, PART * BLOCK, |first, part: &mut [S]| {
        for (block, part) in (first / BLOCK..).zip(part.chunks_mut(BLOCK)) {
            let code = words[layout.scales + block / 4] >> (8 * (block % 4));
            let scale = scale(code, f32::from_bits(words[layout.factors + block / GROUP]), offset);
            for (at, place) in part.iter_mut().enumerate() {
                *place = S::narrow(weight(words[block * (BLOCK / PER_WORD) + at / PER_WORD] >> shift(at), scale));
            }
        }
        Ok::<_, Infallible>(())
    });
    all
}

/// A matrix of a parameter: its first word, and its outputs.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredMatrix {
    pub(super) word: usize,
    pub(super) first: usize,
    pub(super) outputs: usize,
}

/// Returns the matrices of a parameter of `inputs`.
pub(super) fn stored_matrices(inputs: usize, matrices: &[usize]) -> impl Iterator<Item = StoredMatrix> {
    let (mut word, mut first) = (0, 0);
    matrices.iter().map(move |&outputs| {
        let matrix = StoredMatrix { word, first, outputs };
        word += Layout::new(inputs * outputs).words;
        first += outputs;
        matrix
    })
}

/// Returns the words of a parameter.
pub(super) fn words(inputs: usize, matrices: &[usize]) -> usize {
    matrices.iter().map(|outputs| Layout::new(inputs * outputs).words).sum()
}

/// Returns the extents of a parameter in NF4, and its matrices.
fn matrices(entry: &ParameterEntry) -> ([usize; 2], impl Iterator<Item = StoredMatrix>) {
    let [inputs, outputs] = entry.shape().as_rows();
    ([inputs, outputs], stored_matrices(inputs, entry.matrices()))
}

/// Quantises a parameter's values `[inputs, outputs]`.
pub(super) fn quantise<S: Stored>(entry: &ParameterEntry, values: &[S]) -> Vec<u32> {
    let ([inputs, columns], stored) = matrices(entry);
    let mut words = Vec::with_capacity(entry.stored_elements());
    for StoredMatrix { first, outputs, .. } in stored {
        let mut rows: Vec<S> = bytemuck::zeroed_vec(inputs * outputs);
        let whole = Columns { first: 0, of: inputs };
        transpose((values, Columns { first, of: columns }), (&mut rows, whole), inputs);
        words.extend(float_mode::in_default(|| encode(&rows)));
    }
    words
}

/// Fills a part of a parameter whose weights are zero, from a byte on.
pub(super) fn fill_zeros(entry: &ParameterEntry, from: usize, part: &mut [u8]) {
    let ([inputs, _], stored) = matrices(entry);
    let zero = NF4.iter().position(|&value| value == 0.0).expect("NF4 has a code of zero") as u8;
    part.fill(0);
    for StoredMatrix { word, outputs, .. } in stored {
        let codes = [word, word + Layout::new(inputs * outputs).scales];
        let [start, end] = codes.map(|word| (size_of::<u32>() * word).clamp(from, from + part.len()) - from);
        part[start..end].fill(zero << 4 | zero);
    }
}

/// Returns a parameter's values `[inputs, outputs]`.
pub(super) fn values<S: Stored>(entry: &ParameterEntry, words: &[u32]) -> Vec<S> {
    let ([inputs, columns], stored) = matrices(entry);
    let mut values = bytemuck::zeroed_vec(inputs * columns);
    for StoredMatrix { word, first, outputs } in stored {
        let weights = inputs * outputs;
        let rows: Vec<S> = decode(&words[word..word + Layout::new(weights).words], weights);
        let whole = Columns { first: 0, of: inputs };
        transpose((&rows, whole), (&mut values, Columns { first, of: columns }), outputs);
    }
    values
}

/// Returns the first word of a matrix in its parameter, and its words.
pub(super) fn packed(entry: &ParameterEntry, number: usize, matrix: &Nf4Matrix<'_>) -> Result<(usize, Vec<u32>)> {
    let (word, shape) = matrix_place("write_nf4", entry, number)?;
    let checked = matrix.check(shape);
    checked.map_err(|reason| Error::misuse("write_nf4", format!("a matrix of `{}`", short(entry.name())), reason))?;
    Ok((word, matrix.words()))
}

/// Returns the first word of a matrix in its parameter, and the words of its weights `[outputs,
/// inputs]`.
pub(super) fn quantised<S: Stored>(entry: &ParameterEntry, number: usize, weights: &[S]) -> Result<(usize, Vec<u32>)> {
    let (word, [outputs, inputs]) = matrix_place("quantise", entry, number)?;
    if weights.len() != outputs * inputs {
        let expected = format!("{outputs} x {inputs} weights of `{}`", short(entry.name()));
        return Err(Error::misuse("quantise", expected, weights.len().to_string()));
    }
    Ok((word, float_mode::in_default(|| encode(weights))))
}

/// Returns the first word of a matrix in its parameter, and its outputs and inputs.
fn matrix_place(op: &'static str, entry: &ParameterEntry, number: usize) -> Result<(usize, [usize; 2])> {
    let ([inputs, _], mut stored) = matrices(entry);
    match stored.nth(number) {
        Some(StoredMatrix { word, outputs, .. }) => Ok((word, [outputs, inputs])),
        None => {
            let expected = format!("one of the {} matrices of `{}`", entry.matrices().len(), short(entry.name()));
            Err(Error::misuse(op, expected, format!("number {number}")))
        }
    }
}

/// Queues the decoding of a parameter, whose words begin in `memory`, into a tensor of the step.
#[track_caller]
pub(super) fn decoded<'s, S: Stored>(
    step: &Step<'s>,
    entry: &ParameterEntry,
    memory: Memory<u32>,
) -> Result<Tensor<'s, S>> {
    let mut out = step.empty::<S>(entry.shape())?;
    let ([inputs, columns], stored) = matrices(entry);
    let stored: Vec<StoredMatrix> = stored.collect();
    // Neighbors of equal extents, such as those of experts, have one launch.
    for equal in stored.chunk_by(|one, other| one.outputs == other.outputs) {
        let (StoredMatrix { word, first, outputs }, matrices) = (equal[0], equal.len());
        let words = memory.part(word, matrices * Layout::new(inputs * outputs).words);
        step.launch(nf4_decode { words: words.as_slice(), inputs, outputs, matrices, columns, first, out: out.out() })?;
    }
    Ok(out)
}
