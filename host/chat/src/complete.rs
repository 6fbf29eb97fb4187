//! The places of a chat's texts in its rendering, and the check that none is left out.
//!
//! Each text is rendered once more with one of its letters replaced by a character that no other
//! text contains. Where this character stands, the text must stand around it, except for white
//! space. A text that is written in another form is probed: an edit of it must change the
//! rendering.
//!
//! ```text
//! content            The sum is 4.
//! rendered again     ..<|assistant|>☐he sum is 4.<|end|>..
//! ```
//! Invariant: a text passes only if it is written as it stands, or if no probed part of it can be
//! changed without an effect.

use crate::python_json;
use crate::template::{ChatTemplate, Rendering};
use minijinja::value::Value as JinjaValue;
use serde_json::Value;
use std::ops::Range;

/// Keys of messages whose texts a template may leave out.
const REASONING: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];
/// Keys of a tool call that carry no text.
const NO_TEXTS: [&str; 3] = ["id", "type", "index"];
/// The first of the characters that mark texts, and their number.
const FIRST_MARK: u32 = 0xf0000;
const MARKS: usize = 0x1_fff0;
/// The character that replaces a probed one.
const PROBE: &str = "\u{e000}";
/// The most texts of a chat that are probed, and the most parts of such a text.
const MAX_PROBED: usize = 64;
const MAX_PARTS: usize = 32;
/// The longest tag, such as `</think>`, and the letters by which a text is found again.
const MAX_TAG: usize = 32;
const AGAIN: usize = 4;
/// The most letters of a text that an error shows.
const SHOWN: usize = 40;

/// A chat, in the forms that templates and edits need.
pub(crate) struct Chat<'c> {
    pub(crate) template: &'c ChatTemplate,
    pub(crate) messages: &'c [Value],
    pub(crate) tools: &'c Value,
    pub(crate) values: &'c [JinjaValue],
    pub(crate) tool_values: &'c JinjaValue,
}

/// A text of a message or a tool.
struct Piece {
    /// The message's number, or none for a tool.
    message: Option<usize>,
    /// The JSON pointer within the message, or within the list of tools.
    pointer: String,
    text: String,
    /// The place of the letter that is replaced.
    anchor: Option<usize>,
    found: Found,
}

/// The result of the search for a text in the rendering.
#[derive(Clone)]
enum Found {
    /// It stands at this place.
    Verbatim(Range<usize>),
    /// Its letter is there, but this part of it is not.
    Without(Range<usize>),
    No,
}

/// The places of a chat's texts.
pub(crate) struct Layout {
    pieces: Vec<Piece>,
    /// The place of all texts of each message, if they are written as they stand.
    pub(crate) spans: Vec<Option<Range<usize>>>,
}

