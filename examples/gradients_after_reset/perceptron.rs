//! A perceptron with explicit forward and backward passes, so that its activations can be stored
//! anywhere: in saved tensors, or in a pool with ztensor's bug.

use super::pool::Pool;
use super::run::Run;
use crate::support::Random;
use stepscope::parameters::Initializer;
use stepscope::tensor::{Lent, Saved, Source};
use stepscope::{
    Arena, Buffer, Capacity, Device, EagerStep, Gradients, Parameter, ParameterSpec, Parameters, Result, Step, Tape,
    Tensor, ops,
};

/// Batches per run.
pub(crate) const BATCHES: usize = 4;
/// Samples per batch.
pub(crate) const ROWS: usize = 6;
/// The width of each layer's input and output, and the number of classes.
pub(crate) const WIDTH: usize = 64;

/// Samples, `[ROWS, WIDTH]`, and their labels.
struct Batch {
    x: Vec<f32>,
    labels: Vec<u32>,
}

/// Three layers with GELU between them; every activation is `[ROWS, WIDTH]`.
pub(crate) struct Perceptron {
    weights: Vec<Buffer<f32>>,
    gradients: Vec<Buffer<f32>>,
}

/// A store for the tensors that backward needs, all of shape `[ROWS, WIDTH]`.
pub(crate) trait Keeper<'s> {
    fn keep(&mut self, step: &Step<'s>, tensor: Tensor<'s>) -> Result<usize>;
    fn kept(&self, step: &Step<'s>, number: usize) -> Result<impl Source<'s, f32>>;
}

/// Stores tensors as stepscope does: saved for the rest of the step.
impl<'s> Keeper<'s> for Vec<Saved<'s>> {
    fn keep(&mut self, _: &Step<'s>, tensor: Tensor<'s>) -> Result<usize> {
        self.push(tensor.save());
        Ok(self.len() - 1)
    }

    fn kept(&self, _: &Step<'s>, number: usize) -> Result<impl Source<'s, f32>> {
        Ok(self[number])
    }
}

/// The results of forward that backward needs, as the store's numbers.
struct Activations<'s> {
    loss: f32,
    /// -1 at each row's label, else 0.
    less: Saved<'s>,
    inputs: [usize; Perceptron::LAYERS],
    before_gelu: Vec<usize>,
    probabilities: usize,
}

fn arena(device: &Device) -> Result<Arena> {
    Arena::builder(device).capacity(Capacity::mib(1)).build()
}

impl Perceptron {
    const LAYERS: usize = 3;
    const WEIGHT: f32 = 1.0 / ROWS as f32;

    /// Creates weights, and the same values as parameters for a tape.
    fn new(device: &Device) -> Result<(Self, Parameters, [Parameter; Self::LAYERS])> {
        let mut spec = ParameterSpec::builder();
        let handles = ["a", "b", "c"].map(|name| spec.add(name, [WIDTH, WIDTH], Initializer::Uniform { bound: 0.25 }));
        let parameters = Parameters::new(device, &spec.build()?, 5)?;
        let buffer = |handle| Buffer::from_slice(device, &parameters.read(handle)?);
        let zeros = |_| Buffer::zeros(device, WIDTH * WIDTH);
        let weights = handles.into_iter().map(buffer).collect::<Result<_>>()?;
        let gradients = handles.into_iter().map(zeros).collect::<Result<_>>()?;
        Ok((Self { weights, gradients }, parameters, handles))
    }

    /// Returns random rows of `WIDTH` numbers, with labels below `WIDTH`.
    fn batches() -> Vec<Batch> {
        let mut random = Random::new(13);
        let mut batch = || Batch { x: random.normals(ROWS * WIDTH), labels: random.belows(ROWS, WIDTH as u32) };
        (0..BATCHES).map(|_| batch()).collect()
    }

