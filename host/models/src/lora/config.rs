//! The settings of adapters as PEFT's `adapter_config.json`.

use super::targets::compile;
use super::{Lora, Targets};
use crate::config::keys::{Keys, is_off};
use crate::config::{Family, ModelConfig};
use cuda_std::float_mode;
use serde_json::{Map, Value, json};
use stepscope_core::Result;

/// The largest rank.
const MAX_RANK: usize = 1 << 14;

/// Keys that do not change what an adapter computes. They name the writer of the file, the place of
/// the base model, and settings of initializations and variants that other keys switch on.
const WITHOUT_EFFECT: [&str; 15] = [
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "merge_weights",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// The initializations after which the base model's weights are its own. Others change them too.
const INITIALIZATIONS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

impl Lora {
    /// Reads the contents of an `adapter_config.json`.
    ///
    /// # Errors
    /// The key whose value is not supported, the supported values, and the actual value.
    pub fn from_json(bytes: &[u8]) -> std::result::Result<Self, String> {
        float_mode::in_default(|| Self::parse(bytes))
    }

    fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let json: Value = serde_json::from_slice(bytes).map_err(|reason| reason.to_string())?;
        let keys = Keys::of(&json)?;
        if keys.text("peft_type")? != Some("LORA") {
            return keys.refuse("peft_type", "\"LORA\"");
        }
        keys.only("bias", &[json!("none")])?;
        match keys.get("init_lora_weights") {
            None | Some(Value::Bool(_)) => {}
            Some(Value::String(name)) if INITIALIZATIONS.contains(&name.as_str()) => {}
            _ => {
                let expected = "true, false, \"gaussian\", \"eva\" or \"orthogonal\", which leave the model's own weights \
                                as they are: convert the adapter with `path_initial_model_for_weight_conversion` of PEFT";
                return keys.refuse("init_lora_weights", expected);
            }
        }
        let targets = match chosen(&keys, "target_modules")? {
            Some(Targets::Pattern(pattern)) if pattern == "all-linear" => Targets::AllLinear,
            Some(targets) => targets,
            None => return keys.refuse("target_modules", "a list of names, a regular expression, or \"all-linear\""),
        };
        let layers = match keys.get("layers_to_transform") {
            Some(Value::Array(list)) if list.is_empty() => None,
            Some(Value::Array(list)) => Some(list.iter().map(number_of).collect()),
            Some(one) => Some(number_of(one).map(|number| vec![number])),
            None => None,
        };
        let layers = match layers {
            Some(None) => return keys.refuse("layers_to_transform", "a number of a layer, or a list of them"),
            layers => layers.flatten(),
        };
        let lora = Self {
            rank: keys.size("r", MAX_RANK)?.unwrap_or(8),
            alpha: keys.real("lora_alpha", 1e-30..=1e30)?.unwrap_or(8.0),
            dropout: keys.real("lora_dropout", 0.0..=0.999)?.unwrap_or(0.0) as f32,
            rs_lora: keys.flag("use_rslora", false)?,
            targets,
            excluded: chosen(&keys, "exclude_modules")?.unwrap_or_else(|| Targets::Names(Vec::new())),
            layers,
            layers_pattern: match keys.get("layers_pattern") {
                Some(Value::String(one)) if !one.is_empty() => vec![one.clone()],
                Some(Value::String(_)) => Vec::new(),
                _ => names(&keys, "layers_pattern")?,
            },
            modules_to_save: names(&keys, "modules_to_save")?,
            rank_pattern: pattern(&keys, "rank_pattern", |keys, key| keys.required(key, MAX_RANK))?,
            alpha_pattern: pattern(&keys, "alpha_pattern", |keys, key| match keys.real(key, 1e-30..=1e30)? {
                Some(alpha) => Ok(alpha),
                None => keys.refuse(key, "a number"),
            })?,
            base_weights: Vec::new(),
            base_model: keys.text("base_model_name_or_path")?.map(str::to_owned),
        };
        if let Some(reason) = lora.layers_pattern.iter().find_map(|pattern| compile(pattern).err()) {
            return keys.refuse("layers_pattern", reason);
        }
        match keys.unread().find(|(key, value)| !WITHOUT_EFFECT.contains(key) && !is_off(value)) {
            None => Ok(lora),
            Some((key, _)) => keys.refuse(
                key,
                "no such setting, which may change what the adapter computes: merge the adapter into its model with \
                 `merge_and_unload` of PEFT, and load that model",
            ),
        }
    }

    /// Returns the `adapter_config.json` for this model.
    pub fn to_json(&self, config: &ModelConfig) -> Result<String> {
        // The names of `all-linear`, as PEFT writes them.
        let targets = match &self.targets {
            Targets::Names(names) => json!(names),
            Targets::Pattern(pattern) => json!(pattern),
            Targets::AllLinear => {
                let modules = self.plan(config)?.modules;
                let mut ends: Vec<String> =
                    modules.iter().map(|module| module.rsplit('.').next().unwrap_or(module).to_owned()).collect();
                ends.sort();
                ends.dedup();
                json!(ends)
            }
        };
        let excluded = match &self.excluded {
            Targets::Names(names) if names.is_empty() => Value::Null,
            Targets::Names(names) => json!(names),
            Targets::Pattern(pattern) => json!(pattern),
            Targets::AllLinear => json!("all-linear"),
        };
        let list = |names: &[String]| if names.is_empty() { Value::Null } else { json!(names) };
        let ranks: Map<String, Value> =
            self.rank_pattern.iter().map(|(name, rank)| (name.clone(), json!(rank))).collect();
        let alphas: Map<String, Value> =
            self.alpha_pattern.iter().map(|(name, alpha)| (name.clone(), number(*alpha))).collect();
        let json = json!({
            "alpha_pattern": alphas,
            "auto_mapping": null,
            "base_model_name_or_path": self.base_model,
            "bias": "none",
            "exclude_modules": excluded,
            "fan_in_fan_out": config.family == Family::Gpt2,
            "inference_mode": true,
            "init_lora_weights": true,
            "layers_pattern": list(&self.layers_pattern),
            "layers_to_transform": self.layers,
            "lora_alpha": number(self.alpha),
            "lora_bias": false,
            "lora_dropout": shortest(self.dropout),
            "modules_to_save": list(&self.modules_to_save),
            "peft_type": "LORA",
            "r": self.rank,
            "rank_pattern": ranks,
            "revision": null,
            "target_modules": targets,
            "task_type": "CAUSAL_LM",
            "use_dora": false,
            "use_rslora": self.rs_lora,
        });
        Ok(serde_json::to_string_pretty(&json).expect("an object of plain values has a JSON form"))
    }
}

