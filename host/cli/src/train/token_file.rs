//! Token files of any size, in the `.bin` format of llm.c and nanoGPT.
//!
//! A file without a header has tokens of 16, 32 or 64 bits, and their values show which.
//!
//! The thread that makes batches reads each window from the file when it is needed. Mapping the
//! file would not be faster, since both read the system's page cache. A mapped file that somebody
//! truncates would kill the program.
//!
//! Invariant: every token that is used was checked. The file is read completely when it is opened,
//! and a digest of each chunk is stored. Each time a window is used, its chunks are read and hashed
//! again, so that any change to the file is an error. A window of 1025 tokens takes 0.03 ms of the
//! loader's thread, and a GPT-2 step on it takes milliseconds. `tests/token_files.rs` measured this
//! on an AMD EPYC with SHA-256 instructions, with the file in the page cache. The digests take
//! 1/256 of the file's size.

use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use sha2::{Digest, Sha256};
use stepscope::files::{FileKind, PlainFile};

use crate::train::bad_input::{Outcome, bad};

/// Bytes of llm.c's header: 256 numbers, of which three are used.
const HEADER: usize = 1024;
/// The first two numbers of each header, and the bytes per token: for GPT-2's and Llama 3's
/// vocabulary.
const FORMATS: [([u32; 2], usize); 2] = [([20_240_520, 1], 2), ([20_240_801, 7], 4)];
/// Tokens per digest.
pub(crate) const CHUNK: usize = 4096;
/// Chunks per read during the check of the whole file.
const CHUNKS_AT_ONCE: usize = 128;
/// The largest vocabulary of tokens of 16 bits.
const SHORT_VOCABULARY: usize = 1 << 16;
/// The first bytes of a file, by which the width of its tokens is decided.
const SAMPLE: u64 = 1 << 20;
/// The bytes of text from which on a file cannot be tokens by chance.
const TEXT_BYTES: u64 = 1024;
/// More tokens than any vocabulary has.
const MOST_TOKENS: u64 = 1 << 20;

/// The digest of a chunk of tokens. It does not depend on the file's token width.
pub(crate) type ChunkDigest = [u8; 32];

/// Returns the digest of at most [`CHUNK`] tokens.
pub(crate) fn digest(chunk: &[u32]) -> ChunkDigest {
    // All hosts of supported GPUs are little-endian, so words in memory are hashed as they are.
    const { assert!(cfg!(target_endian = "little")) };
    Sha256::digest(bytemuck::cast_slice::<u32, u8>(chunk)).into()
}

/// An open token file whose tokens are all within the vocabulary.
pub(crate) struct TokenFile {
    path: PathBuf,
    file: Mutex<PlainFile>,
    /// The offset of the first token.
    start: u64,
    /// Bytes per token.
    width: usize,
    tokens: usize,
    /// The digest of each chunk of [`CHUNK`] tokens.
    digests: Vec<ChunkDigest>,
}

impl TokenFile {
    /// Opens a file and reads all of it once. Returns an error if a token is outside the
    /// vocabulary.
    pub(crate) fn open(path: &Path, vocabulary: usize) -> Outcome<Self> {
        let place = path.display();
        let mut file = PlainFile::open(path).map_err(|reason| bad(place.to_string(), reason))?;
        let kind = file.kind().map_err(|reason| bad(place.to_string(), reason))?;
        let refusal = |kind: FileKind| match kind {
            FileKind::Npy => "is a NumPy array; expected its numbers without a header: \
                              `numpy.load(path).astype('<u4').tofile('tokens.bin')` writes them"
                .into(),
            kind => kind.refusal("tokens, as llm.c and nanoGPT write them"),
        };
        let is_text = |kind: &FileKind| kind.is_utf8() || *kind == FileKind::ByteText;
        if let Some(kind) = kind.filter(is_text).filter(|_| file.len() >= TEXT_BYTES) {
            let reason = format!("is {kind}; expected tokens: give it another ending than .bin, and it is tokenized");
            return Err(bad(place, reason));
        }
        if let Some(kind) = kind.filter(|kind| kind.is_certain()) {
            return Err(bad(place, refusal(kind)));
        }
        Self::of(path, file, vocabulary).map_err(|reason| match kind.filter(|&kind| kind != FileKind::Zeros) {
            // Token data may begin with the same bytes, so the file kind only explains the failure.
            Some(kind) => bad(place, format!("{reason}. It {}", refusal(kind))),
            None => bad(place, reason),
        })
    }

