//! Agreement: settings that all ranks of a group must have alike, compared name by name.
//!
//! Invariant: ranks agree where all have the same names, each with the same value. A value that was
//! shortened for the message has its digest in it.

#![forbid(unsafe_code)]

use super::disagreement::{DifferentSetting, Disagreement, ValueOnRanks};
use crate::digest::hex;
use crate::error::{Error, Result, short};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Characters of a value that are sent and shown as they are.
const LONGEST: usize = 120;
/// Characters that are left of a longer value.
const START: usize = 24;
/// Hexadecimal digits of its digest.
const DIGITS: usize = 32;

/// Names and values of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings(Vec<(String, String)>);

impl Settings {
    pub(crate) fn add(&mut self, name: impl Into<String>, value: impl AsRef<str>) {
        self.0.push((name.into(), shortened(value.as_ref())));
    }

    /// Adds a value that may not be there.
    pub(crate) fn add_option(&mut self, name: impl Into<String>, value: Option<impl ToString>) {
        self.add(name, value.map_or("none".into(), |value| value.to_string()));
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    /// An error when a name is there twice, as one of the values would not be compared.
    pub(super) fn check(&self) -> Result<()> {
        let twice = |at: &usize| self.0[..*at].iter().any(|(before, _)| *before == self.0[*at].0);
        match (0..self.0.len()).find(twice) {
            None => Ok(()),
            Some(at) => {
                let got = format!("`{}` twice", short(&self.0[at].0));
                Err(Error::misuse("agree_on", "each name once", got))
            }
        }
    }
}

/// A value; a long one as its start, its length and its digest.
fn shortened(value: &str) -> String {
    match value.char_indices().nth(LONGEST) {
        None => value.into(),
        Some(_) => {
            let start: String = value.chars().take(START).collect();
            let digest = hex(&Sha256::digest(value));
            format!("{start}.. ({} bytes, SHA-256 {}..)", value.len(), &digest[..DIGITS])
        }
    }
}

/// An error that names each setting that is not the same on all ranks, whose settings these are.
pub(crate) fn expect_same(all: &[Settings]) -> Result<()> {
    let mut settings: Vec<DifferentSetting> = Vec::new();
    for (rank, (name, _)) in all.iter().enumerate().flat_map(|(rank, own)| own.0.iter().map(move |pair| (rank, pair))) {
        // Each name once: where the first rank that has it is looked at.
        if all[..rank].iter().any(|before| before.value(name).is_some()) {
            continue;
        }
        let mut values: Vec<ValueOnRanks> = Vec::new();
        for (rank, own) in all.iter().enumerate() {
            let value = own.value(name);
            match values.iter_mut().find(|known| known.value.as_deref() == value) {
                Some(known) => known.ranks.push(rank),
                None => values.push(ValueOnRanks { value: value.map(Into::into), ranks: vec![rank] }),
            }
        }
        if values.len() > 1 {
            // Other ranks' texts are shown, so they must not steer a terminal.
            for ValueOnRanks { value, .. } in &mut values {
                *value = value.as_deref().map(|value| short(value).to_string());
            }
            settings.push(DifferentSetting { name: short(name).to_string(), values });
        }
    }
    if settings.is_empty() { Ok(()) } else { Err(Error::Disagreement(Box::new(Disagreement { settings }))) }
}

/// Parses the message of a rank.
pub(crate) fn understood<'w, T: Deserialize<'w>>(op: &'static str, word: &'w [u8]) -> Result<T> {
    serde_json::from_slice(word)
        .map_err(|error| Error::misuse(op, "what a rank of this version sends", error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        let mut settings = Settings::default();
        pairs.iter().for_each(|(name, value)| settings.add(*name, value));
        settings
    }

    fn differ(all: &[Settings]) -> String {
        expect_same(all).unwrap_err().to_string()
    }

    #[test]
    fn each_difference_is_named_once() {
        let one = settings(&[("seed", "7"), ("data", "a"), ("rate", "0.1")]);
        let other = settings(&[("rate", "0.1"), ("data", "b"), ("seed", "7"), ("model", "tiny")]);
        assert_eq!(expect_same(&[one.clone(), settings(&[("rate", "0.1"), ("data", "a"), ("seed", "7")])]), Ok(()));
        assert_eq!(expect_same(std::slice::from_ref(&one)), Ok(()));
        assert_eq!(
            differ(&[one.clone(), other.clone(), one]),
            "the ranks of the group do not agree on `data`: `a` on ranks 0, 2, `b` on rank 1; `model`: not set on ranks \
             0, 2, `tiny` on rank 1. Start all ranks with the same program, settings, weights and data"
        );
        assert_eq!(expect_same(&[other.clone(), other]), Ok(()));
        assert!(
            differ(&[Settings::default(), settings(&[("x", "")])]).contains("`x`: not set on rank 0, `` on rank 1")
        );
    }

    #[test]
    fn long_values_differ_by_their_digests() {
        let long = "é".repeat(100_000);
        for (at, other) in [(0, "e"), (50_000, "e"), (99_999, "e"), (99_999, "")] {
            let at = 2 * at;
            let other = [&long[..at], other, &long[at + 2..]].concat();
            let error = differ(&[settings(&[("text", &long)]), settings(&[("text", &other)])]);
            assert!(error.contains("200000 bytes, SHA-256 ") && error.len() < 500, "{error}");
        }
        let shown = "x".repeat(LONGEST);
        assert_eq!(settings(&[("text", &shown)]).value("text"), Some(&*shown));
        // A value that looks like a shortened one is as long as it says, or another.
        let (whole, short) = (format!("{shown}y"), shortened(&format!("{shown}y")));
        assert!(short.chars().count() <= LONGEST, "{short}");
        assert_eq!(shortened(&short), short);
        assert_eq!(expect_same(&[settings(&[("text", &whole)]), settings(&[("text", &whole)])]), Ok(()));
    }

    #[test]
    fn what_others_send_steers_no_terminal() {
        let error = differ(&[settings(&[("a\u{1b}[2J", "b\r\n")]), settings(&[])]);
        assert!(!error.chars().any(char::is_control), "{error:?}");
    }

    #[test]
    fn a_name_is_given_once() {
        let error = settings(&[("a", "1"), ("b", "1"), ("a", "2")]).check().unwrap_err().to_string();
        assert!(error.contains("each name once, got `a` twice"), "{error}");
    }
}
