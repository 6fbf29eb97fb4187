//! Uploads to buffers, of a slice or of whole regions: progress, a deadline, and in checked mode the proof that the bytes arrived.
//!
//! Invariant: everything passes through the ring of page-locked slots, piece by piece, whatever the source; on a checked device
//! an upload succeeds only when the device's own checksums of its memory are those of the bytes that were staged.

#![forbid(unsafe_code)]

use crate::driver::{Device, Fill};
use crate::error::{Error, Result};
use crate::finite::Numbers;
use crate::launch::launch_on;
use crate::memory::Buffer;
use crate::tensor::{Element, Memory};
use kernels::checksum::{CHUNK, checksum, weighted};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a word.
const WORD: usize = size_of::<u32>();

/// How far an upload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are staged: the source is not needed for them any more.
    pub done_bytes: u64,
    /// Bytes of the whole upload.
    pub total_bytes: u64,
    /// Since the upload began.
    pub elapsed: Duration,
}

/// How an upload goes: how long it may take, and who hears of its progress.
///
/// ```no_run
/// # use stepscope::{Parameters, Transfer};
/// # fn load(parameters: &mut Parameters, file: &safetensors::SafeTensors<'_>) -> stepscope::Result<()> {
/// let mut tell = |progress: stepscope::Progress| {
///     println!("{} of {} bytes", progress.done_bytes, progress.total_bytes);
///     Ok(())
/// };
/// let transfer = Transfer::new().deadline(std::time::Duration::from_secs(300)).progress(&mut tell);
/// parameters.load(|entry| Some(file.tensor(entry.name()).ok()?.data()), transfer)
/// # }
/// ```
#[derive(Default)]
pub struct Transfer<'p> {
    deadline: Option<Duration>,
    progress: Option<&'p mut dyn FnMut(Progress) -> Result<()>>,
    numbers: Numbers,
}

impl<'p> Transfer<'p> {
    /// Without a deadline but those of the single waits, and without a word.
    pub fn new() -> Self {
        Self::default()
    }

