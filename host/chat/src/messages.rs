//! Messages of a chat, all of which are texts.
//!
//! A template gets a message as it stands in the file. Templates skip what they do not know, so a
//! message is refused if it contains anything that is not a text.
//!
//! Invariant: the content of a message is a text, a list of texts, or null next to `tool_calls`.

use crate::rows::kind;
use serde_json::{Map, Value};

/// Keys of messages and rows whose contents are no texts.
const MEDIA: [&str; 8] = ["image", "images", "image_url", "audio", "audios", "input_audio", "video", "videos"];

/// Returns true if an object has a key, with a value other than null, and an empty text or list.
pub(crate) fn has(object: &Map<String, Value>, key: &str) -> bool {
    match object.get(key) {
        None | Some(Value::Null) => false,
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(_) => true,
    }
}

/// Checks that nothing in a row or a message needs more than texts.
pub(crate) fn only_texts(object: &Map<String, Value>) -> Result<(), String> {
    if let Some(key) = MEDIA.into_iter().find(|key| has(object, key)) {
        return Err(format!("`{key}`: only texts are trained: remove it"));
    }
    match object.get("weight") {
        Some(weight) if !weight.is_null() && weight.as_f64() != Some(1.0) => {
            Err(format!("`weight`: is {weight}, but every row and message counts with a weight of 1: remove it"))
        }
        _ => Ok(()),
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
    for (number, message) in messages.iter().enumerate() {
        check(message).map_err(|reason| format!("`{key}`, message {}: {reason}", number + 1))?;
    }
    Ok(messages.clone())
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
