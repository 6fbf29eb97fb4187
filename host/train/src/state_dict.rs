//! Weights with the names and layout of PyTorch's `state_dict`, in safetensors files.
//!
//! A matrix `[in, out]` of stepscope is `[out, in]` there, as in `torch.nn.Linear`, but an
//! embedding's table is `[rows, cols]` in both. The `gain` of a norm is its `weight`, as in
//! `torch.nn.RMSNorm`. Everything else is equal. Weights are f32. A file may hold some or all of
//! them as BF16, which is read exactly, and can be written with rounding.
//!
//! Invariant: each side reads what the other has written, bit for bit. A file that does not fit
//! changes nothing.

#![forbid(unsafe_code)]

use crate::checkpoint::{FORMAT, ORIENTATION};
use crate::tensors::{NamedTensor, Tensors, write};
use half::bf16;
use safetensors::tensor::Dtype;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use stepscope_core::internals::{is_finite, short};
use stepscope_core::{
    Element, Error, NonFinite, ParameterEntry, ParameterSpec, Parameters, Quantity, Result, Stored, Transfer,
};

/// Returns a parameter's name in the `state_dict`.
fn name(entry: &ParameterEntry) -> String {
    let name = entry.name();
    match name.strip_suffix("gain") {
        Some(before) if before.is_empty() || before.ends_with('.') => format!("{before}weight"),
        _ => name.to_owned(),
    }
}

/// Returns the parameters by their names in the `state_dict`.
fn names(spec: &ParameterSpec) -> Result<BTreeMap<String, &ParameterEntry>> {
    let mut names = BTreeMap::new();
    for (_, entry) in spec.iter() {
        if names.insert(name(entry), entry).is_some() {
            let expected = "different names for all parameters after each `gain` becomes a `weight`";
            return Err(Error::misuse("state_dict", expected, format!("two named `{}`", short(&name(entry)))));
        }
    }
    Ok(names)
}

/// Returns a parameter's extents in the `state_dict`.
fn shape(entry: &ParameterEntry) -> Vec<usize> {
    match *entry.shape().extents() {
        [inputs, outputs] if !entry.is_table() => vec![outputs, inputs],
        ref extents => extents.to_vec(),
    }
}

/// Converts the elements with `convert`. A matrix `[rows, cols]` becomes `[cols, rows]`. The
/// elements of a table or anything else keep their order.
fn transposed<T: Copy, U>(entry: &ParameterEntry, values: &[T], extents: &[usize], convert: impl Fn(T) -> U) -> Vec<U> {
    match *extents {
        [rows, cols] if !entry.is_table() => {
            (0..rows * cols).map(|at| convert(values[at % rows * cols + at / rows])).collect()
        }
        _ => values.iter().map(|&value| convert(value)).collect(),
    }
}

/// Writes all weights to `path`, replacing the file as a whole.
/// `model.load_state_dict(safetensors.torch.load_file(path))` then reads them into a model
/// whose modules have the same names. Waits for the device.
///
/// # Errors
/// [`Error::Misuse`] if two parameters have the same name there. [`Error::NotFinite`] for
/// non-finite weights. [`Error::File`] with the system's reason.
pub fn save_state_dict(parameters: &Parameters, path: impl AsRef<Path>) -> Result<()> {
    save_state_dict_as::<f32>(parameters, path)
}

/// Writes the weights like [`save_state_dict`], in a type that the caller selects. As
/// [`bf16`](stepscope_core::bf16), each weight is rounded to nearest, ties to even, and the file
/// has half the bytes.
///
/// # Errors
/// [`Error::NotFinite`] for a weight that is not finite, or is rounded to an infinity.
pub fn save_state_dict_as<S: Stored>(parameters: &Parameters, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let spec = parameters.spec();
    let mut values = HashMap::new();
    for (parameter, entry) in spec.iter() {
        values.insert(entry.name(), parameters.read_as::<S>(parameter)?);
    }
    let finite = |(_, entry): (_, &ParameterEntry)| {
        (entry.name().to_owned(), values[entry.name()].iter().all(|value| is_finite(value.widen())))
    };
    NonFinite::Reject.check((None, Quantity::Weight), spec.iter().map(finite))?;
    let dtype = if <S as Element>::NAME == <bf16 as Element>::NAME { Dtype::BF16 } else { Dtype::F32 };
    let tensor = |(name, entry): (String, &ParameterEntry)| {
        let values = transposed(entry, &values[entry.name()], entry.shape().extents(), |value| value);
        (name, shape(entry), values)
    };
    let tensors: Vec<_> = names(spec)?.into_iter().map(tensor).collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, shape, values)| NamedTensor { name, dtype, shape, bytes: bytemuck::cast_slice(values) })
        .collect();
    // PyTorch's own files have this note, and some of its readers require it.
    let notes = [("format", "pt"), (ORIENTATION, "outputs x inputs")];
    let notes = notes.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    write(path, &notes, &tensors)?.put()
}

/// Overwrites all weights with the tensors of a file that [`save_state_dict`] or
/// `safetensors.torch.save_file(model.state_dict(), path)` has written. Each tensor may be F32, or
/// BF16, which becomes f32 exactly. Such a file has no digest, so its contents are not verified.
/// Each byte is read once, and all are read before any is used. A file that changes meanwhile is
/// refused, as far as its length and modification time show. Takes the bytes of the file and of the
/// weights in host memory.
///
/// # Errors
/// [`Error::File`], before anything is changed, in these cases:
///
/// - The file is not a plain file, or cannot be read completely.
/// - It lacks a parameter, has an extra parameter, or has a parameter of another shape or type.
///
/// [`Error::Misuse`] if two parameters have the same name there.
pub fn load_state_dict(parameters: &mut Parameters, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let names = names(parameters.spec())?;
    let file = Tensors::read(path)?;
    if file.notes().contains_key(FORMAT) {
        let reason = "a checkpoint, which stores the weights of linear layers transposed: `Checkpoint::load` and `restore` read it";
        return Err(Error::file(path, reason));
    }
    let mut sources = HashMap::new();
    for (name, entry) in &names {
        let shape = shape(entry);
        let found = file.expect(name, &shape, &[Dtype::F32, Dtype::BF16]);
        let (bytes, dtype) = found.map_err(|reason| Error::file(path, reason))?;
        let values = match dtype {
            Dtype::BF16 => transposed(entry, bytes.as_chunks().0, &shape, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            _ => transposed(entry, bytes.as_chunks().0, &shape, f32::from_le_bytes),
        };
        sources.insert(entry.name().to_owned(), values);
    }
    if let Some(more) = file.iter().find(|tensor| !names.contains_key(tensor.name)) {
        return Err(Error::file(path, format!("has `{}`, which is not a parameter of this model", short(more.name))));
    }
    let spec = parameters.spec().clone();
    let frozen = || spec.iter().filter(|(_, entry)| entry.frozen().is_some());
    let finite = |(_, entry): (_, &ParameterEntry)| {
        (entry.name().to_owned(), sources[entry.name()].iter().all(|&value| is_finite(value)))
    };
    NonFinite::Reject.check((None, Quantity::Weight), frozen().map(finite))?;
    parameters.load(|entry| sources.get(entry.name()).map(|values| bytemuck::cast_slice(values)), Transfer::new())?;
    frozen().try_for_each(|(parameter, entry)| parameters.write(parameter, &sources[entry.name()]))
}
