//! A model's chat template, in Jinja as transformers renders it.
//!
//! transformers trims blocks, adds `raise_exception`, a `tojson` like Python's `json.dumps`, and
//! the tag `generation` around the assistant's text. It also adds `strftime_now`, which is left out
//! here, because a text would depend on the day. Templates that test for it then use the fixed date
//! that they contain.
//!
//! Invariant: the same messages always give the same text.

use crate::limits::{self, MAX_BYTES};
use crate::metering;
use minijinja::machinery::{CodeGenerator, Instructions, Vm, WhitespaceConfig, make_string_output, parse};
use minijinja::value::Value as JinjaValue;
use minijinja::{AutoEscape, Environment, Error as JinjaError, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use stepscope_core::{Error, PlainFile, Result};

/// The most instructions of a rendering. A message takes some hundred.
const MAX_INSTRUCTIONS: u64 = 4_000_000;
/// The longest source of a template. Those of models have at most some ten thousand bytes.
const MAX_SOURCE: usize = 1 << 20;
/// The roles that templates know without naming them.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// A chat template, with the special tokens that it may name.
pub struct ChatTemplate {
    /// The file, for errors.
    name: String,
    source: &'static str,
    environment: Environment<'static>,
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
    tokens: Map<String, Value>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Makes a template from its source, with special tokens such as `bos_token` by name. The
    /// source stays in memory until the program ends.
    ///
    /// # Errors
    /// Returns the line and the fault if the source is not a valid template.
    pub fn new(source: &str, tokens: Map<String, Value>) -> std::result::Result<Self, String> {
        if source.len() > MAX_SOURCE {
            return Err(format!("the chat template has {} bytes, but may have at most {MAX_SOURCE}", source.len()));
        }
        let mut environment = Environment::new();
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.add_function("raise_exception", |message: String| -> std::result::Result<String, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, message))
        });
        limits::limit(&mut environment);

        let name = "the chat template";
        // Jinja reads all ends of lines as `\n`.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let source = kept(without_generation_tags(&source));
        let spaces = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
        let parsed = parse(source, name, Default::default(), spaces).map_err(|error| described(name, &error))?;
        let measured = match metering::measured(&parsed) {
            Ok(measured) => measured,
            Err(reason) => {
                // Dropping a tree that is nested too deep would overflow the stack.
                std::mem::forget(parsed);
                return Err(reason);
            }
        };
        let mut generator = CodeGenerator::new(name, source);
        generator.compile_stmt(&measured);
        let (instructions, blocks) = generator.finish();
        Ok(Self { name: name.into(), source, environment, instructions, blocks, tokens })
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
        let mut template =
            Self::new(&source, special_tokens(&settings)).map_err(|reason| Error::file(&path, reason))?;
        template.name = path.display().to_string();
        Ok(Some(template))
    }

    /// Returns true if chats may have messages of a role: one that most templates know, or one that
    /// this template names.
    pub(crate) fn knows(&self, role: &str) -> bool {
        let named = |quote: char| self.source.contains(&format!("{quote}{role}{quote}"));
        ROLES.contains(&role) || named('\'') || named('"')
    }

    /// Renders messages. If `add_generation_prompt` is set, the text ends where the assistant's
    /// next message begins.
    ///
    /// # Errors
    /// Returns the template's own message if it refuses the chat (for example because roles must
    /// alternate), or the file, the line and the fault of the template. Such faults are a loop
    /// without an end, values or a text above 16 MiB, and values above 1 GiB in all.
    pub fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> std::result::Result<String, String> {
        self.render_or_fault(messages, tools, add_generation_prompt).map_err(|fault| fault.reason)
    }

    /// Renders messages like [`ChatTemplate::render`].
    pub(crate) fn render_or_fault(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> std::result::Result<String, Fault> {
        let mut context = self.tokens.clone();
        context.insert("messages".into(), messages.into());
        context.insert("tools".into(), tools.cloned().unwrap_or(Value::Null));
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        limits::begin();
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        let root = JinjaValue::from_serialize(&context);
        let vm = Vm::new(&self.environment);
        // In a build that checks arithmetic, some slices are panics of minijinja.
        let run = || vm.eval(&self.instructions, root, &self.blocks, &mut output, AutoEscape::None).map(drop);
        let failed = |reason| Fault { reason, is_limit: false };
        let result = catch_unwind(AssertUnwindSafe(run))
            .map_err(|_| failed(format!("{}: its rendering panicked, for example in a slice", self.name)))?;
        result.map_err(|error| Fault {
            reason: described(&self.name, &error),
            is_limit: error.kind() == ErrorKind::OutOfFuel,
        })?;
        drop(output);
        Ok(text)
    }
}

/// The reason why a chat cannot be rendered.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) reason: String,
    /// True if the template has reached a limit.
    pub(crate) is_limit: bool,
}

/// Returns a source that lives as long as the program, because instructions refer to it. Equal
/// sources are kept once.
fn kept(source: String) -> &'static str {
    static SOURCES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = sources.get(source.as_str()) {
        return known;
    }
    let source: &'static str = Box::leak(source.into_boxed_str());
    sources.insert(source);
    source
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

/// Describes an error of a template, with its file and line.
fn described(name: &str, error: &JinjaError) -> String {
    let detail = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, None) => {
            format!("did not end after {MAX_INSTRUCTIONS} instructions: look for a loop without an end")
        }
        (kind, detail) => detail.map_or_else(|| kind.to_string(), str::to_owned),
    };
    match error.line() {
        Some(line) => format!("line {line} of {name}: {detail}"),
        None => format!("{name}: {detail}"),
    }
}
