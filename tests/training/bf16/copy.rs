//! The BF16 copy of f32 weights: whatever writes the weights, the copy holds each of them, rounded
//! once.

#![forbid(unsafe_code)]

use crate::support::{Random, bits, like, on_each_device};
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::error::Quantity;
use stepscope::ops;
use stepscope::optim::{ParameterGroup, ParameterGroups, Sgd, UpdateArguments, UpdateRule, UpdateTicket};
use stepscope::parameters::Initializer;
use stepscope::prelude::*;
use stepscope::tensor::{Shape, Source, Stored};
use stepscope::upload::Transfer;

const ROWS: usize = 6;
const COLS: usize = 7;

/// A rule made of ops, without knowledge of the copy. It can fail halfway.
struct Descent {
    fails: bool,
}

impl UpdateRule for Descent {
    fn name(&self) -> &'static str {
        "descent"
    }

    fn settings(&self, _: u64, _: &ParameterGroup) -> Vec<f32> {
        vec![-0.1]
    }

    fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
        assert!(arguments.copy.is_none(), "this rule does not write the copy");
        let change = ops::scale_by(step, &arguments.gradients, &arguments.settings)?;
        ops::add_assign(step, &mut arguments.weights, &change)?;
        let failed = Error::Misuse { op: "descent", expected: "no failure".into(), got: "one".into() };
        if self.fails { Err(failed) } else { Ok(()) }
    }
}

/// Two parameters, one of which does not end at a vector boundary, with their gradients and
/// optimizer.
struct Trained<R: UpdateRule> {
    w: Parameter,
    b: Parameter,
    weights: Parameters,
    gradients: Gradients,
    optimizer: Optimizer<R>,
}

fn spec() -> (ParameterSpec, Parameter, Parameter) {
    let mut spec = ParameterSpec::builder();
    let w = spec.add("w", [ROWS, COLS], Initializer::fan_in(ROWS));
    let b = spec.add("b", [COLS], Initializer::Constant(0.1));
    (spec.build().unwrap(), w, b)
}

impl<R: UpdateRule> Trained<R> {
    fn new(device: &Device, rule: R, groups: bool, copied: bool) -> Self {
        let (spec, w, b) = spec();
        let weights = Parameters::new(device, &spec, 3).unwrap();
        let weights = if copied { weights.with_bf16_copy().unwrap() } else { weights };
        let (gradients, optimizer) = (Gradients::zeros(&weights).unwrap(), Optimizer::new(&weights, rule).unwrap());
        let decay = ParameterGroup { weight_decay: Some(0.2), ..ParameterGroup::default() };
        let optimizer = if groups {
            optimizer.with_parameter_groups(&ParameterGroups::new().with(decay, |entry| entry.name() == "b")).unwrap()
        } else {
            optimizer
        };
        Self { w, b, weights, gradients, optimizer }
    }

    fn update(&mut self, ticket: UpdateTicket, step: &Step<'_>) -> Result<()> {
        ops::fill_into(step, &mut self.gradients.lend_mut(step, self.w)?, 0.3)?;
        ops::fill_into(step, &mut self.gradients.lend_mut(step, self.b)?, -0.7)?;
        self.optimizer.apply(ticket, step, &mut self.weights, &self.gradients)
    }

    /// Makes eager updates, and as many replays. The weights must be the same with and without a
    /// copy, and the copy must be their rounding.
    fn updates(device: &Device, rule: impl Fn() -> R, groups: bool) {
        let [plain, copied] = [false, true].map(|copied| {
            let mut arena = arena(device);
            let mut model = Self::new(device, rule(), groups, copied);
            for _ in 0..3 {
                let ticket = model.optimizer.advance().unwrap();
                arena.step(|step| model.update(ticket, step)).unwrap();
                if copied {
                    assert_rounded(&model.weights);
                }
            }
            let none = HostInputs::new();
            let mut captured = arena
                .capture(model, &none, |step, model, slots| model.update(UpdateTicket::each_replay(slots), step))
                .unwrap();
            for _ in 0..3 {
                captured.state_mut().optimizer.advance().unwrap().leave_to_replay();
                captured.replay(&none).unwrap();
                if copied {
                    assert_rounded(&captured.state().weights);
                }
            }
            bits(&captured.state().weights.read_flat().unwrap())
        });
        assert_eq!(plain, copied);
    }
}

