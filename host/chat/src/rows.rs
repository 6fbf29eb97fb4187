//! Rows of a JSON-lines file.
//!
//! Invariant: every line that is not blank is one row, or an error that names its line.

use crate::forms::{self, LISTS, Pair};
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
    /// A question and its answer, which is what counts. They are a chat if the model has a chat
    /// template, and otherwise a completion of Alpaca's prompt.
    Pair {
        /// The chat.
        messages: Vec<Value>,
        /// The prompt.
        prompt: String,
        /// The answer.
        completion: String,
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
const KINDS: &str = "`messages`, `conversations`, `instruction` and `output`, `prompt` and `completion`, or `text`";
/// Keys that would change the text of a row, and what to write instead.
const UNREAD: [(&str, &str); 3] = [
    ("functions", "write them as `tools`"),
    ("documents", "write them into a message"),
    ("chat_template_kwargs", "remove it: chats are rendered with the template's defaults"),
];
/// The most rows that an error lists.
const LISTED: usize = 10;

impl Row {
    /// Reads a row from a JSON object.
    ///
    /// # Errors
    /// Returns the reason why the object is not a row.
    pub fn from_json(json: &Value) -> std::result::Result<Self, String> {
        let Value::Object(object) = json else { return Err(format!("expected an object with {KINDS}")) };
        check_judgement(object)?;
        only_texts(object)?;
        if let Some((key, advice)) = UNREAD.into_iter().find(|(key, _)| has(object, key)) {
            return Err(format!("`{key}` is not read: {advice}"));
        }
        let found = |key: &str| object.get(key).is_some_and(|value| !value.is_null());
        let list = LISTS.into_iter().find(|key| found(key));
        let pair = if list.is_some() || found("completion") { None } else { Pair::find(object)? };
        let is_completion = found("completion") || list.is_none() && pair.is_none() && found("prompt");
        let is_text = found("text") && !pair.as_ref().is_some_and(|pair| pair.is_written_in(&object["text"]));
        let lists = LISTS.into_iter().filter(|key| found(key)).count();
        if lists + usize::from(pair.is_some()) + usize::from(is_completion) + usize::from(is_text) > 1 {
            return Err(format!("expected only one of {KINDS}, got {}: remove the others", keys(object)));
        }
        match (list, pair) {
            (Some(list), _) => {
                let messages = chat(object, list)?;
                check_prompt(&object.get("prompt").cloned().unwrap_or_default(), &messages)?;
                Ok(Self::Chat { messages: forms::with_system(object, messages)?, tools: tools(object)? })
            }
            (None, Some(pair)) => pair.row(tools(object)?),
            (None, None) if is_completion => completion(object),
            (None, None) if is_text => plain(object).and_then(|()| Ok(Self::Text(text(object, "text")?))),
            (None, None) => Err(format!("expected one of {KINDS}, got {}", keys(object))),
        }
    }
}

/// Checks that a row is a good answer, which is all that is learned.
fn check_judgement(object: &Map<String, Value>) -> std::result::Result<(), String> {
    if has(object, "chosen") || has(object, "rejected") {
        return Err(
            "`chosen` and `rejected`: train preferences with `stepscope finetune --preferences dpo`, or write the chosen \
             answer as `messages`, or as `prompt` and `completion`"
                .into(),
        );
    }
    let is_bad = |label: &Value| *label == Value::Bool(false) || object.contains_key("completion") && *label == 0;
    if object.get("label").is_some_and(is_bad) {
        return Err("`label` is false, which marks a bad answer, but every answer is learned: remove all such rows, for example \
                    with `jq -c 'select(.label != false)'`"
            .into());
    }
    let weight = object.get("weight").filter(|weight| !weight.is_null() && weight.as_f64() != Some(1.0));
    match (weight, object.get("train")) {
        (Some(weight), _) => {
            Err(format!("`weight`: is {weight}, but every row counts with a weight of 1: remove the key or the row"))
        }
        (None, Some(Value::Bool(false))) => Err("`train` is false: remove the row".into()),
        _ => Ok(()),
    }
}

/// Checks that a `prompt` next to messages is the beginning of them, as in ultrachat_200k.
fn check_prompt(prompt: &Value, messages: &[Value]) -> std::result::Result<(), String> {
    let is_first = |prompt: &str| {
        let first = messages.iter().find(|message| message["role"] == "user");
        first.and_then(|first| first["content"].as_str()).is_some_and(|first| first.trim() == prompt.trim())
    };
    let is_same = match prompt {
        Value::Null => true,
        Value::String(prompt) => prompt.is_empty() || is_first(prompt),
        Value::Array(prompt) => messages.starts_with(prompt),
        _ => false,
    };
    match is_same {
        true => Ok(()),
        false => Err("`prompt` is not the first message of the user: remove it, or write it as a message".into()),
    }
}

/// Checks that a row without messages has no key that needs them.
fn plain(object: &Map<String, Value>) -> std::result::Result<(), String> {
    if let Some((key, _)) = forms::system(object)? {
        return Err(format!("`{key}` is read only with messages: write it at the beginning of the text"));
    }
    match has(object, "tools") {
        true => Err("`tools` are read only with messages: write them into the text".into()),
        false => Ok(()),
    }
}

/// Reads the rows of a JSON-lines file of at most `max_bytes` bytes, each with the number of its
/// line.
///
/// # Errors
/// [`Error::File`] if the file cannot be read or a line is not a row. It lists the first such
/// lines, and counts all.
pub fn read_rows(path: impl AsRef<Path>, max_bytes: u64) -> Result<Vec<(usize, Row)>> {
    lines(path.as_ref(), max_bytes, KINDS, Row::from_json)
}

/// Reads the lines of a JSON-lines file by `from_json`; `kinds` names the keys of its rows.
pub(crate) fn lines<T>(
    path: &Path,
    max_bytes: u64,
    kinds: &str,
    from_json: impl Fn(&Value) -> std::result::Result<T, String>,
) -> Result<Vec<(usize, T)>> {
    let bytes = PlainFile::read_whole(path, max_bytes).map_err(|reason| Error::file(path, reason))?;
    if let Some(kind) = FileKind::of(&bytes).filter(|&kind| kind.is_no_text() || kind == FileKind::LfsPointer) {
        return Err(Error::file(path, kind.refusal("JSON lines")));
    }
    // Some editors begin a file with the mark of its encoding.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    if bytes.trim_ascii_start().starts_with(b"[") {
        let reason = "is a JSON list: write each object on a line of its own, for example with `jq -c '.[]'`";
        return Err(Error::file(path, reason));
    }
    let lines = bytes.split(|&byte| byte == b'\n').zip(1..).filter(|(bytes, _)| !bytes.trim_ascii().is_empty());
    let row = |bytes: &[u8]| json::line(bytes).and_then(|json| from_json(&json));
    let rows = usable(lines.map(|(bytes, line)| (line, row(bytes).map(|row| (line, row)))));
    let rows = rows.map_err(|reason| Error::file(path, reason))?;
    if rows.is_empty() {
        return Err(Error::file(path, format!("has no rows: write one JSON object a line, with {kinds}")));
    }
    Ok(rows)
}

