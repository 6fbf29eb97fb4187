//! The weights of a run's best evaluation, which go with it into another folder.
//!
//! Invariant: weights are taken for a run's best only if their notes have its settings, and its
//! losses and evaluations up to the best one.

use std::fs;
use std::io;
use std::path::Path;

use stepscope::Checkpoint;
use stepscope_core::internals::{remove_file, replace_file_by};

use crate::program::marks;
use crate::program::results::BEST;
use crate::program::settings::{self, Settings};
use crate::run::report::Position;
use crate::train::bad_input::{Outcome, bad};

/// A run whose best weights are searched for.
#[derive(Clone, Copy)]
pub(crate) struct Best<'r> {
    /// The names of the checkpoint's notes that hold the [`Position`] and the settings.
    pub(crate) notes: [&'static str; 2],
    pub(crate) settings: &'r Settings,
    pub(crate) position: &'r Position,
}

impl Best<'_> {
    /// Copies the best weights from the folder of a checkpoint, unless they are already there.
    /// Returns none if the run has no evaluations yet.
    ///
    /// # Errors
    /// The reason why the folder's file is not this run's best.
    pub(crate) fn bring(&self, from: &Path, out: &Path) -> Outcome<Option<()>> {
        let Some(best) = self.position.best() else { return Ok(None) };
        let [theirs, ours] = [from, out].map(|folder| folder.join(BEST));
        let notes = marks::notes(&theirs).unwrap_or_default();
        self.check(|name| notes[name].as_str(), true).map_err(|reason| {
            let update = self.position.evaluations[best].update;
            let reason = format!(
                "{reason}; the run exports the weights of its best evaluation, after update {update}. Put that run's \
                 {BEST} there, or start a new run without --resume"
            );
            bad(theirs.display(), reason)
        })?;
        if fs::canonicalize(&theirs).ok() != fs::canonicalize(&ours).ok() {
            replace_file_by(&ours, |mut file| {
                io::copy(&mut stepscope::files::PlainFile::open(&theirs)?, &mut file).map(drop)
            })?;
        }
        Ok(Some(()))
    }

    /// Loads the best weights.
    pub(crate) fn load(&self, out: &Path) -> Outcome<Checkpoint> {
        let path = out.join(BEST);
        let checkpoint = Checkpoint::load(&path)?;
        self.check(|name| checkpoint.note(name).ok(), false)
            .map_err(|reason| format!("{}: {reason}", path.display()))?;
        Ok(checkpoint)
    }

    /// Removes the weights that an earlier run has left, if this run has no best weights.
    pub(crate) fn tidy(&self, out: &Path) -> Outcome<()> {
        let path = out.join(BEST);
        let notes = marks::notes(&path).unwrap_or_default();
        match self.check(|name| notes[name].as_str(), false) {
            Ok(()) => Ok(()),
            Err(_) => Ok(remove_file(&path)?),
        }
    }

    /// Checks the notes of best weights. A run that was killed may have found better weights after
    /// its checkpoint. If they are allowed, they count too: the run finds them again.
    fn check<'n>(&self, note: impl Fn(&str) -> Option<&'n str>, later: bool) -> Result<(), String> {
        let [position, settings] = self.notes.map(note);
        let (Some(position), Some(settings)) = (position, settings) else {
            return Err("is missing, or has no notes of a run".into());
        };
        settings::compare(settings, self.settings)?;
        let theirs: Position = serde_json::from_str(position).map_err(|reason| reason.to_string())?;
        let Position { losses, evaluations, .. } = self.position;
        let known = self.position.best().map_or(&[][..], |best| &evaluations[..=best]);
        let before = known.last().and_then(|best| losses.get(..best.update as usize));
        let is_best = !known.is_empty() && theirs.evaluations == known && Some(&*theirs.losses) == before;
        let is_new =
            theirs.best().is_some_and(|best| best >= evaluations.len() && best + 1 == theirs.evaluations.len());
        let is_later = is_new && theirs.losses.starts_with(losses) && theirs.evaluations.starts_with(evaluations);
        match is_best || later && is_later {
            true => Ok(()),
            false => Err("has the weights of another run, or of another evaluation".into()),
        }
    }
}
