//! Weights as PyTorch's `state_dict` names and lays them out, in safetensors files.
//!
//! A matrix `[in, out]` of ours is `[out, in]` there, as `torch.nn.Linear` has it; and the `gain` of a norm is its `weight`, as
//! `torch.nn.RMSNorm` has it. Everything else is the same. Invariant: what is written by one is read by the other, bit for bit, and a
//! file that does not fit changes nothing.

#![forbid(unsafe_code)]

use crate::checkpoint::replace_file;
use crate::error::{Error, Result};
use crate::finite::{Numbers, Quantity};
use crate::memory::Mapped;
use crate::params::{Entry, Parameters};
use crate::upload::Transfer;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// A parameter's name there.
fn name(entry: &Entry) -> String {
    let name = entry.name();
    match name.strip_suffix("gain") {
        Some(before) if before.is_empty() || before.ends_with('.') => format!("{before}weight"),
        _ => name.to_owned(),
    }
}

/// Its extents there.
fn shape(entry: &Entry) -> Vec<usize> {
    match *entry.shape().extents() {
        [inputs, outputs] => vec![outputs, inputs],
        ref extents => extents.to_vec(),
    }
}

/// The words of a matrix `[rows, cols]` as those of `[cols, rows]`; of anything else as they are.
fn transposed(words: &[[u8; 4]], extents: &[usize]) -> Vec<u8> {
    match *extents {
        [rows, cols] => (0..cols).flat_map(|col| (0..rows).flat_map(move |row| words[row * cols + col])).collect(),
        _ => words.as_flattened().to_vec(),
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
        let path = path.as_ref();
        let values = self.flat().read()?;
        Numbers::Finite.check((None, Quantity::Weight), self.layout().finite("", &values))?;
        let mut tensors = BTreeMap::new();
        for entry in self.layout().entries() {
            let words: Vec<[u8; 4]> = values[entry.range()].iter().map(|value| value.to_le_bytes()).collect();
            let bytes = transposed(&words, entry.shape().extents());
            if tensors.insert(name(entry), (shape(entry), bytes)).is_some() {
                let expected = "a different name for each parameter, where a gain is a weight";
                return Err(Error::misuse("state_dict", expected, format!("two named `{}`", name(entry))));
            }
        }
        let refused = |reason: safetensors::SafeTensorError| Error::file(path, reason);
        let mut views = Vec::new();
        for (name, (shape, bytes)) in &tensors {
            views.push((name, TensorView::new(Dtype::F32, shape.clone(), bytes).map_err(refused)?));
        }
        // What PyTorch's own files say of themselves, and some of its readers ask for.
        let notes = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        replace_file(path, &safetensors::serialize(views, Some(notes)).map_err(refused)?)
    }

    /// Overwrites all weights with those of a file as [`Parameters::save_state_dict`] or `safetensors.torch.save_file(
    /// model.state_dict(), path)` writes it.
    ///
    /// # Errors
    /// [`Error::File`], before anything is changed, when the file cannot be read, lacks a parameter, has one more, or has one of another
    /// shape or type than f32; as for [`Parameters::load`].
    pub fn load_state_dict(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let file = Mapped::open(path)?;
        let tensors = SafeTensors::deserialize(&file).map_err(|reason| Error::file(path, reason))?;
        let mut found: HashMap<String, TensorView<'_>> = tensors.tensors().into_iter().collect();
        let mut sources = HashMap::new();
        for entry in self.layout().entries() {
            let (name, shape) = (name(entry), shape(entry));
            let Some(tensor) = found.remove(&name) else {
                return Err(Error::file(path, format!("has no `{name}` for `{}`", entry.name())));
            };
            if tensor.shape() != shape || tensor.dtype() != Dtype::F32 {
                let got = format!("{:?} {:?}", tensor.dtype(), tensor.shape());
                return Err(Error::file(path, format!("`{name}`: expected F32 {shape:?}, got {got}")));
            }
            let (words, _) = tensor.data().as_chunks();
            sources.insert(entry.name().to_owned(), transposed(words, &shape));
        }
        if let Some(more) = found.keys().min() {
            return Err(Error::file(path, format!("has `{more}`, which is no parameter of this model")));
        }
        self.load(|entry| sources.get(entry.name()).map(Vec::as_slice), Transfer::new())
    }
}
