//! Writes tensors to a folder in the layout of Hugging Face's `save_pretrained`, one at a time.
//!
//! Invariant: whenever the process dies, the folder has no index that leads to tensors of two
//! states. The host holds the elements of one tensor at a time, and their bytes in pieces.

#![forbid(unsafe_code)]

use crate::file_type::FileType;
use crate::pretrained::{FILE, INDEX, remove_shards, shard_name};
use crate::tensors::{check_names, header};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use stepscope_core::internals::{Replacement, remove_file, short};
use stepscope_core::{Error, Result};

/// The elements that are converted to bytes at once.
const PIECE: usize = 1 << 20;

/// A tensor that is to be written: its name and shape.
pub type NewTensor = (String, Vec<usize>);

/// Writes tensors, which are in order of their names, into an existing folder, in the layout of
/// [`StateDict::save_pretrained`](crate::StateDict::save_pretrained). `values` returns the elements
/// of the tensor with this number. Each is rounded to `stored`, and is in host memory only until it
/// is written.
///
/// # Errors
/// [`Error::File`] for a tensor that is not finite in `stored`, for one whose size overflows, for a
/// name that occurs twice or is `__metadata__`, or with the system's reason. Nothing has changed
/// then, unless files were written but could not be renamed or removed.
pub fn save_tensors<'v>(
    folder: impl AsRef<Path>,
    tensors: &[NewTensor],
    stored: FileType,
    max_shard_bytes: Option<u64>,
    mut values: impl FnMut(usize) -> Result<Cow<'v, [f32]>>,
) -> Result<()> {
    let folder = folder.as_ref();
    check_names(folder, tensors.iter().map(|(name, _)| name.as_str()))?;
    let overflows = |name: &str| Error::file(folder, format!("the size of `{}` overflows", short(name)));
    let (mut sizes, mut total) = (Vec::new(), 0u64);
    for (name, shape) in tensors {
        let bytes = shape.iter().try_fold(stored.bytes() as u64, |bytes, &extent| bytes.checked_mul(extent as u64));
        let bytes = bytes.ok_or_else(|| overflows(name))?;
        total = total.checked_add(bytes).ok_or_else(|| overflows(name))?;
        sizes.push(bytes);
    }
    let shards = dealt(sizes, max_shard_bytes.unwrap_or(u64::MAX));
    let mut stage = |path: &Path, numbers: Range<usize>| -> Result<Replacement> {
        let described = tensors[numbers.clone()].iter();
        let described = described.map(|(name, shape)| (name.clone(), stored.dtype(), shape.clone()));
        let start = header(path, &BTreeMap::from([("format".to_owned(), "pt".to_owned())]), described)?;
        // An error of this library within the system's.
        let mut failed = None;
        let staged = Replacement::write(path, |mut file: &File| {
            file.write_all(&start)?;
            for number in numbers {
                let (name, shape) = &tensors[number];
                let result = values(number).and_then(|values| {
                    check_length(name, shape, &values)?;
                    Ok(values)
                });
                let mut or_failed = |error| {
                    failed = Some(error);
                    io::Error::other("a tensor cannot be written")
                };
                for piece in result.map_err(&mut or_failed)?.chunks(PIECE) {
                    file.write_all(&encode(path, name, piece, stored).map_err(&mut or_failed)?)?;
                }
            }
            Ok(())
        });
        match failed {
            Some(error) => Err(error),
            None => staged,
        }
    };
    let (whole, index) = (folder.join(FILE), folder.join(INDEX));
    if let [only] = &shards[..] {
        // It takes precedence over an index.
        stage(&whole, only.clone())?.put()?;
        remove_file(&index)?;
        return remove_shards(folder, 0);
    }
    let named = |number: usize| folder.join(shard_name(number, shards.len()));
    let staged = shards.iter().enumerate().map(|(at, numbers)| stage(&named(at + 1), numbers.clone()));
    let staged = staged.collect::<Result<Vec<_>>>()?;
    let text = index_text(tensors, &shards, total);
    let staged_index = Replacement::write(&index, |mut file| file.write_all(text.as_bytes()))?;
    if (1..=shards.len()).any(|number| named(number).exists()) {
        remove_file(&index)?;
    }
    staged.into_iter().try_for_each(Replacement::put)?;
    staged_index.put()?;
    remove_file(&whole)?;
    remove_shards(folder, shards.len())
}

fn check_length(name: &str, shape: &[usize], values: &[f32]) -> Result<()> {
    if values.len() == shape.iter().product::<usize>() {
        return Ok(());
    }
    let expected = format!("as many values for `{}` as its shape {shape:?} has", short(name));
    Err(Error::misuse("save_tensors", expected, values.len().to_string()))
}

fn encode(path: &Path, name: &str, values: &[f32], stored: FileType) -> Result<Vec<u8>> {
    stored.encode(values).map_err(|value| {
        let reason = format!("`{}` has {value:e}, which is not finite as {:?}", short(name), stored.dtype());
        Error::file(path, reason)
    })
}