impl Chat<'_> {
    /// Finds the texts of a chat in its rendering.
    pub(crate) fn layout(&self, rendering: &Rendering) -> Layout {
        let mut pieces = pieces(self.messages, self.tools);
        let (mut messages, mut tools) = (self.messages.to_vec(), self.tools.clone());
        let mut changed = vec![false; messages.len()];
        for (number, piece) in pieces.iter_mut().enumerate().take(MARKS) {
            piece.anchor = anchor(&piece.text);
            let Some(at) = piece.anchor else { continue };
            let owner = match piece.message {
                Some(message) => {
                    changed[message] = true;
                    &mut messages[message]
                }
                None => &mut tools,
            };
            let marked = with_letter(&piece.text, at, &mark(number).to_string());
            owner.pointer_mut(&piece.pointer).into_iter().for_each(|text| *text = marked.as_str().into());
        }
        let values = self.values.iter().zip(&messages).zip(&changed).map(|((old, new), changed)| match changed {
            true => JinjaValue::from_serialize(new),
            false => old.clone(),
        });
        let values: Vec<JinjaValue> = values.collect();
        let tools = JinjaValue::from_serialize(&tools);
        let marked = self.template.render_values(&values, &tools, false).map(|marked| marked.text).unwrap_or_default();
        let restored = Restored::new(&marked, &pieces);
        if restored.text == rendering.text {
            let founds: Vec<Found> =
                pieces.iter().enumerate().map(|(number, piece)| restored.find(number, piece)).collect();
            pieces.iter_mut().zip(founds).for_each(|(piece, found)| piece.found = found);
        }
        let mut spans: Vec<Option<Range<usize>>> = vec![None; self.messages.len()];
        let mut lacks = vec![false; self.messages.len()];
        for piece in &pieces {
            let Some(message) = piece.message else { continue };
            match (&piece.found, &mut spans[message]) {
                (Found::Verbatim(place), Some(span)) => {
                    *span = span.start.min(place.start)..span.end.max(place.end);
                }
                (Found::Verbatim(place), none) => *none = Some(place.clone()),
                _ => lacks[message] = true,
            }
        }
        spans.iter_mut().zip(lacks).filter(|(_, lacks)| *lacks).for_each(|(span, _)| *span = None);
        Layout { pieces, spans }
    }

    /// Checks that the template has left out nothing of the tools and of these messages.
    ///
    /// # Errors
    /// Names what the template leaves out, and its message.
    pub(crate) fn check(
        &self,
        rendering: &Rendering,
        layout: &Layout,
        checked: impl Fn(usize) -> bool,
    ) -> Result<(), String> {
        let probe = Probe { chat: self, text: &rendering.text };
        let has_tools = self.tools.as_array().is_some_and(|tools| !tools.is_empty());
        if has_tools && probe.same(self.values, &JinjaValue::from(())) {
            return Err("`tools`: the chat template leaves them out: remove them, or describe them in a message".into());
        }
        for (number, message) in self.messages.iter().enumerate().filter(|&(number, _)| checked(number)) {
            probe.nothing_written(number, message)?;
        }
        let is_checked = |piece: &&Piece| piece.message.is_none_or(&checked);
        let unfound = |piece: &&Piece| !matches!(piece.found, Found::Verbatim(_)) && !piece.text.trim().is_empty();
        for piece in layout.pieces.iter().filter(is_checked).filter(unfound).take(MAX_PROBED) {
            probe.check(piece).map_err(|part| match piece.message {
                Some(number) => format!(
                    "message {}: the chat template leaves out {part}: remove it, or write it as the template expects",
                    number + 1
                ),
                None => format!("the chat template leaves out {part}: remove it, or describe it in a message"),
            })?;
        }
        Ok(())
    }
}

impl Layout {
    /// Returns the texts of a message.
    pub(crate) fn texts(&self, message: usize) -> impl Iterator<Item = &str> {
        self.pieces.iter().filter(move |piece| piece.message == Some(message)).map(|piece| &*piece.text)
    }
}

/// Returns the texts of messages and tools.
fn pieces(messages: &[Value], tools: &Value) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (number, message) in messages.iter().enumerate() {
        let mut add = |pointer: String, text: &Value| {
            if let Value::String(text) = text {
                pieces.push(Piece {
                    message: Some(number),
                    pointer,
                    text: text.clone(),
                    anchor: None,
                    found: Found::No,
                });
            }
        };
        REASONING.into_iter().for_each(|key| add(format!("/{key}"), &message[key]));
        add("/content".into(), &message["content"]);
        for (part, one) in message["content"].as_array().into_iter().flatten().enumerate() {
            add(format!("/content/{part}/text"), &one["text"]);
        }
        leaves(&message["tool_calls"], "/tool_calls", &mut add);
    }
    for (number, tool) in tools.as_array().into_iter().flatten().enumerate() {
        for key in ["function/name", "name"] {
            let pointer = format!("/{number}/{key}");
            if let Some(Value::String(text)) = tool.pointer(&format!("/{key}")) {
                pieces.push(Piece { message: None, pointer, text: text.clone(), anchor: None, found: Found::No });
            }
        }
    }
    pieces
}

/// Passes on the texts in a list of tool calls, with their pointers.
fn leaves(value: &Value, pointer: &str, add: &mut impl FnMut(String, &Value)) {
    match value {
        Value::Array(items) => {
            for (number, item) in items.iter().enumerate() {
                leaves(item, &format!("{pointer}/{number}"), add);
            }
        }
        Value::Object(items) => {
            for (key, item) in items.iter().filter(|(key, _)| !NO_TEXTS.contains(&key.as_str())) {
                leaves(item, &format!("{pointer}/{}", key.replace('~', "~0").replace('/', "~1")), add);
            }
        }
        text => add(pointer.to_owned(), text),
    }
}

fn mark(number: usize) -> char {
    char::from_u32(FIRST_MARK + number as u32).expect("a character of the two last planes")
}

