//! Rotary positions, as `config.json` states them.
//!
//! transformers 4 has `rope_theta` and `rope_scaling`; transformers 5 has `rope_parameters`, which
//! contains both.

use super::MAX_SIZE;
use super::keys::{Keys, Outcome};
use stepscope_core::ops::{Rotary, RotaryScaling};

/// The range of the base, and of the divisor of frequencies.
const BASES: std::ops::RangeInclusive<f64> = 1.000_001..=1e12;
const FACTORS: std::ops::RangeInclusive<f64> = 1.0..=1e6;
/// The range of the numbers of turns between which a ramp lies.
const TURNS: std::ops::RangeInclusive<f64> = 1e-6..=1e6;

/// The defaults of a family.
pub(super) struct Defaults {
    /// The base, unless a file must state it.
    pub(super) base: Option<f64>,
    /// The share of each head's columns that rotate.
    pub(super) share: f64,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { base: Some(10_000.0), share: 1.0 }
    }
}

/// Reads the rotary positions of all layers.
pub(super) fn read(config: &Keys<'_>, head_width: usize, context: usize, defaults: &Defaults) -> Outcome<Rotary> {
    let base = config.real("rope_theta", BASES)?;
    let share = config.real("partial_rotary_factor", 0.0..=1.0)?;
    let scaling = config.object("rope_scaling")?;
    let all = config.object("rope_parameters")?;
    if all.is_some() && scaling.is_some() {
        return config.refuse("rope_scaling", "nothing next to `rope_parameters`");
    }
    let inner = all.as_ref().map_or(Ok(None), |all| all.real("rope_theta", BASES))?;
    let base = match (base, inner) {
        (Some(outer), Some(inner)) if outer != inner => {
            return config.refuse("rope_theta", format!("{inner}, as in `rope_parameters`"));
        }
        (outer, inner) => inner.or(outer).or(defaults.base),
    };
    let Some(base) = base else { return config.refuse("rope_theta", "a number above 1") };
    let inner = all.as_ref().map_or(Ok(None), |all| all.real("partial_rotary_factor", 0.0..=1.0))?;
    let share = inner.or(share).unwrap_or(defaults.share);
    let columns = (head_width as f64 * share) as usize;
    let rotary = Rotary { columns: (columns != head_width).then_some(columns), ..Rotary::new(base) };
    let Some(settings) = all.or(scaling) else { return Ok(rotary) };
    let scaling = scaling_of(config, &settings, context)?;
    settings.finish(&[])?;
    Ok(Rotary { scaling, ..rotary })
}

/// Reads one entry of Gemma 3's `rope_parameters`, which has one for each kind of layer.
pub(super) fn read_kind(config: &Keys<'_>, kind: &str, context: usize) -> Outcome<Option<Rotary>> {
    let Some(all) = config.object("rope_parameters")? else { return Ok(None) };
    let Some(settings) = all.object(kind)? else { return all.refuse(kind, "an object") };
    let Some(base) = settings.real("rope_theta", BASES)? else {
        return settings.refuse("rope_theta", "a number above 1");
    };
    let scaling = scaling_of(config, &settings, context)?;
    settings.finish(&[])?;
    Ok(Some(Rotary { scaling, ..Rotary::new(base) }))
}

/// Reads the scaling from `rope_scaling` or `rope_parameters`.
fn scaling_of(config: &Keys<'_>, settings: &Keys<'_>, context: usize) -> Outcome<RotaryScaling> {
    let kind = settings.text("rope_type")?;
    let old = settings.text("type")?;
    let kind = match (kind, old) {
        (None, Some(_)) => return settings.refuse("type", "nothing: this key is called `rope_type`"),
        (Some(kind), Some(old)) if kind != old => {
            return settings.refuse("type", format!("\"{kind}\", as `rope_type`"));
        }
        (kind, _) => kind.unwrap_or("default"),
    };
    let factor = || match settings.real("factor", FACTORS)? {
        Some(factor) => Ok(factor),
        None => settings.refuse("factor", "a number of at least 1"),
    };
    // transformers prefers the context before scaling to `max_position_embeddings`.
    let before = || match settings.size("original_max_position_embeddings", MAX_SIZE)? {
        Some(before) => Ok(Some(before)),
        None => config.size("original_max_position_embeddings", MAX_SIZE),
    };
    let turns = |key: &str| match settings.real(key, TURNS)? {
        Some(turns) => Ok(turns),
        None => settings.refuse(key, "a number above 0"),
    };
    match kind {
        "default" => Ok(RotaryScaling::None),
        "linear" => Ok(RotaryScaling::Linear { factor: factor()? }),
        "llama3" => {
            let (low, high) = (turns("low_freq_factor")?, turns("high_freq_factor")?);
            if low >= high {
                return settings.refuse("high_freq_factor", format!("more than `low_freq_factor`, {low}"));
            }
            let Some(context) = before()? else {
                return settings.refuse("original_max_position_embeddings", "a whole number above 0");
            };
            Ok(RotaryScaling::Llama3 { factor: factor()?, low, high, context })
        }
        "yarn" => {
            let context = before()?.unwrap_or(context);
            let factor = factor()?;
            let fast = settings.real("beta_fast", TURNS)?.unwrap_or(32.0);
            let slow = settings.real("beta_slow", TURNS)?.unwrap_or(1.0);
            if slow >= fast {
                return settings.refuse("beta_fast", format!("more than `beta_slow`, {slow}"));
            }
            let whole = settings.flag("truncate", true)?;
            let scale = |factor: f64, scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
            let mscale = settings.real("mscale", 0.0..=1e3)?;
            let all_dims = settings.real("mscale_all_dim", 0.0..=1e3)?;
            let gain = match (settings.real("attention_factor", 0.0..=1e3)?, mscale, all_dims) {
                (Some(gain), ..) => gain,
                (None, Some(a), Some(b)) if a != 0.0 && b != 0.0 => scale(factor, a) / scale(factor, b),
                _ => scale(factor, 1.0),
            };
            Ok(RotaryScaling::Yarn { factor, slow, fast, whole, context, gain: gain as f32 })
        }
        _ => settings.refuse("rope_type", "\"default\", \"linear\", \"llama3\" or \"yarn\""),
    }
}
