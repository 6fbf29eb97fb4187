//! Tensors by name, read from and written to folders in the layout of Hugging Face's
//! `from_pretrained` and `save_pretrained`: one safetensors file, or shards and an index.
//!
//! Invariant: a successful read returns one complete state as it was saved, each tensor once, all
//! finite. Whenever the process dies, no folder has an index that leads to tensors of two states.

#![forbid(unsafe_code)]

use crate::file_type::FileType;
use crate::tensor_writer::save_tensors;
use crate::tensors::{NamedTensor, Tensors, Texts, write};
use cuda_std::float_mode;
use half::{bf16, f16};
use safetensors::tensor::Dtype;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::fs;
use std::path::{Path, PathBuf};
use stepscope_core::internals::{Replacement, is_finite, remove_file, short};
use stepscope_core::{Error, FileKind, NonFinite, PlainFile, Quantity, Result};

/// The single file of a folder that is not sharded.
pub(crate) const FILE: &str = "model.safetensors";
/// The index, which maps each tensor to its shard.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The largest index that is read. Indexes of models with 100,000 tensors have 10 MB, and serde's
/// parsed form takes about ten times as much.
const MAX_INDEX_BYTES: u64 = 32 << 20;
/// The files that a folder has instead if `torch.save` has written it.
const TORCH_FILES: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// Tensors of f32 by name, each with its shape, on the host. PyTorch calls this a `state_dict`.
///
/// Names, shapes and the order of elements are those of the file.
/// [`load_state_dict`](crate::load_state_dict) reads models whose modules
/// have stepscope's names. This type is for all others, whose names and transposes a program maps
/// itself, as `host/cli/src/train/weights.rs` does for GPT-2 and Llama.
///
/// ```
/// use stepscope::files::StateDict;
///
/// # fn main() -> stepscope::Result<()> {
/// # let folder = tempfile::tempdir().expect("a folder");
/// # let folder = folder.path();
/// let mut tensors = StateDict::default();
/// tensors.insert("wte.weight", [3, 2], vec![0.0, 0.1, 1.0, 1.1, 2.0, 2.1])?;
/// tensors.insert("ln_f.weight", [2], vec![1.0, 1.0])?;
/// tensors.save_pretrained(folder, Some(24))?; // bytes of a shard: 24 for the first, and 8 for the second
/// assert!(folder.join("model-00002-of-00002.safetensors").exists());
/// assert_eq!(StateDict::from_pretrained(folder, |_| false)?, tensors);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StateDict {
    tensors: BTreeMap<String, Values>,
}

