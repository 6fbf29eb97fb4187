//! Models whose parts are recomputed, or run plainly.

use crate::support::Random;
use stepscope::autograd::RecomputeInput;
use stepscope::nn::{Dropout, Linear, Mlp, MultiHeadAttention, RmsNorm, SwiGlu};
use stepscope::ops::{self, Activation, AttentionConfig, Generator};
use stepscope::tensor::{Indices, Saved, Stored};
use stepscope::{Arena, Device, Gradients, ParameterSpec, Parameters, Result, Step, Tape, Var, bf16};

pub(crate) const BATCH: usize = 2;
pub(crate) const TOKENS: usize = 9;
pub(crate) const WIDTH: usize = 32;
pub(crate) const HEADS: usize = 2;
pub(crate) const CLASSES: usize = 5;
pub(crate) const SEED: u64 = 11;

/// Runs `f(kept)` with or without recomputing; `kept` is passed to each.
pub(crate) fn either<'t, 's, K: RecomputeInput<'s> + 't, S: Stored>(
    on: bool,
    tape: &Tape<'t, 's>,
    (kept, as_it_is): (K, K::Lent<'s>),
    f: impl for<'i> Fn(&Tape<'_, 'i>, K::Lent<'i>) -> Result<Var<'i, S>> + 'static,
) -> Result<Var<'s, S>> {
    if on { tape.recompute(kept, f) } else { f(tape, as_it_is) }
}

macro_rules! part {
    ($on:expr, $tape:expr, $kept:expr, $f:expr) => {
        either($on, $tape, ($kept, $kept), $f)
    };
}

/// A block of a transformer.
#[derive(Clone)]
pub(crate) struct Block {
    pub(crate) norms: [RmsNorm; 2],
    pub(crate) attention: MultiHeadAttention,
    pub(crate) mlp: SwiGlu,
    pub(crate) dropout: Dropout,
}

impl Block {
    pub(crate) fn forward<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s>, form: &AttentionConfig<'s>) -> Result<Var<'s>> {
        let h = self.norms[0].forward(tape, x)?;
        let h = self.dropout.forward(tape, &self.attention.forward_masked(tape, &h, form)?)?;
        let x = x.add(h)?;
        let h = self.mlp.forward_residual(tape, &self.norms[1].forward(tape, &x)?, &x)?;
        self.dropout.forward(tape, &h)
    }
}

/// All models, over one parameter spec.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) input: Linear,
    pub(crate) blocks: Vec<Block>,
    pub(crate) mlp: Mlp,
    pub(crate) head: Linear,
}

impl Model {
    pub(crate) fn new() -> (Self, ParameterSpec) {
        let mut spec = ParameterSpec::builder();
        let input = Linear::new(spec.at("input"), WIDTH, WIDTH);
        let blocks = (0..3)
            .map(|n| Block {
                norms: [0, 1].map(|norm| RmsNorm::new(spec.at(format!("{n}.norm{norm}")), WIDTH)),
                attention: MultiHeadAttention::new(spec.at(format!("{n}.attention")), WIDTH, HEADS).causal(),
                mlp: SwiGlu::new(spec.at(format!("{n}.mlp")), WIDTH, 3 * WIDTH, WIDTH),
                dropout: Dropout { p: 0.2 },
            })
            .collect();
        let mlp = Mlp::new(spec.at("mlp"), WIDTH, 2 * WIDTH, WIDTH);
        let head = Linear::new(spec.at("head"), WIDTH, CLASSES);
        (Self { input, blocks, mlp, head }, spec.build().unwrap())
    }
}

/// The inputs of a graph: the model and the step's inputs.
pub(crate) struct Given<'s> {
    pub(crate) model: Model,
    pub(crate) x: Saved<'s>,
    /// One for each token.
    pub(crate) labels: Indices<'s>,
    /// One for each sample.
    pub(crate) lengths: Saved<'s, u32>,
}

/// Computes a loss; the flag enables recomputing.
pub(crate) type Graph = for<'s> fn(bool, &Tape<'_, 's>, &Given<'s>) -> Result<Var<'s>>;

fn rows<'s>(x: &Var<'s>) -> Result<Var<'s>> {
    x.reshape([BATCH * TOKENS, WIDTH])
}

/// A transformer with dropout and masks: blocks, and the head with its loss, which is last on the
/// tape.
fn transformer<'s>(on: bool, tape: &Tape<'_, 's>, given: &Given<'s>) -> Result<Var<'s>> {
    let Given { model, labels, lengths, .. } = given;
    let mut x = model.input.forward(tape, &tape.input(given.x))?;
    for block in &model.blocks {
        let form = block.attention.config().lengths(*lengths);
        let block = block.clone();
        x = part!(on, tape, (x, form), move |tape, (x, form)| block.forward(tape, &x, &form))?;
    }
    // Drawn after the recomputed parts.
    let x = tape.dropout(&x, 0.1)?;
    let head = model.head;
    part!(on, tape, (x, *labels), move |tape, (x, labels)| {
        tape.cross_entropy_by(&head.forward(tape, &rows(&x)?)?, labels, ops::LabelRules::default().weighted(0.25))
    })
}