    fn forward<'s>(
        &self,
        step: &EagerStep<'s>,
        keeper: &mut impl Keeper<'s>,
        batch: &Batch,
    ) -> Result<Activations<'s>> {
        let labels = step.upload_indices(&batch.labels, [ROWS])?;
        let mut less = vec![0.0; ROWS * WIDTH];
        batch.labels.iter().enumerate().for_each(|(row, &label)| less[row * WIDTH + label as usize] = -1.0);
        let less = step.upload(&less, [ROWS, WIDTH])?.save();
        let mut inputs = [keeper.keep(step, step.upload(&batch.x, [ROWS, WIDTH])?)?; Self::LAYERS];
        let mut before_gelu = Vec::new();
        for layer in 1..Self::LAYERS {
            let y = ops::matmul(step, &keeper.kept(step, inputs[layer - 1])?, &self.weight(step, layer - 1)?)?;
            let y = keeper.keep(step, y)?;
            before_gelu.push(y);
            let activated = ops::gelu(step, &keeper.kept(step, y)?)?;
            inputs[layer] = keeper.keep(step, activated)?;
        }
        let last = Self::LAYERS - 1;
        let logits = ops::matmul(step, &keeper.kept(step, inputs[last])?, &self.weight(step, last)?)?;
        let (loss, _) = ops::cross_entropy(step, &logits, &labels)?;
        let probabilities = keeper.keep(step, ops::softmax(step, &logits)?)?;
        Ok(Activations { loss: step.read_scalar(&loss)?, less, inputs, before_gelu, probabilities })
    }

    fn backward<'s>(&mut self, step: &Step<'s>, keeper: &mut impl Keeper<'s>, forward: &Activations<'s>) -> Result<()> {
        let errors = ops::add(step, &keeper.kept(step, forward.probabilities)?, &forward.less)?;
        let mut dy = keeper.keep(step, ops::scale(step, &errors, Self::WEIGHT)?)?;
        for layer in (0..Self::LAYERS).rev() {
            let mut dx = None;
            if layer > 0 {
                let form = ops::Gemm::new(ROWS, WIDTH, WIDTH).transpose_b();
                let mut out = step.empty([ROWS, WIDTH])?;
                let (dy, weight) = (keeper.kept(step, dy)?, self.weight(step, layer)?);
                ops::gemm_into(step, &form, &dy, &weight, None::<&Tensor<'s>>, &mut out)?;
                drop((dy, weight));
                dx = Some(keeper.keep(step, out)?);
            }
            let form = ops::Gemm::new(WIDTH, WIDTH, ROWS).transpose_a().accumulate();
            let (x, upstream) = (keeper.kept(step, forward.inputs[layer])?, keeper.kept(step, dy)?);
            let mut gradient = step.lend_mut(&mut self.gradients[layer], [WIDTH, WIDTH])?;
            ops::gemm_into(step, &form, &x, &upstream, None::<&Tensor<'s>>, &mut gradient)?;
            drop((x, upstream));
            if let Some(dx) = dx {
                let (pre, dx) = (keeper.kept(step, forward.before_gelu[layer - 1])?, keeper.kept(step, dx)?);
                let before = ops::launch::gelu_backward(step, &pre, &dx)?;
                drop((pre, dx));
                dy = keeper.keep(step, before)?;
            }
        }
        Ok(())
    }

    fn weight<'b, 's>(&'b self, step: &Step<'s>, layer: usize) -> Result<Lent<'b, 's>> {
        step.lend(&self.weights[layer], [WIDTH, WIDTH])
    }

    fn push(&self, run: &mut Run, loss: f32) -> Result<()> {
        let read = |buffers: &[Buffer<f32>]| buffers.iter().map(Buffer::read).collect::<Result<Vec<_>>>();
        let gradients = read(&self.gradients)?;
        run.push(loss, gradients.concat(), read(&self.weights)?.concat(), &gradients[Self::LAYERS - 1]);
        Ok(())
    }

    fn zero_gradients(&mut self) -> Result<()> {
        self.gradients.iter_mut().try_for_each(|gradient| gradient.write(0, &[0.0; WIDTH * WIDTH]))
    }

    /// Runs every batch on a tape, with a reset between batches.
    pub(crate) fn by_tape(device: &Device) -> Result<Run> {
        let (mut shown, parameters, handles) = Self::new(device)?;
        let (mut arena, mut run) = (arena(device)?, Run::default());
        for batch in Self::batches() {
            let mut gradients = Gradients::zeros(&parameters)?;
            let loss = arena.step(|step| {
                let tape = Tape::new(step, &parameters);
                let mut h = tape.input(step.upload(&batch.x, [ROWS, WIDTH])?);
                for (layer, handle) in handles.into_iter().enumerate() {
                    h = if layer == 0 {
                        tape.linear(&h, handle, None)?
                    } else {
                        tape.linear(&h.gelu()?, handle, None)?
                    };
                }
                let labels = step.upload_indices(&batch.labels, [ROWS])?;
                let loss = tape.cross_entropy(&h, labels)?;
                tape.backward(&loss, &mut gradients)?;
                step.read_scalar(loss.value())
            })?;
            for (buffer, handle) in shown.gradients.iter_mut().zip(handles) {
                buffer.write(0, &gradients.read(handle)?)?;
            }
            shown.push(&mut run, loss)?;
        }
        Ok(run)
    }

    /// Runs every batch with explicit passes on a pool that is reset between batches.
    pub(crate) fn by_pool(device: &Device, loses_pins: bool) -> Result<Run> {
        let (mut perceptron, ..) = Self::new(device)?;
        let (mut arena, mut pool, mut run) = (arena(device)?, Pool::new(device)?, Run::default());
        for batch in Self::batches() {
            perceptron.zero_gradients()?;
            let loss = arena.step(|step| {
                let forward = perceptron.forward(step, &mut pool, &batch)?;
                pool.pin_all();
                pool.recycle();
                perceptron.backward(step, &mut pool, &forward)?;
                Ok(forward.loss)
            })?;
            pool.reset(loses_pins);
            perceptron.push(&mut run, loss)?;
        }
        Ok(run)
    }

    /// Runs every batch with explicit passes on saved tensors, and calls `between` between forward
    /// and backward.
    pub(crate) fn by_hand(device: &Device, between: impl Fn(&mut EagerStep<'_>) -> Result<()>) -> Result<Run> {
        let (mut perceptron, ..) = Self::new(device)?;
        let (mut arena, mut run) = (arena(device)?, Run::default());
        for batch in Self::batches() {
            perceptron.zero_gradients()?;
            let loss = arena.step(|step| {
                let mut saved = Vec::new();
                let forward = perceptron.forward(step, &mut saved, &batch)?;
                between(step)?;
                perceptron.backward(step, &mut saved, &forward)?;
                Ok(forward.loss)
            })?;
            perceptron.push(&mut run, loss)?;
        }
        Ok(run)
    }
}
