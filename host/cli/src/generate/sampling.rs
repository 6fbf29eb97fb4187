//! The settings by which tokens are drawn: those of the command line, or else those of the model's
//! `generation_config.json`.

use std::fmt;

use serde_json::Value;
use stepscope::Result;
use stepscope::data::{TokenSampler, TokenSamplerConfig};

use super::Args;

/// The temperature of models without settings of their own.
const TEMPERATURE: f32 = 0.8;
/// The settings of transformers for a model that asks for sampling without stating them.
const SAMPLED: (f32, Option<usize>) = (1.0, Some(50));
/// Settings of `generation_config.json` that would change the text, and are not applied.
const UNREAD: [&str; 16] = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_beams",
    "sequence_bias",
    "suppress_tokens",
    "typical_p",
];

/// The settings of a text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sampling {
    config: TokenSamplerConfig,
    pub(super) repetition_penalty: f32,
    /// Texts that end the answer.
    pub(super) stops: Vec<String>,
}

impl Sampling {
    /// Combines the command line and the contents of `generation_config.json`, which may be null.
    ///
    /// # Errors
    /// Returns the key, and its expected and actual value.
    pub(super) fn of(args: &Args, settings: &Value) -> std::result::Result<Self, String> {
        let is_sampled = match &settings["do_sample"] {
            Value::Null => None,
            Value::Bool(is_sampled) => Some(*is_sampled),
            _ => return refuse(settings, "do_sample", "true or false"),
        };
        // Without sampling, the file's other settings have no effect.
        let settings = if is_sampled == Some(false) { &without_sampling(settings) } else { settings };
        let (temperature, top_k) = match is_sampled {
            Some(true) => SAMPLED,
            Some(false) => (0.0, None),
            None => (TEMPERATURE, None),
        };
        let number = |key: &str, most: f64| match &settings[key] {
            Value::Null => Ok(None),
            value => match value.as_f64().filter(|number| (0.0..=most).contains(number)) {
                Some(number) => Ok(Some(number as f32)),
                None => refuse(settings, key, &format!("a number from 0 to {most}")),
            },
        };
        let of_file = match &settings["top_k"] {
            Value::Null => top_k,
            value => match value.as_u64() {
                Some(top_k) => usize::try_from(top_k).ok().filter(|&top_k| top_k > 0),
                None => return refuse(settings, "top_k", "a whole number"),
            },
        };
        let temperature = args.temperature.or(number("temperature", 1e6)?).unwrap_or(temperature);
        let top_p = args.top_p.or(number("top_p", 1.0)?.filter(|&top_p| top_p > 0.0 && top_p < 1.0));
        let penalty = number("repetition_penalty", 1e6)?.filter(|&penalty| penalty > 0.0);
        let stops = match &settings["stop_strings"] {
            Value::Null => vec![],
            Value::String(stop) => vec![stop.clone()],
            Value::Array(list) if list.iter().all(Value::is_string) => {
                list.iter().filter_map(|stop| stop.as_str().map(String::from)).collect()
            }
            _ => return refuse(settings, "stop_strings", "a text or a list of texts"),
        };
        Ok(Self {
            config: TokenSamplerConfig { temperature, top_k: args.top_k.or(of_file), top_p },
            repetition_penalty: args.repetition_penalty.or(penalty).unwrap_or(1.0),
            stops: [&args.stop[..], &stops].concat(),
        })
    }

    /// Returns the names and values of the file's settings that are not applied.
    pub(super) fn ignored(settings: &Value) -> Vec<String> {
        let has_effect = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Number(number) => number.as_f64().is_some_and(|number| number != 0.0 && number != 1.0),
            Value::Array(list) => !list.is_empty(),
            Value::Object(object) => !object.is_empty(),
            _ => true,
        };
        let found = UNREAD.into_iter().filter(|key| has_effect(&settings[key]));
        found.map(|key| format!("`{key}` {}", settings[key])).collect()
    }

    pub(super) fn sampler(&self, seed: u64) -> Result<TokenSampler> {
        TokenSampler::new(self.config, seed)
    }
}

