//! The samples of a row: their tokens, and which of them count in the loss.
//!
//! A token counts if any of its text is the assistant's, or a completion's. A token may also contain
//! the end of the prompt, for example the space before the first word. The tokens of the prompt and
//! those of the whole then differ from this token on.
//!
//! Invariant: no token counts whose text is all a prompt's, and each token of a text counts in one
//! sample.

use crate::answers::{Answers, Part, Parts};
use crate::complete::Chat;
use crate::rows::Row;
use crate::template::ChatTemplate;
use crate::tokens::{Token, tokens};
use minijinja::value::Value as JinjaValue;
use serde_json::Value;
use std::ops::{AddAssign, Range};
use tokenizers::Tokenizer;

/// Keys of a message that say if it counts.
const WEIGHTS: [&str; 2] = ["train", "weight"];

/// The tokens of a sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The tokens.
    pub ids: Vec<u32>,
    /// True for each token that counts in the loss when it is predicted.
    pub counted: Vec<bool>,
}

/// The samples of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The samples, none longer than a context. Each has a token that counts.
    pub samples: Vec<Sample>,
    /// What a report of the data states about the row.
    pub notes: Notes,
}

/// What a report states about rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// Tokens that would count, but lie beyond a context.
    pub lost: usize,
    /// Answers and completions that share their first token with the prompt.
    pub shared: usize,
    /// Answers that begin otherwise than the template's prompt for an answer ends.
    pub opened: usize,
    /// Messages after the last answer that counts, which are left out.
    pub trailing: usize,
}

impl AddAssign for Notes {
    fn add_assign(&mut self, more: Self) {
        self.lost += more.lost;
        self.shared += more.shared;
        self.opened += more.opened;
        self.trailing += more.trailing;
    }
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
    /// The most tokens of a sample.
    pub context: usize,
}

impl Encoder<'_> {
    /// Encodes a row. A chat contains the special tokens that its template writes. A text and a
    /// prompt begin with the tokens that the tokenizer adds before a text, such as a BOS, and end
    /// with [`Encoder::end`].
    ///
    /// A text that is longer than a context becomes several samples. A chat becomes one, or one for
    /// each answer. Chats and completions are cut after a context.
    ///
    /// # Errors
    /// Returns the reason why the row cannot be encoded.
    pub fn encode(&self, row: &Row) -> Result<Encoded, String> {
        let mut all = Encoded::default();
        match row {
            Row::Chat { messages, tools } => self.chat(messages, tools.as_ref(), &mut all)?,
            Row::Pair { messages, .. } if self.template.is_some() => self.chat(messages, None, &mut all)?,
            Row::Completion { prompt, completion } | Row::Pair { prompt, completion, .. } => {
                let whole = format!("{prompt}{completion}");
                let tokens = tokens(self.tokenizer, &whole, true)?;
                let (mut sample, shared) = counted(&tokens, &[prompt.len()..whole.len()]);
                self.finish(&mut sample);
                all.notes.shared = shared;
                self.cut(counting(sample)?, &mut all);
            }
            Row::Text(text) => {
                let tokens = tokens(self.tokenizer, text, true)?;
                let (mut sample, _) = counted(&tokens, &[0..text.len()]);
                self.finish(&mut sample);
                all.samples = windows(&counting(sample)?, self.context);
            }
        }
        Ok(all)
    }

    fn chat(&self, messages: &[Value], tools: Option<&Value>, all: &mut Encoded) -> Result<(), String> {
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
        let counts: Vec<bool> = messages.iter().map(counts).collect();
        let Some(last) = counts.iter().rposition(|&counts| counts) else {
            return Err("no message counts in the loss: add an answer of the role \"assistant\", without \"train\": false or \"weight\": 0".into());
        };
        all.notes.trailing = messages.len() - last - 1;
        let messages: Vec<Value> = messages[..=last].iter().map(without_weights).collect();
        let values: Vec<JinjaValue> = messages.iter().map(JinjaValue::from_serialize).collect();
        let tools = tools.unwrap_or(&Value::Null);
        let chat = Chat {
            template,
            messages: &messages,
            tools,
            values: &values,
            tool_values: &JinjaValue::from_serialize(tools),
        };
        let answers = Answers { chat, counts: &counts[..=last] };
        let layout = match answers.parts()? {
            Parts::Whole(part) => {
                let sample = self.part(&part, all)?;
                self.cut(counting(sample)?, all);
                return Ok(());
            }
            Parts::Each(layout) => layout,
        };
        let mut is_full = false;
        for answer in answers.numbers() {
            if is_full {
                for text in layout.texts(answer) {
                    all.notes.lost += tokens(self.tokenizer, text, false)?.len();
                }
                continue;
            }
            let sample = self.part(&answers.alone(answer)?, all)?;
            is_full = sample.counted.iter().take(self.context).all(|counts| !counts);
            self.cut(counting(sample).map_err(|reason| format!("message {}: {reason}", answer + 1))?, all);
        }
        Ok(())
    }

    fn part(&self, part: &Part, all: &mut Encoded) -> Result<Sample, String> {
        let (sample, shared) = counted(&tokens(self.tokenizer, &part.text, false)?, &part.counted);
        all.notes += Notes { shared, opened: part.opened, ..Notes::default() };
        Ok(sample)
    }

    /// Adds the token that ends a text, unless it is there.
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

    /// Adds a sample, cut to a context. Without a token that counts, it is left out.
    fn cut(&self, mut sample: Sample, all: &mut Encoded) {
        let length = sample.ids.len().min(self.context);
        all.notes.lost += sample.counted[length..].iter().filter(|counted| **counted).count();
        sample.ids.truncate(length);
        sample.counted.truncate(length);
        if sample.counted.iter().skip(1).any(|&counted| counted) {
            all.samples.push(sample);
        }
    }
}

