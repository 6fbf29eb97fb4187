//! Nothing that happens to memory between forward and backward, or between steps, changes a bit.
//!
//! The bug that this guards against (ztensor on GB10): with a pool reset between batches the first batch's gradients
//! were right and every loss was, but the head's gradient fell from 3.74 to 2.5e-6, 2e-18 and 0 over the next three,
//! because saved activations were overwritten by later allocations. [`a_pool_that_drops_its_pins_is_seen`] rebuilds
//! that pool on the same kernels and shows that the comparison used here finds it.

#![forbid(unsafe_code)]

#[path = "step_hazards/perceptron.rs"]
mod perceptron;
mod support;

use perceptron::Perceptron;
use stepscope::{
    AdamW, AdamWConfig, Arena, Capacity, Device, Eager, Error, Gradients, Initializer, Layout, Parameter, Parameters,
    Result, Stack, Step, Tape, Var, ops,
};
use support::{Random, bits, on_each_device, relative_l2};

const BATCHES: usize = 4;
const ROWS: usize = 6;
const TOKENS: usize = 5;
const WIDTH: usize = 64;
const HIDDEN: usize = 96;
const CLASSES: usize = 3;

/// Samples and their labels.
struct Batch {
    x: Vec<f32>,
    labels: Vec<u32>,
}

fn batches() -> Vec<Batch> {
    let mut random = Random::new(11);
    let mut batch = || Batch { x: random.normals(ROWS * TOKENS * WIDTH), labels: random.belows(ROWS, CLASSES as u32) };
    (0..BATCHES).map(|_| batch()).collect()
}

/// A transformer layer with a head: every kind of saved tensor.
struct Model {
    norm: Parameter,
    qkv: Stack,
    qk_norm: Stack,
    out: Parameter,
    inner: [Parameter; 2],
    outer: [Parameter; 2],
    head: [Parameter; 2],
}

impl Model {
    fn new() -> (Self, Layout) {
        let mut layout = Layout::builder();
        let qkv = layout.add_stack(3, |at| ["q", "k", "v"][at].into(), [WIDTH, WIDTH], Initializer::fan_in(WIDTH));
        let qk_norm = layout.add_stack(2, |at| format!("qk_norm{at}"), [64], Initializer::Constant(1.0));
        let mut matrix = |name: &str, rows, cols| layout.add(name, [rows, cols], Initializer::fan_in(rows));
        let out = matrix("out", WIDTH, WIDTH);
        let (inner, outer) = (matrix("inner", WIDTH, HIDDEN), matrix("outer", HIDDEN, WIDTH));
        let head = matrix("head", WIDTH, CLASSES);
        let mut vector = |name: &str, len, start| layout.add(name, [len], Initializer::Constant(start));
        let model = Self {
            norm: vector("norm", WIDTH, 1.0),
            qkv,
            qk_norm,
            out,
            inner: [inner, vector("inner.bias", HIDDEN, 0.0)],
            outer: [outer, vector("outer.bias", WIDTH, 0.0)],
            head: [head, vector("head.bias", CLASSES, 0.0)],
        };
        (model, layout.build().unwrap())
    }

    /// The loss of samples `rows` of a batch, a part of the batch's mean.
    fn loss<'s>(
        &self,
        step: &Eager<'s>,
        tape: &Tape<'_, 's>,
        batch: &Batch,
        rows: std::ops::Range<usize>,
    ) -> Result<Var<'s>> {
        let sample = TOKENS * WIDTH;
        let x = step.upload(&batch.x[rows.start * sample..rows.end * sample], [rows.len(), TOKENS, WIDTH])?;
        let labels = step.upload(&batch.labels[rows.clone()], [rows.len()])?.save();
        let x = tape.input(x);
        let qkv = tape.norm_project(&x, self.norm, 1e-6, &self.qkv)?;
        let mixed = tape.attention(&qkv, &self.qk_norm, 1e-6, 0.125)?;
        let h = tape.linear_residual(&mixed, self.out, None, &x)?;
        let inner = tape.linear_gelu(&h, self.inner[0], Some(self.inner[1]))?;
        let h = tape.linear_residual(&tape.tanh(&inner)?, self.outer[0], Some(self.outer[1]), &h)?;
        let logits = tape.linear(&tape.mean_tokens(&h)?, self.head[0], Some(self.head[1]))?;
        tape.cross_entropy(&logits, labels, 1.0 / ROWS as f32)
    }
}

