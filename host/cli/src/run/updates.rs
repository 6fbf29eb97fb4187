//! Training: updates, evaluations, early stopping, and checkpoints.
//!
//! Invariant: a run that stops and resumes makes the same updates and evaluations as an
//! uninterrupted run, and ends at the same update.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::f64::consts::LN_2;
use std::path::Path;
use std::time::{Duration, Instant};

use stepscope::data::Loader;
use stepscope::ops::Activation;
use stepscope::train::{Ended, Observer, ProgressBar, Update};
use stepscope::{Arena, Checkpoint, EpochProgress, Error, HostBatch, Result, Trainer};

use crate::program::log::Log;
use crate::program::results::{BEST, CHECKPOINT};
use crate::program::settings::{self, Settings};
use crate::program::signals;
use crate::run::best::Best;
use crate::run::gpu::GpuWatch;
use crate::run::logs::{Line, Logs};
use crate::run::report::{Evaluation, Position};
use crate::run::rule::Rule;
use crate::train::bad_input::{Outcome, bad};
use crate::train::model::Gpt;
use crate::train::model::preferences::Rewards;

/// The longest time that reading a batch may take; the first reads of a disk are slow.
const MOST_WAIT: Duration = Duration::from_secs(600);

/// A part of a batch of tokens.
pub(crate) trait TokenBatch: HostBatch {
    /// Returns the number of things over which an evaluation averages: samples, counted tokens or
    /// pairs.
    fn weight(&self) -> usize;

    /// Returns the number of tokens that are not padding.
    fn tokens(&self) -> usize;
}

/// The settings of a run's updates.
pub(crate) struct Updates<'r> {
    pub(crate) out: &'r Path,
    /// True if this rank writes files.
    pub(crate) leads: bool,
    /// The names of the checkpoint's notes that hold the [`Position`] and the settings.
    pub(crate) notes: [&'static str; 2],
    /// Everything that decides the weights. A checkpoint of other settings is refused.
    pub(crate) settings: Settings,
    /// All updates of the run.
    pub(crate) total: u64,
    pub(crate) evaluate_every: u64,
    /// The bytes of text for each token that an evaluation predicts, if they are reported.
    pub(crate) bytes_per_token: Option<f64>,
    /// The evaluations without a new lowest loss after which the run ends.
    pub(crate) patience: Option<usize>,
    /// True if the run exports the weights of its best evaluation, so that it cannot do without
    /// them.
    pub(crate) exports_best: bool,
    pub(crate) samples_per_update: usize,
    pub(crate) tokens_per_sample: usize,
    /// The checkpoint to continue from, and its path.
    pub(crate) resumed: Option<(&'r Checkpoint, &'r Path)>,
    /// The learning rate of an update.
    pub(crate) rate: &'r dyn Fn(u64) -> f64,
    /// True if a checkpoint is refused whose updates were made at other rates.
    pub(crate) keeps_rates: bool,
    /// The advice for a checkpoint of other settings.
    pub(crate) how_to_prolong: String,
}

/// The result of training.
#[derive(Default)]
pub(crate) struct Trained {
    pub(crate) position: Position,
    /// The time of each update of this process.
    pub(crate) seconds: Vec<f64>,
    /// The tokens of each update of this process that are not padding.
    pub(crate) tokens: Vec<usize>,
    /// True if the run ended because the evaluations no longer improved.
    pub(crate) ended_early: bool,
}

