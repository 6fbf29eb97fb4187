//! The choice of modules by their names, as PEFT makes it.

use super::{Lora, Targets};
use fancy_regex::Regex;
use stepscope_core::{Error, Result};

impl Targets {
    /// Returns true if a module of this name is chosen. `linear` is true for a linear layer of a
    /// block.
    pub(super) fn has(&self, module: &str, linear: bool) -> Result<bool> {
        match self {
            Self::AllLinear => Ok(linear),
            Self::Names(names) => Ok(names.iter().any(|name| ends_with(module, name))),
            Self::Pattern(pattern) => is_match(&format!("^(?:{pattern})$"), module),
        }
    }
}

impl Lora {
    /// Returns true if a module of this name has an adapter.
    pub(super) fn is_target(&self, module: &str, linear: bool) -> Result<bool> {
        let inside = |saved: &String| module.split('.').any(|part| part == saved) || ends_with(module, saved);
        if self.excluded.has(module, linear)? || self.modules_to_save.iter().any(inside) {
            return Ok(false);
        }
        Ok(self.targets.has(module, linear)? && self.is_in_layers(module)?)
    }

    /// Returns true if a module is in one of the layers that are adapted.
    fn is_in_layers(&self, module: &str) -> Result<bool> {
        let (Some(layers), Targets::Names(names)) = (&self.layers, &self.targets) else { return Ok(true) };
        if names.iter().any(|name| name == module) {
            return Ok(true);
        }
        let any = ["[^.]*".to_owned()];
        let lists = if self.layers_pattern.is_empty() { &any[..] } else { &self.layers_pattern };
        for list in lists {
            if let Some(number) = first_group(&format!(r"^(?:.*?\.)?(?:{list})\.(\d+)\."), module)? {
                return Ok(number.parse().is_ok_and(|number: usize| layers.contains(&number)));
            }
        }
        Ok(false)
    }
}

/// Returns true if a module's name is `end`, or ends with it after a dot.
pub(super) fn ends_with(module: &str, end: &str) -> bool {
    module.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Returns the value of the first pattern that matches the end of a module's name.
pub(super) fn matching<T: Copy>(pattern: &[(String, T)], module: &str) -> Result<Option<T>> {
    for (end, value) in pattern {
        if is_match(&format!(r"^(?:.*\.)?(?:{end})$"), module)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

/// Compiles a regular expression of an adapter's settings.
pub(super) fn compile(pattern: &str) -> std::result::Result<Regex, String> {
    Regex::new(pattern).map_err(|reason| format!("a regular expression, which this is not: {reason}"))
}

fn is_match(pattern: &str, module: &str) -> Result<bool> {
    Ok(captures(pattern, module)?.is_some())
}

fn first_group(pattern: &str, module: &str) -> Result<Option<String>> {
    Ok(captures(pattern, module)?.and_then(|groups| groups.into_iter().nth(1)))
}

/// Returns the groups of a match, the whole first. A group without a match is empty.
fn captures(pattern: &str, module: &str) -> Result<Option<Vec<String>>> {
    let failed = |reason: String| Error::misuse("lora", "a regular expression that can be matched", reason);
    let found = compile(pattern).map_err(failed)?.captures(module).map_err(|reason| failed(reason.to_string()))?;
    let text = |group: Option<fancy_regex::Match<'_>>| group.map_or(String::new(), |group| group.as_str().into());
    Ok(found.map(|groups| groups.iter().map(text).collect()))
}
