//! Training: updates, evaluations on held-out text, and checkpoints.

use std::path::Path;
use std::time::{Duration, Instant};

use stepscope::{
    Arena, Checkpoint, Ended, EpochProgress, Error, HostBatch, Observer, ProgressBar, Result, Trainer, Update,
};

use crate::program::log::Log;
use crate::program::results::{BEST, CHECKPOINT};
use crate::program::{settings, signals};
use crate::train::bad_input::{Outcome, bad};
use crate::train::cli::Args;
use crate::train::model::{Activation, Gpt};
use crate::train::plan::Plan;
use crate::train::report::{Evaluation, Position};
use crate::train::samples::{self, Sequences};
use crate::train::tokenizer::Tokenizer;

/// The name of the checkpoint's note that holds [`Position`].
const POSITION: &str = "gpt.position";
/// The name of the checkpoint's note that holds [`Plan::settings`].
const SETTINGS: &str = "gpt.settings";
/// The longest time that reading a batch may take; the first reads of a disk are slow.
const MOST_WAIT: Duration = Duration::from_secs(600);
/// The most held-out samples in an evaluation.
const HELD_OUT: usize = 64;

/// The result of training.
#[derive(Default)]
pub(crate) struct Trained {
    pub(crate) position: Position,
    /// The time of each update of this process.
    pub(crate) seconds: Vec<f64>,
}

impl Plan<'_> {
    /// Trains to the end. Returns none if it was stopped, after writing a checkpoint.
    pub(crate) fn train<S: Activation>(
        &self,
        trainer: &mut Trainer<'_, Gpt<S>>,
        out: &Path,
        leads: bool,
    ) -> Outcome<Option<Trained>> {
        let Args { batch, updates, .. } = *self.args;
        let accumulate = self.accumulate;
        let (updates, form) = (updates as u64, self.form());
        let mut trained = Trained::default();
        let mut progress = EpochProgress::default();
        if let Some(checkpoint) = &self.resumed {
            trained.position = self.position(checkpoint)?;
            progress = trainer.restore(checkpoint).map_err(|error| self.refused(error))?;
            let (made, told) = (progress.updates, trained.position.losses.len() as u64);
            if made != told || made > updates || progress.samples != made * (batch * accumulate) as u64 {
                let reason =
                    format!("is damaged: it has {made} updates of {} samples, but {told} losses", progress.samples);
                return Err(bad(self.checkpoint(), reason));
            }
        }
        let windows = self.windows()?;
        let batches = samples::batches(&self.text, &windows, form, [batch, accumulate], progress.samples)?;
        let mut batches = batches.deadline(MOST_WAIT);
        let held_out = samples::held_out(&self.text, form, HELD_OUT, self.look())?;
        let left = (updates - progress.updates) as usize * batch * accumulate;
        let bar = ProgressBar::new("training", left).counting("tokens", form.context);
        let mut watch = Watch {
            bar: if leads { Log::Text } else { Log::Quiet }.shows(bar),
            leads,
            settings: settings::to_note(&self.settings()),
            last: Instant::now(),
            since_look: 0,
            trained: &mut trained,
        };
        loop {
            let (done, every) = (progress.updates, self.args.evaluate_every());
            let looked = watch.trained.position.evaluations.last().is_some_and(|look| look.update == done);
            if done > 0 && (done == updates || done.is_multiple_of(every)) && !looked {
                watch.look(trainer, &held_out, done, out)?;
            }
            if done == updates {
                break;
            }
            (watch.last, watch.since_look) = (Instant::now(), watch.trained.seconds.len());
            let some = batches.by_ref().take((updates.min((done / every + 1) * every) - done) as usize);
            let ended = trainer.epoch(some, &mut progress, &mut watch)?;
            watch.share_pipeline_time();
            if ended == Ended::Stopped {
                return Ok(None);
            }
        }
        let notes = watch.notes();
        trainer.save(&progress, &notes)?;
        watch.bar.finish(&progress);
        Ok(Some(trained))
    }

    /// Returns the position stored in a checkpoint, if the checkpoint belongs to this run.
    fn position(&self, checkpoint: &Checkpoint) -> Outcome<Position> {
        let theirs = settings::note(checkpoint, SETTINGS).map_err(|reason| bad(self.checkpoint(), reason))?;
        settings::compare(theirs, &self.settings())
            .map_err(|reason| bad(self.checkpoint(), format!("{reason}\n{}", self.how_to_prolong())))?;
        if !settings::has_optimizer(checkpoint) {
            let reason = format!("has weights but no optimizer state, like {BEST}; --resume needs {CHECKPOINT}");
            return Err(bad(self.checkpoint(), reason));
        }
        let note = checkpoint.note(POSITION).map_err(|error| self.refused(error))?;
        serde_json::from_str(note).map_err(|reason| bad(self.checkpoint(), reason))
    }

    /// Returns the advice for a run whose settings differ. The learning-rate schedule depends on
    /// `--updates`.
    fn how_to_prolong(&self) -> String {
        let folder = self.args.resume.as_deref().and_then(Path::parent).unwrap_or(Path::new(""));
        format!(
            "To continue this run, use the checkpoint's settings. To train for more updates, or with other settings, \
             start a new run from the weights of a finished run: --weights {} --out DIR, with the same --tokenizer{}",
            folder.join("transformers").display(),
            if matches!(self.tokenizer, Tokenizer::Bytes) { " (bytes)" } else { "" }
        )
    }

    fn checkpoint(&self) -> String {
        self.args.resume.as_ref().map(|path| path.display().to_string()).unwrap_or_default()
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
    settings: String,
    /// The end of the last update.
    last: Instant,
    /// Updates of this process before the last evaluation.
    since_look: usize,
    trained: &'w mut Trained,
}

impl Watch<'_> {
    /// Reports the mean loss of the held-out samples, and saves the weights if they are the best so
    /// far.
    fn look<S: Activation>(
        &mut self,
        trainer: &mut Trainer<'_, Gpt<S>>,
        held_out: &[Sequences],
        update: u64,
        out: &Path,
    ) -> Result<()> {
        let begun = Instant::now();
        let (mut sum, mut samples) = (0.0, 0);
        for part in held_out {
            sum += trainer.evaluate(part, |_, _| Ok(()))?.0;
            samples += part.len();
        }
        let loss = sum / samples as f64;
        let perplexity = loss.exp();
        let evaluations = &mut self.trained.position.evaluations;
        let best = evaluations.iter().all(|before| loss < before.loss);
        evaluations.push(Evaluation { update, loss, perplexity });
        self.bar.say(&format!("update {update}: held-out loss {loss:.4}, perplexity {perplexity:.2}"));
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
        if let [first, .., last] = &mut self.trained.seconds[self.since_look..] {
            let mean = (*first + *last) / 2.0;
            (*first, *last) = (mean, mean);
        }
    }
}

impl Observer for Watch<'_> {
    fn updated(&mut self, update: &Update, progress: &EpochProgress, arena: &Arena) -> Result<()> {
        signals::update_is_made();
        self.trained.position.losses.push(update.loss);
        self.trained.seconds.push(self.last.elapsed().as_secs_f64());
        self.last = Instant::now();
        self.bar.updated(update, progress, arena)
    }

    fn notes(&self) -> Vec<(&str, String)> {
        let position = serde_json::to_string(&self.trained.position).expect("plain numbers and lists have a JSON form");
        vec![(POSITION, position), (SETTINGS, self.settings.clone())]
    }
}
