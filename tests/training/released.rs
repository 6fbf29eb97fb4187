//! Gradients that are not stored: each parameter is updated in the backward pass.

use crate::support::points::Points;
use crate::support::{Random, on_each_device, words};
use stepscope::nn::Linear;
use stepscope::ops::LmHeadConfig;
use stepscope::parameters::{GradientType, MasterType, StateType};
use stepscope::prelude::*;

const INPUTS: usize = 12;
const WIDTH: usize = 40;
const CLASSES: usize = 8;

/// The uses of the second layer's parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Uses {
    /// Twice.
    Twice,
    /// Once, in a recomputed part.
    InPart,
    /// In a recomputed part, and in a part within it.
    InNestedPart,
    /// In a recomputed part, and after it.
    InAndAfterPart,
    /// Before a recomputed part, and in it.
    BeforeAndInPart,
    /// Once, and the head is that of a language model, which computes its gradient with the loss.
    BeforeHead,
}

/// A model of three layers, and one that no loss depends on.
struct Chain {
    layers: [Linear; 3],
    uses: Uses,
}

impl Model for Chain {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let ([first, second, head], x) = (self.layers, tape.input(batch.input::<f32>(0)?));
        let x = first.forward(tape, &x)?.tanh()?;
        let part =
            move |tape: &Tape<'_, 's>, x: Var<'s>| tape.recompute(x, move |tape, x| second.forward(tape, &x)?.tanh());
        let x = match self.uses {
            Uses::Twice => second.forward(tape, &second.forward(tape, &x)?.tanh()?)?,
            Uses::InPart => part(tape, x)?,
            Uses::InNestedPart => tape.recompute(x, move |tape, x| {
                let x = second.forward(tape, &x)?;
                tape.recompute(x, move |tape, x| second.forward(tape, &x)?.tanh())
            })?,
            Uses::InAndAfterPart => second.forward(tape, &part(tape, x)?)?,
            Uses::BeforeAndInPart => part(tape, second.forward(tape, &x)?)?,
            Uses::BeforeHead => return second.forward(tape, &x),
        };
        head.forward(tape, &x)
    }

    fn loss<'s>(&self, tape: &Tape<'_, 's>, output: &Var<'s>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let labels = batch.indices(1)?;
        match self.uses {
            Uses::BeforeHead => {
                let loss = tape.linear_cross_entropy(output, self.layers[2].weight, labels, LmHeadConfig::default())?;
                loss * 0.75
            }
            _ => tape.cross_entropy(output, labels),
        }
    }
}

fn state(device: &Device, uses: Uses, stored: impl Fn(ParameterSpec) -> ParameterSpec) -> TrainState<Chain> {
    let mut spec = ParameterSpec::builder();
    let first = Linear::new(spec.at("first"), INPUTS, WIDTH);
    // Its gradient is zero, and its weights decay.
    Linear::new(spec.at("unused"), 3, 5);
    let layers = [first, Linear::new(spec.at("second"), WIDTH, WIDTH), Linear::new(spec.at("head"), WIDTH, CLASSES)];
    let rule = AdamW { learning_rate: 0.01, clip: None, ..AdamW::default() };
    TrainState::new(device, Chain { layers, uses }, &stored(spec.build().unwrap()), 7, rule).unwrap()
}

fn batches(count: usize) -> Vec<Vec<Points<INPUTS>>> {
    let mut random = Random::new(3);
    let mut batch = || Points { x: random.normals(16 * INPUTS), labels: random.belows(16, CLASSES as u32) };
    (0..count).map(|_| vec![batch()]).collect()
}

/// The bits of weights and state after the updates, and the norms of the gradients.
type Trained = (Vec<Vec<u32>>, Vec<f64>);

