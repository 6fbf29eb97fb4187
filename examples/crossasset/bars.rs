//! Reads price bars from a CSV file, one per row, and validates them strictly, so that callers need
//! no further checks.
//!
//! Columns are found by name, in any letter case: `open_time` or `timestamp`, then `open`, `high`,
//! `low`, `close`, `volume`. Other columns are ignored. Every [`Bar`] holds finite numbers, prices
//! above zero, `low <= open, close <= high`, and a volume of at least zero. Times strictly
//! increase, but minutes may be missing.
//!
//! The first row that breaks a rule ends the reading with a short [`BarsError`] that names file,
//! line, column and rule. Memory use is bounded by the bars before that row and one row of
//! [`ROW_BYTES`].

use std::io::{self, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use csv::{ByteRecord, ErrorKind, ReaderBuilder};
use stepscope::files::{FileKind, PlainFile};
use stepscope::memory::HostMemory;

#[path = "times.rs"]
mod times;

use times::{TimeError, Times};

/// The longest row, the header's included.
const ROW_BYTES: usize = 1 << 20;
/// The initial capacity in bars.
const FIRST_BARS: usize = 1 << 12;
/// The most characters of a field, and of the header, that a message shows.
const SHOWN: [usize; 2] = [60, 300];

/// The open, high, low and close price of one span of time, and its traded volume.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bar {
    /// The opening time, in milliseconds since 1970-01-01 UTC.
    pub(crate) time_ms: i64,
    /// First price, above zero.
    pub(crate) open: f64,
    /// Highest price.
    pub(crate) high: f64,
    /// Lowest price, above zero.
    pub(crate) low: f64,
    /// Last price, above zero.
    pub(crate) close: f64,
    /// Amount traded, at least zero.
    pub(crate) volume: f64,
}

/// The reason why a file cannot be read as bars.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum BarsError {
    /// The file is missing, not a regular file, changed while it was read, or not readable to its
    /// end.
    #[error("{}: cannot be read: {source}", file.display())]
    Read {
        /// The file asked for.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is of another kind.
    #[error("{}: {}", file.display(), kind.refusal("bars as CSV in UTF-8"))]
    Kind {
        /// The file asked for.
        file: PathBuf,
        /// Its kind.
        kind: FileKind,
    },
    /// The header or a row breaks a rule.
    #[error("{}, line {line}, column {column}: {rule}", file.display())]
    Broken {
        /// The file being read.
        file: PathBuf,
        /// The line, counted from 1, including the header and blank lines.
        line: u64,
        /// The column, as named in the header.
        column: String,
        /// The rule that is broken.
        rule: Rule,
    },
    /// The bars are valid but too few.
    #[error("{}: too few bars: {found} found, at least {needed} needed: {why}", file.display())]
    TooFew {
        /// The file, or the name of the series.
        file: PathBuf,
        /// Bars found.
        found: usize,
        /// Bars needed.
        needed: usize,
        /// The reason why that many are needed.
        why: String,
    },
}

/// A rule that the header or a row breaks.
#[derive(Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Rule {
    #[error("the column is missing; columns are separated by commas, and the header has: {header}")]
    Missing { header: String },
    #[error("the column appears twice; the header has: {header}")]
    Twice { header: String },
    #[error("the row is longer than {ROW_BYTES} bytes: is a quote not closed, or is this not a CSV file?")]
    Long,
    #[error("the row has {found} fields, the header {expected}{}", if *nameless {
        ", the last unnamed: remove the comma at the header's end, or add one to each row"
    } else {
        ""
    })]
    Ragged { expected: u64, found: u64, nameless: bool },
    #[error("\"{value}\" {reason}")]
    Time { value: String, reason: String },
    #[error("\"{value}\" is earlier than the row before, \"{before}\"")]
    Backward { value: String, before: String },
    #[error("\"{value}\" repeats the time of the row before, \"{before}\"")]
    Repeated { value: String, before: String },
    #[error("\"{value}\" is not a number")]
    Number { value: String },
    #[error("\"{value}\" is not finite")]
    Finite { value: String },
    #[error("\"{value}\" is a price at or below zero")]
    Positive { value: String },
    #[error("\"{value}\" is a negative volume")]
    Volume { value: String },
    #[error("\"{value}\" is a high below the row's low {low}")]
    HighBelowLow { value: String, low: f64 },
    #[error("\"{value}\" is outside the row's low {low} to high {high}")]
    OutsideRange { value: String, low: f64, high: f64 },
}

