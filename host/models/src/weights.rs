//! A model's weights on the host, read from a folder of transformers and written to one.
//!
//! Invariant: a folder gives every weight, each finite and of the shape that `config.json`
//! requires, and nothing else; otherwise it is an error, and nothing changes.

use crate::config::ModelConfig;
use crate::names::{self, FileTensor};
use crate::transformer::Transformer;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use stepscope_core::{
    Error, Gradients, HostMemory, ParameterEntry, ParameterSpec, Parameters, Result, Transfer, replace_file,
};
use stepscope_train::{NewTensor, StateDict, save_tensors};

/// The weights of a model, by the names and in the layout of its parameters.
#[derive(Debug)]
pub struct Weights {
    /// The model.
    pub config: ModelConfig,
    values: HashMap<String, Vec<f32>>,
}

impl Weights {
    /// Reads a folder with `config.json` and the weights, in one safetensors file or in several
    /// with an index. Files of F32, BF16 and F16 become f32 exactly.
    ///
    /// # Errors
    /// [`Error::File`] if a file cannot be read, `config.json` states something that is not
    /// supported, the weights do not fit the host's memory, or the folder does not have exactly the
    /// tensors that `config.json` requires. A tied head that differs from the token table is an
    /// error too.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let config = ModelConfig::read(folder)?;
        check_memory(folder, &config)?;
        let spec = Transformer::new(config.clone())?.1;
        let mut found = StateDict::from_pretrained(folder, names::is_computed)?;
        let mut values: HashMap<String, Vec<f32>> =
            spec.entries().iter().map(|entry| (entry.name().into(), vec![0.0; entry.shape().elements()])).collect();
        let columns = columns(&spec);
        for tensor in names::tensors(&config) {
            // A model that was saved without its head has names without the first part.
            let bare = tensor.name.split_once('.').map_or("", |(_, rest)| rest);
            let Some((shape, theirs)) = found.remove(&tensor.name).or_else(|| found.remove(bare)) else {
                let reason = format!("has no `{}` {:?}, which config.json requires", tensor.name, tensor.shape);
                return Err(Error::file(folder, reason));
            };
            if shape != tensor.shape {
                let reason = format!("`{}`: config.json requires {:?}, got {shape:?}", tensor.name, tensor.shape);
                return Err(Error::file(folder, reason));
            }
            for (name, places) in tensor.places(&columns) {
                let ours = values.get_mut(name).expect("a parameter of the model");
                places.for_each(|(at, there)| ours[at] = theirs[there] + tensor.added);
            }
        }
        let head_name = names::head(config.family);
        if let Some((shape, head)) = found.remove(head_name).filter(|_| config.tied) {
            let table = &values["tokens.weight"];
            if shape != [config.vocabulary, config.width] || head != *table {
                let reason = format!(
                    "has a `{head_name}` {shape:?} that differs from the token table, but `tie_word_embeddings` in config.json makes them one: set it \
                     to false to train the head by itself, or remove the tensor"
                );
                return Err(Error::file(folder, reason));
            }
        }
        if let Some((more, ..)) = found.iter().next() {
            return Err(Error::file(folder, format!("has `{more}`, which is not a weight of this model")));
        }
        Ok(Self { config, values })
    }

    /// Limits samples to `context` tokens. A table of positions keeps its rows.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the model has fewer.
    pub fn limit_context(&mut self, context: usize) -> Result<()> {
        if context > self.config.context {
            let expected = format!("a context of at most {}", self.config.context);
            return Err(Error::misuse("Weights::limit_context", expected, context.to_string()));
        }
        self.config.context = context;
        Ok(())
    }

    /// Overwrites all parameters of the model with these weights.
    ///
    /// # Errors
    /// Returns an error if the upload fails.
    pub fn load(&self, parameters: &mut Parameters) -> Result<()> {
        let bytes = |entry: &ParameterEntry| self.values.get(entry.name()).map(|values| as_bytes(values));
        parameters.load(bytes, Transfer::new())
    }

    /// Writes a folder that transformers loads: `config.json`, and the weights in files of at most
    /// `max_shard_size` bytes. They are rounded to the type that `config.json` states, which is F32
    /// if it states none. The folder is created if it is missing. The host holds one tensor at a
    /// time.
    ///
    /// # Errors
    /// [`Error::File`] when a file cannot be written, or for a weight that is not finite.
    pub fn write(
        folder: impl AsRef<Path>,
        config: &ModelConfig,
        parameters: &Parameters,
        max_shard_size: Option<u64>,
    ) -> Result<()> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(|reason| Error::file(folder, reason))?;
        let spec = parameters.layout();
        let entries: HashMap<&str, &ParameterEntry> =
            spec.entries().iter().map(|entry| (entry.name(), entry)).collect();
        let mut tensors = names::tensors(config);
        tensors.sort_by(|one, other| one.name.cmp(&other.name));
        let described: Vec<NewTensor> =
            tensors.iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect();
        // Neighboring tensors are often parts of one parameter.
        let (columns, mut last) = (columns(spec), (String::new(), Vec::new()));
        save_tensors(folder, &described, config.stored(), max_shard_size, |number| {
            let tensor = &tensors[number];
            let mut values = vec![0.0; tensor.shape.iter().product()];
            for (name, places) in tensor.places(&columns) {
                if last.0 != name {
                    let range = entries[name].range();
                    last = (name.to_owned(), parameters.flat().read_range(range.start, range.len())?);
                }
                places.for_each(|(at, there)| values[there] = last.1[at] - tensor.added);
            }
            Ok(values.into())
        })?;
        replace_file(folder.join("config.json"), config.to_json(config.stored_name()).as_bytes())
    }

    /// Converts a model's weights to the tensors of a file.
    ///
    /// # Errors
    /// Returns an error only if the device cannot be read.
    pub fn tensors(config: &ModelConfig, parameters: &Parameters) -> Result<StateDict> {
        tensors(config, parameters.layout(), &parameters.flat().read()?, |tensor| tensor.added)
    }

    /// Converts gradients to the tensors of a file, each under the name and in the shape of its
    /// weight.
    ///
    /// # Errors
    /// Returns an error only if the device cannot be read.
    pub fn gradients(config: &ModelConfig, gradients: &Gradients) -> Result<StateDict> {
        tensors(config, gradients.layout(), &gradients.flat().read()?, |_| 0.0)
    }
}

