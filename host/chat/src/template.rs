//! A model's chat template, in Jinja as transformers renders it.
//!
//! transformers trims blocks, adds `raise_exception`, a `tojson` like Python's `json.dumps`, and
//! the tag `generation` around the assistant's text. It also adds `strftime_now`, which is left out
//! here, because a text would depend on the day. Templates that test for it then use the fixed date
//! that they contain.
//!
//! Invariant: the same messages always give the same text.

use crate::python_json;
use minijinja::value::{Kwargs, Value as JinjaValue};
use minijinja::{Environment, Error as JinjaError, ErrorKind, UndefinedBehavior};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Map, Value};
use std::error::Error as _;
use std::path::Path;
use stepscope_core::{Error, PlainFile, Result};

/// The largest file that is read, and the longest text that is rendered.
const MAX_BYTES: u64 = 16 << 20;
/// The most instructions of a rendering. A message takes some hundred.
const MAX_INSTRUCTIONS: u64 = 2_000_000;

/// A chat template, with the special tokens that it may name.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: Map<String, Value>,
}

impl ChatTemplate {
    /// Makes a template from its source, with special tokens such as `bos_token` by name.
    ///
    /// # Errors
    /// Returns the line and the fault if the source is not a valid template.
    pub fn new(source: &str, tokens: Map<String, Value>) -> std::result::Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> std::result::Result<String, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_filter("tojson", to_json);
        environment.add_template_owned("chat", without_generation_tags(source)).map_err(|error| described(&error))?;
        Ok(Self { environment, tokens })
    }

    /// Reads the template of a model's folder: `chat_template.jinja`, or else `chat_template` in
    /// `tokenizer_config.json`. Returns `None` if the folder has no template.
    ///
    /// # Errors
    /// [`Error::File`] if a file cannot be read, or holds no valid template.
    pub fn read(folder: impl AsRef<Path>) -> Result<Option<Self>> {
        let folder = folder.as_ref();
        let (config, file) = (folder.join("tokenizer_config.json"), folder.join("chat_template.jinja"));
        let settings = match config.exists() {
            true => serde_json::from_slice(&bytes(&config)?).map_err(|reason| Error::file(&config, reason))?,
            false => Value::Null,
        };
        let (path, source) = match file.exists() {
            true => {
                let source = String::from_utf8(bytes(&file)?).map_err(|reason| Error::file(&file, reason))?;
                (file, source)
            }
            false => match default_template(&settings["chat_template"]) {
                Ok(Some(source)) => (config, source.to_owned()),
                Ok(None) => return Ok(None),
                Err(reason) => return Err(Error::file(&config, reason)),
            },
        };
        Self::new(&source, special_tokens(&settings)).map(Some).map_err(|reason| Error::file(path, reason))
    }

    /// Renders messages. If `add_generation_prompt` is set, the text ends where the assistant's
    /// next message begins.
    ///
    /// # Errors
    /// Returns the template's own message if it refuses the chat (for example because roles must
    /// alternate), or the fault of the template. A loop without an end, and a text above 16 MiB,
    /// are such faults.
    pub fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> std::result::Result<String, String> {
        let mut context = self.tokens.clone();
        context.insert("messages".into(), messages.into());
        context.insert("tools".into(), tools.cloned().unwrap_or(Value::Null));
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        let template = self.environment.get_template("chat").expect("added in `new`");
        let mut text = Bounded(Vec::new());
        template
            .render_captured_to(JinjaValue::from_serialize(&context), &mut text)
            .map_err(|error| described(&error))?;
        Ok(String::from_utf8(text.0).expect("a template writes UTF-8"))
    }
}

/// A text of at most [`MAX_BYTES`].
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if (self.0.len() + bytes.len()) as u64 > MAX_BYTES {
            return Err(std::io::Error::other(format!("the text has more than {MAX_BYTES} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn bytes(path: &Path) -> Result<Vec<u8>> {
    PlainFile::read_whole(path, MAX_BYTES).map_err(|reason| Error::file(path, reason))
}

/// Returns the template of a `tokenizer_config.json`: a text, or the template named `default` of a
/// list.
fn default_template(found: &Value) -> std::result::Result<Option<&str>, String> {
    match found {
        Value::Null => Ok(None),
        Value::String(source) => Ok(Some(source)),
        Value::Array(list) => {
            let default = list.iter().find(|one| one["name"] == "default");
            let source = default.and_then(|one| one["template"].as_str());
            source.map(Some).ok_or_else(|| "`chat_template`: expected one named \"default\"".into())
        }
        _ => Err("`chat_template`: expected a text or a list".into()),
    }
}

/// Returns the special tokens of a `tokenizer_config.json`, such as `bos_token`. A token is a text,
/// or an object with its `content`.
fn special_tokens(settings: &Value) -> Map<String, Value> {
    let tokens = settings.as_object().into_iter().flatten().filter(|(key, _)| key.ends_with("_token"));
    let content = tokens.filter_map(|(key, token)| {
        let content = token.as_str().or_else(|| token["content"].as_str())?;
        Some((key.clone(), content.into()))
    });
    content.collect()
}

/// Replaces the tags `generation` and `endgeneration` by tags that have no effect.
fn without_generation_tags(source: &str) -> String {
    let mut text = source.to_owned();
    for (tag, replacement) in [("generation", "if true"), ("endgeneration", "endif")] {
        for open in ["{%", "{%-", "{%+"] {
            for close in ["%}", "-%}", "+%}"] {
                for space in [" ", ""] {
                    let tag = format!("{open}{space}{tag}{space}{close}");
                    text = text.replace(&tag, &format!("{open} {replacement} {close}"));
                }
            }
        }
    }
    text
}

/// The filter `tojson`. Other options of Python's `json.dumps` have no effect on plain values.
fn to_json(value: &JinjaValue, options: Kwargs) -> std::result::Result<String, JinjaError> {
    let indent = options.get::<Option<usize>>("indent")?;
    for known in ["ensure_ascii", "separators", "sort_keys"] {
        if options.has(known) && !matches!(known, "ensure_ascii") {
            return Err(JinjaError::new(ErrorKind::InvalidOperation, format!("tojson: `{known}` is not supported")));
        }
    }
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let value = serde_json::to_value(value)
        .map_err(|reason| JinjaError::new(ErrorKind::InvalidOperation, format!("tojson: {reason}")))?;
    Ok(python_json::dumps(&value, indent))
}

/// Describes an error of a template, with its line.
fn described(error: &JinjaError) -> String {
    let line = error.line().map_or(String::new(), |line| format!("line {line} of the chat template: "));
    let detail = match (error.kind(), error.source()) {
        (ErrorKind::OutOfFuel, _) => {
            format!("did not end after {MAX_INSTRUCTIONS} instructions: look for a loop without an end")
        }
        (ErrorKind::WriteFailure, Some(reason)) => reason.to_string(),
        _ => error.detail().map_or_else(|| error.kind().to_string(), str::to_owned),
    };
    format!("{line}{detail}")
}