/// Recomputed parts inside recomputed parts, with each parameter in several of them.
fn nested<'s>(on: bool, tape: &Tape<'_, 's>, given: &Given<'s>) -> Result<Var<'s>> {
    let (mlp, block) = (given.model.mlp, given.model.blocks[0].clone());
    let x = mlp.forward(tape, &tape.input(given.x))?;
    let y = part!(on, tape, x, move |tape, x| {
        let within = block.clone();
        let y = part!(on, tape, x, move |tape, x| {
            let deeper = within.clone();
            let h = part!(on, tape, x, move |tape, x| mlp.forward_residual(tape, &x, &x))?;
            let h = deeper.forward(tape, &h, &deeper.attention.config())?;
            part!(on, tape, (h, x), move |tape, (h, x)| h.mul(deeper.norms[0].forward(tape, &x)?))
        })?;
        block.forward(tape, &y, &block.attention.config())
    })?;
    tape.mean(&mlp.forward_residual(tape, &y, &x)?)
}

/// A variable with many uses: before a recomputed part, several times in it, in another one and
/// after both. This makes the order of sums visible.
fn shared<'s>(on: bool, tape: &Tape<'_, 's>, given: &Given<'s>) -> Result<Var<'s>> {
    let Model { input, mlp, blocks, .. } = &given.model;
    let (mlp, norm) = (*mlp, blocks[0].norms[0]);
    let x = input.forward(tape, &tape.input(given.x))?;
    let before = norm.forward(tape, &x)?;
    let a = part!(on, tape, (x, before), move |tape, (x, before)| {
        let h = norm.forward(tape, &x)?;
        let h = mlp.forward_residual(tape, &h, &x)?.add(before)?;
        h.mul(x)?.mul(norm.forward(tape, &x)?)
    })?;
    // One variable twice, and an unused one.
    let b = part!(on, tape, [x, a, x], move |tape, [x, _, again]| { x.mul(0.3)?.add(mlp.forward(tape, &again)?) })?;
    let after = norm.forward(tape, &x)?.mul(b)?;
    tape.mean(&after.add(a)?.add(x)?)
}

/// Several results: an op's that is also used inside, the same twice, an unchanged input, a
/// constant, and an unused one.
fn several<'s>(on: bool, tape: &Tape<'_, 's>, given: &Given<'s>) -> Result<Var<'s>> {
    let Model { input, mlp, .. } = given.model;
    let x = input.forward(tape, &tape.input(given.x))?;
    let constant = tape.input(given.x);
    let results = if on {
        tape.recompute_all((x, constant), move |tape, (x, constant)| {
            let h = mlp.forward(tape, &x)?;
            let y = mlp.forward_residual(tape, &h, &constant)?;
            let unused = h.mul(2.0)?;
            Ok([h, y, h, x, constant, unused])
        })?
    } else {
        let h = mlp.forward(tape, &x)?;
        let y = mlp.forward_residual(tape, &h, &constant)?;
        let unused = h.mul(2.0)?;
        [h, y, h, x, constant, unused]
    };
    let [h, y, again, as_it_is, constant, _] = results;
    let x = x.mul(as_it_is)?; // one variable, unless it is copied
    assert_eq!([h, y, as_it_is, constant].map(|var| var.wants_gradient()), [true, true, true, false]);
    let sum = h.mul(y)?.add(again.mul(x)?)?;
    tape.mean(&h.mul(sum)?.add(constant)?)
}

/// A graph in which only parameters have gradients; the loss is one of the results.
fn inputs_alone<'s>(on: bool, tape: &Tape<'_, 's>, given: &Given<'s>) -> Result<Var<'s>> {
    let Model { mlp, head, .. } = given.model;
    let kept = (tape.input(given.x), vec![given.labels], Some(given.x), None::<Saved<'s, u32>>);
    part!(on, tape, kept.clone(), move |tape, (x, labels, again, none)| {
        assert!(none.is_none() && !x.wants_gradient());
        let h = mlp.forward(tape, &x)?.add(tape.input(again.expect("the input is kept")))?;
        tape.cross_entropy_by(&head.forward(tape, &rows(&h)?)?, labels[0], ops::LabelRules::default().weighted(0.5))
    })
}

