//! Uploads to buffers, of a slice or of whole regions, with progress, a deadline, and verification
//! in checked mode.
//!
//! Invariant: all bytes pass through the ring of pinned slots, piece by piece, whatever the source.
//! On a checked device, an upload succeeds only if the device's own checksums of its memory equal
//! those of the staged bytes. Checksums cover words. An upload may begin and end inside a word, and
//! only its own bytes of that word count.

#![forbid(unsafe_code)]

use crate::buffer::Buffer;
use crate::device::{Device, Fill};
use crate::error::{Error, Result};
use crate::launch::launch_on;
use crate::non_finite::NonFinite;
use crate::tensor::{Element, Memory};
use kernels::checksum::{CHUNK, checksum, weighted};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The size of a word in bytes.
const WORD: usize = size_of::<u32>();

/// The progress of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are staged. Their source is no longer needed.
    pub done_bytes: u64,
    /// Bytes of the whole upload.
    pub total_bytes: u64,
    /// The time since the upload began.
    pub elapsed: Duration,
}

/// Options of an upload: its deadline, its progress callback, and its treatment of values that are
/// not finite.
///
/// ```no_run
/// # use stepscope::upload::Transfer;
/// # use stepscope::Parameters;
/// # fn load(parameters: &mut Parameters, file: &safetensors::SafeTensors<'_>) -> stepscope::Result<()> {
/// let mut tell = |progress: stepscope::upload::Progress| {
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
    non_finite: NonFinite,
}

impl<'p> Transfer<'p> {
    /// Makes a transfer with only the deadlines of its individual waits, and without a progress
    /// callback.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the deadline of the whole upload. Each wait for the device has the device's deadline in
    /// addition. An upload that misses its deadline fails like any other call, and the device is
    /// lost. To stop an upload without losing the device, return an error from its progress
    /// callback.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Sets a callback that runs after each piece of a few megabytes, in order, and for the last
    /// time when everything is staged. If it returns an error, the upload stops and returns that
    /// error. The memory then holds both new and old bytes.
    #[must_use]
    pub fn progress(mut self, progress: &'p mut dyn FnMut(Progress) -> Result<()>) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Sets the treatment of weights and moments that are not finite. The default is
    /// [`NonFinite::Reject`].
    #[must_use]
    pub fn non_finite(mut self, non_finite: NonFinite) -> Self {
        self.non_finite = non_finite;
        self
    }

    /// The treatment of weights and moments that are not finite.
    pub fn allowed(&self) -> NonFinite {
        self.non_finite
    }

    /// Uploads these contents, one after another.
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
    /// Makes a buffer that holds a copy of `values`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when the device has no room. [`Error::Misuse`] for no values.
    pub fn from_slice(device: &Device, values: &[T]) -> Result<Self> {
        let mut buffer = Self::allocate(device, values.len())?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Overwrites elements from `start` on, after the work queued before.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they do not fit. [`Error::Damaged`] on a checked device.
    pub fn write(&mut self, start: usize, values: &[T]) -> Result<()> {
        self.check("buffer.write", start, values.len())?;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.write_with(start, values.len(), &|offset, place| place.copy_from_slice(&bytes[offset..][..place.len()]))
    }

    /// Overwrites `len` elements from `start` on with the bytes that `fill` writes. `fill` must
    /// write the same bytes each time.
    ///
    /// # Panics
    /// Panics if the range exceeds the buffer.
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

/// Maps a byte of an upload to the name of its tensor and its offset within it.
pub(crate) type Name<'c> = dyn Fn(usize) -> (String, usize) + 'c;

/// The contents to upload to device memory.
pub(crate) struct Content<'c> {
    memory: Memory<u8>,
    /// The size of an element in bytes, which is the unit of reported damage.
    element_bytes: usize,
    /// Writes the same bytes each time it is called.
    fill: &'c Fill<'c>,
    name: &'c Name<'c>,
}

impl<'c> Content<'c> {
    /// Describes the bytes that `fill` writes, which are the same each time it is called.
    pub(crate) fn new<T: Element>(memory: Memory<T>, fill: &'c Fill<'c>, name: &'c Name<'c>) -> Self {
        Self::of_bytes(memory.bytes(), size_of::<T>(), fill, name)
    }

    /// Describes bytes like [`Content::new`], of elements of this size.
    pub(crate) fn of_bytes(memory: Memory<u8>, element_bytes: usize, fill: &'c Fill<'c>, name: &'c Name<'c>) -> Self {
        Self { memory, element_bytes, fill, name }
    }

    fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Uploads, and compares checksums of the staged bytes with the device's checksums of what it
    /// received.
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
            // A slot's part may start and end inside a chunk and inside a word. The sum of a word's
            // parts is the word.
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

    /// The number of bytes of the first word that precede the upload.
    fn bytes_before(&self) -> usize {
        (self.memory.address() - self.memory.words().address()) as usize
    }

    /// Finds the tensor for a chunk with a wrong checksum: the tensor of the first element that
    /// differs.
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

/// Returns the checksum of bytes that begin at byte `start` of a whole. The wrapping sum over all
/// parts is the checksum of the whole, in whatever parts it is read.
pub fn checksum_of_part(start: usize, bytes: &[u8]) -> u64 {
    words_of(start, bytes).fold(0, |sum, (index, word)| sum.wrapping_add(weighted(index, word)))
}

/// Iterates over the words that `bytes` fill from byte `start` on, with their indices. Other bytes
/// of the first and the last word are zero.
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
