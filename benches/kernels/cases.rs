//! The cases: ops, their tensors, and the fewest bytes per element that any implementation must
//! move.
//!
//! Invariant: `peers/kernels.py` has a function of the same name and the same meaning for each
//! case.

use kernels::adamw::slot;
use stepscope::data::SplitMix64;
use stepscope::ops::{self, Generator};
use stepscope::tensor::{Lent, OnDevice, Stored};
use stepscope::{Buffer, Device, Result, Step, Tensor, bf16};

/// Columns per row.
pub(crate) const COLUMNS: usize = 1024;

/// A call of one op, or of a few related ones.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The fewest bytes per element that any implementation must read and write.
    pub(crate) least_bytes: usize,
    pub(crate) call: Call,
}

/// A function that queues a case once on one set.
pub(crate) type Call = for<'s> fn(&Step<'s>, &mut Set) -> Result<()>;

/// Declares cases by name: first those with their bytes per element, then those of both element
/// types with their accesses per element.
macro_rules! cases {
    (one: { $($name:ident, $bytes:literal, $call:expr;)* } both: { $($both:ident, $accesses:literal;)* }) => {
        /// All cases. An access to an element is 4 bytes, or 2 in BF16.
        pub(crate) const CASES: &[Case] = &[
            $(Case { name: stringify!($name), least_bytes: $bytes, call: $call },)*
            $(
                Case { name: stringify!($both), least_bytes: 4 * $accesses, call: $both::<f32> },
                Case { name: concat!(stringify!($both), "_bf16"), least_bytes: 2 * $accesses, call: $both::<bf16> },
            )*
        ];
    };
}

cases! {
    one: {
        fill, 4, |step, set| ops::fill(step, [set.stored.x.len()], 1.0).map(drop);
        cross_entropy_and_gradient, 8, cross_entropy_and_gradient;
        sum, 4, |step, set| ops::sum(step, &set.x::<f32>(step)?).map(drop);
        sum_columns, 4, |step, set| ops::sum_columns(step, &set.x::<f32>(step)?).map(drop);
        sum_rows, 4, |step, set| ops::sum_rows(step, &set.x::<f32>(step)?).map(drop);
        squared_norm, 4, |step, set| ops::squared_norm(step, &set.x::<f32>(step)?).map(drop);
        adamw, 28, adamw;
        embedding, 8, embedding::<f32>;
        embedding_bf16, 6, embedding::<bf16>;
        embedding_backward, 8, embedding_backward::<f32>;
        embedding_backward_bf16, 6, embedding_backward::<bf16>;
    }
    both: {
        copy, 2;
        tanh, 2;
        tanh_backward, 3;
        gelu, 2;
        gelu_backward, 3;
        silu, 2;
        silu_backward, 3;
        swiglu, 3;
        swiglu_backward, 5;
        softmax, 2;
        rms_norm, 2;
        rms_norm_backward, 3;
        layer_norm, 2;
        layer_norm_backward, 3;
        dropout, 2;
    }
}

/// Declares ops with one input, and their backward passes over x and dy.
macro_rules! elementwise {
    ($($name:ident $backward:ident;)*) => {
        $(
            fn $name<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
                ops::$name(step, &set.x::<S>(step)?).map(drop)
            }

            fn $backward<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
                ops::launch::$backward(step, &set.x::<S>(step)?, &set.dy::<S>(step)?).map(drop)
            }
        )*
    };
}

elementwise! {
    tanh tanh_backward;
    gelu gelu_backward;
    silu silu_backward;
}

fn copy<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    ops::copy(step, &set.x::<S>(step)?).map(drop)
}

fn softmax<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    ops::softmax(step, &set.x::<S>(step)?).map(drop)
}

/// Uses x as the gate and dy as the gated value.
fn swiglu<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    ops::swiglu(step, &set.x::<S>(step)?, &set.dy::<S>(step)?).map(drop)
}

fn swiglu_backward<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    let (x, dy) = (set.x::<S>(step)?, set.dy::<S>(step)?);
    ops::launch::swiglu_backward(step, &x, &dy, &dy).map(drop)
}

fn dropout<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    let draws = set.generator.draws(step)?;
    ops::dropout(step, &set.x::<S>(step)?, 0.1, &draws.next()).map(drop)
}

/// Looks up each row of the table x once, in another order.
fn embedding<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    ops::embedding::<S>(step, &set.x::<f32>(step)?, &OnDevice(&set.ids(step)?)).map(drop)
}

