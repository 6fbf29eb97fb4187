//! Measures the memory of a transformer's training step by its number of tokens, with and without
//! recompute: `cargo run --release --example recompute`.
//!
//! `Arena::measure` counts the bytes in a dry run, without computing or allocating. The blocks are
//! those of a small Llama, with one sample. `--train TOKENS --device cuda` instead makes a few
//! captured BF16 updates on one sample of that length.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use clap::Parser;
use std::time::Instant;
use stepscope::capture::CaptureInputs;
use stepscope::nn::{MultiHeadAttention, RmsNorm, SwiGlu};
use stepscope::ops::{Activation, Rotary};
use stepscope::optim::UpdateTicket;
use stepscope::{
    AdamW, Arena, Capacity, Device, DeviceKind, Gradients, HostInputs, Optimizer, ParameterSpec, Parameters, Result,
    Step, Tape, Var, bf16,
};

const LAYERS: usize = 12;
const WIDTH: usize = 768;
const HEADS: usize = 12;
const HIDDEN: usize = 2048;
const UPDATES: usize = 4;

/// Prints the memory of a training step by tokens, or trains on one long sample
#[derive(Debug, Parser)]
struct Args {
    /// Device to train on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "emulated")]
    device: DeviceKind,
    /// Make a few updates on one sample with this many tokens
    #[arg(long, value_name = "TOKENS")]
    train: Option<usize>,
}

/// The handles of a block, cloned into the recomputed closure.
#[derive(Clone)]
struct Block {
    norms: [RmsNorm; 2],
    attention: MultiHeadAttention,
    mlp: SwiGlu,
}

impl Block {
    fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let mixed = self.attention.forward(tape, &self.norms[0].forward(tape, x)?)?;
        let [x, h] = self.norms[1].forward_residual(tape, &mixed, x)?;
        self.mlp.forward_residual(tape, &h, &x)
    }
}

fn blocks() -> Result<(Vec<Block>, ParameterSpec)> {
    let mut spec = ParameterSpec::builder();
    let block = |layer: usize| Block {
        norms: ["norm1", "norm2"].map(|norm| RmsNorm::new(spec.at(format!("{layer}.{norm}")), WIDTH)),
        attention: MultiHeadAttention::new(spec.at(format!("{layer}.attention")), WIDTH, HEADS)
            .causal()
            .rotary(Rotary::new(10_000.0)),
        mlp: SwiGlu::new(spec.at(format!("{layer}.mlp")), WIDTH, HIDDEN, WIDTH),
    };
    Ok(((0..LAYERS).map(block).collect(), spec.build()?))
}

/// Runs x through the blocks.
fn forward<'s, S: Activation>(
    tape: &Tape<'_, 's>,
    blocks: &[Block],
    mut x: Var<'s, S>,
    recompute: bool,
) -> Result<Var<'s, S>> {
    for block in blocks {
        let block = block.clone();
        x = match recompute {
            true => tape.recompute(x, move |tape, x| block.forward(tape, &x))?,
            false => block.forward(tape, &x)?,
        };
    }
    Ok(x)
}

/// Returns the peak bytes of a forward and a backward pass.
fn bytes<S: Activation>(arena: &Arena, tokens: usize, recompute: bool) -> Result<usize> {
    let (blocks, spec) = blocks()?;
    let measured = arena.measure(|step| {
        let weights = Parameters::new(step.device(), &spec, 7)?.with_bf16_copy()?;
        let mut gradients = Gradients::zeros(&weights)?;
        let tape = Tape::new(step, &weights);
        let x = tape.input(step.empty::<S>([1, tokens, WIDTH])?);
        let x = forward(&tape, &blocks, x, recompute)?;
        let target = step.empty([1, tokens, WIDTH])?.save();
        let loss = tape.squared_error_by(&x, &target, 1.0)?;
        tape.backward_overwrite(&loss, &mut gradients)
    })?;
    Ok(measured.high_water_bytes())
}

