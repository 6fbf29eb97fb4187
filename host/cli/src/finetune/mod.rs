//! Fine-tunes a language model of transformers on chats, prompts with completions, texts, or
//! preferences.
//!
//! ```text
//! stepscope finetune --weights DIR --data chats.jsonl
//! stepscope finetune --weights DIR --data chats.jsonl --lora 16 --merge
//! stepscope finetune --weights DIR --data chats.jsonl --lora 16 --quantize nf4 --precision bf16
//! stepscope finetune --weights DIR --data chats.jsonl --eval-share 0.05 --patience 2 --precision bf16
//! stepscope finetune --weights DIR --data pairs.jsonl --preferences dpo --lora 16
//! ```
//! [`data`] turns rows into packed contexts, in which only the assistant's text counts. The
//! [`plan`] sets up the model of [`crate::train::model`] and its training, which [`crate::run`]
//! runs. The loss is a mean over the counted tokens of an update, however these are spread over
//! parts and ranks. The exported model is the best by evaluation, or the last one if there are no
//! evaluations.
//!
//! The exit codes are those of [`crate::train`].

pub(crate) mod cli;
mod data;
mod plan;
mod references;
#[cfg(test)]
mod tests;

use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use stepscope::data::{TokenSampler, TokenSamplerConfig};
use stepscope::files::{PlainFile, replace_file};
use stepscope::models::Weights;
use stepscope::ops::Activation;
use stepscope::{Device, Parameters, TrainState, bf16};
use stepscope_chat::ChatTemplate;

use self::cli::Args;
use self::plan::Plan;
use crate::program::ranks::Rank;
use crate::program::results::CHECKPOINT;
use crate::program::screen::Screen;
use crate::program::signals;
use crate::run::best::Best;
use crate::run::folder::{MAX_COPIED, copy_companions};
use crate::run::report::{Position, Report};
use crate::run::{self, memory};
use crate::train::bad_input::{Outcome, bad};
use crate::train::cli::Precision;
use crate::train::model::Gpt;
use crate::train::sample;

/// Fine-tunes, and returns the exit code.
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
    let references = plan.start(&mut arena, &mut state, rank.leads())?;
    let (config, size) = (&plan.config, &plan.data.size);
    screen.say(format_args!(
        "{:?} of {} weights, of which {} are trained, on the {}",
        config.family,
        state.parameters.spec().weights(),
        state.parameters.spec().trained_weights(),
        device.description().name
    ));
    size.lines(config.context, plan.total()).into_iter().for_each(|line| screen.say(line));
    if let Some(date) = plan.folder.template.as_ref().and_then(ChatTemplate::date) {
        screen.say(format_args!("the chat template writes the date {date}; --date gives another"));
    }
    screen.say(needs);
    let checkpoint = args.out.join(CHECKPOINT);
    let state = rank.in_group(group.as_ref(), state)?;
    let trainer = plan.trainer(&mut arena, state)?;
    let mut trainer = trainer.checkpoint(&checkpoint, args.run.checkpoint_every).stop_when(stop);
    let Some(trained) = plan.train(&mut trainer, references, rank.leads())? else {
        screen.say(format_args!("stopped; continue with --resume {}", checkpoint.display()));
        return Ok(false);
    };
    signals::training_has_ended();
    if !rank.leads() {
        return Ok(true);
    }
    if trained.ended_early {
        screen.say("ended early, because the evaluations no longer improved");
    }

    let tokens = plan.contexts_per_update() * config.context;
    let mut report = Report::of(&device, &mut trainer, size.clone(), trained, tokens, rank.ranks(), None)?;
    if let Some(update) = best_before_the_end(&report.position) {
        // The memory of training is free again before the best weights are read.
        drop(trainer);
        let (model, spec) = plan.model::<S>()?;
        let mut parameters = Parameters::new(&device, &spec, 0)?;
        plan.load_weights(&mut parameters)?;
        let best = Best { notes: plan::NOTES, settings: &plan.settings(), position: &report.position };
        best.load(&args.out)?.restore(&mut parameters, None)?;
        (report.exported_update, report.weights_sha256) = (update, parameters.sha256()?);
        report.sample = finish(plan, &device, &model, &parameters)?;
    } else {
        let TrainState { model, parameters, .. } = trainer.state();
        report.sample = finish(plan, &device, model, parameters)?;
    }
    report.write(&args.out)?;
    screen.say(format_args!("{}; {}", report.speed, report.arena.summary()));
    screen.say(format_args!(
        "the model after update {} is in {}; weights {}",
        report.exported_update,
        plan.export().display(),
        report.weights_sha256
    ));
    if let Some((message, answer)) = args.sample.as_ref().zip(report.sample.as_ref()) {
        screen.say(format_args!("--- {message}\n{answer}"));
    }
    Ok(true)
}

/// Returns the update of the best evaluation, unless it is that of the final weights.
fn best_before_the_end(position: &Position) -> Option<u64> {
    let update = position.evaluations[position.best()?].update;
    (update < position.losses.len() as u64).then_some(update)
}

/// Exports the model, and returns its answer to the sample's message.
fn finish<S: Activation>(
    plan: &Plan<'_>,
    device: &Device,
    model: &Gpt<S>,
    weights: &Parameters,
) -> Outcome<Option<String>> {
    let Plan { args, config, folder, .. } = plan;
    match &plan.lora {
        Some(lora) if !args.merge => lora.write(plan.export(), config, weights)?,
        Some(_) => Weights::write_merged(plan.export(), &model.layers, weights, args.run.max_shard_size)?,
        None => Weights::write(plan.export(), config, weights, args.run.max_shard_size)?,
    }
    copy_companions(&args.weights, &plan.export())?;
    if let Some(tokenizer) = args.tokenizer() {
        let bytes = PlainFile::read_whole(&tokenizer, MAX_COPIED).map_err(|reason| bad(tokenizer.display(), reason))?;
        replace_file(plan.export().join("tokenizer.json"), &bytes)?;
    }
    let Some(beginning) = &plan.beginning else { return Ok(None) };
    let sampler = TokenSampler::new(TokenSamplerConfig { temperature: 0.0, top_k: None, top_p: None }, args.run.seed)?;
    let tokens = sample::write(device, model, weights, beginning, args.sample_tokens, &folder.stops, &sampler)?;
    Ok(Some(folder.tokenizer.decode(&tokens)))
}