/// A linear classifier of samples stored as S, without rounding of its own.
struct Linear {
    w: Parameter,
}

impl Linear {
    fn state(device: &Device) -> TrainState<Self> {
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [ROWS, COLS], Initializer::fan_in(ROWS));
        let config = AdamW { learning_rate: 0.05, ..AdamW::default() };
        TrainState::new(device, Self { w }, &spec.build().unwrap(), 7, config).unwrap()
    }
}

impl Model for Linear {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let x = match batch.input::<bf16>(0) {
            Ok(halves) => tape.to_f32(&tape.input(halves))?,
            Err(_) => tape.input(batch.input::<f32>(0)?),
        };
        tape.linear(&x, self.w, None)
    }
}

/// HostBatch and their labels.
struct Points<S> {
    x: Vec<S>,
    labels: Vec<u32>,
}

impl<S: Stored> Points<S> {
    /// Returns three batches of an odd number of samples, of BF16 values, with `wrong` in a sample
    /// of the last.
    fn batches(wrong: Option<f32>) -> Vec<Vec<Self>> {
        let mut random = Random::new(5);
        let mut batches: Vec<_> = (0..3)
            .map(|_| {
                let x = random.normals(5 * ROWS).into_iter().map(|x| S::narrow(bf16::from_f32(x).to_f32())).collect();
                vec![Self { x, labels: random.belows(5, COLS as u32) }]
            })
            .collect();
        if let Some(wrong) = wrong {
            batches[2][0].x[3 * ROWS + 1] = S::narrow(wrong);
        }
        batches
    }

    /// Checks the training state after an epoch of these batches. Then trains on an epoch whose
    /// last batch has an infinity.
    fn train(
        device: &Device,
        state: TrainState<Linear>,
        captured: bool,
        look: impl FnOnce(&TrainState<Linear>),
    ) -> Result<()> {
        let mut arena = arena(device);
        let mut trainer = match captured {
            true => Trainer::captured(&mut arena, state, &Self::batches(None)[0][0])?,
            false => Trainer::eager(&mut arena, state),
        };
        let epoch = |trainer: &mut Trainer<'_, _>, wrong| {
            let batches = Self::batches(wrong).into_iter().map(Ok);
            trainer.fit(batches).map(drop)
        };
        assert_eq!(epoch(&mut trainer, None), Ok(()));
        look(trainer.state());
        epoch(&mut trainer, Some(f32::INFINITY))
    }
}

impl<S: Stored> HostBatch for Points<S> {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        HostInputs::new().with(&self.x, [self.len(), ROWS])?.with(&self.labels, [self.len()])
    }
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

/// Returns the copy, as bits.
fn copy(weights: &Parameters) -> Vec<u16> {
    weights.bf16_copy().expect("a copy").read().unwrap().iter().map(|half| half.to_bits()).collect()
}

#[track_caller]
fn assert_rounded(weights: &Parameters) {
    let rounded = weights.read_flat().unwrap().into_iter().map(|weight| bf16::from_f32(weight).to_bits());
    assert_eq!(copy(weights), rounded.collect::<Vec<_>>());
}