/// Returns the settings without those that only sampling has.
fn without_sampling(settings: &Value) -> Value {
    let mut settings = settings.clone();
    if let Some(settings) = settings.as_object_mut() {
        ["temperature", "top_k", "top_p"].into_iter().for_each(|key| drop(settings.remove(key)));
    }
    settings
}

fn refuse<T>(settings: &Value, key: &str, expected: &str) -> std::result::Result<T, String> {
    Err(format!("`{key}`: expected {expected}, got {}", settings[key]))
}

impl fmt::Display for Sampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TokenSamplerConfig { temperature, top_k, top_p } = self.config;
        match temperature {
            0.0 => write!(f, "the likeliest tokens")?,
            _ => write!(f, "temperature {temperature}")?,
        }
        let is_sampled = temperature > 0.0;
        top_k.filter(|_| is_sampled).map_or(Ok(()), |top_k| write!(f, ", top-k {top_k}"))?;
        top_p.filter(|_| is_sampled).map_or(Ok(()), |top_p| write!(f, ", top-p {top_p}"))?;
        match self.repetition_penalty {
            1.0 => Ok(()),
            penalty => write!(f, ", repetition penalty {penalty}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use serde_json::json;

    fn shown(options: &str, settings: Value) -> String {
        let args = format!("generate --weights DIR --prompt x {options}");
        match Sampling::of(&Args::parse_from(args.split_whitespace()), &settings) {
            Ok(sampling) => format!("{sampling}; {:?}", sampling.stops),
            Err(reason) => reason,
        }
    }

    #[test]
    fn options_precede_the_models_settings() {
        let llama = json!({"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 1});
        let qwen =
            json!({"do_sample": true, "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8});
        let greedy = json!({"do_sample": false, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1});
        for (options, settings, want) in [
            ("", Value::Null, "temperature 0.8; []"),
            ("", llama.clone(), "temperature 0.6, top-k 50, top-p 0.9; []"),
            ("--temperature 0", llama.clone(), "the likeliest tokens; []"),
            ("--top-k 3 --top-p 0.5", llama, "temperature 0.6, top-k 3, top-p 0.5; []"),
            ("", qwen.clone(), "temperature 0.7, top-k 20, top-p 0.8, repetition penalty 1.05; []"),
            ("--repetition-penalty 1", qwen, "temperature 0.7, top-k 20, top-p 0.8; []"),
            ("", json!({"do_sample": true}), "temperature 1, top-k 50; []"),
            ("", json!({"do_sample": true, "top_k": 0, "top_p": 1.0}), "temperature 1; []"),
            ("", greedy.clone(), "the likeliest tokens, repetition penalty 1.1; []"),
            ("--temperature 1", greedy, "temperature 1, repetition penalty 1.1; []"),
            ("--stop END", json!({"stop_strings": ["a", "b"]}), "temperature 0.8; [\"END\", \"a\", \"b\"]"),
            ("", json!({"temperature": "hot"}), "`temperature`: expected a number from 0 to 1000000, got \"hot\""),
            ("", json!({"do_sample": 1}), "`do_sample`: expected true or false, got 1"),
            ("", json!({"top_k": -1}), "`top_k`: expected a whole number, got -1"),
            ("", json!({"stop_strings": [1]}), "`stop_strings`: expected a text or a list of texts, got [1]"),
        ] {
            assert_eq!(shown(options, settings.clone()), want, "{options} {settings}");
        }
    }

    #[test]
    fn settings_without_support_are_named() {
        let settings =
            json!({"min_p": 0.05, "num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": [[3]]});
        assert_eq!(Sampling::ignored(&settings), ["`bad_words_ids` [[3]]", "`min_p` 0.05"]);
        assert!(Sampling::ignored(&Value::Null).is_empty());
    }
}
