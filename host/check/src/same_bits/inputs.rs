//! The seeded inputs of one case, and the results of its kernel.
//!
//! Invariant: inputs depend only on the case and its size, with the same bits everywhere. A
//! kernel's results are read before the next inputs are made. The wait for a kernel that does not
//! end therefore happens in its own case.

#![forbid(unsafe_code)]

use super::CaseSize;
use super::case::Case;
use super::seeded::{Random, SPECIAL, sample_of};
use cuda_std::launch::PointerMut;
use half::bf16;
use kernels::attention::HEAD;
use kernels::nf4::nf4_decode;
use kernels::nf4_format::Layout;
use std::cell::RefCell;
use std::fmt;
use stepscope_core::ops::{self, Attention, AttentionConfig, AttentionElement, QkNorm};
use stepscope_core::{
    Arena, Buffer, Device, EagerStep, Element, Lent, OnDevice, Result, Shape, Source, Stored, Target, Tensor,
};

/// The bytes of a case's arena.
const ARENA_BYTES: usize = 64 << 20;
/// The bytes of a case's arena in the smallest size.
const SMALLEST_ARENA_BYTES: usize = 2 << 20;

/// Rows that one lane processes, and rows that several lanes or a whole block process, few and
/// many, with and without tails.
const ROWS: [[usize; 2]; 6] = [[300, 3], [65, 64], [12, 193], [129, 256], [4100, 5], [2, 20_001]];
/// Rows of 1, 2, 4, 8, 16 and 32 lanes. Some rows are four or eight whole vectors, which lanes keep
/// in registers. Longer rows are read again. Some rows have tails. Some cases have more rows than a
/// block processes at once, or than one block sums. Rows of 16 lanes with a tail contain special
/// numbers. See [`Inputs::rows`].
const SMALLEST_ROWS: [[usize; 2]; 7] = [[140, 3], [140, 20], [20, 64], [20, 99], [20, 256], [2, 516], [2, 1028]];
/// The columns of the rows that contain special numbers.
const SPECIAL_COLUMNS: usize = 193;
/// Complete squares of 32 x 32 and partial ones, with rows that are aligned for vectors and rows
/// that are not.
const SMALLEST_SQUARES: [[usize; 2]; 2] = [[40, 68], [33, 35]];

/// The inputs of one case, and the results of its kernel.
pub struct Inputs<'i, 's> {
    pub(super) step: &'i EagerStep<'s>,
    pub(super) size: CaseSize,
    pub(super) random: RefCell<Random>,
    results: RefCell<Vec<Vec<u32>>>,
}

impl fmt::Debug for Inputs<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inputs").field("size", &self.size).finish_non_exhaustive()
    }
}

