//! The tensors of a safetensors file, read once, and written as they are in memory.
//!
//! Invariant: a file that is read whole is read once, into our own memory, and the checks and the
//! result use that memory. Concurrent changes to it are an error during the read, and have no
//! effect after it. A new file gets its name only when it is complete.

#![forbid(unsafe_code)]

use safetensors::tensor::{Dtype, TensorInfo};
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use stepscope_core::internals::{MAX_HEADER_BYTES, NOTES, PIECE_BYTES, Replacement, short};
use stepscope_core::{Error, FileKind, PlainFile, Result};

/// The bytes of the number at a file's start, which is the length of its header.
const NUMBER_BYTES: u64 = size_of::<u64>() as u64;

/// The notes and tensors of a file.
#[derive(Debug)]
pub(crate) struct Tensors {
    header: Header,
    bytes: Vec<u8>,
}

impl Tensors {
    /// Reads a whole file: its header, which must describe exactly the file's bytes, and then those
    /// bytes.
    ///
    /// # Errors
    /// [`Error::File`] if the file is not a plain file, or cannot be read up to its length at
    /// opening. The same if it is detectably written to meanwhile, has another format, or exceeds
    /// the host's available memory.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Ok(Self::read_from(path)?.0)
    }

    /// Reads a whole file, and also returns the open file, for states of several files.
    pub(crate) fn read_from(path: &Path) -> Result<(Self, PlainFile)> {
        let failed = |reason: std::io::Error| Error::file(path, reason);
        let OpenTensors { header, mut file, start } = OpenTensors::open(path)?;
        let bytes = file.next_bytes(file.len() - start).map_err(failed)?;
        file.check_unchanged().map_err(failed)?;
        Ok((Self { header, bytes }, file))
    }

    /// Returns the writer's notes, in order of their names.
    pub(crate) fn notes(&self) -> &BTreeMap<String, String> {
        &self.header.notes
    }

    /// Returns the bytes of a tensor, and which of these types it has.
    ///
    /// # Errors
    /// Describes what the file has instead, if no tensor has this name, shape and type.
    pub(crate) fn expect(&self, name: &str, shape: &[usize], types: &[Dtype]) -> Result<(&[u8], Dtype), String> {
        self.header.expect(name, shape, types).map(|info| (self.bytes(info), info.dtype))
    }

    /// Returns all tensors, in order of their names.
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

/// A file whose header was read, and whose tensors are read one at a time.
#[derive(Debug)]
pub(crate) struct OpenTensors {
    header: Header,
    file: PlainFile,
    /// The first byte after the header.
    start: u64,
}

