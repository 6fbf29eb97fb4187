//! Parses the time of a row of bars: a date and a time of day, or a number since 1970.
//!
//! Invariant: all rows of a file write their times in one form, set by the first row, and all times
//! are in the years 1980 to 2100. Within these bounds a number has at most one unit. A date without
//! separators is never mistaken for a number, except one with hours (`2023022812`), which as
//! seconds is in 2033 to 2036. Two such numbers in adjacent rows are refused.

use time::format_description::BorrowedFormatItem;
use time::macros::format_description;
use time::parsing::Parsed;
use time::{Date, Month, OffsetDateTime, PrimitiveDateTime, Time, UtcOffset};

/// The first year and the last of any bar.
const YEARS: [i32; 2] = [1980, 2100];

/// Units of numbers: their names, and how many make a second.
const UNITS: [(&str, i128); 4] =
    [("seconds", 1), ("milliseconds", 1_000), ("microseconds", 1_000_000), ("nanoseconds", 1_000_000_000)];
/// The bound below which an error reads an implausible number as seconds (up to the year 5138). The
/// bounds of the other units are multiples of it.
const LARGEST_SECONDS: u128 = 100_000_000_000;

/// The reason why a text is not the time of a row. `value` is the text.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum TimeError {
    #[error(
        "is not a time: write it like 2023-03-01 00:00:00+00:00 (UTC if without an offset), or as a whole number of seconds, \
         milliseconds, microseconds or nanoseconds since 1970-01-01 UTC"
    )]
    Unknown,
    #[error("is {read} as {how}: expected a year from {} to {}{hint}", YEARS[0], YEARS[1])]
    Implausible { read: String, how: &'static str, hint: String },
    #[error("is {got}, and the rows before have {before}: write all times of a file in the same form")]
    Mixed { got: String, before: String },
    #[error(
        "is {seconds} as seconds since 1970, like the row before, but both could be a date and an hour; if {date} is meant, write it so"
    )]
    Hours { seconds: String, date: String },
}

/// The form in which a row writes its time.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Written,
    /// A number in this unit, an index into [`UNITS`].
    Number(usize),
}

impl Form {
    fn name(self) -> String {
        match self {
            Self::Written => "dates and times".into(),
            Self::Number(unit) => format!("{} since 1970", UNITS[unit].0),
        }
    }
}

/// The times of a file, row by row.
#[derive(Debug, Default)]
pub(crate) struct Times {
    /// The form of the rows before.
    form: Option<Form>,
    /// True if the previous row could also be a date and an hour.
    hours: bool,
}

impl Times {
    /// Parses the next row's time, in milliseconds since 1970-01-01 UTC; finer digits are cut off.
    ///
    /// Accepts `2023-03-01[T ]00:00[:00[.0]][Z|+00:00]`, where a time without an offset is UTC, and
    /// whole numbers.
    ///
    /// # Errors
    /// When the text is not a time, or not in the form of this file.
    pub(crate) fn next(&mut self, text: &str) -> Result<i64, TimeError> {
        let digits = text.strip_prefix('-').unwrap_or(text);
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let (form, nanos) = if is_number { self.number(text)? } else { (Form::Written, written(text)?) };
        if let Some(before) = self.form.filter(|&before| before != form) {
            return Err(TimeError::Mixed { got: form.name(), before: before.name() });
        }
        self.form = Some(form);
        let date = compact(text).filter(|_| form == Form::Number(0));
        if let Some(date) = &date
            && self.hours
        {
            return Err(TimeError::Hours { seconds: shown(nanos), date: date.clone() });
        }
        self.hours = date.is_some();
        Ok((nanos.div_euclid(1_000_000)) as i64)
    }

