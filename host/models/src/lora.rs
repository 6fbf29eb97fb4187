//! Adapters of low rank (Hu et al., "LoRA", 2021), in the files of PEFT.
//!
//! [`Lora`] is what an `adapter_config.json` states. [`Transformer::with_lora`] adds the adapters
//! to a model. [`Lora::load`] and [`Lora::write`] map `adapter_model.safetensors` to their
//! parameters and back.
//!
//! Invariant: a setting that could change what an adapter computes, and that this crate does not
//! know, is an error that names its key and its value. A file gives every weight of every adapter,
//! and otherwise only weights of the model; else nothing changes.

mod config;
mod plan;
mod targets;

use crate::config::ModelConfig;
use crate::names::FileTensor;
use crate::weights::{self, Parts};
use cuda_std::float_mode;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use stepscope_core::{Error, FileKind, Parameters, PlainFile, Result, replace_file};
use stepscope_train::{StateDict, TensorFiles};

pub(crate) use plan::{AdaptedExperts, AdaptedLayer, PlannedPart};

/// The file of the settings.
const CONFIG: &str = "adapter_config.json";
/// The file of the weights.
const WEIGHTS: &str = "adapter_model.safetensors";
/// The largest `adapter_config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The linear layers that have adapters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// All linear layers but the head, as PEFT's `all-linear`, and but the experts and the router
    /// of a mixture.
    AllLinear,
    /// The layers whose name in the model's file is one of these, or ends with one of them after a
    /// dot, such as `q_proj`.
    Names(Vec<String>),
    /// The layers whose whole name in the model's file matches this regular expression.
    Pattern(String),
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
/// assert!(error.starts_with("`use_dora`: expected no such setting"), "{error}");
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
    /// Exceptions from `targets`: modules without an adapter.
    pub excluded: Targets,
    /// The numbers of the layers that have adapters, if not all have. Only [`Targets::Names`] are
    /// restricted.
    pub layers: Option<Vec<usize>>,
    /// The names of the lists that `layers` counts, such as `layers`, as regular expressions. All
    /// lists if there are none.
    pub layers_pattern: Vec<String>,
    /// The modules that are trained as a whole, such as `embed_tokens` and `lm_head`, matched like
    /// [`Targets::Names`].
    pub modules_to_save: Vec<String>,
    /// The ranks of layers that differ from `rank`, by the end of their names, as regular
    /// expressions.
    pub rank_pattern: Vec<(String, usize)>,
    /// The alphas of layers that differ from `alpha`, by the end of their names, as regular
    /// expressions.
    pub alpha_pattern: Vec<(String, f64)>,
    /// The weights of the model that stand in the adapter's file, such as a token table that PEFT
    /// has saved with it. They replace those of the model, and are not trained.
    pub base_weights: Vec<String>,
    /// The name or folder of the base model, which is written to `adapter_config.json`.
    pub base_model: Option<String>,
}

impl Lora {
    /// Makes the settings of adapters for [`Targets::AllLinear`], without dropout.
    pub fn new(rank: usize, alpha: f64) -> Self {
        Self {
            rank,
            alpha,
            dropout: 0.0,
            rs_lora: false,
            targets: Targets::AllLinear,
            excluded: Targets::Names(Vec::new()),
            layers: None,
            layers_pattern: Vec::new(),
            modules_to_save: Vec::new(),
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            base_weights: Vec::new(),
            base_model: None,
        }
    }

    /// Returns the factor of an adapter's output.
    pub fn scale(&self, rank: usize, alpha: f64) -> f32 {
        float_mode::in_default(|| {
            let divisor = if self.rs_lora { (rank as f64).sqrt() } else { rank as f64 };
            (alpha / divisor) as f32
        })
    }

