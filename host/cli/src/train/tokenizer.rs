//! Tokenizers: bytes, GPT-2's byte pairs, or a `tokenizer.json`.
//!
//! Invariant: the same text always gives the same tokens, and they encode all of the text.

use serde_json::Value;
use sha2::{Digest, Sha256};
use stepscope::files::{FileKind, PlainFile};
use stepscope_core::digest::hex;
use tiktoken_rs::CoreBPE;
use tokenizers::ModelWrapper;

use crate::train::bad_input::{Outcome, bad};

/// A mapping from text to tokens and back.
pub(crate) enum Tokenizer {
    /// Each byte is a token; zero ends a document.
    Bytes,
    /// GPT-2's byte pairs.
    Gpt2(Box<CoreBPE>),
    /// A file's tokenizer, and the digest of the file.
    File(Box<tokenizers::Tokenizer>, String),
}

/// Vocabulary sizes are rounded up to a multiple of this, because matrices of such sizes are
/// faster. No text contains the added tokens.
pub(crate) const VOCABULARY_UNIT: usize = 128;
/// Published models have at most this share of tokens that no text contains, one in 64.
const UNUSED_TOKENS: usize = 64;
/// The largest `tokenizer.json`. Files for vocabularies of 256,000 tokens have about 35 MB.
const MAX_BYTES: u64 = 256 << 20;
/// The token that ends a document in GPT-2's vocabulary, its last one.
const GPT2_END: u32 = 50_256;
/// Names of that token in `tokenizer.json` files.
const ENDS: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"];

/// Returns an error for a tokenizer that is random, or whose token numbers differ from its file's.
fn check(tokenizer: &tokenizers::Tokenizer, told: &Value) -> Result<(), String> {
    if let ModelWrapper::BPE(pairs) = tokenizer.get_model()
        && let Some(dropout) = pairs.dropout.filter(|&dropout| dropout > 0.0)
    {
        return Err(format!(
            "`dropout`: expected none, got {dropout}: the same text would give different tokens each time"
        ));
    }
    // The `tokenizers` package renumbers added tokens so that they follow all others.
    for added in told["added_tokens"].as_array().into_iter().flatten() {
        let (content, id) = (added["content"].as_str().unwrap_or_default(), added["id"].as_u64());
        let got = tokenizer.token_to_id(content);
        if got.map(u64::from) != id {
            let [id, got] = [id, got.map(u64::from)].map(|id| id.map_or("none".into(), |id| id.to_string()));
            return Err(format!(
                "`{content}`: the file gives it the number {id}, but it loads as {got}: number added tokens after all others"
            ));
        }
    }
    Ok(())
}

