//! Logs that a run writes while it trains: `log.jsonl` with one JSON object a line, and an event
//! file that TensorBoard reads.
//!
//! Invariant: both files are complete after each line, so that they can be followed. A run that
//! resumes continues the logs of the run that its checkpoint belongs to: it keeps the figures that
//! the checkpoint has, each once, and no others.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use stepscope::files::{PlainFile, replace_file};
use stepscope::memory::ProcessMemory;

use crate::program::marks::{self, EVENT_FILE, EVENTS, LINES};
use crate::run::events::{self, Event};
use crate::run::gpu::GpuWatch;
use crate::run::report::Position;
use crate::train::model::preferences::Rewards;

/// The largest log that a run continues.
const MAX_BYTES: u64 = 1 << 30;
/// The tags of the figures that decide whether an event is kept.
const LOSS: &str = "loss";
const EVALUATION: &str = "evaluation loss";
/// The tags of rewards, which are TRL's.
const REWARDS: [&str; 4] = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"];
const EVALUATION_REWARDS: [&str; 4] =
    ["eval_rewards/chosen", "eval_rewards/rejected", "eval_rewards/accuracies", "eval_rewards/margins"];

/// The figures of an update, or of an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Line {
    /// The updates made so far.
    pub(crate) update: u64,
    /// The mean loss of the update's batch, before the update.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) loss: Option<f64>,
    /// The L2 norm of all gradients, before clipping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gradient_norm: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) learning_rate: Option<f64>,
    /// Tokens without padding, and all tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) real_tokens_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tokens_per_second: Option<f64>,
    /// The most bytes of the arena that were in use at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) arena_bytes: Option<u64>,
    /// The most bytes of host memory that the process has had.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host_bytes: Option<u64>,
    /// The clock of the GPU's multiprocessors in MHz, where NVML reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gpu_clock_mhz: Option<u32>,
    /// The GPU's temperature in degrees Celsius, where NVML reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gpu_celsius: Option<u32>,
    /// The mean loss of an evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) evaluation_loss: Option<f64>,
    /// The rewards of the update's batch before the update, or of the evaluation.
    #[serde(flatten)]
    pub(crate) rewards: Option<Rewards>,
}

/// The logs of a run. Their files are made with the first line, or at the run's end, so that a run
/// that is stopped before its first update leaves none.
pub(crate) struct Logs {
    folder: PathBuf,
    /// The folder with the logs of the run that this one continues.
    earlier: Option<PathBuf>,
    /// The figures of that run's checkpoint.
    position: Position,
    files: Option<[File; 2]>,
    gpu: GpuWatch,
}

impl Logs {
    /// Returns the logs in `folder`, of a run that continues from a position whose logs are in
    /// `earlier`.
    pub(crate) fn new(folder: &Path, earlier: Option<&Path>, position: Position, gpu: GpuWatch) -> Self {
        Self { folder: folder.into(), earlier: earlier.map(Path::to_path_buf), position, files: None, gpu }
    }

    /// Opens the files, with what is kept of the earlier ones. Each file replaces its predecessor
    /// as a whole.
    fn open(&self) -> io::Result<[File; 2]> {
        let path = self.folder.join(LINES);
        replace_file(&path, self.kept_lines()?.as_bytes()).map_err(io::Error::other)?;
        let events = self.folder.join(EVENTS);
        fs::create_dir_all(&events)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("{EVENT_FILE}{}.{}", since.as_secs(), std::process::id());
        let own = marks::entries(&events).into_iter().filter(|path| marks::is_own_event_file(path));
        let own: Vec<PathBuf> = own.filter(|path| path.file_name() != Some(name.as_ref())).collect();
        let records: Vec<u8> = self.kept_events()?.iter().flat_map(Event::to_record).collect();
        replace_file(events.join(&name), &records).map_err(io::Error::other)?;
        own.iter().try_for_each(fs::remove_file)?;
        Ok([append(&path)?, append(&events.join(name))?])
    }

    /// Returns the lines of the earlier log that the position has.
    fn kept_lines(&self) -> io::Result<String> {
        let Some(path) = self.earlier.as_ref().map(|folder| folder.join(LINES)).filter(|path| path.exists()) else {
            return Ok(String::new());
        };
        let (text, mut kept) = (PlainFile::read_whole(path, MAX_BYTES)?, Kept::of(&self.position));
        let is_kept = |line: &&str| {
            serde_json::from_str(line).is_ok_and(|Figures { update, loss, evaluation_loss }| {
                loss.is_some_and(|loss| kept.once(update, LOSS, loss as f32))
                    || evaluation_loss.is_some_and(|loss| kept.once(update, EVALUATION, loss as f32))
            })
        };
        Ok(String::from_utf8_lossy(&text).lines().filter(is_kept).map(|line| format!("{line}\n")).collect())
    }

