//! A perceptron whose forward and backward are written out, so that what is kept between them can be kept anywhere:
//! in saved tensors, or in a pool with ztensor's bug.

use super::{BATCHES, Batch, ROWS, Run, WIDTH, arena, l2};
use crate::support::Random;
use stepscope::{
    Buffer, Device, Eager, Gradients, Initializer, Layout, Lent, Parameter, Parameters, Result, Saved, Source, Step,
    Tape, Tensor, ops,
};

/// Three layers with GELU between them; every activation is `[ROWS, WIDTH]`.
pub(super) struct Perceptron {
    weights: [Buffer<f32>; Self::LAYERS],
    gradients: [Buffer<f32>; Self::LAYERS],
}

/// Where forward keeps what backward needs, all of shape `[ROWS, WIDTH]`.
trait Keeper<'s> {
    fn keep(&mut self, step: &Step<'s>, tensor: Tensor<'s>) -> Result<usize>;
    fn kept(&self, step: &Step<'s>, number: usize) -> Result<impl Source<'s, f32>>;
}

/// As stepscope keeps it: saved for the rest of the step.
impl<'s> Keeper<'s> for Vec<Saved<'s>> {
    fn keep(&mut self, _: &Step<'s>, tensor: Tensor<'s>) -> Result<usize> {
        self.push(tensor.save());
        Ok(self.len() - 1)
    }

    fn kept(&self, _: &Step<'s>, number: usize) -> Result<impl Source<'s, f32>> {
        Ok(self[number])
    }
}

/// As ztensor kept it: a free list of slots, last in, first out, in which pins tell what backward still needs.
struct Pool {
    slots: Vec<Buffer<f32>>,
    free: Vec<usize>,
    used: Vec<usize>,
    pins: Vec<usize>,
    /// The bug: pins of a batch after the first reset are lost.
    loses_pins: bool,
}

impl Pool {
    fn new(device: &Device) -> Self {
        let slots: Vec<_> = (0..16).map(|_| Buffer::zeros(device, ROWS * WIDTH).unwrap()).collect();
        let free = (0..slots.len()).rev().collect();
        Self { slots, free, used: Vec::new(), pins: Vec::new(), loses_pins: false }
    }

    fn pin_all(&mut self) {
        if !self.loses_pins {
            self.pins.extend(&self.used);
        }
    }

    /// Frees every slot that is not pinned.
    fn recycle(&mut self) {
        let pins = &self.pins;
        let (kept, freed): (Vec<_>, Vec<_>) = self.used.drain(..).partition(|slot| pins.contains(slot));
        self.free.extend(freed);
        self.used = kept;
    }

    fn reset(&mut self, loses_pins: bool) {
        self.pins.clear();
        self.recycle();
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        self.loses_pins = loses_pins;
    }
}

impl<'s> Keeper<'s> for Pool {
    fn keep(&mut self, step: &Step<'s>, tensor: Tensor<'s>) -> Result<usize> {
        let slot = self.free.pop().expect("a free slot");
        self.used.push(slot);
        ops::copy_into(step, &tensor, &mut step.lend_mut(&mut self.slots[slot], tensor.shape())?)?;
        Ok(slot)
    }

    fn kept(&self, step: &Step<'s>, number: usize) -> Result<impl Source<'s, f32>> {
        step.lend(&self.slots[number], [ROWS, WIDTH])
    }
}

/// What forward leaves for backward, by the keeper's numbers.
struct Activations<'s> {
    loss: f32,
    /// -1 at each row's label, else 0.
    less: Saved<'s>,
    inputs: [usize; Perceptron::LAYERS],
    before_gelu: Vec<usize>,
    probabilities: usize,
}

impl Perceptron {
    const LAYERS: usize = 3;
    const WEIGHT: f32 = 1.0 / ROWS as f32;

    /// Some weights, and the same ones as parameters for a tape.
    fn new(device: &Device) -> (Self, Parameters, [Parameter; Self::LAYERS]) {
        let mut layout = Layout::builder();
        let handles =
            ["a", "b", "c"].map(|name| layout.add(name, [WIDTH, WIDTH], Initializer::Uniform { bound: 0.25 }));
        let parameters = Parameters::new(device, &layout.build().unwrap(), 5).unwrap();
        let buffer = |handle| Buffer::from_slice(device, &parameters.read(handle).unwrap()).unwrap();
        let zeros = |_| Buffer::zeros(device, WIDTH * WIDTH).unwrap();
        (Self { weights: handles.map(buffer), gradients: handles.map(zeros) }, parameters, handles)
    }

