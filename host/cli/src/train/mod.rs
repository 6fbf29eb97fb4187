//! Trains a language model on text, on this CPU or a GPU, and prints a sample of its text.
//!
//! ```text
//! stepscope train  # a million weights, Rust, two minutes
//! stepscope train --arch llama --data book.txt
//! stepscope train --device cuda --size 124m --data train.bin --precision bf16 --batch 16
//! ```
//! [`documents`] reads files, a [`tokenizer`] turns their [`text`] into tokens, and [`samples`]
//! cuts batches from them. The [`plan`] sets up the [`model`] and its training, which
//! [`crate::run`] runs. [`sample`] then generates text. [`weights`] reads Hugging Face files.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | the device or a file failed |
//! | 2 | the command line, the text or a given file is wrong, or the folder has another run's checkpoint; nothing was written |
//! | 130 | stopped by Ctrl-C, SIGTERM or SIGHUP |
//!
//! After a stop, `--resume` continues from the checkpoint, which exists once the first update was
//! made.

pub(crate) mod bad_input;
pub(crate) mod cli;
mod compressed;
mod documents;
pub(crate) mod model;
mod plan;
mod registry;
pub(crate) mod sample;
mod samples;
#[cfg(test)]
mod tests;
pub(crate) mod text;
mod token_file;
pub(crate) mod tokenizer;
mod trace;
pub(crate) mod weights;

use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use serde::Serialize;

use self::bad_input::Outcome;
use self::cli::Args;
use self::compressed::Compressed;
use self::model::Gpt;
use self::plan::Plan;
use self::samples::Sequences;
use crate::program::ranks::Rank;
use crate::program::results::CHECKPOINT;
use crate::program::screen::Screen;
use crate::program::signals;
use crate::run::report::Report;
use crate::run::{self, memory};
use crate::train::cli::Precision;
use stepscope::data::{TokenSampler, TokenSamplerConfig};
use stepscope::files::replace_file;
use stepscope::models::Weights;
use stepscope::ops::Activation;
use stepscope::{Device, Parameters, TrainState, bf16};

/// The size of the data.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DataSize {
    /// Tokens to train on.
    pub(crate) tokens: usize,
    /// Tokens held out.
    pub(crate) held_out: usize,
    /// The digest of all tokens.
    pub(crate) sha256: String,
    /// The bits per byte to which compressors reduce the text that evaluations predict.
    pub(crate) compressed: Compressed,
}

/// Trains, and returns the exit code.
pub(crate) fn main(args: &Args) -> ExitCode {
    run::main(|screen| run::on_ranks(&args.run, &args.claim(), screen, |shards| Plan::load(args, shards), run_rank))
}

/// Runs one rank, with activations stored as the precision implies. Returns false if it was stopped
/// early.
fn run_rank(plan: &Plan<'_>, rank: &Rank, stop: &AtomicBool, screen: &mut Screen) -> Outcome<bool> {
    match plan.args.run.precision {
        Precision::Bf16 => train_rank::<bf16>(plan, rank, stop, screen),
        _ => train_rank::<f32>(plan, rank, stop, screen),
    }
}

fn train_rank<S: Activation>(plan: &Plan<'_>, rank: &Rank, stop: &AtomicBool, screen: &mut Screen) -> Outcome<bool> {
    let args = plan.args;
    let device = rank.open(args.run.device, args.run.matrix_instruction)?;
    let group = rank.join(&device, &plan.settings_of_ranks())?;
    let needs = plan.memory::<S>(&device)?.of_rank(rank);
    needs.check(&device, memory::TRAINING_ADVICE)?;
    let mut state = plan.state::<S>(&device)?;
    let mut arena = memory::arena(&device, args.run.arena_mib, needs)?;
    let spec = state.parameters.spec().clone();
    let config = &plan.config;
    let data = DataSize {
        tokens: plan.text.sources().iter().map(|source| source.training.len()).sum(),
        held_out: plan.text.sources().iter().map(|source| source.held_out.len()).sum(),
        sha256: plan.text.sha256.clone(),
        compressed: Compressed::of(&plan.held_out),
    };
    screen.say(format_args!(
        "{:?} of {} weights, context {}; {} tokens to train on, {} held out; on the {}",
        config.family,
        spec.weights(),
        config.context,
        data.tokens,
        data.held_out,
        device.description().name
    ));
    let Compressed { gzip, xz } = data.compressed;
    screen.say(format_args!("the held-out text in bits per byte: {gzip:.2} by gzip, {xz:.2} by xz"));
    if let Some(path) = &args.trace {
        let order = plan.order()?;
        let windows: Vec<_> = (0..args.batch as u64).map(|number| order.window(number)).collect();
        let first = Sequences::of(&plan.text, &windows, plan.form())?;
        trace::write(path, &device, &mut state, &first)?;
        Weights::write(args.out.join("transformers"), config, &state.parameters, args.run.max_shard_size)?;
        return Ok(true);
    }

    screen.say(needs);
    let checkpoint = args.out.join(CHECKPOINT);
    let state = rank.in_group(group.as_ref(), state)?;
    let trainer = plan.trainer(&mut arena, state)?;
    let mut trainer = trainer.checkpoint(&checkpoint, args.run.checkpoint_every).stop_when(stop);
    let Some(trained) = plan.train(&mut trainer, &args.out, rank.leads())? else {
        screen.say(format_args!("stopped; continue with --resume {}", checkpoint.display()));
        return Ok(false);
    };
    signals::training_has_ended();
    if !rank.leads() {
        return Ok(true);
    }

    let TrainState { model, parameters, .. } = trainer.state();
    let sample = written(plan, &device, model, parameters)?;
    let export = args.out.join("transformers");
    Weights::write(&export, config, parameters, args.run.max_shard_size)?;
    for (name, contents) in plan.tokenizer.files() {
        replace_file(export.join(name), &contents)?;
    }
    let tokens = args.batch * plan.accumulate * config.context;
    let report = Report::of(&device, &mut trainer, data, trained, tokens, rank.ranks(), Some(sample.clone()))?;
    report.write(&args.out)?;
    screen.say(format_args!("{}; {}", report.speed, report.arena.summary()));
    screen.say(format_args!("weights {}; results in {}", report.weights_sha256, args.out.display()));
    screen.say(format_args!("--- a sample\n{}{sample}", args.sample));
    Ok(true)
}

/// Returns the text that the model generates after the given beginning.
fn written<S: Activation>(plan: &Plan<'_>, device: &Device, model: &Gpt<S>, weights: &Parameters) -> Outcome<String> {
    let Args { temperature, top_k, top_p, sample_tokens, .. } = *plan.args;
    let sampler = TokenSampler::new(TokenSamplerConfig { temperature, top_k, top_p }, plan.args.run.seed)?;
    let ends = Vec::from_iter(plan.tokenizer.end());
    let tokens = sample::write(device, model, weights, &plan.beginning, sample_tokens, &ends, &sampler)?;
    Ok(plan.tokenizer.decode(&tokens))
}
