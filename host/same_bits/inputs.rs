//! Seeded inputs of one case, and what its kernel gave.
//!
//! Invariant: inputs follow from the case and its form alone, with the same bits everywhere. What a kernel wrote is read before the next
//! inputs come, so that a kernel that does not end is waited for by its own case.

#![forbid(unsafe_code)]

use super::Form;
use super::cases::Case;
use super::seeded::{Random, SPECIAL, sample_of};
use crate::driver::Device;
use crate::error::Result;
use crate::memory::{Arena, Buffer};
use crate::ops::{self, Attention, AttentionForm, QkNorm};
use crate::step::Eager;
use crate::tensor::{Element, Lent, Shape, Source, Stored, Target, Tensor};
use cuda_std::launch::PointerMut;
use half::bf16;
use kernels::attention::HEAD;
use std::cell::RefCell;
use std::fmt;

/// Bytes of the arena of a case.
const ARENA_BYTES: usize = 64 << 20;
/// The same in its smallest form.
const SMALLEST_ARENA_BYTES: usize = 2 << 20;

/// Rows that one lane has and rows that several or a whole block have, many and few of them, with and without tails.
const ROWS: [[usize; 2]; 6] = [[300, 3], [65, 64], [12, 193], [129, 256], [4100, 5], [2, 20_001]];
/// Rows of 1, 2, 4, 8, 16 and 32 lanes: whole vectors that lanes hold, four or eight, and that they read again; rows with tails; more
/// rows than a block has at once, and than are summed in one. Rows of 16 lanes with a tail hold special numbers, see [`Inputs::rows`].
const SMALLEST_ROWS: [[usize; 2]; 7] = [[140, 3], [140, 20], [20, 64], [20, 99], [20, 256], [2, 516], [2, 1028]];
/// Columns of the rows that hold special numbers.
const SPECIAL_COLUMNS: usize = 193;
/// Whole squares of 32 x 32 and cut ones, of rows that begin where a vector may and of others.
const SMALLEST_SQUARES: [[usize; 2]; 2] = [[40, 68], [33, 35]];

/// Inputs of one case, and what its kernel gave.
pub struct Inputs<'i, 's> {
    pub(super) step: &'i Eager<'s>,
    pub(super) form: Form,
    pub(super) random: RefCell<Random>,
    results: RefCell<Vec<Vec<u32>>>,
}

impl fmt::Debug for Inputs<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inputs").field("form", &self.form).finish_non_exhaustive()
    }
}

