//! Adapters of linear layers and of experts: the results and gradients of separate products, for
//! any ranks, and dropout that is repeated in every run of a step.

#![forbid(unsafe_code)]

use crate::support::{Random, bits, on_each_device, relative_l2};
use stepscope::nn::{AdapterPart, Linear};
use stepscope::ops::{self, Activation, Generator, GroupedLowRank};
use stepscope::parameters::{FrozenType, Initializer};
use stepscope::prelude::*;
use stepscope::tensor::Element;

const ROWS: usize = 37;
const INPUTS: usize = 20;
const OUTPUTS: usize = 26;
/// The first output, the outputs, the rank and the scale of each part. The outputs in between have
/// none.
const PARTS: [(usize, usize, usize, f32); 3] = [(0, 8, 3, 2.0), (8, 5, 9, 0.5), (16, 10, 1, -1.5)];

/// A layer with an adapter, and separate matrices of the same values.
struct Layers {
    layer: Linear,
    /// A trained matrix by which the layer's input is multiplied.
    before: Parameter,
    separate: Vec<[Parameter; 2]>,
    parameters: Parameters,
}

fn layers(device: &Device, dropout: f32) -> Layers {
    let mut spec = ParameterSpec::builder();
    let layer = Linear::new(spec.at("layer"), INPUTS, OUTPUTS);
    spec.freeze(|_| Some(FrozenType::F32));
    let names = ["a", "b", "c"];
    let part = |(number, (first, outputs, rank, scale)): (usize, (usize, usize, usize, f32))| AdapterPart {
        name: names[number],
        first,
        outputs,
        rank,
        scale,
    };
    let parts: Vec<AdapterPart<'_>> = PARTS.into_iter().enumerate().map(part).collect();
    let layer = layer.with_adapter(spec.at("layer"), INPUTS, &parts, dropout).unwrap();
    let separate = parts.iter().map(|part| {
        let a = spec.add(format!("{}.a", part.name), [INPUTS, part.rank], Initializer::ZERO);
        [a, spec.add(format!("{}.b", part.name), [part.rank, part.outputs], Initializer::ZERO)]
    });
    let separate: Vec<[Parameter; 2]> = separate.collect();
    let before = spec.add("before", [INPUTS, INPUTS], Initializer::fan_in(INPUTS));
    let mut parameters = Parameters::new(device, &spec.build().unwrap(), 7).unwrap();
    let mut random = Random::new(3);
    let (columns, ranks) = ops::LowRankPart::columns(PARTS.map(|part| part.2));
    assert_eq!((&columns[..], ranks), (&[0, 8, 24][..], 25));
    let a = random.normals(INPUTS * ranks);
    let low_rank = layer.adapter.unwrap().low_rank;
    parameters.write(low_rank.a, &a).unwrap();
    for (((part, own), &[of_a, of_b]), column) in PARTS.iter().zip(low_rank.parts).zip(&separate).zip(columns) {
        let b = random.normals(part.2 * part.1);
        parameters.write(own.unwrap().b, &b).unwrap();
        parameters.write(of_b, &b).unwrap();
        let own_a: Vec<f32> = a.chunks(ranks).flat_map(|row| row[column..column + part.2].to_vec()).collect();
        parameters.write(of_a, &own_a).unwrap();
    }
    Layers { layer, before, separate, parameters }
}

