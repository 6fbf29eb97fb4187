//! Settings and weights that would lead to NaN or infinity are refused, or reported by name, before
//! they are used in training.

#![forbid(unsafe_code)]

use stepscope::error::Quantity;
use stepscope::nn::Linear;
use stepscope::ops;
use stepscope::optim::{ParameterGroup, ParameterGroups, Schedule, Sgd, UpdateArguments, UpdateRule};
use stepscope::parameters::Initializer;
use stepscope::prelude::*;
use stepscope::upload::{NonFinite, Transfer};

const INPUTS: usize = 3;

type Points = crate::support::points::Points<INPUTS>;

fn device() -> Device {
    crate::support::open(DeviceKind::Emulated)
}

fn one_weight(device: &Device) -> Parameters {
    let mut spec = ParameterSpec::builder();
    spec.add("w", [4], Initializer::ONE);
    Parameters::new(device, &spec.build().unwrap(), 1).unwrap()
}

#[track_caller]
fn assert_misuse<R: std::fmt::Debug>(result: Result<R>, words: &[&str]) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Misuse { .. }), "{error:?}");
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text} lacks one of {words:?}");
}

#[test]
fn adamw_refuses_nan_settings() {
    let weights = one_weight(&device());
    let good = AdamW::default();
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0];
    for value in bad {
        assert_misuse(Optimizer::new(&weights, AdamW { learning_rate: value, ..good }), &["adamw", "`learning_rate`"]);
        assert_misuse(Optimizer::new(&weights, AdamW { beta1: value, ..good }), &["adamw", "`beta1`"]);
        assert_misuse(Optimizer::new(&weights, AdamW { beta2: value, ..good }), &["adamw", "`beta2`"]);
        assert_misuse(Optimizer::new(&weights, AdamW { epsilon: value, ..good }), &["adamw", "`epsilon`"]);
        assert_misuse(Optimizer::new(&weights, AdamW { weight_decay: value, ..good }), &["adamw", "`weight_decay`"]);
        assert_misuse(Optimizer::new(&weights, AdamW { clip: Some(value), ..good }), &["adamw", "`clip`"]);
    }
    for one in [1.0, 1.5] {
        assert_misuse(Optimizer::new(&weights, AdamW { beta1: one, ..good }), &["`beta1`", "[0, 1)"]);
        assert_misuse(Optimizer::new(&weights, AdamW { beta2: one, ..good }), &["`beta2`", "[0, 1)"]);
    }
    for zero in [0.0, -0.0] {
        assert_misuse(Optimizer::new(&weights, AdamW { epsilon: zero, ..good }), &["`epsilon`", "above 0"]);
        assert_misuse(Optimizer::new(&weights, AdamW { clip: Some(zero), ..good }), &["`clip`", "above 0"]);
    }
    // The nearest permitted values.
    let least =
        AdamW { learning_rate: 0.0, beta1: 0.0, beta2: 0.0, epsilon: f32::from_bits(1), weight_decay: 0.0, ..good };
    Optimizer::new(&weights, least).unwrap();
}

/// Each factor is finite, and their product is not: the update is refused before it is queued.
#[test]
fn a_rate_beyond_f32_is_refused() {
    let device = device();
    let weights = one_weight(&device);
    let schedule = Schedule::cosine(4, 8, 0.0);
    let config = Sgd { learning_rate: 3e38, schedule, ..Sgd::default() };
    let tenfold = ParameterGroups::new().with(ParameterGroup { rate: 10.0, weight_decay: None }, |_| true);
    assert_misuse(
        Optimizer::new(&weights, config).unwrap().with_parameter_groups(&tenfold),
        &["sgd", "finite settings", "inf"],
    );
    let config = Sgd { learning_rate: 3e38, schedule, ..Sgd::default() };
    let twice = ParameterGroups::new().with(ParameterGroup { rate: 2.0, weight_decay: None }, |_| true);
    let mut sgd = Optimizer::new(&weights, config).unwrap().with_parameter_groups(&twice).unwrap();
    let mut weights = weights;
    let gradients = Gradients::zeros(&weights).unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    for _ in 0..2 {
        let ticket = sgd.advance().unwrap();
        arena.step(|step| sgd.apply(ticket, step, &mut weights, &gradients)).unwrap();
    }
    assert_misuse(sgd.advance(), &["sgd", "finite settings", "update 3"]);
    assert_eq!(sgd.updates(), 2);
}

