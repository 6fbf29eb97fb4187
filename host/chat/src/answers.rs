//! The samples of a chat: its texts as the model sees them, and where the answers are in them.
//!
//! An answer is what the template writes after its prompt for it. All answers are in one sample if
//! the whole chat contains each of them as it was when it was given: the messages up to the answer
//! must be the beginning of the whole. Otherwise each answer is a sample, with the messages before
//! it.
//!
//! ```text
//! messages 0..2 and the prompt      <|user|>Hi<|end|><|assistant|>
//! messages 0..3                     <|user|>Hi<|end|><|assistant|>Hello<|end|>
//! counted                                                         ^^^^^^^^^^^^
//! ```
//! A template that marks answers with `{% generation %}` decides by itself what counts, as in
//! transformers. Such a chat is one sample, unless the template leaves out parts of earlier
//! answers.
//!
//! In a long chat, answers that have the same texts around them are compared only a few times.
//! Invariant: an answer contains nothing of the message before it.

use crate::complete::{Chat, Layout};
use crate::template::{Fault, Rendering};
use std::collections::BTreeMap;
use std::ops::Range;

/// The answers with the same texts around them that are compared.
const COMPARED: usize = 4;

/// A text, and the parts of it that count.
pub(crate) struct CountedText {
    pub(crate) text: String,
    pub(crate) counted: Vec<Counted>,
    /// The answers that begin otherwise than the template's prompt for one ends.
    pub(crate) opened: usize,
}

/// A part of a text that counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) place: Range<usize>,
    /// The text with which the prompt continues at the start of the part. The part counts from the
    /// first token that differs from the prompt's. A part without a prompt counts with all tokens
    /// that overlap it.
    pub(crate) prompt: Option<String>,
}

/// The samples of a chat.
pub(crate) enum Samples {
    Whole(CountedText),
    /// Each answer must be a sample, made by [`Answers::alone`]. Has the places of all texts.
    Each(Layout),
}

/// A chat up to its last answer that counts.
pub(crate) struct Answers<'c> {
    pub(crate) chat: Chat<'c>,
    /// True for each message that is an answer and counts.
    pub(crate) counts: &'c [bool],
}

/// The place of an answer next to its texts, and whether it begins otherwise than the prompt.
struct AnswerSpan {
    start: usize,
    end: usize,
    /// The end of the prompt that the answer does not begin with.
    prompt: String,
}

impl AnswerSpan {
    fn counted(self) -> Counted {
        Counted { place: self.start..self.end, prompt: Some(self.prompt) }
    }
}

/// Returns the parts that a template marks.
fn marks(parts: impl IntoIterator<Item = Range<usize>>) -> Vec<Counted> {
    parts.into_iter().map(|place| Counted { place, prompt: None }).collect()
}

