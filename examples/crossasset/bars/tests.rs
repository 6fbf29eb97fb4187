//! Texts that the reader of bars accepts or refuses, and the messages that it returns.

use super::*;

const HEADER: &str = "open_time,open,high,low,close,volume\n";
const GOOD: &str = "2023-03-01 00:00:00+00:00,10,12,9,11,0.5\n";

fn parse(text: &str) -> Result<Vec<Bar>, BarsError> {
    parse_bars(Path::new("bars.csv"), io::Cursor::new(text))
}

fn message(text: &str) -> String {
    parse(text).expect_err("the text breaks a rule").to_string()
}

/// A row without an end is refused after a bounded part of it.
#[cfg_attr(miri, ignore = "megabytes take Miri many minutes")]
#[test]
fn endless_rows_are_refused_early() {
    let columns = |count: usize| "x,".repeat(count);
    let quoted = format!("\"{}", "\n".repeat(2 << 20));
    for (text, line) in [
        (columns(20_000_000), 1),
        ("x".repeat(50_000_000), 1),
        ("\0".repeat(50_000_000), 1),
        (quoted.clone(), 1),
        (format!("{HEADER}{GOOD}\n{}", columns(20_000_000)), 4),
        (format!("{HEADER}{GOOD}{quoted}"), 3),
    ] {
        let mut source = io::Cursor::new(&text);
        let error = parse_rows(&mut source).expect_err("a row that is too long");
        assert!(matches!(error, Fault::Broken { rule: Rule::Long, .. }));
        assert!(source.position() < 2 << 20, "{} bytes were read", source.position());
        let error = message(&text);
        assert!(error.starts_with(&format!("bars.csv, line {line}, column ")) && error.len() < 200, "{error}");
    }
    // A row just below the limit is accepted.
    let note = "x".repeat(ROW_BYTES - 200);
    let text = format!("note,{HEADER}{note},{GOOD}{note},{}", GOOD.replace("00:00:00", "00:01:00"));
    assert_eq!(parse(&text).unwrap().len(), 2);
}

#[cfg_attr(miri, ignore = "megabytes take Miri many minutes")]
#[test]
fn messages_are_short_and_printable() {
    let long = "9x".repeat(400_000);
    for error in [
        second(&format!("{long},10,12,9,11,1")),
        second(&format!("2023-03-01 00:01:00+00:00,{long},12,9,11,1")),
        message(&format!("{}\n", "name,".repeat(150_000))),
        message(&format!("open,open,{long}\n")),
    ] {
        assert!(error.len() < 600 && error.contains(".."), "{error}");
    }
    let error = second("\x1b[2J\0,10,12,9,11,1");
    assert!(error.contains("\"\u{fffd}[2J\u{fffd}\" is not a time"), "{error}");
}

/// Returns the message for a second row with these fields.
fn second(row: &str) -> String {
    message(&format!("{HEADER}{GOOD}{row}\n"))
}

#[test]
fn columns_are_read_by_name() {
    let bars = parse("Volume,note, Close ,low,HIGH,open,timestamp\n0,x, 11 ,9,12,10,1677628800\n").unwrap();
    let bar = Bar { time_ms: 1_677_628_800_000, open: 10.0, high: 12.0, low: 9.0, close: 11.0, volume: 0.0 };
    assert_eq!(bars, [bar]);
}

