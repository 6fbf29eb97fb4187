//! A model's weights on the host, read from a folder of transformers and written to one.
//!
//! Invariant: a folder gives every weight, each finite and of the shape that `config.json`
//! requires, and nothing else; otherwise it is an error, and nothing changes.

use crate::config::ModelConfig;
use crate::names::{self, FileTensor};
use crate::transformer::Transformer;
use cuda_std::float_mode;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use stepscope_core::{
    Error, Gradients, HostMemory, Parameter, ParameterEntry, ParameterSpec, Parameters, Result, Shape, replace_file,
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
        let values = values_of(&names::tensors(&config), &spec, |tensor| {
            let Some((shape, theirs)) = found.remove(&tensor.name).or_else(|| found.remove(tensor.bare_name())) else {
                let reason = format!("has no `{}` {:?}, which config.json requires", tensor.name, tensor.shape);
                return Err(Error::file(folder, reason));
            };
            if shape != tensor.shape {
                let reason = format!("`{}`: config.json requires {:?}, got {shape:?}", tensor.name, tensor.shape);
                return Err(Error::file(folder, reason));
            }
            Ok(theirs)
        })?;
        let name = |(parameter, values)| Ok((spec.entry(parameter)?.name().to_owned(), values));
        let values: HashMap<String, Vec<f32>> = values.into_iter().map(name).collect::<Result<_>>()?;
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

    /// Overwrites all parameters of the model with these weights, trained and frozen, but not those
    /// of adapters.
    ///
    /// # Errors
    /// Returns an error if the upload fails, or [`Error::Misuse`] for parameters of another model.
    pub fn load(&self, parameters: &mut Parameters) -> Result<()> {
        let spec = parameters.spec().clone();
        let ours = |(_, entry): &(_, &ParameterEntry)| self.values.contains_key(entry.name());
        let mut loaded = 0;
        for (parameter, entry) in spec.iter().filter(ours) {
            parameters.write(parameter, &self.values[entry.name()])?;
            loaded += 1;
        }
        if loaded == self.values.len() {
            return Ok(());
        }
        let expected = format!("the {} parameters of this model", self.values.len());
        Err(Error::misuse("load", expected, format!("{loaded} of them")))
    }

    /// Writes a folder that transformers loads: `config.json`, and the weights in files of at most
    /// `max_shard_size` bytes. They are rounded to the type that `config.json` states, which is F32
    /// if it states none. The folder is created if it is missing. The host holds one tensor at a
    /// time, and the parameters of the next.
    ///
    /// # Errors
    /// [`Error::File`] when a file cannot be written, or for a weight that is not finite.
    pub fn write(
        folder: impl AsRef<Path>,
        config: &ModelConfig,
        parameters: &Parameters,
        max_shard_size: Option<u64>,
    ) -> Result<()> {
        write_folder(folder.as_ref(), config, Parts::of(parameters), max_shard_size)
    }

    /// Converts a model's weights to the tensors of a file, without those of adapters.
    ///
    /// # Errors
    /// Returns an error only if the device cannot be read.
    pub fn tensors(config: &ModelConfig, parameters: &Parameters) -> Result<StateDict> {
        to_tensors(&names::tensors(config), &mut Parts::of(parameters), |tensor| tensor.added)
    }

    /// Converts a model's weights to the tensors of a file like [`Weights::tensors`], with each
    /// adapter merged into its layer: `w + scale A B`, in f32.
    ///
    /// # Errors
    /// Returns an error only if the device cannot be read.
    pub fn merged(model: &Transformer, parameters: &Parameters) -> Result<StateDict> {
        let mut parts = Parts::merged(model, parameters);
        to_tensors(&names::tensors(model.config()), &mut parts, |tensor| tensor.added)
    }

    /// Writes a folder like [`Weights::write`], with each adapter merged into its layer.
    ///
    /// # Errors
    /// [`Error::File`] when a file cannot be written.
    pub fn write_merged(
        folder: impl AsRef<Path>,
        model: &Transformer,
        parameters: &Parameters,
        max_shard_size: Option<u64>,
    ) -> Result<()> {
        write_folder(folder.as_ref(), model.config(), Parts::merged(model, parameters), max_shard_size)
    }

    /// Converts the gradients of trained parameters to the tensors of a file, each under the name
    /// and in the shape of its weight. Tensors with frozen elements are left out.
    ///
    /// # Errors
    /// Returns an error only if the device cannot be read.
    pub fn gradients(config: &ModelConfig, gradients: &Gradients) -> Result<StateDict> {
        let spec = gradients.spec();
        let trained: HashSet<&str> = spec.entries().iter().map(ParameterEntry::name).collect();
        let is_trained = |tensor: &FileTensor| tensor.parts.iter().all(|part| trained.contains(&*part.parameter));
        let tensors: Vec<FileTensor> = names::tensors(config).into_iter().filter(is_trained).collect();
        to_tensors(&tensors, &mut Parts::of_gradients(gradients), |_| 0.0)
    }
}

