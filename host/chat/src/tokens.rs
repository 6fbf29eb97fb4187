//! The tokens of a text, each with its place in the text.
//!
//! The offsets of `tokenizers` are not used as they are. Post-processors trim white space from them
//! (`trim_offsets`), so that tokens of spaces seem empty. Offsets are therefore taken before
//! post-processing. Tokens that share a character, such as the bytes of an emoji, share its place.
//!
//! Invariant: only tokens that the tokenizer adds around a text have no place.

use crate::tokenizer::caught;
use std::ops::Range;
use tokenizers::{OffsetType, PostProcessor, PreTokenizer, Tokenizer};

/// A text's token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) id: u32,
    /// Its bytes in the text, or none if the tokenizer has added it.
    pub(crate) place: Option<Range<usize>>,
}

/// Encodes a text. With `adds`, it begins and ends with the tokens that the tokenizer adds around a
/// text, such as a BOS, unless the text itself has them there.
pub(crate) fn tokens(tokenizer: &Tokenizer, text: &str, adds: bool) -> Result<Vec<Token>, String> {
    caught(|| all_tokens(tokenizer, text, adds))
}

fn all_tokens(tokenizer: &Tokenizer, text: &str, adds: bool) -> Result<Vec<Token>, String> {
    let failed = |reason: tokenizers::Error| reason.to_string();
    let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
    if let Some(splits) = tokenizer.get_pre_tokenizer() {
        splits.pre_tokenize(&mut pieces).map_err(failed)?;
    }
    let model = tokenizer.get_model();
    pieces.tokenize(|piece| tokenizers::Model::tokenize(model, piece.get())).map_err(failed)?;
    let encoding = pieces.into_encoding(None, 0, OffsetType::Byte).map_err(failed)?;
    let own = places(tokenizer, text, encoding.get_ids(), encoding.get_offsets());
    let processed = match tokenizer.get_post_processor() {
        Some(processor) => processor.process(encoding, None, adds).map_err(failed)?,
        None => encoding,
    };
    let mut own = own.into_iter();
    let added = processed.get_ids().iter().zip(processed.get_special_tokens_mask());
    let all = added.map(|(&id, &is_added)| {
        let place = if is_added == 0 { own.next().map(Some) } else { Some(None) };
        place.map(|place| Token { id, place })
    });
    let all: Option<Vec<Token>> = all.collect();
    let all = all.filter(|_| own.next().is_none());
    all.map(once)
        .ok_or_else(|| "the tokenizer's post-processor leaves out tokens: use one that only adds tokens".into())
}

/// Returns the places of a text's own tokens.
fn places(tokenizer: &Tokenizer, text: &str, ids: &[u32], offsets: &[(usize, usize)]) -> Vec<Range<usize>> {
    let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
    let place = |(id, &(start, end)): (&u32, &(usize, usize))| {
        // An added token may take white space next to it, which is not its own.
        let content = added.get(id).filter(|token| token.lstrip || token.rstrip).map(|token| &token.content);
        let own = content.and_then(|content| Some((text.get(start..end)?.find(content.as_str())?, content.len())));
        own.map_or(start..end, |(before, length)| start + before..start + before + length)
    };
    let mut places: Vec<Range<usize>> = ids.iter().zip(offsets).map(place).collect();
    // A token without text, such as the space that some tokenizers put first, belongs to the next.
    for at in (0..places.len().saturating_sub(1)).rev() {
        if places[at].is_empty() {
            places[at] = places[at + 1].clone();
        }
    }
    places
}

/// Removes added tokens that the text itself begins or ends with.
fn once(mut tokens: Vec<Token>) -> Vec<Token> {
    let is_added = |token: &&Token| token.place.is_none();
    let same = |one: &[Token], other: &[Token]| one.iter().map(|token| token.id).eq(other.iter().map(|token| token.id));
    let before = tokens.iter().take_while(is_added).count();
    if before < tokens.len() && tokens.get(before..2 * before).is_some_and(|own| same(&tokens[..before], own)) {
        tokens.drain(..before);
    }
    let after = tokens.iter().rev().take_while(is_added).count();
    let end = tokens.len() - after;
    if after <= end && after < tokens.len() && same(&tokens[end - after..end], &tokens[end..]) {
        tokens.truncate(end);
    }
    tokens
}