    /// Rows of `WIDTH` numbers, labels below `WIDTH`.
    fn batches() -> Vec<Batch> {
        let mut random = Random::new(13);
        let mut batch = || Batch { x: random.normals(ROWS * WIDTH), labels: random.belows(ROWS, WIDTH as u32) };
        (0..BATCHES).map(|_| batch()).collect()
    }

    fn forward<'s>(&self, step: &Eager<'s>, keeper: &mut impl Keeper<'s>, batch: &Batch) -> Result<Activations<'s>> {
        let labels = step.upload(&batch.labels, [ROWS])?;
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
        let (loss, _) = ops::cross_entropy(step, &logits, &labels, Self::WEIGHT)?;
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
                let before = ops::gelu_backward(step, &pre, &dx)?;
                drop((pre, dx));
                dy = keeper.keep(step, before)?;
            }
        }
        Ok(())
    }

    fn weight<'b, 's>(&'b self, step: &Step<'s>, layer: usize) -> Result<Lent<'b, 's>> {
        step.lend(&self.weights[layer], [WIDTH, WIDTH])
    }

    fn push(&self, run: &mut Run, loss: f32) {
        let gradients: Vec<Vec<f32>> = self.gradients.iter().map(|gradient| gradient.read().unwrap()).collect();
        run.losses.push(loss);
        run.head_l2.push(l2(&gradients[Self::LAYERS - 1]));
        run.gradients.push(gradients.concat());
        run.weights.push(self.weights.iter().flat_map(|weight| weight.read().unwrap()).collect());
    }

    fn zero_gradients(&mut self) {
        self.gradients.iter_mut().for_each(|gradient| gradient.write(0, &[0.0; WIDTH * WIDTH]).unwrap());
    }

    /// Every batch by a tape, with a reset between batches.
    pub(super) fn by_tape(device: &Device) -> Run {
        let (mut shown, parameters, handles) = Self::new(device);
        let (mut arena, mut run) = (arena(device), Run::default());
        for batch in Self::batches() {
            let mut gradients = Gradients::zeros(&parameters).unwrap();
            let loss = arena
                .step(|step| {
                    let tape = Tape::new(step, &parameters);
                    let mut h = tape.input(step.upload(&batch.x, [ROWS, WIDTH])?);
                    for (layer, handle) in handles.into_iter().enumerate() {
                        h = if layer == 0 {
                            tape.linear(&h, handle, None)?
                        } else {
                            tape.linear(&tape.gelu(&h)?, handle, None)?
                        };
                    }
                    let labels = step.upload(&batch.labels, [ROWS])?.save();
                    let loss = tape.cross_entropy(&h, labels, Self::WEIGHT)?;
                    tape.backward(&loss, &mut gradients)?;
                    step.read_scalar(loss.value())
                })
                .unwrap();
            for (buffer, handle) in shown.gradients.iter_mut().zip(handles) {
                buffer.write(0, &gradients.read(handle).unwrap()).unwrap();
            }
            shown.push(&mut run, loss);
        }
        run
    }

    /// Every batch by hand on a pool that is reset between batches.
    pub(super) fn by_pool(device: &Device, loses_pins: bool) -> Run {
        let (mut perceptron, ..) = Self::new(device);
        let (mut arena, mut pool, mut run) = (arena(device), Pool::new(device), Run::default());
        for batch in Self::batches() {
            perceptron.zero_gradients();
            let loss = arena
                .step(|step| {
                    let forward = perceptron.forward(step, &mut pool, &batch)?;
                    pool.pin_all();
                    pool.recycle();
                    perceptron.backward(step, &mut pool, &forward)?;
                    Ok(forward.loss)
                })
                .unwrap();
            pool.reset(loses_pins);
            perceptron.push(&mut run, loss);
        }
        run
    }

    /// Every batch by hand on saved tensors, `between` coming between forward and backward.
    pub(super) fn by_hand(device: &Device, between: impl Fn(&mut Eager<'_>)) -> Run {
        let (mut perceptron, ..) = Self::new(device);
        let (mut arena, mut run) = (arena(device), Run::default());
        for batch in Self::batches() {
            perceptron.zero_gradients();
            let loss = arena
                .step(|step| {
                    let mut saved = Vec::new();
                    let forward = perceptron.forward(step, &mut saved, &batch)?;
                    between(step);
                    perceptron.backward(step, &mut saved, &forward)?;
                    Ok(forward.loss)
                })
                .unwrap();
            perceptron.push(&mut run, loss);
        }
        run
    }
}
