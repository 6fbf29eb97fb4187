//! Range checks of settings.

#![forbid(unsafe_code)]

use std::fmt::Display;
use stepscope_core::{Error, Result};

/// Returns an error unless a setting satisfies its rule.
pub(crate) fn expect(op: &'static str, name: &str, value: impl Display, holds: bool, rule: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::misuse(op, format!("`{name}` {rule}"), value.to_string())) }
}

/// Returns an error unless a setting is finite and not negative.
pub(super) fn at_least_zero(op: &'static str, name: &str, value: f32) -> Result<()> {
    expect(op, name, value, value >= 0.0 && value.is_finite(), "finite and at least 0")
}

/// Returns an error unless gradients can be clipped to this norm.
pub(super) fn expect_clip(op: &'static str, clip: Option<f32>) -> Result<()> {
    clip.map_or(Ok(()), |clip| expect(op, "clip", clip, clip > 0.0 && clip.is_finite(), "above 0"))
}
