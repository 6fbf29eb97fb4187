//! Checkpoints: weights, moments and the caller's own notes in one safetensors file.
//!
//! Invariant: a path holds either the old file or the whole new one, whenever the process dies; a restored run
//! continues with the same bits. What is not finite is neither written nor restored unless it is asked for.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::finite::{Numbers, Quantity};
use crate::memory::Mapped;
use crate::optim::AdamW;
use crate::params::{Entry, Layout, Parameters, hex};
use crate::tensor::Shape;
use crate::upload::Transfer;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

const FORMAT: &str = "stepscope.format";
const UPDATES: &str = "stepscope.updates";
/// The note that tells a damaged file.
const DIGEST: &str = "stepscope.sha256";
/// Names of the moments' tensors, before the parameter's own name.
const MOMENTS: [&str; 2] = ["adamw.first.", "adamw.second."];

/// A checkpoint's file, known to be whole. It stays mapped, and must not be written to meanwhile; replacing it does no harm.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    bytes: Mapped,
    notes: HashMap<String, String>,
}

impl Checkpoint {
    /// Writes weights, the optimiser's state if given, and `notes` to `path`, replacing it as a whole: a temporary
    /// file in the same folder is written, flushed to the disk and renamed. Waits for the device.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for weights or moments that are not finite, [`Error::File`] with the system's reason; the old file is untouched
    /// then.
    pub fn save(
        path: impl AsRef<Path>,
        parameters: &Parameters,
        optimizer: Option<&AdamW>,
        notes: &[(&str, String)],
    ) -> Result<()> {
        Self::save_with(path, parameters, optimizer, notes, Numbers::Finite)
    }

