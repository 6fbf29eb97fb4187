//! The tensors of a safetensors file, read once, and written as they lie.
//!
//! Invariant: every byte is read one time, into memory of our own, and what is checked, hashed and used is that memory. What others do to
//! the file is an error while it is read, and nothing to us afterwards. A file gets its name when it is whole.

#![forbid(unsafe_code)]

use crate::error::{Error, Result, short};
use crate::file_kind::{FileKind, MAX_HEADER_BYTES};
use crate::files::{PlainFile, Replacement};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::path::Path;

/// Bytes of the number that a file starts with, the length of its header.
const NUMBER_BYTES: u64 = size_of::<u64>() as u64;
/// The header's key for notes, which no tensor may have.
pub(crate) const NOTES: &str = "__metadata__";

/// A file's notes and tensors.
#[derive(Debug)]
pub(crate) struct Tensors {
    header: Header,
    bytes: Vec<u8>,
}

impl Tensors {
    /// Reads a whole file: its header, which must describe all of its bytes and no other, then those bytes.
    ///
    /// # Errors
    /// [`Error::File`] when it is no plain file, cannot be read to the end that it had when it was opened, is written to meanwhile as far as
    /// the system tells, is not of this format, or holds more than the host has memory for.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Ok(Self::read_from(path)?.0)
    }

    /// The same, and the file, whose tensors may be one of several files' that belong together.
    pub(crate) fn read_from(path: &Path) -> Result<(Self, PlainFile)> {
        let failed = |reason: std::io::Error| Error::file(path, reason);
        let mut file = PlainFile::open(path).map_err(failed)?;
        if file.len() < NUMBER_BYTES {
            let reason = format!("expected a safetensors file, got {} bytes: it is empty, or cut", file.len());
            return Err(Error::file(path, reason));
        }
        let number = file.next_bytes(NUMBER_BYTES).map_err(failed)?;
        let number: [u8; 8] = number.try_into().expect("as many as were asked for");
        let (length, rest) = (u64::from_le_bytes(number), file.len() - NUMBER_BYTES);
        if length > rest.min(MAX_HEADER_BYTES) {
            let kind = file.kind().map_err(failed)?.filter(|&kind| kind != FileKind::Safetensors);
            let reason = match kind {
                // Where a model is expected, an archive of whatever files is most likely PyTorch's.
                Some(FileKind::Zip) => FileKind::TorchZip.refusal("a safetensors file"),
                Some(kind) => kind.refusal("a safetensors file"),
                None => format!(
                    "expected a header of at most {MAX_HEADER_BYTES} bytes and of what the file has, got one of {length} in {rest} bytes: it \
                     is cut, or no safetensors file"
                ),
            };
            return Err(Error::file(path, reason));
        }
        let header = file.next_bytes(length).map_err(failed)?;
        let header: Header = serde_json::from_slice(&header)
            .map_err(|reason| Error::file(path, format!("its header: {}", short(&reason.to_string()))))?;
        header.check(rest - length).map_err(|reason| Error::file(path, reason))?;
        let bytes = file.next_bytes(rest - length).map_err(failed)?;
        file.check_unchanged().map_err(failed)?;
        Ok((Self { header, bytes }, file))
    }

    /// The writer's notes, in order of their names.
    pub(crate) fn notes(&self) -> &BTreeMap<String, String> {
        &self.header.notes
    }

    /// The bytes of a tensor, and which of these types it has.
    ///
    /// # Errors
    /// Says what is there when there is none of this name, or one of another shape or type.
    pub(crate) fn expect(&self, name: &str, shape: &[usize], types: &[Dtype]) -> Result<(&[u8], Dtype), String> {
        match self.header.tensors.get(name) {
            None => Err(format!("has no `{}`", short(name))),
            Some(info) if info.shape != shape || !types.contains(&info.dtype) => {
                let types = types.iter().map(|dtype| format!("{dtype:?}")).collect::<Vec<_>>().join(" or ");
                let got = format!("{:?} {:?}", info.dtype, info.shape);
                Err(format!("`{}`: expected {types} {shape:?}, got {}", short(name), short(&got)))
            }
            Some(info) => Ok((self.bytes(info), info.dtype)),
        }
    }

    /// All tensors, in order of their names.
    pub(crate) fn iter(&self) -> impl Iterator<Item = NamedTensor<'_>> {
        self.header.tensors.iter().map(|(name, info)| NamedTensor {
            name,
            dtype: info.dtype,
            shape: &info.shape,
            bytes: self.bytes(info),
        })
    }

    fn bytes(&self, info: &TensorInfo) -> &[u8] {
        let (start, end) = info.data_offsets;
        &self.bytes[start..end]
    }
}

