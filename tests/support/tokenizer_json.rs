//! A `tokenizer.json` like those of GPT-2 and Llama 3: byte pairs, followed by special tokens.

use serde_json::{Value, json};

/// The merged pairs, in order: the tokens 256 and so on.
const MERGES: [[&str; 2]; 5] = [["l", "e"], ["le", "t"], ["u", "t"], ["\u{120}", "m"], ["\u{120}m", "ut"]];
/// The tokens after all pairs.
pub(crate) const SPECIAL: [&str; 2] = ["<|endoftext|>", "<|pad|>"];
/// The number of tokens.
pub(crate) const TOKENS: usize = 256 + MERGES.len() + SPECIAL.len();

/// Returns the character for a byte, by GPT-2's `bytes_to_unicode`: printable ones stand for
/// themselves, and all others come after 255.
pub(crate) fn character(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..byte).filter(|&byte| !printable(byte)).count() as u32;
    if printable(byte) { byte.into() } else { char::from_u32(256 + others).expect("a character of Latin Extended") }
}

/// Returns the tokenizer; a byte's token is its number.
pub(crate) fn byte_level() -> Value {
    let bytes = (0..=255).map(|byte| (character(byte).to_string(), Value::from(byte)));
    let merged = MERGES.iter().zip(256..).map(|(pair, id)| (pair.concat(), Value::from(id)));
    let special = SPECIAL.iter().zip(256 + MERGES.len()..).map(|(content, id)| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        })
    });
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": special.collect::<Vec<_>>(), "normalizer": null,
        "pre_tokenizer": level, "post_processor": level, "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": false, "vocab": bytes.chain(merged).collect::<serde_json::Map<_, _>>(), "merges": MERGES,
        },
    })
}