    /// Returns the beginning of an event file, with the earlier events that the position has.
    fn kept_events(&self) -> io::Result<Vec<Event>> {
        let (mut all, mut kept) = (vec![Event::first()], Kept::of(&self.position));
        let folder = self.earlier.as_ref().map(|folder| folder.join(EVENTS));
        let files = folder.map(|folder| marks::entries(&folder)).unwrap_or_default();
        for path in files.into_iter().filter(|path| marks::is_own_event_file(path)) {
            let read = events::events(&PlainFile::read_whole(path, MAX_BYTES)?);
            all.extend(read.into_iter().filter(|event| {
                let known = |value: &events::Value| kept.once(event.step as u64, &value.tag, value.simple_value);
                event.values().first().is_some_and(known)
            }));
        }
        Ok(all)
    }

    /// Returns the files, which it opens if they are not yet.
    ///
    /// # Errors
    /// With the system's reason.
    pub(crate) fn files(&mut self) -> io::Result<&mut [File; 2]> {
        let files = self.files.take().map_or_else(|| self.open(), Ok)?;
        Ok(self.files.insert(files))
    }

    /// Writes the figures, and adds those of the process and the GPU to the ones of an update.
    ///
    /// # Errors
    /// With the system's reason.
    pub(crate) fn write(&mut self, mut line: Line) -> io::Result<()> {
        if line.loss.is_some() {
            line.host_bytes = ProcessMemory::read().map(|process| process.peak_bytes);
            (line.gpu_clock_mhz, line.gpu_celsius) = self.gpu.read();
        }
        let [lines, events] = self.files()?;
        let text = serde_json::to_string(&line).expect("plain numbers have a JSON form");
        writeln!(lines, "{text}")?;
        let values = [
            (LOSS, line.loss),
            ("gradient norm", line.gradient_norm),
            ("learning rate", line.learning_rate),
            ("tokens per second", line.real_tokens_per_second),
            ("tokens per second with padding", line.tokens_per_second),
            ("memory/arena bytes", line.arena_bytes.map(|bytes| bytes as f64)),
            ("memory/host bytes", line.host_bytes.map(|bytes| bytes as f64)),
            ("gpu/clock MHz", line.gpu_clock_mhz.map(f64::from)),
            ("gpu/degrees Celsius", line.gpu_celsius.map(f64::from)),
            (EVALUATION, line.evaluation_loss),
        ];
        let tags = if line.evaluation_loss.is_some() { EVALUATION_REWARDS } else { REWARDS };
        let rewards = line
            .rewards
            .map(|Rewards { chosen, rejected, accuracy, margin }| [chosen, rejected, accuracy, margin].map(Some));
        let rewards = rewards.into_iter().flat_map(|rewards| tags.into_iter().zip(rewards));
        let values = values.into_iter().chain(rewards).filter_map(|(tag, value)| Some((tag, value?)));
        events.write_all(&Event::figures(line.update, values).to_record())
    }
}

/// The part of a line that decides whether a run that resumes keeps it.
#[derive(Deserialize)]
struct Figures {
    update: u64,
    loss: Option<f64>,
    evaluation_loss: Option<f64>,
}

/// The figures of a position that were not kept yet.
struct Kept<'p> {
    position: &'p Position,
    seen: HashSet<(u64, bool)>,
}

impl<'p> Kept<'p> {
    fn of(position: &'p Position) -> Self {
        Self { position, seen: HashSet::new() }
    }

    /// Returns true, once, for a loss that the position has.
    fn once(&mut self, update: u64, tag: &str, loss: f32) -> bool {
        let Position { losses, evaluations, .. } = self.position;
        let is_evaluation = tag == EVALUATION;
        let is_of_run = match is_evaluation {
            true => evaluations.iter().any(|evaluation| evaluation.update == update && evaluation.loss as f32 == loss),
            false => {
                update.checked_sub(1).and_then(|at| losses.get(at as usize)).is_some_and(|&own| own as f32 == loss)
            }
        };
        is_of_run && (is_evaluation || tag == LOSS) && self.seen.insert((update, is_evaluation))
    }
}

