//! Checkpoints: weights, optimizer state and the caller's own notes in one safetensors file.
//!
//! Invariants:
//!
//! - A path holds either the old file or the whole new one, whenever the process dies.
//! - A restored run continues with the same bits.
//! - Non-finite values are neither written nor restored unless the caller allows them.

#![forbid(unsafe_code)]

use crate::optim::{Optimizer, State, UpdateRule};
use crate::tensors::{OpenTensors, header};
use kernels::companded::RUN_WORDS;
use kernels::update::RUN;
use safetensors::tensor::Dtype;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufWriter, Seek, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use stepscope_core::internals::{
    PIECE_BYTES, all_finite, checksum_of_part, hex, is_finite, replace_file_by, short, sweep,
};
use stepscope_core::{
    AnyBuffer, Error, MasterType, NonFinite, ParameterEntry, ParameterSpec, Parameters, Quantity, Result, StateType,
    Transfer, WriteRegion, bf16,
};

pub(crate) const FORMAT: &str = "stepscope.format";
/// The note that states the memory layout of linear layers' weights, for readers of the file.
pub(crate) const ORIENTATION: &str = "stepscope.linear_weights";
const UPDATES: &str = "stepscope.updates";
/// The note that names the optimizer. Files from before this note are AdamW's.
const OPTIMIZER: &str = "stepscope.optimizer";
const FIRST_OPTIMIZER: &str = "adamw";
/// The note with the digest of the frozen weights, which the file does not contain. Files of models
/// without frozen weights lack it.
const FROZEN: &str = "stepscope.frozen_sha256";
/// The note that names the types of the weights and of the optimizer's state, if they are not f32.
const STORED: &str = "stepscope.stored";
/// The prefix of the corrections of split masters.
const CORRECTION: &str = "correction.";
/// The most updates that a file may claim, so that further counting cannot overflow.
const MOST_UPDATES: u64 = u64::MAX >> 1;
/// The note with the digest, which detects a damaged file.
const DIGEST: &str = "stepscope.sha256";
/// The bytes of small tensors that are buffered and written together.
const WAITING_BYTES: usize = 1 << 20;

/// An open checkpoint file, verified as complete. Its tensors stay in the file until they are
/// restored, so the host needs memory for pieces only. The file may be replaced or removed
/// meanwhile; if it is written to, a restore is an error.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    file: OpenTensors,
    /// The properties of each tensor, by name, from the reading that verified the file.
    verified: BTreeMap<String, Verified>,
}

/// The properties of a tensor in a file.
#[derive(Clone, Copy, Debug)]
struct Verified {
    is_finite: bool,
    checksum: u64,
}

impl Checkpoint {
    /// Writes the trained weights, the optimizer state if given, and `notes` to `path`, replacing
    /// the file as a whole. Frozen weights are not written, but their digest is, and a restore
    /// compares it with the model's. It writes a temporary file in the same folder, flushes it to
    /// disk and renames it. Waits for the device.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for non-finite weights or state. [`Error::Misuse`] if two tensors would
    /// have the same name, such as a parameter `adamw.first.w` and the first moment of `w`.
    /// [`Error::File`] with the system's reason, in which case the old file is untouched.
    pub fn save(
        path: impl AsRef<Path>,
        parameters: &Parameters,
        optimizer: Option<&Optimizer<dyn UpdateRule>>,
        notes: &[(&str, String)],
    ) -> Result<()> {
        Self::save_with(path, parameters, optimizer, notes, NonFinite::Reject)
    }

    /// Saves like [`Checkpoint::save`], with `non_finite` deciding whether non-finite values are
    /// allowed.
    pub fn save_with(
        path: impl AsRef<Path>,
        parameters: &Parameters,
        optimizer: Option<&Optimizer<dyn UpdateRule>>,
        notes: &[(&str, String)],
        non_finite: NonFinite,
    ) -> Result<()> {
        let state = optimizer.map(Optimizer::whole_state).transpose()?.unwrap_or_default();
        Self::save_whole(path, parameters, optimizer, state, notes, non_finite)
    }

