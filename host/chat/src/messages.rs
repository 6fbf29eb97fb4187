//! Messages of a chat, all of which are texts.
//!
//! A template gets a message as it stands in the file, without keys that are null, as transformers
//! passes it on. Templates skip what they do not know, so a message is refused if it contains
//! anything that is not a text.
//!
//! Invariant: the content of a message is a text or a list of texts. Only a message with
//! `tool_calls` may have none.

use crate::forms;
use crate::rows::kind;
use minijinja::value::Value as JinjaValue;
use serde_json::{Map, Value};

/// Keys of messages and rows whose contents are no texts.
const MEDIA: [&str; 8] = ["image", "images", "image_url", "audio", "audios", "input_audio", "video", "videos"];

/// Keys of a thought.
const THOUGHTS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Returns a message as templates get it: with its thought by each name that templates read, as
/// transformers passes it on.
pub(crate) fn with_thoughts(message: &JinjaValue) -> JinjaValue {
    let known = |key: &str| message.get_attr(key).ok().filter(|value| !value.is_none() && !value.is_undefined());
    let Some(thought) = THOUGHTS.into_iter().find_map(known) else { return message.clone() };
    let own = message.as_object().and_then(|message| message.try_iter_pairs()).into_iter().flatten();
    let first = ("thinking".into(), known("thinking").unwrap_or_else(|| thought.clone()));
    let others = own.filter(|(key, _)| !["thinking", "reasoning_content"].contains(&key.as_str().unwrap_or_default()));
    let all = std::iter::once(first).chain(others).chain([("reasoning_content".into(), thought)]);
    all.collect::<Vec<(JinjaValue, JinjaValue)>>().into_iter().collect()
}

/// Returns true if an object has a key, with a value other than null, and an empty text, list or
/// object.
pub(crate) fn has(object: &Map<String, Value>, key: &str) -> bool {
    match object.get(key) {
        None | Some(Value::Null) => false,
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(object)) => !object.is_empty(),
        Some(_) => true,
    }
}

/// Checks that nothing in a row or a message needs more than texts.
pub(crate) fn only_texts(object: &Map<String, Value>) -> Result<(), String> {
    match MEDIA.into_iter().find(|key| has(object, key)) {
        Some(key) => Err(format!("`{key}`: only texts are trained: remove it")),
        None => Ok(()),
    }
}

/// Reads a list of messages that is not empty.
pub(crate) fn messages(found: &Value, key: &str) -> Result<Vec<Value>, String> {
    let Value::Array(messages) = found else {
        return Err(format!("`{key}`: expected a list of messages, got {}", kind(found)));
    };
    if messages.is_empty() {
        return Err(format!("`{key}` is empty: write the user's and the assistant's messages, or remove the line"));
    }
    let mut all = Vec::new();
    for (message, number) in messages.iter().zip(1..) {
        let read = forms::messages_of(message)
            .and_then(|read| read.into_iter().map(checked).collect::<Result<Vec<_>, _>>())
            .map_err(|reason| format!("`{key}`, message {number}: {reason}"))?;
        all.extend(read);
    }
    Ok(all)
}

/// Returns a message without keys that are null.
fn checked(mut message: Value) -> Result<Value, String> {
    check(&message)?;
    message.as_object_mut().into_iter().for_each(|message| message.retain(|_, value| !value.is_null()));
    Ok(message)
}

fn check(message: &Value) -> Result<(), String> {
    let Value::Object(message) = message else {
        return Err(format!("expected an object with `role` and `content`, got {}", kind(message)));
    };
    match message.get("role") {
        Some(Value::String(role)) if !role.is_empty() => {}
        other => return Err(format!("expected a `role`, got {}", other.map_or("nothing", kind))),
    }
    only_texts(message)?;
    if let Some(weight) =
        message.get("weight").filter(|&weight| !weight.is_null() && ![Some(0.0), Some(1.0)].contains(&weight.as_f64()))
    {
        return Err(format!(
            "`weight`: is {weight}, but a message counts with a weight of 1, or of 0: write one of them"
        ));
    }
    if !matches!(message.get("train"), None | Some(Value::Null | Value::Bool(_))) {
        return Err(format!("`train`: expected true or false, got {}", kind(&message["train"])));
    }
    if has(message, "function_call") {
        return Err("`function_call`: write it as `tool_calls`".into());
    }
    if !matches!(message.get("tool_calls"), None | Some(Value::Null | Value::Array(_))) {
        return Err(format!("`tool_calls`: expected a list, got {}", kind(&message["tool_calls"])));
    }
    match message.get("content") {
        Some(Value::String(_)) => Ok(()),
        None | Some(Value::Null) if message["role"] == "assistant" && has(message, "tool_calls") => Ok(()),
        None | Some(Value::Null) => {
            Err("`content`: expected a text, got nothing: only an assistant's message with `tool_calls` needs none"
                .into())
        }
        Some(Value::Array(parts)) if !parts.is_empty() => {
            let faulty = parts.iter().position(|part| part["type"] != "text" || !part["text"].is_string());
            let Some(number) = faulty else { return Ok(()) };
            let found = match parts[number]["type"].as_str() {
                Some("text") => format!("{} as its text", kind(&parts[number]["text"])),
                Some(other) => format!("the type \"{other}\""),
                None => kind(&parts[number]).to_owned(),
            };
            let expected = r#"{"type": "text", "text": ".."}"#;
            Err(format!("`content`, part {}: expected {expected}, got {found}: only texts are trained", number + 1))
        }
        Some(other) => Err(format!("`content`: expected a text, or a list of texts, got {}", kind(other))),
    }
}
