//! The tensors of a folder, read one at a time, each in its own type.
//!
//! Invariant: the folder's tensors are those of one state, as
//! [`StateDict::from_pretrained`](crate::StateDict::from_pretrained) defines it, and nothing is
//! read twice unless the caller asks for it twice.

#![forbid(unsafe_code)]

use crate::file_type::FileType;
use crate::pretrained::{FILE, INDEX, no_tensors, shards};
use crate::tensors::OpenTensors;
use safetensors::tensor::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use stepscope_core::internals::{are_finite, for_each_part, is_finite, short, zeros};
use stepscope_core::{Error, PlainFile, Result, Stored};

/// The elements that a thread reads at a time.
const PART: usize = 1 << 17;

/// The open files of a folder in the layout of `save_pretrained`. The host holds one tensor at a
/// time.
#[derive(Debug)]
pub struct TensorFiles {
    folder: PathBuf,
    index: Option<PlainFile>,
    files: Vec<(PathBuf, OpenTensors)>,
    /// For each tensor its file, type and shape.
    tensors: BTreeMap<String, (usize, FileType, Vec<usize>)>,
    /// The file of each tensor of U8.
    bytes: BTreeMap<String, usize>,
}

impl TensorFiles {
    /// Opens `model.safetensors`, or else `model.safetensors.index.json` and the shards that it
    /// names. Only the headers are read. Tensors for which `skip` returns true are left out,
    /// whatever their type.
    ///
    /// # Errors
    /// [`Error::File`] in these cases:
    ///
    /// - A file is missing, not a plain file, truncated, or of another format.
    /// - The index and the shards do not have the same tensors, or a tensor appears twice.
    /// - A tensor has another type than F32, BF16, F16 and U8.
    pub fn open(folder: impl AsRef<Path>, skip: impl Fn(&str) -> bool) -> Result<Self> {
        let folder = folder.as_ref();
        let (whole, index) = (folder.join(FILE), folder.join(INDEX));
        if whole.exists() {
            return Self::open_file(whole, skip);
        }
        let mut opened = Self::empty(folder);
        if !index.exists() {
            return Err(no_tensors(folder));
        }
        let (shards, file) = shards(&index)?;
        opened.index = Some(file);
        for (shard, names) in shards {
            let path = folder.join(shard);
            if !path.exists() {
                let reason = format!("is missing, but {INDEX} lists tensors in it: {}", names.len());
                return Err(Error::file(path, reason));
            }
            opened.add(path, &skip, Some(names.iter().map(String::as_str).collect()))?;
        }
        Ok(opened)
    }

    /// Opens one file of tensors like [`TensorFiles::open`].
    ///
    /// # Errors
    /// Those of [`TensorFiles::open`].
    pub fn open_file(path: impl Into<PathBuf>, skip: impl Fn(&str) -> bool) -> Result<Self> {
        let path = path.into();
        let mut opened = Self::empty(path.parent().unwrap_or(&path));
        opened.add(path, &skip, None)?;
        Ok(opened)
    }

    fn empty(folder: &Path) -> Self {
        Self { folder: folder.into(), index: None, files: Vec::new(), tensors: BTreeMap::new(), bytes: BTreeMap::new() }
    }

    /// Opens a file that must have these tensors, if they are known.
    fn add(&mut self, path: PathBuf, skip: impl Fn(&str) -> bool, listed: Option<BTreeSet<&str>>) -> Result<()> {
        let tensors = OpenTensors::open(&path)?;
        let there: BTreeSet<&str> = tensors.iter().map(|(name, ..)| name).collect();
        if let Some(listed) = listed {
            if let Some(name) = listed.difference(&there).find(|name| !skip(name)) {
                return Err(Error::file(path, format!("has no `{}`, which {INDEX} lists there", short(name))));
            }
            if let Some(name) = there.difference(&listed).find(|name| !skip(name)) {
                return Err(Error::file(path, format!("has `{}`, which {INDEX} does not list there", short(name))));
            }
        }
        for (name, dtype, shape) in tensors.iter().filter(|(name, ..)| !skip(name)) {
            let kind = match dtype {
                Dtype::F32 => FileType::F32,
                Dtype::BF16 => FileType::Bf16,
                Dtype::F16 => FileType::F16,
                Dtype::U8 => {
                    if self.bytes.insert(name.into(), self.files.len()).is_some() {
                        return Err(Error::file(path, format!("has `{}`, as another file does", short(name))));
                    }
                    continue;
                }
                other => {
                    let reason = format!("`{}`: expected F32, BF16, F16 or U8, got {other:?}", short(name));
                    return Err(Error::file(path, reason));
                }
            };
            if self.tensors.insert(name.into(), (self.files.len(), kind, shape.into())).is_some() {
                return Err(Error::file(path, format!("has `{}`, as another file does", short(name))));
            }
        }
        self.files.push((path, tensors));
        Ok(())
    }

