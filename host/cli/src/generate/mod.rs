//! Continues a text, or answers a message, with the weights of a folder of transformers.
//!
//! ```text
//! stepscope generate --weights DIR --prompt "Once upon a time"
//! stepscope generate --weights DIR --chat "What is 2 + 2?"  # by the model's chat template
//! stepscope generate --weights DIR --adapter DIR --chat "What is 2 + 2?"
//! stepscope generate --weights DIR --precision bf16 --chat "What is 2 + 2?"
//! ```
//! With `--precision bf16`, matrices, activations, and the caches of keys and values are BF16.
//! Norms and biases stay f32, and so do scores and logits.
//!
//! Exit code 1: the device failed. 2: the command line is wrong, or a file of the folder is.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use stepscope::data::{TokenSampler, TokenSamplerConfig};
use stepscope::models::{Lora, ModelConfig, Transformer, WeightFiles};
use stepscope::ops::Activation;
use stepscope::parameters::{FrozenType, ParameterEntry};
use stepscope::tensor::Element;
use stepscope::{Device, DeviceKind, ParameterSpec, Parameters, Result, bf16};

use crate::program::exit;
use crate::program::log::{self, Log};
use crate::program::stored_as::StoredAs;
use crate::run::folder::ModelFolder;
use crate::run::memory::RunMemory;
use crate::train::bad_input::{BadInput, Outcome, bad};
use crate::train::cli::{share, up_to, zero_or_above};
use crate::train::model::{Gpt, Mode};
use crate::train::tokenizer::Tokenizer;
use crate::train::{sample, weights};

/// Continues a text, or answers a message, with the weights of a folder. Prints only the new text
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

    /// Message to answer; needs the model's chat template
    #[arg(long, value_name = "TEXT")]
    chat: Option<String>,

    /// Tokenizer: bytes, gpt2, or the path of a tokenizer.json [default: the folder's]
    #[arg(long, value_name = "bytes|gpt2|FILE")]
    tokenizer: Option<String>,

    /// Device to run on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,

    /// Numbers in memory; bf16 takes half of it, and rounds weights that the files have in f32
    #[arg(long, value_enum, default_value_t = StoredAs::F32)]
    precision: StoredAs,

    /// The most new tokens; fewer if a token that ends a text comes first
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = up_to(1 << 20))]
    tokens: usize,

    /// The most tokens of the text with its beginning [default: the model's]
    #[arg(long, value_name = "TOKENS", value_parser = up_to(1 << 20))]
    context: Option<usize>,

    /// Sampling temperature; 0 always takes the most likely token
    #[arg(long, value_name = "NUMBER", default_value_t = 0.8, value_parser = zero_or_above)]
    temperature: f32,

    /// Sample only from the N most likely tokens
    #[arg(long, value_name = "N", value_parser = up_to(u32::MAX))]
    top_k: Option<usize>,

    /// Sample only from the most likely tokens whose probabilities add up to this share
    #[arg(long, value_name = "SHARE", value_parser = share)]
    top_p: Option<f32>,

    /// Seed of the generated text
    #[arg(long, default_value_t = 7)]
    seed: u64,
}

/// Prints the text, and returns the exit code.
pub(crate) fn main(args: &Args) -> ExitCode {
    log::start(Log::Text);
    let printed = text(args).and_then(|text| Ok(writeln!(std::io::stdout(), "{text}")?));
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::failed(Log::Text, &*error);
            ExitCode::from(if error.is::<BadInput>() { 2 } else { exit::code(&*error) })
        }
    }
}

fn text(args: &Args) -> Outcome<String> {
    let folder = &args.weights;
    let (mut weights, mut config) = weights::open(folder, args.context)?;
    let name = match &args.tokenizer {
        Some(name) => name.clone(),
        None => folder.join("tokenizer.json").display().to_string(),
    };
    let files = ModelFolder::with_tokenizer(folder, Tokenizer::open(&name)?)?;
    files.tokenizer.check_vocabulary(config.vocabulary)?;
    let beginning = match (&args.chat, &args.prompt) {
        (Some(message), _) => files.chat("--chat", message)?,
        (None, prompt) => files.tokenizer.encode_beginning("--prompt", prompt.as_deref().unwrap_or_default())?,
    };
    if beginning.is_empty() {
        return Err(bad("--prompt", "is empty: give the text to continue"));
    }
    let most = if args.context.is_some() { config.context } else { weights.config().context };
    if beginning.len() >= most {
        let place = if args.chat.is_some() { "--chat" } else { "--prompt" };
        let reason = format!("has {} tokens, which leave none of a context of {most} for an answer", beginning.len());
        return Err(bad(place, reason));
    }
    let tokens = args.tokens.min(most - beginning.len());
    config.context = beginning.len() + tokens;
    let device = Device::open(args.device)?;
    let text = Text { args, device: &device, config, beginning, tokens, stops: &files.stops };
    let tokens = match args.precision {
        StoredAs::F32 => text.write::<f32>(&mut weights)?,
        StoredAs::Bf16 => text.write::<bf16>(&mut weights)?,
    };
    Ok(files.tokenizer.decode(&tokens))
}

/// A text to be written.
struct Text<'t> {
    args: &'t Args,
    device: &'t Device,
    config: ModelConfig,
    /// The tokens of the prompt or the chat.
    beginning: Vec<u32>,
    /// The most new tokens.
    tokens: usize,
    /// The tokens that end the text.
    stops: &'t [u32],
}

impl Text<'_> {
    /// Loads the weights, if there is memory for them, and writes the text.
    fn write<S: Activation>(&self, weights: &mut WeightFiles) -> Outcome<Vec<u32>> {
        let Args { temperature, top_k, top_p, seed, ref adapter, merge, .. } = *self.args;
        let sampler = TokenSampler::new(TokenSamplerConfig { temperature, top_k, top_p }, seed)?;
        let lora = adapter.as_deref().map(|folder| Lora::read(folder).map_err(weights::refused)).transpose()?;
        let folder = adapter.as_ref().unwrap_or(&self.args.weights);
        let (model, spec) = self.model::<S>(lora.as_ref()).map_err(|error| bad(folder.display(), error))?;
        let empty = |device: &Device| {
            let (model, spec) = self.model::<S>(lora.as_ref())?;
            Ok((model, parameters::<S>(device, &spec)?))
        };
        let steps = sample::needed_bytes(self.device, empty, &self.beginning, self.tokens, &sampler)?;
        let advice = "give fewer --tokens, a smaller --context, or --precision bf16";
        RunMemory::of_text(&spec, steps, is_bf16::<S>()).check(self.device, advice)?;

        let mut parameters = parameters::<S>(self.device, &spec)?;
        weights.load(&mut parameters).map_err(weights::refused)?;
        let Gpt { mut layers, .. } = model;
        if let Some((lora, folder)) = lora.as_ref().zip(adapter.as_ref()) {
            lora.load(folder, layers.config(), &mut parameters).map_err(weights::refused)?;
            if merge {
                layers = layers.merge(&mut parameters)?;
            }
        }
        let model = Gpt::<S>::of(layers, Mode::default());
        Ok(sample::write(self.device, &model, &parameters, &self.beginning, (self.tokens, self.stops), &sampler)?)
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
}

fn is_bf16<S: Element>() -> bool {
    S::NAME == bf16::NAME
}

/// Allocates the parameters, with what products of this type read.
fn parameters<S: Element>(device: &Device, spec: &ParameterSpec) -> Result<Parameters> {
    let parameters = Parameters::new(device, spec, 0)?;
    if is_bf16::<S>() { parameters.with_bf16_copy() } else { Ok(parameters) }
}