#[test]
fn initializers_refuse_non_finite_values() {
    let built = |initializer| {
        let mut spec = ParameterSpec::builder();
        spec.add("first", [2], Initializer::ONE);
        spec.add("wrong", [2], initializer);
        spec.build()
    };
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_misuse(built(Initializer::Constant(value)), &["finite constant", "`wrong`"]);
        assert_misuse(built(Initializer::Uniform { bound: value }), &["bound", "`wrong`"]);
        assert_misuse(built(Initializer::Normal { deviation: value }), &["deviation", "`wrong`"]);
    }
    for of_nothing in
        [Initializer::fan_in(0), Initializer::glorot(0, 0), Initializer::he(0), Initializer::Normal { deviation: 1e38 }]
    {
        assert_misuse(built(of_nothing), &["parameter spec", "`wrong`"]);
    }
    // A later choice counts too.
    let mut spec = ParameterSpec::builder();
    spec.add("w", [2], Initializer::ONE);
    spec.initialize(|_| Some(Initializer::he(0)));
    assert_misuse(spec.build(), &["deviation", "`w`"]);
    built(Initializer::Constant(f32::MAX)).unwrap();
}

/// A model with a parameter that does not affect the loss.
struct Net {
    head: Linear,
}

impl Model for Net {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.head.forward(tape, &tape.input(batch.input::<f32>(0)?))
    }
}

/// A rule that makes a weight of "unused" infinite in one of its updates, as a diverging decay
/// would.
struct Spoils {
    at: u64,
}

impl UpdateRule for Spoils {
    fn name(&self) -> &'static str {
        "spoils"
    }

    fn settings(&self, number: u64, _: &ParameterGroup) -> Vec<f32> {
        // 1e30 times the 1e30 of the unused weights. The other products are with 0, and leave the
        // weights unchanged.
        vec![if number == self.at { 1e30 } else { 1.0 }]
    }

    fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
        let scaled = ops::scale_by(step, &arguments.weights, &arguments.settings)?;
        ops::copy_into(step, &scaled, &mut arguments.weights)
    }
}

fn state<R: UpdateRule>(device: &Device, rule: R) -> (TrainState<Net, R>, Parameter) {
    let mut spec = ParameterSpec::builder();
    let head = Linear::new(spec.at("head"), INPUTS, 2);
    spec.initialize(|_| Some(Initializer::ZERO));
    let unused = spec.add("unused", [5], Initializer::Constant(1e30));
    (TrainState::new(device, Net { head }, &spec.build().unwrap(), 1, rule).unwrap(), unused)
}

fn batch() -> Points {
    Points { x: vec![1.0, 0.0, 0.5, -1.0, 2.0, 0.0], labels: vec![0, 1] }
}

#[track_caller]
fn assert_names_unused<R: std::fmt::Debug>(result: Result<R>, update: u64) {
    let expected = Error::NotFinite { update: Some(update), what: Quantity::Weight, tensor: "`unused`".into() };
    assert_eq!(result.unwrap_err(), expected);
}

#[test]
fn infinite_weight_stops_first_update() {
    let device = device();
    for captured in [false, true] {
        for value in [f32::INFINITY, f32::NAN] {
            let (mut state, unused) = state(&device, Sgd::default());
            state.parameters.write(unused, &[1.0, 2.0, value, 4.0, 5.0]).unwrap();
            let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
            let mut trainer = match captured {
                true => Trainer::captured(&mut arena, state, &batch()).unwrap(),
                false => Trainer::eager(&mut arena, state),
            };
            assert_names_unused(trainer.update(&[batch()]), 0);
            let one = std::iter::once(Ok(vec![batch()]));
            assert_names_unused(trainer.fit(one), 0);
            assert_eq!(trainer.state().optimizer.updates(), 0);
        }
    }
}

#[test]
fn unchecked_loads_are_checked_later() {
    let device = device();
    let (mut state, _) = state(&device, Sgd::default());
    let numbers: Vec<Vec<u8>> = state
        .parameters
        .spec()
        .entries()
        .iter()
        .map(|entry| {
            let value = if entry.name() == "unused" { f32::NEG_INFINITY } else { 0.5 };
            value.to_le_bytes().repeat(entry.shape().elements())
        })
        .collect();
    let mut sources = numbers.iter();
    let load =
        state.parameters.load(|_| sources.next().map(Vec::as_slice), Transfer::new().non_finite(NonFinite::Allow));
    load.unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    assert_names_unused(Trainer::eager(&mut arena, state).update(&[batch()]), 0);
}

#[test]
fn spoilt_weight_is_found_within_epoch() {
    let device = device();
    let (state, _) = state(&device, Spoils { at: 300 });
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let mut progress = EpochProgress::default();
    let batches = (0..1_000_000).map(|_| Ok(vec![batch()]));
    let ended = Trainer::eager(&mut arena, state).fit_with(batches, &mut progress, &mut ());
    assert_names_unused(ended, 1000);
    assert!(progress.updates <= 1000);
}

/// `NonFinite::Allow` accepts any numbers.
#[test]
fn non_finite_numbers_can_be_allowed() {
    let device = device();
    let (mut state, unused) = state(&device, Sgd::default());
    state.parameters.write(unused, &[f32::INFINITY; 5]).unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    Trainer::eager(&mut arena, state).non_finite(NonFinite::Allow).update(&[batch()]).unwrap();
}
