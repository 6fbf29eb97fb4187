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

use crate::rows::Row;
use crate::template::ChatTemplate;
use serde_json::Value;
use std::ops::Range;
use std::slice::from_ref;
use tokenizers::Tokenizer;

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
        match row {
            Row::Chat { messages, tools } => self.chat(messages, tools.as_ref()),
            Row::Completion { prompt, completion } => {
                let whole = format!("{prompt}{completion}");
                let mut sample = self.tokens(&whole, true, from_ref(&(prompt.len()..whole.len())))?;
                self.finish(&mut sample);
                Ok(sample)
            }
            Row::Text(text) => {
                let mut sample = self.tokens(text, true, from_ref(&(0..text.len())))?;
                self.finish(&mut sample);
                Ok(sample)
            }
        }
    }

    fn chat(&self, messages: &[Value], tools: Option<&Value>) -> Result<Sample, String> {
        let Some(template) = self.template else {
            return Err(
                "the row has `messages`, but the model has no chat template: give a folder with `chat_template.jinja`, or rows with `text`"
                    .into(),
            );
        };
        let whole = template.render(messages, tools, false)?;
        let mut counted = Vec::new();
        for (number, _) in messages.iter().enumerate().filter(|(_, message)| message["role"] == "assistant") {
            let before = template.render(&messages[..number], tools, true)?;
            let with = template.render(&messages[..=number], tools, false)?;
            if !with.starts_with(&before) || !whole.starts_with(&with) {
                return Err(format!(
                    "message {}: the chat template writes it differently once other messages follow, so its tokens cannot be told apart: end the \
                     chat after it, or split the chat",
                    number + 1
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