impl Answers<'_> {
    /// Returns the numbers of the answers.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = usize> {
        self.counts.iter().enumerate().filter(|(_, counts)| **counts).map(|(number, _)| number)
    }

    /// Returns the chat as one sample, if it contains all answers as they were given.
    pub(crate) fn parts(&self) -> Result<Samples, String> {
        let count = self.chat.messages.len();
        let whole = self.render(count, false).map_err(|Fault { reason, is_limit }| {
            // Rendering more chats that reach a limit would take long.
            let fails = |&count: &usize| self.render(count, false).is_err_and(|fault| fault.reason == reason);
            match (1..=count).find(|count| !is_limit && fails(count)) {
                Some(number) => format!("message {number}: {reason}"),
                None => reason,
            }
        })?;
        let layout = self.chat.layout(&whole);
        let is_checked = |number: usize| self.counts[number] || self.is_others(number);
        if !whole.generated.is_empty() {
            match self.chat.check(&whole, &layout, is_checked) {
                Ok(()) => {
                    let counted = marks(self.marked(&whole, &layout));
                    return Ok(Samples::Whole(CountedText { text: whole.text, counted, opened: 0 }));
                }
                Err(_) if self.numbers().nth(1).is_some() => return Ok(Samples::Each(layout)),
                Err(reason) => return Err(reason),
            }
        }
        let Some(places) = self.places(&whole, &layout)? else { return Ok(Samples::Each(layout)) };
        self.chat.check(&whole, &layout, is_checked)?;
        let opened = places.iter().filter(|place| !place.prompt.is_empty()).count();
        let counted = places.into_iter().map(AnswerSpan::counted).collect();
        Ok(Samples::Whole(CountedText { text: whole.text, counted, opened }))
    }

    /// Returns the sample of one answer, as it is seen when it is given.
    pub(crate) fn alone(&self, answer: usize) -> Result<CountedText, String> {
        let chat = self.up_to(answer + 1);
        let with = self.render(answer + 1, false).map_err(|fault| fault.reason)?;
        let layout = chat.layout(&with);
        let place = self.begin(answer, &with.text, &layout)?;
        chat.check(&with, &layout, |number| number == answer || self.is_others(number))?;
        let opened = usize::from(!place.prompt.is_empty());
        let mut counted = marks(with.generated.iter().filter(|part| part.end > place.start).cloned());
        if counted.is_empty() {
            counted.push(place.counted());
        }
        Ok(CountedText { text: with.text, counted, opened })
    }

    /// Returns true for a message that is not the assistant's.
    fn is_others(&self, number: usize) -> bool {
        self.chat.messages[number]["role"] != "assistant"
    }

    fn up_to(&self, count: usize) -> Chat<'_> {
        Chat { messages: &self.chat.messages[..count], values: &self.chat.values[..count], ..self.chat }
    }

    fn render(&self, count: usize, prompt: bool) -> Result<Rendering, Fault> {
        self.chat.template.render_values(&self.chat.values[..count], self.chat.tool_values, prompt)
    }

    /// Returns what the template marks, without the answers that do not count.
    fn marked(&self, whole: &Rendering, layout: &Layout) -> Vec<Range<usize>> {
        let answers: Vec<usize> = (0..self.counts.len()).filter(|&number| !self.is_others(number)).collect();
        let is_skipped = |(place, part): (usize, &Range<usize>)| {
            if answers.len() == whole.generated.len() {
                return !self.counts[answers[place]];
            }
            let mut skipped =
                answers.iter().filter(|&&number| !self.counts[number]).filter_map(|&at| layout.spans[at].as_ref());
            skipped.any(|span| span.start < part.end && part.start < span.end)
        };
        let parts = whole.generated.iter().enumerate();
        parts.filter(|&(place, part)| !is_skipped((place, part))).map(|(_, part)| part.clone()).collect()
    }

    /// Returns the places of all answers in the whole chat, or none if it lacks one as it was
    /// given.
    fn places(&self, whole: &Rendering, layout: &Layout) -> Result<Option<Vec<AnswerSpan>>, String> {
        // For the texts around an answer: where it begins and ends next to its own text.
        let mut known: BTreeMap<[&str; 2], Vec<(usize, usize, String)>> = BTreeMap::new();
        let mut places = Vec::new();
        for answer in self.numbers() {
            let around = around(&whole.text, layout, answer);
            let span = layout.spans[answer].clone().unwrap_or_default();
            if let Some([first, rest @ ..]) = around.and_then(|around| known.get(&around)).map(Vec::as_slice)
                && rest.len() + 1 >= COMPARED
                && rest.iter().all(|other| other == first)
            {
                let (before, after, prompt) = first.clone();
                places.push(AnswerSpan { start: span.start - before, end: span.end + after, prompt });
                continue;
            }
            let is_last = answer + 1 == self.counts.len();
            let rendered =
                if is_last { None } else { Some(self.render(answer + 1, false).map_err(|fault| fault.reason)?) };
            let with = rendered.as_ref().map_or(whole, |rendered| rendered);
            if !whole.text.starts_with(&with.text) {
                return Ok(None);
            }
            let place = self.begin(answer, &with.text, layout)?;
            if let Some(around) = around
                && let (Some(before), Some(after)) =
                    (span.start.checked_sub(place.start), place.end.checked_sub(span.end))
            {
                known.entry(around).or_default().push((before, after, place.prompt.clone()));
            }
            places.push(place);
        }
        Ok(Some(places))
    }

    /// Finds the beginning of an answer in a text that ends with it.
    fn begin(&self, answer: usize, with: &str, layout: &Layout) -> Result<AnswerSpan, String> {
        let end = with.len();
        let before = match self.render(answer, true) {
            Ok(before) => before.text,
            Err(fault) if fault.is_limit => return Err(fault.reason),
            // Some templates need a message before their prompt for an answer.
            Err(fault) => {
                let start = self.after_prompt(answer, with, layout).ok_or(fault.reason)?;
                return Ok(AnswerSpan { start, end, prompt: String::new() });
            }
        };
        let start = common(&before, with);
        let rest = &before[start..];
        let Some(prompt) = self.differs_before(answer, &before, start).filter(|_| !rest.is_empty()) else {
            return Ok(AnswerSpan { start, end, prompt: rest.to_owned() });
        };
        // The template closes the messages before an answer otherwise than those before its prompt.
        let text = layout.spans[answer].as_ref().filter(|_| !prompt.is_empty());
        let found = text.and_then(|text| Some(with[..text.start].rfind(&prompt)? + prompt.len()));
        found.map(|start| AnswerSpan { start, end, prompt: String::new() }).ok_or_else(|| {
            format!(
                "message {}: the chat template writes the messages before an answer differently than in its prompt for \
                 one, so the answer's tokens cannot be told apart: write rows with `prompt` and `completion`",
                answer + 1
            )
        })
    }

    /// Returns what the template adds as a prompt for an answer, if the prompt differs from the
    /// answer's text already at this place in the messages before it.
    fn differs_before(&self, answer: usize, prompt: &str, at: usize) -> Option<String> {
        let messages = self.render(answer, false).ok().filter(|_| answer > 0)?;
        let messages = common(&messages.text, prompt);
        (at < messages).then(|| prompt[messages..].to_owned())
    }

    /// Finds the beginning of an answer by the text that the template adds as a prompt for the next
    /// one.
    fn after_prompt(&self, answer: usize, with: &str, layout: &Layout) -> Option<usize> {
        let text = layout.spans[answer].clone()?;
        let next = self.render(answer + 1, true).ok()?.text;
        let prompt = &next[common(&next, with)..];
        let found = with[..text.start].rfind(prompt).filter(|_| !prompt.is_empty());
        Some(found.map_or(text.start, |found| found + prompt.len()))
    }
}

/// Returns the texts between an answer and the texts of the messages before and after it.
fn around<'t>(text: &'t str, layout: &Layout, answer: usize) -> Option<[&'t str; 2]> {
    let own = layout.spans[answer].as_ref()?;
    let start = match answer.checked_sub(1) {
        Some(before) => layout.spans[before].as_ref()?.end,
        None => 0,
    };
    let end = match layout.spans.get(answer + 1) {
        Some(after) => after.as_ref()?.start,
        None => text.len(),
    };
    Some([text.get(start..own.start)?, text.get(own.end..end)?])
}

/// Returns the length of the common beginning of two texts.
fn common(one: &str, other: &str) -> usize {
    let same = one.char_indices().zip(other.chars()).find(|((_, one), other)| one != other);
    same.map_or(one.len().min(other.len()), |((at, _), _)| at)
}
