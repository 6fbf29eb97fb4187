//! Trains a GPT-2 or Llama language model on text, on this CPU or a GPU, and prints a sample of its
//! text.
//!
//! ```text
//! stepscope train  # a million weights, bytes of Rust, two minutes
//! stepscope train --arch llama --data book.txt
//! stepscope train --device cuda --size 124m --data train.bin --precision bf16 --batch 16
//! ```
//! A [`tokenizer`] turns [`text`] into tokens, and [`samples`] cuts batches from them. The [`plan`]
//! sets up the [`model`] and its training, which [`updates`] runs. [`sample`] then generates text.
//! [`weights`] reads and writes Hugging Face files.
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

mod bad_input;
pub(crate) mod cli;
pub(crate) mod model;
mod plan;
mod registry;
mod report;
mod sample;
mod samples;
#[cfg(test)]
mod tests;
mod text;
mod token_file;
mod tokenizer;
mod trace;
mod updates;
mod weights;

use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use self::bad_input::{BadInput, Outcome, bad};
use self::cli::Args;
use self::model::{Activation, Gpt};
use self::plan::Plan;
use self::report::{Bytes, DataSize, Report};
use self::samples::Sequences;
use self::updates::Trained;
use crate::program::exit::{self, INTERRUPTED};
use crate::program::log::{self, Log};
use crate::program::ranks::{self, Rank};
use crate::program::results::CHECKPOINT;
use crate::program::screen::Screen;
use crate::program::usage::{ArenaUse, CaptureUse, MemoryUse, ModelSize};
use crate::program::{results, signals};
use stepscope::ops::Precision;
use stepscope::{Device, Parameters, TokenSampler, TokenSamplerConfig, TrainState, bf16};

/// Trains, and returns the exit code.
pub(crate) fn main(args: &Args) -> ExitCode {
    log::start(Log::Text);
    let mut screen = Screen::default();
    let ended = run(args, &mut screen);
    match ended.and_then(|finished| screen.end().map(|()| finished).map_err(Into::into)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(INTERRUPTED),
        Err(error) => {
            log::failed(Log::Text, &*error);
            ExitCode::from(if error.is::<BadInput>() { 2 } else { exit::code(&*error) })
        }
    }
}

/// Loads the text, trains and writes a sample, on each rank of this process. Returns false if it
/// was stopped early.
fn run(args: &Args, screen: &mut Screen) -> Outcome<bool> {
    let stop = signals::listen(Log::Text).map_err(|error| format!("cannot install signal handlers: {error}"))?;
    let ranks = args.ranks.ranks().map_err(|error| bad("--ranks", error))?;
    let leads = ranks[0].leads();
    if leads {
        // Checked before anything slow.
        results::check(&args.out, args.resume.as_deref(), args.overwrite).map_err(|reason| bad("--out", reason))?;
    }
    let plan = Plan::load(args, ranks[0].shards())?;
    let _results = if leads {
        Some(results::take(&args.out, args.resume.as_deref(), args.overwrite)?)
    } else {
        *screen = Screen::quiet();
        None
    };
    let rank = |rank: &Rank, screen: &mut Screen| run_rank(&plan, rank, &stop, screen);
    let quiet = |other: &Rank| rank(other, &mut Screen::quiet()).map(drop).map_err(|error| error.to_string());
    ranks::on_each(ranks, |first| rank(first, screen), quiet)
}

/// Runs one rank, with activations stored as the precision implies. Returns false if it was stopped
/// early.
fn run_rank(plan: &Plan<'_>, rank: &Rank, stop: &AtomicBool, screen: &mut Screen) -> Outcome<bool> {
    match plan.args.precision {
        Precision::Bf16 => train_rank::<bf16>(plan, rank, stop, screen),
        _ => train_rank::<f32>(plan, rank, stop, screen),
    }
}

