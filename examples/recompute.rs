//! What a training step of a transformer takes, by tokens, with its blocks as checkpoints and without:
//! `cargo run --release --example recompute`.
//!
//! Nothing is computed and no memory taken: `Arena::measure` counts. The blocks are those of a small Llama, in f32, one sample.

#![forbid(unsafe_code)]

use stepscope::nn::{MultiHeadAttention, RmsNorm, SwiGlu};
use stepscope::ops::Rotary;
use stepscope::{Arena, Capacity, Device, DeviceKind, Gradients, Layout, Parameters, Result, Tape, Var};

const LAYERS: usize = 12;
const WIDTH: usize = 768;
const HEADS: usize = 12;
const HIDDEN: usize = 2048;

/// Handles, which a checkpoint's closure owns.
#[derive(Clone)]
struct Block {
    norms: [RmsNorm; 2],
    attention: MultiHeadAttention,
    mlp: SwiGlu,
}

impl Block {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s>> {
        let mixed = self.attention.forward(tape, &self.norms[0].forward(tape, x)?)?;
        let [x, h] = self.norms[1].forward_residual(tape, &mixed, x)?;
        self.mlp.forward_residual(tape, &h, &x)
    }
}

fn blocks() -> Result<(Vec<Block>, Layout)> {
    let mut layout = Layout::builder();
    let mut names = layout.names();
    let block = |layer: usize| Block {
        norms: ["norm1", "norm2"].map(|norm| RmsNorm::new(names.at(format!("{layer}.{norm}")), WIDTH)),
        attention: MultiHeadAttention::new(names.at(format!("{layer}.attention")), WIDTH, HEADS)
            .causal()
            .rotary(Rotary::new(10_000.0)),
        mlp: SwiGlu::new(names.at(format!("{layer}.mlp")), WIDTH, HIDDEN, WIDTH),
    };
    Ok(((0..LAYERS).map(block).collect(), layout.build()?))
}

/// The most bytes that a forward and a backward pass have in use.
fn bytes(arena: &Arena, tokens: usize, recompute: bool) -> Result<usize> {
    let (blocks, layout) = blocks()?;
    let measured = arena.measure(|step| {
        let weights = Parameters::new(step.device(), &layout, 7)?;
        let mut gradients = Gradients::zeros(&weights)?;
        let tape = Tape::new(step, &weights);
        let mut x = tape.input(step.empty([1, tokens, WIDTH])?);
        for block in &blocks {
            let block = block.clone();
            x = match recompute {
                true => tape.checkpoint(x, move |tape, x| block.forward(tape, &x))?,
                false => block.forward(&tape, &x)?,
            };
        }
        let loss = tape.mean(&x)?;
        tape.backward_afresh(&loss, &mut gradients)
    })?;
    Ok(measured.high_water_bytes())
}

fn main() -> Result<()> {
    let device = Device::open(DeviceKind::Emulated)?;
    let arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    println!("{:>8} {:>12} {:>12} {:>8} {:>18}", "tokens", "all kept", "recompute", "ratio", "recompute a token");
    for tokens in [1024, 2048, 4096, 8192, 16384, 32768] {
        let [all, recompute] = [false, true].map(|recompute| bytes(&arena, tokens, recompute));
        let (all, recompute) = (all?, recompute?);
        let mib = |bytes: usize| format!("{:.0} MiB", bytes as f64 / (1 << 20) as f64);
        let (ratio, each) = (all as f64 / recompute as f64, recompute as f64 / tokens as f64 / 1024.0);
        println!("{tokens:>8} {:>12} {:>12} {ratio:>8.1} {:>18}", mib(all), mib(recompute), format!("{each:.1} KiB"));
    }
    Ok(())
}
