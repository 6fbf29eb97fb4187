//! Benchmarks a training step of layers that are composed of ops: an LSTM, a convolutional net, a
//! denoiser, cross-attention and a mixture of experts. Compares it with PyTorch's in the same run
//! and, if its program is given, with candle's.
//!
//! Run `cargo bench --bench layers` (the emulator, small sizes) or `cargo bench --features cuda
//! --bench layers -- --device cuda`. `--precision tf32` rounds the operands of matrix multiplies on
//! both sides. Prints a table of medians and of memory, and writes every sample to
//! `benches/runs/DATE-GPU-layers.json`.
//!
//! A step is captured. It reads inputs that are on the device, takes the mean square of the output
//! as its loss, and updates with AdamW. Invariant: both sides compute the same layers on tensors of
//! the same shapes.

#![forbid(unsafe_code)]

#[allow(dead_code, reason = "other benches ask their peer case by case")]
mod harness;

use clap::Parser;
use harness::stored::{StoredAs, group};
use harness::values::uniform;
use harness::{Common, Peer, Samples, record};
use serde::{Deserialize, Serialize};
use stepscope::capture::{CaptureInputs, Output};
use stepscope::nn::{Conv2d, CrossAttention, LayerNorm, Linear, Lstm, Mixture, Sequential};
use stepscope::ops::{ConvolutionConfig, Precision};
use stepscope::optim::UpdateTicket;
use stepscope::parameters::ParameterSpecBuilder;
use stepscope::tensor::Shape;
use stepscope::{
    AdamW, Arena, Capacity, Device, DeviceKind, Gradients, HostInputs, Optimizer, ParameterSpec, Parameters, Result,
    Step, Tape, Var,
};

const SAMPLES: usize = 20;

/// Times training steps of layers, compared with PyTorch's
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Rounding of the operands of matrix multiplies, on both sides
    #[arg(long, value_name = "f32|tf32", default_value = "f32")]
    precision: Precision,
    /// Only the cases whose name contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// The program of `peers/candle/examples/layers.rs`, built with its feature `cuda`
    #[arg(long, value_name = "FILE")]
    candle: Option<String>,
}

/// A line of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    /// The time of a step, and the memory that it needs in addition to weights and optimizer.
    Measured { case: String, contender: String, nanoseconds: Samples, step_bytes: usize },
    /// The reason why a contender was not measured.
    Missing { case: String, contender: String, reason: String },
    /// A description of the peer.
    Peer { peer: String, device: String },
}