    fn of(path: &Path, mut file: PlainFile, vocabulary: usize) -> Result<Self, String> {
        let bytes = file.len();
        if bytes == 0 {
            return Err("is empty: give a file with tokens".into());
        }
        let mut header = Vec::new();
        file.by_ref().take(HEADER as u64).read_to_end(&mut header).map_err(|reason| reason.to_string())?;
        let number = |at: usize| header.as_chunks().0.get(at).map(|word: &[u8; 4]| u32::from_le_bytes(*word));
        let known = FORMATS.iter().find(|([magic, _], _)| number(0) == Some(*magic));
        let mut sample = Vec::new();
        let (start, width) = match known {
            Some(&([_, version], width)) => {
                let [found, stated] = [1, 2].map(|at| number(at).unwrap_or(0));
                if found != version {
                    return Err(format!("expected llm.c version {version}, got {found}"));
                }
                let expected = HEADER as u64 + u64::from(stated) * width as u64;
                if bytes != expected {
                    let what = if bytes < expected { "is truncated" } else { "is longer than its header states" };
                    return Err(format!(
                        "{what}: its header states {stated} tokens, which take {expected} bytes; it has {bytes}"
                    ));
                }
                (HEADER as u64, width)
            }
            // nanoGPT's files have no header.
            None => {
                file.rewind().map_err(|reason| reason.to_string())?;
                file.by_ref().take(SAMPLE).read_to_end(&mut sample).map_err(|reason| reason.to_string())?;
                (0, width(&sample, bytes, vocabulary)?)
            }
        };
        let tokens =
            usize::try_from((bytes - start) / width as u64).map_err(|_| format!("has {bytes} bytes: too many"))?;
        let file = Self { path: path.into(), file: Mutex::new(file), start, width, tokens, digests: Vec::new() };
        file.checked(vocabulary).map_err(|reason| match width == 2 && are_swapped(&sample, vocabulary) {
            true => format!("{reason}. It may have {}", big_endian(16)),
            false => reason,
        })
    }

