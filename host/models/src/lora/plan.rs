//! The places of adapters in a model, and the tensors of PEFT's file.
//!
//! A module of the file may be a part of a layer (`q_proj` of `qkv_proj`), a whole layer, or
//! several layers (Phi-3's `gate_up_proj`). The layers of one module share its A.

use super::{Lora, Targets};
use crate::config::ModelConfig;
use crate::names::{self, FileTensor, Part};
use std::collections::{BTreeMap, BTreeSet};
use stepscope_core::{Error, Result, ops};

/// The prefix of all names in PEFT's file.
const PREFIX: &str = "base_model.model.";

/// The adapters of a model.
pub(crate) struct Plan {
    /// The layers that have adapters.
    pub(crate) layers: Vec<AdaptedLayer>,
    /// The parameters that are trained as a whole.
    pub(crate) trained: BTreeSet<String>,
    /// The tensors of PEFT's file.
    pub(crate) tensors: Vec<FileTensor>,
    /// The modules that have adapters, by their names in the model's file.
    pub(crate) modules: Vec<String>,
}

/// The adapter of a layer.
#[derive(Debug)]
pub(crate) struct AdaptedLayer {
    /// The layer, such as `blocks.0.attention.qkv_proj`.
    pub(crate) layer: String,
    /// The name of A.
    pub(crate) a: String,
    /// The inputs of the layer.
    pub(crate) inputs: usize,
    pub(crate) parts: Vec<PlannedPart>,
}

/// A part of a layer's adapter.
#[derive(Debug)]
pub(crate) struct PlannedPart {
    /// The module's name after the last dot, such as `q_proj`.
    pub(crate) name: String,
    pub(crate) first: usize,
    pub(crate) outputs: usize,
    pub(crate) rank: usize,
    pub(crate) scale: f32,
}

impl Lora {
    /// Returns the names of the modules of a model that have adapters.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a target that names no linear layer of the model.
    pub fn modules(&self, config: &ModelConfig) -> Result<Vec<String>> {
        Ok(self.plan(config)?.modules)
    }

    /// Plans the adapters of a model.
    pub(crate) fn plan(&self, config: &ModelConfig) -> Result<Plan> {
        let all = names::tensors(config);
        let targeted = self.targeted(&all)?;
        let mut plan = Plan { layers: Vec::new(), trained: BTreeSet::new(), tensors: Vec::new(), modules: Vec::new() };
        let mut layers: BTreeMap<String, usize> = BTreeMap::new();
        for tensor in targeted {
            self.add(&mut plan, &mut layers, tensor);
        }
        self.add_saved(&mut plan, config, &all)?;
        if plan.layers.is_empty() {
            return refuse("at least one target", "no module");
        }
        Ok(plan)
    }