    /// Returns a number's unit, and its nanoseconds since 1970.
    fn number(&self, text: &str) -> Result<(Form, i128), TimeError> {
        // Longer numbers fit no unit.
        let number: i64 = text.parse().map_err(|_| TimeError::Unknown)?;
        let nanos = |unit: usize| i128::from(number) * (1_000_000_000 / UNITS[unit].1);
        if let Some(unit) = (0..UNITS.len()).find(|&unit| is_plausible(nanos(unit))) {
            return Ok((Form::Number(unit), nanos(unit)));
        }
        let by_size = || {
            let bound = |unit: usize| LARGEST_SECONDS * UNITS[unit].1.unsigned_abs();
            (0..UNITS.len() - 1)
                .find(|&unit| u128::from(number.unsigned_abs()) < bound(unit))
                .unwrap_or(UNITS.len() - 1)
        };
        let unit = match self.form {
            Some(Form::Number(unit)) => unit,
            _ => by_size(),
        };
        let hint = compact(text).map_or(String::new(), |date| format!("; if {date} is meant, write it so"));
        let how =
            ["seconds since 1970", "milliseconds since 1970", "microseconds since 1970", "nanoseconds since 1970"]
                [unit];
        Err(TimeError::Implausible { read: shown(nanos(unit)), how, hint })
    }
}

fn is_plausible(nanos: i128) -> bool {
    OffsetDateTime::from_unix_timestamp_nanos(nanos).is_ok_and(|time| (YEARS[0]..=YEARS[1]).contains(&time.year()))
}

/// Formats a time for a message.
fn shown(nanos: i128) -> String {
    let seconds = OffsetDateTime::from_unix_timestamp_nanos(nanos.div_euclid(1_000_000_000) * 1_000_000_000);
    seconds.map_or_else(
        |_| if nanos < 0 { "before the year -9999".into() } else { "beyond the year 9999".into() },
        |time| format!("{} {} UTC", time.date(), &time.time().to_string().replace(".0", "")),
    )
}

/// Returns the date that digits without separators may mean: year, month and day, then optionally
/// hour, minute, second and milliseconds.
fn compact(text: &str) -> Option<String> {
    if ![8, 10, 12, 14, 17].contains(&text.len()) {
        return None;
    }
    let part = |from: usize, to: usize| text.get(from..to).map_or(Some(0), |part| part.parse::<u16>().ok());
    let date =
        Date::from_calendar_date(part(0, 4)?.into(), Month::try_from(part(4, 6)? as u8).ok()?, part(6, 8)? as u8)
            .ok()?;
    let time = Time::from_hms(part(8, 10)? as u8, part(10, 12)? as u8, part(12, 14)? as u8).ok()?;
    let is_recent = (YEARS[0]..=YEARS[1]).contains(&date.year());
    is_recent.then(|| format!("{date} {:02}:{:02}:{:02}", time.hour(), time.minute(), time.second()))
}

/// A date and a time with separators, and an offset, which may be missing.
const WRITTEN: &[BorrowedFormatItem<'_>] = format_description!(
    version = 2,
    "[year]-[month]-[day][first [T] [t] [ ]][hour]:[minute][optional [:[second][optional [[first [.] [,]][subsecond]]]]]\
     [optional [[first [Z] [z] [[offset_hour sign:mandatory][optional [[optional [:]][offset_minute]]]]]]]"
);

