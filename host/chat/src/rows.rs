//! Rows of a JSON-lines file.
//!
//! Invariant: every line that is not blank is one row, or an error that names its line.

use serde_json::{Map, Value};
use std::path::Path;
use stepscope_core::{Error, FileKind, PlainFile, Result};

/// One training example.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    /// A chat. The loss counts the assistant's tokens.
    Chat {
        /// The messages, each an object with `role` and `content`, as the template reads them.
        messages: Vec<Value>,
        /// The tools that the template may list.
        tools: Option<Value>,
    },
    /// A prompt and its completion. The loss counts the completion's tokens.
    Completion {
        /// The prompt.
        prompt: String,
        /// The completion.
        completion: String,
    },
    /// A text. The loss counts all tokens.
    Text(String),
}

/// The kinds of rows, for errors.
const KINDS: &str = "`messages`, `prompt` and `completion`, or `text`";

impl Row {
    /// Reads a row from a JSON object.
    ///
    /// # Errors
    /// Returns the reason why the object is not a row.
    pub fn from_json(json: &Value) -> std::result::Result<Self, String> {
        let Value::Object(object) = json else { return Err(format!("expected an object with {KINDS}")) };
        let has = |key: &str| object.get(key).is_some_and(|value| !value.is_null());
        match (has("messages"), has("prompt") || has("completion"), has("text")) {
            (true, false, false) => Ok(Self::Chat { messages: messages(object, "messages")?, tools: tools(object)? }),
            (false, true, false) => completion(object),
            (false, false, true) => Ok(Self::Text(text(object, "text")?)),
            (false, false, false) => Err(format!("expected one of {KINDS}, got {}", keys(object))),
            _ => Err(format!("expected only one of {KINDS}, got {}", keys(object))),
        }
    }
}

/// Reads the rows of a JSON-lines file of at most `max_bytes` bytes.
///
/// # Errors
/// [`Error::File`] if the file cannot be read or a line is not a row. It names the first such line.
pub fn read_rows(path: impl AsRef<Path>, max_bytes: u64) -> Result<Vec<Row>> {
    let path = path.as_ref();
    let bytes = PlainFile::read_whole(path, max_bytes).map_err(|reason| Error::file(path, reason))?;
    if let Some(kind) = FileKind::of(&bytes).filter(|&kind| kind.is_no_text() || kind == FileKind::LfsPointer) {
        return Err(Error::file(path, kind.refusal("JSON lines")));
    }
    let mut rows = Vec::new();
    for (line, bytes) in bytes.split(|&byte| byte == b'\n').enumerate() {
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let row = serde_json::from_slice(bytes).map_err(|reason| reason.to_string());
        let row = row.and_then(|json| Row::from_json(&json));
        rows.push(row.map_err(|reason| Error::file(path, format!("line {}: {reason}", line + 1)))?);
    }
    if rows.is_empty() {
        return Err(Error::file(path, format!("has no rows: write one JSON object a line, with {KINDS}")));
    }
    Ok(rows)
}

fn keys(object: &Map<String, Value>) -> String {
    let keys: Vec<String> = object.keys().take(8).map(|key| format!("`{key}`")).collect();
    if keys.is_empty() { "an empty object".into() } else { keys.join(", ") }
}

fn text(object: &Map<String, Value>, key: &str) -> std::result::Result<String, String> {
    match &object[key] {
        Value::String(text) => Ok(text.clone()),
        other => Err(format!("`{key}`: expected a text, got {}", kind(other))),
    }
}

/// Reads a list of messages, the last of which must be the assistant's.
fn messages(object: &Map<String, Value>, key: &str) -> std::result::Result<Vec<Value>, String> {
    let Some(Value::Array(messages)) = object.get(key) else {
        return Err(format!("`{key}`: expected a list of messages, got {}", kind(&object[key])));
    };
    for (number, message) in messages.iter().enumerate() {
        if !message["role"].is_string() {
            return Err(format!("`{key}`, message {}: expected a `role`, got {}", number + 1, kind(&message["role"])));
        }
    }
    match messages.iter().any(|message| message["role"] == "assistant") {
        true => Ok(messages.clone()),
        false => {
            Err(format!("`{key}`: expected at least one message of the role \"assistant\", which is what is learned"))
        }
    }
}

fn tools(object: &Map<String, Value>) -> std::result::Result<Option<Value>, String> {
    match object.get("tools") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(tools)) => Ok(Some(Value::Array(tools.clone()))),
        Some(other) => Err(format!("`tools`: expected a list, got {}", kind(other))),
    }
}

/// Reads `prompt` and `completion`: two texts, or two lists of messages, which are one chat.
fn completion(object: &Map<String, Value>) -> std::result::Result<Row, String> {
    let [prompt, completion] = ["prompt", "completion"].map(|key| object.get(key).unwrap_or(&Value::Null));
    match (prompt, completion) {
        (Value::String(prompt), Value::String(completion)) if !completion.is_empty() => {
            Ok(Row::Completion { prompt: prompt.clone(), completion: completion.clone() })
        }
        (Value::Array(prompt), Value::Array(_)) => {
            let mut all = prompt.clone();
            if all.iter().any(|message| message["role"] == "assistant") {
                return Err("`prompt`: expected no message of the role \"assistant\": use `messages`".into());
            }
            all.extend(messages(object, "completion")?);
            Ok(Row::Chat { messages: all, tools: tools(object)? })
        }
        _ => Err(format!(
            "`prompt` and `completion`: expected two texts, the second not empty, or two lists of messages, got {} and {}",
            kind(prompt),
            kind(completion)
        )),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(text) if text.is_empty() => "an empty text",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_are_read() {
        let chat = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
        assert!(matches!(Row::from_json(&chat), Ok(Row::Chat { messages, tools: None }) if messages.len() == 2));
        let completion = Row::Completion { prompt: "a".into(), completion: "b".into() };
        assert_eq!(Row::from_json(&json!({"prompt": "a", "completion": "b"})), Ok(completion));
        assert_eq!(Row::from_json(&json!({"text": "a", "messages": null})), Ok(Row::Text("a".into())));
        let both = json!({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]});
        assert_eq!(Row::from_json(&both), Row::from_json(&chat));
    }

    #[test]
    fn faulty_rows_are_refused() {
        for (row, words) in [
            (json!("text"), "an object"),
            (json!({}), "an empty object"),
            (json!({"conversations": []}), "`conversations`"),
            (json!({"text": "a", "prompt": "b"}), "only one of"),
            (json!({"text": 3}), "a number"),
            (json!({"messages": "hello"}), "a list of messages, got a text"),
            (json!({"messages": []}), "\"assistant\""),
            (json!({"messages": [{"role": "user", "content": "a"}]}), "\"assistant\""),
            (json!({"messages": [{"content": "a"}]}), "message 1: expected a `role`"),
            (json!({"prompt": "a"}), "a text and nothing"),
            (json!({"prompt": "a", "completion": ""}), "an empty text"),
            (json!({"messages": [{"role": "assistant"}], "tools": "x"}), "`tools`"),
        ] {
            let error = Row::from_json(&row).unwrap_err();
            assert!(error.contains(words), "{row}: {error}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{\"text\": \"a\"}\n\n{\"text\": \n").unwrap();
        let error = read_rows(file.path(), 1 << 20).unwrap_err().to_string();
        assert!(error.contains("line 3: "), "{error}");
        std::fs::write(file.path(), "\n \n").unwrap();
        assert!(read_rows(file.path(), 1 << 20).unwrap_err().to_string().contains("has no rows"));
    }
}