/// What a run gives for each batch.
#[derive(Default)]
struct Run {
    losses: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    weights: Vec<Vec<f32>>,
    head_l2: Vec<f64>,
}

impl Run {
    /// The batches whose loss, gradients or weights have other bits than `other`'s.
    fn differences(&self, other: &Self) -> Vec<usize> {
        assert_eq!(self.losses.len(), other.losses.len());
        (0..self.losses.len())
            .filter(|&batch| {
                self.losses[batch].to_bits() != other.losses[batch].to_bits()
                    || bits(&self.gradients[batch]) != bits(&other.gradients[batch])
                    || bits(&self.weights[batch]) != bits(&other.weights[batch])
            })
            .collect()
    }

    #[track_caller]
    fn assert_same(&self, other: &Self) {
        let differences = self.differences(other);
        assert!(differences.is_empty(), "batches {differences:?} differ");
    }

    fn push(&mut self, loss: f32, gradients: &Gradients, parameters: &Parameters, head: Parameter) {
        self.losses.push(loss);
        self.gradients.push(gradients.flat().read().unwrap());
        self.weights.push(parameters.flat().read().unwrap());
        self.head_l2.push(l2(&gradients.read(head).unwrap()));
    }
}

fn l2(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

/// Prints the L2 norm of the head's gradient by batch.
fn print_table(columns: &[(&str, &Run)]) {
    println!("{:>8}{}", "batch", columns.iter().map(|(name, _)| format!("{name:>26}")).collect::<String>());
    for batch in 0..columns[0].1.head_l2.len() {
        let row = columns.iter().map(|(_, run)| format!("{:>26.6e}", run.head_l2[batch])).collect::<String>();
        println!("{batch:>8}{row}");
    }
}

/// A model in training.
struct Trainer {
    model: Model,
    parameters: Parameters,
    gradients: Gradients,
    optimizer: AdamW,
    run: Run,
}

impl Trainer {
    fn new(device: &Device) -> Self {
        let (model, layout) = Model::new();
        let parameters = Parameters::new(device, &layout, 3).unwrap();
        let gradients = Gradients::zeros(&parameters).unwrap();
        let config = AdamWConfig { learning_rate: 1e-2, clip: Some(1.0), ..AdamWConfig::default() };
        let optimizer = AdamW::new(&parameters, config).unwrap();
        Self { model, parameters, gradients, optimizer, run: Run::default() }
    }

    /// Forward, backward and update within `step`, in micro-batches of `rows`.
    fn train(&mut self, step: &mut Eager<'_>, batch: &Batch, rows: usize) -> Result<()> {
        self.gradients.zero(step)?;
        let mut loss = 0.0;
        for start in (0..ROWS).step_by(rows) {
            loss += self.accumulate(step, batch, start..ROWS.min(start + rows))?;
        }
        self.update(step)?;
        self.run.push(loss, &self.gradients, &self.parameters, self.model.head[0]);
        Ok(())
    }

    /// Forward and backward of some samples; their part of the loss.
    fn accumulate(&mut self, step: &Eager<'_>, batch: &Batch, rows: std::ops::Range<usize>) -> Result<f32> {
        let tape = Tape::new(step, &self.parameters);
        let loss = self.model.loss(step, &tape, batch, rows)?;
        tape.backward(&loss, &mut self.gradients)?;
        step.read_scalar(loss.value())
    }

    fn update(&mut self, step: &Step<'_>) -> Result<()> {
        self.optimizer.advance()?;
        let _squared_norm = self.optimizer.apply(step, &mut self.parameters, &self.gradients)?;
        Ok(())
    }
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap()
}

/// Trains with a reset between batches, `before` having its way with the arena before each.
fn with_resets(device: &Device, mut before: impl FnMut(&mut Arena)) -> Run {
    let (mut arena, mut trainer) = (arena(device), Trainer::new(device));
    for batch in batches() {
        before(&mut arena);
        arena.step(|step| trainer.train(step, &batch, ROWS)).unwrap();
    }
    trainer.run
}

/// Fails unless the head's gradient is as large in every batch as gradients are that do not vanish.
fn assert_gradients_live(run: &Run) {
    assert_eq!(run.head_l2.len(), BATCHES);
    for (batch, l2) in run.head_l2.iter().enumerate() {
        assert!(*l2 > 0.05 * run.head_l2[0] && *l2 > 1e-2, "batch {batch}: {l2:e} of {:e}", run.head_l2[0]);
    }
    assert!(run.gradients.iter().flatten().all(|gradient| gradient.is_finite()));
}

/// Fills all that is left of a step's memory with NaN.
fn poison(step: &Step<'_>) {
    let mut len = 1 << 24;
    while len > 0 {
        match ops::fill(step, [len], f32::NAN) {
            Ok(_) => {}
            Err(Error::ArenaFull { .. }) => len /= 2,
            Err(error) => panic!("{error}"),
        }
    }
}

on_each_device! {
    /// The table of the bug: a reset between batches against no reset at all.
    fn resets_between_batches_change_no_bit(device: &Device) {
        let with_resets = with_resets(device, |_| {});
        // Memory never used twice: a fresh arena for each batch, all of them alive to the end.
        let (mut arenas, mut trainer) = (Vec::new(), Trainer::new(device));
        for batch in batches() {
            let mut fresh = arena(device);
            fresh.step(|step| trainer.train(step, &batch, ROWS)).unwrap();
            arenas.push(fresh);
        }
        let fresh_arenas = trainer.run;
        // All batches in one step.
        let mut trainer = Trainer::new(device);
        Arena::builder(device).capacity(Capacity::mib(32)).build().unwrap().step(|step| {
            batches().iter().try_for_each(|batch| trainer.train(step, batch, ROWS))
        }).unwrap();
        let one_step = trainer.run;
        print_table(&[("resets", &with_resets), ("a fresh arena each", &fresh_arenas), ("one step", &one_step)]);
        assert_gradients_live(&with_resets);
        assert!(with_resets.losses[BATCHES - 1].is_finite());
        with_resets.assert_same(&fresh_arenas);
        with_resets.assert_same(&one_step);
        assert_ne!(bits(&with_resets.weights[0]), bits(&with_resets.weights[1]));
    }

    /// The red proof: the same kernels on a pool with the bug.
    fn a_pool_that_drops_its_pins_is_seen(device: &Device) {
        let tape = Perceptron::by_tape(device);
        let keeps = Perceptron::by_pool(device, false);
        let loses = Perceptron::by_pool(device, true);
        print_table(&[("tape", &tape), ("pool that keeps pins", &keeps), ("pool that loses pins", &loses)]);
        assert_gradients_live(&tape);
        tape.assert_same(&keeps);
        // As it was seen: the first batch and every loss are right, and then the gradient is all but gone.
        assert_eq!(tape.differences(&loses), [1, 2, 3]);
        assert_eq!(bits(&tape.losses), bits(&loses.losses));
        assert!((1..BATCHES).all(|batch| loses.head_l2[batch] < 0.1 * tape.head_l2[batch]), "{:?}", loses.head_l2);
    }

    /// No kernel reads what it or another has not written.
    fn what_the_memory_held_before_changes_no_bit(device: &Device) {
        let clean = with_resets(device, |_| {});
        let poisoned = with_resets(device, |arena| arena.step(|step| {
            poison(step);
            Ok(())
        }).unwrap());
        clean.assert_same(&poisoned);
    }

    fn a_scratch_between_forward_and_backward_changes_no_bit(device: &Device) {
        let plain = Perceptron::by_hand(device, |_| {});
        let with_scratch = Perceptron::by_hand(device, |step| {
            step.scratch(|inner| {
                let _held = ops::fill(inner, [1000], 7.0)?;
                inner.scratch(|innermost| {
                    poison(innermost);
                    Ok(())
                })?;
                poison(inner);
                Ok(())
            }).unwrap();
        });
        assert_gradients_live(&plain);
        plain.assert_same(&with_scratch);
        plain.assert_same(&Perceptron::by_tape(device));
    }

    fn allocations_between_forward_and_backward_change_no_bit(device: &Device) {
        let mut elsewhere = arena(device);
        let mut runs = [false, true].map(|disturbed| {
            let (mut arena, mut trainer) = (arena(device), Trainer::new(device));
            for batch in batches() {
                let Trainer { model, parameters, gradients, run, .. } = &mut trainer;
                arena.step(|step| {
                    gradients.zero(step)?;
                    let tape = Tape::new(step, parameters);
                    let loss = model.loss(step, &tape, &batch, 0..ROWS)?;
                    if disturbed {
                        let _held = ops::fill(step, [100_000], f32::NAN)?;
                        elsewhere.step(|step| {
                            poison(step);
                            Ok(())
                        })?;
                    }
                    tape.backward(&loss, gradients)?;
                    run.push(step.read_scalar(loss.value())?, gradients, parameters, model.head[0]);
                    Ok(())
                }).unwrap();
            }
            trainer.run
        }).into_iter();
        let (plain, disturbed) = (runs.next().unwrap(), runs.next().unwrap());
        assert_gradients_live(&plain);
        plain.assert_same(&disturbed);
    }

    fn two_forwards_before_either_backward_change_no_bit(device: &Device) {
        let (mut arena, trainer) = (arena(device), Trainer::new(device));
        let [first, second, ..] = &batches()[..] else { unreachable!() };
        let parameters = &trainer.parameters;
        let gradients = || Gradients::zeros(parameters).unwrap();
        let alone = [first, second].map(|batch| {
            let mut gradients = gradients();
            arena.step(|step| {
                let tape = Tape::new(step, parameters);
                let loss = trainer.model.loss(step, &tape, batch, 0..ROWS)?;
                tape.backward(&loss, &mut gradients)
            }).unwrap();
            gradients.flat().read().unwrap()
        });
        let mut together = [gradients(), gradients()];
        arena.step(|step| {
            let tapes = (Tape::new(step, parameters), Tape::new(step, parameters));
            let first = trainer.model.loss(step, &tapes.0, first, 0..ROWS)?;
            let second = trainer.model.loss(step, &tapes.1, second, 0..ROWS)?;
            tapes.0.backward(&first, &mut together[0])?;
            tapes.1.backward(&second, &mut together[1])
        }).unwrap();
        for (alone, together) in alone.iter().zip(&together) {
            assert!(l2(alone) > 0.1);
            assert_eq!(bits(alone), bits(&together.flat().read().unwrap()));
        }
    }

    /// Samples one at a time: the same bits in one step as in a step each, and the whole batch's gradient.
    fn micro_batches_add_up(device: &Device) {
        let batch = &batches()[0];
        let (mut arena, mut trainer) = (arena(device), Trainer::new(device));
        arena.step(|step| trainer.train(step, batch, 1)).unwrap();
        let in_one_step = trainer.run;
        let mut trainer = Trainer::new(device);
        arena.step(|step| trainer.gradients.zero(step)).unwrap();
        let mut loss = 0.0;
        for row in 0..ROWS {
            loss += arena.step(|step| trainer.accumulate(step, batch, row..row + 1)).unwrap();
        }
        arena.step(|step| trainer.update(step)).unwrap();
        trainer.run.push(loss, &trainer.gradients, &trainer.parameters, trainer.model.head[0]);
        in_one_step.assert_same(&trainer.run);
        // Sums in another order: the bound of `tests/gradients.rs` for the 30 rows of the longest.
        let whole = &with_resets(device, |_| {});
        let exact: Vec<f64> = whole.gradients[0].iter().map(|&gradient| f64::from(gradient)).collect();
        let error = relative_l2(&in_one_step.gradients[0], &exact);
        assert!(error < 8.0 * 2f64.powi(-24) * 30f64.sqrt(), "{error:e}");
        assert!((in_one_step.losses[0] / whole.losses[0] - 1.0).abs() < 1e-6);
    }

    /// A step that fails half way gives its memory back, and a repeated one has the same bits.
    fn a_failed_step_can_be_repeated(device: &Device) {
        let undisturbed = with_resets(device, |_| {});
        let mut small = Arena::builder(device).capacity(Capacity::Bytes(64 << 10)).build().unwrap();
        let (mut arena, mut trainer) = (arena(device), Trainer::new(device));
        let mut failures = 0;
        for batch in batches() {
            // Too small for forward and backward; then one that panics after backward; then one that succeeds.
            let full = small.step(|step| trainer.train(step, &batch, ROWS));
            failures += u32::from(matches!(full, Err(Error::ArenaFull { capacity_bytes: 65_536, .. })));
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| arena.step(|step| {
                trainer.accumulate(step, &batch, 0..ROWS)?;
                poison(step);
                std::panic::resume_unwind(Box::new("planned")) as Result<()>
            })));
            failures += u32::from(panicked.is_err());
            arena.step(|step| trainer.train(step, &batch, ROWS)).unwrap();
        }
        assert_eq!(failures, 2 * BATCHES as u32);
        undisturbed.assert_same(&trainer.run);
    }
}
