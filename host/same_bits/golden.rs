//! Digests of results, and their comparison with the committed ones.
//!
//! Invariant: a text of digests has a line for each kernel: SHA-256 in hexadecimal, two spaces, the name. The digest of all
//! kernels is that of the text. `golden.txt` has both forms: a line is the digest of the whole case, that of the smallest, and the name.

#![forbid(unsafe_code)]

use super::Form;
use crate::digest::hex;
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::OnceLock;

impl Form {
    /// The committed digests.
    pub fn golden(self) -> &'static str {
        static TEXTS: [OnceLock<String>; 2] = [const { OnceLock::new() }; 2];
        let column = self as usize;
        TEXTS[column].get_or_init(|| {
            let line = |line: &str| {
                let words: Vec<&str> = line.split("  ").collect();
                format!("{}  {}\n", words[column], words[2])
            };
            include_str!("golden.txt").lines().map(line).collect()
        })
    }
}

/// The text of `golden.txt` for these digests of both forms, of the same kernels in the same order.
pub fn to_commit(whole: &str, smallest: &str) -> String {
    let line =
        |(whole, smallest): (&str, &str)| format!("{}  {smallest}\n", whole.split("  ").next().unwrap_or_default());
    whole.lines().zip(smallest.lines()).map(line).collect()
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
