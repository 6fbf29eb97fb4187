//! Weights as PyTorch's `state_dict` names and lays them out, in safetensors files.
//!
//! A matrix `[in, out]` of ours is `[out, in]` there, as `torch.nn.Linear` has it, but an embedding's table is
//! `[rows, cols]` in both; and the `gain` of a norm is its `weight`, as
//! `torch.nn.RMSNorm` has it. Everything else is the same. Weights are f32; a file may hold some or all of them as BF16, which are read
//! exactly, and it is written so when asked, rounded. Invariant: what is written by one is read by the other, bit for bit, and a
//! file that does not fit changes nothing.

#![forbid(unsafe_code)]

use crate::checkpoint::{FORMAT, ORIENTATION};
use crate::error::{Error, Quantity, Result, short};
use crate::finite::Numbers;
use crate::params::{Layout, LayoutEntry, Parameters};
use crate::tensor::{Element, Stored};
use crate::tensors::{NamedTensor, Tensors, write};
use crate::upload::Transfer;
use half::bf16;
use safetensors::tensor::Dtype;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// A parameter's name there.
fn name(entry: &LayoutEntry) -> String {
    let name = entry.name();
    match name.strip_suffix("gain") {
        Some(before) if before.is_empty() || before.ends_with('.') => format!("{before}weight"),
        _ => name.to_owned(),
    }
}

/// The parameters by their names there.
fn names(layout: &Layout) -> Result<BTreeMap<String, &LayoutEntry>> {
    let mut names = BTreeMap::new();
    for entry in layout.entries() {
        if names.insert(name(entry), entry).is_some() {
            let expected = "a different name for each parameter, where a gain is a weight";
            return Err(Error::misuse("state_dict", expected, format!("two named `{}`", short(&name(entry)))));
        }
    }
    Ok(names)
}

/// Its extents there.
fn shape(entry: &LayoutEntry) -> Vec<usize> {
    match *entry.shape().extents() {
        [inputs, outputs] if !entry.is_table() => vec![outputs, inputs],
        ref extents => extents.to_vec(),
    }
}

/// What `convert` makes of the elements: of a matrix `[rows, cols]` those of `[cols, rows]`, of a table or anything else as they are.
fn transposed<T: Copy, U>(entry: &LayoutEntry, values: &[T], extents: &[usize], convert: impl Fn(T) -> U) -> Vec<U> {
    match *extents {
        [rows, cols] if !entry.is_table() => {
            (0..rows * cols).map(|at| convert(values[at % rows * cols + at / rows])).collect()
        }
        _ => values.iter().map(|&value| convert(value)).collect(),
    }
}

impl Parameters {
    /// Writes all weights to `path`, replacing it as a whole, so that `model.load_state_dict(safetensors.torch.load_file(path))` takes
    /// them in a model whose modules have the same names. Waits.
    ///
    /// # Errors
    /// [`Error::Misuse`] when two parameters have one name there; [`Error::NotFinite`] for weights that are not finite; [`Error::File`]
    /// with the system's reason.
    pub fn save_state_dict(&self, path: impl AsRef<Path>) -> Result<()> {
        self.save_state_dict_as::<f32>(path)
    }

    /// [`Parameters::save_state_dict`] in a type of the caller's choice: as [`bf16`](crate::bf16), each weight is rounded to the nearest,
    /// ties to even, and the file has half the bytes.
    ///
    /// # Errors
    /// As for [`Parameters::save_state_dict`]; [`Error::NotFinite`] also for a weight that is rounded to an infinity.
    pub fn save_state_dict_as<S: Stored>(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let values: Vec<f32> = self.flat().read()?.into_iter().map(|value| S::narrow(value).widen()).collect();
        Numbers::Finite.check((None, Quantity::Weight), self.layout().finite(&values))?;
        let dtype = if <S as Element>::NAME == <bf16 as Element>::NAME { Dtype::BF16 } else { Dtype::F32 };
        let tensor = |(name, entry): (String, &LayoutEntry)| {
            let values = transposed(entry, &values[entry.range()], entry.shape().extents(), S::narrow);
            (name, shape(entry), values)
        };
        let tensors: Vec<_> = names(self.layout())?.into_iter().map(tensor).collect();
        let tensors: Vec<_> = tensors
            .iter()
            .map(|(name, shape, values)| NamedTensor { name, dtype, shape, bytes: bytemuck::cast_slice(values) })
            .collect();
        // What PyTorch's own files say of themselves, and some of its readers ask for.
        let notes = [("format", "pt"), (ORIENTATION, "outputs x inputs")];
        let notes = notes.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        write(path, &notes, &tensors)?.put()
    }

    /// Overwrites all weights with those of a file as [`Parameters::save_state_dict`] or `safetensors.torch.save_file(
    /// model.state_dict(), path)` writes it, of F32 or BF16, which becomes f32 exactly, each tensor by itself. Such a file has no digest, so what it holds is taken as it is; but each byte is read once, all
    /// of them before any is used, and a file that changes meanwhile is refused as far as its length and its time of modification tell.
    /// Takes the file's bytes and those of the weights of the host's memory meanwhile.
    ///
    /// # Errors
    /// [`Error::File`], before anything is changed, when the file is no plain file, cannot be read whole, lacks a parameter, has one more, or
    /// has one of another shape or type; [`Error::Misuse`] when two parameters have one name there; as for [`Parameters::load`].
    pub fn load_state_dict(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let names = names(self.layout())?;
        let file = Tensors::read(path)?;
        if file.notes().contains_key(FORMAT) {
            let reason = "a checkpoint, whose weights of linear layers lie the other way: `Checkpoint::load` and `restore` read it";
            return Err(Error::file(path, reason));
        }
        let mut sources = HashMap::new();
        for (name, entry) in &names {
            let shape = shape(entry);
            let found = file.expect(name, &shape, &[Dtype::F32, Dtype::BF16]);
            let (bytes, dtype) = found.map_err(|reason| Error::file(path, reason))?;
            let values = match dtype {
                Dtype::BF16 => {
                    transposed(entry, bytes.as_chunks().0, &shape, |bytes| bf16::from_le_bytes(bytes).to_f32())
                }
                _ => transposed(entry, bytes.as_chunks().0, &shape, f32::from_le_bytes),
            };
            sources.insert(entry.name().to_owned(), values);
        }
        if let Some(more) = file.iter().find(|tensor| !names.contains_key(tensor.name)) {
            return Err(Error::file(path, format!("has `{}`, which is no parameter of this model", short(more.name))));
        }
        self.load(|entry| sources.get(entry.name()).map(|values| bytemuck::cast_slice(values)), Transfer::new())
    }
}