fn train_rank<S: Activation>(plan: &Plan<'_>, rank: &Rank, stop: &AtomicBool, screen: &mut Screen) -> Outcome<bool> {
    let args = plan.args;
    let device = rank.open(args.device)?;
    let group = rank.join(&device, &plan.settings_of_ranks())?;
    let mut state = plan.state::<S>(&device)?;
    let mut arena = plan.arena(&device, &mut state)?;
    let spec = state.parameters.layout().clone();
    let (model_size, bytes) = (
        ModelSize { tensors: spec.entries().len(), weights: spec.weights() },
        Bytes { weights: weights_bytes(&state.parameters), steps: 0 },
    );
    let sizes = plan.sizes;
    let data = DataSize {
        tokens: plan.text.training().len(),
        held_out: plan.text.held_out().len(),
        sha256: plan.text.sha256.clone(),
    };
    screen.say(format_args!(
        "{:?} of {} weights, context {}; {} tokens to train on, {} held out; on the {}",
        sizes.arch,
        model_size.weights,
        sizes.context,
        data.tokens,
        data.held_out,
        device.description().name
    ));
    if let Some(path) = &args.trace {
        let windows = plan.windows()?;
        let windows: Vec<_> = (0..args.batch as u64).map(|number| windows.window(number)).collect();
        let first = Sequences::of(&plan.text, &windows, plan.form())?;
        trace::write(path, &mut arena, &mut state, &first)?;
        weights::write(&args.out.join("transformers"), &state.parameters, &sizes, args.max_shard_size)?;
        return Ok(true);
    }

    let checkpoint = args.out.join(CHECKPOINT);
    let state = rank.in_group(group.as_ref(), state)?;
    let trainer = plan.trainer(&mut arena, state)?;
    let mut trainer = trainer.checkpoint(&checkpoint, args.checkpoint_every).stop_when(stop);
    let Some(Trained { position, seconds }) = plan.train(&mut trainer, &args.out, rank.leads())? else {
        screen.say(format_args!("stopped; continue with --resume {}", checkpoint.display()));
        return Ok(false);
    };
    signals::training_has_ended();
    if !rank.leads() {
        return Ok(true);
    }

    let memory = MemoryUse::of(trainer.memory_forecast());
    let TrainState { model, parameters, .. } = trainer.state();
    let sample = written(plan, &device, model, parameters)?;
    weights::write(&args.out.join("transformers"), parameters, &sizes, args.max_shard_size)?;
    let weights_sha256 = parameters.sha256()?;
    let capture = trainer.capture_report().map(|report| CaptureUse::after(None, report));
    let arena = trainer.arena().report();
    let report = Report {
        device: device.description().kind.to_string(),
        ptx: device.description().ptx.as_ref().map(ToString::to_string),
        model: model_size,
        data,
        tokens_per_second: median(&seconds)
            .map(|seconds| (args.batch * plan.accumulate * sizes.context) as f64 / seconds),
        weights_sha256,
        sample,
        bytes: Bytes { steps: arena.capacity_bytes + arena.captured_bytes, ..bytes },
        arena: ArenaUse::from(arena),
        memory,
        capture,
        position,
        seconds,
    };
    report.write(&args.out, sizes.vocabulary)?;
    let speed = match report.tokens_per_second {
        Some(tokens) => format!("{tokens:.0} tokens/s"),
        None => format!("all {} updates had already been made", args.updates),
    };
    screen.say(format_args!("{speed}; {}", report.arena.summary()));
    screen.say(format_args!("weights {}; results in {}", report.weights_sha256, args.out.display()));
    screen.say(format_args!("--- a sample\n{}{}", args.sample, report.sample));
    Ok(true)
}

/// Returns the bytes that persist across steps: weights, gradients, two moments, and the BF16 copy.
fn weights_bytes(weights: &Parameters) -> usize {
    let copy = weights.bf16_copy().map_or(0, |copy| copy.len() * size_of::<bf16>());
    4 * weights.flat().len() * size_of::<f32>() + copy
}

/// Returns the text that the model generates after the given beginning.
fn written<S: Activation>(plan: &Plan<'_>, device: &Device, model: &Gpt<S>, weights: &Parameters) -> Outcome<String> {
    let Args { temperature, top_k, top_p, seed, sample_tokens, .. } = *plan.args;
    let sampler = TokenSampler::new(TokenSamplerConfig { temperature, top_k, top_p }, seed)?;
    let length = (sample_tokens, plan.tokenizer.end());
    let tokens = sample::write(device, model, weights, &plan.beginning, length, &sampler)?;
    Ok(plan.tokenizer.decode(&tokens))
}

/// Returns the median, or none if no update was made.
fn median(seconds: &[f64]) -> Option<f64> {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}
