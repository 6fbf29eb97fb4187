//! Layers: the parameters that they name, and that each is the ops of its formula, forward and backward, bit for bit.

#![forbid(unsafe_code)]

mod support;

use stepscope::nn::{Attention, Gelu, Linear, Mlp, RmsNorm, TokenLinear};
use stepscope::*;
use support::{Random, bits, on_each_device};

const BATCH: usize = 3;
const TOKENS: usize = 4;
const WIDTH: usize = 128;

/// A layer and the same by ops, each from an input and a tape to an output.
type Forward = for<'t, 's> fn(&Layers, &Tape<'t, 's>, &Var<'s>) -> Result<Var<'s>>;

struct Layers {
    linear: Linear,
    plain: Linear,
    tokens: TokenLinear,
    norm: RmsNorm,
    attention: Attention,
    mlp: Mlp,
}

impl Layers {
    fn new() -> (Self, Layout) {
        let mut layout = Layout::builder();
        let mut names = layout.names();
        let layers = Self {
            linear: Linear::new(names.at("linear"), WIDTH, 5),
            plain: Linear::without_bias(names.at("plain"), WIDTH, WIDTH),
            tokens: TokenLinear::new(&mut names, "token", TOKENS, WIDTH, 64),
            norm: RmsNorm::new(names.at("norm"), WIDTH),
            attention: Attention::new(names.at("layer").at("attention"), WIDTH),
            mlp: Mlp::new(names.at("layer").at("mlp"), WIDTH, 32, WIDTH),
        };
        (layers, layout.build().expect("the names differ"))
    }
}

/// The output and all gradients for a loss that weighs each element of the output differently.
fn run(device: &Device, forward: Forward) -> (Vec<u32>, Vec<u32>) {
    let (layers, layout) = Layers::new();
    let parameters = Parameters::new(device, &layout, 7).unwrap();
    let mut gradients = Gradients::zeros(&parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
    let x = Random::new(3).normals(BATCH * TOKENS * WIDTH);
    let y = arena
        .step(|step| {
            let tape = Tape::new(step, &parameters);
            let x = tape.input(step.upload(&x, [BATCH, TOKENS, WIDTH])?);
            let y = forward(&layers, &tape, &x)?;
            let cols = y.shape().extents()[2];
            let labels: Vec<u32> = (0..BATCH * TOKENS).map(|row| (row % cols) as u32).collect();
            let labels = step.upload(&labels, [labels.len()])?.save();
            let rows = tape.reshape(&y, [BATCH * TOKENS, cols])?;
            let loss = tape.cross_entropy(&rows, labels, 1.0)?;
            tape.backward_afresh(&loss, &mut gradients)?;
            step.read(y.value())
        })
        .unwrap();
    (bits(&y), bits(&gradients.flat().read().unwrap()))
}

#[test]
fn names_are_nested_and_in_the_order_of_construction() {
    let (_, layout) = Layers::new();
    let names: Vec<&str> = layout.entries().iter().map(LayoutEntry::name).collect();
    let attention = ["norm.gain", "wq.weight", "wk.weight", "wv.weight", "q_norm.gain", "k_norm.gain", "wo.weight"];
    let expected: Vec<String> = ["linear.weight", "linear.bias", "plain.weight"]
        .into_iter()
        .map(String::from)
        .chain((0..TOKENS).map(|token| format!("token{token}.weight")))
        .chain((0..TOKENS).map(|token| format!("token{token}.bias")))
        .chain(["norm.gain".to_owned()])
        .chain(attention.map(|name| format!("layer.attention.{name}")))
        .chain(["up.weight", "up.bias", "down.weight", "down.bias"].map(|name| format!("layer.mlp.{name}")))
        .collect();
    assert_eq!(names, expected);
    let twice = {
        let mut layout = Layout::builder();
        let mut names = layout.names();
        Linear::new(names.at("head"), 2, 2);
        Linear::new(names.at("head"), 2, 2);
        layout.build().unwrap_err()
    };
    assert!(twice.to_string().contains("two named `head."), "{twice}");
}

on_each_device! {
    fn a_layer_is_the_ops_of_its_formula(device: &Device) {
        let pairs: [(&str, Forward, Forward); 7] = [
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
                "a linear layer for each token",
                |layers, tape, x| layers.tokens.forward(tape, x),
                |layers, tape, x| tape.linear_per_token(x, &layers.tokens.weights, &layers.tokens.biases),
            ),
            (
                "norm",
                |layers, tape, x| layers.norm.forward(tape, x),
                |layers, tape, x| tape.rms_norm(x, layers.norm.gain, RmsNorm::EPSILON),
            ),
            (
                "gelu",
                |layers, tape, x| Gelu.forward(tape, &layers.plain.forward(tape, x)?),
                |layers, tape, x| tape.gelu(&tape.linear(x, layers.plain.weight, None)?),
            ),
            (
                "attention",
                |layers, tape, x| layers.attention.forward(tape, x),
                |layers, tape, x| {
                    let Attention { norm, projections, qk_norm, output } = &layers.attention;
                    let qkv = tape.norm_project(x, norm.gain, norm.epsilon, projections)?;
                    let mixed = tape.attention(&qkv, Some((qk_norm, norm.epsilon)), &ops::AttentionForm::new(WIDTH / 64))?;
                    tape.linear_residual(&mixed, output.weight, None, x)
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
            assert!(layer == ops, "{name}: other bits than its ops");
            assert!(layer.1.iter().any(|&bits| bits << 1 != 0), "{name}: no gradient");
        }
    }
}
