//! The settings of adapters as PEFT's `adapter_config.json`.

use super::{Lora, Targets};
use crate::config::keys::Keys;
use crate::config::{Family, ModelConfig};
use serde_json::{Map, Value, json};
use stepscope_core::Result;

/// The largest rank.
const MAX_RANK: usize = 1 << 14;

/// Keys that do not change what an adapter computes. They name the writer of the file, the place of
/// the base model, and settings of variants. Other keys enable those variants, and are refused.
const WITHOUT_EFFECT: [&str; 10] = [
    "auto_mapping",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

impl Lora {
    /// Reads the contents of an `adapter_config.json`.
    ///
    /// # Errors
    /// The key whose value is not supported, the supported values, and the actual value.
    pub fn from_json(bytes: &[u8]) -> std::result::Result<Self, String> {
        let json: Value = serde_json::from_slice(bytes).map_err(|reason| reason.to_string())?;
        let keys = Keys::of(&json)?;
        if keys.text("peft_type")? != Some("LORA") {
            return keys.refuse("peft_type", "\"LORA\"");
        }
        keys.only("bias", &[json!("none")])?;
        // The weights come from the file, or are initialized as `true` does it. Other names change
        // the base model's weights too.
        keys.only("init_lora_weights", &[json!(true), json!(false), json!("gaussian")])?;
        for key in ["lora_bias", "use_dora", "use_qalora"] {
            keys.only(key, &[json!(false)])?;
        }
        keys.only("loftq_config", &[json!({})])?;
        let targets = match keys.get("target_modules") {
            Some(Value::String(text)) if text == "all-linear" => Targets::AllLinear,
            Some(Value::Array(_)) => Targets::Names(names(&keys, "target_modules")?),
            _ => return keys.refuse("target_modules", "a list of names, or \"all-linear\""),
        };
        let lora = Self {
            rank: keys.required("r", MAX_RANK)?,
            alpha: keys.real("lora_alpha", 1e-30..=1e30)?.unwrap_or(8.0),
            dropout: keys.real("lora_dropout", 0.0..=0.999)?.unwrap_or(0.0) as f32,
            rs_lora: keys.flag("use_rslora", false)?,
            targets,
            excluded: names(&keys, "exclude_modules")?,
            modules_to_save: names(&keys, "modules_to_save")?,
            rank_pattern: pattern(&keys, "rank_pattern", |keys, key| keys.required(key, MAX_RANK))?,
            alpha_pattern: pattern(&keys, "alpha_pattern", |keys, key| match keys.real(key, 1e-30..=1e30)? {
                Some(alpha) => Ok(alpha),
                None => keys.refuse(key, "a number"),
            })?,
            base_model: keys.text("base_model_name_or_path")?.map(str::to_owned),
        };
        keys.finish(&WITHOUT_EFFECT)?;
        Ok(lora)
    }

    /// Returns the `adapter_config.json` for this model.
    pub fn to_json(&self, config: &ModelConfig) -> Result<String> {
        // The names of `all-linear`, as PEFT writes them.
        let targets = match &self.targets {
            Targets::Names(names) => names.clone(),
            Targets::AllLinear => {
                let modules = self.plan(config)?.modules;
                let mut ends: Vec<String> =
                    modules.iter().map(|module| module.rsplit('.').next().unwrap_or(module).to_owned()).collect();
                ends.sort();
                ends.dedup();
                ends
            }
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
            "exclude_modules": list(&self.excluded),
            "fan_in_fan_out": config.family == Family::Gpt2,
            "inference_mode": true,
            "init_lora_weights": true,
            "layers_pattern": null,
            "layers_to_transform": null,
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
    value.to_string().parse().expect("a number's digits are a number")
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

/// Returns the values of names, or none if the key is absent. PEFT reads a name as a pattern, so
/// one with other signs than those of a name is refused.
fn pattern<T>(
    keys: &Keys<'_>,
    key: &str,
    value: impl Fn(&Keys<'_>, &str) -> std::result::Result<T, String>,
) -> std::result::Result<Vec<(String, T)>, String> {
    let (Some(Value::Object(map)), Some(object)) = (keys.get(key), keys.object(key)?) else { return Ok(Vec::new()) };
    map.keys()
        .map(|name| {
            let plain = |sign: char| sign.is_ascii_alphanumeric() || sign == '_' || sign == '.';
            if name.is_empty() || !name.chars().all(plain) {
                return keys.refuse(key, "names of modules, not patterns");
            }
            Ok((name.clone(), value(&object, name)?))
        })
        .collect()
}
