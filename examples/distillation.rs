//! Distillation (Hinton, Vinyals and Dean, 2015) of a small GPT into a smaller one.
//!
//! `cargo run --release --example distillation -- FILE`. A teacher learns the bytes of a text. One
//! student learns the teacher's probabilities, and another only the bytes. Exit code 0: the first
//! has the smaller held-out loss. 1: it has not.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use clap::Parser;
use std::{error::Error, path::PathBuf, process::ExitCode};
use stepscope::data::Windows;
use stepscope::files::PlainFile;
use stepscope::nn::{Block, Embedding, LayerNorm, Linear};
use stepscope::parameters::ParameterSpecBuilder;
use stepscope::prelude::*;

const CONTEXT: usize = 32;
const BATCH: u64 = 16;
/// The bytes that the model tells apart. All others are the last.
const CLASSES: usize = 128;

/// Distills a model of a text
#[derive(Parser)]
struct Args {
    /// The text
    text: PathBuf,
    /// Device to train on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,
}

struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(spec: &mut ParameterSpecBuilder, width: usize, layers: usize) -> Self {
        Self {
            tokens: Embedding::new(spec.at("tokens"), CLASSES, width, 0.02),
            positions: Embedding::new(spec.at("positions"), CONTEXT, width, 0.02),
            blocks: (0..layers).map(|n| Block::gpt2(spec.at(format!("blocks.{n}")), width, 4, 4 * width)).collect(),
            norm: LayerNorm::new(spec.at("norm"), width),
            head: Linear::new(spec.at("head"), width, CLASSES),
        }
    }
}

#[derive(HostBatch)]
struct Batch {
    tokens: Vec<[u32; CONTEXT]>,
    next: Vec<[u32; CONTEXT]>,
    /// The teacher's logits.
    teacher: Option<Vec<[[f32; CLASSES]; CONTEXT]>>,
}

impl Model for Gpt {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let x = self.tokens.forward(tape, batch.indices("tokens")?)?;
        let x = self.positions.add_positions(tape, &x)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(tape, &x))?;
        self.head.forward(tape, &self.norm.forward(tape, &x)?)
    }

    /// Adds the divergence from the teacher's probabilities, if the batch has them.
    fn training_loss<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let logits = self.forward(tape, batch)?;
        let loss = self.loss(tape, &logits, batch)?;
        let Ok(teacher) = batch.input::<f32>("teacher") else { return Ok(loss) };
        let [ours, theirs] = [logits.log_softmax()?, tape.input(teacher).log_softmax()?];
        let divergence = (theirs.exp()? * (theirs - ours)?)?.sum(-1)?.mean(..)?;
        (loss * 0.3)? + (divergence * 0.7)?
    }
}

fn main() -> std::result::Result<ExitCode, Box<dyn Error>> {
    let args = Args::parse();
    let text: Vec<u32> = PlainFile::read_whole(&args.text, 1 << 20)?
        .iter()
        .map(|&byte| u32::from(byte).min(CLASSES as u32 - 1))
        .collect();
    let (training, held_out) = text.split_at(text.len() / 10 * 9);
    let batch = |text: &[u32], numbers| {
        let (tokens, next) = Windows::new(text.len(), CONTEXT, 7)?.batch(text, numbers)?;
        Ok(Batch { tokens, next, teacher: None })
    };
    let of_update = |update| batch(training, BATCH * update..BATCH * (update + 1));
    let test = batch(held_out, 0..Windows::new(held_out.len(), CONTEXT, 7)?.per_pass())?;
    let device = Device::open(args.device)?;
    let config = AdamW { learning_rate: 3e-3, ..AdamW::default() };

    let mut losses = Vec::new();
    let mut spec = ParameterSpec::builder();
    let model = Gpt::new(&mut spec, 96, 2);
    let state = TrainState::new(&device, model, &spec.build()?, 7, config)?;
    let mut teacher = Trainer::captured(&device, state, &of_update(0)?)?;
    teacher.fit((0..500).map(of_update))?;
    losses.push(("teacher", teacher.evaluate(&test)?));
    for name in ["student", "student, distilled"] {
        let mut spec = ParameterSpec::builder();
        let model = Gpt::new(&mut spec, 32, 1);
        let state = TrainState::new(&device, model, &spec.build()?, 7, config)?;
        let mut batch = |update| {
            let batch = of_update(update)?;
            if name == "student" {
                return Ok(batch);
            }
            let (_, logits) = teacher.evaluate_with(&batch, |step, logits| step.read(logits.value()))?;
            Ok(Batch { teacher: Some(logits.as_chunks().0.as_chunks().0.to_vec()), ..batch })
        };
        let mut student = Trainer::captured(&device, state, &batch(0)?)?;
        student.fit((0..500).map(batch))?;
        losses.push((name, student.evaluate(&test)?));
    }
    losses.iter().for_each(|(name, loss)| println!("{name:<18} held out {loss:.3} nats a byte"));
    Ok(ExitCode::from(u8::from(losses[2].1 >= losses[1].1)))
}
