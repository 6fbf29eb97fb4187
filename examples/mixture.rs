//! A small GPT whose feed-forward layers are mixtures of experts.
//!
//! `cargo run --release --example mixture -- FILE`. It learns the bytes of a text, of which the
//! last tenth is held out, and continues it. Exit code 0: the held-out loss is at most 2.6 nats a
//! byte. 1: it is larger.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use clap::Parser;
use std::{error::Error, path::PathBuf, process::ExitCode};
use stepscope::data::{TokenSampler, TokenSamplerConfig, Windows};
use stepscope::files::PlainFile;
use stepscope::nn::{Embedding, LayerNorm, Linear, Mixture, MultiHeadAttention};
use stepscope::parameters::ParameterSpecBuilder;
use stepscope::prelude::*;

const CONTEXT: usize = 64;
const WIDTH: usize = 64;
const LAYERS: usize = 2;
const EXPERTS: usize = 4;
const BATCH: u64 = 8;
const UPDATES: u64 = 400;

/// Learns a text
#[derive(Parser)]
struct Args {
    /// The text
    text: PathBuf,
    /// Device to train on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,
}

struct Block {
    norms: [LayerNorm; 2],
    attention: MultiHeadAttention,
    mixture: Mixture,
}

struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(spec: &mut ParameterSpecBuilder) -> Self {
        let mut block = |n| {
            let mut names = spec.at(format!("blocks.{n}"));
            Block {
                norms: ["norm1", "norm2"].map(|name| LayerNorm::new(names.at(name), WIDTH)),
                attention: MultiHeadAttention::new(names.at("attention"), WIDTH, 4).causal(),
                mixture: Mixture::new(names.at("mixture"), [WIDTH, 2 * WIDTH], EXPERTS, 2),
            }
        };
        Self {
            blocks: (0..LAYERS).map(&mut block).collect(),
            tokens: Embedding::new(spec.at("tokens"), 256, WIDTH, 0.02),
            positions: Embedding::new(spec.at("positions"), CONTEXT, WIDTH, 0.02),
            norm: LayerNorm::new(spec.at("norm"), WIDTH),
            head: Linear::new(spec.at("head"), WIDTH, 256),
        }
    }

    /// Computes the logits of the next bytes, and the sum of the mixtures' losses.
    fn logits<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<[Var<'s>; 2]> {
        let x = self.tokens.forward(tape, batch.indices(0)?)?;
        let mut x = self.positions.add_positions(tape, &x)?;
        let mut losses = Vec::new();
        for Block { norms: [first, second], attention, mixture } in &self.blocks {
            x = (attention.forward(tape, &first.forward(tape, &x)?)? + x)?;
            let (y, loss) = mixture.forward_balanced(tape, &second.forward(tape, &x)?)?;
            x = (y + x)?;
            losses.push(loss);
        }
        let logits = self.head.forward(tape, &self.norm.forward(tape, &x)?)?;
        Ok([logits, Var::stack(&losses, 0)?.sum(..)?])
    }
}

impl Model for Gpt {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.logits(tape, batch).map(|[logits, _]| logits)
    }

    fn training_loss<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let [logits, balance] = self.logits(tape, batch)?;
        self.loss(tape, &logits, batch)? + (balance * 0.01)?
    }
}

fn main() -> std::result::Result<ExitCode, Box<dyn Error>> {
    let args = Args::parse();
    let text: Vec<u32> = PlainFile::read_whole(&args.text, 1 << 20)?.into_iter().map(u32::from).collect();
    let (training, held_out) = text.split_at(text.len() / 10 * 9);
    let windows = Windows::new(training.len(), CONTEXT, 7)?;
    let batch = |update| windows.batch::<CONTEXT>(training, BATCH * update..BATCH * (update + 1));
    let mut spec = ParameterSpec::builder();
    let model = Gpt::new(&mut spec);
    let device = Device::open(args.device)?;
    let state = TrainState::new(&device, model, &spec.build()?, 7, AdamW { learning_rate: 3e-3, ..AdamW::default() })?;
    let mut trainer = Trainer::captured(&device, state, &batch(0)?)?;
    let progress = trainer.fit((0..UPDATES).map(batch))?;
    let windows = Windows::new(held_out.len(), CONTEXT, 7)?;
    let loss = trainer.evaluate(&windows.batch::<CONTEXT>(held_out, 0..windows.per_pass())?)?;
    println!("loss {:.3}, held out {loss:.3} nats a byte", progress.mean_loss());

    let config = TokenSamplerConfig { temperature: 0.8, ..TokenSamplerConfig::default() };
    let mut sampler = TokenSampler::new(config, 7)?;
    let mut written = held_out[..CONTEXT].to_vec();
    for _ in 0..200 {
        let context: [u32; CONTEXT] = written[written.len() - CONTEXT..].try_into()?;
        let batch = (vec![context], vec![context]);
        let (_, logits) = trainer.evaluate_with(&batch, |step, logits| step.read(logits.value()))?;
        written.push(sampler.next(&logits[logits.len() - 256..])?);
    }
    println!("{}", String::from_utf8_lossy(&written.iter().map(|&byte| byte as u8).collect::<Vec<_>>()));
    Ok(ExitCode::from(u8::from(loss > 2.6)))
}