    /// Reads all tokens and stores their digests.
    fn checked(self, vocabulary: usize) -> Result<Self, String> {
        let (mut some, mut digests) = (Vec::new(), Vec::with_capacity(self.tokens.div_ceil(CHUNK)));
        for first in (0..self.tokens).step_by(CHUNK * CHUNKS_AT_ONCE) {
            some.clear();
            let last = self.tokens.min(first + CHUNK * CHUNKS_AT_ONCE);
            self.read_unchecked(first..last, &mut some).map_err(|reason| reason.to_string())?;
            if let Some(at) = some.iter().position(|&token| token as usize >= vocabulary) {
                return Err(format!(
                    "token {} at place {} is outside the vocabulary of {vocabulary}: give the --tokenizer that made the file",
                    some[at],
                    first + at
                ));
            }
            digests.extend(some.chunks(CHUNK).map(digest));
        }
        let unchanged = self.file.lock().expect("no panic before").check_unchanged();
        unchanged.map_err(|reason| reason.to_string())?;
        Ok(Self { digests, ..self })
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the digests of all chunks.
    pub(crate) fn digests(&self) -> &[ChunkDigest] {
        &self.digests
    }

    /// Appends these tokens to `into`, after verifying that they are unchanged.
    pub(crate) fn read(&self, range: Range<usize>, into: &mut Vec<u32>) -> io::Result<()> {
        let chunks = range.start / CHUNK..range.end.div_ceil(CHUNK);
        let start = chunks.start * CHUNK;
        let mut tokens = Vec::new();
        self.read_unchecked(start..self.tokens.min(chunks.end * CHUNK), &mut tokens)?;
        for (number, chunk) in chunks.zip(tokens.chunks(CHUNK)) {
            if digest(chunk) != self.digests[number] {
                let first = number * CHUNK;
                let reason = format!("tokens {first} to {} have changed", first + chunk.len());
                return Err(io::Error::other(reason));
            }
        }
        into.extend_from_slice(&tokens[range.start - start..range.end - start]);
        Ok(())
    }

    /// Appends these tokens to `into` as they are in the file now.
    fn read_unchecked(&self, range: Range<usize>, into: &mut Vec<u32>) -> io::Result<()> {
        let mut bytes = vec![0; range.len() * self.width];
        {
            // No code panics while this lock is held.
            let mut file = self.file.lock().expect("no panic before");
            file.seek(SeekFrom::Start(self.start + (range.start * self.width) as u64))?;
            file.read_exact(&mut bytes)?;
        }
        match self.width {
            2 => into.extend(bytes.as_chunks().0.iter().map(|&token| u32::from(u16::from_le_bytes(token)))),
            4 => into.extend(bytes.as_chunks().0.iter().map(|&token| u32::from_le_bytes(token))),
            // A larger number is no token either.
            _ => into.extend(
                bytes.as_chunks().0.iter().map(|&token| u32::try_from(u64::from_le_bytes(token)).unwrap_or(u32::MAX)),
            ),
        }
        Ok(())
    }
}

/// Returns the bytes per token of a file without a header, which begins with `sample`.
///
/// The upper bytes of wider numbers are zero, because no vocabulary has a million tokens. Two or
/// four tokens of 16 bits, read as one number, are that small only if the last ones are zero or
/// nearly so. The width is therefore the widest in which nearly all numbers that are not zero are
/// small. Big-endian numbers are refused in the same way.
fn width(sample: &[u8], bytes: u64, vocabulary: usize) -> Result<usize, String> {
    for width in [8, 4] {
        let numbers = |from_bytes: fn(&[u8]) -> u64| {
            let all = sample.chunks_exact(width).map(from_bytes).filter(|&number| number > 0);
            all.fold((0, 0), |(small, count), number| (small + usize::from(number < MOST_TOKENS), count + 1))
        };
        let are_tokens = |(small, count): (usize, usize)| count > 0 && 10 * small >= 9 * count;
        let little = |number: &[u8]| number.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        let big = |number: &[u8]| number.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        if are_tokens(numbers(little)) {
            return whole(bytes, width);
        }
        if are_tokens(numbers(big)) {
            return Err(format!("has {}", big_endian(8 * width)));
        }
    }
    if vocabulary > SHORT_VOCABULARY {
        return Err(format!(
            "has tokens of 16 bits, which cannot be those of a vocabulary of {vocabulary}: write the tokens with 32 bits, \
             for example with `numpy.array(tokens, dtype='<u4').tofile(path)`"
        ));
    }
    whole(bytes, 2)
}

/// Returns true if all numbers of 16 bits are tokens when they are read as big-endian.
fn are_swapped(sample: &[u8], vocabulary: usize) -> bool {
    let numbers = sample.as_chunks().0;
    !numbers.is_empty() && numbers.iter().all(|&number| usize::from(u16::from_be_bytes(number)) < vocabulary)
}

/// Checks that the file has whole tokens of this width.
fn whole(bytes: u64, width: usize) -> Result<usize, String> {
    if bytes.is_multiple_of(width as u64) {
        return Ok(width);
    }
    Err(format!("is truncated: {bytes} bytes are not a whole number of {width}-byte tokens"))
}

fn big_endian(bits: usize) -> String {
    format!(
        "big-endian numbers of {bits} bits; expected little-endian ones: `numpy.fromfile(path, '>u{}').astype('<u4')\
         .tofile(path)` writes them",
        bits / 8
    )
}
