//! The samples of a row: their tokens, and which of them count in the loss.
//!
//! An answer or a completion counts from the first token that differs from those of the prompt, as
//! in TRL. This token may also contain the end of the prompt, for example the space before the
//! first word. A part that a template marks counts with all tokens that overlap it, as in
//! transformers.
//!
//! Invariant: each token of a text counts in one sample.

use crate::answers::{Answers, Counted, CountedText, Samples};
use crate::complete::Chat;
use crate::preferences::Preference;
use crate::rows::Row;
use crate::template::ChatTemplate;
use crate::tokens::{Token, tokens};
use minijinja::value::Value as JinjaValue;
use serde_json::Value;
use std::ops::AddAssign;
use tokenizers::Tokenizer;

/// The letters before and after the beginning of an answer whose tokens are compared with its
/// prompt's.
const NEAR: usize = 64;
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
    /// Facts about the row, for a report of the data.
    pub notes: Notes,
}

/// Facts about rows, for a report of the data.
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
                let part = Counted { place: prompt.len()..whole.len(), prompt: Some(String::new()) };
                let (mut sample, shared) = self.counted(&whole, &tokens, &[part], true)?;
                self.finish(&mut sample);
                all.notes.shared = shared;
                self.cut(counting(sample)?, &mut all);
            }
            Row::Text(text) => {
                let tokens = tokens(self.tokenizer, text, true)?;
                let part = Counted { place: 0..text.len(), prompt: None };
                let (mut sample, _) = self.counted(text, &tokens, &[part], true)?;
                self.finish(&mut sample);
                all.samples = windows(&counting(sample)?, self.context);
            }
        }
        Ok(all)
    }

    /// Encodes both answers of a row like [`Encoder::encode`]: the chosen one, and then the
    /// rejected one. There are none if a token that counts of one of them lies within no context.
    ///
    /// # Errors
    /// Returns the reason why the row cannot be encoded. An answer of several messages is an error
    /// if the template changes the first when it writes the next: it is then no single sample.
    pub fn encode_preference(&self, Preference { chosen, rejected }: &Preference) -> Result<Encoded, String> {
        let mut all = Encoded::default();
        for (key, row) in [("chosen", chosen), ("rejected", rejected)] {
            let Encoded { samples, notes } =
                self.encode(row).map_err(|reason| format!("the row with its `{key}` answer: {reason}"))?;
            if samples.len() > 1 {
                return Err(format!(
                    "`{key}` has {} answers, and the chat template changes one when it writes the next: write all but \
                     the last into `prompt`",
                    samples.len()
                ));
            }
            all.samples.extend(samples);
            all.notes += notes;
        }
        if all.samples.len() < 2 {
            all.samples.clear();
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
            Samples::Whole(part) => {
                let sample = self.part(&part, all)?;
                self.cut(counting(sample)?, all);
                return Ok(());
            }
            Samples::Each(layout) => layout,
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

    fn part(&self, part: &CountedText, all: &mut Encoded) -> Result<Sample, String> {
        let tokens = tokens(self.tokenizer, &part.text, false)?;
        let (sample, shared) = self.counted(&part.text, &tokens, &part.counted, false)?;
        all.notes += Notes { shared, opened: part.opened, ..Notes::default() };
        Ok(sample)
    }

    /// Returns the sample of a text, and the number of parts whose first token begins before them.
    fn counted(&self, text: &str, all: &[Token], parts: &[Counted], adds: bool) -> Result<(Sample, usize), String> {
        let mut sample = Sample { ids: all.iter().map(|token| token.id).collect(), counted: vec![false; all.len()] };
        let (mut shared, mut next) = (0, 0);
        for Counted { place: part, prompt } in parts.iter().filter(|part| !part.place.is_empty()) {
            let ends_before = |token: &Token| token.place.as_ref().is_none_or(|place| place.end <= part.start);
            next += all[next..].iter().take_while(|token| ends_before(token)).count();
            let end = next
                + all[next..]
                    .iter()
                    .take_while(|token| token.place.as_ref().is_none_or(|place| place.start < part.end))
                    .count();
            let first = match prompt {
                Some(prompt) => self.divergence(text, (all, next), (part.start, prompt), adds)?,
                None => next,
            };
            let is_shared =
                all.get(first).and_then(|token| token.place.as_ref()).is_some_and(|place| place.start < part.start);
            shared += usize::from(is_shared);
            let part = first.min(end)..end;
            for (counted, token) in sample.counted[part.clone()].iter_mut().zip(&all[part]) {
                *counted = token.place.is_some();
            }
            next = next.max(first.min(end));
        }
        Ok((sample, shared))
    }

    /// Returns the first token that differs from those of the prompt, which is the text up to
    /// `start`, and then what the prompt continues with. `next` is the first token of the text
    /// after the start.
    fn divergence(
        &self,
        text: &str,
        (all, next): (&[Token], usize),
        (start, prompt): (usize, &str),
        adds: bool,
    ) -> Result<usize, String> {
        // In a chat, only the tokens near the start are compared, so that its time does not grow
        // with the square of its length.
        let [from, to] = match adds {
            true => [0, text.len()],
            false => [
                text[..start].char_indices().rev().take(NEAR).last().map_or(start, |(at, _)| at),
                text[start..].char_indices().nth(NEAR).map_or(text.len(), |(at, _)| start + at),
            ],
        };
        let before = tokens(self.tokenizer, &format!("{}{prompt}", &text[from..start]), adds)?;
        let near;
        let with = match adds {
            true => all,
            false => {
                near = tokens(self.tokenizer, &text[from..to], false)?;
                &near
            }
        };
        let same = with.iter().zip(&before).take_while(|(one, other)| one.id == other.id).count();
        let ends_before = |token: &&Token| token.place.as_ref().is_none_or(|place| place.end <= start - from);
        Ok((next + same).saturating_sub(with.iter().take_while(ends_before).count()))
    }

    /// Adds the token that ends a text, unless it is there.
    fn finish(&self, sample: &mut Sample) {
        match (self.end, sample.ids.last()) {
            (Some(end), Some(&last)) if last == end => {
                *sample.counted.last_mut().expect("`counted` has an entry for each id") = true
            }
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