/// Writes a whole number as one, because PEFT declares alpha so.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}

/// Returns the number with the fewest digits that is this one in f32.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().expect("the digits of a JSON number parse as a number")
}

/// Returns the names of a list, or none if the key is absent.
fn names(keys: &Keys<'_>, key: &str) -> std::result::Result<Vec<String>, String> {
    let list = keys.list(key)?.unwrap_or_default();
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    match list.iter().map(text).collect() {
        Some(names) => Ok(names),
        None => keys.refuse(key, "a list of names"),
    }
}

/// Returns the modules that a key chooses: a list of names, or a regular expression.
fn chosen(keys: &Keys<'_>, key: &str) -> std::result::Result<Option<Targets>, String> {
    match keys.get(key) {
        None => Ok(None),
        Some(Value::String(pattern)) => match compile(pattern) {
            Ok(_) => Ok(Some(Targets::Pattern(pattern.clone()))),
            Err(reason) => keys.refuse(key, reason),
        },
        _ => Ok(Some(Targets::Names(names(keys, key)?))),
    }
}

/// Returns the values of patterns of names, or none if the key is absent.
fn pattern<T>(
    keys: &Keys<'_>,
    key: &str,
    value: impl Fn(&Keys<'_>, &str) -> std::result::Result<T, String>,
) -> std::result::Result<Vec<(String, T)>, String> {
    let (Some(Value::Object(map)), Some(object)) = (keys.get(key), keys.object(key)?) else { return Ok(Vec::new()) };
    let entry = |name: &String| match compile(name) {
        Ok(_) => Ok((name.clone(), value(&object, name)?)),
        Err(reason) => keys.refuse(key, reason),
    };
    map.keys().map(entry).collect()
}

/// Returns the number of a layer.
fn number_of(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|number| usize::try_from(number).ok())
}
