//! Continues a text, answers a message, or holds a conversation, with the weights of a folder of
//! transformers.
//!
//! ```text
//! stepscope generate --weights DIR --prompt "Once upon a time"
//! stepscope generate --weights DIR --chat "What is 2 + 2?"  # by the model's chat template
//! stepscope generate --weights DIR --chat                   # a conversation, line by line
//! stepscope generate --weights DIR --adapter DIR --chat "What is 2 + 2?"
//! stepscope generate --weights DIR --precision bf16 --chat "What is 2 + 2?"
//! ```
//! The beginning of a text is read in one pass, and the answer is printed as it is written. With
//! `--precision bf16`, matrices, activations, and the caches of keys and values are BF16. Norms and
//! biases stay f32, and so do scores and logits.
//!
//! Exit code 1: the device failed. 2: the command line is wrong, or a file of the folder is.

mod sampling;
mod text_stream;

use std::io::{BufRead, IsTerminal, Write, stderr, stdin, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::{Value, json};
use stepscope::data::TokenSampler;
use stepscope::models::{Lora, ModelConfig, Transformer, WeightFiles};
use stepscope::ops::Activation;
use stepscope::parameters::{FrozenType, ParameterEntry};
use stepscope::tensor::Element;
use stepscope::{Device, DeviceKind, ParameterSpec, Parameters, Result, bf16};
use stepscope_chat::Date;

use crate::program::exit;
use crate::program::log::{self, Log};
use crate::program::stored_as::StoredAs;
use crate::run::folder::ModelFolder;
use crate::run::memory::RunMemory;
use crate::train::bad_input::{BadInput, Outcome, bad};
use crate::train::cli::{above_zero, share, up_to, zero_or_above};
use crate::train::model::{Gpt, Mode};
use crate::train::sample::{self, Text};
use crate::train::tokenizer::Tokenizer;
use crate::train::weights;
use sampling::Sampling;
use text_stream::TextStream;

/// Continues a text, answers a message, or holds a conversation, with the weights of a folder.
/// Prints only the new text
#[derive(Parser)]
#[command(name = "stepscope generate")]
pub(crate) struct Args {
    /// Folder with config.json, safetensors files and tokenizer.json, as transformers saves it
    #[arg(long, value_name = "DIR")]
    weights: PathBuf,

    /// Folder of an adapter for these weights, as PEFT or finetune --lora saves it
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,

    /// Add the adapter to the weights when they are loaded, instead of applying it to each token
    #[arg(long, requires = "adapter")]
    merge: bool,

    /// Text to continue
    #[arg(long, value_name = "TEXT", required_unless_present = "chat", conflicts_with = "chat")]
    prompt: Option<String>,

    /// Message to answer; without TEXT, a conversation whose messages are the lines of standard
    /// input. Needs the model's chat template
    #[arg(long, value_name = "TEXT")]
    chat: Option<Option<String>>,

    /// System message that a chat begins with
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,

    /// Date that the chat template writes if it asks for one [default: today's in UTC]
    #[arg(long, value_name = "YYYY-MM-DD")]
    date: Option<Date>,

    /// Tokenizer: bytes, gpt2, or the path of a tokenizer.json [default: the folder's]
    #[arg(long, value_name = "bytes|gpt2|FILE")]
    tokenizer: Option<String>,

    /// Device to run on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,

    /// Numbers in memory; bf16 takes half of it, and rounds weights that the files have in f32
    #[arg(long, value_enum, default_value_t = StoredAs::F32)]
    precision: StoredAs,

    /// The most new tokens of an answer; fewer if a token that ends a text comes first
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = up_to(1 << 20))]
    tokens: usize,

    /// Text that ends an answer, and is not printed; can be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    /// The most tokens of the text with its beginning [default: the model's]
    #[arg(long, value_name = "TOKENS", value_parser = up_to(1 << 20))]
    context: Option<usize>,

    /// Sampling temperature; 0 always takes the most likely token [default: the model's, in
    /// generation_config.json, or 0.8]
    #[arg(long, value_name = "NUMBER", value_parser = zero_or_above)]
    temperature: Option<f32>,

    /// Sample only from the N most likely tokens [default: the model's, or all]
    #[arg(long, value_name = "N", value_parser = up_to(u32::MAX))]
    top_k: Option<usize>,

    /// Sample only from the most likely tokens whose probabilities add up to this share [default:
    /// the model's, or all]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    top_p: Option<f32>,

    /// Make tokens that the text contains less likely: divide their positive logits by this number
    /// [default: the model's, or 1]
    #[arg(long, value_name = "NUMBER", value_parser = above_zero)]
    repetition_penalty: Option<f32>,

    /// Compute each token's logits with the bits that one pass over the whole text has, as training
    /// on it needs: slower, the more so the longer the text
    #[arg(long)]
    batch_invariant: bool,

    /// Seed of the generated text
    #[arg(long, default_value_t = 7)]
    seed: u64,
}

