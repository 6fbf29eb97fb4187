//! Continues a text, or answers a message, with the weights of a folder of transformers.
//!
//! ```text
//! stepscope generate --weights DIR --prompt "Once upon a time"
//! stepscope generate --weights DIR --chat "What is 2 + 2?"  # by the model's chat template
//! stepscope generate --weights DIR --adapter DIR --chat "What is 2 + 2?"
//! ```
//! Exit code 1: the device failed. 2: the command line is wrong, or a file of the folder is.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use stepscope::data::{TokenSampler, TokenSamplerConfig};
use stepscope::models::{Lora, ModelConfig, Transformer, WeightFiles};
use stepscope::parameters::FrozenType;
use stepscope::{Device, DeviceKind, Parameters};

use crate::program::exit;
use crate::program::log::{self, Log};
use crate::run::folder::ModelFolder;
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

    /// The most new tokens; fewer if a token that ends a text comes first
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = up_to(1 << 20))]
    tokens: usize,

    /// Tokens for which caches of keys and values are allocated [default: 1024, or the model's if
    /// they are fewer]
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
    let (mut weights, config) = weights::open(folder, args.context)?;
    let name = match &args.tokenizer {
        Some(name) => name.clone(),
        None => folder.join("tokenizer.json").display().to_string(),
    };
    let files = ModelFolder::with_tokenizer(folder, Tokenizer::open(&name)?)?;
    let beginning = match (&args.chat, &args.prompt) {
        (Some(message), _) => files.chat("--chat", message)?,
        (None, prompt) => files.tokenizer.encode_beginning("--prompt", prompt.as_deref().unwrap_or_default())?,
    };
    if beginning.is_empty() {
        return Err(bad("--prompt", "is empty: give the text to continue"));
    }
    let device = Device::open(args.device)?;
    let (model, parameters) = loaded(args, &device, &mut weights, config)?;
    let config = TokenSamplerConfig { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p };
    let sampler = TokenSampler::new(config, args.seed)?;
    let tokens = sample::write(&device, &model, &parameters, &beginning, (args.tokens, &files.stops), &sampler)?;
    Ok(files.tokenizer.decode(&tokens))
}

/// Builds the model and loads its weights, with the adapter if there is one.
fn loaded(
    args: &Args,
    device: &Device,
    weights: &mut WeightFiles,
    config: ModelConfig,
) -> Outcome<(Gpt<f32>, Parameters)> {
    let Some(folder) = &args.adapter else {
        let (model, spec) = Gpt::<f32>::new(config, Mode::default())?;
        let mut parameters = Parameters::new(device, &spec, 0)?;
        weights.load(&mut parameters).map_err(weights::refused)?;
        return Ok((model, parameters));
    };
    let lora = Lora::read(folder).map_err(weights::refused)?;
    let layers = Transformer::with_lora(config, &lora, |_| FrozenType::F32);
    let (layers, spec) = layers.map_err(|error| bad(folder.display(), error))?;
    let mut parameters = Parameters::new(device, &spec, 0)?;
    weights.load(&mut parameters).map_err(weights::refused)?;
    lora.load(folder, layers.config(), &mut parameters).map_err(weights::refused)?;
    let layers = if args.merge { layers.merge(&mut parameters)? } else { layers };
    Ok((Gpt::of(layers, Mode::default()), parameters))
}
