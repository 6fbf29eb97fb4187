//! Digests of results, and their comparison with the committed ones.
//!
//! Invariant: a text of digests has a line for each kernel: SHA-256 in hexadecimal, two spaces, the name. The digest of all
//! kernels is that of the text, so `sha256sum golden.txt` prints it too.

use sha2::{Digest, Sha256};
use std::fmt;

/// The committed text.
pub(crate) const GOLDEN: &str = include_str!("golden.txt");

/// A kernel's line: the digest covers, for each result, its length in 8 bytes and its words, little-endian.
pub(crate) fn line(name: &str, results: &[Vec<u32>]) -> String {
    let mut hash = Sha256::new();
    for words in results {
        hash.update((words.len() as u64).to_le_bytes());
        words.iter().for_each(|word| hash.update(word.to_le_bytes()));
    }
    format!("{}  {name}\n", hex(hash))
}

/// The digest of all kernels.
pub(crate) fn of_all(text: &str) -> String {
    hex(Sha256::new_with_prefix(text))
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A kernel's digest as found and as committed, if it was; shown as `fill    0123456789abcdef  equal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verdict<'t> {
    pub(crate) name: &'t str,
    pub(crate) found: Option<&'t str>,
    pub(crate) golden: Option<&'t str>,
}

impl Verdict<'_> {
    pub(crate) fn equal(&self) -> bool {
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
pub(crate) fn compare<'t>(found: &'t str, golden: &'t str) -> Vec<Verdict<'t>> {
    let of = |text: &'t str, name: &str| entries(text).find(|entry| entry.0 == name).map(|entry| entry.1);
    let missing = entries(golden).filter(|(name, _)| of(found, name).is_none());
    let names = entries(found).chain(missing).map(|(name, _)| name);
    names.map(|name| Verdict { name, found: of(found, name), golden: of(golden, name) }).collect()
}

/// Name and digest of each line. What is no such line gets a digest that no kernel has.
fn entries(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().map(|line| line.split_once("  ").map_or((line, ""), |(digest, name)| (name, digest)))
}