    /// Saves like [`Checkpoint::save_with`], with the whole optimizer state in separate buffers on
    /// a device. Data is read from the device in pieces, so the host needs little memory for it.
    pub(crate) fn save_whole(
        path: impl AsRef<Path>,
        parameters: &Parameters,
        optimizer: Option<&Optimizer<dyn UpdateRule>>,
        state: &[State],
        notes: &[(&str, String)],
        non_finite: NonFinite,
    ) -> Result<()> {
        let spec = parameters.spec();
        let mut notes: BTreeMap<String, String> =
            notes.iter().map(|(key, value)| (key.to_string(), value.clone())).collect();
        notes.insert(FORMAT.into(), "1".into());
        notes.insert(ORIENTATION.into(), "inputs x outputs".into());
        if let Some(digest) = parameters.frozen_sha256()? {
            notes.insert(FROZEN.into(), digest);
        }
        if let Some(stored) = stored(spec) {
            notes.insert(STORED.into(), stored);
        }
        let mut parts = Vec::new();
        for (prefix, region) in ["", CORRECTION].into_iter().zip(parameters.regions()) {
            parts.extend(self::parts(spec, prefix, Quantity::Weight, region));
        }
        if let Some(optimizer) = optimizer {
            optimizer.check_spec(spec)?;
            notes.insert(UPDATES.into(), optimizer.updates().to_string());
            notes.insert(OPTIMIZER.into(), optimizer.name().into());
            for (prefix, state) in optimizer.prefixes().into_iter().zip(state) {
                parts.extend(self::parts(spec, &prefix, Quantity::OptimizerState, state.buffer()));
            }
        }
        let file = NewFile { path: path.as_ref(), parts, non_finite, update: optimizer.map(Optimizer::updates) };
        file.write(notes)
    }

    /// Opens a checkpoint, and reads it once to verify its digest. Removes temporary files that
    /// killed processes have left next to it.
    ///
    /// # Errors
    /// [`Error::File`] if the file is missing, not a plain file, truncated, damaged, modified
    /// meanwhile, or of another format.
    pub fn load(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        sweep(&path);
        let file = OpenTensors::open(&path)?;
        // Checks that a note has the expected value.
        let check = |key, expected: &str, wrong: &str| {
            let found = file.notes().get(key).map_or("", String::as_str);
            let reason = || format!("{wrong}: expected `{key}` `{expected}`, got `{}`", short(found));
            if found == expected { Ok(()) } else { Err(Error::file(&path, reason())) }
        };
        if !file.notes().contains_key(FORMAT) {
            let reason = format!(
                "is a safetensors file without `{FORMAT}`; expected a checkpoint. `Parameters::load_state_dict` reads files with only weights, as PyTorch writes them"
            );
            return Err(Error::file(&path, reason));
        }
        check(FORMAT, "1", "not a checkpoint of this version")?;
        let failed = |reason: io::Error| Error::file(&path, reason);
        let (mut digest, mut verified) = (FileDigest::of_notes(file.notes()), BTreeMap::new());
        for (name, dtype, shape) in file.iter() {
            digest.begin(name, shape);
            let mut of_tensor = Verified { is_finite: true, checksum: 0 };
            let read = file.for_each_piece(name, &mut |first, piece| {
                digest.add(piece);
                of_tensor.is_finite &= Stored::of_file(dtype).is_none_or(|stored| stored.is_finite(first, piece));
                of_tensor.checksum = of_tensor.checksum.wrapping_add(checksum_of_part(first, piece));
            });
            read.map_err(failed)?;
            verified.insert(name.to_owned(), of_tensor);
        }
        file.file().check_unchanged().map_err(failed)?;
        check(DIGEST, &digest.end(), "damaged")?;
        Ok(Self { path, file, verified })
    }

    /// Returns a note of the writer.
    ///
    /// # Errors
    /// [`Error::File`] if there is no such note.
    pub fn note(&self, key: &str) -> Result<&str> {
        self.file
            .notes()
            .get(key)
            .map(String::as_str)
            .ok_or_else(|| Error::file(&self.path, format!("has no note `{key}`")))
    }