/// The values of a tensor, in row-major order.
#[derive(Clone, Debug, PartialEq)]
struct Values {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl StateDict {
    /// Adds a tensor.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the name is already used, or if the shape's element count differs from
    /// the number of values.
    pub fn insert(&mut self, name: impl Into<String>, shape: impl Into<Vec<usize>>, values: Vec<f32>) -> Result<()> {
        let (name, shape) = (name.into(), shape.into());
        if shape.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent)) != Some(values.len()) {
            let expected = format!("as many values for `{}` as its shape {shape:?} has", short(&name));
            return Err(Error::misuse("state_dict", expected, values.len().to_string()));
        }
        match self.tensors.entry(name) {
            btree_map::Entry::Vacant(place) => {
                place.insert(Values { shape, values });
                Ok(())
            }
            btree_map::Entry::Occupied(place) => {
                let got = format!("two named `{}`", short(place.key()));
                Err(Error::misuse("state_dict", "a different name for each tensor", got))
            }
        }
    }

    /// Removes a tensor, and returns its shape and its values.
    pub fn remove(&mut self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        self.tensors.remove(name).map(|Values { shape, values }| (shape, values))
    }

    /// Returns all tensors in the order of their names: name, shape and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[usize], &[f32])> {
        self.tensors.iter().map(|(name, Values { shape, values })| (name.as_str(), shape.as_slice(), values.as_slice()))
    }

    /// Reads a folder: `model.safetensors`, or else `model.safetensors.index.json` and the shards
    /// that it names, which may have any names in the same folder. F32 is read as it is, and BF16
    /// and F16 become f32 exactly. Tensors for which `skip` returns true are left out, whatever
    /// their type, for example buffers that a program computes itself. Each byte is read once.
    /// Besides the values, it takes the bytes of one file in host memory.
    ///
    /// # Errors
    /// [`Error::File`] in these cases:
    ///
    /// - A file is missing, not a plain file, truncated, of another format, or larger than the
    ///   host's available memory.
    /// - The index and the shards do not have the same tensors, or a tensor appears twice.
    /// - A tensor has another type, or is not finite.
    /// - A file is replaced or written to before all are read, because the tensors could then
    ///   belong to two states.
    pub fn from_pretrained(folder: impl AsRef<Path>, skip: impl Fn(&str) -> bool) -> Result<Self> {
        let folder = folder.as_ref();
        let (whole, index) = (folder.join(FILE), folder.join(INDEX));
        let mut found = Self::default();
        // The single file takes precedence, as in transformers.
        if whole.exists() {
            found.add(&whole, &Tensors::read(&whole)?, &skip)?;
            return Ok(found);
        }
        if !index.exists() {
            return Err(no_tensors(folder));
        }
        let (shards, index_file) = shards(&index)?;
        // Each file is checked again after all are read.
        let mut files = vec![(index, index_file)];
        for (shard, names) in shards {
            let path = folder.join(shard);
            if !path.exists() {
                let reason = format!("is missing, but {INDEX} lists tensors in it: {}", names.len());
                return Err(Error::file(path, reason));
            }
            let (tensors, file) = Tensors::read_from(&path)?;
            let there: BTreeSet<&str> = tensors.iter().map(|tensor| tensor.name).filter(|name| !skip(name)).collect();
            let listed: BTreeSet<&str> = names.iter().map(String::as_str).filter(|name| !skip(name)).collect();
            if let Some(name) = listed.difference(&there).next() {
                return Err(Error::file(path, format!("has no `{}`, which {INDEX} lists there", short(name))));
            }
            if let Some(name) = there.difference(&listed).next() {
                return Err(Error::file(path, format!("has `{}`, which {INDEX} does not list there", short(name))));
            }
            found.add(&path, &tensors, &skip)?;
            files.push((path, file));
        }
        for (path, file) in &files {
            file.check_still_at(path).map_err(|reason| Error::file(path, reason))?;
        }
        Ok(found)
    }

    /// Reads a safetensors file of F32, BF16 or F16, all of which become f32 exactly.
    ///
    /// # Errors
    /// [`Error::File`] if the file is missing, not a plain file, truncated, of another format, or
    /// larger than the host's available memory, or if a tensor has another type or is not finite.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let (path, mut found) = (path.as_ref(), Self::default());
        found.add(path, &Tensors::read(path)?, |_| false)?;
        Ok(found)
    }

    /// Adds the tensors of a file.
    fn add(&mut self, path: &Path, tensors: &Tensors, skip: impl Fn(&str) -> bool) -> Result<()> {
        for NamedTensor { name, dtype, shape, bytes } in tensors.iter().filter(|tensor| !skip(tensor.name)) {
            let refused = |reason: String| Error::file(path, format!("`{}`: {reason}", short(name)));
            let values: Vec<f32> = match dtype {
                Dtype::F32 => bytes.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect(),
                Dtype::BF16 => bytes.as_chunks().0.iter().map(|&two| bf16::from_le_bytes(two).to_f32()).collect(),
                Dtype::F16 => float_mode::in_default(|| {
                    bytes.as_chunks().0.iter().map(|&two| f16::from_le_bytes(two).to_f32()).collect()
                }),
                other => return Err(refused(format!("expected F32, BF16 or F16, got {other:?}"))),
            };
            if let Some(at) = values.iter().position(|&value| !is_finite(value)) {
                return Err(refused(format!("expected finite numbers, got {} at index {at}", values[at])));
            }
            self.insert(name, shape, values)?;
        }
        Ok(())
    }

    /// Writes all tensors to one file of F32, replacing it as a whole.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for a non-finite tensor. [`Error::File`] with the system's reason. The
    /// old file is then untouched.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.check_finite()?;
        self.stage(path.as_ref(), self.tensors.keys())?.put()
    }

    /// Writes all tensors into an existing folder, in the layout that `from_pretrained` of
    /// transformers reads. It writes `model.safetensors`. If that would have more than
    /// `max_shard_bytes` bytes of tensors, it writes `model-00001-of-0000N.safetensors` and so on,
    /// with `model.safetensors.index.json`.
    ///
    /// Tensors are distributed as `save_pretrained` does it (`max_shard_size`, in huggingface_hub's
    /// `split_torch_state_dict_into_shards`). In the order of their names, each goes to the shard
    /// of the one before if there is room. A tensor that exceeds the limit has a shard of its own.
    ///
    /// The files of an earlier save are replaced, and its other files removed, so no folder has two
    /// states. All files are on disk before the first is renamed, and the index comes last. Until
    /// then, reading the folder returns the old tensors. The exception is shards of the same names
    /// in both saves: while they are renamed, reading fails. It needs disk space for both, and no
    /// host memory.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for a non-finite value. [`Error::File`] if a file cannot be written:
    /// nothing has changed then, unless files were written but could not be renamed or removed.
    pub fn save_pretrained(&self, folder: impl AsRef<Path>, max_shard_bytes: Option<u64>) -> Result<()> {
        self.check_finite()?;
        let tensors: Vec<_> = self.iter().map(|(name, shape, _)| (name.to_owned(), shape.to_vec())).collect();
        let values: Vec<&[f32]> = self.iter().map(|(_, _, values)| values).collect();
        save_tensors(folder, &tensors, FileType::F32, max_shard_bytes, |number| Ok(values[number].into()))
    }

    fn check_finite(&self) -> Result<()> {
        let finite = |(name, _, values): (&str, &[usize], &[f32])| {
            (name.to_owned(), values.iter().all(|&value| is_finite(value)))
        };
        NonFinite::Reject.check((None, Quantity::Weight), self.iter().map(finite))
    }

    /// Writes these tensors to a complete file under a temporary name.
    fn stage<'n>(&self, path: &Path, names: impl Iterator<Item = &'n String>) -> Result<Replacement> {
        // Bytes are written as they are in memory, because every host of a supported GPU has the
        // format's byte order.
        const { assert!(cfg!(target_endian = "little")) };
        let tensor = |name: &'n String| {
            let Values { shape, values } = &self.tensors[name];
            NamedTensor { name, dtype: Dtype::F32, shape, bytes: bytemuck::cast_slice(values) }
        };
        let notes = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        write(path, &notes, &names.map(tensor).collect::<Vec<_>>())
    }
}

