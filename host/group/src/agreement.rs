//! Agreement: settings that must be equal on all ranks of a group, compared name by name.
//!
//! Invariant: ranks agree if all have the same names, each with the same value. A value that is
//! shortened for the message includes its digest.

#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stepscope_core::internals::{hex, short};
use stepscope_core::{DifferentSetting, Disagreement, Error, Result, ValueOnRanks};

/// The longest value, in characters, that is sent and shown unchanged.
const LONGEST: usize = 120;
/// The number of characters that are kept of a longer value.
const START: usize = 24;
/// The number of hexadecimal digits of its digest.
const DIGITS: usize = 32;

/// The names and values of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings(Vec<(String, String)>);

impl Settings {
    /// Collects names and values.
    pub fn of(pairs: &[(impl AsRef<str>, impl AsRef<str>)]) -> Self {
        Self(pairs.iter().map(|(name, value)| (name.as_ref().into(), shortened(value.as_ref()))).collect())
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    /// Returns an error if a name appears twice, because one of its values would not be compared.
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

/// Returns a value, or the start, length and digest of a long one.
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

/// Returns an error that names each setting whose values differ. `all` has the settings of each
/// rank.
pub fn expect_same(all: &[Settings]) -> Result<()> {
    let mut settings: Vec<DifferentSetting> = Vec::new();
    for (rank, (name, _)) in all.iter().enumerate().flat_map(|(rank, own)| own.0.iter().map(move |pair| (rank, pair))) {
        // Each name is handled once, at the first rank that has it.
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
            // Other ranks' texts are shown, so they must not contain terminal control sequences.
            for ValueOnRanks { value, .. } in &mut values {
                *value = value.as_deref().map(|value| short(value).to_string());
            }
            settings.push(DifferentSetting { name: short(name).to_string(), values });
        }
    }
    if settings.is_empty() { Ok(()) } else { Err(Error::Disagreement(Box::new(Disagreement { settings }))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        Settings::of(pairs)
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
        // A value that resembles a shortened one has exactly that length, or differs.
        let (whole, short) = (format!("{shown}y"), shortened(&format!("{shown}y")));
        assert!(short.chars().count() <= LONGEST, "{short}");
        assert_eq!(shortened(&short), short);
        assert_eq!(expect_same(&[settings(&[("text", &whole)]), settings(&[("text", &whole)])]), Ok(()));
    }

    #[test]
    fn control_characters_are_escaped() {
        let error = differ(&[settings(&[("a\u{1b}[2J", "b\r\n")]), settings(&[])]);
        assert!(!error.chars().any(char::is_control), "{error:?}");
    }

    #[test]
    fn a_name_is_given_once() {
        let error = settings(&[("a", "1"), ("b", "1"), ("a", "2")]).check().unwrap_err().to_string();
        assert!(error.contains("each name once, got `a` twice"), "{error}");
    }
}