impl OpenTensors {
    /// Opens a file, and reads its header, which must describe exactly the file's bytes.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = |reason: std::io::Error| Error::file(path, reason);
        let mut file = PlainFile::open(path).map_err(failed)?;
        if file.len() < NUMBER_BYTES {
            let reason = format!("expected a safetensors file, got {} bytes: it is empty or truncated", file.len());
            return Err(Error::file(path, reason));
        }
        let number = file.next_bytes(NUMBER_BYTES).map_err(failed)?;
        let number: [u8; 8] = number.try_into().expect("the read returns 8 bytes");
        let (length, rest) = (u64::from_le_bytes(number), file.len() - NUMBER_BYTES);
        if length > rest.min(MAX_HEADER_BYTES) {
            let kind = file.kind().map_err(failed)?.filter(|&kind| kind != FileKind::Safetensors);
            let reason = match kind {
                // If a model is expected, an unspecific archive is most likely PyTorch's.
                Some(FileKind::Zip) => FileKind::TorchZip.refusal("a safetensors file"),
                Some(kind) => kind.refusal("a safetensors file"),
                None => format!(
                    "expected a header of at most {MAX_HEADER_BYTES} bytes that fits the file, got one of {length} bytes with {rest} left: it is truncated, or not a safetensors file"
                ),
            };
            return Err(Error::file(path, reason));
        }
        let header = file.next_bytes(length).map_err(failed)?;
        let header: Header = serde_json::from_slice(&header)
            .map_err(|reason| Error::file(path, format!("its header: {}", short(&reason.to_string()))))?;
        header.check(rest - length).map_err(|reason| Error::file(path, reason))?;
        Ok(Self { header, file, start: NUMBER_BYTES + length })
    }

    /// Returns the names of all tensors, each with its type and shape.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, Dtype, &[usize])> {
        self.header.tensors.iter().map(|(name, info)| (name.as_str(), info.dtype, info.shape.as_slice()))
    }

    /// Returns the writer's notes, in order of their names.
    pub(crate) fn notes(&self) -> &BTreeMap<String, String> {
        &self.header.notes
    }

    /// Returns an error that describes what the file has instead, if no tensor has this name, shape
    /// and type.
    pub(crate) fn expect(&self, name: &str, shape: &[usize], dtype: Dtype) -> Result<(), String> {
        self.header.expect(name, shape, &[dtype]).map(drop)
    }

    /// Passes the bytes of a tensor, which exists, to `each`, piece by piece, with the first byte
    /// of the piece.
    pub(crate) fn for_each_piece(&self, name: &str, each: &mut dyn FnMut(usize, &[u8])) -> std::io::Result<()> {
        let (start, end) = self.header.tensors[name].data_offsets;
        let mut piece = vec![0; PIECE_BYTES.min(end - start)];
        for first in (0..end - start).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min(end - start - first)];
            self.fill_from(name, first, piece)?;
            each(first, piece);
        }
        Ok(())
    }

    /// Reads the bytes of a tensor, which exists.
    pub(crate) fn bytes(&mut self, name: &str) -> std::io::Result<Vec<u8>> {
        let (start, end) = self.header.tensors[name].data_offsets;
        self.file.seek(SeekFrom::Start(self.start + start as u64))?;
        self.file.next_bytes((end - start) as u64)
    }

    /// Fills `place` with the bytes of a tensor, which exists, from byte `first` on.
    pub(crate) fn fill_from(&self, name: &str, first: usize, place: &mut [u8]) -> std::io::Result<()> {
        let (start, _) = self.header.tensors[name].data_offsets;
        self.file.fill_from(self.start + (start + first) as u64, place)
    }

    /// The file.
    pub(crate) fn file(&self) -> &PlainFile {
        &self.file
    }
}

/// A tensor of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedTensor<'t> {
    pub(crate) name: &'t str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'t [usize],
    /// The bytes of all elements, little-endian.
    pub(crate) bytes: &'t [u8],
}

/// Writes a file of these notes and tensors, which are in order of their names. It waits under a
/// temporary name to be put at `path`. Takes the header's bytes in host memory.
///
/// # Errors
/// [`Error::File`] with the system's reason, and like [`header`].
pub(crate) fn write(path: &Path, notes: &BTreeMap<String, String>, tensors: &[NamedTensor<'_>]) -> Result<Replacement> {
    let described = tensors.iter().map(|tensor| (tensor.name.to_owned(), tensor.dtype, tensor.shape.to_vec()));
    let header = header(path, notes, described)?;
    Replacement::write(path, |mut file| {
        file.write_all(&header)?;
        tensors.iter().try_for_each(|tensor| file.write_all(tensor.bytes))
    })
}

/// Returns the start of a file whose tensors follow one another in this order: the header's length,
/// and the header. It is equally long for texts of equal lengths, and equal for equal arguments.
///
/// # Errors
/// [`Error::File`] if the bytes of the tensors overflow, and like [`check_names`].
pub(crate) fn header(
    path: &Path,
    notes: &BTreeMap<String, String>,
    tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
) -> Result<Vec<u8>> {
    let mut end = 0usize;
    let info = |(name, dtype, shape): (String, Dtype, Vec<usize>)| {
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &extent| bits.checked_mul(extent));
        let stop = bits.and_then(|bits| end.checked_add(bits / 8));
        let stop = stop.ok_or_else(|| Error::file(path, format!("the size of `{}` overflows", short(&name))))?;
        let data_offsets = (std::mem::replace(&mut end, stop), stop);
        Ok((name, TensorInfo { dtype, shape, data_offsets }))
    };
    let tensors = tensors.into_iter().map(info).collect::<Result<Vec<_>>>()?;
    check_names(path, tensors.iter().map(|(name, _)| name.as_str()))?;
    let header = serde_json::to_vec(&NewHeader { notes, tensors });
    let mut header = header.map_err(|reason| Error::file(path, reason))?;
    // The format requires the tensors to start at a multiple of eight bytes.
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header].concat())
}