impl<'s> Inputs<'_, 's> {
    /// Returns the value for the size that runs.
    pub(super) fn by_size<T>(&self, whole: T, smallest: T) -> T {
        match self.size {
            CaseSize::Whole => whole,
            CaseSize::Smallest => smallest,
        }
    }

    pub(super) fn normals<S: Stored>(&self, shape: impl Into<Shape>) -> Result<Tensor<'s, S>> {
        let shape = shape.into();
        let values = self.random.borrow_mut().normals(shape.elements());
        self.upload(&values, shape)
    }

    /// Uploads the nearest values that S can represent.
    fn upload<S: Stored>(&self, values: &[f32], shape: impl Into<Shape>) -> Result<Tensor<'s, S>> {
        self.step.upload(&values.iter().map(|&value| S::narrow(value)).collect::<Vec<S>>(), shape)
    }

    /// Uploads whole numbers from -8 to 8. In the smallest size they range from -2 to 2, so that
    /// GELU maps few sums to 0 or to themselves.
    pub(super) fn whole(&self, length: usize) -> Result<Tensor<'s>> {
        self.step.upload(&self.whole_numbers(length), [length])
    }

    fn whole_numbers(&self, length: usize) -> Vec<f32> {
        let most = self.by_size(8, 2);
        let below = self.random.borrow_mut().belows(length, 2 * most + 1);
        below.into_iter().map(|below| below as f32 - most as f32).collect()
    }

    /// Uploads factors of matrix instructions. In the whole size they are random and hard: some
    /// repeat or cancel their neighbor, products of some are subnormal, some are zero, and a few
    /// are special. The digests then have the bits of the instructions' rule. In the smallest size
    /// they are [`whole`](Self::whole), so that sums are exact by any rule, and a GPU with another
    /// rule can be opened.
    pub(super) fn factors<S: Stored>(&self, length: usize) -> Result<Tensor<'s, S>> {
        if self.size == CaseSize::Smallest {
            return self.upload(&self.whole_numbers(length), [length]);
        }
        let mut random = self.random.borrow_mut();
        let mut values = random.normals(length);
        for at in 1..length {
            match random.below(1024) {
                0..192 => values[at] = values[at - 1],
                192..384 => values[at] = -values[at - 1],
                // The product of two of these is below 2^-126.
                384..448 => values[at] *= f32::from_bits((127 - 65) << 23),
                448..512 => values[at] = 0.0,
                512 => values[at] = SPECIAL[random.below(SPECIAL.len() as u32) as usize],
                _ => {}
            }
        }
        drop(random);
        self.upload(&values, [length])
    }

    /// Runs the attention kernel for few tokens, and returns its output with its norm and its
    /// configuration.
    pub(super) fn short_attention<'q, S: AttentionElement>(
        &self,
        qkv: &Tensor<'s, S>,
        gains: &'q Tensor<'s>,
    ) -> Result<(Attention<'s, S>, QkNorm<'q, 's>, AttentionConfig<'s>)> {
        // A power of two would hide a fused product.
        let config = AttentionConfig::new(qkv.shape().as_rows()[1] / HEAD).scale(self.by_size(0.125, 0.1));
        let norm = QkNorm::new(gains, 1e-6);
        Ok((ops::attention(self.step, qkv, Some(norm), &config)?, norm, config))
    }

    /// Uploads a gain for the norm of `x`.
    pub(super) fn gain<S: Stored>(&self, x: &Tensor<'s, S>) -> Result<Tensor<'s>> {
        self.normals([x.shape().as_rows()[1]])
    }

    /// Returns an output tensor. If it is read, and always in the whole size, it has the contents
    /// that `old` makes. Otherwise it is uninitialized.
    pub(super) fn output(
        &self,
        is_read: bool,
        shape: impl Into<Shape>,
        old: impl FnOnce() -> Result<Tensor<'s>>,
    ) -> Result<Tensor<'s>> {
        if is_read || self.size == CaseSize::Whole { old() } else { self.step.empty(shape) }
    }

    /// Returns a class for each row of `logits`, with one beyond the last among them, whose row
    /// makes the loss NaN. The op cannot check a buffer's contents. If such a label were uploaded,
    /// it would be an error.
    pub(super) fn labels<S: Stored>(&self, logits: &Tensor<'s, S>) -> Result<Buffer<u32>> {
        let [rows, classes] = logits.shape().as_rows();
        Buffer::from_slice(self.step.device(), &self.random.borrow_mut().belows(rows, classes as u32 + 1))
    }

    /// Runs the op on ids of the rows of `table`. One id is beyond the last row, and gives a row of
    /// NaN.
    pub(super) fn with_ids<S: Stored>(
        &self,
        table: &Tensor<'s, S>,
        op: impl Fn(&Self, &OnDevice<'_, Lent<'_, 's, u32>>) -> Result<()>,
    ) -> Result<()> {
        let rows = table.shape().as_rows()[0] as u32;
        let mut ids = self.random.borrow_mut().belows(37, rows);
        ids[5] = rows;
        let ids = Buffer::from_slice(self.step.device(), &ids)?;
        op(self, &OnDevice(&self.step.lend(&ids, [ids.len()])?))
    }

    /// Decodes matrices of NF4 whose words are random, apart from the factors and the offset. The
    /// whole size has several groups of scales, and a last block that is shorter.
    pub(super) fn decoded<S: Stored>(&self) -> Result<()> {
        for &[inputs, outputs, matrices, columns, first] in self.by_size(
            &[[8, 8, 1, 8, 0], [72, 24, 1, 40, 16], [192, 200, 1, 208, 8], [40, 24, 3, 80, 8]][..],
            &[[40, 24, 2, 56, 8]],
        ) {
            let layout = Layout::new(inputs * outputs);
            let mut random = self.random.borrow_mut();
            let mut words = Vec::new();
            for _ in 0..matrices {
                let mut of_one = random.belows(layout.words, u32::MAX);
                let scales = random.uniforms(layout.offset + 1 - layout.factors, 0.01, 0.1);
                of_one[layout.factors..=layout.offset]
                    .iter_mut()
                    .zip(scales)
                    .for_each(|(word, scale)| *word = scale.to_bits());
                words.extend(of_one);
            }
            drop(random);
            let (words, mut out) = (self.step.upload(&words, [words.len()])?, self.normals::<S>([inputs, columns])?);
            let (words, out_here) = (words.slice(), out.out());
            self.step.launch(nf4_decode { words, inputs, outputs, matrices, columns, first, out: out_here })?;
            self.keep(&out)?;
        }
        Ok(())
    }

    /// Runs the op on ids with frequent repetitions: fewer than a block sorts, and more.
    pub(super) fn sorted(&self, op: impl Fn(&Self, &Tensor<'s, u32>) -> Result<()>) -> Result<()> {
        for &count in self.by_size(&[1, 5, 511, 5003][..], &[1300]) {
            op(self, &self.step.upload(&self.random.borrow_mut().belows(count, 40), [count])?)?;
        }
        Ok(())
    }

    /// Returns the ids with each `run` of them sorted, and their original positions.
    pub(super) fn runs(&self, ids: &Tensor<'s, u32>, run: usize) -> Result<(Tensor<'s, u32>, Tensor<'s, u32>)> {
        let ids = self.step.read(ids)?;
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.chunks_mut(run).for_each(|run| run.sort_by_key(|&at| ids[at as usize]));
        let sorted: Vec<u32> = order.iter().map(|&at| ids[at as usize]).collect();
        Ok((self.step.upload(&sorted, [ids.len()])?, self.step.upload(&order, [ids.len()])?))
    }

    /// Runs the gradient of an embedding, with `distinct` different ids that appear up to some
    /// hundred times.
    pub(super) fn embedded<S: Stored>(&self, distinct: u32) -> Result<()> {
        for &[count, cols] in self.by_size(&[[1, 3], [700, 64], [5003, 131]][..], &[[530, 20], [140, 131]]) {
            let ids = self.step.upload_indices(&self.random.borrow_mut().belows(count, distinct), [count])?;
            let (dy, mut dtable) = (self.normals::<S>([count, cols])?, self.normals([distinct as usize + 1, cols])?);
            for accumulate in [true, false] {
                stepscope_core::ops::launch::embedding_backward(self.step, &dy, &ids, &mut dtable, accumulate)?;
                self.keep(&dtable)?;
            }
        }
        Ok(())
    }

    /// Runs the op on two arrays. They first contain all magnitudes and NaNs, and then have several
    /// lengths. The smallest size has one length, which is not a multiple of four.
    pub(super) fn flat<S: Stored>(&self, op: impl Fn(&Self, &[Tensor<'s, S>; 2]) -> Result<()>) -> Result<()> {
        let dense = |seed| {
            let counts = self.by_size([18, 18], [9, 12]);
            let values = sample_of(counts, seed, -12.5, 10.0);
            let values = self.by_size(&values[..], &values[1..]);
            self.upload(values, [values.len()])
        };
        op(self, &[dense(1)?, dense(2)?])?;
        for &length in self.by_size(&[1, 5, 1023, 4097][..], &[]) {
            op(self, &[self.normals([length])?, self.normals([length])?])?;
        }
        Ok(())
    }

    /// Runs the op on arrays that are shorter than, as long as, and longer than the part that a
    /// block reduces.
    pub(super) fn long<S: Stored>(&self, op: impl Fn(&Self, &Tensor<'s, S>) -> Result<()>) -> Result<()> {
        let lengths = self.by_size(&[1, 5, 4096, 4096 * 70 + 3][..], &[4096 * 8 + 1027]);
        lengths.iter().try_for_each(|&length| op(self, &self.normals([length])?))
    }

    /// Runs the op on rows of several lengths, then on rows of which most contain one special
    /// number each.
    pub(super) fn rows<S: Stored>(&self, op: impl Fn(&Self, &Tensor<'s, S>) -> Result<()>) -> Result<()> {
        self.matrices(self.by_size(&ROWS[..], &SMALLEST_ROWS), op)
    }

    /// Runs the op on matrices of several extents, then on rows of which most contain one special
    /// number each.
    pub(super) fn squares<S: Stored>(&self, op: impl Fn(&Self, &Tensor<'s, S>) -> Result<()>) -> Result<()> {
        self.matrices(self.by_size(&ROWS[..], &SMALLEST_SQUARES), op)
    }

    fn matrices<S: Stored>(
        &self,
        shapes: &[[usize; 2]],
        op: impl Fn(&Self, &Tensor<'s, S>) -> Result<()>,
    ) -> Result<()> {
        for &shape in shapes {
            op(self, &self.normals(shape)?)?;
        }
        let [rows, cols] = [SPECIAL.len() + 3, SPECIAL_COLUMNS];
        let mut values = self.random.borrow_mut().normals(rows * cols);
        for (row, special) in SPECIAL.into_iter().enumerate() {
            values[row * cols + row] = special;
        }
        op(self, &self.upload(&values, [rows, cols])?)
    }

    /// Keeps sums. In the whole size `op` computes them without scaling. In the smallest size
    /// `kernel` scales them and adds them to old contents.
    pub(super) fn sums(
        &self,
        length: usize,
        op: impl FnOnce() -> Result<Tensor<'s>>,
        kernel: impl FnOnce(f32, u32, PointerMut<'_, f32>) -> Result<()>,
    ) -> Result<()> {
        if self.size == CaseSize::Whole {
            return self.keep(&op()?);
        }
        let mut out = self.normals([length])?;
        kernel(0.1, 1, out.out())?;
        self.keep(&out)
    }

    /// Runs attention on q, k and v, gains, and a gradient of the output.
    pub(super) fn heads<S: Stored>(
        &self,
        op: impl Fn(&Self, &Tensor<'s, S>, &Tensor<'s>, &Tensor<'s, S>) -> Result<()>,
    ) -> Result<()> {
        // The smallest size has each number of groups of four tokens.
        let smallest = [[1, 2, 64], [1, 5, 128], [1, 12, 64], [1, 15, 64]];
        for &[samples, tokens, width] in self.by_size(&[[4, 12, 256], [3, 16, 128], [2, 1, 64]][..], &smallest) {
            let qkv = self.normals([3, samples, tokens, width])?;
            op(self, &qkv, &self.normals([2, 64])?, &self.normals([samples, tokens, width])?)?;
        }
        Ok(())
    }

    /// Runs the op on shapes of `[samples, tokens, cols]`.
    pub(super) fn tokens(&self, op: impl Fn(&Self, [usize; 3]) -> Result<()>) -> Result<()> {
        let shapes = self.by_size(&[[33, 12, 67], [256, 12, 256], [1, 1, 1]][..], &[[3, 5, 7], [2, 6, 8]]);
        shapes.iter().try_for_each(|&shape| op(self, shape))
    }

    /// Keeps a result. All bits count, except those of NaNs.
    pub(super) fn keep<T: Element>(&self, tensor: &impl Source<'s, T>) -> Result<()> {
        let values = self.step.read(tensor)?;
        // A BF16's bits are the upper half of its f32's.
        let mut words = match T::NAME {
            <bf16 as Element>::NAME => {
                bytemuck::cast_slice::<T, u16>(&values).iter().map(|&half| u32::from(half) << 16).collect()
            }
            _ => bytemuck::cast_slice::<T, u32>(&values).to_vec(),
        };
        if T::NAME != u32::NAME {
            for word in words.iter_mut().filter(|word| f32::from_bits(**word).is_nan()) {
                *word = f32::NAN.to_bits();
            }
        }
        self.results.borrow_mut().push(words);
        Ok(())
    }
}

/// Runs a case in a separate arena that no setting affects, and returns the words of each result.
pub fn run(device: &Device, case: &Case, size: CaseSize) -> Result<Vec<Vec<u32>>> {
    let bytes = match size {
        CaseSize::Whole => ARENA_BYTES,
        CaseSize::Smallest => SMALLEST_ARENA_BYTES,
    };
    Arena::bare(device, bytes)?.step(|step| {
        let inputs = Inputs { step, size, random: Random::new(17).into(), results: RefCell::default() };
        case.run(&inputs)?;
        Ok(inputs.results.into_inner())
    })
}
