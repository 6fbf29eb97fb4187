//! Token files that change while they are in use: a read returns the tokens that were checked, or
//! an error.

#![forbid(unsafe_code)]

use crate::train::token_file::{CHUNK, TokenFile};
use std::fs::{self, File, FileTimes};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use stepscope::data::SplitMix64;
use tempfile::TempDir;

const TOKENS: usize = 10 * CHUNK + 100;
const VOCABULARY: usize = 50_257;

/// Writes a file of random tokens, with or without a header, and returns the tokens.
fn tokens(header: bool) -> (TempDir, PathBuf, Vec<u32>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    let mut random = SplitMix64::new(3);
    let tokens: Vec<u32> = (0..TOKENS).map(|_| (random.next_u64() % VOCABULARY as u64) as u32).collect();
    let mut bytes = Vec::new();
    if header {
        bytes.extend([20_240_520_u32, 1, TOKENS as u32].iter().flat_map(|number| number.to_le_bytes()));
        bytes.resize(1024, 0);
    }
    bytes.extend(tokens.iter().flat_map(|&token| (token as u16).to_le_bytes()));
    fs::write(&path, bytes).unwrap();
    (folder, path, tokens)
}

/// Reads every window of 200 tokens that begins at a multiple of 97. Each is unchanged or an error;
/// returns the errors.
fn windows(file: &TokenFile, before: &[u32]) -> Vec<String> {
    let window = |start: usize| {
        let mut read = Vec::new();
        let found = file.read(start..start + 200, &mut read);
        if found.is_ok() {
            assert_eq!(read, before[start..start + 200], "at {start}");
        }
        found.err().map(|error| error.to_string())
    };
    (0..TOKENS - 200).step_by(97).filter_map(window).collect()
}

/// Writes these bytes in place, and restores the time of modification.
fn write_at(path: &Path, place: u64, bytes: &[u8]) {
    let mut file = File::options().write(true).open(path).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    file.seek(SeekFrom::Start(place)).unwrap();
    file.write_all(bytes).unwrap();
    file.set_times(FileTimes::new().set_modified(modified)).unwrap();
}

#[test]
fn whole_files_are_read_exactly() {
    for header in [false, true] {
        let (_folder, path, before) = tokens(header);
        let file = TokenFile::open(&path, VOCABULARY).unwrap();
        assert_eq!((file.len(), file.path(), file.digests().len()), (TOKENS, &*path, TOKENS.div_ceil(CHUNK)));
        assert_eq!(windows(&file, &before), [""; 0]);
        let mut all = Vec::new();
        file.read(0..TOKENS, &mut all).unwrap();
        file.read(TOKENS - 1..TOKENS, &mut all).unwrap();
        assert!(all[..TOKENS] == before && all[TOKENS] == before[TOKENS - 1]);
    }
}

/// Rewrites one token at several places, including the first and the last of a chunk, and restores
/// the time of modification.
#[test]
fn rewritten_token_is_an_error() {
    for place in [0, 1, CHUNK - 1, CHUNK, 5 * CHUNK + 77, TOKENS - 1] {
        let (_folder, path, before) = tokens(true);
        let file = TokenFile::open(&path, VOCABULARY).unwrap();
        write_at(&path, 1024 + 2 * place as u64, &((before[place] as u16) ^ 1).to_le_bytes());
        let mut read = Vec::new();
        let error = file.read(place..place + 1, &mut read).unwrap_err().to_string();
        let first = place / CHUNK * CHUNK;
        let opened_as = format!("tokens {first} to {} have changed", TOKENS.min(first + CHUNK));
        assert!(error == opened_as && read.is_empty(), "{error}");
        let errors = windows(&file, &before);
        assert!(errors.iter().all(|error| *error == opened_as), "{errors:?}");
        // Other chunks are unchanged, and so is this one after the token is restored.
        write_at(&path, 1024 + 2 * place as u64, &(before[place] as u16).to_le_bytes());
        assert_eq!(windows(&file, &before), [""; 0]);
    }
}

