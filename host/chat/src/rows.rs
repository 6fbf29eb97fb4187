//! Rows of a JSON-lines file.
//!
//! Invariant: every line that is not blank is one row, or an error that names its line.

use crate::json;
use crate::messages::{has, messages, only_texts};
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
/// Keys that would change the text of a row, and what to write instead.
const UNREAD: [(&str, &str); 4] = [
    ("system", "write it as the first message, with the role \"system\", or at the beginning of the text"),
    ("functions", "write them as `tools`"),
    ("documents", "write them into a message"),
    ("chat_template_kwargs", "remove it: chats are rendered with the template's defaults"),
];

impl Row {
    /// Reads a row from a JSON object.
    ///
    /// # Errors
    /// Returns the reason why the object is not a row.
    pub fn from_json(json: &Value) -> std::result::Result<Self, String> {
        let Value::Object(object) = json else { return Err(format!("expected an object with {KINDS}")) };
        only_texts(object)?;
        if let Some((key, advice)) = UNREAD.into_iter().find(|(key, _)| has(object, key)) {
            return Err(format!("`{key}` is not read: {advice}"));
        }
        let found = |key: &str| object.get(key).is_some_and(|value| !value.is_null());
        let row = match (found("messages"), found("prompt") || found("completion"), found("text")) {
            (true, false, false) => Self::Chat { messages: chat(object, "messages")?, tools: tools(object)? },
            (false, true, false) => completion(object)?,
            (false, false, true) => Self::Text(text(object, "text")?),
            (false, false, false) => return Err(format!("expected one of {KINDS}, got {}", keys(object))),
            _ => return Err(format!("expected only one of {KINDS}, got {}: remove the others", keys(object))),
        };
        match row {
            Self::Completion { .. } | Self::Text(_) if has(object, "tools") => {
                Err("`tools` are read only with lists of messages: write them into the text".into())
            }
            row => Ok(row),
        }
    }
}

/// Reads the rows of a JSON-lines file of at most `max_bytes` bytes, each with the number of its
/// line.
///
/// # Errors
/// [`Error::File`] if the file cannot be read or a line is not a row. It names the first such line.
pub fn read_rows(path: impl AsRef<Path>, max_bytes: u64) -> Result<Vec<(usize, Row)>> {
    let path = path.as_ref();
    let bytes = PlainFile::read_whole(path, max_bytes).map_err(|reason| Error::file(path, reason))?;
    if let Some(kind) = FileKind::of(&bytes).filter(|&kind| kind.is_no_text() || kind == FileKind::LfsPointer) {
        return Err(Error::file(path, kind.refusal("JSON lines")));
    }
    // Some editors begin a file with the mark of its encoding.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let mut rows = Vec::new();
    for (bytes, line) in bytes.split(|&byte| byte == b'\n').zip(1..) {
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let row = match bytes.trim_ascii_start().starts_with(b"[") {
            true => Err("expected an object, got a list: write each object on a line of its own, for example with `jq -c '.[]'`".into()),
            false => json::line(bytes).and_then(|json| Row::from_json(&json)),
        };
        rows.push((line, row.map_err(|reason| Error::file(path, format!("line {line}: {reason}")))?));
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
        Value::String(text) if text.is_empty() => Err(format!("`{key}` is empty: write a text, or remove the line")),
        Value::String(text) => Ok(text.clone()),
        other => Err(format!("`{key}`: expected a text, got {}", kind(other))),
    }
}

/// Reads a list of messages, at least one of which is the assistant's.
fn chat(object: &Map<String, Value>, key: &str) -> std::result::Result<Vec<Value>, String> {
    let messages = messages(&object[key], key)?;
    match messages.iter().any(|message| message["role"] == "assistant") {
        true => Ok(messages),
        false => Err(format!(
            "`{key}`: expected at least one message of the role \"assistant\", which is what is learned: add the answer, \
             or remove the line"
        )),
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
            let mut all = match prompt.is_empty() {
                true => Vec::new(),
                false => messages(&object["prompt"], "prompt")?,
            };
            if all.iter().any(|message| message["role"] == "assistant") {
                return Err("`prompt`: expected no message of the role \"assistant\": use `messages`".into());
            }
            all.extend(chat(object, "completion")?);
            Ok(Row::Chat { messages: all, tools: tools(object)? })
        }
        _ => Err(format!(
            "`prompt` and `completion`: expected two texts, the second not empty, or two lists of messages, got {} and {}",
            kind(prompt),
            kind(completion)
        )),
    }
}

