//! Tokens of a row, and which of them count in the loss.
//!
//! The assistant's part of a chat is the text that the template adds after the generation prompt.
//! The messages before it, rendered with that prompt, must be the beginning of the text that
//! includes it. Templates that rewrite earlier messages break this, and are refused for such a
//! chat.
//!
//! ```text
//! messages 0..2 and the prompt      <|user|>Hi<|end|><|assistant|>
//! messages 0..3                     <|user|>Hi<|end|><|assistant|>Hello<|end|>
//! counted                                                         ^^^^^^^^^^^^
//! ```
//! Invariant: a token counts only if all of its text is the assistant's, or a completion's.

use crate::messages::has;
use crate::rows::Row;
use crate::template::{ChatTemplate, Fault};
use serde_json::Value;
use std::ops::Range;
use std::slice::from_ref;
use tokenizers::Tokenizer;

/// Keys of messages whose texts a template may leave out.
const PARTS: [&str; 4] = ["tool_calls", "reasoning_content", "reasoning", "thinking"];
/// The length from which a text is not part of another by chance.
const LONG: usize = 16;

/// The tokens of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The tokens.
    pub ids: Vec<u32>,
    /// True for each token that counts in the loss when it is predicted.
    pub counted: Vec<bool>,
}

/// A tokenizer, and the template that chats are rendered with.
#[derive(Debug)]
pub struct Encoder<'e> {
    /// The tokenizer.
    pub tokenizer: &'e Tokenizer,
    /// The template. Without it, rows with messages are refused.
    pub template: Option<&'e ChatTemplate>,
    /// The token that ends a text and a completion.
    pub end: Option<u32>,
}

impl Encoder<'_> {
    /// Encodes a row. A chat contains the special tokens that its template writes. A text and a
    /// prompt begin with the tokens that the tokenizer adds before a text, such as a BOS, and end
    /// with [`Encoder::end`].
    ///
    /// # Errors
    /// Returns the reason why the row cannot be encoded.
    pub fn encode(&self, row: &Row) -> Result<Sample, String> {
        let whole;
        let (text, counted) = match row {
            Row::Chat { messages, tools } => return counting(self.chat(messages, tools.as_ref())?),
            Row::Completion { prompt, completion } => {
                whole = format!("{prompt}{completion}");
                (&whole, prompt.len()..whole.len())
            }
            Row::Text(text) => (text, 0..text.len()),
        };
        let mut sample = self.tokens(text, true, from_ref(&counted))?;
        self.finish(&mut sample);
        counting(sample)
    }

    fn chat(&self, messages: &[Value], tools: Option<&Value>) -> Result<Sample, String> {
        let Some(template) = self.template else {
            return Err(
                "the row has `messages`, but the model has no chat template: give a folder with `chat_template.jinja`, or rows with `text`"
                    .into(),
            );
        };
        for (message, number) in messages.iter().zip(1..) {
            let role = message["role"].as_str().unwrap_or_default();
            if !template.knows(role) {
                return Err(format!(
                    "message {number}: the chat template does not know the role \"{role}\": write \"system\", \"user\", \"assistant\" or \"tool\""
                ));
            }
        }
        let whole = template.render_or_fault(messages, tools, false).map_err(|Fault { reason, is_limit }| {
            // Rendering more chats that reach a limit would take long.
            let fails = |&count: &usize| template.render(&messages[..count], tools, false).as_ref() == Err(&reason);
            match (1..=messages.len()).find(|count| !is_limit && fails(count)) {
                Some(number) => format!("message {number}: {reason}"),
                None => reason,
            }
        })?;
        check_complete(template, messages, tools, &whole)?;
        let mut counted = Vec::new();
        for (number, _) in messages.iter().enumerate().filter(|(_, message)| message["role"] == "assistant") {
            let before = template.render(&messages[..number], tools, true)?;
            let with = template.render(&messages[..=number], tools, false)?;
            let number = number + 1;
            if !with.starts_with(&before) {
                return Err(format!(
                    "message {number}: the chat template writes the beginning of an answer differently than its prompt for one, so the \
                     answer's tokens cannot be told apart: write rows with `prompt` and `completion`"
                ));
            }
            if !whole.starts_with(&with) {
                return Err(format!(
                    "message {number}: the chat template writes it differently once other messages follow, so its tokens cannot be told apart: \
                     end the chat after it, or split the chat"
                ));
            }
            counted.push(before.len()..with.len());
        }
        self.tokens(&whole, false, &counted)
    }

    /// Encodes a text. A token counts if its bytes lie in one of the `counted` ranges.
    fn tokens(&self, text: &str, special: bool, counted: &[Range<usize>]) -> Result<Sample, String> {
        let encoding = self.tokenizer.encode(text, special).map_err(|reason| reason.to_string())?;
        // Special tokens that the tokenizer adds have no text of their own.
        let inside = |(token, &(start, end)): (usize, &(usize, usize))| {
            encoding.get_special_tokens_mask()[token] == 0
                && start < end
                && counted.iter().any(|range| range.start <= start && end <= range.end)
        };
        let counted = encoding.get_offsets().iter().enumerate().map(inside).collect();
        Ok(Sample { ids: encoding.get_ids().to_vec(), counted })
    }

    /// Adds the token that ends a text, unless the tokenizer has added it.
    fn finish(&self, sample: &mut Sample) {
        match (self.end, sample.ids.last()) {
            (Some(end), Some(&last)) if last == end => *sample.counted.last_mut().expect("as many as ids") = true,
            (Some(end), _) => {
                sample.ids.push(end);
                sample.counted.push(true);
            }
            (None, _) => {}
        }
    }
}