/// The state of an update.
struct Training {
    blocks: Vec<Block>,
    weights: Parameters,
    gradients: Gradients,
    adamw: Optimizer<AdamW>,
}

/// Makes updates on one sample in BF16 with recompute, and prints their loss and time.
fn train(kind: DeviceKind, tokens: usize) -> Result<()> {
    let device = Device::open(kind)?;
    let (blocks, spec) = blocks()?;
    let weights = Parameters::new(&device, &spec, 7)?.with_bf16_copy()?;
    let config = AdamW { learning_rate: 1e-3, ..AdamW::default() };
    let adamw = Optimizer::new(&weights, config)?;
    let state = Training { blocks, gradients: Gradients::zeros(&weights)?, weights, adamw };
    let needed = bytes::<bf16>(&Arena::builder(&device).capacity(Capacity::mib(1)).build()?, tokens, true)?;
    let mut arena = Arena::builder(&device).capacity(Capacity::Bytes(needed + needed / 8 + (64 << 20))).build()?;
    let x: Vec<bf16> =
        (0..tokens * WIDTH).map(|at| bf16::from_f32(((at * 37 + at / WIDTH) % 97) as f32 / 48.0 - 1.0)).collect();
    let target: Vec<f32> = (0..tokens * WIDTH).map(|at| ((at * 11) % 53) as f32 / 26.0 - 1.0).collect();
    let inputs = HostInputs::new().with(&x, [1, tokens, WIDTH])?.with(&target, [1, tokens, WIDTH])?;
    let mut captured =
        arena.capture(state, &inputs, |step: &mut Step<'_>, state: &mut Training, slots: &CaptureInputs<'_>| {
            let Training { blocks, weights, gradients, adamw } = state;
            let tape = Tape::new(step, weights);
            let y = forward(&tape, blocks, tape.input(slots.input::<bf16>(0)?), true)?;
            let loss = tape.squared_error(&y, &slots.input(1)?)?;
            let value = slots.output(loss.value());
            tape.backward_overwrite(&loss, gradients)?;
            adamw.apply(UpdateTicket::each_replay(slots), step, weights, gradients)?;
            Ok(value)
        })?;
    for update in 1..=UPDATES {
        captured.state_mut().adamw.advance()?.leave_to_replay();
        let start = Instant::now();
        let replay = captured.replay(&inputs)?;
        let loss = replay.read_scalar(*replay.outputs())?;
        let seconds = start.elapsed().as_secs_f64();
        println!("update {update}: loss {loss:.6}, {seconds:.3} s, {:.0} tokens/s", tokens as f64 / seconds);
    }
    println!("{tokens} tokens in one sample: {:.0} MiB of activations", needed as f64 / f64::from(1 << 20));
    Ok(())
}

fn main() -> Result<()> {
    let Args { device, train: tokens } = Args::parse();
    if let Some(tokens) = tokens {
        return train(device, tokens);
    }
    let device = Device::open(DeviceKind::Emulated)?;
    let arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    println!(
        "{:>8} {:>6} {:>12} {:>12} {:>8} {:>18}",
        "tokens", "stored", "all kept", "recompute", "ratio", "recompute a token"
    );
    for tokens in [1024, 2048, 4096, 8192, 16384, 32768] {
        for (stored, bytes) in
            [("f32", bytes::<f32> as fn(&Arena, usize, bool) -> Result<usize>), ("bf16", bytes::<bf16>)]
        {
            let [all, recompute] = [false, true].map(|recompute| bytes(&arena, tokens, recompute));
            let (all, recompute) = (all?, recompute?);
            let mib = |bytes: usize| format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20));
            let (ratio, each) = (all as f64 / recompute as f64, recompute as f64 / tokens as f64 / 1024.0);
            let (all, recompute) = (mib(all), mib(recompute));
            println!("{tokens:>8} {stored:>6} {all:>12} {recompute:>12} {ratio:>8.1} {:>18}", format!("{each:.1} KiB"));
        }
    }
    Ok(())
}