fn train(
    device: &Device,
    uses: Uses,
    captured: bool,
    stored: impl Fn(ParameterSpec) -> ParameterSpec,
) -> Result<Trained> {
    let batches = batches(5);
    let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build()?;
    let state = state(device, uses, stored);
    let mut trainer = match captured {
        true => Trainer::captured(&mut arena, state, &batches[0][0])?,
        false => Trainer::eager(&mut arena, state),
    };
    let norms = batches.iter().map(|batch| Ok(trainer.update(batch)?.gradient_l2.unwrap())).collect::<Result<_>>()?;
    let TrainState { parameters, optimizer, .. } = trainer.state();
    Ok((parameters.regions().into_iter().chain(optimizer.state()).map(words).collect(), norms))
}

fn small(spec: ParameterSpec) -> ParameterSpec {
    spec.with_masters(MasterType::Split).with_state(StateType::Bits8)
}

on_each_device! {
    /// Updates in the backward pass have the bits of updates after it: eager and captured, in f32
    /// and in small memory, of parameters that are used twice, in recomputed parts, and not at all.
    fn updates_keep_their_bits(device: &Device) {
        let types: [fn(ParameterSpec) -> ParameterSpec; 2] = [|spec| spec, small];
        for stored in types {
            for uses in [Uses::Twice, Uses::InPart, Uses::BeforeHead] {
                let (expected, norms) = train(device, uses, false, stored).unwrap();
                for captured in [false, true] {
                    let released = |spec| stored(spec).with_gradients(GradientType::Released);
                    let (bits, found) = train(device, uses, captured, released).unwrap();
                    assert!(bits == expected, "{uses:?}, captured {captured}");
                    for (norm, found) in norms.iter().zip(found) {
                        assert!((norm - found).abs() < 1e-5 * norm, "{uses:?}: {found} instead of {norm}");
                    }
                }
            }
        }
    }

    /// A parameter's gradient cannot be held from one recomputed part to another op.
    fn shared_parts_are_refused(device: &Device) {
        for uses in [Uses::InNestedPart, Uses::InAndAfterPart, Uses::BeforeAndInPart] {
            train(device, uses, false, small).unwrap();
            let released = |spec: ParameterSpec| small(spec).with_gradients(GradientType::Released);
            let error = train(device, uses, false, released).unwrap_err().to_string();
            assert!(error.contains("`second."), "{uses:?}: {error}");
        }
    }
}

/// Whatever needs a stored gradient says so.
#[test]
fn stored_gradients_are_asked_for() {
    let device = crate::support::open(DeviceKind::Emulated);
    let released = |spec: ParameterSpec| spec.with_gradients(GradientType::Released);
    let TrainState { model, parameters, mut gradients, mut optimizer, .. } = state(&device, Uses::Twice, released);
    assert_eq!((parameters.spec().gradients_bytes(), gradients.region().is_err()), (0, true));
    let error = gradients.read(model.layers[0].weight).unwrap_err().to_string();
    assert!(error.contains("released gradients"), "{error}");
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(4)).build().unwrap();
    let batch = &batches(1)[0][0];
    let error = arena
        .step(|step| {
            let batch = step.upload_inputs(&batch.inputs()?)?;
            let tape = Tape::new(step, &parameters);
            let loss = model.training_loss(&tape, &batch)?;
            tape.backward_overwrite(&loss, &mut gradients)
        })
        .unwrap_err();
    assert!(error.to_string().contains("released gradients"), "{error}");
    let ticket = optimizer.advance().unwrap();
    let mut parameters = parameters;
    let error = arena.step(|step| optimizer.apply(ticket, step, &mut parameters, &gradients)).unwrap_err();
    assert!(error.to_string().contains("released gradients"), "{error}");
    // Two steps for one update.
    let batch = || batches(1).remove(0).remove(0);
    let mut trainer = Trainer::eager(&mut arena, state(&device, Uses::Twice, released));
    let error = trainer.update(&[batch(), batch()]).unwrap_err().to_string();
    assert!(error.contains("one step for each update"), "{error}");
}