/// Reads all bars of the CSV file at `path`, one row at a time. A file without rows gives an empty
/// vector.
///
/// # Errors
/// [`BarsError`] for the first fault.
pub(crate) fn read_bars(path: &Path) -> Result<Vec<Bar>, BarsError> {
    let unreadable = |source| BarsError::Read { file: path.to_owned(), source };
    let mut file = PlainFile::open(path).map_err(unreadable)?;
    let kind = file.kind().map_err(unreadable)?;
    if let Some(kind) = kind.filter(|kind| kind.is_no_text()) {
        return Err(BarsError::Kind { file: path.to_owned(), kind });
    }
    let bars = parse_bars(path, &mut file);
    // Checked first, because a change explains any other fault.
    file.check_unchanged().map_err(unreadable)?;
    match (bars, kind) {
        // If no column is found, the file is probably in another encoding. Other columns may be in
        // any.
        (Err(BarsError::Broken { file, rule: Rule::Missing { .. }, .. }), Some(kind)) if kind != FileKind::Text => {
            Err(BarsError::Kind { file, kind })
        }
        (bars, _) => bars,
    }
}

pub(crate) fn parse_bars(path: &Path, mut source: impl Read + Seek) -> Result<Vec<Bar>, BarsError> {
    let file = || path.to_owned();
    match parse_rows(&mut source) {
        Ok(bars) => Ok(bars),
        Err(Fault::Read(source)) => Err(BarsError::Read { file: file(), source }),
        Err(Fault::Broken { byte, column, rule }) => match line_at(source, byte) {
            Ok(line) => Err(BarsError::Broken { file: file(), line, column, rule }),
            Err(source) => Err(BarsError::Read { file: file(), source }),
        },
    }
}

/// The fault that ended the reading. Its line is counted only then, because the CSV reader's own
/// count leaves out blank lines.
enum Fault {
    Read(io::Error),
    Broken { byte: u64, column: String, rule: Rule },
}

/// A source that limits how much is read per row: [`ROW_BYTES`], plus the CSV reader's read-ahead.
struct Rows<R> {
    source: R,
    left: usize,
}

impl<R: Read> Read for Rows<R> {
    fn read(&mut self, place: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let most = place.len().min(self.left);
        let read = self.source.read(&mut place[..most])?;
        self.left -= read;
        Ok(read)
    }
}

fn parse_rows(source: impl Read) -> Result<Vec<Bar>, Fault> {
    let rows = Rows { source, left: ROW_BYTES };
    let mut reader = ReaderBuilder::new().buffer_capacity(1 << 16).from_reader(rows);
    let header = reader.byte_headers().map_err(|error| fault(&[], 0, error))?;
    let names: Vec<String> = header.iter().map(text).collect();
    let columns = Columns::find(&names, header.position().map_or(0, csv::Position::byte))?;

    let (mut bars, mut times) = (Vec::new(), Times::default());
    let (mut record, mut before) = (ByteRecord::new(), ByteRecord::new());
    loop {
        let start = reader.position().byte();
        reader.get_mut().left = ROW_BYTES;
        if !reader.read_byte_record(&mut record).map_err(|error| fault(&names, start, error))? {
            return Ok(bars);
        }
        let row = Row { names: &names, record: &record };
        let bar = row.bar(&columns, &mut times)?;
        make_room(&mut bars)?;
        if let Some(last) = bars.last().filter(|last| last.time_ms >= bar.time_ms) {
            let before = text(&before[columns.time]);
            return Err(row.broken(columns.time, |value| match last.time_ms == bar.time_ms {
                true => Rule::Repeated { value, before },
                false => Rule::Backward { value, before },
            }));
        }
        bars.push(bar);
        std::mem::swap(&mut record, &mut before);
    }
}

/// Reserves space for one more bar, after checking that the host has memory for it.
fn make_room(bars: &mut Vec<Bar>) -> Result<(), Fault> {
    if bars.len() < bars.capacity() {
        return Ok(());
    }
    let more = bars.len().max(FIRST_BARS);
    let (needed, available) = (((bars.len() + more) * size_of::<Bar>()) as u64, HostMemory::available_bytes());
    if needed <= available && bars.try_reserve_exact(more).is_ok() {
        return Ok(());
    }
    let reason = format!(
        "more than {} bars: adding another takes {needed} bytes of memory, and the host, or this process's cgroup, has {available} \
         available: give fewer bars",
        bars.len()
    );
    Err(Fault::Read(io::Error::new(io::ErrorKind::FileTooLarge, reason)))
}

/// The positions of the wanted columns in a row.
struct Columns {
    time: usize,
    prices: [usize; 4],
    volume: usize,
}

impl Columns {
    fn find(names: &[String], byte: u64) -> Result<Self, Fault> {
        let broken = |column: &str, rule: fn(String) -> Rule| {
            let header = if names.is_empty() { "nothing".to_owned() } else { shown(&names.join(", "), SHOWN[1]) };
            Fault::Broken { byte, column: column.to_owned(), rule: rule(header) }
        };
        let position = |column: &str| {
            let mut places = (0..names.len()).filter(|&at| names[at].eq_ignore_ascii_case(column));
            match (places.next(), places.next()) {
                (_, Some(_)) => Err(broken(column, |header| Rule::Twice { header })),
                (place, None) => Ok(place),
            }
        };
        let wanted = |column| position(column)?.ok_or_else(|| broken(column, |header| Rule::Missing { header }));
        let time = match position("open_time")?.or(position("timestamp")?) {
            Some(time) => time,
            None => return Err(broken("open_time (or timestamp)", |header| Rule::Missing { header })),
        };
        let prices = [wanted("open")?, wanted("high")?, wanted("low")?, wanted("close")?];
        Ok(Self { time, prices, volume: wanted("volume")? })
    }
}