/// Returns true for letters that can be replaced without an effect on most templates.
fn is_letter(letter: char) -> bool {
    letter.is_alphanumeric() || !letter.is_ascii() && !letter.is_whitespace()
}

/// Returns the parts of a text between line breaks and tags such as `</think>`, and the tags.
/// A word such as `/think` is a tag, too. The second value is true for a tag.
fn parts(text: &str) -> Vec<(Range<usize>, bool)> {
    let (mut parts, mut start, mut at) = (Vec::new(), 0, 0);
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    while let Some(letter) = text[at..].chars().next() {
        let rest = &text[at..];
        let tag = match letter {
            '<' | '[' => {
                let close = if letter == '<' { '>' } else { ']' };
                let end = rest.char_indices().take(MAX_TAG).find(|&(_, other)| other == close || other.is_whitespace());
                end.filter(|&(_, other)| other == close).map(|(end, _)| end + 1)
            }
            '/' if text[..at].chars().next_back().is_none_or(char::is_whitespace) => {
                Some(1 + rest[1..].find(|letter| !is_word(letter)).unwrap_or(rest.len() - 1))
            }
            '\n' => Some(0),
            _ => None,
        };
        let Some(length) = tag else {
            at += letter.len_utf8();
            continue;
        };
        parts.push((start..at, false));
        parts.push((at..at + length, true));
        at += length.max(1);
        start = at;
    }
    parts.push((start..text.len(), false));
    parts.retain(|(part, _)| !text[part.clone()].trim().is_empty());
    parts
}

/// Returns the place of the first letter of a text that is in no tag.
fn anchor(text: &str) -> Option<usize> {
    let letter = |(part, is_tag): (Range<usize>, bool)| match is_tag {
        true => None,
        false => text[part.clone()].find(is_letter).map(|at| part.start + at),
    };
    parts(text).into_iter().find_map(letter)
}

/// Replaces one letter of a text.
fn with_letter(text: &str, at: usize, letter: &str) -> String {
    let after = at + text[at..].chars().next().map_or(0, char::len_utf8);
    format!("{}{letter}{}", &text[..at], &text[after..])
}

/// A rendering with marks, and the same with the letters that the marks replaced.
struct Restored<'m> {
    marked: &'m str,
    text: String,
    /// The places of each mark.
    places: Vec<Vec<usize>>,
    /// The places of all marks, each with the length of the text up to it without marks.
    shifts: Vec<(usize, usize)>,
}

impl<'m> Restored<'m> {
    fn new(marked: &'m str, pieces: &[Piece]) -> Self {
        let mut text = String::with_capacity(marked.len());
        let (mut places, mut shifts) = (vec![Vec::new(); pieces.len()], Vec::new());
        for (at, letter) in marked.char_indices() {
            let number = (letter as u32).checked_sub(FIRST_MARK).map(|number| number as usize);
            let piece = number.and_then(|number| Some((number, pieces.get(number)?)));
            match piece.and_then(|(number, piece)| Some((number, piece.text[piece.anchor?..].chars().next()?))) {
                Some((number, original)) => {
                    places[number].push(at);
                    shifts.push((at, text.len()));
                    text.push(original);
                }
                None => text.push(letter),
            }
        }
        Self { marked, text, places, shifts }
    }

    /// Returns the place in the text without marks.
    fn place(&self, at: usize) -> usize {
        let after = self.shifts.partition_point(|&(mark, _)| mark < at);
        let Some(&(mark, place)) = after.checked_sub(1).and_then(|last| self.shifts.get(last)) else { return at };
        let length = |text: &str, at: usize| text[at..].chars().next().map_or(0, char::len_utf8);
        place + length(&self.text, place) + (at - mark - length(self.marked, mark))
    }

