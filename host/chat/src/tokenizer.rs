//! Tokenizers of `tokenizer.json` files, which are bounded as templates are.
//!
//! A file describes steps, each of which may lengthen a text: its normalizers, its pre-tokenizers,
//! its post-processor and its decoders. The `tokenizers` package follows them without a limit, and
//! panics on some files.
//!
//! Invariant: no file makes a text more than [`MAX_GROWTH`] times as long, and a panic of the
//! package is an error.

use serde::Serialize;
use serde_json::Value;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;
use tokenizers::Tokenizer;

/// The most bytes that one byte of a text may become. The longest chain of steps that published
/// tokenizers have, ALBERT's, could make 6,336 of it.
const MAX_GROWTH: u64 = 10_000;
/// The most tokens that a post-processor adds to a text.
const MAX_ADDED: u64 = 1024;
/// The longest word that WordPiece searches for pieces, in quadratic time. Published files have 100
/// or 200.
const MAX_WORD: u64 = 10_000;
/// The most bytes that one byte becomes in Unicode's forms NFC and NFD, and in NFKC and NFKD.
const CANONICAL: u64 = 4;
const COMPATIBLE: u64 = 12;

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Reads a `tokenizer.json`.
///
/// # Errors
/// Returns the fault of a file that is no tokenizer, or exceeds a limit.
pub fn read_tokenizer(bytes: &[u8]) -> Result<Tokenizer, String> {
    let settings: Value = serde_json::from_slice(bytes).map_err(|reason| reason.to_string())?;
    check_before(&settings)?;
    let tokenizer = caught(|| Tokenizer::from_bytes(bytes).map_err(|reason| in_words(&reason.to_string())))?;
    let growth = growth_of(&tokenizer.get_normalizer())?.saturating_mul(growth_of(&tokenizer.get_pre_tokenizer())?);
    for (steps, growth) in [
        ("the normalizer and the pre-tokenizer", growth),
        ("the post-processor", growth_of(&tokenizer.get_post_processor())?),
        ("the decoder", growth_of(&tokenizer.get_decoder())?),
    ] {
        if growth > MAX_GROWTH {
            return Err(format!(
                "{steps} could make a text {growth} times as long, but may make it at most {MAX_GROWTH} times as long: remove steps"
            ));
        }
    }
    Ok(tokenizer)
}

/// Encodes a text. If `special` is set, adds the special tokens that the tokenizer puts around it.
///
/// # Errors
/// Returns the reason why the text has no tokens.
pub fn token_ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Result<Vec<u32>, String> {
    let encoding = || tokenizer.encode_fast(text, special).map_err(|reason| in_words(&reason.to_string()));
    Ok(caught(encoding)?.get_ids().to_vec())
}

/// Returns the text of tokens.
///
/// # Errors
/// Returns the reason why the tokens have no text.
pub fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> Result<String, String> {
    caught(|| tokenizer.decode(ids, false).map_err(|reason| in_words(&reason.to_string())))
}

/// Runs a function of the package, and turns a panic into an error. The panic writes no message.
pub(crate) fn caught<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_QUIET.get() {
                others(panic);
            }
        }));
    });
    let before = IS_QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    IS_QUIET.set(before);
    result.unwrap_or_else(|_| {
        Err("a normalizer, a pre-tokenizer, the model or a decoder of the tokenizer is damaged: save it again, for example with \
             `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`"
            .into())
    })
}

/// Returns an error of the package without names of its source.
fn in_words(reason: &str) -> String {
    let names = [
        ("ModelUntagged", "model"),
        ("NormalizerUntagged", "normalizer"),
        ("PreTokenizerUntagged", "pre_tokenizer"),
        ("PostProcessorWrapper", "post_processor"),
        ("DecoderUntagged", "decoder"),
    ];
    match names.iter().find(|(name, _)| reason.contains(name)) {
        Some((_, key)) => format!("`{key}` has a form that is not known"),
        None => reason.replace("untagged enum ", ""),
    }
}