#[expect(clippy::disallowed_methods, reason = "a file of this run's folder, which grows while it trains")]
fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::report::Evaluation;

    fn update(update: u64) -> Line {
        Line { update, loss: Some(2.0 - 0.1 * update as f64), gradient_norm: Some(0.25), ..Line::default() }
    }

    fn evaluation(update: u64) -> Line {
        Line { update, evaluation_loss: Some(3.0 + 0.1 * update as f64), ..Line::default() }
    }

    /// Returns the position after these updates and evaluations.
    fn position(updates: u64, evaluations: &[u64]) -> Position {
        let losses = (1..=updates).map(|number| update(number).loss.unwrap()).collect();
        let evaluation = |&update: &u64| {
            let loss = evaluation(update).evaluation_loss.unwrap();
            Evaluation { update, loss, perplexity: Some(loss.exp()), bits_per_byte: None, rewards: None }
        };
        Position { losses, evaluations: evaluations.iter().map(evaluation).collect(), ..Position::default() }
    }

    fn write(folder: &Path, earlier: Option<&Path>, position: Position, lines: Vec<Line>) {
        let mut logs = Logs::new(folder, earlier, position, GpuWatch::default());
        lines.into_iter().for_each(|line| logs.write(line).unwrap());
    }

    /// Returns the update and the kind of each line, and of each event.
    fn logged(folder: &Path) -> [Vec<(u64, bool)>; 2] {
        let text = fs::read_to_string(folder.join(LINES)).unwrap();
        let line = |line: &str| serde_json::from_str::<Figures>(line).unwrap();
        let lines = text.lines().map(line).map(|line| (line.update, line.evaluation_loss.is_some()));
        let [file] = &marks::entries(&folder.join(EVENTS))[..] else { panic!("the folder must have one event file") };
        let events = events::events(&fs::read(file).unwrap());
        let event = |event: &Event| (event.step as u64, event.values()[0].tag == EVALUATION);
        [lines.collect(), events.iter().skip(1).map(event).collect()]
    }

    /// A run that ended after its checkpoint logs an update or an evaluation that it repeats.
    #[test]
    fn resumed_logs_have_each_figure_once() {
        let folder = tempfile::tempdir().unwrap();
        let (out, other) = (folder.path().join("out"), folder.path().join("other"));
        fs::create_dir(&out).unwrap();
        fs::create_dir(&other).unwrap();
        let first = vec![update(1), update(2), evaluation(2), update(3), evaluation(3)];
        let both = |expected: &[(u64, bool)]| [expected.to_vec(), expected.to_vec()];
        for (at, evaluations, rest, expected) in [
            (2, &[][..], vec![evaluation(2), update(3)], &[(1, false), (2, false), (2, true), (3, false)][..]),
            (2, &[2], vec![update(3)], &[(1, false), (2, false), (2, true), (3, false)]),
            (3, &[2], vec![evaluation(3)], &[(1, false), (2, false), (2, true), (3, false), (3, true)]),
            (0, &[], vec![update(1)], &[(1, false)]),
        ] {
            write(&out, None, Position::default(), first.clone());
            // The last line and the last record are cut, as by a full disk.
            let cut = |path: PathBuf| fs::write(&path, &fs::read(&path).unwrap()[..fs::read(&path).unwrap().len() - 3]);
            cut(out.join(LINES)).unwrap();
            cut(marks::entries(&out.join(EVENTS)).remove(0)).unwrap();
            for _ in 0..2 {
                write(&out, Some(&out), position(at, evaluations), rest.clone());
                assert_eq!(logged(&out), both(expected), "{at} {evaluations:?}");
            }
        }
        // Another run's figures are neither kept nor continued.
        write(&other, None, Position::default(), vec![Line { loss: Some(9.0), ..update(1) }, update(2)]);
        write(&out, None, Position::default(), first);
        write(&other, Some(&out), position(2, &[2]), vec![update(3)]);
        assert_eq!(logged(&other), both(&[(1, false), (2, false), (2, true), (3, false)]));
        write(&out, Some(&other), position(1, &[]), vec![update(2)]);
        assert_eq!(logged(&out), both(&[(1, false), (2, false)]));
        let text = fs::read_to_string(out.join(LINES)).unwrap();
        assert!(text.starts_with("{\"update\":1,\"loss\":1.9,\"gradient_norm\":0.25"), "{text}");
        // Event files of other programs stay.
        let foreign = out.join(EVENTS).join("events.out.tfevents.1.other");
        fs::write(&foreign, "another program's").unwrap();
        write(&out, None, Position::default(), vec![update(1)]);
        assert!(foreign.exists() && marks::entries(&out.join(EVENTS)).len() == 2);
    }
}