    /// Finds a text around its mark, as it stands or as JSON writes it.
    fn find(&self, number: usize, piece: &Piece) -> Found {
        let Some(anchor) = piece.anchor else { return Found::No };
        let own = with_letter(&piece.text, anchor, &mark(number).to_string());
        let escaped = python_json::dumps(&Value::from(own.as_str()), None, usize::MAX).unwrap_or_default();
        let escaped = escaped.get(1..escaped.len().saturating_sub(1)).unwrap_or_default();
        for &at in &self.places[number] {
            for form in [own.as_str(), escaped] {
                let Some(middle) = form.find(mark(number)) else { continue };
                let before = matched(self.marked[..at].char_indices().rev(), form[..middle].char_indices().rev());
                let after = matched(self.marked[at..].char_indices(), form[middle..].char_indices());
                if let (Ok(before), Ok(after)) = (before, after) {
                    let start = before.unwrap_or(at);
                    let end = after.map_or(at, |last| {
                        at + last + self.marked[at + last..].chars().next().map_or(0, char::len_utf8)
                    });
                    return Found::Verbatim(self.place(start)..self.place(end));
                }
            }
        }
        let Some(&at) = self.places[number].first() else { return Found::No };
        self.missing(at, piece, anchor, &own)
    }

    /// Returns the part of a text that is missing next to its mark.
    fn missing(&self, at: usize, piece: &Piece, anchor: usize, own: &str) -> Found {
        let shift = own.len() - piece.text.len();
        if matched(self.marked[..at].char_indices().rev(), own[..anchor].char_indices().rev()).is_err() {
            return Found::Without(0..anchor);
        }
        let Err((found, first)) = matched(self.marked[at..].char_indices(), own[anchor..].char_indices()) else {
            return Found::No;
        };
        let (found, first) = (found.map_or(self.marked.len(), |found| at + found), anchor + first);
        let follows = |&(place, _): &(usize, char)| {
            let rest: String =
                own[first + place..].chars().filter(|letter| !letter.is_whitespace()).take(AGAIN).collect();
            !rest.is_empty() && matched(self.marked[found..].char_indices(), rest.char_indices()).is_ok()
        };
        let length = own[first..].char_indices().find(follows).map_or(own.len() - first, |(place, _)| place);
        // The letter itself stands before the missing part.
        Found::Without(first - shift..first - shift + length)
    }
}

/// Compares the letters of a text with those of another that it must begin with, without white
/// space. Returns the place of the last one in the text, or the places at which they differ: that
/// in the text is none at its end.
fn matched(
    text: impl Iterator<Item = (usize, char)>,
    wanted: impl Iterator<Item = (usize, char)>,
) -> Result<Option<usize>, (Option<usize>, usize)> {
    let is_black = |&(_, letter): &(usize, char)| !letter.is_whitespace();
    let mut text = text.filter(is_black);
    let mut last = None;
    for (at, letter) in wanted.filter(is_black) {
        match text.next() {
            Some((place, found)) if found == letter => last = Some(place),
            other => return Err((other.map(|(place, _)| place), at)),
        }
    }
    Ok(last)
}

/// Renderings of edited chats.
struct Probe<'p> {
    chat: &'p Chat<'p>,
    /// The rendering of the chat as it is.
    text: &'p str,
}

