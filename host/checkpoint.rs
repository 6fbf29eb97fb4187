//! Checkpoints: weights, the optimiser's state and the caller's own notes in one safetensors file.
//!
//! Invariant: a path holds either the old file or the whole new one, whenever the process dies; a restored run
//! continues with the same bits. What is not finite is neither written nor restored unless it is asked for.

#![forbid(unsafe_code)]

use crate::digest::hex;
use crate::error::{Error, Quantity, Result, short};
use crate::files::{replace_file_by, sweep};
use crate::finite::{Numbers, all_finite};
use crate::memory::{Buffer, PIECE_BYTES};
use crate::optim::{Optimizer, UpdateRule};
use crate::params::{Layout, LayoutEntry, Parameters};
use crate::tensor::Shape;
use crate::tensors::{NamedTensor, Tensors, header};
use crate::upload::Transfer;
use safetensors::tensor::Dtype;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{self, BufWriter, Seek, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

pub(crate) const FORMAT: &str = "stepscope.format";
/// The note that says how the weights of linear layers lie, for whoever looks into a file.
pub(crate) const ORIENTATION: &str = "stepscope.linear_weights";
const UPDATES: &str = "stepscope.updates";
/// The note that names the optimiser. Files from before it are AdamW's.
const OPTIMIZER: &str = "stepscope.optimizer";
const FIRST_OPTIMIZER: &str = "adamw";
/// The most updates that a file may claim: counting on from there cannot overflow.
const MOST_UPDATES: u64 = u64::MAX >> 1;
/// The note that tells a damaged file.
const DIGEST: &str = "stepscope.sha256";
/// Bytes of small tensors that wait to be written together.
const WAITING_BYTES: usize = 1 << 20;

/// What a checkpoint's file held when it was loaded, known to be whole. It takes as much of the host's memory as the file has bytes: drop
/// it when all is restored. What becomes of the file does not matter any more.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    tensors: Tensors,
}

impl Checkpoint {
    /// Writes weights, the optimiser's state if given, and `notes` to `path`, replacing it as a whole: a temporary
    /// file in the same folder is written, flushed to the disk and renamed. Waits for the device.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for weights or state that are not finite; [`Error::Misuse`] when two tensors would have one name, as a
    /// parameter `adamw.first.w` and the first moment of `w` have; [`Error::File`] with the system's reason; the old file is untouched
    /// then.
    pub fn save(
        path: impl AsRef<Path>,
        parameters: &Parameters,
        optimizer: Option<&Optimizer<dyn UpdateRule>>,
        notes: &[(&str, String)],
    ) -> Result<()> {
        Self::save_with(path, parameters, optimizer, notes, Numbers::Finite)
    }

    /// [`Checkpoint::save`] of weights and state that may hold these numbers.
    ///
    /// # Errors
    /// As for [`Checkpoint::save`].
    pub fn save_with(
        path: impl AsRef<Path>,
        parameters: &Parameters,
        optimizer: Option<&Optimizer<dyn UpdateRule>>,
        notes: &[(&str, String)],
        numbers: Numbers,
    ) -> Result<()> {
        let state = optimizer.map(Optimizer::whole_state).transpose()?.unwrap_or_default();
        Self::save_whole(path, parameters, (optimizer, state), notes, numbers)
    }

    /// [`Checkpoint::save_with`] of an optimiser's state that is somewhere else: whole, on a device. What is written is read from the device in
    /// pieces, so that the host needs no memory for it.
    pub(crate) fn save_whole(
        path: impl AsRef<Path>,
        parameters: &Parameters,
        (optimizer, state): (Option<&Optimizer<dyn UpdateRule>>, &[Buffer<f32>]),
        notes: &[(&str, String)],
        numbers: Numbers,
    ) -> Result<()> {
        let layout = parameters.layout();
        let mut notes: BTreeMap<String, String> =
            notes.iter().map(|(key, value)| (key.to_string(), value.clone())).collect();
        notes.insert(FORMAT.into(), "1".into());
        notes.insert(ORIENTATION.into(), "inputs x outputs".into());
        let mut parts = parts(layout, ("", Quantity::Weight), parameters.flat());
        if let Some(optimizer) = optimizer {
            optimizer.check_layout(layout)?;
            notes.insert(UPDATES.into(), optimizer.updates().to_string());
            notes.insert(OPTIMIZER.into(), optimizer.name().into());
            for (prefix, state) in optimizer.prefixes().into_iter().zip(state) {
                parts.extend(self::parts(layout, (&prefix, Quantity::OptimizerState), state));
            }
        }
        let file = NewFile { path: path.as_ref(), parts, numbers, update: optimizer.map(Optimizer::updates) };
        file.write(notes)
    }

