//! JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it, which chat templates expect
//! of `tojson`.

use serde_json::Value;
use std::fmt::Write;

/// Writes a value: with `", "` and `": "` between items, or with line breaks and `indent` spaces.
/// Returns `None` if the text is longer than `most` bytes.
pub(crate) fn dumps(value: &Value, indent: Option<usize>, most: usize) -> Option<String> {
    let mut text = String::new();
    write(&mut text, value, (indent, most), 0)?;
    (text.len() <= most).then_some(text)
}

fn write(text: &mut String, value: &Value, form: (Option<usize>, usize), depth: usize) -> Option<()> {
    let (indent, most) = form;
    let line = |text: &mut String, depth: usize| {
        if let Some(indent) = indent {
            let spaces = indent.checked_mul(depth).filter(|&spaces| spaces <= most && text.len() <= most)?;
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', spaces));
        }
        Some(())
    };
    let next = if indent.is_some() { "," } else { ", " };
    match value {
        Value::Array(items) if items.is_empty() => text.push_str("[]"),
        Value::Array(items) => {
            text.push('[');
            for (number, item) in items.iter().enumerate() {
                if number > 0 {
                    text.push_str(next);
                }
                line(text, depth + 1)?;
                write(text, item, form, depth + 1)?;
            }
            line(text, depth)?;
            text.push(']');
        }
        Value::Object(items) if items.is_empty() => text.push_str("{}"),
        Value::Object(items) => {
            text.push('{');
            for (number, (key, item)) in items.iter().enumerate() {
                if number > 0 {
                    text.push_str(next);
                }
                line(text, depth + 1)?;
                let _ = write!(text, "{}: ", Value::from(key.as_str()));
                write(text, item, form, depth + 1)?;
            }
            line(text, depth)?;
            text.push('}');
        }
        // Numbers, texts and constants are the same in both.
        plain => {
            let _ = write!(text, "{plain}");
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected texts are Python's.
    #[test]
    fn values_match_python() {
        let value: Value =
            serde_json::from_str(r#"{"b": [1, 2.5, "ü<'"], "a": {}, "c": [], "d": {"e": null}}"#).unwrap();
        assert_eq!(dumps(&value, None, 100).unwrap(), r#"{"b": [1, 2.5, "ü<'"], "a": {}, "c": [], "d": {"e": null}}"#);
        let lines = "{\n  \"b\": [\n    1,\n    2.5,\n    \"ü<'\"\n  ],\n  \"a\": {},\n  \"c\": [],\n  \"d\": {\n    \"e\": null\n  }\n}";
        assert_eq!(dumps(&value, Some(2), 100).unwrap(), lines);
        assert_eq!([dumps(&value, None, 20), dumps(&value, Some(1 << 62), 100)], [None, None]);
    }
}
