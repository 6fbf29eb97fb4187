//! The training text: documents as one sequence of tokens, in memory or in files. Its end is held
//! out for evaluation, or the end of each source if samples are taken from them in shares.
//!
//! Invariant: the same files and tokenizer give the same tokens at the same positions. A digest of
//! all tokens verifies this.

use std::ops::Range;

use sha2::{Digest, Sha256};
use stepscope::{Error, Result};
use stepscope_core::internals::hex;

use crate::program::workers::Workers;
use crate::train::bad_input::{Outcome, bad};
use crate::train::documents::{Contents, DataFile, HELD_OUT};
use crate::train::token_file::{self, CHUNK, ChunkDigest, TokenFile};
use crate::train::tokenizer::Tokenizer;

/// The documents that are tokenized at a time.
const DOCUMENTS: usize = 4096;

/// A sequence of tokens.
pub(crate) struct Text {
    parts: Vec<TokenSource>,
    /// The number of tokens up to the end of each part.
    ends: Vec<usize>,
    /// The digest of all tokens.
    pub(crate) sha256: String,
    sources: Vec<Source>,
}

/// A part of the text: the positions of its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) training: Range<usize>,
    pub(crate) held_out: Range<usize>,
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
    /// Tokenizes the files. Each source must be long enough for samples of `context` tokens. All
    /// files together are one source, or if `apart`, those of each path that was given.
    pub(crate) fn load(
        files: &[DataFile],
        tokenizer: &Tokenizer,
        context: usize,
        apart: bool,
        workers: &Workers,
    ) -> Outcome<Self> {
        let parts = workers.map(files, |DataFile { path, contents, .. }| match contents {
            Contents::Tokens => {
                let file = TokenFile::open(path, tokenizer.rows())?;
                let digest = Sha256::digest(file.digests().as_flattened());
                Ok((TokenSource::File(file), digest))
            }
            Contents::Documents(documents) => {
                let mut tokens = Vec::new();
                let place = path.display().to_string();
                for documents in documents.chunks(DOCUMENTS) {
                    for document in workers.map(documents, |document| tokenizer.encode(&place, document))? {
                        tokens.extend(document);
                        tokens.extend(tokenizer.end());
                    }
                }
                let digests: Vec<ChunkDigest> = tokens.chunks(CHUNK).map(token_file::digest).collect();
                Ok((TokenSource::Memory(tokens), Sha256::digest(digests.as_flattened())))
            }
        })?;
        let digests: Vec<u8> = parts.iter().flat_map(|(_, digest)| digest.iter().copied()).collect();
        let parts: Vec<TokenSource> = parts.into_iter().map(|(part, _)| part).collect();
        let count = |sum: &mut usize, part: &TokenSource| {
            *sum += part.len();
            Some(*sum)
        };
        let ends: Vec<usize> = parts.iter().scan(0, count).collect();
        let (mut sources, mut start, mut last) = (Vec::new(), 0, 0);
        for of_source in files.chunk_by(|one, next| !apart || one.source == next.source) {
            last += of_source.len();
            let (end, window) = (ends[last - 1], context + 1);
            let all = end - start;
            if all < 2 * window {
                let reason = format!(
                    "{all} tokens are too few: --context {context} needs {window} to train on and as many held out; give more text, or a \
                     smaller --context"
                );
                let place = if apart { of_source[0].path.display().to_string() } else { "the text".into() };
                return Err(bad(place, reason));
            }
            let held_out = end - (all / HELD_OUT).max(window);
            sources.push(Source { training: start..held_out, held_out: held_out..end });
            start = end;
        }
        Ok(Self { parts, ends, sha256: hex(&Sha256::digest(digests)), sources })
    }

    /// Returns the sources, in the order of their paths.
    pub(crate) fn sources(&self) -> &[Source] {
        &self.sources
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