/// Writes `config.json` and a model's tensors to a folder.
fn write_folder(folder: &Path, config: &ModelConfig, mut parts: Parts<'_>, max_shard_size: Option<u64>) -> Result<()> {
    fs::create_dir_all(folder).map_err(|reason| Error::file(folder, reason))?;
    let (mut tensors, columns) = (names::tensors(config), columns(parts.spec));
    tensors.sort_by(|one, other| one.name.cmp(&other.name));
    let described: Vec<NewTensor> = tensors.iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect();
    save_tensors(folder, &described, config.stored(), max_shard_size, |number| {
        let added = tensors[number].added;
        Ok(parts.tensor(&tensors, number, &columns, added)?.into())
    })?;
    replace_file(folder.join("config.json"), config.to_json(config.stored_name()).as_bytes())
}

/// The values of parameters by their names, read one after another.
pub(crate) struct Parts<'p> {
    spec: &'p ParameterSpec,
    read: Box<dyn Fn(Parameter) -> Result<Vec<f32>> + 'p>,
    /// The adapters that are merged into the values.
    adapters: Option<(&'p Transformer, &'p Parameters)>,
    /// The parameters whose values several tensors need, or may need.
    kept: HashMap<String, Vec<f32>>,
}

impl<'p> Parts<'p> {
    /// Reads weights.
    pub(crate) fn of(parameters: &'p Parameters) -> Self {
        let read = Box::new(|parameter| parameters.read(parameter));
        Self { spec: parameters.spec(), read, adapters: None, kept: HashMap::new() }
    }

    /// Reads gradients.
    pub(crate) fn of_gradients(gradients: &'p Gradients) -> Self {
        let read = Box::new(|parameter| gradients.read(parameter));
        Self { spec: gradients.spec(), read, adapters: None, kept: HashMap::new() }
    }

    /// Reads weights, with each adapter of the model merged into its layer.
    fn merged(model: &'p Transformer, parameters: &'p Parameters) -> Self {
        Self { adapters: Some((model, parameters)), ..Self::of(parameters) }
    }

    /// Returns the values of one of these tensors, minus `added`. Keeps the parameters that the
    /// next tensors need.
    fn tensor(
        &mut self,
        tensors: &[FileTensor],
        number: usize,
        columns: impl Fn(&str) -> usize,
        added: f32,
    ) -> Result<Vec<f32>> {
        let tensor = &tensors[number];
        // q, k and v of one parameter, each with a bias, are six tensors. So are the A and B of an
        // expert's three matrices, after which those of the next expert follow.
        let next = tensors.iter().skip(number + 1).take(6).flat_map(|tensor| &tensor.parts);
        let needed: HashSet<&str> = next.map(|part| &*part.parameter).collect();
        if let [part] = &tensor.parts[..]
            && tensor.is_stored_as(columns(&part.parameter))
            && !needed.contains(&*part.parameter)
        {
            self.get(&part.parameter)?;
            return Ok(self.kept.remove(&part.parameter).expect("it was read above"));
        }
        let mut values = vec![0.0; tensor.shape.iter().product()];
        for (name, places) in tensor.places(columns) {
            let ours = self.get(name)?;
            float_mode::in_default(|| places.for_each(|at, there| values[there] = ours[at] - added));
        }
        self.kept.retain(|name, _| needed.contains(&**name));
        Ok(values)
    }

    /// Returns a parameter's values.
    fn get(&mut self, name: &str) -> Result<&[f32]> {
        if !self.kept.contains_key(name) {
            let (parameter, entry) = named(self.spec, name)?;
            let mut values = (self.read)(parameter)?;
            if let Some((model, parameters)) = self.adapters {
                let products = model.low_rank_products(name, self.spec)?;
                if !products.is_empty() {
                    float_mode::in_default(|| merge(&mut values, entry.shape(), &products, parameters))?;
                }
            }
            self.kept.insert(name.into(), values);
        }
        Ok(&self.kept[name])
    }
}

/// A product `scale A B` that is added to neighboring outputs of a matrix.
pub(crate) struct LowRankProduct {
    /// The parameter that holds A, and its first column.
    pub(crate) a: (Parameter, usize),
    /// The parameter that holds B, and its first column.
    pub(crate) b: (Parameter, usize),
    pub(crate) rank: usize,
    pub(crate) outputs: usize,
    /// The first output of the matrix.
    pub(crate) first: usize,
    pub(crate) scale: f32,
}

