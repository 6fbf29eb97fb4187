//! The places of adapters in a model, and the tensors of PEFT's file.
//!
//! A module of the file may be a part of a layer (`q_proj` of `qkv_proj`), a whole layer, or
//! several layers (Phi-3's `gate_up_proj`). The layers of one module share its A. Each expert of a
//! mixture is a module, and all experts of a layer have the columns of one A and of one B:
//!
//! ```text
//! experts.3.up_proj.lora_A  [rank, width]    mlp.up.lora_a.weight  [width, experts * rank], expert 3's
//! experts.3.up_proj.lora_B  [hidden, rank]   mlp.up.lora_b.weight  [rank, experts * hidden], expert 3's
//! ```

use super::targets::{ends_with, matching};
use super::{Lora, Targets};
use crate::config::ModelConfig;
use crate::names::{self, FileTensor, OutputRange, TensorKind};
use std::collections::{BTreeMap, BTreeSet};
use stepscope_core::{Error, Result, ops};

/// The prefix of all names in PEFT's file.
pub(super) const PREFIX: &str = "base_model.model.";

/// The requirement that a tied model does not meet.
const UNTIED: &str = "modules that are not tied: PEFT would change the head and the token table as two matrices, so set \
                      `tie_word_embeddings` to false in config.json, and store the head";

/// The adapters of a model.
pub(crate) struct Plan {
    /// The layers that have adapters.
    pub(crate) layers: Vec<AdaptedLayer>,
    /// The matrices of experts that have adapters.
    pub(crate) experts: Vec<AdaptedExperts>,
    /// The parameters that are trained as a whole.
    pub(crate) trained: BTreeSet<String>,
    /// The tensors of PEFT's file that are trained.
    pub(crate) tensors: Vec<FileTensor>,
    /// The model's own weights in PEFT's file.
    pub(crate) base: Vec<FileTensor>,
    /// The name of a tied head in PEFT's file, which must equal the token table.
    pub(crate) tied_head: Option<String>,
    /// The adapters of the token table and of the head.
    pub(crate) tables: Vec<TableAdapter>,
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

/// The adapters of one matrix of each expert of a layer.
#[derive(Debug)]
pub(crate) struct AdaptedExperts {
    /// The matrix of all experts, such as `blocks.0.mlp.up`.
    pub(crate) layer: String,
    /// The inputs and outputs of an expert's matrix.
    pub(crate) extents: [usize; 2],
    /// The number of experts.
    pub(crate) experts: usize,
    pub(crate) rank: usize,
    pub(crate) scale: f32,
    /// The number of experts that have an adapter so far.
    adapted: usize,
}

/// The adapter of a table `[vocabulary, width]`, which is added to the table.
#[derive(Debug)]
pub(crate) struct TableAdapter {
    /// The table.
    pub(crate) parameter: String,
    module: String,
    rows: usize,
    columns: usize,
    /// True for the head. PEFT stores the factors of the token table transposed.
    is_head: bool,
    rank: usize,
    scale: f32,
}

impl TableAdapter {
    /// Returns the names and shapes of A and B in PEFT's file.
    pub(crate) fn tensors(&self) -> [(String, Vec<usize>); 2] {
        let Self { ref module, rows, columns, rank, .. } = *self;
        let name = |end: &str| format!("{PREFIX}{module}.{end}");
        match self.is_head {
            true => [(name("lora_A.weight"), vec![rank, columns]), (name("lora_B.weight"), vec![rows, rank])],
            false => [(name("lora_embedding_A"), vec![rank, rows]), (name("lora_embedding_B"), vec![columns, rank])],
        }
    }

    /// Adds the product of A and B to the table.
    pub(crate) fn add(&self, a: &[f32], b: &[f32], table: &mut [f32]) {
        let Self { rows, columns, rank, .. } = *self;
        // The element of rank r in row n of the table, and in column n.
        let by_row = |r: usize, row: usize| if self.is_head { b[row * rank + r] } else { a[r * rows + row] };
        let by_column =
            |r: usize, column: usize| if self.is_head { a[r * columns + column] } else { b[column * rank + r] };
        let mut sums = vec![0.0; columns];
        for (row, values) in table.chunks_exact_mut(columns).enumerate() {
            sums.fill(0.0);
            for r in 0..rank {
                let factor = by_row(r, row);
                sums.iter_mut().enumerate().for_each(|(column, sum)| *sum += factor * by_column(r, column));
            }
            values.iter_mut().zip(&sums).for_each(|(value, sum)| *value += self.scale * sum);
        }
    }
}

impl Plan {
    /// Adds a module with the parts of its A and B.
    fn add_module(
        &mut self,
        module: String,
        [inputs, outputs]: [usize; 2],
        rank: usize,
        a: Vec<OutputRange>,
        b: Vec<OutputRange>,
    ) {
        let lora = |name: &str, shape: [usize; 2], inputs, parts| FileTensor {
            name: format!("{PREFIX}{module}.{name}.weight"),
            shape: shape.into(),
            inputs,
            transposed: true,
            kind: TensorKind::Other,
            added: 0.0,
            parts,
        };
        self.tensors.extend([lora("lora_A", [rank, inputs], inputs, a), lora("lora_B", [outputs, rank], rank, b)]);
        self.modules.push(module);
    }

