//! The files next to the weights in a model's folder: the tokenizer, the chat template, and the
//! tokens that end a text.

use std::path::{Path, PathBuf};

use serde_json::Value;
use stepscope::files::{PlainFile, replace_file};
use stepscope_chat::ChatTemplate;

use crate::train::bad_input::{Outcome, bad};
use crate::train::tokenizer::Tokenizer;
use crate::train::weights;

/// The largest configuration file that is read.
const MAX_BYTES: u64 = 1 << 24;
/// The largest file that is copied next to exported weights.
pub(crate) const MAX_COPIED: u64 = 256 << 20;
/// The files of a folder that belong to the tokenizer and the chat template, and the settings of
/// generation.
const FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
];
const GENERATION: &str = "generation_config.json";

/// A model's folder, without its weights.
pub(crate) struct ModelFolder {
    path: PathBuf,
    pub(crate) tokenizer: Tokenizer,
    /// The chat template, if the model has one.
    pub(crate) template: Option<ChatTemplate>,
    /// The tokens that end a text: `eos_token_id` of `generation_config.json`, or else of
    /// `config.json`, or else the tokenizer's.
    pub(crate) stops: Vec<u32>,
    /// `eos_token` of `tokenizer_config.json`.
    eos: Option<u32>,
}

impl ModelFolder {
    /// Opens the files of a folder, with the folder's own tokenizer.
    pub(crate) fn open(path: &Path) -> Outcome<Self> {
        let file = path.join("tokenizer.json");
        if !file.exists() {
            let reason =
                "has no tokenizer.json: save the model's tokenizer there with `tokenizer.save_pretrained(folder)`";
            return Err(bad(path.display(), reason));
        }
        Self::with_tokenizer(path, Tokenizer::open(&file.display().to_string())?)
    }

    /// Opens the files of a folder, and uses this tokenizer.
    pub(crate) fn with_tokenizer(path: &Path, tokenizer: Tokenizer) -> Outcome<Self> {
        let template = ChatTemplate::read(path).map_err(weights::refused)?;
        let settings = object(&path.join("tokenizer_config.json"))?;
        let eos = match &settings["eos_token"] {
            Value::String(token) => Some(token.as_str()),
            token => token["content"].as_str(),
        };
        let eos = eos.and_then(|token| tokenizer.token(token));
        let mut stops = stops(path)?;
        if stops.is_empty() {
            stops.extend(eos.or(tokenizer.end()));
        }
        Ok(Self { path: path.into(), tokenizer, template, stops, eos })
    }

    /// Returns the token that ends a text or a completion, if there is one.
    pub(crate) fn end(&self) -> Option<u32> {
        self.eos.or(self.stops.first().copied())
    }

    /// Returns the settings of generation, or null if the folder has none.
    pub(crate) fn generation(&self) -> Outcome<Value> {
        object(&self.generation_path())
    }

    pub(crate) fn generation_path(&self) -> PathBuf {
        self.path.join(GENERATION)
    }

    /// Returns the tokens of a chat, up to where the assistant answers; `place` names the chat in
    /// an error.
    pub(crate) fn chat(&self, place: &str, messages: &[Value]) -> Outcome<Vec<u32>> {
        let Some(template) = &self.template else {
            return Err(bad(self.path.display(), "has no chat template: use --prompt, or add chat_template.jinja"));
        };
        let text = template.render(messages, None, true).map_err(|reason| bad(self.path.display(), reason))?;
        self.tokenizer.encode(place, text.as_bytes())
    }
}

/// Copies the files of the tokenizer, the chat template and the settings of generation, so that the
/// weights in `to` are a model that can be served. If there are no settings of generation, it
/// writes those that `config.json` implies: the tokens that begin, end and fill a text.
pub(crate) fn copy_companions(from: &Path, to: &Path) -> Outcome<()> {
    for name in FILES {
        let path = from.join(name);
        if path.exists() {
            let bytes = PlainFile::read_whole(&path, MAX_COPIED).map_err(|reason| bad(path.display(), reason))?;
            replace_file(to.join(name), &bytes)?;
        }
    }
    if from.join(GENERATION).exists() {
        return Ok(());
    }
    let config = object(&from.join("config.json"))?;
    let ids = ["bos_token_id", "eos_token_id", "pad_token_id"].map(|key| (key.to_owned(), config[key].clone()));
    let settings: serde_json::Map<String, Value> = ids.into_iter().filter(|(_, id)| !id.is_null()).collect();
    if settings.is_empty() {
        return Ok(());
    }
    let text = format!("{:#}\n", Value::Object(settings));
    Ok(replace_file(to.join(GENERATION), text.as_bytes())?)
}

/// Reads a file with a JSON object, or returns null if there is no such file.
fn object(path: &Path) -> Outcome<Value> {
    if !path.exists() {
        return Ok(Value::Null);
    }
    let failed = |reason: &dyn std::fmt::Display| bad(path.display(), reason);
    let bytes = PlainFile::read_whole(path, MAX_BYTES).map_err(|reason| failed(&reason))?;
    serde_json::from_slice(&bytes).map_err(|reason| failed(&reason))
}

/// Returns the tokens that the configuration files say end a text.
fn stops(folder: &Path) -> Outcome<Vec<u32>> {
    for file in [GENERATION, "config.json"] {
        let path = folder.join(file);
        let settings = object(&path)?;
        let ids = match &settings["eos_token_id"] {
            Value::Null => continue,
            Value::Array(ids) => ids.clone(),
            one => vec![one.clone()],
        };
        let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
        let Some(ids) = ids.iter().map(id).collect() else {
            let reason = format!("`eos_token_id`: expected token numbers, got {}", settings["eos_token_id"]);
            return Err(bad(path.display(), reason));
        };
        return Ok(ids);
    }
    Ok(Vec::new())
}
