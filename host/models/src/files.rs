//! A model's folder, loaded tensor by tensor into the parameters of a device.
//!
//! Invariant: a folder gives every weight, each finite and of the shape that `config.json`
//! requires, and nothing else; otherwise it is an error. The host holds one parameter and one
//! tensor at a time.

use crate::config::ModelConfig;
use crate::names::{self, FileTensor, TensorKind};
use crate::quantized::{self, Quantized};
use crate::weights::columns;
use cuda_std::float_mode;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use stepscope_core::internals::zeros;
use stepscope_core::{Error, FrozenType, ParameterEntry, ParameterSpec, Parameters, Result, Stored, bf16};
use stepscope_train::{FileType, TensorFiles};

/// The open files of a model: `config.json`, and the weights, of which only the headers were read.
///
/// ```no_run
/// use stepscope::models::{Lora, Transformer, WeightFiles};
/// use stepscope::{Device, DeviceKind, Parameters};
///
/// # fn main() -> stepscope::Result<()> {
/// let device = Device::open(DeviceKind::Emulated)?;
/// let mut files = WeightFiles::open("Llama-3.2-1B")?;
/// // Frozen weights keep the type of the file.
/// let (model, spec) = Transformer::with_lora(files.config().clone(), &Lora::new(16, 32.0), |entry| files.stored(entry))?;
/// let mut parameters = Parameters::new(&device, &spec, 7)?;
/// files.load(&mut parameters)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct WeightFiles {
    folder: PathBuf,
    config: ModelConfig,
    files: TensorFiles,
    /// The model's tensors, each with its name in the file. A matrix in NF4 is `[outputs, inputs]`.
    tensors: Vec<(String, FileTensor)>,
    /// The names of the matrices in NF4.
    quantized: BTreeSet<String>,
}