/// Swaps two tokens, and shifts all of them by one: the same tokens in other places.
#[test]
fn moved_tokens_are_an_error() {
    let (_folder, path, before) = tokens(false);
    let file = TokenFile::open(&path, VOCABULARY).unwrap();
    let [one, other] = [before[10] as u16, before[11] as u16].map(u16::to_le_bytes);
    assert_ne!(one, other);
    write_at(&path, 20, &[other, one].concat());
    assert!(file.read(0..50, &mut Vec::new()).is_err());
    let bytes: Vec<u8> = before.iter().skip(1).chain([&0]).flat_map(|&token| (token as u16).to_le_bytes()).collect();
    write_at(&path, 0, &bytes);
    assert_eq!(windows(&file, &before).len(), (0..TOKENS - 200).step_by(97).count());
}

/// A changed header is ignored, because it was read before. Removed tokens are an error, and
/// appended ones are not read.
#[test]
fn only_truncation_is_an_error() {
    let (_folder, path, before) = tokens(true);
    let file = TokenFile::open(&path, VOCABULARY).unwrap();
    write_at(&path, 0, &[0xff; 1024]);
    assert_eq!(windows(&file, &before), [""; 0]);
    File::options().append(true).open(&path).unwrap().write_all(&[7; 100_000]).unwrap();
    assert_eq!(windows(&file, &before), [""; 0]);
    File::options().write(true).open(&path).unwrap().set_len(1024 + 2 * CHUNK as u64 + 10).unwrap();
    assert!(!windows(&file, &before).is_empty());
    assert!(file.read(0..CHUNK, &mut Vec::new()).is_ok());
    assert!(file.read(CHUNK..CHUNK + 1, &mut Vec::new()).is_err(), "a read in the truncated chunk must fail");
}

/// An open file stays the one that was checked, even if its name now leads elsewhere.
#[test]
fn replaced_file_stays_readable() {
    let (folder, path, before) = tokens(false);
    let file = TokenFile::open(&path, VOCABULARY).unwrap();
    let other = folder.path().join("other");
    fs::write(&other, vec![0; 2 * TOKENS]).unwrap();
    fs::rename(&other, &path).unwrap();
    assert_eq!(windows(&file, &before), [""; 0]);
    fs::remove_file(&path).unwrap();
    assert_eq!(windows(&file, &before), [""; 0]);
}

/// One thread writes while another reads: each window is unchanged, or an error.
#[test]
fn concurrent_writes_are_detected() {
    let (_folder, path, before) = tokens(false);
    let file = TokenFile::open(&path, VOCABULARY).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let old: Vec<u8> = before.iter().flat_map(|&token| (token as u16).to_le_bytes()).collect();
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                fs::File::options().write(true).open(&path).unwrap().write_all(&vec![1; 2 * TOKENS]).unwrap();
                fs::File::options().write(true).open(&path).unwrap().write_all(&old).unwrap();
            }
        });
        let seen: usize = (0..20).map(|_| windows(&file, &before).len()).sum();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        println!("{seen} windows failed");
    });
    assert_eq!(windows(&file, &before), [""; 0], "the restored file must be readable");
}

/// Writes tokens as numbers of this many bytes.
fn numbers(tokens: &[u32], width: usize, is_big: bool) -> Vec<u8> {
    let number = |&token: &u32| {
        let mut bytes = u64::from(token).to_le_bytes()[..width].to_vec();
        if is_big {
            bytes.reverse();
        }
        bytes
    };
    tokens.iter().flat_map(number).collect()
}

/// Opens a file with these bytes, and returns its tokens or its error.
fn opened(bytes: &[u8], vocabulary: usize) -> Result<Vec<u32>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    fs::write(&path, bytes).unwrap();
    let file = TokenFile::open(&path, vocabulary).map_err(|error| error.to_string())?;
    let mut all = Vec::new();
    file.read(0..file.len(), &mut all).map_err(|error| error.to_string())?;
    Ok(all)
}