on_each_device! {
    fn updates_write_copy(device: &Device) {
        for groups in [false, true] {
            Trained::updates(device, || AdamW { learning_rate: 0.01, clip: Some(0.5), ..AdamW::default() }, groups);
            Trained::updates(device, || Sgd { learning_rate: 0.01, momentum: 0.9, ..Sgd::default() }, groups);
        }
    }

    /// Tests rules without knowledge of the copy.
    fn any_rule_updates_copy(device: &Device) {
        Trained::updates(device, || Descent { fails: false }, false);
        let mut model = Trained::new(device, Descent { fails: true }, false, true);
        let before = copy(&model.weights);
        let ticket = model.optimizer.advance().unwrap();
        arena(device).step(|step| model.update(ticket, step)).unwrap_err();
        assert_ne!(copy(&model.weights), before, "the rule changed weights before it failed, and so the copy");
        assert_rounded(&model.weights);
    }

    fn loads_write_copy(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let [checkpoint, state_dict, halves] = ["checkpoint", "state", "halves"].map(|name| folder.path().join(name));
        let source = Trained::new(device, AdamW::default(), false, true);
        assert_rounded(&source.weights);
        Checkpoint::save(&checkpoint, &source.weights, Some(&source.optimizer), &[]).unwrap();
        stepscope::files::save_state_dict(&source.weights, &state_dict).unwrap();
        stepscope::files::save_state_dict_as::<bf16>(&source.weights, &halves).unwrap();

        let mut model = Trained::new(device, AdamW::default(), false, true);
        let change = |model: &mut Trained<AdamW>, load: &dyn Fn(&mut Trained<AdamW>)| {
            model.weights.write(model.b, &[0.3; COLS]).unwrap();
            assert_rounded(&model.weights);
            let before = copy(&model.weights);
            load(model);
            assert_ne!(copy(&model.weights), before);
            assert_rounded(&model.weights);
        };
        change(&mut model, &|model| {
            Checkpoint::load(&checkpoint).unwrap().restore(&mut model.weights, Some(&mut model.optimizer)).unwrap();
        });
        change(&mut model, &|model| stepscope::files::load_state_dict(&mut model.weights, &state_dict).unwrap());
        change(&mut model, &|model| stepscope::files::load_state_dict(&mut model.weights, &halves).unwrap());
        assert_eq!(copy(&model.weights), copy(&source.weights), "rounding a BF16 value must not change it");
        let words = [[0x3d, 0x3d, 0x3d, 0x3d]; ROWS * COLS];
        change(&mut model, &|model| {
            model.weights.load(|entry| Some(&words.as_flattened()[..4 * entry.shape().elements()]), Transfer::new()).unwrap();
        });
    }

    /// A load that ends in the middle has changed some weights.
    fn failed_load_updates_copy(device: &Device) {
        let plan = FaultPlan::new();
        let device = like(device).layer(plan.clone()).open().unwrap();
        let mut model = Trained::new(&device, AdamW::default(), false, true);
        let words = [[0x3d, 0x3d, 0x3d, 0x3d]; ROWS * COLS];
        let mut stop = |_| Err(Error::Misuse { op: "test", expected: "the end".into(), got: "a stop".into() });
        let transfer = Transfer::new().progress(&mut stop);
        model.weights.load(|entry| Some(&words.as_flattened()[..4 * entry.shape().elements()]), transfer).unwrap_err();
        assert_rounded(&model.weights);
        assert_eq!(model.weights.read(model.w).unwrap(), vec![f32::from_le_bytes(words[0]); ROWS * COLS]);

        // If the copy cannot be queued, the load returns that error.
        let launches = plan.count(Call::Launch);
        let _ = plan.clone().on(Call::Launch, launches + 1, Fault::Fail);
        model.weights.write(model.b, &[0.5; COLS]).unwrap_err();
        model.weights.write(model.b, &[0.5; COLS]).unwrap();
        assert_rounded(&model.weights);
    }

    /// Loads between replays and inside of them.
    fn captured_steps_read_loaded_weights(device: &Device) {
        let mut arena = arena(device);
        let model = Trained::new(device, Sgd { learning_rate: 0.5, ..Sgd::default() }, false, true);
        let none = HostInputs::new();
        let mut captured = arena.capture(model, &none, |step, model, slots| {
            let before = ops::scale(step, &model.weights.lend_as::<bf16>(step, model.b)?, 1.0)?;
            model.update(UpdateTicket::each_replay(slots), step)?;
            let after = ops::scale(step, &model.weights.lend_as::<bf16>(step, model.b)?, 1.0)?;
            Ok([slots.output(&before), slots.output(&after)])
        }).unwrap();
        for value in [0.1, 0.7] {
            let model = captured.state_mut();
            model.weights.write(model.b, &[value; COLS]).unwrap();
            model.optimizer.advance().unwrap().leave_to_replay();
            let replay = captured.replay(&none).unwrap();
            let [before, after] = replay.outputs().map(|output| replay.read(output).unwrap());
            assert_eq!(before, [bf16::from_f32(value); COLS]);
            let model = captured.state();
            let weights = model.weights.read(model.b).unwrap();
            assert_eq!(after, weights.into_iter().map(bf16::from_f32).collect::<Vec<_>>());
            assert_ne!(before, after);
        }
    }

    /// HostBatch in BF16 train the same weights as the same numbers in f32, captured and eager,
    /// with a copy and without.
    fn trainers_accept_bf16_batches(device: &Device) {
        let weights = |state: &TrainState<Linear>| bits(&state.parameters.read_flat().unwrap());
        let mut plain = weights(&Linear::state(device));
        let started = plain.clone();
        let tensor = "input 0 of the batch, sample 3".to_owned();
        let ends = Err(Error::NotFinite { update: Some(6), what: Quantity::Loss, tensor });
        let ended = Points::<f32>::train(device, Linear::state(device), false, |state| plain = weights(state));
        assert_eq!(ended, ends);
        assert_ne!(plain, started);
        for captured in [false, true] {
            let copied = Linear::state(device).with_bf16_copy().unwrap();
            let ended = Points::<bf16>::train(device, copied, captured, |state| {
                assert_eq!(weights(state), plain);
                assert_rounded(&state.parameters);
            });
            assert_eq!(ended, ends);
        }
    }

    fn tape_lends_copy(device: &Device) {
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [3], Initializer::fan_in(3));
        let stack = spec.add_stack(2, |number| format!("layer.{number}"), [2, 5], Initializer::fan_in(2));
        let spec = spec.build().unwrap();
        let weights = Parameters::new(device, &spec, 3).unwrap();
        let round = |values: Vec<f32>| values.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let mut gradients = Gradients::zeros(&weights).unwrap();
        let mut arena = arena(device);
        let refused = arena.step(|step| {
            let tape = Tape::new(step, &weights);
            tape.op("mine", [])?.weights_as::<bf16>(w).map(drop)
        });
        let text = "mine: expected a copy of the weights in bf16, which `Parameters::with_bf16_copy` makes, got only f32 weights";
        assert_eq!(refused.unwrap_err().to_string(), text);
        let weights = weights.with_bf16_copy().unwrap();
        let expected = round(weights.read(w).unwrap());
        arena.step(|step| {
            let tape = Tape::new(step, &weights);
            let op = tape.op("mine", [])?;
            assert_eq!(step.read(&op.weights_as::<bf16>(w)?)?, expected);
            assert_eq!(step.read(&op.weights_as::<f32>(w)?)?, step.read(&op.weights(w)?)?);
            let (whole, halves) = (step.read(&op.stack_weights(&stack)?)?, step.read(&op.stack_weights_as::<bf16>(&stack)?)?);
            assert_eq!(halves, round(whole));
            let one = ops::fill(step, [1], 1.0)?.save();
            let loss = op.record(one, |back, _| {
                // Nothing reads the device here, so the test compares shapes.
                let (weights, stacked) = (back.weights_as::<bf16>(w)?, back.stack_weights_as::<bf16>(&stack)?);
                assert_eq!((weights.shape(), stacked.shape()), (Shape::from([3]), back.stack_weights(&stack)?.shape()));
                Ok(())
            });
            tape.backward(&loss, &mut gradients)
        }).unwrap();
    }
}
