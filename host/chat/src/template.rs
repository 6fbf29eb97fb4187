//! A model's chat template, in Jinja as transformers renders it.
//!
//! transformers trims blocks, adds `raise_exception`, a `tojson` like Python's `json.dumps`,
//! `strftime_now`, and the tag `generation` around the assistant's text. The tag becomes a filter
//! that writes marks around this text, which are removed from the rendering.
//!
//! Invariant: the same messages and the same date always give the same text.

use crate::date::Date;
use crate::limits::{self, MAX_BYTES};
use crate::messages::with_thoughts;
use crate::metering;
use crate::nesting;
use minijinja::machinery::{CodeGenerator, Instructions, Vm, WhitespaceConfig, make_string_output, parse};
use minijinja::value::Value as JinjaValue;
use minijinja::{AutoEscape, Environment, Error as JinjaError, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
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

/// The filter that the tag `generation` becomes.
const GENERATION: &str = "stepscope_generation";
/// The marks around the assistant's text. They contain characters that no text should have.
const MARKS: [&str; 2] = ["\u{fdd0}generation\u{fdd1}", "\u{fdd0}endgeneration\u{fdd1}"];

/// A chat template, with the special tokens that it may name.
pub struct ChatTemplate {
    /// The file, for errors.
    name: String,
    source: &'static str,
    environment: Environment<'static>,
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
    tokens: BTreeMap<String, JinjaValue>,
    date: Date,
}

/// A rendered chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rendering {
    pub(crate) text: String,
    /// The parts of the text between the tags `generation` and `endgeneration`.
    pub(crate) generated: Vec<Range<usize>>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Makes a template from its source, with special tokens such as `bos_token` by name, and
    /// today's date in UTC. The source stays in memory until the program ends.
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
        environment.add_filter(GENERATION, |text: String| format!("{}{text}{}", MARKS[0], MARKS[1]));

        let name = "the chat template";
        // Jinja reads all ends of lines as `\n`.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let source = kept(with_generation_filter(&source));
        let spaces = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
        nesting::check(source, spaces).map_err(|reason| format!("{name}: {reason}"))?;
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
        let tokens = tokens.into_iter().map(|(name, token)| (name, JinjaValue::from_serialize(token))).collect();
        let template =
            Self { name: name.into(), source, environment, instructions, blocks, tokens, date: Date::today() };
        Ok(template.at(Date::today()))
    }

    /// Sets the date that the template may write.
    #[must_use]
    pub fn at(mut self, date: Date) -> Self {
        self.date = date;
        self.environment.add_function("strftime_now", move |format: String| {
            date.format(&format).map_err(|reason| JinjaError::new(ErrorKind::InvalidOperation, reason))
        });
        self
    }

    /// Returns the date if the template may write it.
    pub fn date(&self) -> Option<Date> {
        self.source.contains("strftime_now").then_some(self.date)
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
        let messages: Vec<JinjaValue> = messages.iter().map(JinjaValue::from_serialize).collect();
        let tools = JinjaValue::from_serialize(tools);
        let rendering = self.render_values(&messages, &tools, add_generation_prompt);
        rendering.map(|rendering| rendering.text).map_err(|fault| fault.reason)
    }

    /// Renders messages like [`ChatTemplate::render`].
    pub(crate) fn render_values(
        &self,
        messages: &[JinjaValue],
        tools: &JinjaValue,
        add_generation_prompt: bool,
    ) -> std::result::Result<Rendering, Fault> {
        let own = [
            ("messages", messages.iter().map(with_thoughts).collect()),
            ("tools", tools.clone()),
            ("documents", JinjaValue::from(())),
            ("add_generation_prompt", add_generation_prompt.into()),
        ];
        let tokens = self.tokens.iter().map(|(name, token)| (name.as_str(), token.clone()));
        let root: JinjaValue = tokens.chain(own).collect();
        limits::begin();
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
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
        Ok(unmarked(&text))
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

/// Replaces the tags `generation` and `endgeneration` by those of a filter.
fn with_generation_filter(source: &str) -> String {
    let (mut text, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        text.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let inside = &tag[..end];
        let bare = inside.strip_prefix(['-', '+']).unwrap_or(inside);
        let name = bare.strip_suffix(['-', '+']).unwrap_or(bare);
        let replacement = match name.trim() {
            "generation" => format!(" filter {GENERATION} "),
            "endgeneration" => " endfilter ".into(),
            _ => continue,
        };
        text.push_str(&inside[..inside.len() - bare.len()]);
        text.push_str(&replacement);
        text.push_str(&bare[name.len()..]);
        rest = &tag[end..];
    }
    text + rest
}

/// Removes the marks from a text, and returns what they enclose.
fn unmarked(marked: &str) -> Rendering {
    let (mut text, mut generated, mut starts) = (String::with_capacity(marked.len()), Vec::new(), Vec::new());
    let mut rest = marked;
    while let Some(at) = rest.find(MARKS[0].chars().next().expect("a mark has a character")) {
        text.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix(MARKS[0]) {
            starts.push(text.len());
            rest = after;
        } else if let (Some(after), Some(&start)) = (rest.strip_prefix(MARKS[1]), starts.last()) {
            starts.pop();
            generated.push(start..text.len());
            rest = after;
        } else {
            let first = rest.chars().next().map_or(0, char::len_utf8);
            text.push_str(&rest[..first]);
            rest = &rest[first..];
        }
    }
    text.push_str(rest);
    Rendering { text, generated }
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
