//! The training text: documents as one sequence of tokens, in memory or in files. Its end is held
//! out for evaluation.
//!
//! Invariant: the same files and tokenizer give the same tokens at the same positions. A digest of
//! all tokens verifies this.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};
use stepscope::files::PlainFile;
use stepscope::memory::HostMemory;
use stepscope::{Error, Result};
use stepscope_core::internals::hex;

use crate::train::bad_input::{Outcome, bad};
use crate::train::registry;
use crate::train::token_file::{self, CHUNK, ChunkDigest, TokenFile};
use crate::train::tokenizer::Tokenizer;

/// One part in this many is held out.
const HELD_OUT: usize = 20;
/// The most bytes of memory that one byte of text needs during tokenization: the byte and its
/// token.
const BYTES_OF_BYTE: u64 = 5;

/// A sequence of tokens.
pub(crate) struct Text {
    parts: Vec<TokenSource>,
    /// The number of tokens up to the end of each part.
    ends: Vec<usize>,
    /// The digest of all tokens.
    pub(crate) sha256: String,
    /// The position of the first held-out token.
    held_out: usize,
}

enum TokenSource {
    /// The tokens of a text file.
    Memory(Vec<u32>),
    /// A token file.
    File(TokenFile),
}

impl TokenSource {
    fn len(&self) -> usize {
        match self {
            Self::Memory(tokens) => tokens.len(),
            Self::File(file) => file.len(),
        }
    }
}

impl Text {
    /// Loads the files, or the registry's sources if none are given. The text must be long enough
    /// for samples of `context` tokens.
    pub(crate) fn load(files: &[PathBuf], tokenizer: &Tokenizer, context: usize) -> Outcome<Self> {
        let files = if files.is_empty() { registry::sources()? } else { files.to_vec() };
        check_memory(&files)?;
        let read = |path: &PathBuf| {
            if is_token_file(path) {
                let file = TokenFile::open(path, tokenizer.rows())?;
                let digest = Sha256::digest(file.digests().as_flattened());
                return Ok((TokenSource::File(file), digest));
            }
            let mut tokens = tokenizer.encode(&path.display().to_string(), &text_of(path)?)?;
            tokens.extend(tokenizer.end());
            let digests: Vec<ChunkDigest> = tokens.chunks(CHUNK).map(token_file::digest).collect();
            Ok((TokenSource::Memory(tokens), Sha256::digest(digests.as_flattened())))
        };
        // Falls back to this thread if the system refuses to start threads.
        let parts = match ThreadPoolBuilder::new().build() {
            Ok(pool) => pool.install(|| files.par_iter().map(read).collect::<Outcome<Vec<_>>>()),
            Err(_) => files.iter().map(read).collect(),
        }?;
        let digests: Vec<u8> = parts.iter().flat_map(|(_, digest)| digest.iter().copied()).collect();
        let parts: Vec<TokenSource> = parts.into_iter().map(|(part, _)| part).collect();
        let count = |sum: &mut usize, part: &TokenSource| {
            *sum += part.len();
            Some(*sum)
        };
        let ends: Vec<usize> = parts.iter().scan(0, count).collect();
        let all = ends.last().copied().unwrap_or(0);
        let window = context + 1;
        if all < 2 * window {
            let reason = format!(
                "{all} tokens are too few: --context {context} needs {window} to train on and as many held out; give more text, or a \
                 smaller --context"
            );
            return Err(bad("the text", reason));
        }
        let held_out = all - (all / HELD_OUT).max(window);
        Ok(Self { parts, ends, sha256: hex(&Sha256::digest(digests)), held_out })
    }

    /// Returns the number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns the positions of the training tokens.
    pub(crate) fn training(&self) -> Range<usize> {
        0..self.held_out
    }

    /// Returns the positions of the held-out tokens.
    pub(crate) fn held_out(&self) -> Range<usize> {
        self.held_out..self.len()
    }

    /// Appends the tokens at these positions to `into`.
    ///
    /// # Errors
    /// Returns an error if a file has changed or can no longer be read.
    pub(crate) fn read(&self, places: Range<usize>, into: &mut Vec<u32>) -> Result<()> {
        let first = self.ends.partition_point(|&end| end <= places.start);
        for (part, &end) in self.parts.iter().zip(&self.ends).skip(first) {
            let start = end - part.len();
            let wanted = places.start.max(start) - start..places.end.min(end) - start;
            match part {
                TokenSource::Memory(tokens) => into.extend_from_slice(&tokens[wanted]),
                TokenSource::File(file) => {
                    let failed = |reason: std::io::Error| Error::File {
                        path: file.path().into(),
                        reason: format!(
                            "has changed since it was opened: {reason}. Restore the file and continue with --resume, or start a new run"
                        ),
                    };
                    file.read(wanted, into).map_err(failed)?;
                }
            }
            if end >= places.end {
                break;
            }
        }
        Ok(())
    }
}

/// Reads the bytes of a text file.
fn text_of(path: &Path) -> Outcome<Vec<u8>> {
    let failed = |reason: io::Error| bad(path.display(), reason);
    let mut file = PlainFile::open(path).map_err(failed)?;
    if file.is_empty() {
        return Err(bad(path.display(), "is empty: give a file with text"));
    }
    // The byte tokenizer accepts any bytes, but a binary file here is a mistake.
    match file.kind().map_err(failed)?.filter(|kind| kind.is_no_text()) {
        Some(kind) => Err(bad(path.display(), kind.refusal("text, or tokens in a file that ends in .bin"))),
        None => {
            let text = file.all_bytes(HostMemory::available_bytes() / BYTES_OF_BYTE).map_err(failed)?;
            refuse_chats(path, &text)?;
            Ok(text)
        }
    }
}

/// Returns an error for chats, one JSON object a line, whose template and roles would be lost.
fn refuse_chats(path: &Path, text: &[u8]) -> Outcome<()> {
    let mut lines = text.split(|&byte| byte == b'\n');
    let first = lines.find(|line| !line.trim_ascii().is_empty()).unwrap_or_default();
    let Ok(Value::Object(row)) = serde_json::from_slice(first) else { return Ok(()) };
    match ["messages", "conversations", "completion"].into_iter().find(|key| row.contains_key(*key)) {
        None => Ok(()),
        Some(key) => {
            let reason = format!(
                "has rows with `{key}`, which are not read as raw text: train on them with `stepscope finetune \
                 --weights DIR --data {}`",
                path.display()
            );
            Err(bad(path.display(), reason))
        }
    }
}

/// Returns an error if the text files are larger than memory, before any is read.
fn check_memory(files: &[PathBuf]) -> Outcome<()> {
    let mut bytes = 0u64;
    for path in files.iter().filter(|path| !is_token_file(path)) {
        bytes = bytes.saturating_add(PlainFile::open(path).map_err(|reason| bad(path.display(), reason))?.len());
    }
    let (needed, available) = (bytes.saturating_mul(BYTES_OF_BYTE), HostMemory::available_bytes());
    if needed <= available {
        return Ok(());
    }
    let reason = format!(
        "the text files have {bytes} bytes, and tokenizing them takes up to {needed} bytes of memory; the host, or this process's cgroup, has \
         {available} available: give less text, or a .bin token file, which is read one window at a time"
    );
    Err(bad("--data", reason))
}

/// Returns true if the file name is that of a token file.
pub(crate) fn is_token_file(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "bin")
}
