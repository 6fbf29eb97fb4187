//! What is called, on which tensors, and how many bytes an element cannot be had for less.
//!
//! Invariant: `peers/kernels.py` has a function of the same name for each case, which does the same.

use kernels::adamw::slot;
use stepscope::{Buffer, Device, Lent, Result, SplitMix64, Step, Tensor, bf16, ops};

/// Columns of what is taken as rows.
pub(crate) const COLUMNS: usize = 1024;

/// A call of one op, or of a few that belong together.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Bytes that any implementation reads and writes for each element.
    pub(crate) least_bytes: usize,
    pub(crate) call: Call,
}

/// Queues a case once, on one set.
pub(crate) type Call = for<'s> fn(&Step<'s>, &mut Set) -> Result<()>;

/// All cases: a read or a write of each element is 4 bytes.
pub(crate) const CASES: [Case; 15] = [
    Case { name: "copy", least_bytes: 8, call: |step, set| ops::copy(step, &set.x(step)?).map(drop) },
    Case { name: "fill", least_bytes: 4, call: |step, set| ops::fill(step, [set.x.len()], 1.0).map(drop) },
    Case { name: "tanh", least_bytes: 8, call: |step, set| ops::tanh(step, &set.x(step)?).map(drop) },
    Case {
        name: "tanh_backward",
        least_bytes: 12,
        call: |step, set| ops::tanh_backward(step, &set.x(step)?, &set.dy(step)?).map(drop),
    },
    Case { name: "gelu", least_bytes: 8, call: |step, set| ops::gelu(step, &set.x(step)?).map(drop) },
    Case {
        name: "gelu_backward",
        least_bytes: 12,
        call: |step, set| ops::gelu_backward(step, &set.x(step)?, &set.dy(step)?).map(drop),
    },
    Case { name: "softmax", least_bytes: 8, call: |step, set| ops::softmax(step, &set.x(step)?).map(drop) },
    Case {
        name: "rms_norm",
        least_bytes: 8,
        call: |step, set| ops::rms_norm(step, &set.x(step)?, &set.gain(step)?, EPSILON).map(drop),
    },
    Case { name: "rms_norm_backward", least_bytes: 12, call: rms_norm_backward },
    Case { name: "cross_entropy_and_gradient", least_bytes: 8, call: cross_entropy_and_gradient },
    Case { name: "sum", least_bytes: 4, call: |step, set| ops::sum(step, &set.x(step)?).map(drop) },
    Case { name: "sum_columns", least_bytes: 4, call: |step, set| ops::sum_columns(step, &set.x(step)?).map(drop) },
    Case { name: "sum_rows", least_bytes: 4, call: |step, set| ops::sum_rows(step, &set.x(step)?).map(drop) },
    Case { name: "squared_norm", least_bytes: 4, call: |step, set| ops::squared_norm(step, &set.x(step)?).map(drop) },
    Case { name: "adamw", least_bytes: 28, call: adamw },
];

const EPSILON: f32 = 1e-6;
/// So small that thousands of updates leave the weights as they were, nearly.
const LEARNING_RATE: f32 = 1e-6;

/// dx, and the gradient of the gain, which is added to what is there.
fn rms_norm_backward(step: &Step<'_>, set: &mut Set) -> Result<()> {
    let shape = set.shape();
    let Set { x, dy, gain, dgain, inverse_rms, .. } = set;
    let (x, dy, gain) = (step.lend(x, shape)?, step.lend(dy, shape)?, step.lend(gain, [COLUMNS])?);
    let inverse_rms = step.lend(inverse_rms, [shape[0]])?;
    let mut dgain = step.lend_mut(dgain, [COLUMNS])?;
    ops::rms_norm_backward(step, &x, &gain, &inverse_rms, &dy, None, &mut dgain, true).map(drop)
}

/// The mean loss, and its gradient with respect to the logits.
fn cross_entropy_and_gradient(step: &Step<'_>, set: &mut Set) -> Result<()> {
    let weight = 1.0 / set.labels.len() as f32;
    ops::cross_entropy(step, &set.x(step)?, &set.labels(step)?, weight).map(drop)
}

