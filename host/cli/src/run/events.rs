//! Event files, which TensorBoard reads: records of TensorFlow's `Event`, as far as a run writes
//! them.
//!
//! Invariant: each file begins with a record that names its writer, by which runs recognize their
//! own files.

use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message;

use crate::program::marks::WRITER;

/// TensorFlow's `Event`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(crate) step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "10")]
    source: Option<SourceMetadata>,
}

/// TensorFlow's `Summary`.
#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

/// TensorFlow's `Summary.Value`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Value {
    #[prost(string, tag = "1")]
    pub(crate) tag: String,
    #[prost(float, tag = "2")]
    pub(crate) simple_value: f32,
}

/// TensorFlow's `SourceMetadata`.
#[derive(Clone, PartialEq, Message)]
struct SourceMetadata {
    #[prost(string, tag = "1")]
    writer: String,
}

impl Event {
    /// Returns the event that begins a file.
    pub(crate) fn first() -> Self {
        let source = Some(SourceMetadata { writer: WRITER.into() });
        Self { file_version: Some("brain.Event:2".into()), source, ..Self::now() }
    }

    /// Returns the figures of an update, or of an evaluation after it.
    pub(crate) fn figures(update: u64, values: impl IntoIterator<Item = (&'static str, f64)>) -> Self {
        let value = |(tag, value): (&str, f64)| Value { tag: tag.into(), simple_value: value as f32 };
        let summary = Summary { value: values.into_iter().map(value).collect() };
        Self { step: update as i64, summary: Some(summary), ..Self::now() }
    }

    fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { wall_time: since.as_secs_f64(), ..Self::default() }
    }

    /// Returns the figures.
    pub(crate) fn values(&self) -> &[Value] {
        self.summary.as_ref().map_or(&[], |summary| &summary.value)
    }

    /// Returns the record of a file: length, its checksum, bytes, their checksum.
    pub(crate) fn to_record(&self) -> Vec<u8> {
        let bytes = self.encode_to_vec();
        let length = (bytes.len() as u64).to_le_bytes();
        [&length[..], &masked(&length), &bytes, &masked(&bytes)].concat()
    }
}

/// Returns the events of a file, up to the first record that is cut or damaged.
pub(crate) fn events(mut bytes: &[u8]) -> Vec<Event> {
    let mut all = Vec::new();
    while let Some((event, rest)) = next(bytes) {
        all.push(event);
        bytes = rest;
    }
    all
}

/// Returns the first record, and the bytes after it.
fn next(bytes: &[u8]) -> Option<(Event, &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let (check, rest) = rest.split_first_chunk::<4>()?;
    let (event, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let (its_check, rest) = rest.split_first_chunk::<4>()?;
    (*check == masked(length) && *its_check == masked(event)).then_some(())?;
    Some((Event::decode(event).ok()?, rest))
}

/// Returns the checksum of TFRecord files.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The checksum of nine digits is the one that RFC 3720 states for CRC32C.
    #[test]
    fn checksum_is_masked_crc32c() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(masked(b"123456789"), (0xe306_9283_u32.rotate_right(15).wrapping_add(0xa282_ead8)).to_le_bytes());
    }

    #[test]
    fn cut_records_are_left_out() {
        let written = [Event::first(), Event::figures(1, [("loss", 2.0)]), Event::figures(2, [("loss", 1.0)])];
        let whole: Vec<u8> = written.iter().flat_map(Event::to_record).collect();
        let last = whole.len() - written[2].to_record().len();
        assert_eq!(events(&whole), written);
        for length in 0..whole.len() {
            let read = events(&whole[..length]);
            assert!(read.len() < 3 && written.starts_with(&read), "{length}");
            assert_eq!(read.len() == 2, length >= last, "{length}");
        }
        let mut damaged = whole.clone();
        damaged[last + 20] ^= 1;
        assert_eq!(events(&damaged), written[..2]);
    }
}