    /// Returns all notes in order of their names, including the library's, which begin with
    /// `stepscope.`.
    pub fn notes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.file.notes().iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Returns the digest of the whole contents.
    #[cfg(feature = "group")]
    pub(crate) fn digest(&self) -> Result<&str> {
        self.note(DIGEST)
    }

    /// Restores the trained weights, and the optimizer state if an optimizer is given. They are
    /// read from the file in pieces, on their way to the device.
    ///
    /// # Errors
    /// [`Error::File`] if a tensor is missing, has another shape or type, there is no optimizer
    /// state, or the checkpoint was saved with other frozen weights than the model's.
    /// [`Error::OtherOptimizer`] if the state belongs to another optimizer. [`Error::NotFinite`]
    /// for a non-finite value. Nothing has been changed after any of these.
    ///
    /// [`Error::File`] if the file cannot be read, or was written to since it was loaded. After
    /// that, some weights and some of the state are already the new ones.
    pub fn restore(
        &self,
        parameters: &mut Parameters,
        optimizer: Option<&mut Optimizer<dyn UpdateRule>>,
    ) -> Result<()> {
        self.restore_with(parameters, optimizer, Transfer::new())
    }

    /// Restores like [`Checkpoint::restore`], with a deadline, progress or allowed non-finite
    /// values. Weights and state are one upload.
    pub fn restore_with(
        &self,
        parameters: &mut Parameters,
        optimizer: Option<&mut Optimizer<dyn UpdateRule>>,
        transfer: Transfer<'_>,
    ) -> Result<()> {
        let spec = parameters.spec().clone();
        self.check_frozen(parameters)?;
        self.check_stored(&spec)?;
        let regions = ["", CORRECTION].into_iter().zip(parameters.regions());
        let weights = regions.map(|(prefix, region)| self.region(&spec, prefix, region)).collect::<Result<Vec<_>>>()?;
        let reading = Reading::default();
        let state = match &optimizer {
            None => None,
            Some(optimizer) => {
                optimizer.check_spec(&spec)?;
                optimizer.whole_state()?;
                let updates = self.note(UPDATES)?;
                let number = updates.parse().ok().filter(|&updates: &u64| updates <= MOST_UPDATES);
                let number = number.ok_or_else(|| {
                    let got = short(updates);
                    Error::file(
                        &self.path,
                        format!("expected `{UPDATES}` to be a number up to {MOST_UPDATES}, got `{got}`"),
                    )
                })?;
                self.check_optimizer(optimizer.name())?;
                let region = |(prefix, state): (String, _)| self.region(&spec, &prefix, state);
                let regions = optimizer.prefixes().into_iter().zip(optimizer.state()).map(region);
                Some((number, regions.collect::<Result<Vec<_>>>()?))
            }
        };
        let update = state.as_ref().map(|(updates, _)| *updates);
        let check = |what, names: &[String]| {
            let named = |name: &String| (name.clone(), self.verified[name].is_finite);
            transfer.allowed().check((update, what), names.iter().map(named))
        };
        weights.iter().try_for_each(|names| check(Quantity::Weight, names))?;
        let of_state = state.iter().flat_map(|(_, state)| state);
        of_state.clone().try_for_each(|names| check(Quantity::OptimizerState, names))?;
        let names: Vec<Vec<String>> = weights.iter().chain(of_state).cloned().collect();
        let mut writers = names.iter().map(|names| self.writer(names, &reading));
        let weights = writers.by_ref().take(weights.len()).collect();
        let others: Vec<_> = match optimizer.zip(update) {
            None => Vec::new(),
            Some((optimizer, updates)) => optimizer
                .restore(updates)
                .iter_mut()
                .zip(writers)
                .map(|(state, write)| state.contents(&spec, write))
                .collect(),
        };
        parameters.overwrite(weights, others, transfer)?;
        self.check_read(&names.concat(), reading)
    }

