//! Checkpoints: weights, optimizer state and the caller's own notes in one safetensors file.
//!
//! Invariants:
//!
//! - A path holds either the old file or the whole new one, whenever the process dies.
//! - A restored run continues with the same bits.
//! - Non-finite values are neither written nor restored unless the caller allows them.

#![forbid(unsafe_code)]

use crate::optim::{Optimizer, UpdateRule};
use crate::tensors::{NamedTensor, Tensors, header};
use safetensors::tensor::Dtype;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{self, BufWriter, Seek, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use stepscope_core::internals::{PIECE_BYTES, all_finite, hex, replace_file_by, short, sweep};
use stepscope_core::{
    Buffer, Error, NonFinite, ParameterEntry, ParameterSpec, Parameters, Quantity, Result, Shape, Transfer,
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
/// The most updates that a file may claim, so that further counting cannot overflow.
const MOST_UPDATES: u64 = u64::MAX >> 1;
/// The note with the digest, which detects a damaged file.
const DIGEST: &str = "stepscope.sha256";
/// The bytes of small tensors that are buffered and written together.
const WAITING_BYTES: usize = 1 << 20;

/// The contents of a checkpoint file when it was loaded, verified as complete. It takes as much
/// host memory as the file has bytes, so drop it after restoring. Later changes to the file have no
/// effect on it.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    tensors: Tensors,
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
        state: &[Buffer<f32>],
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
        let mut parts = parts(spec, "", Quantity::Weight, parameters.flat());
        if let Some(optimizer) = optimizer {
            optimizer.check_spec(spec)?;
            notes.insert(UPDATES.into(), optimizer.updates().to_string());
            notes.insert(OPTIMIZER.into(), optimizer.name().into());
            for (prefix, state) in optimizer.prefixes().into_iter().zip(state) {
                parts.extend(self::parts(spec, &prefix, Quantity::OptimizerState, state));
            }
        }
        let file = NewFile { path: path.as_ref(), parts, non_finite, update: optimizer.map(Optimizer::updates) };
        file.write(notes)
    }

    /// Loads a checkpoint. Each byte is read once, and the digest covers exactly the bytes that
    /// were read. Removes temporary files that killed processes have left next to it.
    ///
    /// # Errors
    /// [`Error::File`] if the file is missing, not a plain file, truncated, damaged, modified
    /// meanwhile, of another format, or larger than the host's available memory.
    pub fn load(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        sweep(&path);
        let tensors = Tensors::read(&path)?;
        // Checks that a note has the expected value.
        let check = |key, expected: &str, wrong: &str| {
            let found = tensors.notes().get(key).map_or("", String::as_str);
            let reason = || format!("{wrong}: expected `{key}` `{expected}`, got `{}`", short(found));
            if found == expected { Ok(()) } else { Err(Error::file(&path, reason())) }
        };
        if !tensors.notes().contains_key(FORMAT) {
            let reason = format!(
                "is a safetensors file without `{FORMAT}`; expected a checkpoint. `Parameters::load_state_dict` reads files with only weights, as PyTorch writes them"
            );
            return Err(Error::file(&path, reason));
        }
        check(FORMAT, "1", "not a checkpoint of this version")?;
        let mut digest = FileDigest::of_notes(tensors.notes());
        for NamedTensor { name, shape, bytes, .. } in tensors.iter() {
            digest.begin(name, shape);
            digest.add(bytes);
        }
        check(DIGEST, &digest.end(), "damaged")?;
        Ok(Self { path, tensors })
    }

    /// Returns a note of the writer.
    ///
    /// # Errors
    /// [`Error::File`] if there is no such note.
    pub fn note(&self, key: &str) -> Result<&str> {
        self.tensors
            .notes()
            .get(key)
            .map(String::as_str)
            .ok_or_else(|| Error::file(&self.path, format!("has no note `{key}`")))
    }

    /// Returns all notes in order of their names, including the library's, which begin with
    /// `stepscope.`.
    pub fn notes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tensors.notes().iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Returns the digest of the whole contents.
    #[cfg(feature = "group")]
    pub(crate) fn digest(&self) -> Result<&str> {
        self.note(DIGEST)
    }

    /// Restores the trained weights, and the optimizer state if an optimizer is given. Either
    /// everything fits or nothing is changed.
    ///
    /// # Errors
    /// [`Error::File`] if a tensor is missing, has another shape or type, there is no optimizer
    /// state, or the checkpoint was saved with other frozen weights than the model's.
    /// [`Error::OtherOptimizer`] if the state belongs to another optimizer. [`Error::NotFinite`]
    /// for a non-finite value.
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
        let weights = self.region(&spec, "")?;
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
                let region = |prefix: String| Ok((self.region(&spec, &prefix)?, prefix));
                Some((number, optimizer.prefixes().into_iter().map(region).collect::<Result<Vec<_>>>()?))
            }
        };
        let update = state.as_ref().map(|(updates, _)| *updates);
        let check = |what, prefix: &str, region: &[&[u8]]| {
            transfer.allowed().check((update, what), spec.finite_bytes(prefix, region))
        };
        check(Quantity::Weight, "", &weights)?;
        for (region, prefix) in state.iter().flat_map(|(_, state)| state) {
            check(Quantity::OptimizerState, prefix, region)?;
        }
        let others = optimizer.zip(state).into_iter().flat_map(|(optimizer, (updates, state))| {
            optimizer.restore(updates).iter_mut().zip(state.into_iter().map(|(region, _)| region))
        });
        parameters.overwrite(weights, others, transfer)
    }

    /// Returns an error unless the model has the frozen weights with which the file was saved.
    fn check_frozen(&self, parameters: &Parameters) -> Result<()> {
        let (saved, ours) = (self.tensors.notes().get(FROZEN), parameters.frozen_sha256()?);
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
        let got = self.tensors.notes().get(OPTIMIZER).map_or(FIRST_OPTIMIZER, String::as_str);
        if got == expected {
            return Ok(());
        }
        Err(Error::OtherOptimizer { path: self.path.clone(), expected, got: short(got).to_string() })
    }

    /// Returns the bytes of the tensors whose names start with `prefix`, one per parameter.
    fn region(&self, spec: &ParameterSpec, prefix: &str) -> Result<Vec<&[u8]>> {
        let bytes = |entry: &ParameterEntry| {
            let name = format!("{prefix}{}", entry.name());
            let found = self.tensors.expect(&name, entry.shape().extents(), &[Dtype::F32]);
            found.map(|(bytes, _)| bytes).map_err(|reason| Error::file(&self.path, reason))
        };
        spec.entries().iter().map(bytes).collect()
    }
}