impl<'s> Inputs<'_, 's> {
    /// What belongs to the form that runs.
    pub(super) fn by_form<T>(&self, whole: T, smallest: T) -> T {
        match self.form {
            Form::Whole => whole,
            Form::Smallest => smallest,
        }
    }

    pub(super) fn normals<S: Stored>(&self, shape: impl Into<Shape>) -> Result<Tensor<'s, S>> {
        let shape = shape.into();
        let values = self.random.borrow_mut().normals(shape.elements());
        self.upload(&values, shape)
    }

    /// The nearest numbers that S can hold.
    fn upload<S: Stored>(&self, values: &[f32], shape: impl Into<Shape>) -> Result<Tensor<'s, S>> {
        self.step.upload(&values.iter().map(|&value| S::narrow(value)).collect::<Vec<S>>(), shape)
    }

    /// Whole numbers from -8 to 8; from -2 to 2 in the smallest form, so that GELU makes most sums neither 0 nor themselves.
    pub(super) fn whole(&self, length: usize) -> Result<Tensor<'s>> {
        let most = self.by_form(8, 2);
        let below = self.random.borrow_mut().belows(length, 2 * most + 1);
        let values: Vec<f32> = below.into_iter().map(|below| below as f32 - most as f32).collect();
        self.step.upload(&values, [length])
    }

    /// Attention by the kernel for few tokens, with its norm and its form.
    pub(super) fn short_attention<'q>(
        &self,
        qkv: &Tensor<'s>,
        gains: &'q Tensor<'s>,
    ) -> Result<(Attention<'s>, QkNorm<'q, 's>, AttentionForm<'s>)> {
        // A power of two would hide that a product was fused.
        let form = AttentionForm::new(qkv.shape().as_rows()[1] / HEAD).scale(self.by_form(0.125, 0.1));
        let norm = QkNorm::new(gains, 1e-6);
        Ok((ops::attention(self.step, qkv, Some(norm), &form)?, norm, form))
    }

    /// A group below `count` for each run of a flat region.
    pub(super) fn groups(&self, length: usize, count: u32) -> Result<Tensor<'s, u32>> {
        let runs = length.div_ceil(kernels::update::RUN);
        self.step.upload(&self.random.borrow_mut().belows(runs, count), [runs])
    }

    /// A gain for the norm of `x`.
    pub(super) fn gain<S: Stored>(&self, x: &Tensor<'s, S>) -> Result<Tensor<'s>> {
        self.normals([x.shape().as_rows()[1]])
    }

    /// An output: where it is read, and always in the whole form, what `old` makes; else whatever is there.
    pub(super) fn output(
        &self,
        is_read: bool,
        shape: impl Into<Shape>,
        old: impl FnOnce() -> Result<Tensor<'s>>,
    ) -> Result<Tensor<'s>> {
        if is_read || self.form == Form::Whole { old() } else { self.step.empty(shape) }
    }

    /// A class for each row of `logits`, one beyond the last among them: a row that makes the loss NaN. Of a buffer's content the op
    /// knows nothing; uploaded, such a label is an error.
    pub(super) fn labels<S: Stored>(&self, logits: &Tensor<'s, S>) -> Result<Buffer<u32>> {
        let [rows, classes] = logits.shape().as_rows();
        Buffer::from_slice(self.step.device(), &self.random.borrow_mut().belows(rows, classes as u32 + 1))
    }

    /// The op on ids of the rows of `table`, one beyond the last among them: a row of NaN.
    pub(super) fn with_ids<S: Stored>(
        &self,
        table: &Tensor<'s, S>,
        op: impl Fn(&Self, &Lent<'_, 's, u32>) -> Result<()>,
    ) -> Result<()> {
        let rows = table.shape().as_rows()[0] as u32;
        let mut ids = self.random.borrow_mut().belows(37, rows);
        ids[5] = rows;
        let ids = Buffer::from_slice(self.step.device(), &ids)?;
        op(self, &self.step.lend(&ids, [ids.len()])?)
    }

    /// The op on ids of which some come often: fewer than a block sorts, and more.
    pub(super) fn sorted(&self, op: impl Fn(&Self, &Tensor<'s, u32>) -> Result<()>) -> Result<()> {
        for &count in self.by_form(&[1, 5, 511, 5003][..], &[1300]) {
            op(self, &self.step.upload(&self.random.borrow_mut().belows(count, 40), [count])?)?;
        }
        Ok(())
    }

    /// The ids with each `run` of them sorted, and where they stood.
    pub(super) fn runs(&self, ids: &Tensor<'s, u32>, run: usize) -> Result<(Tensor<'s, u32>, Tensor<'s, u32>)> {
        let ids = self.step.read(ids)?;
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.chunks_mut(run).for_each(|run| run.sort_by_key(|&at| ids[at as usize]));
        let sorted: Vec<u32> = order.iter().map(|&at| ids[at as usize]).collect();
        Ok((self.step.upload(&sorted, [ids.len()])?, self.step.upload(&order, [ids.len()])?))
    }

    /// The gradient of an embedding: of ids that come up to some hundred times, `distinct` of them.
    pub(super) fn embedded<S: Stored>(&self, distinct: u32) -> Result<()> {
        for &[count, cols] in self.by_form(&[[1, 3], [700, 64], [5003, 131]][..], &[[530, 20], [140, 131]]) {
            let ids = self.step.upload(&self.random.borrow_mut().belows(count, distinct), [count])?;
            let (dy, mut dtable) = (self.normals::<S>([count, cols])?, self.normals([distinct as usize + 1, cols])?);
            for accumulate in [true, false] {
                crate::ops::embedding_backward(self.step, &dy, &ids, &mut dtable, accumulate)?;
                self.keep(&dtable)?;
            }
        }
        Ok(())
    }

    /// The op on two arrays: of all magnitudes and what is not a number, then of several lengths. In the smallest form one length,
    /// which is no multiple of four.
    pub(super) fn flat<S: Stored>(&self, op: impl Fn(&Self, &[Tensor<'s, S>; 2]) -> Result<()>) -> Result<()> {
        let dense = |seed| {
            let counts = self.by_form([18, 18], [9, 12]);
            let values = sample_of(counts, seed, -12.5, 10.0);
            let values = self.by_form(&values[..], &values[1..]);
            self.upload(values, [values.len()])
        };
        op(self, &[dense(1)?, dense(2)?])?;
        for &length in self.by_form(&[1, 5, 1023, 4097][..], &[]) {
            op(self, &[self.normals([length])?, self.normals([length])?])?;
        }
        Ok(())
    }

    /// The op on arrays shorter than, as long as and longer than what a block reduces.
    pub(super) fn long<S: Stored>(&self, op: impl Fn(&Self, &Tensor<'s, S>) -> Result<()>) -> Result<()> {
        let lengths = self.by_form(&[1, 5, 4096, 4096 * 70 + 3][..], &[4096 * 8 + 1027]);
        lengths.iter().try_for_each(|&length| op(self, &self.normals([length])?))
    }

    /// The op on rows of several lengths, then on rows of which most hold one special number each.
    pub(super) fn rows<S: Stored>(&self, op: impl Fn(&Self, &Tensor<'s, S>) -> Result<()>) -> Result<()> {
        self.matrices(self.by_form(&ROWS[..], &SMALLEST_ROWS), op)
    }

    /// The op on matrices of several extents, then on rows of which most hold one special number each.
    pub(super) fn squares<S: Stored>(&self, op: impl Fn(&Self, &Tensor<'s, S>) -> Result<()>) -> Result<()> {
        self.matrices(self.by_form(&ROWS[..], &SMALLEST_SQUARES), op)
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

    /// Keeps sums: by the op, which scales none; in the smallest form by the kernel, scaled and added to old content.
    pub(super) fn sums(
        &self,
        length: usize,
        op: impl FnOnce() -> Result<Tensor<'s>>,
        kernel: impl FnOnce(f32, u32, PointerMut<'_, f32>) -> Result<()>,
    ) -> Result<()> {
        if self.form == Form::Whole {
            return self.keep(&op()?);
        }
        let mut out = self.normals([length])?;
        kernel(0.1, 1, out.out())?;
        self.keep(&out)
    }

    /// Attention on q, k and v, gains, and a gradient of the output.
    pub(super) fn heads(&self, op: impl Fn(&Self, &Tensor<'s>, &Tensor<'s>, &Tensor<'s>) -> Result<()>) -> Result<()> {
        // The smallest form has each number of groups of four tokens.
        let smallest = [[1, 2, 64], [1, 5, 128], [1, 12, 64], [1, 15, 64]];
        for &[samples, tokens, width] in self.by_form(&[[4, 12, 256], [3, 16, 128], [2, 1, 64]][..], &smallest) {
            let qkv = self.normals([3, samples, tokens, width])?;
            op(self, &qkv, &self.normals([2, 64])?, &self.normals([samples, tokens, width])?)?;
        }
        Ok(())
    }

    /// The op on shapes of `[samples, tokens, cols]`.
    pub(super) fn tokens(&self, op: impl Fn(&Self, [usize; 3]) -> Result<()>) -> Result<()> {
        let shapes = self.by_form(&[[33, 12, 67], [256, 12, 256], [1, 1, 1]][..], &[[3, 5, 7], [2, 6, 8]]);
        shapes.iter().try_for_each(|&shape| op(self, shape))
    }

    /// A result: its bits count, but a NaN's.
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

/// Runs a case in an arena of its own, which no setting reaches; the words of each result.
///
/// # Errors
/// Those of the device.
pub fn run(device: &Device, case: &Case, form: Form) -> Result<Vec<Vec<u32>>> {
    let bytes = match form {
        Form::Whole => ARENA_BYTES,
        Form::Smallest => SMALLEST_ARENA_BYTES,
    };
    Arena::bare(device, bytes)?.step(|step| {
        let inputs = Inputs { step, form, random: Random::new(17).into(), results: RefCell::default() };
        case.run(&inputs)?;
        Ok(inputs.results.into_inner())
    })
}