/// An update without clipping.
fn adamw(step: &Step<'_>, set: &mut Set) -> Result<()> {
    let elements = set.x.len();
    let Set { x, dy, first, second, hyper, one, .. } = set;
    ops::adamw(
        step,
        &mut step.lend_mut(x, [elements])?,
        None::<&mut Tensor<'_, bf16>>,
        &step.lend(dy, [elements])?,
        &mut step.lend_mut(first, [elements])?,
        &mut step.lend_mut(second, [elements])?,
        &step.lend(hyper, [slot::LEN])?,
        &step.lend(one, [1])?,
    )
}

/// The tensors of one call: `[n / 1024, 1024]`, normal, and what belongs to their rows and columns.
pub(crate) struct Set {
    x: Buffer<f32>,
    dy: Buffer<f32>,
    /// AdamW's moments of gradients `dy` for weights `x`.
    first: Buffer<f32>,
    second: Buffer<f32>,
    labels: Buffer<u32>,
    inverse_rms: Buffer<f32>,
    gain: Buffer<f32>,
    dgain: Buffer<f32>,
    hyper: Buffer<f32>,
    one: Buffer<f32>,
}

impl Set {
    /// The set of this number, with tensors of `elements`.
    pub(crate) fn new(device: &Device, normals: &Normals, number: usize, elements: usize) -> Result<Self> {
        let rows = elements / COLUMNS;
        let labels: Vec<u32> = (0..rows).map(|row| (row * 7 % COLUMNS) as u32).collect();
        let mut hyper = [0.0; slot::LEN];
        hyper[slot::LEARNING_RATE] = LEARNING_RATE;
        hyper[slot::BETA1] = 0.9;
        hyper[slot::BETA2] = 0.999;
        hyper[slot::EPSILON] = 1e-8;
        hyper[slot::WEIGHT_DECAY] = 0.01;
        hyper[slot::BIAS_CORRECTION1] = 0.1;
        hyper[slot::BIAS_CORRECTION2] = 0.001;
        Ok(Self {
            x: normals.buffer(device, 2 * number, elements)?,
            dy: normals.buffer(device, 2 * number + 1, elements)?,
            first: Buffer::zeros(device, elements)?,
            second: Buffer::zeros(device, elements)?,
            labels: Buffer::from_slice(device, &labels)?,
            inverse_rms: Buffer::from_slice(device, &vec![1.0; rows])?,
            gain: Buffer::from_slice(device, &[1.0; COLUMNS])?,
            dgain: Buffer::zeros(device, COLUMNS)?,
            hyper: Buffer::from_slice(device, &hyper)?,
            one: Buffer::from_slice(device, &[1.0])?,
        })
    }

    fn shape(&self) -> [usize; 2] {
        [self.labels.len(), COLUMNS]
    }

    fn x<'b, 's>(&'b self, step: &Step<'s>) -> Result<Lent<'b, 's>> {
        step.lend(&self.x, self.shape())
    }

    fn dy<'b, 's>(&'b self, step: &Step<'s>) -> Result<Lent<'b, 's>> {
        step.lend(&self.dy, self.shape())
    }

    fn gain<'b, 's>(&'b self, step: &Step<'s>) -> Result<Lent<'b, 's>> {
        step.lend(&self.gain, [COLUMNS])
    }

    fn labels<'b, 's>(&'b self, step: &Step<'s>) -> Result<Lent<'b, 's, u32>> {
        step.lend(&self.labels, [self.labels.len()])
    }
}

/// Normal numbers, made once: larger tensors repeat them.
pub(crate) struct Normals(Vec<f32>);

impl Normals {
    const PERIOD: usize = 1 << 22;

    /// Each the sum of twelve uniform numbers, less 6.
    pub(crate) fn new() -> Self {
        let mut random = SplitMix64::new(7);
        Self((0..Self::PERIOD).map(|_| (0..12).map(|_| random.unit()).sum::<f32>() - 6.0).collect())
    }

    /// A tensor's worth, from another place for another number.
    fn buffer(&self, device: &Device, number: usize, elements: usize) -> Result<Buffer<f32>> {
        let mut buffer = Buffer::zeros(device, elements)?;
        let mut done = 0;
        let mut from = number * 65_537 % Self::PERIOD;
        while done < elements {
            let part = &self.0[from..][..(elements - done).min(Self::PERIOD - from)];
            buffer.write(done, part)?;
            done += part.len();
            from = 0;
        }
        Ok(buffer)
    }
}