/// Checks what the package does not bear while it reads a file.
fn check_before(settings: &Value) -> Result<(), String> {
    match settings {
        Value::Array(items) => items.iter().try_for_each(check_before),
        Value::Object(items) => {
            if let Some(map) = items.get("precompiled_charsmap") {
                let bytes = charsmap(map).ok_or("`precompiled_charsmap`: expected base64")?;
                let trie = bytes.first_chunk().map(|length| u32::from_le_bytes(*length) as usize);
                if trie.is_none_or(|trie| trie == 0 || trie % 4 != 0 || trie > bytes.len() - 4) {
                    return Err(format!("`precompiled_charsmap`: is damaged, or cut: it has {} bytes", bytes.len()));
                }
            }
            let longest = items.get("max_input_chars_per_word").and_then(Value::as_u64);
            if let Some(longest) = longest.filter(|&longest| longest > MAX_WORD) {
                return Err(format!("`max_input_chars_per_word`: is {longest}, but may be at most {MAX_WORD}"));
            }
            if items.get("type").is_some_and(|kind| kind == "FixedLength") && items.get("length") == Some(&0.into()) {
                return Err("`pre_tokenizer`, `length`: expected at least 1, got 0".into());
            }
            items.iter().filter(|(key, _)| *key != "vocab").try_for_each(|(_, item)| check_before(item))
        }
        _ => Ok(()),
    }
}

