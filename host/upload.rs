//! Uploads to buffers, of a slice or of whole regions: progress, a deadline, and in checked mode the proof that the bytes arrived.
//!
//! Invariant: everything passes through the ring of page-locked slots, piece by piece, whatever the source; on a checked device
//! an upload succeeds only when the device's own checksums of its memory are those of the bytes that were staged. Checksums are of words; an
//! upload may begin and end inside one, and of such a word its own bytes count.

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
            if device.checked() && content.bytes() > 0 {
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
        let name = |offset| (format!("{}[{}]", T::NAME, self.len()), start * size_of::<T>() + offset);
        let content = Content::new(self.memory().part(start, len), fill, &name);
        Transfer::new().deadline(self.device().deadline()).run(self.device(), &[content])
    }
}

impl fmt::Debug for Transfer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// What a byte of an upload belongs to, and its place within that.
pub(crate) type Name<'c> = dyn Fn(usize) -> (String, usize) + 'c;

/// What device memory is to hold.
pub(crate) struct Content<'c> {
    memory: Memory<u8>,
    /// Bytes of an element, which are damaged together.
    element_bytes: usize,
    /// The same bytes whenever it is asked.
    fill: &'c Fill<'c>,
    name: &'c Name<'c>,
}

impl<'c> Content<'c> {
    /// What `fill` writes, which is the same whenever it is asked.
    pub(crate) fn new<T: Element>(memory: Memory<T>, fill: &'c Fill<'c>, name: &'c Name<'c>) -> Self {
        Self { memory: memory.bytes(), element_bytes: size_of::<T>(), fill, name }
    }

    fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Uploads, and compares checksums of what was staged with the device's of what it got.
    fn upload_verified(
        &self,
        device: &Device,
        deadline: Duration,
        staged: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let (x, before) = (self.memory.words(), self.bytes_before());
        let behind = x.len() * WORD - before - self.bytes();
        let chunks = x.len().div_ceil(CHUNK);
        let expected: Vec<AtomicU64> = (0..chunks).map(|_| AtomicU64::new(0)).collect();
        let fill = |offset: usize, place: &mut [u8]| {
            (self.fill)(offset, place);
            // A slot's part may start and end inside a chunk, and inside a word: the sum of a word's parts is the word.
            for (index, word) in words_of(before + offset, place) {
                expected[index / CHUNK].fetch_add(weighted(index, word), Ordering::Relaxed);
            }
        };
        self.memory.copy_with(device, &fill, deadline, staged)?;
        let sums = Buffer::<u32>::zeros(device, 2 * chunks)?;
        let (first, last) = (u32::MAX << (8 * before), u32::MAX >> (8 * behind));
        launch_on(device, &checksum { x: x.as_slice(), first, last, out: sums.memory().as_out() })?;
        let got = sums.read()?;
        let (got, _) = got.as_chunks::<2>();
        let pairs = expected.into_iter().map(AtomicU64::into_inner).zip(got.iter().map(|&[low, high]| join(low, high)));
        match pairs.enumerate().find(|(_, (expected, got))| expected != got) {
            None => Ok(()),
            Some((chunk, (expected, got))) => Err(self.damaged(device, chunk, expected, got)),
        }
    }

    /// Bytes of the first word that lie before the upload.
    fn bytes_before(&self) -> usize {
        (self.memory.address() - self.memory.words().address()) as usize
    }

    /// Which tensor a chunk with the wrong sum means: that of the first element that differs.
    fn damaged(&self, device: &Device, chunk: usize, expected: u64, got: u64) -> Error {
        let place = |word: usize| (word * WORD).saturating_sub(self.bytes_before()).min(self.bytes());
        let (start, end) = (place(chunk * CHUNK), place((chunk + 1) * CHUNK));
        let there = match self.memory.part(start, end - start).download(device, device.deadline()) {
            Ok(there) => there,
            Err(error) => return error,
        };
        let mut here = vec![0; end - start];
        (self.fill)(start, &mut here);
        let differs = start + here.iter().zip(there).position(|(&here, there)| here != there).unwrap_or(0);
        let (tensor, offset_bytes) = (self.name)(differs - differs % self.element_bytes);
        Error::Damaged { tensor, offset_bytes, expected, got }
    }
}

/// The words that `bytes` fill from byte `start` on, by their places: of the first and the last, zeros where other bytes are.
fn words_of(start: usize, bytes: &[u8]) -> impl Iterator<Item = (usize, u32)> {
    let filled = start % WORD;
    let (head, rest) = bytes.split_at(if filled == 0 { 0 } else { bytes.len().min(WORD - filled) });
    let (words, tail) = rest.as_chunks::<WORD>();
    let part = |place: usize, part: &[u8]| {
        let mut word = [0; WORD];
        word[place..][..part.len()].copy_from_slice(part);
        u32::from_le_bytes(word)
    };
    let first = start.div_ceil(WORD);
    let head = (!head.is_empty()).then(|| (start / WORD, part(filled, head)));
    let tail = (!tail.is_empty()).then(|| (first + words.len(), part(0, tail)));
    head.into_iter().chain((first..).zip(words.iter().map(|word| u32::from_le_bytes(*word)))).chain(tail)
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}