impl Tokenizer {
    /// Opens a tokenizer by name: `bytes`, `gpt2`, or a file.
    pub(crate) fn open(name: &str) -> Outcome<Self> {
        match name {
            "bytes" => Ok(Self::Bytes),
            "gpt2" => Ok(Self::Gpt2(Box::new(tiktoken_rs::r50k_base().map_err(|reason| bad("gpt2", reason))?))),
            file => {
                let bytes = PlainFile::read_whole(file, MAX_BYTES).map_err(|reason| bad(file, reason))?;
                let no_file = |reason: &dyn std::fmt::Display| match FileKind::of(&bytes) {
                    Some(kind) if kind != FileKind::Json => {
                        bad(file, format!("is not a tokenizer.json: {}", kind.refusal("JSON")))
                    }
                    _ => bad(file, format!("is not a tokenizer.json: {reason}")),
                };
                let mut tokenizer = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|reason| no_file(&reason))?;
                let told: Value = serde_json::from_slice(&bytes).map_err(|reason| no_file(&reason))?;
                check(&tokenizer, &told).map_err(|reason| bad(file, reason))?;
                // Some files ask for these, because they treat each text as one sentence.
                tokenizer.with_padding(None).with_truncation(None).map_err(|reason| bad(file, reason))?;
                Ok(Self::File(Box::new(tokenizer), hex(&Sha256::digest(&bytes))))
            }
        }
    }

    /// Returns a name that identifies the tokenizer.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Bytes => "bytes".into(),
            Self::Gpt2(_) => "gpt2".into(),
            Self::File(_, sha256) => format!("tokenizer {sha256}"),
        }
    }

    /// Returns the number of a token.
    pub(crate) fn token(&self, content: &str) -> Option<u32> {
        match self {
            Self::File(tokenizer, _) => tokenizer.token_to_id(content),
            _ => None,
        }
    }

    /// Returns an error unless weights of this vocabulary are the tokenizer's, whose vocabulary may
    /// be rounded up.
    pub(crate) fn check_vocabulary(&self, has: usize) -> Outcome<()> {
        let needs = self.vocabulary();
        let most = needs.next_multiple_of(VOCABULARY_UNIT).max(needs + needs / UNUSED_TOKENS);
        if (needs..=most).contains(&has) {
            return Ok(());
        }
        let reason = format!(
            "the weights have a vocabulary of {has}, but {} has {needs}: give the tokenizer that the weights were trained with",
            self.name()
        );
        Err(bad("--tokenizer", reason))
    }

    /// Returns the number of tokens.
    pub(crate) fn vocabulary(&self) -> usize {
        match self {
            Self::Bytes => 256,
            Self::Gpt2(_) => GPT2_END as usize + 1,
            Self::File(tokenizer, _) => {
                tokenizer.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1)
            }
        }
    }

    /// Returns the token that ends a document, if there is one.
    pub(crate) fn end(&self) -> Option<u32> {
        match self {
            Self::Bytes => Some(0),
            Self::Gpt2(_) => Some(GPT2_END),
            Self::File(tokenizer, _) => ENDS.iter().find_map(|end| tokenizer.token_to_id(end)),
        }
    }

    /// Returns the tokens of a text that a model continues, with the special tokens that the
    /// tokenizer puts before a text, such as a BOS.
    pub(crate) fn encode_beginning(&self, place: &str, text: &str) -> Outcome<Vec<u32>> {
        match self {
            Self::File(tokenizer, _) => {
                // What the tokenizer puts after a text would end it.
                let encoding = tokenizer.encode_fast(text, true).map_err(|reason| bad(place, reason))?;
                let with = encoding.get_ids();
                let own = self.encode(place, text.as_bytes())?;
                let start = with.windows(own.len().max(1)).position(|window| window == own).unwrap_or(0);
                Ok([&with[..start], &own].concat())
            }
            _ => self.encode(place, text.as_bytes()),
        }
    }

    /// Returns the tokens of a document; `place` names it in an error.
    pub(crate) fn encode(&self, place: &str, text: &[u8]) -> Outcome<Vec<u32>> {
        let utf8 = || {
            str::from_utf8(text).map_err(|reason| {
                bad(place, format!("is not valid UTF-8 ({reason}): convert it to UTF-8, or use --tokenizer bytes"))
            })
        };
        match self {
            Self::Bytes => Ok(text.iter().map(|&byte| byte.into()).collect()),
            // `<|endoftext|>` in a text is the token that ends a document.
            Self::Gpt2(pairs) => Ok(pairs.encode_with_special_tokens(utf8()?)),
            Self::File(tokenizer, _) => {
                let encoding = tokenizer.encode_fast(utf8()?, false).map_err(|reason| bad(place, reason))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Returns the text of tokens; invalid UTF-8 becomes `�`.
    pub(crate) fn decode(&self, tokens: &[u32]) -> String {
        // A model with a rounded-up vocabulary may generate tokens that no text contains. A file's
        // tokenizer leaves them out itself, and counting its vocabulary would take milliseconds.
        let known = |most: usize| tokens.iter().copied().filter(move |&token| (token as usize) < most);
        let bytes: Vec<u8> = match self {
            Self::Bytes => known(256).map(|token| token as u8).collect(),
            Self::Gpt2(pairs) => {
                pairs._decode_native_and_split(known(GPT2_END as usize + 1).collect()).flatten().collect()
            }
            Self::File(tokenizer, _) => tokenizer.decode(tokens, false).unwrap_or_default().into(),
        };
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