    /// Returns the writer of a region's bytes, whose tensors have these names, and notes what it
    /// reads.
    fn writer<'r>(&'r self, names: &'r [String], reading: &'r Reading) -> Box<WriteRegion<'r>> {
        Box::new(move |number, _, first, part| {
            let read = self.file.fill_from(&names[number], first, part);
            reading.add(&names[number], read.map(|()| checksum_of_part(first, part)));
        })
    }

    /// Returns an error unless the tensors of these names were read as they were verified.
    fn check_read(&self, names: &[String], reading: Reading) -> Result<()> {
        let failed = |reason| Error::file(&self.path, reason);
        let mut found = reading.0.into_inner().unwrap_or_else(PoisonError::into_inner).map_err(failed)?;
        let changed = names.iter().find(|&name| found.remove(name).unwrap_or(0) != self.verified[name].checksum);
        match changed {
            None => Ok(()),
            Some(name) => {
                let reason = format!("`{}` was written to after the file was loaded: load it again", short(name));
                Err(Error::file(&self.path, reason))
            }
        }
    }

    /// Returns an error unless the file stores weights and state as the model does.
    fn check_stored(&self, spec: &ParameterSpec) -> Result<()> {
        let (saved, ours) = (self.file.notes().get(STORED), stored(spec));
        if saved == ours.as_ref() {
            return Ok(());
        }
        let [saved, ours] = [saved, ours.as_ref()]
            .map(|stored| stored.map_or("weights and state in f32".into(), |stored| short(stored).to_string()));
        let reason = format!(
            "was saved with {saved}, but the model has {ours}: resume with the setting of memory with which the run began"
        );
        Err(Error::file(&self.path, reason))
    }

    /// Returns an error unless the model has the frozen weights with which the file was saved.
    fn check_frozen(&self, parameters: &Parameters) -> Result<()> {
        let (saved, ours) = (self.file.notes().get(FROZEN), parameters.frozen_sha256()?);
        if saved == ours.as_ref() {
            return Ok(());
        }
        let [saved, ours] = [saved, ours.as_ref()].map(|digest| match digest {
            Some(digest) => format!("frozen weights with SHA-256 `{}`", short(digest)),
            None => "no frozen weights".into(),
        });
        let reason = format!(
            "was saved with {saved}, but the model has {ours}: load the frozen weights with which the run began, in the same type, and freeze the same parameters"
        );
        Err(Error::file(&self.path, reason))
    }

    /// Returns an error unless the state belongs to the optimizer `expected`.
    fn check_optimizer(&self, expected: &'static str) -> Result<()> {
        let got = self.file.notes().get(OPTIMIZER).map_or(FIRST_OPTIMIZER, String::as_str);
        if got == expected {
            return Ok(());
        }
        Err(Error::OtherOptimizer { path: self.path.clone(), expected, got: short(got).to_string() })
    }

    /// Returns the names of the tensors of a region, which start with `prefix`, one per parameter.
    fn region(&self, spec: &ParameterSpec, prefix: &str, region: AnyBuffer<'_>) -> Result<Vec<String>> {
        let stored = Stored::of(spec, region);
        let name = |entry: &ParameterEntry| {
            let name = format!("{prefix}{}", entry.name());
            let found = self.file.expect(&name, &stored.extents(entry), stored.dtype());
            found.map(|()| name).map_err(|reason| Error::file(&self.path, reason))
        };
        spec.entries().iter().map(name).collect()
    }
}

/// The checksums of the tensors that were read, by name, or the first error.
struct Reading(Mutex<io::Result<HashMap<String, u64>>>);

impl Default for Reading {
    fn default() -> Self {
        Self(Mutex::new(Ok(HashMap::new())))
    }
}

impl Reading {
    fn add(&self, name: &str, read: io::Result<u64>) {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(sums) = &mut *found else { return };
        match read {
            Err(reason) => *found = Err(reason),
            Ok(part) => match sums.get_mut(name) {
                Some(sum) => *sum = sum.wrapping_add(part),
                None => drop(sums.insert(name.to_owned(), part)),
            },
        }
    }
}

/// Returns the types of the weights and the state, if they are not f32.
fn stored(spec: &ParameterSpec) -> Option<String> {
    let (masters, state) = (spec.masters(), spec.state());
    let named = format!("{masters:?} masters and {state:?} state").to_lowercase();
    ((masters, state) != (MasterType::F32, StateType::F32)).then_some(named)
}