    /// Returns an error if the adapters include those of tables, which are not trained.
    pub(crate) fn check_trainable(&self) -> Result<()> {
        match self.tables.first() {
            None => Ok(()),
            Some(table) => refuse(
                "adapters of linear layers of blocks for training: merge the adapter of the table in PEFT, and train \
                 the table as a module to save",
                format!("an adapter of `{}`", table.module),
            ),
        }
    }
}

impl Lora {
    /// Checks that finetuning can train these adapters of a model.
    ///
    /// # Errors
    /// [`Error::Misuse`] for adapters of the token table or of the head.
    pub fn check_trainable(&self, config: &ModelConfig) -> Result<()> {
        self.plan(config)?.check_trainable()
    }

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
        let mut plan = Plan {
            layers: Vec::new(),
            experts: Vec::new(),
            trained: BTreeSet::new(),
            tensors: Vec::new(),
            base: Vec::new(),
            tied_head: None,
            tables: Vec::new(),
            modules: Vec::new(),
        };
        let mut layers: BTreeMap<String, usize> = BTreeMap::new();
        let head = names::head(config.family);
        for tensor in all.iter().filter(|tensor| tensor.shape.len() == 2) {
            if self.is_target(tensor.module(), tensor.kind == TensorKind::Linear)? {
                match tensor.kind {
                    TensorKind::Linear => self.add(&mut plan, &mut layers, tensor)?,
                    TensorKind::Other => self.add_table(&mut plan, tensor, config, tensor.name == head)?,
                    TensorKind::Expert => self.add_expert(&mut plan, tensor, &all)?,
                    TensorKind::Router => {
                        let expected = "adapters of other layers than a mixture's router: leave it out of the targets, or \
                                        train it as a module to save";
                        return refuse(expected, format!("one of `{}`", tensor.module()));
                    }
                }
            }
        }
        if let Some(some) = plan.experts.iter().find(|layer| layer.adapted < layer.experts) {
            let got = format!("{} of {} experts of `{}`", some.adapted, some.experts, some.layer);
            return refuse("adapters of all experts of a layer, or of none", got);
        }
        if config.tied && self.is_target(head.trim_end_matches(".weight"), false)? {
            return refuse(UNTIED, "an adapter of the head of a tied model");
        }
        self.add_saved(&mut plan, config, &all)?;
        self.add_base(&mut plan, config, &all)?;
        if plan.layers.is_empty() && plan.experts.is_empty() && plan.tables.is_empty() {
            let targets = match &self.targets {
                Targets::AllLinear => "all linear layers".into(),
                Targets::Names(names) => format!("`{}`", names.join("`, `")),
                Targets::Pattern(pattern) => format!("`{pattern}`"),
            };
            return refuse("targets that the model has", format!("{targets}, which match no module"));
        }
        Ok(plan)
    }

    /// Adds the adapter of the token table or of the head.
    fn add_table(&self, plan: &mut Plan, tensor: &FileTensor, config: &ModelConfig, is_head: bool) -> Result<()> {
        if !is_head && !tensor.is_token_table() {
            let expected = "adapters of linear layers, of the token table and of the head";
            return refuse(expected, format!("one of `{}`", tensor.module()));
        }
        if config.tied {
            return refuse(UNTIED, format!("an adapter of `{}` in a tied model", tensor.module()));
        }
        let (module, [rows, columns]) = (tensor.module().to_owned(), [tensor.shape[0], tensor.shape[1]]);
        let (rank, scale) = self.rank_and_scale(&module)?;
        let parameter = tensor.parts[0].parameter.clone();
        plan.modules.push(module.clone());
        plan.tables.push(TableAdapter { parameter, module, rows, columns, is_head, rank, scale });
        Ok(())
    }

    /// Returns the rank and the scale of a module's adapter.
    fn rank_and_scale(&self, module: &str) -> Result<(usize, f32)> {
        let rank = matching(&self.rank_pattern, module)?.unwrap_or(self.rank);
        Ok((rank, self.scale(rank, matching(&self.alpha_pattern, module)?.unwrap_or(self.alpha))))
    }