/// A row, with the context for its errors.
struct Row<'a> {
    names: &'a [String],
    record: &'a ByteRecord,
}

impl Row<'_> {
    fn bar(&self, columns: &Columns, times: &mut Times) -> Result<Bar, Fault> {
        let time_ms = std::str::from_utf8(self.record[columns.time].trim_ascii())
            .map_err(|_| TimeError::Unknown)
            .and_then(|text| times.next(text))
            .map_err(|error| self.broken(columns.time, |value| Rule::Time { value, reason: error.to_string() }))?;
        let mut prices = [0.0; 4];
        for (price, &column) in prices.iter_mut().zip(&columns.prices) {
            *price = self.number(column)?;
            if *price <= 0.0 {
                return Err(self.broken(column, |value| Rule::Positive { value }));
            }
        }
        let [open, high, low, close] = prices;
        if high < low {
            return Err(self.broken(columns.prices[1], |value| Rule::HighBelowLow { value, low }));
        }
        for (price, column) in [(open, columns.prices[0]), (close, columns.prices[3])] {
            if price < low || price > high {
                return Err(self.broken(column, |value| Rule::OutsideRange { value, low, high }));
            }
        }
        let volume = self.number(columns.volume)?;
        if volume < 0.0 {
            return Err(self.broken(columns.volume, |value| Rule::Volume { value }));
        }
        Ok(Bar { time_ms, open, high, low, close, volume })
    }

    fn number(&self, column: usize) -> Result<f64, Fault> {
        let number: f64 = std::str::from_utf8(self.record[column].trim_ascii())
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| self.broken(column, |value| Rule::Number { value }))?;
        if number.is_finite() { Ok(number) } else { Err(self.broken(column, |value| Rule::Finite { value })) }
    }

    fn broken(&self, column: usize, rule: impl FnOnce(String) -> Rule) -> Fault {
        Fault::Broken {
            byte: self.record.position().map_or(0, csv::Position::byte),
            column: self.names[column].clone(),
            rule: rule(text(&self.record[column])),
        }
    }
}

/// Converts the CSV reader's error for the row that starts at `byte`. For a ragged row, the column
/// is the first missing or extra one.
fn fault(names: &[String], byte: u64, error: csv::Error) -> Fault {
    let byte = error.position().map_or(byte, csv::Position::byte);
    match error.into_kind() {
        ErrorKind::Io(source) if source.kind() == io::ErrorKind::FileTooLarge => {
            let column = names.first().cloned().unwrap_or_else(|| "number 1".to_owned());
            Fault::Broken { byte, column, rule: Rule::Long }
        }
        ErrorKind::Io(source) => Fault::Read(source),
        ErrorKind::UnequalLengths { expected_len: expected, len: found, .. } => {
            let first = expected.min(found) as usize;
            let name = names.get(first).filter(|name| !name.is_empty());
            let column = name.cloned().unwrap_or_else(|| format!("number {}", first + 1));
            let nameless = found + 1 == expected && names.last().is_some_and(String::is_empty);
            Fault::Broken { byte, column, rule: Rule::Ragged { expected, found, nameless } }
        }
        other => Fault::Read(io::Error::other(format!("{other:?}"))),
    }
}

/// Returns the line, counted from 1, of the first character at or after `byte` that does not end a
/// line.
fn line_at(mut source: impl Read + Seek, byte: u64) -> io::Result<u64> {
    source.rewind()?;
    let (mut line, mut before) = (1, 0);
    for (at, character) in (0_u64..).zip(BufReader::new(source).bytes()) {
        match std::mem::replace(&mut before, character?) {
            // CR LF ends one line.
            b'\r' if before == b'\n' => {}
            _ if matches!(before, b'\n' | b'\r') => line += 1,
            _ if at >= byte => break,
            _ => {}
        }
    }
    Ok(line)
}

fn text(field: &[u8]) -> String {
    let field = field.trim_ascii();
    // A character has at most four bytes; the extra bytes let `shown` detect that the field is cut.
    shown(&String::from_utf8_lossy(&field[..field.len().min(8 * SHOWN[0])]), SHOWN[0])
}

/// Shortens a text from outside to its first `most` characters, and replaces control characters.
pub(crate) fn shown(text: &str, most: usize) -> String {
    let mut rest = text.chars();
    let start = rest.by_ref().take(most).map(|it| if it.is_control() { char::REPLACEMENT_CHARACTER } else { it });
    let start: String = start.collect();
    if rest.as_str().is_empty() { start } else { start + ".." }
}

#[cfg(test)]
#[path = "bars/tests.rs"]
mod tests;
