//! Checkpoints: weights, the optimiser's state and the caller's own notes in one safetensors file.
//!
//! Invariant: a path holds either the old file or the whole new one, whenever the process dies; a restored run
//! continues with the same bits. What is not finite is neither written nor restored unless it is asked for.

#![forbid(unsafe_code)]

use crate::digest::hex;
use crate::error::{Error, Quantity, Result, short};
use crate::files::{replace_file, sweep};
use crate::finite::Numbers;
use crate::memory::Buffer;
use crate::optim::{Optimizer, UpdateRule};
use crate::params::{Layout, LayoutEntry, Parameters};
use crate::tensor::Shape;
use crate::tensors::Tensors;
use crate::upload::Transfer;
use safetensors::tensor::{Dtype, TensorView};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const FORMAT: &str = "stepscope.format";
const UPDATES: &str = "stepscope.updates";
/// The note that names the optimiser. Files from before it are AdamW's.
const OPTIMIZER: &str = "stepscope.optimizer";
const FIRST_OPTIMIZER: &str = "adamw";
/// The most updates that a file may claim: counting on from there cannot overflow.
const MOST_UPDATES: u64 = u64::MAX >> 1;
/// The note that tells a damaged file.
const DIGEST: &str = "stepscope.sha256";

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
        let read = |optimizer: &Optimizer<dyn UpdateRule>| optimizer.whole_state()?.iter().map(Buffer::read).collect();
        let state = optimizer.map(read).transpose()?;
        Self::save_whole(path, parameters, (optimizer, state.unwrap_or_default()), notes, numbers)
    }

    /// [`Checkpoint::save_with`] of an optimiser's state that is on the host.
    pub(crate) fn save_whole(
        path: impl AsRef<Path>,
        parameters: &Parameters,
        (optimizer, state): (Option<&Optimizer<dyn UpdateRule>>, Vec<Vec<f32>>),
        notes: &[(&str, String)],
        numbers: Numbers,
    ) -> Result<()> {
        let layout = parameters.layout();
        let mut notes: BTreeMap<String, String> =
            notes.iter().map(|(key, value)| (key.to_string(), value.clone())).collect();
        notes.insert(FORMAT.into(), "1".into());
        let update = optimizer.map(Optimizer::updates);
        let mut regions = vec![(String::new(), parameters.flat().read()?)];
        numbers.check((update, Quantity::Weight), layout.finite("", &regions[0].1))?;
        if let Some(optimizer) = optimizer {
            optimizer.check_layout(layout)?;
            notes.insert(UPDATES.into(), optimizer.updates().to_string());
            notes.insert(OPTIMIZER.into(), optimizer.name().into());
            for (prefix, state) in optimizer.prefixes().into_iter().zip(state) {
                numbers.check((update, Quantity::OptimizerState), layout.finite(&prefix, &state))?;
                regions.push((prefix, state));
            }
        }
        let path = path.as_ref();
        let mut named: Vec<(String, Shape, Vec<u8>)> = regions
            .iter()
            .flat_map(|(prefix, values)| layout.entries().iter().map(move |entry| (prefix, values, entry)))
            .map(|(prefix, values, entry)| {
                (format!("{prefix}{}", entry.name()), entry.shape(), bytes(&values[entry.range()]))
            })
            .collect();
        named.sort_by(|(a, ..), (b, ..)| a.cmp(b));
        let twice = named.windows(2).find(|pair| pair[0].0 == pair[1].0).map(|pair| pair[0].0.as_str());
        if let Some(name) = twice {
            let expected = "a different name for each parameter and what the optimiser keeps for it";
            return Err(Error::misuse("checkpoint", expected, format!("two named `{}`", short(name))));
        }
        let contents = named.iter().map(|(name, shape, bytes)| (name.as_str(), shape.extents(), bytes.as_slice()));
        notes.insert(DIGEST.into(), digest(&notes, contents));
        let views = named
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.extents().to_vec(), bytes)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
            .map_err(|reason| Error::file(path, reason))?;
        let file = safetensors::serialize(views, Some(notes.into_iter().collect()))
            .map_err(|reason| Error::file(path, reason))?;
        replace_file(path, &file)
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
        check(FORMAT, "1", "not a checkpoint of this version")?;
        check(DIGEST, &digest(tensors.notes(), tensors.iter()), "damaged")?;
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

/// The SHA-256, in hexadecimal, over all notes but its own and then all tensors, each in the order of their names: for a
/// note `LENGTH:KEY` and `LENGTH:VALUE`, for a tensor `LENGTH:NAME`, its shape as `[2, 3]`, and its bytes.
fn digest<'t>(
    notes: &BTreeMap<String, String>,
    tensors: impl Iterator<Item = (&'t str, &'t [usize], &'t [u8])>,
) -> String {
    let mut hash = Sha256::new();
    for (key, value) in notes.iter().filter(|(key, _)| *key != DIGEST) {
        hash.update(format!("{}:{key}{}:{value}", key.len(), value.len()));
    }
    for (name, shape, bytes) in tensors {
        hash.update(format!("{}:{name}{shape:?}", name.len()));
        hash.update(bytes);
    }
    hex(&hash.finalize())
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().map(|value| value.to_le_bytes()).collect::<Vec<_>>().into_flattened()
}