/// Prints the text, and returns the exit code.
pub(crate) fn main(args: &Args) -> ExitCode {
    log::start(Log::Text);
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::failed(Log::Text, &*error);
            ExitCode::from(if error.is::<BadInput>() { 2 } else { exit::code(&*error) })
        }
    }
}

fn run(args: &Args) -> Outcome<()> {
    let folder = &args.weights;
    let (mut weights, mut config) = weights::open(folder, args.context)?;
    if args.context.is_none() {
        config.context = weights.config().context;
    }
    let name = match &args.tokenizer {
        Some(name) => name.clone(),
        None => folder.join("tokenizer.json").display().to_string(),
    };
    let mut files = ModelFolder::with_tokenizer(folder, Tokenizer::open(&name)?)?;
    if let Some(date) = args.date {
        files.template = files.template.map(|template| template.at(date));
    }
    files.tokenizer.check_vocabulary(config.vocabulary)?;
    let settings = files.generation()?;
    let sampling = Sampling::of(args, &settings).map_err(|reason| bad(files.generation_path().display(), reason))?;
    for ignored in Sampling::ignored(&settings) {
        tracing::warn!("{}: {ignored} is not applied", files.generation_path().display());
    }
    let generator = Generator { args, config, files: &files, sampling: &sampling };
    match args.precision {
        StoredAs::F32 => generator.run::<f32>(&mut weights),
        StoredAs::Bf16 => generator.run::<bf16>(&mut weights),
    }
}

/// The settings of all texts of a program run.
struct Generator<'g> {
    args: &'g Args,
    config: ModelConfig,
    files: &'g ModelFolder,
    sampling: &'g Sampling,
}

/// A loaded model.
struct Loaded<S> {
    device: Device,
    model: Gpt<S>,
    parameters: Parameters,
}

/// The counts and times of the texts, for the report.
#[derive(Default)]
struct Times {
    read: usize,
    reading: Duration,
    written: usize,
    /// The written tokens but the first of each answer, which belongs to the reading.
    later: usize,
    writing: Duration,
}

