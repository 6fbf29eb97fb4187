//! Tokenizers: bytes, GPT-2's byte pairs, a `tokenizer.json`, or byte pairs that are trained here.
//!
//! Invariant: the same text always gives the same tokens, and they encode all of the text. No token
//! lies beyond the model's table of embeddings.

use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stepscope::files::{FileKind, PlainFile};
use stepscope_chat::{decode, read_tokenizer, token_ids};
use stepscope_core::internals::hex;
use tiktoken_rs::CoreBPE;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, ModelWrapper};

use crate::train::bad_input::{Outcome, bad};

/// A mapping from text to tokens and back.
pub(crate) enum Tokenizer {
    /// Each byte is a token; zero ends a document.
    Bytes,
    /// GPT-2's byte pairs.
    Gpt2(Box<CoreBPE>),
    /// A file's tokenizer, or a trained one.
    File(Box<tokenizers::Tokenizer>, About),
}

/// Facts about a tokenizer that has a file, or can be written to one.
pub(crate) struct About {
    /// The contents of the file.
    json: Vec<u8>,
    sha256: String,
    /// True if it was trained here.
    is_trained: bool,
    /// One more than its last token.
    vocabulary: usize,
    /// The rows of the model's table, once a model is known.
    rows: OnceLock<usize>,
}

/// Vocabulary sizes are rounded up to a multiple of this, because matrices of such sizes are
/// faster. No text contains the added tokens.
pub(crate) const VOCABULARY_UNIT: usize = 128;
/// Published models have at most this share of tokens that no text contains, one in 32. DeepSeek
/// LLM has one in 42.
const UNUSED_TOKENS: usize = 32;
/// The largest `tokenizer.json`. Files for vocabularies of 256,000 tokens have about 35 MB.
const MAX_BYTES: u64 = 256 << 20;
/// The token that ends a document in GPT-2's vocabulary, its last one.
const GPT2_END: u32 = 50_256;
/// Names of that token in `tokenizer.json` files.
const ENDS: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"];

/// The chat template of a tokenizer that is trained here. The token that ends a document ends each
/// message, so that no other special token is needed.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ message['role'] }}\n{{ message['content'] }}\
                             <|endoftext|>{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}";

