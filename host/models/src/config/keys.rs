//! A JSON object that knows which of its keys were read.
//!
//! Invariant: [`Keys::unread`] returns exactly the keys whose values nobody has looked at.

use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::ops::RangeInclusive;

/// An error of a configuration: the key, the expected values and the actual value.
pub(crate) type Outcome<T> = Result<T, String>;

/// The keys of a JSON object. A key whose value is null counts as absent.
pub(crate) struct Keys<'j> {
    /// The path to the object, with a dot at its end, or nothing for the whole file.
    path: String,
    map: &'j Map<String, Value>,
    read: RefCell<BTreeSet<&'j str>>,
}

impl<'j> Keys<'j> {
    /// Returns the keys of the file's outermost object.
    pub(crate) fn of(value: &'j Value) -> Outcome<Self> {
        Self::at(String::new(), value)
    }

    fn at(path: String, value: &'j Value) -> Outcome<Self> {
        match value {
            Value::Object(map) => Ok(Self { path, map, read: RefCell::default() }),
            other => Err(format!("`{}`: expected an object, got {}", path.trim_end_matches('.'), shown(other))),
        }
    }

    /// Returns the value of a key, and counts the key as read.
    pub(crate) fn get(&self, key: &str) -> Option<&'j Value> {
        let (key, value) = self.map.get_key_value(key)?;
        self.read.borrow_mut().insert(key);
        Some(value).filter(|value| !value.is_null())
    }

    /// Returns true if the key is there, even if its value is null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Returns the object of a key.
    pub(crate) fn object(&self, key: &str) -> Outcome<Option<Self>> {
        self.get(key).map(|value| Self::at(format!("{}{key}.", self.path), value)).transpose()
    }

    /// Returns the error that a key has another value than expected.
    pub(crate) fn refuse<T>(&self, key: &str, expected: impl Display) -> Outcome<T> {
        let got = self.map.get(key).map_or("nothing".into(), shown);
        Err(format!("`{}{key}`: expected {expected}, got {got}", self.path))
    }

    /// Returns a number above 0, if there is one.
    pub(crate) fn size(&self, key: &str, most: usize) -> Outcome<Option<usize>> {
        match self.get(key).map(Value::as_u64) {
            None => Ok(None),
            Some(Some(number)) if (1..=most as u64).contains(&number) => Ok(Some(number as usize)),
            Some(_) => self.refuse(key, format!("a whole number from 1 to {most}")),
        }
    }

    /// Returns a number, which may be 0, if the key is present.
    pub(crate) fn count(&self, key: &str, most: usize) -> Outcome<Option<usize>> {
        match self.get(key).map(Value::as_u64) {
            None => Ok(None),
            Some(Some(number)) if number <= most as u64 => Ok(Some(number as usize)),
            Some(_) => self.refuse(key, format!("a whole number from 0 to {most}")),
        }
    }

    /// Returns a number above 0 that must be there.
    pub(crate) fn required(&self, key: &str, most: usize) -> Outcome<usize> {
        match self.size(key, most)? {
            Some(size) => Ok(size),
            None => self.refuse(key, format!("a whole number from 1 to {most}")),
        }
    }

    /// Returns a number of this range, if there is one.
    pub(crate) fn real(&self, key: &str, range: RangeInclusive<f64>) -> Outcome<Option<f64>> {
        match self.get(key).map(Value::as_f64) {
            None => Ok(None),
            Some(Some(number)) if range.contains(&number) => Ok(Some(number)),
            Some(_) => self.refuse(key, format!("a number from {:e} to {:e}", range.start(), range.end())),
        }
    }

    /// Returns true or false, or the default if the key is absent.
    pub(crate) fn flag(&self, key: &str, default: bool) -> Outcome<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => self.refuse(key, "true or false"),
        }
    }

    /// Returns a text, if there is one.
    pub(crate) fn text(&self, key: &str) -> Outcome<Option<&'j str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => self.refuse(key, "a text"),
        }
    }

    /// Returns a list, if there is one.
    pub(crate) fn list(&self, key: &str) -> Outcome<Option<&'j [Value]>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => self.refuse(key, "a list"),
        }
    }

    /// Requires that a key is absent or has one of these values.
    pub(crate) fn only(&self, key: &str, known: &[Value]) -> Outcome<()> {
        match self.get(key) {
            Some(value) if !known.contains(value) => {
                let known: Vec<String> = known.iter().map(Value::to_string).collect();
                self.refuse(key, if known.is_empty() { "nothing".into() } else { known.join(" or ") })
            }
            _ => Ok(()),
        }
    }

    /// Returns the keys that were not read, with their values.
    pub(crate) fn unread(&self) -> impl Iterator<Item = (&'j str, &'j Value)> + use<'j> {
        let read = self.read.borrow().clone();
        self.map.iter().map(|(key, value)| (key.as_str(), value)).filter(move |(key, _)| !read.contains(key))
    }

    /// Requires that all keys were read, except those that have no effect or are null.
    pub(crate) fn finish(&self, without_effect: &[&str]) -> Outcome<()> {
        match self.unread().find(|(key, value)| !value.is_null() && !without_effect.contains(key)) {
            None => Ok(()),
            Some((key, value)) => Err(format!(
                "`{}{key}`: expected no such key, got {}: it is unknown, so its effect is",
                self.path,
                shown(value)
            )),
        }
    }
}

/// Formats a value for a message, shortened.
pub(crate) fn shown(value: &Value) -> String {
    let text = value.to_string();
    let start: String = text.chars().take(80).collect();
    if start.len() < text.len() { start + ".." } else { start }
}

/// Returns true for the value of a setting that is not used.
pub(crate) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}