/// Parses a date with separators, in nanoseconds since 1970-01-01 UTC.
fn written(text: &str) -> Result<i128, TimeError> {
    let time = || {
        let mut parsed = Parsed::new();
        parsed.parse_items(text.as_bytes(), WRITTEN).ok().filter(|rest| rest.is_empty())?;
        let offset = UtcOffset::try_from(parsed).unwrap_or(UtcOffset::UTC);
        let time = PrimitiveDateTime::try_from(parsed).ok()?.assume_offset(offset);
        (offset.whole_hours().abs() < 24).then(|| time.unix_timestamp_nanos())
    };
    let nanos = time().ok_or(TimeError::Unknown)?;
    match is_plausible(nanos) {
        true => Ok(nanos),
        false => Err(TimeError::Implausible { read: shown(nanos), how: "a date and a time", hint: String::new() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Result<i64, TimeError> {
        Times::default().next(text)
    }

    #[test]
    fn all_time_formats_are_read() {
        for text in [
            "2023-03-01 00:00:00+00:00",
            "2023-03-01T00:00:00Z",
            "2023-03-01t00:00:00z",
            "2023-03-01T00:00:00",
            "2023-03-01 00:00",
            "2023-03-01 00:00:00.000",
            "2023-03-01 00:00:00.000999999+00",
            "2023-03-01T01:30:00+01:30",
            "2023-02-28T19:00:00-0500",
            "1677628800",
            "1677628800000",
            "1677628800000000",
            "1677628800000999999",
        ] {
            assert_eq!(one(text), Ok(1_677_628_800_000), "{text}");
        }
        assert_eq!(one("2023-03-01T00:00:00.25Z"), Ok(1_677_628_800_250));
        assert_eq!(one("315532800"), Ok(315_532_800_000));
        assert_eq!(one("2100-12-31T23:59:59Z"), Ok(4_133_980_799_000));
        for text in [
            "",
            "-",
            "today",
            "2023-02-29 00:00:00",
            "2023-13-01 00:00:00",
            "2023-03-01",
            "2023-03-01 24:00:00",
            "2023-03-01 00:00:60",
            "2023-03-01 00:00:00.",
            "2023-03-01 00:00:00+",
            "2023-03-01 00:00:00+0:00",
            "2023-03-01 00:00:00+00:",
            "2023-03-01 00:00:00+24:00",
            "2023-03-01 00:00:00+00:00 ?",
            "2023-3-1 00:00:00",
            "20230228T123000Z",
            "1677628800.5",
            "1.6776288e9",
            "99999999999999999999",
        ] {
            assert_eq!(one(text), Err(TimeError::Unknown), "{text}");
        }
    }

    #[test]
    fn times_out_of_range_are_refused() {
        for (text, expected) in [
            (
                "20230228",
                "is 1970-08-23 3:30:28 UTC as seconds since 1970: expected a year from 1980 to 2100; if 2023-02-28 00:00:00 is",
            ),
            (
                "202302281230",
                "is 1976-05-30 11:04:41 UTC as milliseconds since 1970: expected a year from 1980 to 2100; if 2023-02-28 12:30:00 is",
            ),
            (
                "20230228123000",
                "as milliseconds since 1970: expected a year from 1980 to 2100; if 2023-02-28 12:30:00 is meant, write it so",
            ),
            ("20230228123000000", "; if 2023-02-28 12:30:00 is meant, write it so"),
            ("0", "is 1970-01-01 0:00:00 UTC as seconds since 1970"),
            ("-1", "is 1969-12-31 23:59:59 UTC as seconds since 1970"),
            ("45000", "is 1970-01-01 12:30:00 UTC as seconds since 1970"),
            ("5000000000", "is 2128-06-11 8:53:20 UTC as seconds since 1970: expected a year from 1980 to 2100"),
            ("9223372036854775807", "is 2262-04-11 23:47:16 UTC as nanoseconds since 1970"),
            (
                "0001-01-01 00:00:00",
                "is 0001-01-01 0:00:00 UTC as a date and a time: expected a year from 1980 to 2100",
            ),
            ("9999-12-31 23:59:59+00:00", "is 9999-12-31 23:59:59 UTC as a date and a time"),
            ("1969-12-31T23:59:59Z", "is 1969-12-31 23:59:59 UTC as a date and a time"),
        ] {
            let found = one(text).unwrap_err().to_string();
            assert!(found.contains(expected), "{text}: {found}");
        }
    }

    #[test]
    fn files_use_one_time_format() {
        for (first, second, expected) in [
            ("1677628800", "1677628860000", "is milliseconds since 1970, and the rows before have seconds since 1970"),
            (
                "1677628800000",
                "1677628860000000000",
                "is nanoseconds since 1970, and the rows before have milliseconds",
            ),
            ("2023-03-01 00:00:00", "1677628860", "is seconds since 1970, and the rows before have dates and times"),
            ("1677628800", "2023-03-01 00:01:00", "is dates and times, and the rows before have seconds since 1970"),
            ("1677628800000", "1677628", "is 1970-01-01 0:27:57 UTC as milliseconds since 1970: expected a year"),
            (
                "2023022812",
                "2023022813",
                "is 2034-02-08 14:46:53 UTC as seconds since 1970, like the row before, but both",
            ),
        ] {
            let mut times = Times::default();
            times.next(first).unwrap();
            let found = times.next(second).unwrap_err().to_string();
            assert!(found.contains(expected), "{first}, {second}: {found}");
        }
        // Seconds in 2033 and later are accepted.
        let mut times = Times::default();
        for minute in (0..100_000).step_by(if cfg!(miri) { 1_000 } else { 1 }) {
            times.next(&(2_000_000_000 + 60 * minute).to_string()).unwrap();
        }
    }
}
