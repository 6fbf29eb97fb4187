//! Rotary positions, as `config.json` states them.
//!
//! transformers 4 has `rope_theta` and `rope_scaling`; transformers 5 has `rope_parameters`, which
//! contains both.

use super::MAX_SIZE;
use super::keys::{Keys, Outcome};
use serde_json::Value;
use stepscope_core::ops::{PairFactors, Rotary, RotaryScaling};

/// The range of the base, and of the divisor of frequencies.
const BASES: std::ops::RangeInclusive<f64> = 1.000_001..=1e12;
const FACTORS: std::ops::RangeInclusive<f64> = 1.0..=1e6;
/// The range of the numbers of turns between which a ramp lies.
const TURNS: std::ops::RangeInclusive<f64> = 1e-6..=1e6;

/// The share of each head's columns that rotate.
const SHARE: &str = "partial_rotary_factor";
/// Keys that transformers reads for some scalings only, or not at all. vLLM reads `attn_factor`.
const WITHOUT_EFFECT: [&str; 3] = ["attn_factor", "finetuned", "original_max_position_embeddings"];

/// The defaults of a family.
pub(super) struct Defaults {
    /// The base, unless a file must state it.
    pub(super) base: Option<f64>,
    /// The share of each head's columns that rotate. Families without it rotate all.
    pub(super) share: Option<f64>,
    /// The scalings that transformers accepts for this family.
    pub(super) scaling: &'static [&'static str],
}

/// The scalings of most families, and of Phi-3.
const SCALINGS: &[&str] = &["default", "linear", "llama3", "yarn", "longrope"];
pub(super) const LONGROPE: &[&str] = &["default", "longrope"];

impl Default for Defaults {
    fn default() -> Self {
        Self { base: Some(10_000.0), share: None, scaling: SCALINGS }
    }
}

/// Reads the rotary positions of all layers.
pub(super) fn read(config: &Keys<'_>, head_width: usize, context: usize, defaults: &Defaults) -> Outcome<Rotary> {
    let outer = config.real("rope_theta", BASES)?;
    let settings = match (config.object("rope_parameters")?, config.object("rope_scaling")?) {
        (Some(_), Some(_)) if config.get("rope_parameters") != config.get("rope_scaling") => {
            return config.refuse("rope_scaling", "nothing next to `rope_parameters`");
        }
        (all, scaling) => all.or(scaling),
    };
    let inner = settings.as_ref().map_or(Ok(None), |settings| settings.real("rope_theta", BASES))?;
    let base = match (outer, inner) {
        (Some(outer), Some(inner)) if outer != inner => {
            return config.refuse("rope_theta", format!("{inner}, as in `rope_parameters`"));
        }
        (outer, inner) => inner.or(outer).or(defaults.base),
    };
    let Some(base) = base else { return config.refuse("rope_theta", "a number above 1") };
    let mut share = defaults.share;
    for keys in [Some(config), settings.as_ref()].into_iter().flatten() {
        match keys.real(SHARE, 0.0..=1.0)? {
            Some(other) if share.is_none() && other != 1.0 => {
                return keys.refuse(SHARE, "1: heads of this family rotate as a whole");
            }
            found => share = share.and(found).or(share),
        }
    }
    let columns = (head_width as f64 * share.unwrap_or(1.0)) as usize;
    let rotary = Rotary { columns: (columns != head_width).then_some(columns), ..Rotary::new(base) };
    let Some(settings) = settings else { return Ok(rotary) };
    let scaling = Scaling { config, settings: &settings, context, columns, known: defaults.scaling }.read()?;
    settings.finish(&WITHOUT_EFFECT)?;
    Ok(Rotary { scaling, ..rotary })
}

/// Reads one entry of Gemma 3's `rope_parameters`, which has one for each kind of layer. `base` is
/// that of an entry without one.
pub(super) fn read_kind(config: &Keys<'_>, kind: &str, base: f64, columns: usize, context: usize) -> Outcome<Rotary> {
    let Some(all) = config.object("rope_parameters")? else { return Ok(Rotary::new(base)) };
    let Some(settings) = all.object(kind)? else { return Ok(Rotary::new(base)) };
    let base = settings.real("rope_theta", BASES)?.unwrap_or(base);
    let scaling = Scaling { config, settings: &settings, context, columns, known: SCALINGS }.read()?;
    settings.finish(&WITHOUT_EFFECT)?;
    Ok(Rotary { scaling, ..Rotary::new(base) })
}

/// The scaling in `rope_scaling` or `rope_parameters`.
struct Scaling<'k, 'j> {
    config: &'k Keys<'j>,
    settings: &'k Keys<'j>,
    context: usize,
    /// The columns of a head that rotate.
    columns: usize,
    /// The scalings that the family may have.
    known: &'static [&'static str],
}

