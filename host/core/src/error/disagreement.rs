//! Settings on which the ranks of a group do not agree, as an error reports them.
//!
//! Invariant: every rank of a group builds the same value, from the data that all ranks have sent.

#![forbid(unsafe_code)]

use std::fmt;

/// The settings on which the ranks of a group do not agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    /// All settings that differ, at least one.
    pub settings: Vec<DifferentSetting>,
}

/// A setting on which the ranks of a group do not agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DifferentSetting {
    /// The name of the setting.
    pub name: String,
    /// Its values, at least two, in the order of the lowest rank that has each.
    pub values: Vec<ValueOnRanks>,
}

/// A value of a setting, and the ranks that have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueOnRanks {
    /// The value, or the start, length and digest of a long one. None if the setting is not set.
    pub value: Option<String>,
    /// The ranks, ascending.
    pub ranks: Vec<usize>,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the ranks of the group do not agree on ")?;
        list(f, &self.settings, "; ")?;
        f.write_str(". Start all ranks with the same program, settings, weights and data")
    }
}

impl fmt::Display for DifferentSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: ", self.name)?;
        list(f, &self.values, ", ")
    }
}

impl fmt::Display for ValueOnRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "`{value}` on ")?,
            None => f.write_str("not set on ")?,
        }
        f.write_str(if self.ranks.len() == 1 { "rank " } else { "ranks " })?;
        list(f, &self.ranks, ", ")
    }
}

fn list(f: &mut fmt::Formatter<'_>, items: &[impl fmt::Display], between: &str) -> fmt::Result {
    items.iter().enumerate().try_for_each(|(number, item)| {
        f.write_str(if number == 0 { "" } else { between })?;
        write!(f, "{item}")
    })
}