impl Updates<'_> {
    /// Trains to the end. Returns none if it was stopped, after writing a checkpoint. `batches`
    /// makes the batches after this many samples.
    pub(crate) fn run<S: Activation, B: TokenBatch + Send + 'static>(
        &self,
        trainer: &mut Trainer<'_, Gpt<S>, Rule>,
        batches: impl FnOnce(u64) -> Result<Loader<Vec<B>>>,
        held_out: &[B],
    ) -> Outcome<Option<Trained>> {
        let updates = self.total;
        let mut trained = Trained::default();
        let mut progress = EpochProgress::default();
        if let Some((checkpoint, _)) = self.resumed {
            trained.position = self.position(checkpoint)?;
            progress = trainer.restore(checkpoint).map_err(|error| self.refused(error))?;
            let (made, losses) = (progress.updates, trained.position.losses.len() as u64);
            if made != losses || progress.samples != made * self.samples_per_update as u64 {
                let reason =
                    format!("is damaged: it has {made} updates of {} samples, but {losses} losses", progress.samples);
                return Err(bad(self.checkpoint(), reason));
            }
            if made > updates {
                return Err(bad(self.checkpoint(), format!("has made {made} updates; this run has only {updates}")));
            }
        }
        let mut batches = batches(progress.samples)?.deadline(MOST_WAIT);
        let left = (updates - progress.updates) as usize * self.samples_per_update;
        let bar = ProgressBar::new("training", left).counting("tokens", self.tokens_per_sample);
        let earlier = self.resumed.map(|(_, path)| path.parent().unwrap_or(Path::new("")));
        if self.leads
            && let Some(earlier) = earlier
            && let Err(reason) = self.best(&trained.position).bring(earlier, self.out)
            && self.exports_best
        {
            return Err(reason);
        }
        let gpu = GpuWatch::open(trainer.arena().device());
        let logs = self.leads.then(|| Logs::new(self.out, earlier, trained.position.clone(), gpu));
        // The tokens of the updates that are queued.
        let queued = RefCell::new(VecDeque::new());
        let mut watch = Watch {
            bar: if self.leads { Log::Text } else { Log::Quiet }.shows(bar),
            leads: self.leads,
            names: self.notes,
            settings: settings::to_note(&self.settings),
            last: Instant::now(),
            since_evaluation: 0,
            queued: &queued,
            tokens: self.samples_per_update * self.tokens_per_sample,
            bytes_per_token: self.bytes_per_token,
            rate: self.rate,
            logs,
            trained: &mut trained,
        };
        loop {
            let (done, every) = (progress.updates, self.evaluate_every);
            let evaluated = watch.trained.position.evaluations.last().is_some_and(|last| last.update == done);
            let due = done > 0 && (done == updates || done.is_multiple_of(every));
            if due && !evaluated && !held_out.is_empty() {
                watch.evaluate(trainer, held_out, done, self.out)?;
            }
            watch.trained.ended_early = watch.trained.position.worsens(self.patience);
            if done == updates || watch.trained.ended_early {
                break;
            }
            (watch.last, watch.since_evaluation) = (Instant::now(), watch.trained.seconds.len());
            let some = batches.by_ref().take((updates.min((done / every + 1) * every) - done) as usize);
            let counted = some.inspect(|batch| {
                let tokens = batch.iter().flatten().map(TokenBatch::tokens).sum();
                queued.borrow_mut().push_back(tokens);
            });
            let ended = trainer.fit_with(counted, &mut progress, &mut watch)?;
            watch.share_pipeline_time();
            if ended == Ended::Stopped {
                return Ok(None);
            }
        }
        let notes = watch.notes();
        trainer.save(&progress, &notes)?;
        watch.bar.finish(&progress);
        if let Some(logs) = &mut watch.logs {
            logs.files().map_err(|reason| Error::file(self.out, reason))?;
        }
        if self.leads {
            self.best(&trained.position).tidy(self.out)?;
        }
        Ok(Some(trained))
    }

    fn best<'b>(&'b self, position: &'b Position) -> Best<'b> {
        Best { notes: self.notes, settings: &self.settings, position }
    }

    /// Returns the position stored in a checkpoint, if the checkpoint belongs to this run.
    fn position(&self, checkpoint: &Checkpoint) -> Outcome<Position> {
        let [position, settings] = self.notes;
        let theirs = settings::note(checkpoint, settings).map_err(|reason| bad(self.checkpoint(), reason))?;
        settings::compare(theirs, &self.settings)
            .map_err(|reason| bad(self.checkpoint(), format!("{reason}\n{}", self.how_to_prolong)))?;
        if !settings::has_optimizer(checkpoint) {
            let reason = format!("has weights but no optimizer state, like {BEST}; --resume needs {CHECKPOINT}");
            return Err(bad(self.checkpoint(), reason));
        }
        let note = checkpoint.note(position).map_err(|error| self.refused(error))?;
        let position: Position = serde_json::from_str(note).map_err(|reason| bad(self.checkpoint(), reason))?;
        let rates = (1..).zip(&position.rates).map(|(update, before)| (update, *before, (self.rate)(update) as f32));
        match rates.filter(|_| self.keeps_rates).find(|(_, before, now)| before != now) {
            Some((update, before, now)) => {
                let reason = format!("made update {update} at a learning rate of {before:e}, which is {now:e} here");
                Err(bad(self.checkpoint(), format!("{reason}\n{}", self.how_to_prolong)))
            }
            None => Ok(position),
        }
    }

    fn checkpoint(&self) -> String {
        self.resumed.map(|(_, path)| path.display().to_string()).unwrap_or_default()
    }

    /// Reports file errors as the user's to fix, and all others unchanged.
    fn refused(&self, error: Error) -> Box<dyn std::error::Error + Send + Sync> {
        match error {
            Error::File { reason, .. } => bad(self.checkpoint(), reason),
            error => error.into(),
        }
    }
}

