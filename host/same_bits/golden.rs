//! Digests of results, and their comparison with the committed ones.
//!
//! Invariant: a text of digests has a line for each kernel: SHA-256 in hexadecimal, two spaces, the name. The digest of all
//! kernels is that of the text, so `sha256sum golden.txt` prints it too.

#![forbid(unsafe_code)]

use super::Form;
use crate::digest::hex;
use sha2::{Digest, Sha256};
use std::fmt;

impl Form {
    /// The committed text: `golden.txt`, or `smallest.txt`.
    pub fn golden(self) -> &'static str {
        match self {
            Self::Whole => include_str!("golden.txt"),
            Self::Smallest => include_str!("smallest.txt"),
        }
    }
}

/// A kernel's line: the digest covers, for each result, its length in 8 bytes and its words, little-endian.
pub fn line(name: &str, results: &[Vec<u32>]) -> String {
    let mut hash = Sha256::new();
    for words in results {
        hash.update((words.len() as u64).to_le_bytes());
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        hash.update(bytes);
    }
    format!("{}  {name}\n", hex(&hash.finalize()))
}

/// The digest of all kernels.
pub fn of_all(text: &str) -> String {
    hex(&Sha256::digest(text))
}

/// A kernel's digest as found and as committed, if it was; shown as `fill    0123456789abcdef  equal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict<'t> {
    /// The kernel.
    pub name: &'t str,
    /// The digest of what it gave, if it ran.
    pub found: Option<&'t str>,
    /// The committed digest, if there is one.
    pub golden: Option<&'t str>,
}

impl Verdict<'_> {
    /// Whether they are the same.
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

/// A verdict on each kernel of either text, those of `found` first.
pub fn compare<'t>(found: &'t str, golden: &'t str) -> Vec<Verdict<'t>> {
    let of = |text: &'t str, name: &str| entries(text).find(|entry| entry.0 == name).map(|entry| entry.1);
    let missing = entries(golden).filter(|(name, _)| of(found, name).is_none());
    let names = entries(found).chain(missing).map(|(name, _)| name);
    names.map(|name| Verdict { name, found: of(found, name), golden: of(golden, name) }).collect()
}

/// Name and digest of each line. What is no such line gets a digest that no kernel has.
fn entries(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().map(|line| line.split_once("  ").map_or((line, ""), |(digest, name)| (name, digest)))
}