impl WeightFiles {
    /// Opens a folder, and checks the names, types and shapes of its tensors. Linear layers may be
    /// in NF4, as bitsandbytes saves them with double quantisation.
    ///
    /// # Errors
    /// [`Error::File`] if a file cannot be read, `config.json` states something that is not
    /// supported, or the folder does not have exactly the tensors that `config.json` requires.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let config = ModelConfig::read(folder)?;
        let files = TensorFiles::open(folder, names::is_computed)?;
        let mut more: BTreeSet<String> = files.names().map(str::to_owned).collect();
        let (mut tensors, mut quantized) = (Vec::new(), BTreeSet::new());
        for mut tensor in names::tensors(&config) {
            let names = [tensor.name.clone(), tensor.bare_name().to_owned()];
            let Some(name) = names.into_iter().find(|name| more.remove(name)) else {
                let reason = format!("has no `{}` {:?}, which config.json requires", tensor.name, tensor.shape);
                return Err(Error::file(folder, reason));
            };
            if tensor.is_matrix() && quantized::has(&files, &name) {
                if let Some(missing) = quantized::names(&name).into_iter().skip(1).find(|name| !more.remove(name)) {
                    let reason = format!("has no `{missing}`, which a matrix in NF4 with double quantisation requires");
                    return Err(Error::file(folder, reason));
                }
                (tensor.shape, tensor.transposed) = (vec![tensor.outputs(), tensor.inputs], true);
                quantized.insert(name.clone());
                tensors.push((name, tensor));
                continue;
            }
            let shape = files.get(&name).map_or(&[][..], |(_, shape)| shape);
            if shape != tensor.shape {
                let reason = format!("`{}`: config.json requires {:?}, got {shape:?}", tensor.name, tensor.shape);
                return Err(Error::file(folder, reason));
            }
            tensors.push((name, tensor));
        }
        // A tied head is compared with the token table when the weights are loaded.
        more.retain(|name| !(config.tied && name == names::head(config.family)));
        if let Some(more) = more.first() {
            return Err(Error::file(folder, format!("has `{more}`, which is not a weight of this model")));
        }
        Ok(Self { folder: folder.into(), config, files, tensors, quantized })
    }

    /// Returns the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// True if [`WeightFiles::load`] overwrites this parameter; see [`ParameterSpec::with_loaded`].
    pub fn has(&self, entry: &ParameterEntry) -> bool {
        self.tensors_of(entry).next().is_some()
    }

    /// The tensors that hold elements of a parameter, each with its name in the file.
    fn tensors_of<'e>(
        &self,
        entry: &'e ParameterEntry,
    ) -> impl Iterator<Item = &(String, FileTensor)> + Clone + use<'_, 'e> {
        self.tensors.iter().filter(|(_, tensor)| tensor.parts.iter().any(|part| part.parameter == entry.name()))
    }

    /// Returns the type in which a parameter is frozen without loss: BF16 or NF4 if the file has
    /// all its elements in it, and otherwise f32.
    pub fn stored(&self, entry: &ParameterEntry) -> FrozenType {
        let mut of_entry = self.tensors_of(entry);
        let is_bf16 =
            |(name, _): &(String, FileTensor)| self.files.get(name).is_some_and(|(kind, _)| kind == FileType::Bf16);
        if of_entry.clone().all(|(name, _)| self.quantized.contains(name)) {
            return FrozenType::Nf4;
        }
        if of_entry.all(is_bf16) { FrozenType::Bf16 } else { FrozenType::F32 }
    }

    /// True if BF16 has all elements of a parameter exactly.
    fn is_bf16(&self, entry: &ParameterEntry) -> bool {
        self.stored(entry) == FrozenType::Bf16 && self.tensors_of(entry).all(|(_, tensor)| tensor.added == 0.0)
    }

    /// Returns NF4 for the matrices of linear layers and experts, and the type of
    /// [`WeightFiles::stored`] for all other parameters, such as routers.
    pub fn quantized(&self, entry: &ParameterEntry) -> FrozenType {
        let is_quantized = |kind| matches!(kind, TensorKind::Linear | TensorKind::Expert);
        if self.tensors_of(entry).any(|(_, tensor)| is_quantized(tensor.kind)) {
            return FrozenType::Nf4;
        }
        self.stored(entry)
    }

    /// Overwrites all parameters of the model, trained and frozen, but not those of adapters.
    ///
    /// # Errors
    /// [`Error::File`] if a file cannot be read, has changed since it was opened, has a number that
    /// is not finite, or if a tied head differs from the token table. [`Error::Misuse`] for
    /// parameters of another model.
    pub fn load(&mut self, parameters: &mut Parameters) -> Result<()> {
        float_mode::in_default(|| self.load_each(parameters))
    }

    /// Overwrites the parameters one after another.
    fn load_each(&mut self, parameters: &mut Parameters) -> Result<()> {
        let spec = parameters.spec().clone();
        // The tensors of each parameter.
        let mut of_parameter: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (number, (_, tensor)) in self.tensors.iter().enumerate() {
            for part in &tensor.parts {
                let numbers = of_parameter.entry(part.parameter.clone()).or_default();
                if numbers.last() != Some(&number) {
                    numbers.push(number);
                }
            }
        }
        for (parameter, entry) in spec.iter() {
            let Some(numbers) = of_parameter.remove(entry.name()) else { continue };
            let tensors = || numbers.iter().map(|&number| &self.tensors[number]);
            // A matrix in NF4 has the order of a file of `[outputs, inputs]`.
            let in_order = entry.frozen() == Some(FrozenType::Nf4) && tensors().all(|(_, tensor)| tensor.transposed);
            if in_order && tensors().all(|(name, _)| self.quantized.contains(name)) {
                for (place, &number) in numbers.iter().enumerate() {
                    parameters.write_nf4(parameter, place, &self.read_quantized(number)?.matrix())?;
                }
            } else if in_order && tensors().all(|(name, _)| !self.quantized.contains(name)) {
                for (place, (name, _)) in tensors().enumerate() {
                    match self.files.get(name) {
                        Some((FileType::Bf16, _)) => {
                            parameters.quantise(parameter, place, &self.files.read::<bf16>(name)?)?;
                        }
                        _ => parameters.quantise(parameter, place, &self.files.read::<f32>(name)?)?,
                    }
                }
            } else if entry.frozen() == Some(FrozenType::Bf16) || entry.frozen().is_none() && self.is_bf16(entry) {
                parameters.write_as(parameter, &self.read::<bf16>(&spec, entry, &numbers)?)?;
            } else {
                parameters.write(parameter, &self.read::<f32>(&spec, entry, &numbers)?)?;
            }
        }
        if let Some((name, _)) = of_parameter.first_key_value() {
            return Err(Error::misuse("load", format!("a model with the parameter `{name}`"), "a model without it"));
        }
        self.check_tied_head()?;
        self.files.check_unchanged()
    }

    /// Reads the tensors of a parameter, one after another.
    fn read<S: Stored>(&mut self, spec: &ParameterSpec, entry: &ParameterEntry, numbers: &[usize]) -> Result<Vec<S>> {
        let columns = columns(spec);
        if let &[number] = numbers
            && let (name, tensor) = &self.tensors[number]
            && !self.quantized.contains(name)
            && tensor.is_stored_as(columns(entry.name()))
        {
            return self.files.read(name);
        }
        let mut ours = zeros(entry.shape().elements()).map_err(|reason| Error::file(&self.folder, reason))?;
        for &number in numbers {
            let theirs = match self.quantized.contains(&self.tensors[number].0) {
                true => self.read_quantized(number)?.matrix().decode(),
                false => self.files.read::<S>(&self.tensors[number].0)?,
            };
            let tensor = &self.tensors[number].1;
            for (_, places) in tensor.places(&columns).filter(|(name, _)| *name == entry.name()) {
                places.copy(&theirs, &mut ours, tensor.added);
            }
        }
        Ok(ours)
    }

    /// Reads a matrix in NF4.
    fn read_quantized(&mut self, number: usize) -> Result<Quantized> {
        let (name, tensor) = &self.tensors[number];
        Quantized::read(&self.folder, &mut self.files, name, [tensor.outputs(), tensor.inputs])
    }

    /// Returns an error if the file of a tied model has a head that differs from the token table.
    fn check_tied_head(&mut self) -> Result<()> {
        let head = names::head(self.config.family);
        let Some((_, shape)) = self.files.get(head).filter(|_| self.config.tied) else { return Ok(()) };
        let (shape, table) = (shape.to_vec(), self.tensors[0].0.clone());
        if shape == self.tensors[0].1.shape && self.files.read::<f32>(head)? == self.files.read::<f32>(&table)? {
            return Ok(());
        }
        let reason = format!(
            "has a `{head}` {shape:?} that differs from the token table, but `tie_word_embeddings` in config.json makes them one: set it \
             to false to train the head by itself, or remove the tensor"
        );
        Err(Error::file(&self.folder, reason))
    }
}
