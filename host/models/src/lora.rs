//! Adapters of low rank (Hu et al., "LoRA", 2021), in the files of PEFT.
//!
//! [`Lora`] is what an `adapter_config.json` states. [`Transformer::with_lora`] adds the adapters
//! to a model. [`Lora::load`] and [`Lora::write`] map `adapter_model.safetensors` to their
//! parameters and back.
//!
//! Invariant: a setting that this crate does not know is an error that names its key and its
//! value. A file gives every weight of every adapter, and nothing else; otherwise nothing changes.

mod config;
mod plan;

use crate::config::ModelConfig;
use crate::weights::{self, Parts};
use std::fs;
use std::path::Path;
use stepscope_core::{Error, FileKind, Parameters, PlainFile, Result, replace_file};
use stepscope_train::StateDict;

pub(crate) use plan::{AdaptedLayer, PlannedPart};

/// The file of the settings.
const CONFIG: &str = "adapter_config.json";
/// The file of the weights.
const WEIGHTS: &str = "adapter_model.safetensors";
/// The largest `adapter_config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The linear layers that have adapters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// All linear layers but the head, as PEFT's `all-linear`.
    AllLinear,
    /// The layers whose name in the model's file is one of these, or ends with one of them after a
    /// dot, such as `q_proj`.
    Names(Vec<String>),
}

/// The settings of adapters, as PEFT's `LoraConfig`.
///
/// ```
/// use stepscope::models::Lora;
///
/// let json = r#"{
///     "peft_type": "LORA", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "use_rslora": true,
///     "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"
/// }"#;
/// let lora = Lora::from_json(json.as_bytes())?;
/// assert_eq!((lora.rank, lora.scale(lora.rank, lora.alpha)), (16, 8.0));
/// let unknown = json.replace("\"use_rslora\"", "\"use_dora\"");
/// let error = Lora::from_json(unknown.as_bytes()).unwrap_err();
/// assert_eq!(error, "`use_dora`: expected false, got true");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// The rank of each adapter.
    pub rank: usize,
    /// The number that is divided by the rank to scale an adapter's output.
    pub alpha: f64,
    /// The probability with which dropout zeroes an element of an adapter's input.
    pub dropout: f32,
    /// True to divide `alpha` by the root of the rank (Kalajdzievski, "rsLoRA", 2023).
    pub rs_lora: bool,
    /// The layers that have adapters.
    pub targets: Targets,
    /// Exceptions from `targets`: modules without an adapter, matched like [`Targets::Names`].
    pub excluded: Vec<String>,
    /// The modules that are trained as a whole, such as `embed_tokens` and `lm_head`, matched like
    /// [`Targets::Names`].
    pub modules_to_save: Vec<String>,
    /// The ranks of layers that differ from `rank`, by the end of their names.
    pub rank_pattern: Vec<(String, usize)>,
    /// The alphas of layers that differ from `alpha`, by the end of their names.
    pub alpha_pattern: Vec<(String, f64)>,
    /// The name or folder of the base model, which is written to `adapter_config.json`.
    pub base_model: Option<String>,
}

impl Lora {
    /// Makes the settings of adapters for all linear layers but the head, without dropout.
    pub fn new(rank: usize, alpha: f64) -> Self {
        Self {
            rank,
            alpha,
            dropout: 0.0,
            rs_lora: false,
            targets: Targets::AllLinear,
            excluded: Vec::new(),
            modules_to_save: Vec::new(),
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            base_model: None,
        }
    }

    /// Returns the factor of an adapter's output.
    pub fn scale(&self, rank: usize, alpha: f64) -> f32 {
        let divisor = if self.rs_lora { (rank as f64).sqrt() } else { rank as f64 };
        (alpha / divisor) as f32
    }

    /// Reads the `adapter_config.json` of a folder.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, or states something that is not supported.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let path = folder.as_ref().join(CONFIG);
        let bytes = PlainFile::read_whole(&path, MAX_CONFIG_BYTES).map_err(|reason| Error::file(&path, reason))?;
        Self::from_json(&bytes).map_err(|reason| match FileKind::of(&bytes) {
            Some(kind) if kind != FileKind::Json => Error::file(&path, kind.refusal("an adapter's settings in JSON")),
            _ => Error::file(&path, reason),
        })
    }

    /// Overwrites the parameters of the adapters, and those of the modules to save, with the
    /// weights of a folder's `adapter_model.safetensors`. Files of F32, BF16 and F16 become f32
    /// exactly.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, or does not have exactly the tensors of these
    /// adapters. [`Error::Misuse`] if the parameters are not those of
    /// [`Transformer::with_lora`](crate::Transformer::with_lora) with these settings.
    pub fn load(&self, folder: impl AsRef<Path>, config: &ModelConfig, parameters: &mut Parameters) -> Result<()> {
        let path = folder.as_ref().join(WEIGHTS);
        let tensors = self.plan(config)?.tensors;
        let mut found = StateDict::read(&path)?;
        let values = weights::values_of(&tensors, parameters.layout(), |tensor| {
            let Some((shape, theirs)) = found.remove(&tensor.name) else {
                let reason =
                    format!("has no `{}` {:?}, which the adapter's settings require", tensor.name, tensor.shape);
                return Err(Error::file(&path, reason));
            };
            if shape != tensor.shape {
                let reason = format!("`{}`: expected {:?}, got {shape:?}", tensor.name, tensor.shape);
                return Err(Error::file(&path, reason));
            }
            Ok(theirs)
        })?;
        if let Some((more, ..)) = found.iter().next() {
            return Err(Error::file(&path, format!("has `{more}`, which is not a weight of these adapters")));
        }
        values.into_iter().try_for_each(|(parameter, values)| parameters.write(parameter, &values))
    }

    /// Writes a folder that PEFT loads: `adapter_config.json` and `adapter_model.safetensors`, in
    /// F32. The folder is created if it is missing.
    ///
    /// # Errors
    /// [`Error::File`] when a file cannot be written. [`Error::Misuse`] if the parameters are not
    /// those of [`Transformer::with_lora`](crate::Transformer::with_lora) with these settings.
    pub fn write(&self, folder: impl AsRef<Path>, config: &ModelConfig, parameters: &Parameters) -> Result<()> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(|reason| Error::file(folder, reason))?;
        self.tensors(config, parameters)?.save(folder.join(WEIGHTS))?;
        replace_file(folder.join(CONFIG), self.to_json(config)?.as_bytes())
    }

    /// Converts the adapters, and the modules to save, to the tensors of PEFT's file.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the parameters are not those of
    /// [`Transformer::with_lora`](crate::Transformer::with_lora) with these settings.
    pub fn tensors(&self, config: &ModelConfig, parameters: &Parameters) -> Result<StateDict> {
        let tensors = self.plan(config)?.tensors;
        weights::to_tensors(&tensors, &mut Parts::of(parameters), |tensor| tensor.added)
    }

    /// Converts the gradients of the adapters, and of the modules to save, like
    /// [`Lora::tensors`].
    pub fn gradients(&self, config: &ModelConfig, gradients: &stepscope_core::Gradients) -> Result<StateDict> {
        let tensors = self.plan(config)?.tensors;
        weights::to_tensors(&tensors, &mut Parts::of_gradients(gradients), |_| 0.0)
    }
}