/// Checks that a file can have tensors of these names.
///
/// # Errors
/// [`Error::File`] for a name that occurs twice, and for the name of the notes.
pub(crate) fn check_names<'n>(path: &Path, names: impl Iterator<Item = &'n str>) -> Result<()> {
    let mut known = HashSet::new();
    for name in names {
        if name == NOTES {
            let reason = format!("cannot have a tensor `{NOTES}`, where the format has its notes: rename the tensor");
            return Err(Error::file(path, reason));
        }
        if !known.insert(name) {
            let reason = format!("cannot have two tensors `{}`: rename one, or leave it out", short(name));
            return Err(Error::file(path, reason));
        }
    }
    Ok(())
}

/// A header to be written: the notes in order of their names, and the tensors in their order.
struct NewHeader<'h> {
    notes: &'h BTreeMap<String, String>,
    tensors: Vec<(String, TensorInfo)>,
}

impl Serialize for NewHeader<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1 + self.tensors.len()))?;
        map.serialize_entry(NOTES, self.notes)?;
        self.tensors.iter().try_for_each(|(name, info)| map.serialize_entry(name, info))?;
        map.end()
    }
}

/// The header of a file.
#[derive(Debug, Default)]
struct Header {
    notes: BTreeMap<String, String>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl Header {
    /// Returns the tensor of this name and shape, if it has one of these types. Otherwise describes
    /// what the file has instead.
    fn expect(&self, name: &str, shape: &[usize], types: &[Dtype]) -> Result<&TensorInfo, String> {
        match self.tensors.get(name) {
            None => Err(format!("has no `{}`", short(name))),
            Some(info) if info.shape != shape || !types.contains(&info.dtype) => {
                let types = types.iter().map(|dtype| format!("{dtype:?}")).collect::<Vec<_>>().join(" or ");
                let got = format!("{:?} {:?}", info.dtype, info.shape);
                Err(format!("`{}`: expected {types} {shape:?}, got {}", short(name), short(&got)))
            }
            Some(info) => Ok(info),
        }
    }

    /// Returns an error unless the tensors follow one another and have `bytes` bytes in total.
    fn check(&self, bytes: u64) -> Result<(), String> {
        let mut tensors: Vec<_> = self.tensors.iter().collect();
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        let mut end = 0usize;
        for (name, info) in tensors {
            let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |bits, &extent| bits.checked_mul(extent));
            let stop = bits.filter(|bits| bits % 8 == 0).and_then(|bits| end.checked_add(bits / 8));
            let stop = stop.ok_or_else(|| {
                format!(
                    "`{}`: expected a size in whole bytes that does not overflow, got {:?} of a shape of rank {}",
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
        Err(format!("expected {end} bytes after the header, as it states, got {bytes}"))
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Entries)
    }
}

/// Parses a header in which each name appears once.
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

/// Texts by name, where each name appears once.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes are in the order of their names, and tensors in their own.
    #[test]
    fn equal_contents_have_equal_headers() {
        let notes: BTreeMap<_, _> = (0..20).map(|number| (format!("note {number:02}"), "\"".to_owned())).collect();
        let header = || {
            let tensors = ["z", "a\n", "m"].map(|name| (name.to_owned(), Dtype::BF16, vec![2, 3]));
            header(Path::new("a"), &notes, tensors).unwrap()
        };
        let first = header();
        assert!((0..20).all(|_| header() == first));
        let text = String::from_utf8(first[8..].to_vec()).unwrap();
        let written = (0..20).map(|number| format!(r#""note {number:02}":"\"""#)).collect::<Vec<_>>().join(",");
        let tensor = |name: &str, start: usize| {
            format!(r#""{name}":{{"dtype":"BF16","shape":[2,3],"data_offsets":[{start},{}]}}"#, start + 12)
        };
        let tensors = [tensor("z", 0), tensor(r"a\n", 12), tensor("m", 24)].join(",");
        assert_eq!(text.trim_end(), format!(r#"{{"__metadata__":{{{written}}},{tensors}}}"#));
        assert_eq!(first.len() % 8, 0);
    }
}