/// Collects what the lines of a file have become.
///
/// # Errors
/// Lists the first lines that cannot be used, with the reason for each, and counts all.
pub fn usable<T>(
    lines: impl IntoIterator<Item = (usize, std::result::Result<T, String>)>,
) -> std::result::Result<Vec<T>, String> {
    let (mut good, mut listed, mut bad, mut all) = (Vec::new(), Vec::new(), 0, 0);
    for (line, found) in lines {
        all += 1;
        match found {
            Ok(found) if bad == 0 => good.push(found),
            Ok(_) => good.clear(),
            Err(reason) => {
                bad += 1;
                if bad <= LISTED {
                    listed.push(format!("line {line}: {reason}"));
                }
            }
        }
    }
    let listed = listed.join("\n  ");
    match bad {
        0 => Ok(good),
        1 => Err(listed),
        2..=LISTED => Err(format!("{bad} of {all} rows cannot be used:\n  {listed}")),
        _ => Err(format!("{bad} of {all} rows cannot be used, of which these are the first {LISTED}:\n  {listed}")),
    }
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
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Array(tools)) => Ok(Some(Value::Array(tools))),
            Ok(other) => Err(format!("`tools`: expected a list, or a list as JSON in a text, got {}", kind(&other))),
            Err(reason) => Err(format!("`tools`: expected a list, or a list as JSON in a text, got a text: {reason}")),
        },
        Some(other) => Err(format!("`tools`: expected a list, got {}", kind(other))),
    }
}

