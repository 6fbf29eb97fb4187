//! `--tokenizer tokenizer.json`: the tokens that the file says, whole texts, and text again.

use crate::support::tokenizer_json::{TOKENS, byte_level};
use crate::train::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::fs;

/// A tokenizer by its file's text, or why there is none.
fn opened(text: impl AsRef<[u8]>) -> Result<Tokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, text).unwrap();
    Tokenizer::open(path.to_str().unwrap()).map_err(|error| error.to_string())
}

#[track_caller]
fn refused(text: impl AsRef<[u8]>, expected: &str) {
    let error = opened(text).err().expect(expected);
    assert!(error.contains("tokenizer.json: ") && error.contains(expected), "expected `{expected}` in: {error}");
}

/// The file with another value at a place, as `/model/dropout`.
fn with(place: &str, value: Value) -> String {
    let mut file = byte_level();
    *file.pointer_mut(place).unwrap() = value;
    file.to_string()
}

#[test]
fn words_become_tokens() {
    let words = opened(
        json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": { "type": "Whitespace" },
            "post_processor": null, "decoder": null, "truncation": null, "padding": null,
            "model": { "type": "WordLevel", "vocab": { "let": 0, "mut": 1, "[UNK]": 2, "</s>": 3 }, "unk_token": "[UNK]" },
        })
        .to_string(),
    )
    .unwrap();
    assert_eq!(words.encode("", b"let mut x").unwrap(), [0, 1, 2]);
    assert_eq!((words.vocabulary(), words.end()), (4, Some(3)));
    assert_eq!(words.decode(&[0, 1]), "let mut");
}

/// By hand: `l e` and `le t` make `let`, whose pair with the space before it is none.
#[test]
fn byte_pairs_merge_in_order() {
    let pairs = opened(byte_level().to_string()).unwrap();
    assert_eq!((pairs.vocabulary(), pairs.end()), (TOKENS, Some(261)));
    assert_eq!(pairs.encode("", b"let mut let").unwrap(), [257, 260, 32, 257]);
    assert_eq!(pairs.encode("", b"lut").unwrap(), [u32::from(b'l'), 258]);
    assert!(pairs.encode("", b"").unwrap().is_empty());
    let special = pairs.encode("", b"let<|endoftext|>mut<|pad|>").unwrap();
    assert_eq!(special, [257, 261, u32::from(b'm'), 258, 262], "a special token in a text must become one token");
    assert_eq!(pairs.decode(&special), "let<|endoftext|>mut<|pad|>");
}