impl Scaling<'_, '_> {
    fn read(&self) -> Outcome<RotaryScaling> {
        let Self { settings, known, .. } = *self;
        let kind = settings.text("rope_type")?;
        let old = settings.text("type")?;
        let kind = match (kind, old) {
            // The name in the first files of Phi-3.
            (None, Some("su")) if known == LONGROPE => "longrope",
            (Some(kind), Some(old)) if kind != old => {
                return settings.refuse("type", format!("\"{kind}\", as `rope_type`"));
            }
            (kind, old) => kind.or(old).unwrap_or("default"),
        };
        match kind {
            _ if !known.contains(&kind) => {
                let known: Vec<String> = known.iter().map(|name| format!("\"{name}\"")).collect();
                settings.refuse(if settings.has("rope_type") { "rope_type" } else { "type" }, known.join(" or "))
            }
            "linear" => Ok(RotaryScaling::Linear { factor: self.factor()? }),
            "llama3" => self.llama3(),
            "yarn" => self.yarn(),
            "longrope" => self.longrope(),
            _ => Ok(RotaryScaling::None),
        }
    }

    fn factor(&self) -> Outcome<f64> {
        match self.settings.real("factor", FACTORS)? {
            Some(factor) => Ok(factor),
            None => self.settings.refuse("factor", "a number of at least 1"),
        }
    }

    /// Returns the context before scaling, if it is stated.
    fn before(&self) -> Outcome<Option<usize>> {
        const KEY: &str = "original_max_position_embeddings";
        let (inner, outer) = (self.settings.size(KEY, MAX_SIZE)?, self.config.size(KEY, MAX_SIZE)?);
        match (inner, outer) {
            (Some(inner), Some(outer)) if inner != outer => {
                self.settings.refuse(KEY, format!("{outer}, as outside of this object"))
            }
            _ => Ok(inner.or(outer)),
        }
    }

    /// Returns the context before scaling.
    fn stated_before(&self) -> Outcome<usize> {
        match self.before()? {
            Some(context) => Ok(context),
            None => self.settings.refuse("original_max_position_embeddings", "a whole number above 0"),
        }
    }

    fn llama3(&self) -> Outcome<RotaryScaling> {
        let settings = self.settings;
        let turns = |key: &str| match settings.real(key, TURNS)? {
            Some(turns) => Ok(turns),
            None => settings.refuse(key, "a number above 0"),
        };
        let (low, high) = (turns("low_freq_factor")?, turns("high_freq_factor")?);
        if low >= high {
            return settings.refuse("high_freq_factor", format!("more than `low_freq_factor`, {low}"));
        }
        Ok(RotaryScaling::Llama3 { factor: self.factor()?, low, high, context: self.stated_before()? })
    }

    fn yarn(&self) -> Outcome<RotaryScaling> {
        let settings = self.settings;
        let context = self.before()?.unwrap_or(self.context);
        let factor = self.factor()?;
        let fast = settings.real("beta_fast", TURNS)?.unwrap_or(32.0);
        let slow = settings.real("beta_slow", TURNS)?.unwrap_or(1.0);
        if slow >= fast {
            return settings.refuse("beta_fast", format!("more than `beta_slow`, {slow}"));
        }
        let whole = settings.flag("truncate", true)?;
        let scale = |factor: f64, scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        let mscale = settings.real("mscale", 0.0..=1e3)?;
        let all_dims = settings.real("mscale_all_dim", 0.0..=1e3)?;
        let gain = match (self.gain()?, mscale, all_dims) {
            (Some(gain), ..) => gain,
            (None, Some(a), Some(b)) if a != 0.0 && b != 0.0 => scale(factor, a) / scale(factor, b),
            _ => scale(factor, 1.0),
        };
        Ok(RotaryScaling::Yarn { factor, slow, fast, whole, context, gain: gain as f32 })
    }

    fn longrope(&self) -> Outcome<RotaryScaling> {
        let context = self.stated_before()?;
        let ratio = self.context as f64 / context as f64;
        // transformers 4 ignores this factor where the context before scaling is stated.
        if self.settings.real("factor", FACTORS)?.is_some_and(|factor| factor != ratio) {
            let expected = format!("{ratio}, the ratio of both contexts, or nothing");
            return self.settings.refuse("factor", expected);
        }
        let gain = match self.gain()? {
            Some(gain) => gain,
            None if ratio <= 1.0 => 1.0,
            None if context == 1 => {
                return self.settings.refuse("original_max_position_embeddings", "a whole number above 1");
            }
            None => (1.0 + ratio.ln() / (context as f64).ln()).sqrt(),
        };
        let (short, long) = (self.factors("short_factor")?, self.factors("long_factor")?);
        Ok(RotaryScaling::Long { short, long, context, gain: gain as f32 })
    }

    fn gain(&self) -> Outcome<Option<f64>> {
        self.settings.real("attention_factor", 0.0..=1e3)
    }

    /// Returns a list of factors, one for each pair of columns that rotates.
    fn factors(&self, key: &str) -> Outcome<PairFactors> {
        let list = self.settings.list(key)?.unwrap_or_default();
        let factor =
            |value: &Value| value.as_f64().filter(|factor| FACTORS.contains(factor)).map(|factor| factor as f32);
        let factors: Option<Vec<f32>> = list.iter().map(factor).collect();
        let pairs = self.columns / 2;
        match factors.filter(|factors| factors.len() == pairs).map(|factors| PairFactors::new(&factors)) {
            Some(Ok(factors)) => Ok(factors),
            _ if pairs > PairFactors::MOST => self
                .settings
                .refuse(key, format!("at most {} numbers, but {} columns rotate", PairFactors::MOST, self.columns)),
            _ => self
                .settings
                .refuse(key, format!("{pairs} numbers of at least 1, one for each pair of columns that rotates")),
        }
    }
}