/// Returns true for an answer that counts in the loss.
fn counts(message: &Value) -> bool {
    let has_none = message["weight"].as_f64() == Some(0.0) || message["train"] == false;
    message["role"] == "assistant" && !has_none
}

/// Returns a message without the keys that say if it counts.
fn without_weights(message: &Value) -> Value {
    let mut message = message.clone();
    if let Value::Object(object) = &mut message {
        object.retain(|key, _| !WEIGHTS.contains(&key.as_str()));
    }
    message
}

/// Returns the sample in which tokens count that overlap one of the parts of the text, and the
/// number of parts whose first token begins before them.
fn counted(tokens: &[Token], parts: &[Range<usize>]) -> (Sample, usize) {
    let mut sample = Sample { ids: tokens.iter().map(|token| token.id).collect(), counted: vec![false; tokens.len()] };
    let (mut shared, mut first) = (0, 0);
    for part in parts.iter().filter(|part| !part.is_empty()) {
        let ends_before = |token: &Token| token.place.as_ref().is_none_or(|place| place.end <= part.start);
        first += tokens[first..].iter().take_while(|token| ends_before(token)).count();
        let inside =
            tokens[first..].iter().take_while(|token| token.place.as_ref().is_none_or(|place| place.start < part.end));
        let is_shared =
            tokens.get(first).and_then(|token| token.place.as_ref()).is_some_and(|place| place.start < part.start);
        shared += usize::from(is_shared);
        for (counted, token) in sample.counted[first..].iter_mut().zip(inside) {
            *counted = token.place.is_some();
        }
    }
    (sample, shared)
}

/// Cuts a text into samples of at most a context. The last token of one is the first of the next,
/// so that each token is predicted once.
fn windows(sample: &Sample, context: usize) -> Vec<Sample> {
    let step = context.saturating_sub(1).max(1);
    let starts = (0..sample.ids.len().saturating_sub(1)).step_by(step);
    let window = |start: usize| {
        let range = start..(start + step + 1).min(sample.ids.len());
        Sample { ids: sample.ids[range.clone()].to_vec(), counted: sample.counted[range].to_vec() }
    };
    starts.map(window).collect()
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