/// The observer that shows the updates and collects the report's figures.
struct Watch<'w> {
    bar: ProgressBar,
    /// True if this rank writes files.
    leads: bool,
    names: [&'static str; 2],
    settings: String,
    /// The end of the last update.
    last: Instant,
    /// Updates of this process before the last evaluation.
    since_evaluation: usize,
    queued: &'w RefCell<VecDeque<usize>>,
    /// The tokens of an update, with padding.
    tokens: usize,
    bytes_per_token: Option<f64>,
    rate: &'w dyn Fn(u64) -> f64,
    logs: Option<Logs>,
    trained: &'w mut Trained,
}

impl Watch<'_> {
    /// Reports the mean loss of the held-out samples, and saves the weights if they are the best so
    /// far.
    fn evaluate<S: Activation>(
        &mut self,
        trainer: &mut Trainer<'_, Gpt<S>, Rule>,
        held_out: &[impl TokenBatch],
        update: u64,
        out: &Path,
    ) -> Result<()> {
        let begun = Instant::now();
        let (mut sums, mut weight) = (Vec::new(), 0);
        for part in held_out {
            let (loss, figures) = trainer.evaluate_with_figures(part)?;
            sums.resize(1 + figures.len(), 0.0);
            for (sum, value) in sums.iter_mut().zip([loss].into_iter().chain(figures)) {
                *sum += value * part.len() as f64;
            }
            weight += part.weight();
        }
        let means: Vec<f64> = sums.into_iter().map(|sum| sum / weight as f64).collect();
        let (loss, rewards) = (means[0], Rewards::of(&means[1..]));
        let perplexity = rewards.is_none().then(|| loss.exp());
        let bits_per_byte = self.bytes_per_token.map(|bytes| loss / LN_2 / bytes);
        let evaluations = &mut self.trained.position.evaluations;
        let best = evaluations.iter().all(|before| loss < before.loss);
        evaluations.push(Evaluation { update, loss, perplexity, bits_per_byte, rewards });
        let more = match rewards {
            Some(Rewards { accuracy, margin, .. }) => format!("accuracy {accuracy:.3}, margin {margin:.4}"),
            None => format!("perplexity {:.2}", loss.exp()),
        };
        let bits = bits_per_byte.map_or(String::new(), |bits| format!(", {bits:.3} bits per byte"));
        self.bar.say(&format!("update {update}: held-out loss {loss:.4}, {more}{bits}"));
        if let Some(logs) = &mut self.logs {
            let line = Line { update, evaluation_loss: Some(loss), rewards, ..Line::default() };
            logs.write(line).map_err(|reason| Error::file(out, reason))?;
        }
        if best && self.leads {
            Checkpoint::save(out.join(BEST), &trainer.state().parameters, None, &self.notes())?;
        }
        self.bar.leave_out(begun.elapsed());
        Ok(())
    }

    /// Sets the times of the first and the last update since the last evaluation to their mean. An
    /// update is reported when the next is queued. On a device that computes during the queueing,
    /// this takes as long as the update itself. The last update is reported at once.
    fn share_pipeline_time(&mut self) {
        if let [first, .., last] = &mut self.trained.seconds[self.since_evaluation..] {
            let mean = (*first + *last) / 2.0;
            (*first, *last) = (mean, mean);
        }
    }
}

impl Observer for Watch<'_> {
    fn updated(&mut self, update: &Update, progress: &EpochProgress, arena: &Arena) -> Result<()> {
        signals::update_is_made();
        let rewards = Rewards::of(&update.figures);
        self.trained.position.losses.push(update.loss);
        self.trained.position.rewards.extend(rewards);
        self.trained.position.rates.push((self.rate)(update.number) as f32);
        let (seconds, tokens) = (self.last.elapsed().as_secs_f64(), self.queued.borrow_mut().pop_front());
        self.trained.seconds.push(seconds);
        self.trained.tokens.extend(tokens);
        if let Some(logs) = &mut self.logs {
            let line = Line {
                update: update.number,
                loss: Some(update.loss),
                gradient_norm: update.gradient_l2,
                learning_rate: Some((self.rate)(update.number)),
                rewards,
                real_tokens_per_second: tokens.map(|tokens| tokens as f64 / seconds),
                tokens_per_second: Some(self.tokens as f64 / seconds),
                arena_bytes: Some(arena.report().peak_bytes as u64),
                ..Line::default()
            };
            logs.write(line).map_err(|reason| Error::file("log", reason))?;
        }
        self.last = Instant::now();
        self.bar.updated(update, progress, arena)
    }

    fn notes(&self) -> Vec<(&str, String)> {
        let position = serde_json::to_string(&self.trained.position).expect("plain numbers and lists have a JSON form");
        vec![(self.names[0], position), (self.names[1], self.settings.clone())]
    }
}