/// A precision set by the closure, in which all later ops multiply, also backward.
fn precision<'s>(on: bool, tape: &Tape<'_, 's>, given: &Given<'s>) -> Result<Var<'s>> {
    let (mlp, other) = (given.model.mlp, given.model.input);
    tape.step().set_precision(ops::Precision::F32);
    let x = other.forward(tape, &tape.input(given.x))?;
    let y = part!(on, tape, x, move |tape, x| {
        let h = mlp.forward(tape, &x)?;
        tape.step().set_precision(ops::Precision::Tf32);
        mlp.forward(tape, &h)
    })?;
    let y = other.forward(tape, &y)?;
    tape.step().set_precision(ops::Precision::F32);
    tape.mean(&y.mul(y)?)
}

/// Variables of BF16, and of both types.
fn stored<'s>(on: bool, tape: &Tape<'_, 's>, given: &Given<'s>) -> Result<Var<'s>> {
    let Model { input, mlp, blocks, .. } = &given.model;
    let (mlp, norm) = (*mlp, blocks[1].norms[0]);
    let x: Var<'s> = input.forward(tape, &tape.input(given.x))?;
    let half: Var<'s, bf16> = tape.to_bf16(&x)?;
    let y = part!(on, tape, (half, x), move |tape, (half, x)| {
        let h = narrow_block(tape, &mlp, &norm, &half)?;
        h.add(tape.to_bf16(&x)?)
    })?;
    let y = part!(on, tape, y, move |tape, y| narrow_block(tape, &mlp, &norm, &y))?;
    tape.mean(&tape.to_f32(&y)?.add(x)?)
}

fn narrow_block<'s, S: Activation>(
    tape: &Tape<'_, 's>,
    mlp: &Mlp,
    norm: &RmsNorm,
    x: &Var<'s, S>,
) -> Result<Var<'s, S>> {
    mlp.forward_residual(tape, &norm.forward(tape, x)?, x)
}

pub(crate) const GRAPHS: [(&str, Graph); 7] = [
    ("transformer", transformer),
    ("nested", nested),
    ("shared", shared),
    ("several", several),
    ("inputs only", inputs_alone),
    ("precision", precision),
    ("stored", stored),
];

/// Weights with a BF16 copy, gradients with initial values, and random numbers.
pub(crate) struct Fixture {
    pub(crate) model: Model,
    pub(crate) weights: Parameters,
    pub(crate) gradients: Gradients,
    pub(crate) generator: Generator,
}

impl Fixture {
    pub(crate) fn new(device: &Device) -> Self {
        let (model, spec) = Model::new();
        let weights = Parameters::new(device, &spec, 3).unwrap().with_bf16_copy().unwrap();
        let gradients = Gradients::zeros(&weights).unwrap();
        Self { model, weights, gradients, generator: Generator::new(device, SEED).unwrap() }
    }

    /// Runs two passes: the first overwrites the gradients, the second adds to them. Returns the
    /// loss of the second.
    pub(crate) fn passes<'s>(
        &mut self,
        step: &Step<'s>,
        (on, graph): (bool, Graph),
        x: Saved<'s>,
        labels: Indices<'s>,
        lengths: Saved<'s, u32>,
    ) -> Result<Saved<'s>> {
        let Self { model, weights, gradients, generator } = self;
        let given = Given { model: model.clone(), x, labels, lengths };
        let mut last = None;
        for afresh in [true, false] {
            let tape = Tape::new(step, weights).with_generator(generator);
            let loss = graph(on, &tape, &given)?;
            if afresh {
                tape.backward_overwrite(&loss, gradients)?;
            } else {
                tape.backward(&loss, gradients)?;
            }
            last = Some(*loss.value());
        }
        Ok(last.expect("the loop runs"))
    }
}

/// Returns the host values of a step: x, labels and lengths.
pub(crate) fn values(seed: u64) -> (Vec<f32>, Vec<u32>, Vec<u32>) {
    let mut random = Random::new(seed);
    let labels = random.belows(BATCH * TOKENS, CLASSES as u32);
    (random.normals(BATCH * TOKENS * WIDTH), labels, vec![TOKENS as u32, 5])
}

/// Returns the loss and all gradients of eager passes, as bits, of two steps.
pub(crate) fn eager(arena: &mut Arena, run: (bool, Graph)) -> Vec<Vec<u32>> {
    let mut world = Fixture::new(arena.device());
    let mut found = Vec::new();
    for seed in 0..2 {
        let (x, labels, lengths) = values(seed);
        let loss = arena.step(|step| {
            let x = step.upload(&x, [BATCH, TOKENS, WIDTH])?.save();
            let labels = step.upload_indices(&labels, [labels.len()])?;
            let lengths = step.upload(&lengths, [BATCH])?.save();
            let loss = world.passes(step, run, x, labels, lengths)?;
            step.read(&loss)
        });
        found.push(crate::support::bits(&loss.unwrap()));
        found.push(crate::support::bits(&world.gradients.read_flat().unwrap()));
    }
    found
}