pub(crate) fn shard_name(number: usize, shards: usize) -> String {
    format!("model-{number:05}-of-{shards:05}.safetensors")
}

/// Returns the total number of shards that a file's name states.
fn shards_of(name: &str) -> Option<usize> {
    let (number, shards) = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number(number) && is_number(shards) { shards.parse().ok() } else { None }
}

/// Removes the shards of saves that had another number of shards.
pub(crate) fn remove_shards(folder: &Path, kept: usize) -> Result<()> {
    let entries = fs::read_dir(folder).map_err(|reason| Error::file(folder, reason))?;
    let old = entries.flatten().filter(|entry| {
        let shards = entry.file_name().to_str().and_then(shards_of);
        shards.is_some_and(|shards| shards != kept) && entry.file_type().is_ok_and(|kind| !kind.is_dir())
    });
    let old: Vec<PathBuf> = old.map(|entry| entry.path()).collect();
    old.iter().try_for_each(|path| remove_file(path))
}

/// The error that a folder has neither a file of tensors nor an index.
pub(crate) fn no_tensors(folder: &Path) -> Error {
    let torch = TORCH_FILES.iter().find(|name| folder.join(name).exists());
    let torch = torch.map_or(String::new(), |name| {
        format!(
            ", but {name} of `torch.save`: `model.save_pretrained(folder, safe_serialization=True)` writes safetensors files"
        )
    });
    Error::file(folder, format!("has neither {FILE} nor {INDEX}{torch}"))
}

/// The fields of an index that are read. `total_size` is not, because files whose authors count
/// differently are still complete.
#[derive(Deserialize)]
struct Index {
    weight_map: Texts,
}

/// Returns the names of the tensors in each shard, according to the index, and the index's file.
pub(crate) fn shards(index: &Path) -> Result<(BTreeMap<String, Vec<String>>, PlainFile)> {
    let failed = |reason: &dyn ToString| Error::file(index, short(&reason.to_string()));
    let mut file = PlainFile::open(index).map_err(|reason| failed(&reason))?;
    let bytes = file.all_bytes(MAX_INDEX_BYTES).map_err(|reason| failed(&reason))?;
    let parsed = serde_json::from_slice(&bytes);
    let Index { weight_map: Texts(map) } = parsed.map_err(|reason| match FileKind::of(&bytes) {
        Some(kind) if kind != FileKind::Json => Error::file(index, kind.refusal("an index of shards, in JSON")),
        _ => failed(&reason),
    })?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in map {
        if shard.is_empty() || shard.contains(['/', '\\']) {
            let reason =
                format!("`weight_map`: expected the name of a file in the same folder, got `{}`", short(&shard));
            return Err(Error::file(index, reason));
        }
        shards.entry(shard).or_default().push(tensor);
    }
    if shards.is_empty() {
        return Err(Error::file(index, "`weight_map`: expected tensors, got none"));
    }
    Ok((shards, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_shards_are_shards() {
        assert_eq!(shards_of(&shard_name(2, 13)), Some(13));
        assert_eq!(shards_of("model-00001-of-123456.safetensors"), Some(123_456));
        for other in [
            "model.safetensors",
            "model-1-of-2.safetensors",
            "model-00001-of-00002.bin",
            "model-00001-of-0000x.safetensors",
            "adapter-00001-of-00002.safetensors",
            "model-00001-of-00002.safetensors.index.json",
        ] {
            assert_eq!(shards_of(other), None, "{other}");
        }
    }
}