/// The type in which a file has a region.
#[derive(Clone, Copy, PartialEq)]
enum Stored {
    F32,
    Bf16,
    /// The corrections of split masters, a byte for each weight.
    Correction,
    /// Runs of state in 8 bits: words of codes, and the scale.
    Bits8,
}

impl Stored {
    fn of(spec: &ParameterSpec, region: AnyBuffer<'_>) -> Self {
        match region {
            AnyBuffer::F32(_) => Self::F32,
            AnyBuffer::Bf16(_) => Self::Bf16,
            AnyBuffer::U32(_) if region.bytes() == spec.elements() => Self::Correction,
            AnyBuffer::U32(_) => Self::Bits8,
        }
    }

    /// Returns the type of a tensor in a file, if regions are stored as such tensors.
    fn of_file(dtype: Dtype) -> Option<Self> {
        [Self::F32, Self::Bf16, Self::Correction, Self::Bits8].into_iter().find(|stored| stored.dtype() == dtype)
    }

    fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::Correction => Dtype::I8,
            Self::Bits8 => Dtype::U32,
        }
    }

    /// The bytes of 64 elements.
    fn run_bytes(self) -> usize {
        match self {
            Self::F32 => RUN * size_of::<f32>(),
            Self::Bf16 => RUN * size_of::<bf16>(),
            Self::Correction => RUN,
            Self::Bits8 => RUN_WORDS * size_of::<u32>(),
        }
    }

    /// The extents of a parameter's tensor in the file.
    fn extents(self, entry: &ParameterEntry) -> Vec<usize> {
        match self {
            Self::Bits8 => vec![entry.shape().elements().div_ceil(RUN), RUN_WORDS],
            _ => entry.shape().extents().to_vec(),
        }
    }

    /// True if all numbers of a part of a tensor are finite. The part begins at a word, byte
    /// `first` of the tensor.
    fn is_finite(self, first: usize, part: &[u8]) -> bool {
        match self {
            Self::F32 => all_finite(part),
            Self::Bf16 => part.as_chunks().0.iter().all(|&half| bf16::from_le_bytes(half).is_finite()),
            Self::Correction => true,
            Self::Bits8 => {
                let words = (first / size_of::<u32>()..).zip(part.as_chunks().0);
                let mut scales = words.filter(|(at, _)| at % RUN_WORDS == RUN_WORDS - 1);
                scales.all(|(_, &scale)| is_finite(f32::from_le_bytes(scale)))
            }
        }
    }
}

/// A tensor to be written, and its location on the device.
struct SavedTensor<'p> {
    name: String,
    quantity: Quantity,
    stored: Stored,
    extents: Vec<usize>,
    region: AnyBuffer<'p>,
    bytes: Range<usize>,
}

impl SavedTensor<'_> {
    /// Passes the tensor's bytes to `each`, piece by piece, with true if they are finite.
    fn for_each_piece(&self, each: &mut dyn FnMut(&[u8], bool) -> Result<()>) -> Result<()> {
        let mut first = 0;
        self.region.for_each_piece(self.bytes.clone(), &mut |piece| {
            let finite = self.stored.is_finite(first, piece);
            first += piece.len();
            each(piece, finite)
        })
    }
}

/// Returns the tensors of a region on a device.
fn parts<'p>(
    spec: &ParameterSpec,
    prefix: &str,
    quantity: Quantity,
    region: AnyBuffer<'p>,
) -> impl Iterator<Item = SavedTensor<'p>> {
    let stored = Stored::of(spec, region);
    spec.entries().iter().map(move |entry| SavedTensor {
        name: format!("{prefix}{}", entry.name()),
        quantity,
        stored,
        extents: stored.extents(entry),
        region,
        bytes: entry.bytes_in(stored.run_bytes()),
    })
}

/// A file to be written, and which values it may hold.
struct NewFile<'p> {
    path: &'p Path,
    /// The weights, then the state, each in the order of the parameters.
    parts: Vec<SavedTensor<'p>>,
    non_finite: NonFinite,
    update: Option<u64>,
}