/// Files without a header are read in the width of their numbers, or refused.
#[test]
fn widths_are_recognized() {
    let mut random = SplitMix64::new(11);
    let mut draw = |most: u32, count: usize| -> Vec<u32> {
        // Small tokens are frequent, as in texts.
        let token = |random: &mut SplitMix64| (random.next_u64() % u64::from(most)) >> (random.next_u64() % 12);
        (0..count).map(|_| token(&mut random) as u32).collect()
    };
    for (vocabulary, short) in
        [(256, true), (362, true), (50_257, true), (65_536, true), (128_256, false), (262_144, false)]
    {
        let tokens = draw(vocabulary as u32, 4000);
        // Samples are often filled with zeros.
        let mut padded = tokens.clone();
        padded.iter_mut().enumerate().filter(|(at, _)| at % 64 > 20).for_each(|(_, token)| *token = 0);
        for tokens in [&tokens, &padded] {
            for width in [2, 4, 8] {
                let opened_as = opened(&numbers(tokens, width, false), vocabulary);
                match width == 2 && !short {
                    false => assert!(
                        opened_as.as_ref() == Ok(tokens),
                        "{vocabulary}, {width} bytes: {:?}",
                        opened_as.map(|got| got.len())
                    ),
                    true => assert!(opened_as.unwrap_err().contains("has tokens of 16 bits"), "{vocabulary}"),
                }
            }
            for width in [4, 8] {
                let opened_as = opened(&numbers(tokens, width, true), vocabulary).unwrap_err();
                assert!(
                    opened_as.contains(&format!("has big-endian numbers of {} bits", 8 * width)),
                    "{vocabulary}: {opened_as}"
                );
            }
        }
        if vocabulary < 60_000 {
            let opened_as = opened(&numbers(&tokens, 2, true), vocabulary).unwrap_err();
            assert!(
                opened_as.contains("is outside the vocabulary")
                    && opened_as.contains("It may have big-endian numbers of 16"),
                "{opened_as}"
            );
        }
    }
    // A number of a wide file that is no token.
    let mut tokens = draw(50_257, 4000);
    tokens[7] = 70_000;
    let opened_as = opened(&numbers(&tokens, 4, false), 50_257).unwrap_err();
    assert!(opened_as.contains("token 70000 at place 7 is outside the vocabulary of 50257"), "{opened_as}");
    let opened_as = opened(&numbers(&tokens, 8, false)[..31_996], 70_001).unwrap_err();
    assert!(opened_as.contains("31996 bytes are not a whole number of 8-byte tokens"), "{opened_as}");
    let short = numbers(&tokens[8..], 2, false);
    let header = b"\x93NUMPY\x01\0v\0{'descr': '<u2', 'fortran_order': False, 'shape': (3992,), }\n";
    let opened_as = opened(&[&header[..], &short].concat(), 50_257).unwrap_err();
    assert!(opened_as.contains("is a NumPy array; expected its numbers without a header"), "{opened_as}");
    let text = "Once upon a time there was a text.\n".repeat(100);
    let opened_as = opened(text.as_bytes(), 50_257).unwrap_err();
    assert!(opened_as.contains("is text; expected tokens"), "{opened_as}");
}

/// Measures the time of a window, for the figure in `host/cli/src/train/token_file.rs`.
#[test]
#[ignore = "a measurement"]
fn time_of_a_window() {
    let (_folder, path, _) = tokens(true);
    let file = TokenFile::open(&path, VOCABULARY).unwrap();
    let begun = std::time::Instant::now();
    for number in 0..2000 {
        file.read(number * 7..number * 7 + 1025, &mut Vec::new()).unwrap();
    }
    println!("{:?} for a window of 1025 tokens", begun.elapsed() / 2000);
}
