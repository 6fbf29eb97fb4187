//! The text of tokens as they arrive.
//!
//! Invariant: the pieces together are a beginning of the text of all tokens. No piece ends within a
//! character, or contains any part of a text that ends the stream.

use crate::train::tokenizer::Tokenizer;

/// The text of a stream of tokens, which ends before any of the `stops`.
pub(crate) struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    stops: &'t [String],
    tokens: Vec<u32>,
    /// The tokens from `start` to `shown` have been returned. A token's text may depend on those
    /// before it, such as a space between them.
    start: usize,
    shown: usize,
    /// Text that may be the beginning of a stop.
    held: String,
    is_ended: bool,
}

impl<'t> TextStream<'t> {
    /// Makes a stream without tokens. An empty stop has no effect.
    pub(crate) fn new(tokenizer: &'t Tokenizer, stops: &'t [String]) -> Self {
        Self { tokenizer, stops, tokens: vec![], start: 0, shown: 0, held: String::new(), is_ended: false }
    }

    /// Adds a token, and returns the text that is known by now.
    pub(crate) fn push(&mut self, token: u32) -> String {
        self.tokens.push(token);
        let before = self.tokenizer.decode(&self.tokens[self.start..self.shown]);
        let with = self.tokenizer.decode(&self.tokens[self.start..]);
        // A character may take several tokens.
        if self.is_ended || with.ends_with('\u{FFFD}') {
            return String::new();
        }
        let Some(new) = with.strip_prefix(&before) else { return String::new() };
        self.held.push_str(new);
        (self.start, self.shown) = (self.shown, self.tokens.len());
        self.release(false)
    }

    /// Returns true if a stop has ended the stream.
    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Returns the rest of the text.
    pub(crate) fn finish(&mut self) -> String {
        let before = self.tokenizer.decode(&self.tokens[self.start..self.shown]);
        let with = self.tokenizer.decode(&self.tokens[self.start..]);
        if !self.is_ended {
            self.held.push_str(with.strip_prefix(&before).unwrap_or_default());
        }
        self.release(true)
    }

    /// Takes the held text up to a stop, or to where a stop may begin.
    fn release(&mut self, all: bool) -> String {
        let stops = || self.stops.iter().filter(|stop| !stop.is_empty());
        if let Some(end) = stops().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(end);
            self.is_ended = true;
            return std::mem::take(&mut self.held);
        }
        let begins = |at: &usize| stops().any(|stop| stop.starts_with(&self.held[*at..]));
        let places = self.held.char_indices().map(|(at, _)| at);
        let end = if all { None } else { places.into_iter().find(begins) };
        let rest = self.held.split_off(end.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the pieces of a text whose tokens are bytes, and whether a stop ended it.
    fn pieces(text: &str, stops: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|&stop| stop.into()).collect();
        let mut stream = TextStream::new(&Tokenizer::Bytes, &stops);
        let mut pieces: Vec<String> = text.bytes().map(|byte| stream.push(byte.into())).collect();
        pieces.push(stream.finish());
        pieces.retain(|piece| !piece.is_empty());
        (pieces, stream.is_ended())
    }

    #[test]
    fn characters_arrive_whole() {
        assert_eq!(pieces("aé😀b", &[]), (["a", "é", "😀", "b"].map(String::from).into(), false));
        assert_eq!(pieces("", &[]), (vec![], false));
    }

    #[test]
    fn stops_are_not_shown() {
        for (text, stops, want, is_ended) in [
            ("one\nUser: two", &["\nUser:"][..], "one", true),
            ("one\nUs two", &["\nUser:"], "one\nUs two", false),
            ("one\nUser", &["\nUser:"], "one\nUser", false),
            ("aaab", &["aab", ""], "a", true),
            ("xyz", &["z", "yz"], "x", true),
            ("###", &["###"], "", true),
            ("né", &["é"], "n", true),
        ] {
            let (pieces, ended) = pieces(text, stops);
            assert_eq!((pieces.concat().as_str(), ended), (want, is_ended), "{text:?} {stops:?}");
        }
        let (pieces, _) = pieces("ab\nU c", &["\nUser:"]);
        assert_eq!(pieces, ["a", "b", "\nU ", "c"]);
    }
}
