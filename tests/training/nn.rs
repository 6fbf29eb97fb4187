//! Layers: their parameter names, and their equivalence to the ops of their formulas, forward and
//! backward, bit for bit.

#![forbid(unsafe_code)]

mod gradcheck;

use crate::support::{Random, bits, on_each_device};
use stepscope::nn::{Dropout, Embedding, Linear, Mlp, RmsNorm, SwiGlu};
use stepscope::ops;
use stepscope::parameters::ParameterEntry;
use stepscope::prelude::*;

const BATCH: usize = 3;
const TOKENS: usize = 4;
const WIDTH: usize = 128;

/// A layer or its equivalent ops, each from an input and a tape to an output.
type Forward = for<'t, 's> fn(&Layers, &Tape<'t, 's>, &Var<'s>) -> Result<Var<'s>>;

struct Layers {
    linear: Linear,
    plain: Linear,
    norm: RmsNorm,
    mlp: Mlp,
    swiglu: SwiGlu,
    positions: Embedding,
}

impl Layers {
    fn new() -> (Self, ParameterSpec) {
        let mut spec = ParameterSpec::builder();
        let layers = Self {
            linear: Linear::new(spec.at("linear"), WIDTH, 5),
            plain: Linear::without_bias(spec.at("plain"), WIDTH, WIDTH),
            norm: RmsNorm::new(spec.at("norm"), WIDTH),
            mlp: Mlp::new(spec.at("layer").at("mlp"), WIDTH, 32, WIDTH),
            swiglu: SwiGlu::new(spec.at("swiglu"), WIDTH, 24, WIDTH),
            positions: Embedding::new(spec.at("positions"), TOKENS + 1, WIDTH, 0.5),
        };
        (layers, spec.build().expect("the names are different"))
    }
}

/// Returns the output and all gradients for a loss that weighs each output element differently.
fn run(device: &Device, forward: Forward) -> (Vec<u32>, Vec<u32>) {
    let (layers, spec) = Layers::new();
    let parameters = Parameters::new(device, &spec, 7).unwrap();
    let mut gradients = Gradients::zeros(&parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
    let x = Random::new(3).normals(BATCH * TOKENS * WIDTH);
    let y = arena
        .step(|step| {
            let tape = Tape::new(step, &parameters).evaluating();
            let x = tape.input(step.upload(&x, [BATCH, TOKENS, WIDTH])?);
            let y = forward(&layers, &tape, &x)?;
            let cols = y.shape().extents()[2];
            let labels: Vec<u32> = (0..BATCH * TOKENS).map(|row| (row % cols) as u32).collect();
            let labels = step.upload_indices(&labels, [labels.len()])?;
            let rows = y.reshape([BATCH * TOKENS, cols])?;
            let loss = tape.cross_entropy_by(&rows, labels, ops::LabelRules::default().weighted(1.0))?;
            tape.backward_overwrite(&loss, &mut gradients)?;
            step.read(y.value())
        })
        .unwrap();
    (bits(&y), bits(&gradients.read_flat().unwrap()))
}

#[test]
fn names_are_nested_and_in_order() {
    let (_, spec) = Layers::new();
    let names: Vec<&str> = spec.entries().iter().map(ParameterEntry::name).collect();
    let expected: Vec<String> = ["linear.weight", "linear.bias", "plain.weight"]
        .into_iter()
        .map(String::from)
        .chain(["norm.gain".to_owned()])
        .chain(["up.weight", "up.bias", "down.weight", "down.bias"].map(|name| format!("layer.mlp.{name}")))
        .chain(["gate", "up", "down"].map(|name| format!("swiglu.{name}_proj.weight")))
        .chain(["positions.weight".to_owned()])
        .collect();
    assert_eq!(names, expected);
    let twice = {
        let mut spec = ParameterSpec::builder();
        Linear::new(spec.at("head"), 2, 2);
        Linear::new(spec.at("head"), 2, 2);
        spec.build().unwrap_err()
    };
    assert!(twice.to_string().contains("two named `head."), "{twice}");
}

on_each_device! {
    fn layers_match_their_formulas(device: &Device) {
        let pairs: [(&str, Forward, Forward); 9] = [
            (
                "linear",
                |layers, tape, x| layers.linear.forward(tape, x),
                |layers, tape, x| tape.linear(x, layers.linear.weight, layers.linear.bias),
            ),
            (
                "linear with a residual",
                |layers, tape, x| layers.plain.forward_residual(tape, x, x),
                |layers, tape, x| tape.linear_residual(x, layers.plain.weight, None, x),
            ),
            (
                "norm",
                |layers, tape, x| layers.norm.forward(tape, x),
                |layers, tape, x| tape.rms_norm(x, layers.norm.gain, RmsNorm::EPSILON),
            ),
            (
                "gelu",
                |layers, tape, x| layers.plain.forward(tape, x)?.gelu(),
                |layers, tape, x| tape.linear(x, layers.plain.weight, None)?.gelu(),
            ),
            (
                "norm behind a residual",
                |layers, tape, x| {
                    let [h, y] = layers.norm.forward_residual(tape, x, &layers.plain.forward(tape, x)?)?;
                    h.add(y)
                },
                |layers, tape, x| {
                    let h = x.add(tape.linear(x, layers.plain.weight, None)?)?;
                    h.add(tape.rms_norm(&h, layers.norm.gain, RmsNorm::EPSILON)?)
                },
            ),
            (
                "positions",
                |layers, tape, x| layers.positions.add_positions(tape, x),
                |layers, tape, x| tape.add_positions(x, layers.positions.weight),
            ),
            (
                "dropout in an evaluation",
                |layers, tape, x| Dropout { p: 0.5 }.forward(tape, &layers.plain.forward(tape, x)?),
                |layers, tape, x| layers.plain.forward(tape, x),
            ),
            (
                "swiglu, with and without a residual",
                |layers, tape, x| layers.swiglu.forward_residual(tape, &layers.swiglu.forward(tape, x)?, x),
                |layers, tape, x| {
                    let SwiGlu { gate, up, down } = layers.swiglu;
                    let gated = |x| {
                        let (gate, up) = (tape.linear(x, gate.weight, None)?, tape.linear(x, up.weight, None)?);
                        tape.swiglu(&gate, &up)
                    };
                    let y = tape.linear(&gated(x)?, down.weight, None)?;
                    tape.linear_residual(&gated(&y)?, down.weight, None, x)
                },
            ),
            (
                "mlp, with and without a residual",
                |layers, tape, x| layers.mlp.forward_residual(tape, &layers.mlp.forward(tape, x)?, x),
                |layers, tape, x| {
                    let Mlp { up, down } = layers.mlp;
                    let y = tape.linear(&tape.linear_gelu(x, up.weight, up.bias)?, down.weight, down.bias)?;
                    tape.linear_residual(&tape.linear_gelu(&y, up.weight, up.bias)?, down.weight, down.bias, x)
                },
            ),
        ];
        for (name, layer, ops) in pairs {
            let (layer, ops) = (run(device, layer), run(device, ops));
            assert!(layer == ops, "{name}: the bits differ from those of its ops");
            assert!(layer.1.iter().any(|&bits| bits << 1 != 0), "{name}: the gradient is zero");
        }
    }

    /// Layers that need more than a variable: ids, and a tape with random numbers.
    fn embedding_and_dropout(device: &Device) {
        let mut spec = ParameterSpec::builder();
        let embedding = Embedding::new(spec.at("wte"), 7, 5, 1.0);
        let parameters = Parameters::new(device, &spec.build().unwrap(), 3).unwrap();
        let generator = ops::Generator::new(device, 1).unwrap();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let ids = [6, 0, 3, 3, 1, 6];
        let [rows, dropped] = arena
            .step(|step| {
                let tape = Tape::new(step, &parameters).with_generator(&generator);
                let y: Var<'_> = embedding.forward(&tape, step.upload_indices(&ids, [2, 3])?)?;
                assert_eq!(y.shape().extents(), [2, 3, 5]);
                let dropped = Dropout { p: 0.5 }.forward(&tape, &y)?;
                Ok([step.read(y.value())?, step.read(dropped.value())?])
            })
            .unwrap();
        let table = parameters.read_flat().unwrap();
        let want: Vec<f32> = ids.iter().flat_map(|&id| table[id as usize * 5..][..5].to_vec()).collect();
        assert_eq!(bits(&rows), bits(&want));
        let zeros = dropped.iter().filter(|&&y| y == 0.0).count();
        assert!((5..25).contains(&zeros), "dropout zeroed {zeros} of 30");
        assert!(dropped.iter().zip(&rows).all(|(&y, &x)| y == 0.0 || y == 2.0 * x));
    }
}