    /// Returns the weights of the targeted modules.
    fn targeted<'t>(&self, all: &'t [FileTensor]) -> Result<Vec<&'t FileTensor>> {
        let is_excluded = |tensor: &FileTensor| self.excluded.iter().any(|name| ends_with(tensor.module(), name));
        let Targets::Names(targets) = &self.targets else {
            return Ok(all.iter().filter(|tensor| tensor.linear && !is_excluded(tensor)).collect());
        };
        for target in targets {
            let mut named = all.iter().filter(|tensor| ends_with(tensor.module(), target)).peekable();
            if named.peek().is_none() {
                return refuse("targets that the model has", format!("`{target}`, which ends the name of no module"));
            }
            if let Some(other) = named.find(|tensor| !tensor.linear && tensor.name.ends_with(".weight")) {
                let expected =
                    "targets that are linear layers of blocks: train tables, norms and the head as modules to save";
                return refuse(expected, format!("`{target}`, which is the end of `{}`", other.module()));
            }
        }
        let is_target = |tensor: &&FileTensor| targets.iter().any(|target| ends_with(tensor.module(), target));
        Ok(all.iter().filter(|tensor| tensor.linear).filter(is_target).filter(|tensor| !is_excluded(tensor)).collect())
    }

    /// Adds the adapter of a module.
    fn add(&self, plan: &mut Plan, layers: &mut BTreeMap<String, usize>, tensor: &FileTensor) {
        let (module, inputs) = (tensor.module().to_owned(), tensor.inputs);
        let rank = matching(&self.rank_pattern, &module).unwrap_or(self.rank);
        let scale = self.scale(rank, matching(&self.alpha_pattern, &module).unwrap_or(self.alpha));
        let end = module.rsplit('.').next().unwrap_or(&module).to_owned();
        let layer_of = |part: &Part| part.parameter.strip_suffix(".weight").unwrap_or(&part.parameter).to_owned();
        let mut of_module: Vec<String> = Vec::new();
        for part in &tensor.parts {
            let layer = layer_of(part);
            if !of_module.contains(&layer) {
                of_module.push(layer);
            }
        }
        let shared = (of_module.len() > 1).then(|| {
            let scope = of_module[0].rsplit_once('.').map_or("", |(scope, _)| scope);
            format!("{scope}.{end}.lora_a.weight")
        });
        let (mut a, mut of_b) = (None, Vec::new());
        for layer in of_module {
            let inside: Vec<&Part> = tensor.parts.iter().filter(|part| layer_of(part) == layer).collect();
            // A module that is dealt out over its layer covers all of it.
            let first = inside.iter().map(|part| part.first).min().unwrap_or(0);
            let outputs = inside.iter().map(|part| part.outputs).sum();
            let name = shared.clone().unwrap_or_else(|| format!("{layer}.lora_a.weight"));
            let place = *layers.entry(layer.clone()).or_insert_with(|| {
                plan.layers.push(AdaptedLayer { layer: layer.clone(), a: name, inputs, parts: Vec::new() });
                plan.layers.len() - 1
            });
            let adapted = &mut plan.layers[place];
            adapted.parts.push(PlannedPart { name: end.clone(), first, outputs, rank, scale });
            let (columns, _) = ops::LowRankPart::columns(adapted.parts.iter().map(|part| part.rank));
            let column = columns[columns.len() - 1];
            a.get_or_insert(Part { parameter: adapted.a.clone(), first: column, outputs: rank });
            let parameter = format!("{layer}.lora_b.{end}.weight");
            let of_part =
                |part: &&Part| Part { parameter: parameter.clone(), first: part.first - first, ..(*part).clone() };
            of_b.extend(inside.iter().map(of_part));
        }
        let outputs = tensor.outputs();
        let lora = |name: &str, shape: [usize; 2], inputs, parts| FileTensor {
            name: format!("{PREFIX}{module}.{name}.weight"),
            shape: shape.into(),
            inputs,
            transposed: true,
            linear: false,
            added: 0.0,
            parts,
        };
        plan.tensors.push(lora("lora_A", [rank, inputs], inputs, a.into_iter().collect()));
        plan.tensors.push(lora("lora_B", [outputs, rank], rank, of_b));
        plan.modules.push(module);
    }

    /// Adds the modules that are trained as a whole.
    fn add_saved(&self, plan: &mut Plan, config: &ModelConfig, all: &[FileTensor]) -> Result<()> {
        for name in &self.modules_to_save {
            let head = names::head(config.family);
            let is_table = |module: &str| ends_with(module, name) && module.starts_with(table_of(all));
            if config.tied && (ends_with(head.trim_end_matches(".weight"), name) || is_table(table_of(all))) {
                let expected = "modules to save that are not tied: PEFT would train the head and the token table as two \
                                matrices, so set `tie_word_embeddings` to false in config.json, and store the head";
                return refuse(expected, format!("`{name}` of a tied model"));
            }
            let saved: Vec<&FileTensor> = all.iter().filter(|tensor| ends_with(tensor.module(), name)).collect();
            if saved.is_empty() {
                return refuse(
                    "modules to save that the model has",
                    format!("`{name}`, which ends the name of no module"),
                );
            }
            for tensor in saved {
                if plan.modules.iter().any(|module| module == tensor.module()) {
                    return refuse(
                        "modules to save without adapters",
                        format!("`{}`, which is a target", tensor.module()),
                    );
                }
                plan.trained.extend(tensor.parts.iter().map(|part| part.parameter.clone()));
                plan.tensors.push(FileTensor { name: format!("{PREFIX}{}", tensor.name), ..tensor.clone() });
            }
        }
        // A parameter that holds several modules is trained or frozen as a whole.
        let is_saved = |tensor: &FileTensor| self.modules_to_save.iter().any(|name| ends_with(tensor.module(), name));
        for tensor in all.iter().filter(|tensor| !is_saved(tensor)) {
            if let Some(part) = tensor.parts.iter().find(|part| plan.trained.contains(&part.parameter)) {
                let expected =
                    format!("`{}` among the modules to save, because one matrix holds both", tensor.module());
                return refuse(expected, format!("only some modules of `{}`", part.parameter));
            }
        }
        plan.tensors.sort_by(|one, other| one.name.cmp(&other.name));
        plan.tensors.dedup_by(|one, other| one.name == other.name);
        Ok(())
    }
}

/// Returns the name of the token table's module.
fn table_of(all: &[FileTensor]) -> &str {
    all.first().map_or("", FileTensor::module)
}

/// Returns true if a module's name is `end`, or ends with it after a dot.
fn ends_with(module: &str, end: &str) -> bool {
    module.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Returns the value of the first name that ends a module's name.
fn matching<T: Copy>(pattern: &[(String, T)], module: &str) -> Option<T> {
    pattern.iter().find(|(end, _)| ends_with(module, end)).map(|(_, value)| *value)
}

fn refuse<T>(expected: impl Into<String>, got: impl Into<String>) -> Result<T> {
    Err(Error::misuse("lora", expected.into(), got.into()))
}
