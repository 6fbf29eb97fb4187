//! Files of tokens, of any size: what llm.c and nanoGPT call `.bin`.
//!
//! A window is read from the file when it is wanted, by the thread that makes batches. That is as fast as mapping the file, since both
//! read the system's cache, and a file that somebody cuts meanwhile is an error; a map would end the program.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use sha2::{Digest, Sha256};

use crate::bad_input::{Outcome, bad};

/// Bytes of llm.c's header: 256 numbers, of which three count.
const HEADER: usize = 1024;
/// The headers' first two numbers, and the bytes of a token behind them: of GPT-2's and of Llama 3's vocabulary.
const FORMATS: [([u32; 2], usize); 2] = [([20_240_520, 1], 2), ([20_240_801, 7], 4)];
/// Tokens that are read at a time while the whole file is checked.
const CHUNK: usize = 1 << 19;

/// An open file of tokens, each of which the vocabulary has.
pub(crate) struct TokenFile {
    path: PathBuf,
    file: Mutex<File>,
    /// Where the first token is.
    start: u64,
    /// Bytes of a token.
    width: usize,
    tokens: usize,
}

impl TokenFile {
    /// Opens a file and reads all of it once: an error for a token that a vocabulary of so many does not have. Its bytes go into the digest.
    pub(crate) fn open(path: &Path, vocabulary: usize, digest: &mut Sha256) -> Outcome<Self> {
        let place = path.display();
        let failed = |reason: io::Error| bad(place.to_string(), reason);
        let mut file = File::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        if bytes == 0 {
            return Err(bad(place, "is empty: give a file with tokens"));
        }
        let mut header = Vec::new();
        Read::by_ref(&mut file).take(HEADER as u64).read_to_end(&mut header).map_err(failed)?;
        let number = |at: usize| header.as_chunks().0.get(at).map(|word: &[u8; 4]| u32::from_le_bytes(*word));
        let known = FORMATS.iter().find(|([magic, _], _)| number(0) == Some(*magic));
        let (start, width) = match known {
            Some(&([_, version], width)) => {
                let [found, told] = [1, 2].map(|at| number(at).unwrap_or(0));
                if found != version {
                    return Err(bad(place, format!("expected llm.c's version {version}, got {found}")));
                }
                let expected = HEADER as u64 + u64::from(told) * width as u64;
                if bytes != expected {
                    let reason =
                        format!("is cut: its header tells {told} tokens, which are {expected} bytes; it has {bytes}");
                    return Err(bad(place, reason));
                }
                (HEADER as u64, width)
            }
            // nanoGPT's have no header.
            None if bytes % 2 == 0 => (0, 2),
            None => return Err(bad(place, format!("is cut: tokens of 2 bytes cannot be {bytes} bytes"))),
        };
        let tokens = ((bytes - start) / width as u64) as usize;
        let file = Self { path: path.into(), file: Mutex::new(file), start, width, tokens };
        let mut chunk = Vec::new();
        for first in (0..tokens).step_by(CHUNK) {
            chunk.clear();
            file.read(first..tokens.min(first + CHUNK), &mut chunk).map_err(failed)?;
            if let Some(at) = chunk.iter().position(|&token| token as usize >= vocabulary) {
                let reason = format!(
                    "token {} at place {} is beyond the vocabulary of {vocabulary}: give the --tokenizer that made the file",
                    chunk[at],
                    first + at
                );
                return Err(bad(place, reason));
            }
            digest.update(chunk.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<_>>());
        }
        Ok(file)
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds these tokens to `into`.
    pub(crate) fn read(&self, range: Range<usize>, into: &mut Vec<u32>) -> io::Result<()> {
        let mut bytes = vec![0; range.len() * self.width];
        {
            // Nobody panics while it is held.
            let mut file = self.file.lock().expect("no panic before");
            file.seek(SeekFrom::Start(self.start + (range.start * self.width) as u64))?;
            file.read_exact(&mut bytes)?;
        }
        match self.width {
            2 => into.extend(bytes.as_chunks().0.iter().map(|&token| u32::from(u16::from_le_bytes(token)))),
            _ => into.extend(bytes.as_chunks().0.iter().map(|&token| u32::from_le_bytes(token))),
        }
        Ok(())
    }
}