/// Computes the gradient of such a table.
fn embedding_backward<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    let shape = set.shape();
    let Set { stored, first, ids, .. } = set;
    let (dy, ids) = (step.lend(S::held(stored).1, shape)?, step.lend(ids, [shape[0]])?);
    ops::launch::embedding_backward(step, &dy, &OnDevice(&ids), &mut step.lend_mut(first, shape)?, false)
}

fn rms_norm<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    ops::rms_norm(step, &set.x::<S>(step)?, &set.gain(step)?, EPSILON).map(drop)
}

fn layer_norm<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    ops::layer_norm(step, &set.x::<S>(step)?, &set.gain(step)?, &set.gain(step)?, EPSILON).map(drop)
}

const EPSILON: f32 = 1e-6;
/// So small that the weights stay almost constant over thousands of updates.
const LEARNING_RATE: f32 = 1e-6;

/// Computes dx, and adds to the gradient of the gain.
fn rms_norm_backward<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    let shape = set.shape();
    let Set { stored, gain, dgain, ones, .. } = set;
    let (x, dy) = S::held(stored);
    let (x, dy, gain) = (step.lend(x, shape)?, step.lend(dy, shape)?, step.lend(gain, [COLUMNS])?);
    let inverse_rms = step.lend(ones, [shape[0]])?;
    let mut dgain = step.lend_mut(dgain, [COLUMNS])?;
    ops::launch::rms_norm_backward(step, &x, &gain, &inverse_rms, &dy, None, &mut dgain, true).map(drop)
}

/// Computes dx, and adds to the gradients of gain and bias.
fn layer_norm_backward<S: Held>(step: &Step<'_>, set: &mut Set) -> Result<()> {
    let shape = set.shape();
    let Set { stored, gain, dgain, dbias, ones, .. } = set;
    let (x, dy) = S::held(stored);
    let (x, dy, gain) = (step.lend(x, shape)?, step.lend(dy, shape)?, step.lend(gain, [COLUMNS])?);
    let ones = step.lend(ones, [shape[0]])?;
    let gradients = [&mut step.lend_mut(dgain, [COLUMNS])?, &mut step.lend_mut(dbias, [COLUMNS])?];
    ops::launch::layer_norm_backward(step, &x, &gain, [&ones, &ones], &dy, None, gradients, [true; 2]).map(drop)
}

/// Computes the mean loss and its gradient with respect to the logits.
fn cross_entropy_and_gradient(step: &Step<'_>, set: &mut Set) -> Result<()> {
    ops::cross_entropy(step, &set.x::<f32>(step)?, &OnDevice(&set.labels(step)?)).map(drop)
}

/// Runs an update without clipping.
fn adamw(step: &Step<'_>, set: &mut Set) -> Result<()> {
    let elements = set.stored.x.len();
    let Set { stored: Pairs { x, dy, .. }, first, second, hyper, one, .. } = set;
    ops::adamw(
        step,
        &mut step.lend_mut(x, [elements])?,
        None::<&mut Tensor<'_, bf16>>,
        &step.lend(dy, [elements])?,
        &mut step.lend_mut(first, [elements])?,
        &mut step.lend_mut(second, [elements])?,
        &step.lend(hyper, [slot::LEN])?,
        None::<&Tensor<'_, u32>>,
        &step.lend(one, [1])?,
    )
}

/// The tensors of one call: normal numbers of shape `[n / 1024, 1024]`, and vectors for their rows
/// and columns.
pub(crate) struct Set {
    stored: Pairs,
    /// AdamW's moments of gradients `dy` for weights `x`.
    first: Buffer<f32>,
    second: Buffer<f32>,
    labels: Buffer<u32>,
    /// Every row number once.
    ids: Buffer<u32>,
    /// One number per row, for statistics.
    ones: Buffer<f32>,
    gain: Buffer<f32>,
    dgain: Buffer<f32>,
    dbias: Buffer<f32>,
    hyper: Buffer<f32>,
    one: Buffer<f32>,
    generator: Generator,
}

/// The tensors x and dy, in f32 and in BF16.
pub(crate) struct Pairs {
    x: Buffer<f32>,
    dy: Buffer<f32>,
    x_bf16: Buffer<bf16>,
    dy_bf16: Buffer<bf16>,
}

/// An element type for which the set holds x and dy.
pub(crate) trait Held: Stored {
    fn held(pairs: &Pairs) -> (&Buffer<Self>, &Buffer<Self>);
}

impl Held for f32 {
    fn held(pairs: &Pairs) -> (&Buffer<Self>, &Buffer<Self>) {
        (&pairs.x, &pairs.dy)
    }
}