pub(crate) fn kind(value: &Value) -> &'static str {
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
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let call = json!([{"function": {"name": "add", "arguments": {}}}]);
        let all = json!([
            {"role": "user", "content": parts, "images": [], "weight": 1}, {"role": "assistant", "content": null, "tool_calls": call},
            {"role": "tool", "content": "", "name": "add"}, {"role": "assistant", "tool_calls": call}
        ]);
        let row = Row::from_json(&json!({"messages": all, "system": null, "id": 3})).unwrap();
        assert_eq!(row, Row::Chat { messages: all.as_array().unwrap().clone(), tools: None });
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
            (json!({"text": ""}), "`text` is empty: write a text, or remove the line"),
            (json!({"messages": []}), "`messages` is empty: write "),
            (json!({"messages": ["hello"]}), "message 1: expected an object with `role` and `content`, got a text"),
            (json!({"messages": [{"role": "user", "content": "a"}]}), "\"assistant\""),
            (json!({"messages": [{"content": "a"}]}), "message 1: expected a `role`"),
            (json!({"prompt": "a"}), "a text and nothing"),
            (json!({"prompt": "a", "completion": ""}), "an empty text"),
            (json!({"messages": [{"role": "assistant", "content": "a"}], "tools": "x"}), "`tools`"),
            (json!({"text": "a", "tools": [{}]}), "`tools` are read only with"),
            (json!({"text": "a", "system": "b"}), "`system` is not read: write it as the first message"),
            (json!({"messages": [], "weight": 0.5}), "`weight`: is 0.5"),
            (json!({"messages": [], "images": ["a.png"]}), "`images`: only texts are trained"),
            (json!({"prompt": [{"role": "user", "content": 1}], "completion": []}), "`prompt`, message 1: `content`"),
            (json!({"prompt": [], "completion": []}), "`completion` is empty"),
            (json!({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}), "a text and a list"),
            (json!({"prompt": "a", "messages": []}), "remove the others"),
        ] {
            let error = Row::from_json(&row).unwrap_err();
            assert!(error.contains(words), "{row}: {error}");
        }
        let answer = json!({"role": "assistant", "content": "b"});
        for (message, words) in [
            (json!({"role": "", "content": "a"}), "expected a `role`, got an empty text"),
            (json!({"role": "user", "content": null}), "`content`: expected a text, got nothing"),
            (json!({"role": "user"}), "`content`: expected a text, got nothing"),
            (json!({"role": "user", "content": null, "tool_calls": [{}]}), "only an assistant's message"),
            (json!({"role": "assistant", "content": null}), "only an assistant's message with `tool_calls`"),
            (json!({"role": "assistant", "content": null, "tool_calls": []}), "only an assistant's message"),
            (json!({"role": "assistant", "content": "a", "tool_calls": {}}), "`tool_calls`: expected a list"),
            (json!({"role": "assistant", "content": null, "function_call": {"name": "a"}}), "write it as `tool_calls`"),
            (json!({"role": "assistant", "content": "a", "weight": 0}), "`weight`: is 0"),
            (json!({"role": "user", "content": 3}), "got a number"),
            (json!({"role": "user", "content": {"text": "a"}}), "got an object"),
            (json!({"role": "user", "content": []}), "got a list"),
            (
                json!({"role": "user", "content": ["a"]}),
                "part 1: expected {\"type\": \"text\", \"text\": \"..\"}, got a text",
            ),
            (json!({"role": "user", "content": [{"type": "text", "text": null}]}), "got nothing as its text"),
            (
                json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}),
                "`content`, part 2: expected {\"type\": \"text\", \"text\": \"..\"}, got the type \"image_url\"",
            ),
            (json!({"role": "user", "content": [{"type": "input_audio"}]}), "the type \"input_audio\""),
            (json!({"role": "user", "content": "a", "images": ["a.png"]}), "`images`: only texts"),
        ] {
            let error = Row::from_json(&json!({"messages": [answer, message]})).unwrap_err();
            assert!(error.starts_with("`messages`, message 2: ") && error.contains(words), "{message}: {error}");
        }
    }

    #[test]
    fn files_are_read_by_lines() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |bytes: &[u8]| {
            std::fs::write(file.path(), bytes).unwrap();
            read_rows(file.path(), 1 << 20).map_err(|error| error.to_string())
        };
        let rows = read(b"\xef\xbb\xbf{\"text\": \"a\"}\r\n\r\n \n{\"text\": \"\\ud83d\\ude00\"}").unwrap();
        assert_eq!(rows, [(1, Row::Text("a".into())), (4, Row::Text("\u{1f600}".into()))]);
        for (bytes, words) in [
            (&b"{\"text\": \"a\"}\n\n{\"text\": \n"[..], "line 3: column 9: "),
            (b"{\"text\": \"a\"}\n{\"text\": \"a", "line 2: column 11: "),
            (b"{\n\"text\": \"a\"\n}", "line 1: column 1: EOF"),
            (b"[{\"text\": \"a\"}]", "line 1: expected an object, got a list"),
            (b"{\"text\": \"a\"}\n{\"text\": \"\"}", "line 2: `text` is empty"),
            (b"{\"text\": \"a\", \"text\": \"b\"}", "line 1: column "),
            (b"\n \n", "has no rows"),
            (b"", "has no rows"),
            (b"\xef\xbb\xbf", "has no rows"),
            (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "gunzip"),
            (b"\xff\xfe{\x00}\x00", "UTF-8"),
        ] {
            let error = read(bytes).unwrap_err();
            assert!(error.contains(words), "{words}: {error}");
        }
        assert!(read_rows(std::env::temp_dir(), 1 << 20).unwrap_err().to_string().contains("folder"));
    }
}