impl Probe<'_> {
    /// Returns true if the rendering of other values is the same, except for white space.
    fn same(&self, values: &[JinjaValue], tools: &JinjaValue) -> bool {
        let black = |text: &str| text.chars().filter(|letter| !letter.is_whitespace()).collect::<Vec<_>>();
        let rendering = self.chat.template.render_values(values, tools, false);
        rendering.is_ok_and(|rendering| rendering.text == self.text || black(&rendering.text) == black(self.text))
    }

    /// Returns true if an edit of a message, or of the tools, leaves the rendering the same.
    fn same_after(&self, message: Option<usize>, edit: &dyn Fn(&mut Value)) -> bool {
        let (mut values, mut tools) = (self.chat.values.to_vec(), self.chat.tool_values.clone());
        let mut edited = message.map_or(self.chat.tools, |number| &self.chat.messages[number]).clone();
        edit(&mut edited);
        match message {
            Some(number) => values[number] = JinjaValue::from_serialize(&edited),
            None => tools = JinjaValue::from_serialize(&edited),
        }
        self.same(&values, &tools)
    }

    /// Checks what a message has without a text: calls that have no texts, and null.
    fn nothing_written(&self, number: usize, message: &Value) -> Result<(), String> {
        if message.get("content").is_some_and(Value::is_null) && self.text.contains("None") {
            let with = |text: &str| self.same_after(Some(number), &|message| message["content"] = text.into());
            if with("None") && !with("") {
                return Err(format!(
                    "message {}: the chat template writes its null as \"None\": write \"\"",
                    number + 1
                ));
            }
        }
        Ok(())
    }

    /// Checks a text that is not written as it stands. Returns a description of what is left out.
    fn check(&self, piece: &Piece) -> Result<(), String> {
        let steps: Vec<&str> = piece.pointer.split('/').skip(1).collect();
        let place = self.without_whole(piece, &steps)?;
        let same = |text: String| {
            let edit = |owner: &mut Value| {
                owner.pointer_mut(&piece.pointer).into_iter().for_each(|old| *old = text.as_str().into());
            };
            self.same_after(piece.message, &edit)
        };
        let lost = |part: Range<usize>| {
            let text = piece.text[part].trim();
            let more = if text.chars().nth(SHOWN).is_some() { ".." } else { "" };
            format!("{:?} of {place}", text.chars().take(SHOWN).collect::<String>() + more)
        };
        if let Found::Without(missing) = &piece.found {
            let text = format!("{}{}", &piece.text[..missing.start], &piece.text[missing.end..]);
            if !piece.text[missing.clone()].trim().is_empty() && same(text) {
                return Err(lost(missing.clone()));
            }
        }
        let mut parts = parts(&piece.text);
        parts.sort_by_key(|&(_, is_tag)| is_tag);
        for (part, is_tag) in parts.into_iter().take(MAX_PARTS) {
            let text = &piece.text[part.clone()];
            let ends = [text.find(is_letter), text.rfind(is_letter)];
            let [first, last] = ends.map(|at| at.filter(|_| !is_tag).map(|at| part.start + at));
            let Some(letters) = first.zip(last) else {
                if same(format!("{}{}", &piece.text[..part.start], &piece.text[part.end..])) {
                    return Err(lost(part));
                }
                continue;
            };
            if same(with_letter(&piece.text, letters.0, PROBE)) || same(with_letter(&piece.text, letters.1, PROBE)) {
                return Err(lost(part));
            }
        }
        Ok(())
    }

    /// Checks that what contains a text is not left out as a whole. Returns its name.
    fn without_whole(&self, piece: &Piece, steps: &[&str]) -> Result<String, String> {
        let number = |text: &str| text.parse::<usize>().unwrap_or(0);
        let remove_from = |key: &'static str, at: usize| {
            move |owner: &mut Value| drop(owner[key].as_array_mut().map(|list| list.remove(at)))
        };
        let (name, is_lost) = match (piece.message, steps) {
            (Some(message), ["content"]) => {
                let [before, after] = [&self.chat.values[..message], &self.chat.values[message + 1..]];
                if self.same(&[before, after].concat(), self.chat.tool_values) {
                    return Err(format!("the message, which has the role {}", self.chat.messages[message]["role"]));
                }
                ("`content`".into(), false)
            }
            (Some(_), ["content", part, ..]) => {
                let name = format!("part {} of `content`", number(part) + 1);
                (name, self.same_after(piece.message, &remove_from("content", number(part))))
            }
            (Some(message), ["tool_calls", call, ..]) => {
                let calls = self.chat.messages[message]["tool_calls"].as_array().map_or(0, Vec::len);
                let remove =
                    |owner: &mut Value| drop(owner.as_object_mut().map(|message| message.remove("tool_calls")));
                match calls > 1 {
                    true if self.same_after(piece.message, &remove) => ("`tool_calls`".into(), true),
                    true => {
                        let is_lost = self.same_after(piece.message, &remove_from("tool_calls", number(call)));
                        (format!("call {} of `tool_calls`", number(call) + 1), is_lost)
                    }
                    false => ("`tool_calls`".into(), self.same_after(piece.message, &remove)),
                }
            }
            (Some(_), [key, ..]) => {
                let remove = |owner: &mut Value| drop(owner.as_object_mut().map(|message| message.remove(*key)));
                (format!("`{key}`"), self.same_after(piece.message, &remove))
            }
            (None, [tool, ..]) => {
                let at = number(tool);
                let is_one = self.chat.tools.as_array().is_some_and(|tools| tools.len() == 1);
                let remove = |tools: &mut Value| drop(tools.as_array_mut().map(|tools| tools.remove(at)));
                // The check of all tools has an error of its own.
                (format!("tool {} of `tools`", at + 1), !is_one && self.same_after(None, &remove))
            }
            (_, []) => ("a text".into(), false),
        };
        if is_lost { Err(name) } else { Ok(name) }
    }
}