/// Adds products to a matrix `[inputs, outputs]`.
pub(crate) fn merge(
    weights: &mut [f32],
    shape: Shape,
    products: &[LowRankProduct],
    parameters: &Parameters,
) -> Result<()> {
    let &[_, all] = shape.extents() else {
        return Err(Error::misuse("merge", "a matrix [inputs, outputs]", shape.to_string()));
    };
    let columns = |parameter| Ok::<_, Error>(parameters.spec().entry(parameter)?.shape().as_rows()[1]);
    // Most products share A, B or both with the product before.
    let mut read: [Option<(Parameter, Vec<f32>)>; 2] = [None, None];
    for &LowRankProduct { a, b, rank, outputs, first, scale } in products {
        for (place, parameter) in read.iter_mut().zip([a.0, b.0]) {
            if place.as_ref().is_none_or(|(other, _)| *other != parameter) {
                *place = Some((parameter, parameters.read(parameter)?));
            }
        }
        let [Some((_, of_a)), Some((_, of_b))] = &read else { unreachable!("both were read above") };
        let (ranks, of_outputs) = (columns(a.0)?, columns(b.0)?);
        let mut sums = vec![0.0; outputs];
        for (row, values) in weights.chunks_exact_mut(all).zip(of_a.chunks_exact(ranks)) {
            sums.fill(0.0);
            for (factor, row) in values[a.1..a.1 + rank].iter().zip(of_b.chunks_exact(of_outputs)) {
                sums.iter_mut().zip(&row[b.1..b.1 + outputs]).for_each(|(sum, b)| *sum += factor * b);
            }
            let row = &mut row[first..first + outputs];
            row.iter_mut().zip(&sums).for_each(|(weight, sum)| *weight += scale * sum);
        }
    }
    Ok(())
}

/// Returns the parameter with this name.
pub(crate) fn named<'l>(spec: &'l ParameterSpec, name: &str) -> Result<(Parameter, &'l ParameterEntry)> {
    let found = spec.iter().find(|(_, entry)| entry.name() == name);
    found.ok_or_else(|| Error::misuse("weights", format!("a model with the parameter `{name}`"), "a model without it"))
}

/// Converts parameters to tensors of a file, minus what the file's tensors lack.
pub(crate) fn to_tensors(
    tensors: &[FileTensor],
    parts: &mut Parts<'_>,
    added: impl Fn(&FileTensor) -> f32,
) -> Result<StateDict> {
    let (columns, mut all) = (columns(parts.spec), StateDict::default());
    for (number, tensor) in tensors.iter().enumerate() {
        let values = parts.tensor(tensors, number, &columns, added(tensor))?;
        all.insert(tensor.name.clone(), tensor.shape.clone(), values)?;
    }
    Ok(all)
}

/// Converts tensors of a file, which `read` returns, to the values of their parameters.
pub(crate) fn values_of(
    tensors: &[FileTensor],
    spec: &ParameterSpec,
    mut read: impl FnMut(&FileTensor) -> Result<Vec<f32>>,
) -> Result<Vec<(Parameter, Vec<f32>)>> {
    let (columns, mut values) = (columns(spec), HashMap::new());
    for tensor in tensors {
        for part in &tensor.parts {
            if !values.contains_key(&part.parameter) {
                let (parameter, entry) = named(spec, &part.parameter)?;
                values.insert(part.parameter.clone(), (parameter, vec![0.0; entry.shape().elements()]));
            }
        }
        let theirs = read(tensor)?;
        for (name, places) in tensor.places(&columns) {
            let (_, ours) = values.get_mut(name).expect("the values were inserted above");
            float_mode::in_default(|| places.for_each(|at, there| ours[at] = theirs[there] + tensor.added));
        }
    }
    Ok(values.into_values().collect())
}

/// Returns a function from a parameter's name to its outputs.
pub(crate) fn columns(spec: &ParameterSpec) -> impl Fn(&str) -> usize + use<> {
    let last = |(_, entry): (_, &ParameterEntry)| {
        (entry.name().to_owned(), *entry.shape().extents().last().expect("a shape has an extent"))
    };
    let columns: HashMap<String, usize> = spec.iter().map(last).collect();
    move |name| columns.get(name).copied().unwrap_or(0)
}

/// Returns an error if the host cannot hold the weights twice in f32, as read and as laid out. Runs
/// before any are allocated.
fn check_memory(folder: &Path, config: &ModelConfig) -> Result<()> {
    // `ModelConfig` bounds the weights, so that the sum does not overflow.
    let weights: u128 =
        names::tensors(config).iter().map(|tensor| tensor.shape.iter().product::<usize>() as u128).sum();
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