/// A tensor to be written, and its location on the device.
struct SavedTensor<'p> {
    name: String,
    quantity: Quantity,
    shape: Shape,
    buffer: &'p Buffer<f32>,
    range: Range<usize>,
}

impl SavedTensor<'_> {
    fn pieces(&self) -> impl Iterator<Item = Result<Vec<f32>>> {
        self.buffer.pieces(self.range.clone())
    }
}

/// Returns the tensors of a buffer on a device.
fn parts<'p>(spec: &ParameterSpec, prefix: &str, quantity: Quantity, buffer: &'p Buffer<f32>) -> Vec<SavedTensor<'p>> {
    let part = |entry: &ParameterEntry| SavedTensor {
        name: format!("{prefix}{}", entry.name()),
        quantity,
        shape: entry.shape(),
        buffer,
        range: entry.range(),
    };
    spec.entries().iter().map(part).collect()
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
                digest.begin(&part.name, part.shape.extents());
                for piece in part.pieces() {
                    match piece.and_then(|piece| self.check(part, &piece).map(|()| piece)) {
                        Ok(piece) => {
                            digest.add(bytes(&piece));
                            to.write_all(bytes(&piece))?;
                        }
                        Err(error) => {
                            stopped = Some(error);
                            return Err(io::Error::other("was not written completely"));
                        }
                    }
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
        let described = parts.iter().map(|part| (part.name.clone(), Dtype::F32, part.shape.extents().to_vec()));
        header(self.path, notes, described)
    }

    /// Returns an error if values of a tensor must be finite and are not.
    fn check(&self, part: &SavedTensor<'_>, values: &[f32]) -> Result<()> {
        let finite = || (part.name.clone(), all_finite(bytemuck::cast_slice(values)));
        self.non_finite.check((self.update, part.quantity), std::iter::once_with(finite))
    }

    /// Checks all tensors in the model's order.
    fn check_all(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.pieces().try_for_each(|piece| self.check(part, &piece?)))
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

fn bytes(values: &[f32]) -> &[u8] {
    // The format is little-endian, as is every host of a supported GPU.
    const { assert!(cfg!(target_endian = "little")) };
    bytemuck::cast_slice(values)
}