impl Held for bf16 {
    fn held(pairs: &Pairs) -> (&Buffer<Self>, &Buffer<Self>) {
        (&pairs.x_bf16, &pairs.dy_bf16)
    }
}

impl Set {
    /// Creates set `number`, with tensors of this many elements.
    pub(crate) fn new(device: &Device, normals: &Normals, number: usize, elements: usize) -> Result<Self> {
        let rows = elements / COLUMNS;
        let labels: Vec<u32> = (0..rows).map(|row| (row * 7 % COLUMNS) as u32).collect();
        // Sizes are powers of two or multiples of 50, and the prime 7919 divides none of them.
        let ids: Vec<u32> = (0..rows).map(|row| (row * 7919 % rows) as u32).collect();
        let mut hyper = [0.0; slot::LEN];
        hyper[slot::LEARNING_RATE] = LEARNING_RATE;
        hyper[slot::BETA1] = 0.9;
        hyper[slot::BETA2] = 0.999;
        hyper[slot::EPSILON] = 1e-8;
        hyper[slot::WEIGHT_DECAY] = 0.01;
        hyper[slot::BIAS_CORRECTION1] = 0.1;
        hyper[slot::BIAS_CORRECTION2] = 0.001;
        Ok(Self {
            stored: Pairs {
                x: normals.buffer(device, 2 * number, elements)?,
                dy: normals.buffer(device, 2 * number + 1, elements)?,
                x_bf16: normals.buffer(device, 2 * number, elements)?,
                dy_bf16: normals.buffer(device, 2 * number + 1, elements)?,
            },
            first: Buffer::zeros(device, elements)?,
            second: Buffer::zeros(device, elements)?,
            labels: Buffer::from_slice(device, &labels)?,
            ids: Buffer::from_slice(device, &ids)?,
            ones: Buffer::from_slice(device, &vec![1.0; rows])?,
            gain: Buffer::from_slice(device, &[1.0; COLUMNS])?,
            dgain: Buffer::zeros(device, COLUMNS)?,
            dbias: Buffer::zeros(device, COLUMNS)?,
            hyper: Buffer::from_slice(device, &hyper)?,
            one: Buffer::from_slice(device, &[1.0])?,
            generator: Generator::new(device, 7)?,
        })
    }

    fn shape(&self) -> [usize; 2] {
        [self.labels.len(), COLUMNS]
    }

    fn x<'b, 's, S: Held>(&'b self, step: &Step<'s>) -> Result<Lent<'b, 's, S>> {
        step.lend(S::held(&self.stored).0, self.shape())
    }

    fn dy<'b, 's, S: Held>(&'b self, step: &Step<'s>) -> Result<Lent<'b, 's, S>> {
        step.lend(S::held(&self.stored).1, self.shape())
    }

    fn ids<'b, 's>(&'b self, step: &Step<'s>) -> Result<Lent<'b, 's, u32>> {
        step.lend(&self.ids, [self.ids.len()])
    }

    fn gain<'b, 's>(&'b self, step: &Step<'s>) -> Result<Lent<'b, 's>> {
        step.lend(&self.gain, [COLUMNS])
    }

    fn labels<'b, 's>(&'b self, step: &Step<'s>) -> Result<Lent<'b, 's, u32>> {
        step.lend(&self.labels, [self.labels.len()])
    }
}

/// Normal numbers, generated once; larger tensors repeat them.
pub(crate) struct Normals(Vec<f32>);

impl Normals {
    const PERIOD: usize = 1 << 22;

    /// Generates each as the sum of twelve uniform numbers, minus 6.
    pub(crate) fn new() -> Self {
        let mut random = SplitMix64::new(7);
        Self((0..Self::PERIOD).map(|_| (0..12).map(|_| random.unit()).sum::<f32>() - 6.0).collect())
    }

    /// Returns a buffer of these numbers that starts at another offset for each set.
    fn buffer<S: Stored>(&self, device: &Device, number: usize, elements: usize) -> Result<Buffer<S>> {
        let mut buffer = Buffer::zeros(device, elements)?;
        let mut done = 0;
        let mut from = number * 65_537 % Self::PERIOD;
        while done < elements {
            let part = &self.0[from..][..(elements - done).min(Self::PERIOD - from)];
            buffer.write(done, &part.iter().map(|&x| S::narrow(x)).collect::<Vec<_>>())?;
            done += part.len();
            from = 0;
        }
        Ok(buffer)
    }
}