    /// Reads the `adapter_config.json` of a folder, and the names in its
    /// `adapter_model.safetensors`.
    ///
    /// # Errors
    /// [`Error::File`] if a file cannot be read, or states something that is not supported.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join(CONFIG);
        let bytes = PlainFile::read_whole(&path, MAX_CONFIG_BYTES).map_err(|reason| Error::file(&path, reason))?;
        let lora = Self::from_json(&bytes).map_err(|reason| match FileKind::of(&bytes) {
            Some(kind) if kind != FileKind::Json => Error::file(&path, kind.refusal("an adapter's settings in JSON")),
            _ => Error::file(&path, reason),
        })?;
        let is_saved = |name: &String| {
            let module = name.rsplit_once('.').map_or("", |(module, _)| module);
            name.contains("lora_") || lora.modules_to_save.iter().any(|saved| targets::ends_with(module, saved))
        };
        let path = folder.join(WEIGHTS);
        if !path.exists() && folder.join("adapter_model.bin").exists() {
            let reason =
                "is missing: convert adapter_model.bin to safetensors, by loading and saving the adapter in PEFT";
            return Err(Error::file(path, reason));
        }
        let files = TensorFiles::open_file(path, |_| false)?;
        let names = files.names().map(|name| plain(name).trim_start_matches(plan::PREFIX).to_owned());
        Ok(Self { base_weights: names.filter(|name| !is_saved(name)).collect(), ..lora })
    }

    /// Overwrites the parameters of the adapters, those of the modules to save, and those of
    /// [`Lora::base_weights`], with the weights of a folder's `adapter_model.safetensors`. Files of
    /// F32, BF16 and F16 become f32 exactly. Adapters of the token table and of the head are added
    /// to the weights, which must have been loaded before.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, or does not have exactly the tensors of these
    /// adapters. [`Error::Misuse`] if the parameters are not those of
    /// [`Transformer::with_lora`](crate::Transformer::with_lora) with these settings.
    pub fn load(&self, folder: impl AsRef<Path>, config: &ModelConfig, parameters: &mut Parameters) -> Result<()> {
        let path = folder.as_ref().join(WEIGHTS);
        let plan = self.plan(config)?;
        let files = TensorFiles::open_file(&path, |_| false)?;
        let mut found: BTreeMap<String, &str> = files.names().map(|name| (plain(name), name)).collect();
        let mut read = |name: &str, shape: &[usize]| {
            let Some(theirs) = found.remove(name) else {
                let reason = format!("has no `{name}` {shape:?}, which the adapter's settings require");
                return Err(Error::file(&path, reason));
            };
            match files.get(theirs) {
                Some((_, got)) if got != shape => {
                    Err(Error::file(&path, format!("`{name}`: expected {shape:?}, got {got:?}")))
                }
                _ => files.read::<f32>(theirs),
            }
        };
        let tensors: Vec<FileTensor> = plan.tensors.into_iter().chain(plan.base).collect();
        let mut values = weights::values_of(&tensors, parameters.spec(), |tensor| read(&tensor.name, &tensor.shape))?;
        for table in &plan.tables {
            let [a, b] = table.tensors();
            let (a, b) = (read(&a.0, &a.1)?, read(&b.0, &b.1)?);
            let (parameter, _) = weights::named(parameters.spec(), &table.parameter)?;
            let place = values.iter().position(|(other, _)| *other == parameter);
            let (_, mut sums) = match place {
                Some(place) => values.swap_remove(place),
                None => (parameter, parameters.read(parameter)?),
            };
            float_mode::in_default(|| table.add(&a, &b, &mut sums));
            values.push((parameter, sums));
        }
        if let Some(head) = &plan.tied_head {
            let (parameter, entry) = weights::named(parameters.spec(), "tokens.weight")?;
            let table = match values.iter().find(|(other, _)| *other == parameter) {
                Some((_, table)) => table.clone(),
                None => parameters.read(parameter)?,
            };
            if read(head, entry.shape().extents())? != table {
                let reason =
                    format!("has a `{head}` that differs from the token table, but the model's head is that table");
                return Err(Error::file(path, reason));
            }
        }
        if let Some((_, more)) = found.first_key_value() {
            return Err(Error::file(path, format!("has `{more}`, which is not a weight of these adapters")));
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

    /// Converts the adapters, the modules to save and [`Lora::base_weights`] to the tensors of
    /// PEFT's file.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the parameters are not those of
    /// [`Transformer::with_lora`](crate::Transformer::with_lora) with these settings, or for
    /// adapters of the token table or the head, which were added to the weights.
    pub fn tensors(&self, config: &ModelConfig, parameters: &Parameters) -> Result<StateDict> {
        let plan = self.plan(config)?;
        plan.check_trainable()?;
        let tensors: Vec<FileTensor> = plan.tensors.into_iter().chain(plan.base).collect();
        weights::to_tensors(&tensors, &mut Parts::of(parameters), |tensor| tensor.added)
    }

    /// Converts the gradients of the adapters, and of the modules to save, like
    /// [`Lora::tensors`].
    pub fn gradients(&self, config: &ModelConfig, gradients: &stepscope_core::Gradients) -> Result<StateDict> {
        let tensors = self.plan(config)?.tensors;
        weights::to_tensors(&tensors, &mut Parts::of_gradients(gradients), |_| 0.0)
    }
}

/// Returns the name of a tensor without the parts that PEFT may write into it: the name of the
/// adapter, and those of the layers around the model's own.
fn plain(name: &str) -> String {
    let name = name.strip_suffix(".default").unwrap_or(name);
    [".default.", ".base_layer.", ".modules_to_save."]
        .iter()
        .fold(name.to_owned(), |name, part| name.replace(part, "."))
}