/// Converts a flat region of parameters, and subtracts the numbers that a file's values do not
/// contain.
fn tensors(
    config: &ModelConfig,
    spec: &ParameterSpec,
    flat: &[f32],
    added: impl Fn(&FileTensor) -> f32,
) -> Result<StateDict> {
    let entries: HashMap<&str, &ParameterEntry> = spec.entries().iter().map(|entry| (entry.name(), entry)).collect();
    let (columns, mut all) = (columns(spec), StateDict::default());
    for tensor in names::tensors(config) {
        let (mut values, added) = (vec![0.0; tensor.shape.iter().product()], added(&tensor));
        for (name, places) in tensor.places(&columns) {
            let ours = &flat[entries[name].range()];
            places.for_each(|(at, there)| values[there] = ours[at] - added);
        }
        all.insert(tensor.name, tensor.shape, values)?;
    }
    Ok(all)
}

fn as_bytes(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Returns a function from a parameter's name to its outputs.
fn columns(spec: &ParameterSpec) -> impl Fn(&str) -> usize {
    let last = |entry: &ParameterEntry| (entry.name().to_owned(), *entry.shape().extents().last().expect("an extent"));
    let columns: HashMap<String, usize> = spec.entries().iter().map(last).collect();
    move |name| columns[name]
}

/// Returns an error if the host cannot hold the weights twice in f32, as read and as laid out. Runs
/// before any are allocated.
fn check_memory(folder: &Path, config: &ModelConfig) -> Result<()> {
    let product = |shape: &[usize]| shape.iter().map(|&extent| extent as u128).product::<u128>();
    let weights: u128 = names::tensors(config).iter().map(|tensor| product(&tensor.shape)).sum();
    let (bytes, available) = (2 * weights * size_of::<f32>() as u128, HostMemory::available_bytes());
    if bytes <= u128::from(available) {
        return Ok(());
    }
    let reason = format!(
        "config.json describes {weights} weights, which take {bytes} bytes of the host's memory while they are read; \
         {available} are available"
    );
    Err(Error::file(folder.join("config.json"), reason))
}
