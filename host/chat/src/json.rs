//! JSON in which no key occurs twice.
//!
//! Most readers keep the last of two equal keys. Here they are an error, so that no text is
//! dropped.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Reads a line of a file.
///
/// # Errors
/// Returns the column and the fault.
pub(crate) fn line(bytes: &[u8]) -> std::result::Result<Value, String> {
    serde_json::from_slice(bytes).map(|Unique(value)| value).map_err(|error| {
        let (text, column) = (error.to_string(), error.column());
        let fault = text.strip_suffix(&format!(" at line {} column {column}", error.line())).unwrap_or(&text);
        let advice = if error.is_eof() {
            ": the line ends within an object: write each object on one line, and check that the file is complete"
        } else if fault.contains("hex escape") {
            ": `\\ud800` to `\\udfff` are halves of a character (surrogates): write both, or remove it"
        } else if fault.contains("unicode code point") {
            ": write the file as UTF-8"
        } else if column <= 1 {
            r#": each line is a JSON object, such as {"text": ".."}"#
        } else {
            ""
        };
        format!("column {column}: {fault}{advice}")
    })
}

struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Reader).map(Self)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Unique(item)) = from.next_element()? {
            items.push(item);
        }
        Ok(items.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut items = Map::new();
        while let Some((key, Unique(item))) = from.next_entry::<String, _>()? {
            if items.contains_key(&key) {
                return Err(A::Error::custom(format_args!("the key `{key}` occurs twice")));
            }
            items.insert(key, item);
        }
        Ok(items.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_serde_json() {
        for text in [r#"{"b": [1, -2, 2.5e3, true, null, "ü\u00e9\ud83d\ude00\n"], "a": {"b": {}, "c": []}}"#, " 3 \r"]
        {
            assert_eq!(line(text.as_bytes()), Ok(serde_json::from_str(text).unwrap()));
        }
    }

    #[test]
    fn faults_name_their_column() {
        for (text, words) in [
            (r#"{"a": {"b": 1, "b": 2}}"#, "column 22: the key `b` occurs twice"),
            (r#"{"a": "\ud800"}"#, "column 14: unexpected end of hex escape: `\\ud800` to"),
            (r#"{"a": "\udc00."}"#, "are halves of a character"),
            (r#"{"a": "b",}"#, "column 11: trailing comma"),
            (r#"{"a": "b"} {}"#, "column 12: trailing characters"),
            (r#"{"a": "b"#, "the line ends within an object"),
            ("{'a': 'b'}", "column 2: key must be a string"),
            (r#"{"a": NaN}"#, "column 7: expected value"),
        ] {
            let error = line(text.as_bytes()).unwrap_err();
            assert!(error.contains(words) && !error.contains("at line"), "{text}: {error}");
        }
        assert!(line(b"{\"a\": \"\xff\"}").unwrap_err().contains("write the file as UTF-8"));
        assert!(line(b"prompt,completion").unwrap_err().contains("each line is a JSON object"));
    }
}
