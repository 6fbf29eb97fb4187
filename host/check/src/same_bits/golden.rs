//! Digests of results, and their comparison with the committed ones.
//!
//! Invariant: a text of digests has one line per kernel: the SHA-256 in hexadecimal, two spaces,
//! the name. The digest of all kernels is that of this text. `golden.txt` covers both sizes. Its
//! lines have the digest of the whole case, that of the smallest, and the name.

#![forbid(unsafe_code)]

use super::CaseSize;
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::OnceLock;
use stepscope_core::internals::hex;

/// The committed digests of both forms of every case.
pub(super) const RESULTS: &str = include_str!("golden.txt");

impl CaseSize {
    /// Returns the committed digests of this size.
    pub fn golden(self) -> &'static str {
        static TEXTS: [OnceLock<String>; 2] = [const { OnceLock::new() }; 2];
        let column = self as usize;
        TEXTS[column].get_or_init(|| {
            let line = |line: &str| {
                let words: Vec<&str> = line.split("  ").collect();
                format!("{}  {}\n", words[column], words[2])
            };
            RESULTS.lines().map(line).collect()
        })
    }
}

/// Returns the text of `golden.txt` for the digests of both sizes, with the same kernels in the
/// same order.
pub fn to_commit(whole: &str, smallest: &str) -> String {
    let line =
        |(whole, smallest): (&str, &str)| format!("{}  {smallest}\n", whole.split("  ").next().unwrap_or_default());
    whole.lines().zip(smallest.lines()).map(line).collect()
}

/// Returns a kernel's line. The digest covers the length of each result, in 8 bytes, and its words,
/// little-endian.
pub fn line(name: &str, results: &[Vec<u32>]) -> String {
    let mut hash = Sha256::new();
    for words in results {
        hash.update((words.len() as u64).to_le_bytes());
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        hash.update(bytes);
    }
    format!("{}  {name}\n", hex(&hash.finalize()))
}

/// Returns the digest of all kernels.
pub fn of_all(text: &str) -> String {
    hex(&Sha256::digest(text))
}

/// A kernel's computed and committed digests, shown as `fill    0123456789abcdef  equal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict<'t> {
    /// The kernel.
    pub name: &'t str,
    /// The digest of its results, if it ran.
    pub found: Option<&'t str>,
    /// The committed digest, if there is one.
    pub golden: Option<&'t str>,
}

impl Verdict<'_> {
    /// Returns true if both digests are equal.
    pub fn equal(&self) -> bool {
        self.found == self.golden
    }
}

impl fmt::Display for Verdict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = |digest: Option<&str>| digest.map_or("none".into(), |digest| digest.chars().take(16).collect());
        let [found, golden]: [String; 2] = [self.found, self.golden].map(short);
        write!(f, "{:<24} {found:<16}  ", self.name)?;
        if self.equal() { f.write_str("equal") } else { write!(f, "DIFFERENT: golden is {golden}") }
    }
}

/// Returns a verdict on each kernel of either text, those of `found` first.
pub fn compare<'t>(found: &'t str, golden: &'t str) -> Vec<Verdict<'t>> {
    let of = |text: &'t str, name: &str| entries(text).find(|entry| entry.0 == name).map(|entry| entry.1);
    let missing = entries(golden).filter(|(name, _)| of(found, name).is_none());
    let names = entries(found).chain(missing).map(|(name, _)| name);
    names.map(|name| Verdict { name, found: of(found, name), golden: of(golden, name) }).collect()
}

/// Returns the name and digest of each line. Malformed lines get a digest that no kernel has.
fn entries(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().map(|line| line.split_once("  ").map_or((line, ""), |(digest, name)| (name, digest)))
}
