//! Logs that a run writes while it trains: `log.jsonl` with one JSON object a line, and an event
//! file that TensorBoard reads.
//!
//! Invariant: both files are complete after each line, so that they can be followed. A run that
//! resumes keeps the lines up to its checkpoint, and drops the lines of updates that it makes
//! again.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message;
use serde::{Deserialize, Serialize};
use stepscope::files::{PlainFile, replace_file};
use stepscope::memory::ProcessMemory;

use crate::run::gpu::GpuWatch;

/// The name of the file with JSON lines.
const LINES: &str = "log.jsonl";
/// The largest log that a run continues.
const MAX_BYTES: u64 = 1 << 30;

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
}

/// The logs of a run.
pub(crate) struct Logs {
    lines: File,
    events: File,
    gpu: GpuWatch,
}

impl Logs {
    /// Opens the logs in `folder`, for a run that has made this many updates.
    ///
    /// # Errors
    /// Returns the system's error if a log cannot be opened.
    pub(crate) fn open(folder: &Path, updates: u64, gpu: GpuWatch) -> io::Result<Self> {
        let path = folder.join(LINES);
        let kept = kept(&path, updates)?;
        replace_file(&path, kept.as_bytes()).map_err(io::Error::other)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("events.out.tfevents.{}.{}", since.as_secs(), std::process::id());
        let events: PathBuf = folder.join("tensorboard").join(name);
        if updates == 0 {
            remove_events(&folder.join("tensorboard"))?;
        }
        std::fs::create_dir_all(folder.join("tensorboard"))?;
        let mut logs = Self { lines: append(&path)?, events: append(&events)?, gpu };
        // TensorBoard hides the events of later steps that an earlier file has.
        logs.event(&Event { step: updates as i64, file_version: Some("brain.Event:2".into()), ..Event::now() })?;
        if updates > 0 {
            let log = SessionLog { status: SessionLog::START };
            logs.event(&Event { step: updates as i64 + 1, session_log: Some(log), ..Event::now() })?;
        }
        Ok(logs)
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
        let text = serde_json::to_string(&line).expect("plain numbers have a JSON form");
        writeln!(self.lines, "{text}")?;
        let value = |(tag, value): (&str, Option<f64>)| {
            value.map(|value| Value { tag: tag.into(), simple_value: value as f32 })
        };
        let values = [
            ("loss", line.loss),
            ("gradient norm", line.gradient_norm),
            ("learning rate", line.learning_rate),
            ("tokens per second", line.real_tokens_per_second),
            ("tokens per second with padding", line.tokens_per_second),
            ("memory/arena bytes", line.arena_bytes.map(|bytes| bytes as f64)),
            ("memory/host bytes", line.host_bytes.map(|bytes| bytes as f64)),
            ("gpu/clock MHz", line.gpu_clock_mhz.map(f64::from)),
            ("gpu/degrees Celsius", line.gpu_celsius.map(f64::from)),
            ("evaluation loss", line.evaluation_loss),
        ];
        let summary = Summary { value: values.into_iter().filter_map(value).collect() };
        self.event(&Event { step: line.update as i64, summary: Some(summary), ..Event::now() })
    }

    /// Writes a record: length, its checksum, bytes, their checksum.
    fn event(&mut self, event: &Event) -> io::Result<()> {
        let bytes = event.encode_to_vec();
        let length = (bytes.len() as u64).to_le_bytes();
        let parts = [&length[..], &masked(&length), &bytes, &masked(&bytes)];
        self.events.write_all(&parts.concat())
    }
}

/// Returns the checksum of TFRecord files.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// The part of a line that decides whether a run that resumes keeps it.
#[derive(Deserialize)]
struct Number {
    update: u64,
}

/// Returns the lines of the log of an earlier process up to this update.
fn kept(path: &Path, updates: u64) -> io::Result<String> {
    if updates == 0 || !path.exists() {
        return Ok(String::new());
    }
    let text = String::from_utf8_lossy(&PlainFile::read_whole(path, MAX_BYTES)?).into_owned();
    let old = |line: &&str| serde_json::from_str(line).is_ok_and(|Number { update }| update <= updates);
    Ok(text.lines().filter(old).map(|line| format!("{line}\n")).collect())
}

/// Removes the event files of an earlier run.
fn remove_events(folder: &Path) -> io::Result<()> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with("events.out.tfevents.") {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "a file of this run's folder, which grows while it trains")]
fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// TensorFlow's `Event`, as far as it is written.
#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

impl Event {
    fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { wall_time: since.as_secs_f64(), ..Self::default() }
    }
}

/// TensorFlow's `Summary`.
#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

/// TensorFlow's `Summary.Value`.
#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, tag = "2")]
    simple_value: f32,
}

/// TensorFlow's `SessionLog`.
#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

impl SessionLog {
    /// The status of a run that starts at the event's step. TensorBoard then drops what earlier
    /// files have for this step and later ones.
    const START: i32 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The records of an event file, checked.
    fn records(mut bytes: &[u8]) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some((length, rest)) = bytes.split_at_checked(8) {
            let (check, rest) = rest.split_at(4);
            assert_eq!(check, masked(length));
            let (event, rest) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            let (check, rest) = rest.split_at(4);
            assert_eq!(check, masked(event));
            events.push(Event::decode(event).unwrap());
            bytes = rest;
        }
        assert!(bytes.is_empty());
        events
    }

    /// The checksum of nine digits is the one that RFC 3720 states for CRC32C.
    #[test]
    fn checksum_is_masked_crc32c() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(masked(b"123456789"), (0xe306_9283_u32.rotate_right(15).wrapping_add(0xa282_ead8)).to_le_bytes());
    }

    #[test]
    fn resumed_logs_have_each_update_once() {
        let folder = tempfile::tempdir().unwrap();
        let line = |update: u64| Line { update, loss: Some(1.5), gradient_norm: Some(0.25), ..Line::default() };
        for (updates, made) in [(0, 1..=3), (2, 3..=4)] {
            let mut logs = Logs::open(folder.path(), updates, GpuWatch::default()).unwrap();
            made.for_each(|update| logs.write(line(update)).unwrap());
        }
        let text = std::fs::read_to_string(folder.path().join(LINES)).unwrap();
        let updates: Vec<u64> = text.lines().map(|line| serde_json::from_str::<Number>(line).unwrap().update).collect();
        assert_eq!(updates, [1, 2, 3, 4]);
        assert!(text.starts_with("{\"update\":1,\"loss\":1.5,\"gradient_norm\":0.25,"), "{text}");
        let mut all = Vec::new();
        for file in std::fs::read_dir(folder.path().join("tensorboard")).unwrap() {
            all.extend(records(&std::fs::read(file.unwrap().path()).unwrap()));
        }
        let losses: Vec<_> =
            all.iter().filter_map(|event| event.summary.as_ref()).map(|summary| summary.value[0].clone()).collect();
        assert_eq!(losses, vec![Value { tag: "loss".into(), simple_value: 1.5 }; 5]);
        assert!(all.iter().any(|event| event.session_log.as_ref().is_some_and(|log| log.status == SessionLog::START)));
    }
}