#[test]
fn errors_name_line_column_and_value() {
    let at = "2023-03-01 00:01:00";
    let broken = |column: &str| format!("bars.csv, line 3, column {column}: ");
    for (row, column, rule) in [
        (format!("{at},x,12,9,11,1"), "open", "\"x\" is not a number"),
        (format!("{at},,12,9,11,1"), "open", "\"\" is not a number"),
        (format!("{at},10,NaN,9,11,1"), "high", "\"NaN\" is not finite"),
        (format!("{at},10,12,9,11,inf"), "volume", "\"inf\" is not finite"),
        (format!("{at},10,12,0,11,1"), "low", "\"0\" is a price at or below zero"),
        (format!("{at},10,12,9,-11,1"), "close", "\"-11\" is a price at or below zero"),
        (format!("{at},10,8,9,11,1"), "high", "\"8\" is a high below the row's low 9"),
        (format!("{at},10,12,9,13,1"), "close", "\"13\" is outside the row's low 9 to high 12"),
        (format!("{at},8,12,9,11,1"), "open", "\"8\" is outside the row's low 9 to high 12"),
        (format!("{at},10,12,9,11,-1"), "volume", "\"-1\" is a negative volume"),
        ("soon,10,12,9,11,1".into(), "open_time", "\"soon\" is not a time"),
        ("20230301,10,12,9,11,1".into(), "open_time", "\"20230301\" is 1970-08-23 "),
        ("1677628860,10,12,9,11,1".into(), "open_time", "and the rows before have dates and times"),
        (
            "2023-03-01 00:00:00,10,12,9,11,1".into(),
            "open_time",
            "repeats the time of the row before, \"2023-03-01 00:00:00+00:00\"",
        ),
        (
            "2023-02-28 23:59:00,10,12,9,11,1".into(),
            "open_time",
            "is earlier than the row before, \"2023-03-01 00:00:00+00:00\"",
        ),
        (format!("{at},10,12,9"), "close", "the row has 4 fields, the header 6"),
        (format!("{at},10,12,9,11,1,2"), "number 7", "the row has 7 fields, the header 6"),
    ] {
        let message = second(&row);
        assert!(message.starts_with(&broken(column)), "{row}: {message}");
        assert!(message.contains(rule), "{row}: {message}");
    }
}

#[test]
fn all_kinds_of_lines_are_counted() {
    let row = "2023-03-01 00:01:00,x,12,9,11,1";
    for (text, line) in [
        (format!("{HEADER}{GOOD}\n\n{row}"), 5),
        (format!("{HEADER}{GOOD}\n\n{row}\n"), 5),
        (format!("\n{HEADER}{GOOD}{row}\n\n"), 4),
        (format!("{HEADER}{GOOD}{row}\n{row}\n").replace('\n', "\r\n"), 3),
        (format!("{HEADER}{GOOD}\n{row}\n").replace('\n', "\r\n"), 4),
        (format!("{HEADER}{GOOD}\n{row},7\n").replace('\n', "\r\n"), 4),
        (format!("{HEADER}{GOOD}\n{row},7"), 4),
        (format!("{HEADER}{GOOD}{row}\n{row}\n").replace('\n', "\r"), 3),
        (format!("{HEADER}{GOOD}\n{row}\n").replace('\n', "\r"), 4),
    ] {
        let message = message(&text);
        assert!(message.starts_with(&format!("bars.csv, line {line}, ")), "{text:?}: {message}");
    }
}

#[test]
fn headers_name_each_column_once() {
    let missing = message("open_time,open,high,low,volume\n");
    assert!(missing.starts_with("bars.csv, line 1, column close: the column is missing; "), "{missing}");
    assert!(missing.ends_with("the header has: open_time, open, high, low, volume"), "{missing}");
    let trailing = message(&format!("{},\n{GOOD}", HEADER.trim_end()));
    assert!(trailing.contains("column number 7: the row has 6 fields, the header 7, the last unnamed"), "{trailing}");
    let twice = message("open_time,open,high,low,close,volume,open\n");
    assert!(twice.starts_with("bars.csv, line 1, column open: the column appears twice; "), "{twice}");
    let empty = message("");
    assert!(
        empty.contains("column open_time (or timestamp): ") && empty.ends_with("the header has: nothing"),
        "{empty}"
    );
    let two_lines_down = message("\n\nopen_time,open\n");
    assert!(two_lines_down.starts_with("bars.csv, line 3, column high: "), "{two_lines_down}");
    let mark = parse(&format!("\u{feff}{HEADER}{GOOD}")).unwrap();
    assert_eq!(mark.len(), 1);
}

#[test]
fn a_missing_file_is_named() {
    let message = read_bars(Path::new("no/such/bars.csv")).unwrap_err().to_string();
    assert!(message.starts_with("no/such/bars.csv: cannot be read: "), "{message}");
}