/// Decodes base64.
fn charsmap(map: &Value) -> Option<Vec<u8>> {
    let text = map.as_str()?.trim_end_matches('=');
    let (mut bytes, mut bits, mut count) = (Vec::with_capacity(text.len()), 0u32, 0);
    for letter in text.bytes() {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        (bits, count) = (bits << 6 | u32::from(value), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

/// Returns the bytes that one byte may become in a step and the steps within it.
fn growth_of(step: &Option<impl Serialize>) -> Result<u64, String> {
    Ok(growth(&serde_json::to_value(step).map_err(|reason| reason.to_string())?))
}

fn growth(step: &Value) -> u64 {
    let length = |key: &str| step[key].as_str().map_or(0, str::len) as u64;
    let steps =
        ["normalizers", "pretokenizers", "processors", "decoders"].into_iter().find_map(|key| step[key].as_array());
    match step["type"].as_str().unwrap_or_default() {
        "Sequence" => {
            let factors = steps.into_iter().flatten().map(growth);
            factors.fold(1, u64::saturating_mul)
        }
        "Replace" => match step["pattern"]["String"].as_str() {
            // A regular expression may match nothing, or one byte.
            None | Some("") => 1 + length("content"),
            Some(text) => length("content").div_ceil(text.len() as u64).max(1),
        },
        "Prepend" => 1 + length("prepend"),
        "Precompiled" => {
            let bytes = charsmap(&step["precompiled_charsmap"]).unwrap_or_default();
            let texts = bytes.first_chunk().and_then(|length| bytes.get(4 + u32::from_le_bytes(*length) as usize..));
            texts.unwrap_or_default().split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(1).max(1) as u64
        }
        "NFC" | "NFD" => CANONICAL,
        "NFKC" | "NFKD" => COMPATIBLE,
        "BertNormalizer" => 4 * CANONICAL,
        "Lowercase" | "ByteLevel" | "BPEDecoder" | "WordPiece" | "CTC" => 2,
        "Metaspace" => 1 + length("replacement"),
        "TemplateProcessing" => {
            let pieces = || step["single"].as_array().into_iter().flatten();
            let added = |piece: &Value| {
                let ids = &step["special_tokens"][piece["SpecialToken"]["id"].as_str().unwrap_or_default()]["ids"];
                ids.as_array().map_or(0, Vec::len) as u64
            };
            let copies = pieces().filter(|piece| piece.get("Sequence").is_some()).count() as u64;
            let is_long = pieces().map(added).fold(0, u64::saturating_add) > MAX_ADDED;
            if is_long { u64::MAX } else { copies.max(1) }
        }
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file(changes: Value) -> Vec<u8> {
        let mut file = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": null, "truncation": null, "padding": null,
            "model": {"type": "BPE", "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": false, "vocab": {"a": 0, "b": 1, "ab": 2, "é": 3, "éb": 4}, "merges": ["a b"]},
        });
        for (key, value) in changes.as_object().unwrap() {
            *file.pointer_mut(&format!("/{key}")).unwrap() = value.clone();
        }
        file.to_string().into_bytes()
    }

    fn all(file: &[u8]) -> Result<(), String> {
        let tokenizer = read_tokenizer(file)?;
        decode(&tokenizer, &token_ids(&tokenizer, "aaab! ab", true)?).map(drop)
    }

    /// No file takes much memory, or ends the program.
    #[test]
    fn harmful_files_are_refused() {
        let many = |kind: &str, step: Value| json!({"type": "Sequence", kind: vec![step; 40]});
        let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        let regex = json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "a"});
        let nested = (0..40)
            .fold(double.clone(), |step, _| json!({"type": "Sequence", "normalizers": [step.clone(), double.clone()]}));
        let twice = json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}});
        let map = |text: &str| json!({"type": "Precompiled", "precompiled_charsmap": text});
        let words = json!({"type": "WordPiece", "unk_token": "b", "continuing_subword_prefix": "##", "max_input_chars_per_word": 1u64 << 40, "vocab": {"a": 0, "b": 1}});
        for (changes, words) in [
            (
                json!({"normalizer": many("normalizers", double.clone())}),
                "could make a text 1099511627776 times as long",
            ),
            (json!({"normalizer": nested}), "times as long"),
            (json!({"normalizer": many("normalizers", regex)}), "times as long"),
            (json!({"normalizer": many("normalizers", json!({"type": "Prepend", "prepend": "a"}))}), "times as long"),
            (json!({"normalizer": many("normalizers", json!({"type": "ByteLevel"}))}), "times as long"),
            (
                json!({"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(20_000)}}),
                "20000 times as long",
            ),
            (
                json!({"pre_tokenizer": many("pretokenizers", json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false}))}),
                "times as long",
            ),
            (json!({"post_processor": many("processors", twice)}), "the post-processor could make"),
            (json!({"decoder": many("decoders", double)}), "the decoder could make"),
            (json!({"normalizer": map("AAAA")}), "`precompiled_charsmap`: is damaged"),
            (json!({"normalizer": map("////////////////////")}), "`precompiled_charsmap`: is damaged"),
            (json!({"normalizer": map("")}), "`precompiled_charsmap`: is damaged"),
            (json!({"normalizer": map("ä")}), "expected base64"),
            // Places beyond the trie.
            (json!({"normalizer": map("BAAAAAD///8=")}), "is damaged"),
            (json!({"pre_tokenizer": {"type": "FixedLength", "length": 0}}), "`length`: expected at least 1"),
            (json!({"model": words}), "`max_input_chars_per_word`: is 1099511627776"),
            (json!({"model/continuing_subword_prefix": "é"}), ""),
            (json!({"model/continuing_subword_prefix": "longer than a token"}), ""),
            (json!({"model/type": "Pairs"}), "`model` has a form that is not known"),
            (json!({"normalizer": {"type": "Nothing"}}), ""),
        ] {
            let text = changes.to_string();
            let shown: String = text.chars().take(200).collect();
            let error = all(&file(changes)).expect_err(&shown);
            assert!(
                error.contains(words) && !error.contains("untagged") && !error.contains("variant of"),
                "{shown}: {error}"
            );
        }
    }

    #[test]
    fn useful_files_are_read() {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        for changes in [
            json!({}),
            json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}}),
            json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]},
                "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}}),
            json!({"pre_tokenizer": {"type": "FixedLength", "length": 3}}),
        ] {
            all(&file(changes.clone())).unwrap_or_else(|error| panic!("{changes}: {error}"));
        }
    }
}
