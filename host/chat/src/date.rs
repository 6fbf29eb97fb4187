//! The date that a chat template may ask for.
//!
//! transformers adds `strftime_now` to templates, which formats the current time. Here it formats
//! the date of the run, at midnight, so that the same run always gives the same texts.

use std::fmt::{self, Write};
use std::str::FromStr;
use time::{Date as Day, Month, OffsetDateTime};

const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A day of the calendar, written as `2025-01-31`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Date(Day);

impl Date {
    /// Returns today's date in UTC.
    pub fn today() -> Self {
        Self(OffsetDateTime::now_utc().date())
    }

    /// Formats the date like Python's `strftime` in the C locale. The time is midnight.
    ///
    /// # Errors
    /// Names a code that is not known.
    pub(crate) fn format(self, format: &str) -> Result<String, String> {
        let mut text = String::new();
        let mut letters = format.chars();
        while let Some(letter) = letters.next() {
            if letter != '%' {
                text.push(letter);
                continue;
            }
            // `%-d` is `%d` without zeros or spaces before the number.
            let mut code = letters.next();
            let is_short = code == Some('-');
            if is_short {
                code = letters.next();
            }
            let written = code.and_then(|code| self.code(code));
            let written = written.ok_or_else(|| {
                let code: String = is_short.then_some('-').into_iter().chain(code).collect();
                format!("strftime_now: the code `%{code}` of `{format}` is not known")
            })?;
            match is_short {
                true => match written.trim_start_matches(['0', ' ']) {
                    "" => text.push('0'),
                    short => text.push_str(short),
                },
                false => text.push_str(&written),
            }
        }
        Ok(text)
    }

    fn code(self, code: char) -> Option<String> {
        let Self(day) = self;
        let (year, month, number) = (day.year(), u8::from(day.month()), day.day());
        let (weekday, name) = (day.weekday(), MONTHS[usize::from(month) - 1]);
        let weekday_name = WEEKDAYS[usize::from(weekday.number_days_from_monday())];
        let all = |format: &str| self.format(format).ok();
        Some(match code {
            'a' => weekday_name[..3].into(),
            'A' => weekday_name.into(),
            'b' | 'h' => name[..3].into(),
            'B' => name.into(),
            'd' => format!("{number:02}"),
            'e' => format!("{number:2}"),
            'm' => format!("{month:02}"),
            'y' => format!("{:02}", year.rem_euclid(100)),
            'Y' => format!("{year:04}"),
            'C' => format!("{:02}", year.div_euclid(100)),
            'j' => format!("{:03}", day.ordinal()),
            'u' => weekday.number_from_monday().to_string(),
            'w' => weekday.number_days_from_sunday().to_string(),
            'U' => format!("{:02}", day.sunday_based_week()),
            'W' => format!("{:02}", day.monday_based_week()),
            'V' => format!("{:02}", day.iso_week()),
            'G' => format!("{:04}", day.to_iso_week_date().0),
            'H' | 'M' | 'S' => "00".into(),
            'k' => " 0".into(),
            'I' | 'l' => "12".into(),
            'f' => "000000".into(),
            'p' => "AM".into(),
            // Python's times without a time zone have neither.
            'z' | 'Z' => String::new(),
            'D' | 'x' => all("%m/%d/%y")?,
            'F' => all("%Y-%m-%d")?,
            'T' | 'X' => all("%H:%M:%S")?,
            'R' => all("%H:%M")?,
            'r' => all("%I:%M:%S %p")?,
            'c' => all("%a %b %e %H:%M:%S %Y")?,
            'n' => "\n".into(),
            't' => "\t".into(),
            '%' => "%".into(),
            _ => return None,
        })
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.0.year(), u8::from(self.0.month()), self.0.day())
    }
}

impl FromStr for Date {
    type Err = String;

    /// Reads a date such as `2025-01-31`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut expected = String::new();
        let parts: Option<Vec<u16>> = text.split('-').map(|part| part.parse().ok()).collect();
        if let Some([year, month, day]) = parts.as_deref()
            && let (Ok(month), Ok(number)) = (u8::try_from(*month), u8::try_from(*day))
            && let Ok(month) = Month::try_from(month)
            && let Ok(day) = Day::from_calendar_date(i32::from(*year), month, number)
        {
            let _ = write!(expected, "{}", Self(day));
            if expected == text {
                return Ok(Self(day));
            }
        }
        Err(format!("expected a date such as 2025-01-31, got `{text}`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected texts are those of Python's `datetime(..).strftime`.
    #[test]
    fn dates_match_python() {
        for (date, format, want) in [
            ("2025-01-05", "%d %B %Y", "05 January 2025"),
            ("2025-01-05", "%d %b %Y|%-d %B %Y|%Y-%m-%d", "05 Jan 2025|5 January 2025|2025-01-05"),
            ("2024-12-30", "%A, %a %e %m %-m %y %j %-j", "Monday, Mon 30 12 12 24 365 365"),
            ("2024-12-30", "%U %W %V %G %u %w", "52 53 01 2025 1 1"),
            ("2023-01-01", "%U %W %V %G %u %w %e|%-e", "01 00 52 2022 7 0  1|1"),
            ("2025-01-05", "%H:%M:%S %I %p %f|%-H|%Z%z|%%", "00:00:00 12 AM 000000|0||%"),
            ("2025-01-05", "%D %F %T %R %x %X", "01/05/25 2025-01-05 00:00:00 00:00 01/05/25 00:00:00"),
            ("2025-01-05", "%c %h %C", "Sun Jan  5 00:00:00 2025 Jan 20"),
        ] {
            let date: Date = date.parse().unwrap();
            assert_eq!(date.format(format).unwrap(), want, "{date} {format}");
        }
        let date: Date = "2025-01-05".parse().unwrap();
        assert_eq!(date.to_string(), "2025-01-05");
        for faulty in ["%Q", "%", "%-", "%-Q"] {
            assert!(date.format(faulty).unwrap_err().contains("is not known"), "{faulty}");
        }
        for faulty in ["", "2025", "2025-1-5", "2025-02-30", "2025-13-01", "05.01.2025", "2025-01-05T00", "-2025-01-05"]
        {
            assert!(faulty.parse::<Date>().unwrap_err().contains("expected a date such as"), "{faulty}");
        }
        assert_eq!(Date::today().to_string().len(), 10);
    }
}