/// Returns the most host memory that writing a file of such tensors takes: one piece, and the write
/// buffer.
pub(crate) fn writing_bytes(spec: &ParameterSpec) -> u64 {
    let largest = spec.entries().iter().map(|entry| size_of::<f32>() * entry.range().len()).max().unwrap_or(0);
    (PIECE_BYTES.min(largest) + WAITING_BYTES) as u64
}

impl NewFile<'_> {
    /// Reads each tensor once. Its bytes go to the file and into the digest. The digest is written
    /// last, but lies before them in the file.
    fn write(&self, mut notes: BTreeMap<String, String>) -> Result<()> {
        let mut parts: Vec<&SavedTensor<'_>> = self.parts.iter().collect();
        parts.sort_by(|one, other| one.name.cmp(&other.name));
        let twice = parts.windows(2).find(|pair| pair[0].name == pair[1].name).map(|pair| pair[0].name.as_str());
        if let Some(name) = twice {
            let expected = "different names for all parameters and their optimizer state";
            return Err(Error::misuse("checkpoint", expected, format!("two named `{}`", short(name))));
        }
        let mut digest = FileDigest::of_notes(&notes);
        notes.insert(DIGEST.into(), "0".repeat(2 * Sha256::output_size()));
        let header = self.header(&notes, &parts)?;
        // An error from a source other than the file.
        let mut stopped = None;
        let written = replace_file_by(self.path, |file| {
            let mut to = BufWriter::with_capacity(WAITING_BYTES, file);
            to.write_all(&header)?;
            for part in &parts {
                digest.begin(&part.name, &part.extents);
                let mut failed = None;
                let read = part.for_each_piece(&mut |piece, finite| {
                    self.check(part, finite)?;
                    digest.add(piece);
                    if failed.is_none() {
                        failed = to.write_all(piece).err();
                    }
                    Ok(())
                });
                if let Err(error) = read {
                    stopped = Some(error);
                    return Err(io::Error::other("was not written completely"));
                }
                if let Some(error) = failed {
                    return Err(error);
                }
            }
            notes.insert(DIGEST.into(), digest.end());
            let header = self.header(&notes, &parts).map_err(io::Error::other)?;
            to.rewind()?;
            to.write_all(&header)?;
            to.flush()
        });
        match stopped {
            // If several tensors are not finite, the error names the first one in the model's
            // order.
            Some(error @ Error::NotFinite { .. }) => self.check_all().and(Err(error)),
            Some(error) => Err(error),
            None => written,
        }
    }

    /// Returns the file's header, whose length does not depend on the digest's value.
    fn header(&self, notes: &BTreeMap<String, String>, parts: &[&SavedTensor<'_>]) -> Result<Vec<u8>> {
        let described = parts.iter().map(|part| (part.name.clone(), part.stored.dtype(), part.extents.clone()));
        header(self.path, notes, described)
    }

    /// Returns an error if values of a tensor must be finite and are not.
    fn check(&self, part: &SavedTensor<'_>, finite: bool) -> Result<()> {
        let named = || (part.name.clone(), finite);
        self.non_finite.check((self.update, part.quantity), std::iter::once_with(named))
    }

    /// Checks all tensors in the model's order.
    fn check_all(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.for_each_piece(&mut |_, finite| self.check(part, finite)))
    }
}

/// A SHA-256 over all notes except its own and then all tensors, each in the order of their names.
/// A note contributes `LENGTH:KEY` and `LENGTH:VALUE`. A tensor contributes `LENGTH:NAME`, its
/// shape as `[2, 3]`, and its bytes.
struct FileDigest(Sha256);

impl FileDigest {
    fn of_notes(notes: &BTreeMap<String, String>) -> Self {
        let mut hash = Sha256::new();
        for (key, value) in notes.iter().filter(|(key, _)| *key != DIGEST) {
            hash.update(format!("{}:{key}{}:{value}", key.len(), value.len()));
        }
        Self(hash)
    }

    /// Begins a tensor, whose bytes follow.
    fn begin(&mut self, name: &str, shape: &[usize]) {
        self.0.update(format!("{}:{name}{shape:?}", name.len()));
    }

    fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn end(self) -> String {
        hex(&self.0.finalize())
    }
}