/// Returns an error for a tokenizer that is random, or whose token numbers differ from its file's.
fn check(tokenizer: &tokenizers::Tokenizer, json: &Value) -> Result<(), String> {
    if let ModelWrapper::BPE(pairs) = tokenizer.get_model()
        && let Some(dropout) = pairs.dropout.filter(|&dropout| dropout > 0.0)
    {
        return Err(format!(
            "`dropout`: expected none, got {dropout}: the same text would give different tokens each time"
        ));
    }
    // The `tokenizers` package renumbers added tokens so that they follow all others.
    for added in json["added_tokens"].as_array().into_iter().flatten() {
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
                let bytes = read(file)?;
                let refused =
                    |reason| bad(file, format!("is not a tokenizer.json: {}", not_a_tokenizer(&bytes, reason)));
                let mut tokenizer = read_tokenizer(&bytes).map_err(refused)?;
                let json: Value = serde_json::from_slice(&bytes).map_err(|reason| bad(file, reason))?;
                check(&tokenizer, &json).map_err(|reason| bad(file, reason))?;
                // Some files ask for these, because they treat each text as one sentence.
                tokenizer.with_padding(None).with_truncation(None).map_err(|reason| bad(file, reason))?;
                let vocabulary = tokenizer.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1);
                Ok(Self::of_file(tokenizer, bytes, vocabulary, false))
            }
        }
    }

    /// Trains byte pairs on these texts: a vocabulary of this many tokens, or fewer if the texts
    /// have no more pairs. The first token ends a document, and then come all bytes, so every text
    /// has tokens. Texts are split into words as GPT-2 splits them (Sennrich, Haddow and Birch,
    /// 2016; Radford et al., 2019).
    pub(crate) fn train(texts: &[impl AsRef<str> + Send + Sync], vocabulary: usize) -> Outcome<Self> {
        let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true))).with_decoder(Some(ByteLevel::default()));
        let trainer = BpeTrainer::builder()
            .vocab_size(vocabulary)
            .special_tokens(vec![AddedToken::from(ENDS[0], true)])
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .show_progress(false)
            .build();
        let trained = tokenizer.train(&mut TrainerWrapper::from(trainer), texts.iter());
        let json = trained.and_then(|tokenizer| tokenizer.to_string(true));
        let json = json.map_err(|reason| bad("--tokenizer bpe", reason))?.into_bytes();
        let vocabulary = tokenizer.get_vocab_size(true);
        Ok(Self::of_file(tokenizer, json, vocabulary, true))
    }

    fn of_file(tokenizer: tokenizers::Tokenizer, json: Vec<u8>, vocabulary: usize, is_trained: bool) -> Self {
        let sha256 = hex(&Sha256::digest(&json));
        Self::File(Box::new(tokenizer), About { json, sha256, is_trained, vocabulary, rows: OnceLock::new() })
    }

    /// Returns the names and contents of the tokenizer's files, if it has some or can be written to
    /// some. A tokenizer that was trained here has a chat template, so that its model can be
    /// fine-tuned on chats.
    pub(crate) fn files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let Self::File(_, about) = self else { return Vec::new() };
        let mut files = vec![("tokenizer.json", about.json.clone())];
        if about.is_trained {
            let [end, template] = [ENDS[0], CHAT_TEMPLATE];
            let config = json!({ "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end,
                "chat_template": template });
            files.push(("tokenizer_config.json", format!("{config:#}\n").into_bytes()));
        }
        files
    }

    /// Returns a name that identifies the tokenizer.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Bytes => "bytes".into(),
            Self::Gpt2(_) => "gpt2".into(),
            Self::File(_, about) => format!("tokenizer {}", about.sha256),
        }
    }

    /// Returns the number of a token.
    pub(crate) fn token(&self, content: &str) -> Option<u32> {
        match self {
            Self::File(tokenizer, _) => tokenizer.token_to_id(content),
            _ => None,
        }
    }

    /// Checks that weights with this vocabulary can be the tokenizer's. Their table may have some
    /// more rows. A file may also have tokens beyond the table, as Gemma 3's does: from now on,
    /// texts with such a token are refused.
    pub(crate) fn check_vocabulary(&self, has: usize) -> Outcome<()> {
        let needs = self.vocabulary();
        let rounded = needs.next_multiple_of(VOCABULARY_UNIT);
        let is_useful = match self {
            Self::File(_, about) => {
                has <= rounded.max(needs + needs / UNUSED_TOKENS) && *about.rows.get_or_init(|| has) == has
            }
            _ => (needs..=rounded).contains(&has),
        };
        if is_useful {
            return Ok(());
        }
        let reason = format!(
            "the weights have a vocabulary of {has}, but {} has {needs}: give the tokenizer that the weights were trained with",
            self.name()
        );
        Err(bad("--tokenizer", reason))
    }

    /// Returns an error for tokens beyond the model's table.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<(), String> {
        let Self::File(tokenizer, About { rows, .. }) = self else { return Ok(()) };
        let Some((rows, token)) = rows
            .get()
            .and_then(|&rows| tokens.iter().find(|&&token| token as usize >= rows).map(|token| (rows, token)))
        else {
            return Ok(());
        };
        let text = tokenizer.id_to_token(*token).unwrap_or_default();
        Err(format!(
            "contains the token {token}, `{text}`, but the model's table has {rows} rows: remove it from the text, or give the tokenizer \
             that the weights were trained with"
        ))
    }

    /// Returns the number of tokens.
    pub(crate) fn vocabulary(&self) -> usize {
        match self {
            Self::Bytes => 256,
            Self::Gpt2(_) => GPT2_END as usize + 1,
            Self::File(_, about) => about.vocabulary,
        }
    }

    /// Returns the number of tokens that texts may have.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::File(_, About { rows, .. }) => {
                rows.get().map_or(self.vocabulary(), |&rows| rows.min(self.vocabulary()))
            }
            _ => self.vocabulary(),
        }
    }

    /// Returns the token that ends a document, if there is one in the model's table.
    pub(crate) fn end(&self) -> Option<u32> {
        match self {
            Self::Bytes => Some(0),
            Self::Gpt2(_) => Some(GPT2_END),
            Self::File(tokenizer, _) => {
                let known = |end: &str| tokenizer.token_to_id(end).filter(|&end| (end as usize) < self.rows());
                ENDS.iter().find_map(|end| known(end))
            }
        }
    }

    /// Returns the tokens of a text that a model continues, with the special tokens that the
    /// tokenizer puts before a text, such as a BOS.
    pub(crate) fn encode_beginning(&self, place: &str, text: &str) -> Outcome<Vec<u32>> {
        match self {
            Self::File(tokenizer, _) => {
                // What the tokenizer puts after a text would end it.
                let with = token_ids(tokenizer, text, true).map_err(|reason| bad(place, reason))?;
                let own = self.encode(place, text.as_bytes())?;
                let start = with.windows(own.len().max(1)).position(|window| window == own).unwrap_or(0);
                let all = [&with[..start], &own].concat();
                self.check_tokens(&all).map_err(|reason| bad(place, reason))?;
                Ok(all)
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
                let tokens = token_ids(tokenizer, utf8()?, false).map_err(|reason| bad(place, reason))?;
                self.check_tokens(&tokens).map_err(|reason| bad(place, reason))?;
                Ok(tokens)
            }
        }
    }

    /// Returns the text of tokens; invalid UTF-8 becomes `�`.
    pub(crate) fn decode(&self, tokens: &[u32]) -> String {
        String::from_utf8_lossy(&self.bytes(tokens)).into_owned()
    }

    /// Returns the bytes of tokens. A file's tokenizer has replaced invalid UTF-8 by `�`.
    pub(crate) fn bytes(&self, tokens: &[u32]) -> Vec<u8> {
        // A model with a rounded-up vocabulary may generate tokens that no text contains. A file's
        // tokenizer leaves them out itself, and counting its vocabulary would take milliseconds.
        let known = |most: usize| tokens.iter().copied().filter(move |&token| (token as usize) < most);
        match self {
            Self::Bytes => known(256).map(|token| token as u8).collect(),
            Self::Gpt2(pairs) => {
                pairs._decode_native_and_split(known(GPT2_END as usize + 1).collect()).flatten().collect()
            }
            Self::File(tokenizer, _) => decode(tokenizer, tokens).unwrap_or_default().into(),
        }
    }
}