    /// Reads a checkpoint: each byte once, and its digest is that of the bytes that were read. Temporary files that killed processes have
    /// left beside it are removed.
    ///
    /// # Errors
    /// [`Error::File`] when it is missing, no plain file, cut, damaged, written to meanwhile, not of this format, or larger than the host's
    /// available memory.
    pub fn load(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        sweep(&path);
        let tensors = Tensors::read(&path)?;
        // What the file says, which must be so.
        let check = |key, expected: &str, wrong: &str| {
            let found = tensors.notes().get(key).map_or("", String::as_str);
            let reason = || format!("{wrong}: expected `{key}` `{expected}`, got `{}`", short(found));
            if found == expected { Ok(()) } else { Err(Error::file(&path, reason())) }
        };
        if !tensors.notes().contains_key(FORMAT) {
            let reason = format!(
                "is a safetensors file without `{FORMAT}`; expected a checkpoint. A file of weights alone, as PyTorch writes it, is read by \
                 `Parameters::load_state_dict`"
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

    /// A note of the writer.
    ///
    /// # Errors
    /// [`Error::File`] when it is not there.
    pub fn note(&self, key: &str) -> Result<&str> {
        self.tensors
            .notes()
            .get(key)
            .map(String::as_str)
            .ok_or_else(|| Error::file(&self.path, format!("has no note `{key}`")))
    }

    /// All notes of the writer, in order of their names, with those of the library, which begin
    /// with `stepscope.`.
    pub fn notes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tensors.notes().iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// The digest of all that it holds.
    pub(crate) fn digest(&self) -> Result<&str> {
        self.note(DIGEST)
    }

    /// Puts weights, and the optimiser's state if one is given, back. Either everything fits or nothing is changed.
    ///
    /// # Errors
    /// [`Error::File`] when a tensor is missing, has another shape or type, or there is no optimiser state;
    /// [`Error::OtherOptimizer`] when it is another optimiser's; [`Error::NotFinite`] when one holds such a number; when the upload
    /// fails, as for [`Parameters::load`].
    pub fn restore(
        &self,
        parameters: &mut Parameters,
        optimizer: Option<&mut Optimizer<dyn UpdateRule>>,
    ) -> Result<()> {
        self.restore_with(parameters, optimizer, Transfer::new())
    }

    /// [`Checkpoint::restore`] with a deadline, progress or numbers that are not finite: weights and state are one upload.
    ///
    /// # Errors
    /// As for [`Checkpoint::restore`].
    pub fn restore_with(
        &self,
        parameters: &mut Parameters,
        optimizer: Option<&mut Optimizer<dyn UpdateRule>>,
        transfer: Transfer<'_>,
    ) -> Result<()> {
        let layout = parameters.layout().clone();
        let weights = self.region(&layout, "")?;
        let state = match &optimizer {
            None => None,
            Some(optimizer) => {
                optimizer.check_layout(&layout)?;
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
                let region = |prefix: String| Ok((self.region(&layout, &prefix)?, prefix));
                Some((number, optimizer.prefixes().into_iter().map(region).collect::<Result<Vec<_>>>()?))
            }
        };
        let update = state.as_ref().map(|(updates, _)| *updates);
        let check = |what, prefix: &str, region: &[&[u8]]| {
            transfer.allowed().check((update, what), layout.finite_bytes(prefix, region))
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

    /// An error unless the optimiser's state is that of the optimiser `expected`.
    fn check_optimizer(&self, expected: &'static str) -> Result<()> {
        let got = self.tensors.notes().get(OPTIMIZER).map_or(FIRST_OPTIMIZER, String::as_str);
        if got == expected {
            return Ok(());
        }
        Err(Error::OtherOptimizer { path: self.path.clone(), expected, got: short(got).to_string() })
    }

    /// The bytes of the tensors whose names start with `prefix`, for each parameter.
    fn region(&self, layout: &Layout, prefix: &str) -> Result<Vec<&[u8]>> {
        let bytes = |entry: &LayoutEntry| {
            let name = format!("{prefix}{}", entry.name());
            let found = self.tensors.expect(&name, entry.shape().extents(), &[Dtype::F32]);
            found.map(|(bytes, _)| bytes).map_err(|reason| Error::file(&self.path, reason))
        };
        layout.entries().iter().map(bytes).collect()
    }
}

/// A tensor of a file that is to be written, where it is on the device.
struct Part<'p> {
    name: String,
    quantity: Quantity,
    shape: Shape,
    buffer: &'p Buffer<f32>,
    range: Range<usize>,
}

impl Part<'_> {
    fn pieces(&self) -> impl Iterator<Item = Result<Vec<f32>>> {
        self.buffer.pieces(self.range.clone())
    }
}

/// The tensors of a region of a device.
fn parts<'p>(layout: &Layout, (prefix, quantity): (&str, Quantity), buffer: &'p Buffer<f32>) -> Vec<Part<'p>> {
    let part = |entry: &LayoutEntry| Part {
        name: format!("{prefix}{}", entry.name()),
        quantity,
        shape: entry.shape(),
        buffer,
        range: entry.range(),
    };
    layout.entries().iter().map(part).collect()
}

/// A file that is to be written, and which numbers it may hold.
struct NewFile<'p> {
    path: &'p Path,
    /// Weights, then state, each in the layout's order.
    parts: Vec<Part<'p>>,
    numbers: Numbers,
    update: Option<u64>,
}