/// A tensor of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedTensor<'t> {
    pub(crate) name: &'t str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'t [usize],
    /// As many as type and shape say, little-endian.
    pub(crate) bytes: &'t [u8],
}

/// A file of these notes and tensors, which are in order of their names, that waits to be put at `path`. It takes the header's bytes of the
/// host's memory.
///
/// # Errors
/// [`Error::File`] with the system's reason.
pub(crate) fn write(path: &Path, notes: &BTreeMap<String, String>, tensors: &[NamedTensor<'_>]) -> Result<Replacement> {
    let described = tensors.iter().map(|tensor| (tensor.name.to_owned(), tensor.dtype, tensor.shape.to_vec()));
    let header = header(path, notes, described)?;
    Replacement::write(path, |mut file| {
        file.write_all(&header)?;
        tensors.iter().try_for_each(|tensor| file.write_all(tensor.bytes))
    })
}

/// How a file starts whose tensors lie one behind the other in this order: the header's length, and the header. With texts of the same
/// lengths it is as long.
///
/// # Errors
/// [`Error::File`] when the bytes of the tensors cannot be counted.
pub(crate) fn header(
    path: &Path,
    notes: &BTreeMap<String, String>,
    tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
) -> Result<Vec<u8>> {
    let mut end = 0usize;
    let info = |(name, dtype, shape): (String, Dtype, Vec<usize>)| {
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &extent| bits.checked_mul(extent));
        let stop = bits.and_then(|bits| end.checked_add(bits / 8));
        let stop =
            stop.ok_or_else(|| Error::file(path, format!("the bytes of `{}` cannot be counted", short(&name))))?;
        let data_offsets = (std::mem::replace(&mut end, stop), stop);
        Ok((name, TensorInfo { dtype, shape, data_offsets }))
    };
    let tensors = tensors.into_iter().map(info).collect::<Result<Vec<_>>>()?;
    let notes = notes.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    let metadata = Metadata::new(Some(notes), tensors).map_err(|reason| Error::file(path, reason))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|reason| Error::file(path, reason))?;
    // The format wants the tensors at a multiple of eight bytes.
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header].concat())
}

/// What a file says of itself.
#[derive(Debug, Default)]
struct Header {
    notes: BTreeMap<String, String>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl Header {
    /// An error unless the tensors lie one behind the other, and are `bytes` bytes together.
    fn check(&self, bytes: u64) -> Result<(), String> {
        let mut tensors: Vec<_> = self.tensors.iter().collect();
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        let mut end = 0usize;
        for (name, info) in tensors {
            let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |bits, &extent| bits.checked_mul(extent));
            let stop = bits.filter(|bits| bits % 8 == 0).and_then(|bits| end.checked_add(bits / 8));
            let stop = stop.ok_or_else(|| {
                format!(
                    "`{}`: expected whole bytes that can be counted, got {:?} of a shape of rank {}",
                    short(name),
                    info.dtype,
                    info.shape.len()
                )
            })?;
            if info.data_offsets != (end, stop) {
                let (from, to) = info.data_offsets;
                return Err(format!("`{}`: expected bytes {end} to {stop}, got {from} to {to}", short(name)));
            }
            end = stop;
        }
        if end as u64 == bytes {
            return Ok(());
        }
        Err(format!("expected {end} bytes behind the header, as it says, got {bytes}"))
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Entries)
    }
}

/// Reads a header: each name once.
struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let (mut notes, mut tensors) = (None, BTreeMap::new());
        while let Some(name) = map.next_key::<String>()? {
            let twice = match name.as_str() {
                NOTES => notes.replace(map.next_value::<Option<Texts>>()?).is_some(),
                _ if tensors.contains_key(&name) => true,
                _ => tensors.insert(name.clone(), map.next_value()?).is_some(),
            };
            if twice {
                return Err(A::Error::custom(format_args!("two named `{}`", short(&name))));
            }
        }
        let notes = notes.flatten().map(|Texts(notes)| notes).unwrap_or_default();
        Ok(Header { notes, tensors })
    }
}

/// Texts by name, each name once.
pub(crate) struct Texts(pub(crate) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TextEntries)
    }
}

struct TextEntries;

impl<'de> Visitor<'de> for TextEntries {
    type Value = Texts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Texts, A::Error> {
        let mut texts = BTreeMap::new();
        while let Some((name, text)) = map.next_entry::<String, String>()? {
            if texts.insert(name.clone(), text).is_some() {
                return Err(A::Error::custom(format_args!("two texts named `{}`", short(&name))));
            }
        }
        Ok(Texts(texts))
    }
}