/// Returns true for a name such as `Qwen/Qwen3-0.6B`.
fn is_of_hub(name: &str) -> bool {
    let is_file = [".json", ".model", ".txt"].iter().any(|end| name.ends_with(end));
    let starts_as_name = name.starts_with(|letter: char| letter.is_ascii_alphanumeric());
    starts_as_name && !is_file && name.matches('/').count() == 1 && !name.ends_with('/')
}

/// Reads a tokenizer's file.
fn read(file: &str) -> Outcome<Vec<u8>> {
    let path = Path::new(file);
    let advice = if path.is_dir() {
        format!("is a folder: give the file, {}", path.join("tokenizer.json").display())
    } else if path.exists() {
        return PlainFile::read_whole(file, MAX_BYTES).map_err(|reason| bad(file, reason));
    } else if is_of_hub(file) {
        format!(
            "is no file: to use a tokenizer of the hub, download it with `hf download {file} tokenizer.json`, and give its path"
        )
    } else {
        "is no file: give `bytes`, `gpt2`, or the path of a tokenizer.json, or for `train` also `bpe`".into()
    };
    Err(bad(file, advice))
}

/// Describes a file that is no tokenizer: what it is, and how to make one of it.
fn not_a_tokenizer(bytes: &[u8], reason: String) -> String {
    let json: Value = serde_json::from_slice(bytes).unwrap_or_default();
    let holds = |key: &str| json.get(key).is_some();
    let is_words = json.as_object().is_some_and(|words| words.len() > 1 && words.values().all(Value::is_u64));
    let start = &bytes[..bytes.len().min(FileKind::BYTES)];
    let contains = |text: &[u8]| start.windows(text.len()).any(|window| window == text);
    let form = if is_words {
        "it is a vocabulary, such as vocab.json, without merges"
    } else if holds("tokenizer_class") || holds("added_tokens_decoder") {
        "it has a tokenizer's settings, as tokenizer_config.json"
    } else if holds("model_type") || holds("architectures") {
        "it has a model's settings, as config.json"
    } else if start.starts_with(b"#version") {
        "it has merges without a vocabulary, as merges.txt"
    } else if contains(b"<unk>") && contains(b"</s>") && json.is_null() && str::from_utf8(start).is_err()
        || start.starts_with(b"\n\x0e\n\x05<unk>")
    {
        "it is a model of SentencePiece"
    } else {
        return match FileKind::of(bytes).filter(|&kind| kind != FileKind::Json) {
            Some(kind) => kind.refusal("JSON"),
            None => reason,
        };
    };
    format!(
        "{form}: write a tokenizer.json with `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` of transformers, and give that"
    )
}