    /// Returns the names of all tensors, including those of U8.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().chain(self.bytes.keys()).map(String::as_str)
    }

    /// Returns all tensors of numbers in the order of their names: name, type and shape.
    pub fn iter(&self) -> impl Iterator<Item = (&str, FileType, &[usize])> {
        self.tensors.iter().map(|(name, (_, kind, shape))| (name.as_str(), *kind, shape.as_slice()))
    }

    /// Returns true if the folder has this tensor of U8, which is part of a quantised matrix.
    pub fn has_bytes(&self, name: &str) -> bool {
        self.bytes.contains_key(name)
    }

    /// Reads a tensor of U8.
    ///
    /// # Errors
    /// [`Error::File`] if the folder has no such tensor, or if its file cannot be read or has
    /// changed since it was opened.
    pub fn read_bytes(&mut self, name: &str) -> Result<Vec<u8>> {
        let Some(&place) = self.bytes.get(name) else {
            return Err(Error::file(&self.folder, format!("has no tensor `{}` of U8", short(name))));
        };
        let (path, file) = &mut self.files[place];
        let failed = |reason: std::io::Error| Error::file(&*path, reason);
        let bytes = file.bytes(name).map_err(failed)?;
        file.file().check_unchanged().map_err(failed)?;
        Ok(bytes)
    }

    /// Returns the type and the shape of a tensor of numbers, if the folder has it.
    pub fn get(&self, name: &str) -> Option<(FileType, &[usize])> {
        self.tensors.get(name).map(|(_, kind, shape)| (*kind, shape.as_slice()))
    }

    /// Reads a tensor, and converts it to S: exactly to f32, and rounded to BF16.
    ///
    /// # Errors
    /// [`Error::File`] if the folder has no such tensor, if its file cannot be read or has changed
    /// since it was opened, or if a number is not finite, also after rounding.
    pub fn read<S: Stored>(&self, name: &str) -> Result<Vec<S>> {
        let Some((place, kind, shape)) = self.tensors.get(name) else {
            return Err(Error::file(&self.folder, format!("has no tensor `{}`", short(name))));
        };
        let (path, file) = &self.files[*place];
        let failed = |reason: std::io::Error| Error::file(path, reason);
        // The header's check has computed the number of bytes.
        let mut values = zeros::<S>(shape.iter().product()).map_err(failed)?;
        let read = for_each_part(&mut values, PART, |first, part| {
            let first = kind.bytes() * first;
            if kind.is::<S>() {
                return file.fill_from(name, first, bytemuck::cast_slice_mut(part));
            }
            let mut bytes = vec![0; kind.bytes() * part.len()];
            file.fill_from(name, first, &mut bytes)?;
            kind.decode(&bytes, part);
            Ok(())
        });
        read.map_err(failed)?;
        file.file().check_unchanged().map_err(failed)?;
        if !are_finite(&values) {
            let at = values.iter().position(|value| !is_finite(value.widen())).expect("a value that is not finite");
            let reason =
                format!("`{}`: expected finite numbers, got {} at index {at}", short(name), values[at].widen());
            return Err(Error::file(path, reason));
        }
        Ok(values)
    }

    /// Checks that no file has changed or was replaced since the folder was opened, so that all
    /// tensors read belong to one state.
    ///
    /// # Errors
    /// [`Error::File`] if one has.
    pub fn check_unchanged(&self) -> Result<()> {
        let index = self.index.iter().map(|file| (self.folder.join(INDEX), file));
        let mut files = self.files.iter().map(|(path, tensors)| (path.clone(), tensors.file())).chain(index);
        files.try_for_each(|(path, file)| file.check_still_at(&path).map_err(|reason| Error::file(&path, reason)))
    }
}