/// Returns y and the gradient of each parameter, and of the residual's source, for the layer or for
/// separate products. A residual is twice the result of the frozen layer.
///
/// Separate products drop elements of their own inputs, each with the numbers of the next call.
fn run<S: Activation>(layers: &Layers, whole: bool, residual: bool) -> [Vec<f32>; 4] {
    let Layers { layer, separate, parameters, .. } = layers;
    let device = parameters.device();
    let mut gradients = Gradients::zeros(parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
    let mut random = Random::new(11);
    let (x, weights): (Vec<f32>, Vec<f32>) = (random.normals(ROWS * INPUTS), random.normals(ROWS * OUTPUTS));
    let narrow = |values: &[f32]| values.iter().map(|&value| S::narrow(value)).collect::<Vec<S>>();
    let generator = Generator::new(device, 5).unwrap();
    let p = layer.adapter.unwrap().dropout;
    let y = arena.step(|step| {
        let tape = Tape::new(step, parameters).with_generator(&generator);
        // The product with a trained matrix has a gradient.
        let x = tape.input(step.upload(&narrow(&x), [ROWS, INPUTS])?);
        let x = tape.linear(&x, layers.before, None)?;
        let frozen = Linear { adapter: None, ..*layer };
        let before = residual.then(|| frozen.forward(&tape, &x)?.mul(2.0)).transpose()?;
        let y = match (whole, &before) {
            (true, None) => layer.forward(&tape, &x)?,
            (true, Some(before)) => layer.forward_residual(&tape, &x, before)?,
            (false, before) => {
                let mut added = Vec::new();
                let mut end = 0;
                for (&(first, outputs, _, scale), &[a, b]) in PARTS.iter().zip(separate) {
                    if first > end {
                        added.push(
                            tape.input(step.upload(&vec![S::narrow(0.0); ROWS * (first - end)], [ROWS, first - end])?),
                        );
                    }
                    let dropped = if p > 0.0 { tape.dropout(&x, p)? } else { x };
                    added.push(tape.linear(&tape.linear(&dropped, a, None)?, b, None)?.mul(scale)?);
                    end = first + outputs;
                }
                let y = frozen.forward(&tape, &x)?;
                let y = before.as_ref().map_or(Ok(y), |before| y.add(before))?;
                y.add(Var::cat(&added, 1)?)?
            }
        };
        let weights = tape.input(step.upload(&narrow(&weights), [ROWS, OUTPUTS])?);
        let loss = tape.sum(&y.mul(weights)?)?;
        let values = step.read(y.value())?.into_iter().map(|value| value.widen()).collect();
        tape.backward_overwrite(&loss, &mut gradients)?;
        Ok(values)
    });
    let low_rank = layer.adapter.unwrap().low_rank;
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    let read = |parameter| gradients.read(parameter).unwrap();
    if whole {
        let ((columns, ranks), a) = (ops::LowRankPart::columns(PARTS.map(|part| part.2)), read(low_rank.a));
        assert!(
            a.chunks(ranks).all(|row| row[3..8] == [0.0; 5] && row[17..24] == [0.0; 7]),
            "outputs outside the parts must be 0"
        );
        for ((part, own), column) in PARTS.iter().zip(low_rank.parts).zip(columns) {
            of_a.extend(a.chunks(ranks).flat_map(|row| row[column..column + part.2].to_vec()));
            of_b.extend(read(own.unwrap().b));
        }
    } else {
        separate.iter().for_each(|&[a, b]| {
            of_a.extend(read(a));
            of_b.extend(read(b));
        });
    }
    [y.unwrap(), of_a, of_b, read(layers.before)]
}

fn agree<S: Activation>(device: &Device, dropout: f32, limit: f64) {
    let mut layers = layers(device, dropout);
    if <S as Element>::NAME == bf16::NAME {
        layers.parameters = layers.parameters.with_bf16_copy().unwrap();
    }
    for residual in [false, true] {
        let [ours, theirs] = [true, false].map(|whole| run::<S>(&layers, whole, residual));
        for (what, (ours, theirs)) in ["y", "A", "B", "x"].into_iter().zip(ours.iter().zip(&theirs)) {
            let theirs: Vec<f64> = theirs.iter().map(|&value| f64::from(value)).collect();
            let difference = relative_l2(ours, &theirs);
            assert!(difference <= limit, "{what} differs by {difference:e}");
            assert!(ours.iter().all(|value| *value != 0.0), "{what} has zeros");
        }
    }
}

/// Experts, of which each token uses two, and the rank of their adapters.
const EXPERTS: usize = 3;
const RANK: usize = 5;

fn named(parameters: &Parameters, name: &str) -> Parameter {
    parameters.spec().iter().find(|(_, entry)| entry.name() == name).unwrap().0
}

/// Returns y and the gradients of A, B and a matrix before the experts, for a layer of experts with
/// adapters or for separate products of the same weights.
fn run_experts<S: Activation>(parameters: &Parameters, p: f32, whole: bool) -> [Vec<f32>; 4] {
    let device = parameters.device();
    let [before, w, a, b] = ["before", "w", "a", "b"].map(|name| named(parameters, name));
    let mut gradients = Gradients::zeros(parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
    let mut random = Random::new(11);
    let (x, weights): (Vec<f32>, Vec<f32>) = (random.normals(ROWS * INPUTS), random.normals(2 * ROWS * OUTPUTS));
    let narrow = |values: &[f32]| values.iter().map(|&value| S::narrow(value)).collect::<Vec<S>>();
    // The last expert has no token.
    let ids: Vec<u32> = (0..2 * ROWS as u32).map(|at| at % 7 % 2).collect();
    let generator = Generator::new(device, 5).unwrap();
    let y = arena.step(|step| {
        let tape = Tape::new(step, parameters).with_generator(&generator);
        let groups = ops::group_by(step, &step.upload_indices(&ids, [ROWS, 2])?, EXPERTS)?;
        let x = tape.linear(&tape.input(step.upload(&narrow(&x), [ROWS, INPUTS])?), before, None)?;
        let rows = tape.dispatch(&x, &groups)?;
        let y = if whole {
            let low_rank = GroupedLowRank { a, b, scale: -1.5 };
            let draws = if p > 0.0 { tape.draws()? } else { None };
            tape.grouped_low_rank(&rows, w, &low_rank, draws.map(|draws| (p, draws.next())), &groups)?
        } else {
            let dropped = if p > 0.0 { tape.dropout(&rows, p)? } else { rows };
            let added = tape.grouped_linear(&tape.grouped_linear(&dropped, a, &groups)?, b, &groups)?;
            tape.grouped_linear(&rows, w, &groups)?.add(added.mul(-1.5)?)?
        };
        let weights = tape.input(step.upload(&narrow(&weights), [2 * ROWS, OUTPUTS])?);
        let loss = tape.sum(&y.mul(weights)?)?;
        let values = step.read(y.value())?.into_iter().map(|value| value.widen()).collect();
        tape.backward_overwrite(&loss, &mut gradients)?;
        Ok(values)
    });
    let [of_a, of_b, of_x] = [a, b, before].map(|parameter| gradients.read(parameter).unwrap());
    [y.unwrap(), of_a, of_b, of_x]
}

fn experts_agree<S: Activation>(device: &Device, dropout: f32, limit: f64) {
    let mut spec = ParameterSpec::builder();
    spec.add("w", [INPUTS, EXPERTS * OUTPUTS], Initializer::fan_in(INPUTS));
    spec.freeze(|_| Some(FrozenType::F32));
    spec.add("before", [INPUTS, INPUTS], Initializer::fan_in(INPUTS));
    spec.add("a", [INPUTS, EXPERTS * RANK], Initializer::fan_in(INPUTS));
    spec.add("b", [RANK, EXPERTS * OUTPUTS], Initializer::fan_in(RANK));
    let mut parameters = Parameters::new(device, &spec.build().unwrap(), 7).unwrap();
    let w = named(&parameters, "w");
    parameters.write(w, &Random::new(3).normals(INPUTS * EXPERTS * OUTPUTS)).unwrap();
    if <S as Element>::NAME == bf16::NAME {
        parameters = parameters.with_bf16_copy().unwrap();
    }
    let [ours, theirs] = [true, false].map(|whole| run_experts::<S>(&parameters, dropout, whole));
    for (what, (ours, theirs)) in ["y", "A", "B", "x"].into_iter().zip(ours.iter().zip(&theirs)) {
        let theirs: Vec<f64> = theirs.iter().map(|&value| f64::from(value)).collect();
        let difference = relative_l2(ours, &theirs);
        assert!(difference <= limit, "{what} differs by {difference:e}");
        let zeros = ours.iter().filter(|value| **value == 0.0).count();
        let of_last_expert = if ["A", "B"].contains(&what) { ours.len() / EXPERTS } else { 0 };
        assert_eq!(zeros, of_last_expert, "{what} has zeros");
    }
}

/// Layers of one width, with a function between them.
struct Stack(Vec<Linear>);

impl Model for Stack {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.0.iter().try_fold(tape.input(batch.input(0)?), |x, layer| layer.forward(tape, &x)?.gelu())
    }

    fn loss<'s>(&self, _: &Tape<'_, 's>, output: &Var<'s>, _: &DeviceBatch<'s>) -> Result<Var<'s>> {
        output.square()?.mean(..)
    }
}

/// Returns the memory of a captured update of 16 layers without their input. All are trained, or
/// only an adapter of the last.
fn bytes_of_stack(device: &Device, is_adapted: bool) -> usize {
    const WIDTH: usize = 64;
    let mut spec = ParameterSpec::builder();
    let mut layers: Vec<_> = (0..16).map(|layer| Linear::new(spec.at(layer.to_string()), WIDTH, WIDTH)).collect();
    if is_adapted {
        spec.freeze(|_| Some(FrozenType::F32));
        let part = AdapterPart { name: "adapter", first: 0, outputs: WIDTH, rank: 8, scale: 1.0 };
        let last = layers.pop().unwrap();
        layers.push(last.with_adapter(spec.at("last"), WIDTH, &[part], 0.0).unwrap());
    }
    let state = TrainState::new(device, Stack(layers), &spec.build().unwrap(), 7, AdamW::default()).unwrap();
    let batch = (vec![[0.5_f32; WIDTH]; 512],);
    let mut trainer = Trainer::captured(device, state, &batch).unwrap();
    trainer.fit([batch]).unwrap();
    trainer.capture_report().unwrap().bytes_owned - 512 * WIDTH * 4
}

on_each_device! {
    fn adapter_of_the_last_layer_takes_little_memory(device: &Device) {
        let [all, adapted] = [false, true].map(|is_adapted| bytes_of_stack(device, is_adapted));
        assert!(6 * adapted <= all, "{adapted} bytes, {all} if all layers are trained");
    }

    fn adapters_agree_with_separate_products(device: &Device) {
        // Each of the separate results of BF16 is rounded to 8 bits.
        for dropout in [0.0, 0.25] {
            agree::<f32>(device, dropout, 1e-6);
            agree::<bf16>(device, dropout, 1e-2);
        }
    }

    fn adapters_of_experts_agree(device: &Device) {
        for dropout in [0.0, 0.25] {
            experts_agree::<f32>(device, dropout, 1e-6);
            experts_agree::<bf16>(device, dropout, 1e-2);
        }
    }

    /// Dropout of an adapter's input is the same with and without recompute, and absent in an
    /// evaluation. It does not change the frozen layer.
    fn dropout_repeats(device: &Device) {
        let [plain, dropped] = [0.0, 0.5].map(|dropout| layers(device, dropout));
        let run = |layers: &Layers, evaluates: bool, recompute: bool| {
            // A generator continues from step to step.
            let generator = Generator::new(device, 5).unwrap();
            let (layer, mut gradients) = (layers.layer, Gradients::zeros(&layers.parameters).unwrap());
            let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
            let y = arena.step(|step| {
                let tape = Tape::new(step, &layers.parameters);
                let tape = if evaluates { tape.evaluating() } else { tape.with_generator(&generator) };
                let x = tape.input(step.upload(&Random::new(2).normals(ROWS * INPUTS), [ROWS, INPUTS])?);
                let y = match recompute {
                    true => tape.recompute(x, move |tape, x| layer.forward(tape, &x))?,
                    false => layer.forward(&tape, &x)?,
                };
                let values = step.read(y.value())?;
                let loss = tape.mean(&y)?;
                tape.backward_overwrite(&loss, &mut gradients)?;
                Ok(values)
            });
            (bits(&y.unwrap()), bits(&gradients.read_flat().unwrap()))
        };
        assert!(run(&plain, true, false) == run(&dropped, true, false));
        let once = run(&dropped, false, false);
        assert!(once == run(&dropped, false, true), "with recompute");
        assert!(once == run(&dropped, false, false), "in a second step");
        let plain = run(&plain, false, false);
        assert!(once.0 != plain.0);
        // The outputs without an addition.
        let rest = |y: &[u32]| y.chunks(OUTPUTS).flat_map(|row| row[13..16].to_vec()).collect::<Vec<_>>();
        assert_eq!(rest(&once.0), rest(&plain.0));
    }
}

/// Parts outside the layer, and too many, are refused.
#[test]
fn misplaced_parts_are_refused() {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let part = AdapterPart { name: "", first: 0, outputs: 5, rank: 1, scale: 1.0 };
    let mut spec = ParameterSpec::builder();
    let layer = Linear::without_bias(spec.at("layer"), 4, 4);
    for parts in [vec![], vec![part; 4]] {
        let error = layer.with_adapter(spec.at("other"), 4, &parts, 0.0).unwrap_err().to_string();
        assert!(error.contains("1 to 3 parts"), "{error}");
    }
    for (first, outputs) in [(0, 5), (8, 4), (usize::MAX - 7, 4), (usize::MAX - 7, 8), (1 << 63, 4)] {
        let part = AdapterPart { first, outputs, ..part };
        let mut spec = ParameterSpec::builder();
        let layer = Linear::without_bias(spec.at("layer"), 4, 4);
        let layer = layer.with_adapter(spec.at("layer"), 4, &[part], 0.0).unwrap();
        let parameters = Parameters::new(&device, &spec.build().unwrap(), 7).unwrap();
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
        let error = arena.step(|step| {
            let tape = Tape::new(step, &parameters);
            let x = tape.input(step.upload(&[0.5; 8], [2, 4])?);
            layer.forward(&tape, &x).map(drop)
        });
        let error = error.unwrap_err().to_string();
        let got = format!("{outputs} outputs from {first} on");
        assert!(error.contains("inside the 4 outputs") && error.contains(&got), "{error}");
    }
    let mut spec = ParameterSpec::builder();
    let layer = Linear::without_bias(spec.at("layer"), 4, 4);
    for ranks in [&[usize::MAX][..], &[1 << 63, 1 << 63], &[usize::MAX - 3, 8]] {
        let mut spec = ParameterSpec::builder();
        let parts: Vec<_> = ranks.iter().map(|&rank| AdapterPart { rank, outputs: 4, ..part }).collect();
        let _ = layer.with_adapter(spec.at("layer"), 4, &parts, 0.0);
        let error = spec.build().unwrap_err().to_string();
        assert!(error.contains("memory can hold"), "{error}");
    }
}