/// Returns the tensors of each shard. There is at least one shard.
fn dealt(bytes: impl IntoIterator<Item = u64>, most: u64) -> Vec<Range<usize>> {
    let mut shards: Vec<Range<usize>> = std::iter::once(0..0).collect();
    let mut filled = 0u64;
    for (number, bytes) in bytes.into_iter().enumerate() {
        let last = shards.last_mut().expect("at least one");
        if filled + bytes > most && last.start < last.end {
            shards.push(number..number + 1);
            filled = bytes;
        } else {
            last.end = number + 1;
            filled += bytes;
        }
    }
    shards
}

/// Returns the text of the index.
fn index_text(tensors: &[NewTensor], shards: &[Range<usize>], bytes: u64) -> String {
    let of_shard = |(at, numbers): (usize, &Range<usize>)| {
        let file = shard_name(at + 1, shards.len());
        tensors[numbers.clone()].iter().map(|(name, _)| (name, file.clone())).collect::<Vec<_>>()
    };
    let map: BTreeMap<_, _> = shards.iter().enumerate().flat_map(of_shard).collect();
    let index = serde_json::json!({ "metadata": { "total_size": bytes }, "weight_map": map });
    format!("{index:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the example of huggingface_hub's documentation: 6, 6, 2, 6, 2, 2 with at most 10
    /// together become 6, 6 + 2, 6 + 2 + 2.
    #[test]
    fn tensors_are_dealt_out_in_order() {
        let sizes = [6, 6, 2, 6, 2, 2];
        assert_eq!(dealt(sizes, 10), [0..1, 1..3, 3..6]);
        assert_eq!(dealt(sizes, 24), vec![0..6]);
        assert_eq!(dealt(sizes, 0), [0..1, 1..2, 2..3, 3..4, 4..5, 5..6]);
        assert_eq!(dealt([], 0), vec![0..0]);
    }

    #[cfg_attr(miri, ignore = "Miri does not support the flags with which files are opened")]
    #[test]
    fn unwritable_tensors_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        type Tensors = &'static [(&'static str, &'static [usize])];
        let cases: [(Tensors, &str); 5] = [
            (&[("w", &[1]), ("w", &[1])], "cannot have two tensors `w`: rename one, or leave it out"),
            (&[("a", &[1]), ("w", &[1]), ("z", &[2]), ("a", &[1])], "cannot have two tensors `a`"),
            (&[("__metadata__", &[1])], "cannot have a tensor `__metadata__`, where the format has its notes"),
            (&[("w", &[1 << 62, 4])], "the size of `w` overflows"),
            (&[("a", &[1 << 61]), ("b", &[1 << 61]), ("c", &[1 << 61])], "the size of `b` overflows"),
        ];
        for (tensors, text) in cases {
            let tensors: Vec<NewTensor> = tensors.iter().map(|&(name, shape)| (name.into(), shape.into())).collect();
            for most in [None, Some(0), Some(8)] {
                let saved = save_tensors(folder.path(), &tensors, FileType::F32, most, |_| Ok(vec![1.0].into()));
                let error = saved.unwrap_err().to_string();
                assert!(error.contains(text), "{error}");
            }
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[cfg_attr(miri, ignore = "Miri does not support the flags with which files are opened")]
    #[test]
    fn failed_write_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let tensors: Vec<NewTensor> = vec![("a".into(), vec![2]), ("b".into(), vec![1, 2])];
        let write = |last: f32, stored, most| {
            save_tensors(folder.path(), &tensors, stored, most, |number| Ok(vec![number as f32, last].into()))
        };
        write(0.5, FileType::F16, None).unwrap();
        let before = std::fs::read(folder.path().join(FILE)).unwrap();
        // The largest f32 is no finite F16.
        let error = write(f32::MAX, FileType::F16, Some(4)).unwrap_err().to_string();
        assert!(error.contains("`a` has 3.4028235e38, which is not finite as F16"), "{error}");
        let refuses = save_tensors(folder.path(), &tensors, FileType::F32, None, |_| Err(Error::misuse("a", "b", "c")));
        assert!(matches!(refuses, Err(Error::Misuse { .. })), "{refuses:?}");
        assert_eq!(std::fs::read(folder.path().join(FILE)).unwrap(), before);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        write(0.5, FileType::Bf16, Some(4)).unwrap();
        assert!(!folder.path().join(FILE).exists() && folder.path().join(shard_name(2, 2)).exists());
        let read = crate::StateDict::from_pretrained(folder.path(), |_| false).unwrap();
        let all: Vec<_> = read.iter().map(|(name, shape, values)| (name, shape.to_vec(), values.to_vec())).collect();
        assert_eq!(all, [("a", vec![2], vec![0.0, 0.5]), ("b", vec![1, 2], vec![1.0, 0.5])]);
    }
}