    /// How long the whole upload may take; each wait for the device has the device's deadline besides. At its deadline an
    /// upload fails like any other call, and the device is lost; what should only stop is stopped by its progress.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Calls `progress` after each piece of a few megabytes, in order, the last time when all is staged. Its error ends the upload
    /// and is the upload's; the memory holds new bytes and old ones then.
    #[must_use]
    pub fn progress(mut self, progress: &'p mut dyn FnMut(Progress) -> Result<()>) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Whether weights and moments that are not finite are taken (default: [`Numbers::Finite`], they are refused).
    #[must_use]
    pub fn numbers(mut self, numbers: Numbers) -> Self {
        self.numbers = numbers;
        self
    }

    /// What weights and moments may be.
    pub(crate) fn allowed(&self) -> Numbers {
        self.numbers
    }

    /// Uploads these contents, one after the other.
    pub(crate) fn run(mut self, device: &Device, contents: &[Content<'_>]) -> Result<()> {
        let start = Instant::now();
        let bytes = |contents: &[Content<'_>]| contents.iter().map(|content| content.bytes() as u64).sum::<u64>();
        let total_bytes = bytes(contents);
        for (number, content) in contents.iter().enumerate() {
            let before = bytes(&contents[..number]);
            let mut staged = |done: usize| match &mut self.progress {
                None => Ok(()),
                Some(progress) => {
                    progress(Progress { done_bytes: before + done as u64, total_bytes, elapsed: start.elapsed() })
                }
            };
            let left = self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_sub(start.elapsed()));
            if device.checked() {
                content.upload_verified(device, left, &mut staged)?;
            } else {
                content.memory.copy_with(device, content.fill, left, &mut staged)?;
            }
        }
        Ok(())
    }
}

impl<T: Element> Buffer<T> {
    /// A buffer that holds a copy of `values`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when there is no room; [`Error::Misuse`] for no values.
    pub fn from_slice(device: &Device, values: &[T]) -> Result<Self> {
        let mut buffer = Self::allocate(device, values.len())?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Overwrites elements from `start` on, after the work queued before.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they do not fit; [`Error::Damaged`] on a checked device.
    pub fn write(&mut self, start: usize, values: &[T]) -> Result<()> {
        self.check("buffer.write", start, values.len())?;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.write_with(start, values.len(), &|offset, place| place.copy_from_slice(&bytes[offset..][..place.len()]))
    }

    /// Overwrites `len` elements from `start` on with the bytes that `fill` writes, which are the same whenever it is asked.
    ///
    /// # Panics
    /// When there are not so many.
    pub(crate) fn write_with(&mut self, start: usize, len: usize, fill: &Fill<'_>) -> Result<()> {
        let name = |_| (format!("{}[{}]", T::NAME, self.len()), 0);
        let content = Content { memory: self.memory().part(start, len).cast(), fill, name: &name };
        Transfer::new().deadline(self.device().deadline()).run(self.device(), &[content])
    }
}

impl fmt::Debug for Transfer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// What device memory is to hold.
pub(crate) struct Content<'c> {
    pub(crate) memory: Memory<u32>,
    /// The same bytes whenever it is asked.
    pub(crate) fill: &'c Fill<'c>,
    /// What a byte belongs to, and where that starts.
    pub(crate) name: &'c dyn Fn(usize) -> (String, usize),
}

impl Content<'_> {
    fn bytes(&self) -> usize {
        self.memory.len() * WORD
    }

    /// Uploads, and compares checksums of what was staged with the device's of what it got.
    fn upload_verified(
        &self,
        device: &Device,
        deadline: Duration,
        staged: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let chunks = self.memory.len().div_ceil(CHUNK);
        let expected: Vec<AtomicU64> = (0..chunks).map(|_| AtomicU64::new(0)).collect();
        let fill = |offset: usize, place: &mut [u8]| {
            (self.fill)(offset, place);
            // A slot's part may start and end inside a chunk; its words are whole.
            let (words, _) = place.as_chunks::<WORD>();
            for (index, word) in (offset / WORD..).zip(words) {
                expected[index / CHUNK].fetch_add(weighted(index, u32::from_le_bytes(*word)), Ordering::Relaxed);
            }
        };
        self.memory.copy_with(device, &fill, deadline, staged)?;
        let sums = Buffer::<u32>::zeros(device, 2 * chunks)?;
        launch_on(device, &checksum { x: self.memory.as_slice(), out: sums.memory().as_out() })?;
        let got = sums.read()?;
        let (got, _) = got.as_chunks::<2>();
        let pairs = expected.into_iter().map(AtomicU64::into_inner).zip(got.iter().map(|&[low, high]| join(low, high)));
        match pairs.enumerate().find(|(_, (expected, got))| expected != got) {
            None => Ok(()),
            Some((chunk, (expected, got))) => Err(self.damaged(device, chunk, expected, got)),
        }
    }

    /// Which tensor a chunk with the wrong sum means: that of the first word that differs.
    fn damaged(&self, device: &Device, chunk: usize, expected: u64, got: u64) -> Error {
        let start = chunk * CHUNK;
        let part = self.memory.part(start, CHUNK.min(self.memory.len() - start));
        let there = match part.download(device, device.deadline()) {
            Ok(there) => there,
            Err(error) => return error,
        };
        let mut here = vec![0; part.len() * WORD];
        (self.fill)(start * WORD, &mut here);
        let (here, _) = here.as_chunks::<WORD>();
        let differs = here.iter().zip(there).position(|(here, there)| u32::from_le_bytes(*here) != there);
        let offset = (start + differs.unwrap_or(0)) * WORD;
        let (tensor, first) = (self.name)(offset);
        Error::Damaged { tensor, offset_bytes: offset - first, expected, got }
    }
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}