/// Checks that a token counts.
fn counting(sample: Sample) -> Result<Sample, String> {
    match sample.counted.iter().skip(1).any(|&counted| counted) {
        true => Ok(sample),
        false => Err(format!(
            "none of its {} tokens counts in the loss, because the first is not predicted: write a longer text, or remove the line",
            sample.ids.len()
        )),
    }
}

/// Checks that the template leaves out no message, no part of one, and not the tools. It has left
/// out what it does not know, for example a role, if the text without it is the same.
fn check_complete(
    template: &ChatTemplate,
    messages: &[Value],
    tools: Option<&Value>,
    whole: &str,
) -> Result<(), String> {
    let same = |messages: &[Value]| template.render(messages, tools, false).is_ok_and(|text| text == whole);
    let is_written = |text: &Value| {
        let text = text.as_str().unwrap_or_default().trim();
        text.len() >= LONG && whole.contains(text)
    };
    let after = |number: usize, edit: &dyn Fn(&mut Value)| {
        let mut messages = messages.to_vec();
        edit(&mut messages[number]);
        same(&messages)
    };
    for (number, message) in messages.iter().enumerate() {
        let Value::Object(object) = message else { continue };
        let lost = |part: &str| {
            format!(
                "message {}: the chat template leaves out {part}: remove it, or write it as the template expects",
                number + 1
            )
        };
        for key in PARTS.into_iter().filter(|key| has(object, key)) {
            if after(number, &|message| drop(message.as_object_mut().map(|message| message.remove(key)))) {
                return Err(lost(&format!("`{key}`")));
            }
        }
        if object.get("content").is_some_and(Value::is_null) {
            let with = |text: &str| after(number, &|message| message["content"] = text.into());
            if with("None") && !with("") {
                return Err(format!(
                    "message {}: the chat template writes its null as \"None\": write \"\"",
                    number + 1
                ));
            }
        }
        if !has(object, "content") || is_written(&message["content"]) {
            continue;
        }
        if same(&[&messages[..number], &messages[number + 1..]].concat()) {
            return Err(lost(&format!("the message, which has the role {}", message["role"])));
        }
        for (part, one) in message["content"].as_array().into_iter().flatten().enumerate() {
            let remove = |message: &mut Value| drop(message["content"].as_array_mut().map(|parts| parts.remove(part)));
            if one["text"] != "" && !is_written(&one["text"]) && after(number, &remove) {
                return Err(lost(&format!("part {} of `content`", part + 1)));
            }
        }
    }
    let has_tools = tools.and_then(Value::as_array).is_some_and(|tools| !tools.is_empty());
    if has_tools && template.render(messages, None, false).is_ok_and(|text| text == whole) {
        return Err("`tools`: the chat template leaves them out: remove them, or describe them in a message".into());
    }
    Ok(())
}