/// The layers of a case.
type Net = Box<dyn for<'t, 's> Fn(&Tape<'t, 's>, &[Var<'s>]) -> Result<Var<'s>>>;

/// Returns a net from inputs of these shapes.
type Build = fn(&mut ParameterSpecBuilder, &[&[usize]]) -> Net;

/// The name of a case, the shapes of its inputs, and its net. `peers/layers.py` has the same.
const CASES: [(&str, &[&[usize]], Build); 10] = [
    ("lstm, small", &[&[32, 48, 64]], lstm),
    ("lstm, large", &[&[256, 64, 1024]], lstm),
    ("convnet, small", &[&[32, 16, 16, 16]], convnet),
    ("convnet, large", &[&[256, 64, 32, 32]], convnet),
    ("denoiser, small", &[&[64, 256]], denoiser),
    ("denoiser, large", &[&[4096, 2048]], denoiser),
    ("cross-attention, small", &[&[4, 32, 128], &[4, 64, 128]], cross_attention),
    ("cross-attention, large", &[&[16, 512, 1024], &[16, 1024, 1024]], cross_attention),
    ("mixture, small", &[&[4, 64, 128]], mixture),
    ("mixture, large", &[&[8, 1024, 1024]], mixture),
];

/// One layer, whose states are as wide as its inputs.
fn lstm(spec: &mut ParameterSpecBuilder, shapes: &[&[usize]]) -> Net {
    let width = shapes[0][2];
    let layer = Lstm::new(spec.at("lstm"), width, width);
    Box::new(move |tape, inputs| layer.forward(tape, &inputs[0]))
}

/// Two convolutions of 3 x 3, each with a rectifier and pooling.
fn convnet(spec: &mut ParameterSpecBuilder, shapes: &[&[usize]]) -> Net {
    let (channels, config) = (shapes[0][1], ConvolutionConfig { padding: [1; 2], ..ConvolutionConfig::default() });
    let layers = Sequential::default()
        .then(Conv2d::new(spec.at("first"), [channels, 2 * channels], [3, 3], config))
        .then_fn(|_, x| x.relu()?.max_pool2d([2, 2]))
        .then(Conv2d::new(spec.at("second"), [2 * channels, 2 * channels], [3, 3], config))
        .then_fn(|_, x| x.relu()?.max_pool2d([2, 2]));
    Box::new(move |tape, inputs| layers.forward(tape, &inputs[0]))
}

/// Three blocks `x + linear(silu(norm(x)))`.
fn denoiser(spec: &mut ParameterSpecBuilder, shapes: &[&[usize]]) -> Net {
    let width = shapes[0][1];
    let block = |number| {
        let mut names = spec.at(format!("block{number}"));
        (LayerNorm::new(names.at("norm"), width), Linear::new(names.at("linear"), width, width))
    };
    let blocks: Vec<_> = (0..3).map(block).collect();
    Box::new(move |tape, inputs| {
        blocks.iter().try_fold(inputs[0], |x, (norm, linear)| {
            linear.forward_residual(tape, &norm.forward(tape, &x)?.silu()?, &x)
        })
    })
}

/// Four heads over the keys and values of another text.
fn cross_attention(spec: &mut ParameterSpecBuilder, shapes: &[&[usize]]) -> Net {
    let layer = CrossAttention::new(spec.at("attention"), shapes[0][2], shapes[1][2], 4);
    Box::new(move |tape, inputs| layer.forward(tape, &inputs[0], &inputs[1], None))
}

/// Eight experts, of which each token uses two.
fn mixture(spec: &mut ParameterSpecBuilder, shapes: &[&[usize]]) -> Net {
    let width = shapes[0][2];
    let layer = Mixture::new(spec.at("mixture"), [width, 2 * width], 8, 2);
    Box::new(move |tape, inputs| layer.forward(tape, &inputs[0]))
}

/// The state that persists across steps.
struct State {
    net: Net,
    parameters: Parameters,
    gradients: Gradients,
    optimizer: Optimizer<AdamW>,
    precision: Precision,
    inputs: usize,
}

impl State {
    fn new(device: &Device, shapes: &[&[usize]], build: Build, precision: Precision) -> Result<Self> {
        let mut spec = ParameterSpec::builder();
        let net = build(&mut spec, shapes);
        let parameters = Parameters::new(device, &spec.build()?, 7)?;
        let config = AdamW { learning_rate: 1e-5, ..AdamW::default() };
        let (gradients, optimizer) = (Gradients::zeros(&parameters)?, Optimizer::new(&parameters, config)?);
        Ok(Self { net, parameters, gradients, optimizer, precision, inputs: shapes.len() })
    }
}

/// Records a step. Returns its loss.
fn train<'s>(step: &mut Step<'s>, state: &mut State, slots: &CaptureInputs<'s>) -> Result<Output> {
    let State { net, parameters, gradients, optimizer, precision, inputs } = state;
    step.set_precision(*precision);
    let tape = Tape::new(step, parameters);
    let inputs = (0..*inputs).map(|number| Ok(tape.input(slots.input::<f32>(number)?))).collect::<Result<Vec<_>>>()?;
    let loss = net(&tape, &inputs)?.square()?.mean(..)?;
    tape.backward_overwrite(&loss, gradients)?;
    optimizer.apply(UpdateTicket::each_replay(slots), step, parameters, gradients)?;
    Ok(slots.output(loss.value()))
}

/// Measures our step.
fn measure(device: &Device, case: &str, shapes: &[&[usize]], build: Build, precision: Precision) -> Result<Line> {
    let values: Vec<Vec<f32>> =
        shapes.iter().zip(1..).map(|(shape, seed)| uniform(shape.iter().product(), seed)).collect();
    let mut inputs = HostInputs::new();
    for (values, shape) in values.iter().zip(shapes) {
        inputs = inputs.with(values, Shape::of("layers", shape)?)?;
    }
    let mut arena =
        Arena::builder(device).capacity(Capacity::mib(if is_gpu(device) { 24 << 10 } else { 512 })).build()?;
    let mut captured = arena.capture(State::new(device, shapes, build, precision)?, &inputs, train)?;
    captured.state_mut().optimizer.advance()?.leave_to_replay();
    let replay = captured.replay(&inputs)?;
    let loss = replay.read_scalar(*replay.outputs())?;
    assert!(loss.is_finite() && loss > 0.0, "{case}: a loss of {loss}");
    let each = if is_gpu(device) { 10 } else { 1 };
    let work = || {
        captured.state_mut().optimizer.advance()?.leave_to_replay();
        captured.repeat().map(drop)
    };
    let nanoseconds = Samples::collect(SAMPLES, each, work, || device.synchronize(device.deadline()))?;
    let step_bytes = captured.report().bytes_owned;
    Ok(Line::Measured { case: case.to_owned(), contender: "stepscope captured".to_owned(), nanoseconds, step_bytes })
}

fn is_gpu(device: &Device) -> bool {
    device.description().kind == DeviceKind::Cuda
}

fn main() -> harness::Result<()> {
    let Args { common, precision, only, candle } = Args::parse();
    let device = common.builder().open()?;
    let is_chosen = |name: &str| name.contains(&only) && (is_gpu(&device) || name.ends_with("small"));
    let cases: Vec<_> = CASES.into_iter().filter(|(name, ..)| is_chosen(name)).collect();
    let mut lines = Vec::new();
    for &(case, shapes, build) in &cases {
        lines.push(measure(&device, case, shapes, build, precision)?);
        let of_peer = if is_gpu(&device) { "cuda" } else { "cpu" };
        let mut arguments: Vec<String> =
            ["--device", of_peer, "--precision", &precision.to_string(), "--case", case].map(str::to_owned).into();
        arguments.extend(shapes.iter().map(|shape| shape.iter().map(usize::to_string).collect::<Vec<_>>().join(",")));
        let mut peers = vec![("PyTorch", Peer::start("layers.py", &arguments).rest::<Line>())];
        if let Some(program) = &candle {
            arguments.insert(0, program.clone());
            peers.push(("candle", Peer::of("bash", "benches/peers/run-rust.sh", &arguments).rest()));
        }
        for (contender, (of_peer, failed)) in peers {
            lines.extend(of_peer);
            let (case, contender) = (case.to_owned(), contender.to_owned());
            lines.extend(failed.map(|reason| Line::Missing { case, contender, reason }));
        }
    }
    print(&device, precision, cases.iter().map(|(case, ..)| *case), &lines);
    println!("samples in {}", record(&group("layers", precision, StoredAs::F32), &device, &lines)?);
    Ok(())
}

/// Prints a line for each case and contender: the median, its ratio to ours, and the step's memory.
fn print<'c>(device: &Device, precision: Precision, cases: impl Iterator<Item = &'c str>, lines: &[Line]) {
    println!("{}, multiplies in {precision}", device.description().name);
    println!("{:<24}{:<22}{:>12}{:>10}{:>12}", "case", "contender", "us", "of ours", "step MiB");
    for name in cases {
        let mut ours = None;
        for line in lines {
            match line {
                Line::Measured { case, contender, nanoseconds, step_bytes } if case == name => {
                    let median = nanoseconds.quantile(0.5);
                    let ratio = median / *ours.get_or_insert(median);
                    let (time, bytes) = (median * 1e-3, *step_bytes as f64 / f64::from(1 << 20));
                    println!("{case:<24}{contender:<22}{time:>12.1}{ratio:>10.2}{bytes:>12.1}");
                }
                Line::Missing { case, contender, reason } if case == name => {
                    println!("{case:<24}{contender:<22}not measured: {reason}");
                }
                _ => {}
            }
        }
    }
}