impl Generator<'_> {
    /// Loads the weights, and writes the texts.
    fn run<S: Activation>(&self, weights: &mut WeightFiles) -> Outcome<()> {
        let mut times = Times::default();
        let Args { prompt, chat, system, .. } = self.args;
        let Some(message) = chat else {
            let prompt = prompt.as_deref().unwrap_or_default();
            let beginning = self.files.tokenizer.encode_beginning("--prompt", prompt)?;
            let loaded = self.load::<S>(weights, &beginning)?;
            self.answer(&loaded, &beginning, &mut times)?;
            return self.report(&times);
        };
        let mut messages: Vec<Value> = Vec::new();
        messages.extend(system.as_ref().map(|system| json!({"role": "system", "content": system})));
        let mut loaded = None;
        loop {
            let next = match message {
                Some(message) => Some(message.clone()),
                None => next_line()?,
            };
            let Some(message) = next else { return self.report(&times) };
            messages.push(json!({"role": "user", "content": message}));
            let beginning = self.files.chat("--chat", &messages)?;
            let loaded = match &mut loaded {
                Some(loaded) => loaded,
                empty => empty.insert(self.load::<S>(weights, &beginning)?),
            };
            let answer = self.answer(loaded, &beginning, &mut times)?;
            if chat.as_ref().is_some_and(Option::is_some) {
                return self.report(&times);
            }
            messages.push(json!({"role": "assistant", "content": answer}));
        }
    }

    /// Writes the answer to standard output, and returns it.
    fn answer<S: Activation>(&self, loaded: &Loaded<S>, beginning: &[u32], times: &mut Times) -> Outcome<String> {
        let started = Instant::now();
        let sampler = self.sampling.sampler(self.args.seed)?;
        let text = self.text(beginning, &sampler)?;
        let mut stream = TextStream::new(&self.files.tokenizer, &self.sampling.stops);
        let (mut answer, mut printed, mut first, mut written) = (String::new(), Ok(()), None, 0);
        let mut print = |piece: String| {
            answer.push_str(&piece);
            write!(stdout(), "{piece}").and_then(|()| stdout().flush())
        };
        sample::stream(&loaded.device, &loaded.model, &loaded.parameters, &text, &mut |token| {
            first.get_or_insert_with(|| started.elapsed());
            written += 1;
            printed = print(stream.push(token));
            printed.is_ok() && !stream.is_ended()
        })?;
        printed?;
        print(stream.finish() + "\n")?;
        answer.pop();
        let all = started.elapsed();
        let first = first.unwrap_or(all);
        times.read += beginning.len();
        times.reading += first;
        times.written += written;
        times.later += written.saturating_sub(1);
        times.writing += all - first;
        Ok(answer)
    }

    /// Returns the text that follows a beginning.
    ///
    /// # Errors
    /// Returns an error if the beginning is empty, or leaves no room for an answer.
    fn text<'t>(&'t self, beginning: &'t [u32], sampler: &'t TokenSampler) -> Outcome<Text<'t>> {
        let place = if self.args.chat.is_some() { "--chat" } else { "--prompt" };
        let most = self.config.context;
        if beginning.is_empty() {
            return Err(bad(place, "is empty: give the text to continue"));
        }
        if beginning.len() >= most {
            let has = beginning.len();
            let reason = format!("has {has} tokens, which leave none of a context of {most} for an answer");
            return Err(bad(place, reason));
        }
        let (count, ends) = (self.args.tokens.min(most - beginning.len()), &self.files.stops[..]);
        let (repetition_penalty, batch_invariant) = (self.sampling.repetition_penalty, self.args.batch_invariant);
        Ok(Text { beginning, count, ends, sampler, repetition_penalty, batch_invariant })
    }

    /// Loads the weights, if there is memory for them and for a text with this beginning.
    fn load<S: Activation>(&self, weights: &mut WeightFiles, beginning: &[u32]) -> Outcome<Loaded<S>> {
        let Args { ref adapter, merge, .. } = *self.args;
        let sampler = self.sampling.sampler(self.args.seed)?;
        let text = self.text(beginning, &sampler)?;
        let device = Device::open(self.args.device)?;
        let lora = adapter.as_deref().map(|folder| weights::adapter(folder, &self.config)).transpose()?;
        let folder = adapter.as_ref().unwrap_or(&self.args.weights);
        let (model, spec) = self.model::<S>(lora.as_ref()).map_err(|error| bad(folder.display(), error))?;
        let empty = |device: &Device| {
            let (model, spec) = self.model::<S>(lora.as_ref())?;
            Ok((model, parameters::<S>(device, &spec)?))
        };
        let steps = sample::needed_bytes(&device, empty, &text)?;
        let advice = "give fewer --tokens, a smaller --context, or --precision bf16";
        RunMemory::of_text(&spec, steps, is_bf16::<S>()).check(&device, advice)?;

        let mut parameters = parameters::<S>(&device, &spec)?;
        weights.load(&mut parameters).map_err(weights::refused)?;
        let Gpt { mut layers, .. } = model;
        if let Some((lora, folder)) = lora.as_ref().zip(adapter.as_ref()) {
            lora.load(folder, layers.config(), &mut parameters).map_err(weights::refused)?;
            if merge {
                layers = layers.merge(&mut parameters)?;
            }
        }
        Ok(Loaded { model: Gpt::of(layers, Mode::default()), parameters, device })
    }

    /// Builds the model, with the adapters if there are any. Only the adapters are trained.
    fn model<S: Activation>(&self, lora: Option<&Lora>) -> Result<(Gpt<S>, ParameterSpec)> {
        let stored = |entry: &ParameterEntry| match is_bf16::<S>() && entry.shape().extents().len() == 2 {
            true => FrozenType::Bf16,
            false => FrozenType::F32,
        };
        let (layers, spec) = match lora {
            Some(lora) => Transformer::with_lora(self.config.clone(), lora, stored)?,
            None => Transformer::frozen(self.config.clone(), |entry| Some(stored(entry)))?,
        };
        Ok((Gpt::of(layers, Mode::default()), spec))
    }

    /// Logs the settings, the counts and the times.
    fn report(&self, times: &Times) -> Outcome<()> {
        let Times { read, reading, written, later, writing } = *times;
        let rate = later as f64 / writing.as_secs_f64().max(1e-9);
        let text = format!(
            "{}; {read} tokens read in {:.3} s, {written} written in {:.3} s ({rate:.1} tokens/s)",
            self.sampling,
            reading.as_secs_f64(),
            writing.as_secs_f64()
        );
        log::say(Log::Text, &text);
        Ok(())
    }
}

/// Reads the next line of standard input that is not blank. Shows a prompt on a terminal.
fn next_line() -> Outcome<Option<String>> {
    loop {
        if stdin().is_terminal() {
            write!(stderr(), "> ")?;
        }
        let mut line = String::new();
        if stdin().lock().read_line(&mut line)? == 0 {
            return Ok(None);
        }
        if !line.trim().is_empty() {
            return Ok(Some(line.trim().into()));
        }
    }
}

fn is_bf16<S: Element>() -> bool {
    S::NAME == bf16::NAME
}

/// Allocates the parameters, all of which are loaded, with what products of this type read.
fn parameters<S: Element>(device: &Device, spec: &ParameterSpec) -> Result<Parameters> {
    let parameters = Parameters::new(device, &spec.clone().with_loaded(|_| true), 0)?;
    if is_bf16::<S>() { parameters.with_bf16_copy() } else { Ok(parameters) }
}