/// The most of the host's memory that writing a file of such tensors takes: a piece, and what waits to be written.
pub(crate) fn writing_bytes(layout: &Layout) -> u64 {
    let largest = layout.entries().iter().map(|entry| size_of::<f32>() * entry.range().len()).max().unwrap_or(0);
    (PIECE_BYTES.min(largest) + WAITING_BYTES) as u64
}

impl NewFile<'_> {
    /// Reads each tensor once: its bytes go to the file and into the digest, which stands before them and is written last.
    fn write(&self, mut notes: BTreeMap<String, String>) -> Result<()> {
        let mut parts: Vec<&Part<'_>> = self.parts.iter().collect();
        parts.sort_by(|one, other| one.name.cmp(&other.name));
        let twice = parts.windows(2).find(|pair| pair[0].name == pair[1].name).map(|pair| pair[0].name.as_str());
        if let Some(name) = twice {
            let expected = "a different name for each parameter and what the optimiser keeps for it";
            return Err(Error::misuse("checkpoint", expected, format!("two named `{}`", short(name))));
        }
        let mut digest = FileDigest::of_notes(&notes);
        notes.insert(DIGEST.into(), "0".repeat(2 * Sha256::output_size()));
        let header = self.header(&notes, &parts)?;
        // An error that is not the file's.
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
                            return Err(io::Error::other("not written to its end"));
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
            // Of the tensors of which one is not finite, the first of the model is named.
            Some(error @ Error::NotFinite { .. }) => self.check_all().and(Err(error)),
            Some(error) => Err(error),
            None => written,
        }
    }

    /// The file's start, which is as long whatever the digest is.
    fn header(&self, notes: &BTreeMap<String, String>, parts: &[&Part<'_>]) -> Result<Vec<u8>> {
        let described = parts.iter().map(|part| (part.name.clone(), Dtype::F32, part.shape.extents().to_vec()));
        header(self.path, notes, described)
    }

    /// An error for numbers of a tensor that are not finite, if they should be.
    fn check(&self, part: &Part<'_>, values: &[f32]) -> Result<()> {
        let finite = || (part.name.clone(), all_finite(bytemuck::cast_slice(values)));
        self.numbers.check((self.update, part.quantity), std::iter::once_with(finite))
    }

    /// The same for all tensors, in the model's order.
    fn check_all(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.pieces().try_for_each(|piece| self.check(part, &piece?)))
    }
}

/// The SHA-256, in hexadecimal, over all notes but its own and then all tensors, each in the order of their names: for a
/// note `LENGTH:KEY` and `LENGTH:VALUE`, for a tensor `LENGTH:NAME`, its shape as `[2, 3]`, and its bytes.
struct FileDigest(Sha256);

impl FileDigest {
    fn of_notes(notes: &BTreeMap<String, String>) -> Self {
        let mut hash = Sha256::new();
        for (key, value) in notes.iter().filter(|(key, _)| *key != DIGEST) {
            hash.update(format!("{}:{key}{}:{value}", key.len(), value.len()));
        }
        Self(hash)
    }

    /// A tensor, whose bytes follow.
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
    // The format is little-endian, and so is every host of such a GPU.
    const { assert!(cfg!(target_endian = "little")) };
    bytemuck::cast_slice(values)
}