    /// [`Checkpoint::save`] of weights and moments that may hold these numbers.
    ///
    /// # Errors
    /// As for [`Checkpoint::save`].
    pub fn save_with(
        path: impl AsRef<Path>,
        parameters: &Parameters,
        optimizer: Option<&AdamW>,
        notes: &[(&str, String)],
        numbers: Numbers,
    ) -> Result<()> {
        let layout = parameters.layout();
        let mut notes: HashMap<String, String> =
            notes.iter().map(|(key, value)| (key.to_string(), value.clone())).collect();
        notes.insert(FORMAT.into(), "1".into());
        let update = optimizer.map(AdamW::updates);
        let mut regions = vec![("", parameters.flat().read()?)];
        numbers.check((update, Quantity::Weight), layout.finite("", &regions[0].1))?;
        if let Some(optimizer) = optimizer {
            optimizer.check_layout(layout)?;
            notes.insert(UPDATES.into(), optimizer.updates().to_string());
            for (prefix, moment) in MOMENTS.into_iter().zip(optimizer.moments()) {
                let moment = moment.read()?;
                numbers.check((update, Quantity::Moment), layout.finite(prefix, &moment))?;
                regions.push((prefix, moment));
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
        let contents = named.iter().map(|(name, shape, bytes)| (name.as_str(), shape.extents(), bytes.as_slice()));
        notes.insert(DIGEST.into(), digest(&notes, contents));
        let views = named
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.extents().to_vec(), bytes)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
            .map_err(|reason| Error::file(path, reason))?;
        let file = safetensors::serialize(views, Some(notes)).map_err(|reason| Error::file(path, reason))?;
        replace_file(path, &file)
    }

    /// Reads a checkpoint.
    ///
    /// # Errors
    /// [`Error::File`] when it is missing, torn or not of this format.
    pub fn load(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let bytes = Mapped::open(&path)?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|reason| Error::file(&path, reason))?;
        let notes = header.metadata().clone().unwrap_or_default();
        if notes.get(FORMAT).map(String::as_str) != Some("1") {
            let found = notes.get(FORMAT);
            return Err(Error::file(path, format!("`{FORMAT}` is {found:?}, this version reads \"1\"")));
        }
        let tensors = SafeTensors::deserialize(&bytes).map_err(|reason| Error::file(&path, reason))?;
        let mut tensors = tensors.tensors();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        let contents = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.shape(), tensor.data()));
        let (found, computed) = (notes.get(DIGEST), digest(&notes, contents));
        if found != Some(&computed) {
            let reason = format!("damaged: `{DIGEST}` is {found:?}, and its contents have {computed}");
            return Err(Error::file(path, reason));
        }
        Ok(Self { path, bytes, notes })
    }

    /// A note of the writer.
    ///
    /// # Errors
    /// [`Error::File`] when it is not there.
    pub fn note(&self, key: &str) -> Result<&str> {
        self.notes.get(key).map(String::as_str).ok_or_else(|| Error::file(&self.path, format!("has no note `{key}`")))
    }

    /// Puts weights, and the optimiser's state if one is given, back. Either everything fits or nothing is changed.
    ///
    /// # Errors
    /// [`Error::File`] when a tensor is missing, has another shape or type, or there is no optimiser state; [`Error::NotFinite`] when one
    /// holds such a number; when the upload fails, as for [`Parameters::load`].
    pub fn restore(&self, parameters: &mut Parameters, optimizer: Option<&mut AdamW>) -> Result<()> {
        self.restore_with(parameters, optimizer, Transfer::new())
    }

    /// [`Checkpoint::restore`] with a deadline, progress or numbers that are not finite: weights and moments are one upload, straight from the file.
    ///
    /// # Errors
    /// As for [`Checkpoint::restore`].
    pub fn restore_with(
        &self,
        parameters: &mut Parameters,
        optimizer: Option<&mut AdamW>,
        transfer: Transfer<'_>,
    ) -> Result<()> {
        self.bytes.check(&self.path)?;
        let tensors = SafeTensors::deserialize(&self.bytes).map_err(|reason| Error::file(&self.path, reason))?;
        let layout = parameters.layout().clone();
        let weights = self.region(&tensors, &layout, "")?;
        let moments = match &optimizer {
            None => None,
            Some(optimizer) => {
                optimizer.check_layout(&layout)?;
                let updates = self.note(UPDATES)?;
                let updates: u64 =
                    updates.parse().map_err(|_| Error::file(&self.path, format!("`{UPDATES}` is `{updates}`")))?;
                let [first, second] = MOMENTS;
                Some((updates, self.region(&tensors, &layout, first)?, self.region(&tensors, &layout, second)?))
            }
        };
        let update = moments.as_ref().map(|(updates, ..)| *updates);
        let check = |what, prefix, region: &[&[u8]]| {
            transfer.allowed().check((update, what), layout.finite_bytes(prefix, region))
        };
        check(Quantity::Weight, "", &weights)?;
        if let Some((_, first, second)) = &moments {
            check(Quantity::Moment, MOMENTS[0], first)?;
            check(Quantity::Moment, MOMENTS[1], second)?;
        }
        let mut regions = vec![(parameters.flat_mut(), weights)];
        if let (Some(optimizer), Some((updates, first, second))) = (optimizer, moments) {
            regions.extend(optimizer.restore(updates).into_iter().zip([first, second]));
        }
        layout.upload(&regions, transfer)
    }

    /// The bytes of the tensors whose names start with `prefix`, for each parameter.
    fn region<'f>(&self, tensors: &SafeTensors<'f>, layout: &Layout, prefix: &str) -> Result<Vec<&'f [u8]>> {
        let bytes = |entry: &Entry| {
            let name = format!("{prefix}{}", entry.name());
            let tensor =
                tensors.tensor(&name).map_err(|reason| Error::file(&self.path, format!("`{name}`: {reason}")))?;
            self.check(&name, entry, &tensor)?;
            Ok(tensor.data())
        };
        layout.entries().iter().map(bytes).collect()
    }

    fn check(&self, name: &str, entry: &Entry, tensor: &TensorView<'_>) -> Result<()> {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        if shape == entry.shape().extents() && dtype == Dtype::F32 {
            return Ok(());
        }
        Err(Error::file(&self.path, format!("`{name}`: expected F32 {}, got {dtype:?} {shape:?}", entry.shape())))
    }
}

/// The SHA-256, in hexadecimal, over all notes but its own and then all tensors, each in the order of their names: for a
/// note `LENGTH:KEY` and `LENGTH:VALUE`, for a tensor `LENGTH:NAME`, its shape as `[2, 3]`, and its bytes.
fn digest<'t>(
    notes: &HashMap<String, String>,
    tensors: impl Iterator<Item = (&'t str, &'t [usize], &'t [u8])>,
) -> String {
    let mut hash = Sha256::new();
    let notes: BTreeMap<_, _> = notes.iter().filter(|(key, _)| *key != DIGEST).collect();
    for (key, value) in notes {
        hash.update(format!("{}:{key}{}:{value}", key.len(), value.len()));
    }
    for (name, shape, bytes) in tensors {
        hash.update(format!("{}:{name}{shape:?}", name.len()));
        hash.update(bytes);
    }
    hex(&hash.finalize())
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Replaces a file as a whole: the new bytes are on the disk before the name points to them.
///
/// # Errors
/// [`Error::File`] with the system's reason; the old file is untouched then.
pub fn replace_file(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let path = path.as_ref();
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let replace = || {
        let mut options = tempfile::Builder::new();
        // A temporary file is its owner's alone; a checkpoint is as readable as any file (the umask still applies).
        #[cfg(unix)]
        options.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file = options.tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|failed| failed.error)?;
        // The rename itself is on the disk once the folder is.
        fs::File::open(folder)?.sync_all()
    };
    replace().map_err(|reason: std::io::Error| Error::file(path, reason))
}