/// Reads `prompt` and `completion`: two texts, or two lists of messages, which are one chat.
fn completion(object: &Map<String, Value>) -> std::result::Result<Row, String> {
    let [prompt, completion] = ["prompt", "completion"].map(|key| object.get(key).unwrap_or(&Value::Null));
    match (prompt, completion) {
        (Value::String(prompt), Value::String(completion)) if !completion.is_empty() => {
            plain(object)?;
            Ok(Row::Completion { prompt: prompt.clone(), completion: completion.clone() })
        }
        (Value::Array(prompt), Value::Array(_)) => {
            let mut all = match prompt.is_empty() {
                true => Vec::new(),
                false => messages(&object["prompt"], "prompt")?,
            };
            // Answers in a prompt are history.
            for message in all.iter_mut().filter(|message| message["role"] == "assistant") {
                message["train"] = false.into();
            }
            all.extend(chat(object, "completion")?);
            Ok(Row::Chat { messages: forms::with_system(object, all)?, tools: tools(object)? })
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
            {"role": "user", "content": parts, "images": [], "weight": 1, "train": true}, {"role": "assistant", "weight": 0, "content": null, "tool_calls": call},
            {"role": "tool", "content": "", "name": "add"}, {"role": "assistant", "tool_calls": call}
        ]);
        let row = Row::from_json(&json!({"messages": all, "system": null, "id": 3})).unwrap();
        // Keys that are null are left out.
        let mut want = all.as_array().unwrap().clone();
        want[1].as_object_mut().unwrap().remove("content");
        assert_eq!(row, Row::Chat { messages: want, tools: None });
    }

    #[test]
    fn faulty_rows_are_refused() {
        let answers = json!([{"role": "assistant", "content": "b"}]);
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
            (json!({"text": "a", "system": "b"}), "`system` is read only with messages"),
            (json!({"messages": [], "weight": 0.5}), "`weight`: is 0.5"),
            (json!({"messages": [], "images": ["a.png"]}), "`images`: only texts are trained"),
            (json!({"prompt": [{"role": "user", "content": 1}], "completion": []}), "`prompt`, message 1: `content`"),
            (json!({"prompt": [], "completion": []}), "`completion` is empty"),
            (json!({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}), "a text and a list"),
            (json!({"prompt": "a", "messages": []}), "`messages` is empty"),
            (json!({"prompt": "a", "messages": answers}), "`prompt` is not the first message of the user"),
            (json!({"completion": "a", "messages": answers}), "remove the others"),
            (json!({"conversations": answers, "messages": answers}), "remove the others"),
            (
                json!({"system": "a", "messages": [{"role": "system", "content": "b"}, answers[0]]}),
                "another system message",
            ),
            (json!({"prompt": "a", "completion": "b", "system": "c"}), "`system` is read only with messages"),
            (json!({"prompt": "a", "completion": "b", "label": false}), "`label` is false, which marks a bad answer"),
            (json!({"prompt": "a", "completion": "b", "label": 0}), "`label` is false"),
            (json!({"messages": answers, "label": false}), "jq -c 'select(.label != false)'"),
            (
                json!({"prompt": "a", "chosen": "b", "rejected": "c"}),
                "`chosen` and `rejected`: train preferences with `stepscope finetune --preferences dpo`",
            ),
            (json!({"messages": answers, "train": false}), "`train` is false: remove the row"),
            (json!({"messages": answers, "tools": "{}"}), "a list as JSON in a text, got an object"),
            (
                json!({"problem": "a", "solution": "b", "answer": "c"}),
                "got `problem`, `answer`, `solution`: remove the others",
            ),
            (json!({"instruction": "a", "output": ""}), "`output` is empty"),
            (json!({"instruction": ["a"], "output": "b"}), "`instruction`: expected a text, got a list"),
            (json!({"instruction": "a", "input": 3, "output": "b"}), "`input`: expected a text, got a number"),
            (json!({"instruction": "a", "output": "b", "text": "c"}), "remove the others"),
            (
                json!({"instruction": "a", "output": "b", "history": [["c"]]}),
                "`history`, turn 1: expected a list of two texts",
            ),
            (json!({"instruction": "a", "output": "b", "history": "c"}), "`history`: expected a list, got a text"),
            (
                json!({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "add(1)"}]}),
                "`conversations`, message 2: `function_call`: expected JSON such as {\"name\": \"..\"",
            ),
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
            (json!({"role": "assistant", "content": "a", "weight": 0.5}), "`weight`: is 0.5"),
            (json!({"role": "assistant", "content": "a", "train": "no"}), "`train`: expected true or false"),
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
    fn first_bad_lines_are_listed() {
        let lines = (1..=25).map(|line| (line, if line % 2 == 0 { Err(format!("reason {line}")) } else { Ok(line) }));
        let error = usable(lines).unwrap_err();
        assert!(
            error.starts_with("12 of 25 rows cannot be used, of which these are the first 10:\n  line 2: reason 2\n"),
            "{error}"
        );
        assert!(error.ends_with("\n  line 20: reason 20"), "{error}");
        assert_eq!(usable([(1, Ok('a')), (3, Ok('b'))]), Ok(vec!['a', 'b']));
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
            (b"[{\"text\": \"a\"}]", "is a JSON list: write each object on a line of its own"),
            (
                b"{\"text\": \"a\"}\n{\"text\": 1}\n\n{}",
                "2 of 3 rows cannot be used:\n  line 2: `text`: expected a text, got a number\n  line 4: ",
            ),
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