    /// Adds the model's own weights that stand in PEFT's file.
    fn add_base(&self, plan: &mut Plan, config: &ModelConfig, all: &[FileTensor]) -> Result<()> {
        for name in &self.base_weights {
            let full = format!("{PREFIX}{name}");
            match all.iter().find(|tensor| tensor.name == *name) {
                Some(tensor) => plan.base.push(FileTensor { name: full, ..tensor.clone() }),
                None if config.tied && name == names::head(config.family) => plan.tied_head = Some(full),
                None => return refuse("an adapter's file with weights of this model", format!("`{name}`")),
            }
        }
        Ok(())
    }

    /// Adds the adapter of a module.
    fn add(&self, plan: &mut Plan, layers: &mut BTreeMap<String, usize>, tensor: &FileTensor) -> Result<()> {
        let (module, inputs) = (tensor.module().to_owned(), tensor.inputs);
        let (rank, scale) = self.rank_and_scale(&module)?;
        let end = module.rsplit('.').next().unwrap_or(&module).to_owned();
        let layer_of =
            |part: &OutputRange| part.parameter.strip_suffix(".weight").unwrap_or(&part.parameter).to_owned();
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
            let inside: Vec<&OutputRange> = tensor.parts.iter().filter(|part| layer_of(part) == layer).collect();
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
            a.get_or_insert(OutputRange { parameter: adapted.a.clone(), first: column, outputs: rank });
            let parameter = format!("{layer}.lora_b.{end}.weight");
            let of_part = |part: &&OutputRange| OutputRange {
                parameter: parameter.clone(),
                first: part.first - first,
                ..(*part).clone()
            };
            of_b.extend(inside.iter().map(of_part));
        }
        plan.add_module(module, [inputs, tensor.outputs()], rank, a.into_iter().collect(), of_b);
        Ok(())
    }

    /// Adds the adapter of an expert's matrix.
    fn add_expert(&self, plan: &mut Plan, tensor: &FileTensor, all: &[FileTensor]) -> Result<()> {
        let (module, inputs) = (tensor.module().to_owned(), tensor.inputs);
        let (rank, scale) = self.rank_and_scale(&module)?;
        let OutputRange { parameter, first, outputs } = &tensor.parts[0];
        let layer = parameter.strip_suffix(".weight").unwrap_or(parameter).to_owned();
        let place = plan.experts.iter().position(|other| other.layer == layer).unwrap_or_else(|| {
            let experts = all.iter().filter(|tensor| tensor.parts[0].parameter == *parameter).count();
            let (layer, extents) = (layer.clone(), [inputs, *outputs]);
            plan.experts.push(AdaptedExperts { layer, extents, experts, rank, scale, adapted: 0 });
            plan.experts.len() - 1
        });
        let adapted = &mut plan.experts[place];
        if (adapted.rank, adapted.scale) != (rank, scale) {
            let got =
                format!("rank {rank} and factor {scale} of `{module}`, but {} and {}", adapted.rank, adapted.scale);
            return refuse("one rank and one alpha for all experts of a layer", format!("{got} of another expert"));
        }
        adapted.adapted += 1;
        let expert = first / outputs;
        let a = OutputRange { parameter: format!("{layer}.lora_a.weight"), first: expert * rank, outputs: rank };
        let b = OutputRange { parameter: format!("{layer}.lora_b.weight"), first: *first, outputs: *outputs };
        plan.add_module(module, [inputs, *outputs], rank, vec![a], vec![b]);
        Ok(())
    }

    /// Adds the modules that are trained as a whole.
    fn add_saved(&self, plan: &mut Plan, config: &ModelConfig, all: &[FileTensor]) -> Result<()> {
        for name in &self.modules_to_save {
            let head = names::head(config.family);
            let is_table = |module: &str| ends_with(module, name) && module.starts_with(table_of(all));
            if config.tied && (ends_with(head.trim_end_matches(".weight"), name) || is_table(table_of(all))) {
                return refuse(UNTIED, format!("`{name}` of a tied model"));
            }
            let saved: Vec<&FileTensor> = all.iter().filter(|tensor| ends_with(tensor.module(), name)).collect();
            if saved.is_empty() {
                return refuse(
                    "modules to save that the model has",
                    format!("`{name}`, which ends the name of no module"),
                );
            }
            for tensor in saved {
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

fn refuse<T>(expected: impl Into<String>, got: impl Into<String>) -> Result<T> {
    Err(Error::misuse("lora", expected.into(), got.into()))
}