#[test]
fn texts_survive_a_round_trip() {
    let pairs = opened(byte_level().to_string()).unwrap();
    for text in ["let mut x = 1;\r\n\tlet y;", "  \u{a0} ", "Grüße, 世界 🦀!", "\0\u{7f}\u{10ffff}", "e\u{301}"] {
        let tokens = pairs.encode("", text.as_bytes()).unwrap();
        assert!(tokens.iter().all(|&token| (token as usize) < TOKENS), "{text:?}: {tokens:?}");
        assert_eq!(pairs.decode(&tokens), text);
        // What a model may write: a text that is cut within a character.
        for cut in 0..=tokens.len() {
            assert!(
                pairs.decode(&tokens[..cut]).starts_with(text.get(..1).unwrap_or("")) || cut == 0,
                "{text:?} {cut}"
            );
        }
    }
    let crab = pairs.encode("", "🦀".as_bytes()).unwrap();
    assert_eq!(crab, "🦀".bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!(pairs.decode(&crab[..3]), "\u{fffd}");
    // Rows of the vocabulary that no text has, up to which it is rounded.
    assert_eq!(pairs.decode(&[257, TOKENS as u32, 383, u32::MAX, 260]), "let mut");
    assert_eq!(pairs.decode(&[]), "");
}

/// Files from the hub often cut and pad what a model for sentences is given; a text to train on has
/// all of its tokens and no others.
#[test]
fn texts_are_neither_cut_nor_padded() {
    let mut file = byte_level();
    file["truncation"] = json!({ "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0 });
    file["padding"] = json!({
        "strategy": { "Fixed": 8 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 262, "pad_type_id": 0, "pad_token": "<|pad|>",
    });
    let pairs = opened(file.to_string()).unwrap();
    assert_eq!(pairs.encode("", b"let let let").unwrap(), [257, 32, 257, 32, 257]);
    assert_eq!(pairs.encode("", b"let").unwrap(), [257]);
}

/// A file whose tokens get other numbers than it states is refused.
#[test]
fn inconsistent_tokenizer_files_are_refused() {
    // Tokens would be others at each start.
    refused(with("/model/dropout", 0.1.into()), "`dropout`: expected none, got 0.1");
    opened(with("/model/dropout", 0.into())).unwrap();
    // The library gives special tokens the next free numbers, whatever the file says.
    refused(with("/added_tokens/1/id", 700.into()), "`<|pad|>`: the file gives it the number 700, but it loads as 262");
    refused(
        with("/added_tokens/0/id", 5.into()),
        "`<|endoftext|>`: the file gives it the number 5, but it loads as 261",
    );
}

#[test]
fn a_damaged_file_is_refused() {
    let whole = byte_level().to_string();
    for length in [0, 1, whole.len() / 4, whole.len() / 2, whole.len() - 1] {
        refused(&whole.as_bytes()[..length], "is not a tokenizer.json: ");
    }
    refused([0xff, 0xfe, 0, 0], "is not a tokenizer.json: ");
    refused("[]", "is not a tokenizer.json: ");
    refused(with("/version", "2.0".into()), "is not a tokenizer.json: ");
    refused(with("/model/type", "Pairs".into()), "is not a tokenizer.json: ");
    refused(with("/model/vocab/let", "x".into()), "is not a tokenizer.json: ");
    refused(with("/model/vocab/let", (-1).into()), "is not a tokenizer.json: ");
    refused(with("/model/vocab/let", (1_u64 << 32).into()), "is not a tokenizer.json: ");
    // A pair of what is no token.
    refused(with("/model/merges/0/0", "lx".into()), "is not a tokenizer.json: ");
    refused(with("/model/merges/0", json!(["l"])), "is not a tokenizer.json: ");
    refused(with("/pre_tokenizer/type", "Bytes".into()), "is not a tokenizer.json: ");
}

/// Gemma 3's tokenizer has a token beyond the model's table, and most tables have more rows.
#[test]
fn tokens_beyond_the_table_are_refused() {
    for rows in [TOKENS, TOKENS + 1, TOKENS.next_multiple_of(128)] {
        let all = opened(byte_level().to_string()).unwrap();
        all.check_vocabulary(rows).unwrap();
        assert_eq!(all.encode("", b"let<|pad|>").unwrap(), [257, 262]);
    }
    let pairs = opened(byte_level().to_string()).unwrap();
    pairs.check_vocabulary(262).unwrap();
    assert_eq!((pairs.rows(), pairs.end()), (262, Some(261)));
    assert_eq!(pairs.encode("", b"let mut").unwrap(), [257, 260]);
    for error in [pairs.encode("--chat", b"let<|pad|>"), pairs.encode_beginning("--chat", "<|pad|>")] {
        let error = error.unwrap_err().to_string();
        let words = "--chat: contains the token 262, `<|pad|>`, but the model's table has 262 rows";
        assert!(error.starts_with(words), "{error}");
    }
    assert!(pairs.check_tokens(&[261]).is_ok() && pairs.check_tokens(&[0, 300]).is_err());
    let small = opened(byte_level().to_string()).unwrap();
    small.check_vocabulary(261).unwrap();
    assert_eq!(small.end(), None, "an end beyond the table");
    Tokenizer::Bytes.check_vocabulary(300).unwrap_err();
    opened(byte_level().to_string()).unwrap().check_vocabulary(2 * TOKENS).unwrap_err();
}

#[test]
fn other_files_of_tokenizers_are_named() {
    let advice = "write a tokenizer.json with `AutoTokenizer";
    for (text, words) in [
        (&br#"{"a": 0, "b": 1}"#[..], "it is a vocabulary, such as vocab.json"),
        (br#"{"tokenizer_class": "GPT2Tokenizer"}"#, "it has a tokenizer's settings"),
        (br#"{"model_type": "llama"}"#, "it has a model's settings, as config.json"),
        (b"#version: 0.2\na b\n", "it has merges without a vocabulary"),
        (b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02\n\n\n\x03<s>\x15\0\0\0\0\x18\x03", "it is a model of SentencePiece"),
    ] {
        refused(text, words);
        refused(text, advice);
    }
    let folder = tempfile::tempdir().unwrap();
    let open = |name: &str| Tokenizer::open(name).err().unwrap().to_string();
    let of_folder = open(folder.path().to_str().unwrap());
    assert!(of_folder.contains("is a folder: give the file, ") && of_folder.ends_with("tokenizer.json"), "{of_folder}");
    let of_hub = open("Qwen/Qwen3-0.6B");
    assert!(of_hub.contains("`hf download Qwen/Qwen3-0.6B tokenizer.json`"), "{of_hub}");
    assert!(open("llama").contains("is no file: give `bytes`, `gpt2`, or the path"));
}
