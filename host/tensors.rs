//! The tensors of a safetensors file, read once.
//!
//! Invariant: every byte is read one time, into memory of our own, and what is checked, hashed and used is that memory. What others do to
//! the file is an error while it is read, and nothing to us afterwards.

#![forbid(unsafe_code)]

use crate::cgroup::Cgroups;
use crate::error::{Error, Result, short};
use crate::files::PlainFile;
use crate::shortage::HostMemory;
use safetensors::tensor::{Dtype, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::Path;

/// Bytes of the number that a file starts with, the length of its header.
const NUMBER_BYTES: u64 = size_of::<u64>() as u64;
/// The longest header that the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;
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
        let failed = |reason: std::io::Error| Error::file(path, reason);
        let mut file = PlainFile::open(path).map_err(failed)?;
        let number: [u8; 8] = bytes(&mut file, path, NUMBER_BYTES)?.try_into().expect("as many as were asked for");
        let (length, rest) = (u64::from_le_bytes(number), file.len() - NUMBER_BYTES);
        if length > rest.min(MAX_HEADER_BYTES) {
            let reason = match of_torch_save(number) {
                Some(kind) => format!(
                    "{kind}, as `torch.save` writes it; expected a safetensors file. `safetensors.torch.save_file(model.state_dict(), path)` \
                     writes one, which `Parameters::load_state_dict` reads"
                ),
                None => format!(
                    "expected a header of at most {MAX_HEADER_BYTES} bytes and of what the file has, got one of {length} in {rest} bytes"
                ),
            };
            return Err(Error::file(path, reason));
        }
        let header = bytes(&mut file, path, length)?;
        let header: Header = serde_json::from_slice(&header)
            .map_err(|reason| Error::file(path, format!("its header: {}", short(&reason.to_string()))))?;
        header.check(rest - length).map_err(|reason| Error::file(path, reason))?;
        let bytes = bytes(&mut file, path, rest - length)?;
        file.check_unchanged().map_err(failed)?;
        Ok(Self { header, bytes })
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

    /// All tensors, in order of their names: name, shape and bytes.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &[usize], &[u8])> {
        self.header.tensors.iter().map(|(name, info)| (name.as_str(), info.shape.as_slice(), self.bytes(info)))
    }

    fn bytes(&self, info: &TensorInfo) -> &[u8] {
        let (start, end) = info.data_offsets;
        &self.bytes[start..end]
    }
}

/// What `torch.save` writes, of a file that starts so and is no safetensors file.
fn of_torch_save(start: [u8; 8]) -> Option<&'static str> {
    match start {
        [b'P', b'K', 3, 4, ..] => Some("a zip archive"),
        [0x80, 2..=5, ..] => Some("a pickle"),
        _ => None,
    }
}

/// The next `count` bytes of a file.
fn bytes(file: &mut PlainFile, path: &Path, count: u64) -> Result<Vec<u8>> {
    // The system may grant memory that it does not have, and end a process that writes to it.
    let available = HostMemory::read(&Cgroups::find(Path::new("/"))).above(0);
    if count > available {
        let reason = format!(
            "expected at most the {available} bytes that the host, or this process's cgroup, has available, got {count}: free some memory"
        );
        return Err(Error::file(path, reason));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(count).ok().filter(|&room| bytes.try_reserve_exact(room).is_ok());
    let room = room.ok_or_else(|| Error::file(path, format!("no memory for its {count} bytes")))?;
    let read = file.take(count).read_to_end(&mut bytes).map_err(|reason| Error::file(path, reason))?;
    if read != room {
        return Err(Error::file(path, format!("cut: expected {count} bytes more, got {read}")));
    }
    Ok(bytes)
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
                NOTES => notes.replace(map.next_value::<Option<Notes>>()?).is_some(),
                _ if tensors.contains_key(&name) => true,
                _ => tensors.insert(name.clone(), map.next_value()?).is_some(),
            };
            if twice {
                return Err(A::Error::custom(format_args!("two named `{}`", short(&name))));
            }
        }
        let notes = notes.flatten().map(|Notes(notes)| notes).unwrap_or_default();
        Ok(Header { notes, tensors })
    }
}

/// Notes: each name once.
struct Notes(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Notes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(NoteEntries)
    }
}

struct NoteEntries;

impl<'de> Visitor<'de> for NoteEntries {
    type Value = Notes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Notes, A::Error> {
        let mut notes = BTreeMap::new();
        while let Some((name, text)) = map.next_entry::<String, String>()? {
            if notes.insert(name.clone(), text).is_some() {
                return Err(A::Error::custom(format_args!("two notes named `{}`", short(&name))));
            }
        }
        Ok(Notes(notes))
    }
}
