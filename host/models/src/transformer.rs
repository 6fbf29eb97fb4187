//! The layers of a [`ModelConfig`].
//!
//! Invariant: every parameter's name is one that the crate's map of file tensors knows, so that
//! each model can be read and written.

mod balance;
mod cached;

use crate::config::{FeedForwardKind, LayerConfig, MixtureConfig, ModelConfig, NormKind, QkNormKind, Residual};
use crate::lora::{AdaptedExperts, AdaptedLayer, Lora, PlannedPart};
use crate::names;
use crate::weights::{self, LowRankProduct};
use cuda_std::float_mode;
use stepscope_core::ops::{self, Activation, AttentionConfig};
use stepscope_core::{
    Error, FrozenType, Indices, Initializer, Parameter, ParameterEntry, ParameterSpec, ParameterSpecBuilder,
    Parameters, Result, Saved, Tape, Var,
};
use stepscope_train::nn::{
    AdapterPart, Embedding, ExpertAdapter, ExpertLinear, LayerNorm, Linear, Mixture, Mlp, MultiHeadAttention, Norm,
    RmsNorm, Scope, SwiGlu,
};

/// A decoder-only transformer: token table, blocks, a norm, and a head over the vocabulary.
///
/// A clone is a few handles.
#[derive(Clone, Debug)]
pub struct Transformer {
    config: ModelConfig,
    tokens: Embedding,
    positions: Option<Embedding>,
    blocks: Vec<Block>,
    norm: Norm,
    head: Parameter,
    recompute: bool,
    /// The number of blocks before the first one with a trained parameter.
    frozen_blocks: usize,
}

/// A block, as handles of parameters.
#[derive(Clone, Debug)]
struct Block {
    norms: Vec<Norm>,
    attention: MultiHeadAttention,
    feed_forward: FeedForward,
    residual: Residual,
}

#[derive(Clone, Copy, Debug)]
enum FeedForward {
    Gelu(Mlp),
    GeluExact(Mlp),
    ReluSquared(Mlp),
    SwiGlu(SwiGlu),
    GeGlu(SwiGlu),
    Mixture(Mixture),
}

impl Transformer {
    /// Builds the layers and the spec of their parameters, initialized as GPT-2. Matrices have a
    /// standard deviation of 0.02. Matrices before a residual connection have a smaller one, which
    /// falls with the number of layers.
    ///
    /// # Errors
    /// Never, since names are unique.
    pub fn new(config: ModelConfig) -> Result<(Self, ParameterSpec)> {
        Self::build(config, |_, _| Ok(()))
    }

    /// Builds the layers like [`Transformer::new`], and freezes the parameters for which `freeze`
    /// returns a type; see [`ParameterSpecBuilder::freeze`]. Frozen matrices are zero until weights
    /// are loaded, for example by [`Weights::load`](crate::Weights::load).
    ///
    /// # Errors
    /// [`Error::Misuse`] for a matrix that cannot be frozen in NF4. Its extents must be multiples
    /// of 8, and the file must have its outputs in one piece, unlike Phi-3's `gate_up_proj` and
    /// GPT-NeoX' `query_key_value`.
    pub fn frozen(
        config: ModelConfig,
        freeze: impl Fn(&ParameterEntry) -> Option<FrozenType>,
    ) -> Result<(Self, ParameterSpec)> {
        Self::build(config, |_, spec| {
            spec.freeze(freeze);
            Ok(())
        })
    }

    /// Builds the layers with the adapters of `lora`. All other parameters are frozen in the types
    /// that `stored` returns, except those of [`Lora::modules_to_save`], which are trained.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a target that names no linear layer of the model, for modules to save
    /// that cannot be trained separately, and like [`Transformer::frozen`].
    pub fn with_lora(
        config: ModelConfig,
        lora: &Lora,
        stored: impl Fn(&ParameterEntry) -> FrozenType,
    ) -> Result<(Self, ParameterSpec)> {
        let plan = lora.plan(&config)?;
        Self::build(config, |model, spec| {
            spec.freeze(|entry| (!plan.trained.contains(entry.name())).then(|| stored(entry)));
            plan.layers.iter().try_for_each(|layer| model.adapt(spec, layer, lora.dropout))?;
            plan.experts.iter().try_for_each(|layer| model.adapt_experts(spec, layer, lora.dropout))
        })
    }

    fn build(
        config: ModelConfig,
        finish: impl FnOnce(&mut Self, &mut ParameterSpecBuilder) -> Result<()>,
    ) -> Result<(Self, ParameterSpec)> {
        let mut spec = ParameterSpec::builder();
        let (vocabulary, width) = (config.vocabulary, config.width);
        let tokens = Embedding::new(spec.at("tokens"), vocabulary, width, 0.02);
        let positions = config.learned_positions.map(|rows| Embedding::new(spec.at("positions"), rows, width, 0.02));
        let blocks = config.layers.iter().enumerate();
        let blocks =
            blocks.map(|(number, layer)| Block::new(spec.at(format!("blocks.{number}")), &config, layer)).collect();
        let norm = norm(spec.at("norm"), &config);
        let head = match config.tied {
            true => tokens.weight,
            false => Embedding::new(spec.at("head"), vocabulary, width, 0.02).weight,
        };
        let layers = config.layers.len();
        spec.initialize(|entry| {
            let before_residual = ["o_proj.weight", "down.weight", "down_proj.weight"];
            let share = if before_residual.iter().any(|end| entry.name().ends_with(end)) { 2 * layers } else { 1 };
            let deviation = float_mode::in_default(|| 0.02 / (share as f32).sqrt());
            (entry.shape().extents().len() == 2).then_some(Initializer::Normal { deviation })
        });
        let mut model = Self { config, tokens, positions, blocks, norm, head, recompute: false, frozen_blocks: layers };
        finish(&mut model, &mut spec)?;
        spec.initialize(|entry| {
            (entry.frozen().is_some() && entry.shape().extents().len() == 2).then_some(Initializer::ZERO)
        });
        let tensors = names::tensors(&model.config);
        let matrices = names::matrices(&tensors);
        spec.matrices(|entry| matrices.get(entry.name()).cloned().flatten());
        let spec = spec.build()?;
        let trained = spec.iter().filter(|(_, entry)| entry.frozen().is_none());
        let blocks = trained.filter_map(|(_, entry)| block_of(entry.name()));
        model.frozen_blocks = blocks.map(|(number, _)| number).min().unwrap_or(layers);
        for entry in spec.frozen(FrozenType::Nf4) {
            if matrices.get(entry.name()).is_none_or(Option::is_none) {
                let got = format!("`{}` of {:?}", entry.name(), model.config.family);
                return Err(Error::misuse("freeze", "in NF4, matrices that are whole tensors of the file", got));
            }
        }
        Ok((model, spec))
    }

    /// Adds the adapter of a layer.
    fn adapt(&mut self, spec: &mut ParameterSpecBuilder, layer: &AdaptedLayer, dropout: f32) -> Result<()> {
        let names = |part: &PlannedPart| part.name.clone();
        let parts: Vec<AdapterPart<'_>> = layer
            .parts
            .iter()
            .map(|part| AdapterPart {
                name: &part.name,
                first: part.first,
                outputs: part.outputs,
                rank: part.rank,
                scale: part.scale,
            })
            .collect();
        let Some(linear) = self.linear_mut(&layer.layer) else {
            let got = format!("{} of {}", layer.parts.iter().map(names).collect::<Vec<_>>().join(", "), layer.layer);
            return Err(Error::misuse("lora", "targets that are linear layers of the model's blocks", got));
        };
        let scope = |spec: &mut ParameterSpecBuilder| -> Parameter {
            let (_, columns) = ops::LowRankPart::columns(layer.parts.iter().map(|part| part.rank));
            let a = layer.a.strip_suffix(".weight").expect("a name that ends so");
            spec.at(a).add("weight", [layer.inputs, columns], Initializer::fan_in(layer.inputs))
        };
        let a = match spec.parameter(&layer.a) {
            Some(shared) => shared,
            None => scope(spec),
        };
        *linear = linear.with_shared_adapter(spec.at(&layer.layer), a, &parts, dropout)?;
        Ok(())
    }

    /// Returns a linear layer of a block by the name of its parameters, such as
    /// `blocks.0.attention.o_proj`.
    fn linear_mut(&mut self, layer: &str) -> Option<&mut Linear> {
        let (number, name) = block_of(layer)?;
        let block = self.blocks.get_mut(number)?;
        match (name, &mut block.feed_forward) {
            ("attention.qkv_proj", _) => Some(&mut block.attention.qkv),
            ("attention.o_proj", _) => Some(&mut block.attention.output),
            ("mlp.up", FeedForward::Gelu(mlp) | FeedForward::GeluExact(mlp) | FeedForward::ReluSquared(mlp)) => {
                Some(&mut mlp.up)
            }
            ("mlp.down", FeedForward::Gelu(mlp) | FeedForward::GeluExact(mlp) | FeedForward::ReluSquared(mlp)) => {
                Some(&mut mlp.down)
            }
            ("mlp.gate_proj", FeedForward::SwiGlu(gated) | FeedForward::GeGlu(gated)) => Some(&mut gated.gate),
            ("mlp.up_proj", FeedForward::SwiGlu(gated) | FeedForward::GeGlu(gated)) => Some(&mut gated.up),
            ("mlp.down_proj", FeedForward::SwiGlu(gated) | FeedForward::GeGlu(gated)) => Some(&mut gated.down),
            _ => None,
        }
    }

    /// Adds the adapters of a matrix of experts.
    fn adapt_experts(&mut self, spec: &mut ParameterSpecBuilder, layer: &AdaptedExperts, dropout: f32) -> Result<()> {
        let AdaptedExperts { layer, extents, experts, rank, scale, .. } = layer;
        let Some(linear) = self.experts_mut(layer) else {
            return Err(Error::misuse("lora", "targets that are matrices of experts", layer));
        };
        *linear = linear.with_adapter(spec.at(layer), *extents, *experts, (*rank, *scale), dropout);
        Ok(())
    }

    /// Returns a matrix of experts by the name of its parameters, such as `blocks.0.mlp.up`.
    fn experts_mut(&mut self, layer: &str) -> Option<&mut ExpertLinear> {
        let (number, name) = block_of(layer)?;
        let FeedForward::Mixture(mixture) = &mut self.blocks.get_mut(number)?.feed_forward else { return None };
        match name {
            "mlp.gate" => mixture.gate.as_mut(),
            "mlp.up" => Some(&mut mixture.up),
            "mlp.down" => Some(&mut mixture.down),
            _ => None,
        }
    }

    /// Returns what the adapters of a weight, such as `blocks.0.attention.o_proj.weight`, add to
    /// it.
    ///
    /// # Errors
    /// [`Error::Misuse`] for the spec of another model.
    pub(crate) fn low_rank_products(&self, weight: &str, spec: &ParameterSpec) -> Result<Vec<LowRankProduct>> {
        let Some(layer) = weight.strip_suffix(".weight") else { return Ok(Vec::new()) };
        let extents = |parameter| Ok::<_, Error>(spec.entry(parameter)?.shape().as_rows());
        // The same search as for writing, in a copy, which is a few handles.
        let mut model = self.clone();
        let mut products = Vec::new();
        if let Some(adapter) = model.linear_mut(layer).and_then(|linear| linear.adapter) {
            let mut end = 0usize;
            for part in adapter.low_rank.parts.into_iter().flatten() {
                let [rank, outputs] = extents(part.b)?;
                let a = (adapter.low_rank.a, end.next_multiple_of(ops::LOW_RANK_UNIT));
                end = a.1 + rank;
                products.push(LowRankProduct {
                    a,
                    b: (part.b, 0),
                    rank,
                    outputs,
                    first: part.first,
                    scale: part.scale,
                });
            }
        }
        if let Some(ExpertAdapter { low_rank, .. }) = model.experts_mut(layer).and_then(|linear| linear.adapter) {
            let ([rank, all], [_, ranks]) = (extents(low_rank.b)?, extents(low_rank.a)?);
            let outputs = all * rank / ranks.max(1);
            products.extend((0..ranks / rank.max(1)).map(|expert| {
                let first = expert * outputs;
                let (a, b) = ((low_rank.a, expert * rank), (low_rank.b, first));
                LowRankProduct { a, b, rank, outputs, first, scale: low_rank.scale }
            }));
        }
        Ok(products)
    }

    /// Adds each adapter to the weights of its layer, and removes the adapters from the layers. The
    /// sums are computed in f32, and rounded to the type in which the weights are stored.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn merge(mut self, parameters: &mut Parameters) -> Result<Self> {
        let spec = parameters.spec().clone();
        for (parameter, entry) in spec.iter() {
            let products = self.low_rank_products(entry.name(), &spec)?;
            if !products.is_empty() {
                let mut values = parameters.read(parameter)?;
                float_mode::in_default(|| weights::merge(&mut values, entry.shape(), &products, parameters))?;
                parameters.write(parameter, &values)?;
            }
            let layer = entry.name().strip_suffix(".weight").unwrap_or_default();
            self.linear_mut(layer).into_iter().for_each(|linear| linear.adapter = None);
            self.experts_mut(layer).into_iter().for_each(|linear| linear.adapter = None);
        }
        Ok(self)
    }

    /// Makes each block keep only its input, and compute the rest again in the backward pass.
    #[must_use]
    pub fn recompute(self, recompute: bool) -> Self {
        Self { recompute, ..self }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the head, `[vocabulary, width]`.
    pub fn head(&self) -> Parameter {
        self.head
    }

    /// Computes the input of the head, `[samples, tokens, width]`, for `ids`: `[samples, tokens]`.
    /// If there are `documents`, of the same shape, tokens attend only to their own document.
    ///
    /// # Errors
    /// Returns an error if an op fails, for example because the arena is full.
    #[track_caller]
    pub fn forward<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        ids: Indices<'s>,
        documents: Option<Saved<'s, u32>>,
    ) -> Result<Var<'s, S>> {
        self.scored(tape, ids, documents, None)
    }

    /// Computes [`Transformer::forward`] and the routers' auxiliary loss, times its factor
    /// ([`ModelConfig::router_loss`]). There is no such loss if the model has no factor or no
    /// mixture. `real`: 1 for each token and 0 for padding, in the shape of the ids.
    ///
    /// # Errors
    /// Returns an error if an op fails, for example because the arena is full.
    #[track_caller]
    pub fn forward_balanced<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        ids: Indices<'s>,
        documents: Option<Saved<'s, u32>>,
        real: Option<Saved<'s>>,
    ) -> Result<(Var<'s, S>, Option<Var<'s>>)> {
        let mixture = self.config.layers.iter().find_map(|layer| layer.mixture);
        let (Some(factor), Some(MixtureConfig { chosen, .. })) = (self.config.router_loss, mixture) else {
            return Ok((self.forward(tape, ids, documents)?, None));
        };
        let mut scores = Vec::new();
        let hidden = self.scored(tape, ids, documents, Some(&mut scores))?;
        let loss = balance::loss(tape, &scores, chosen, real)?;
        Ok((hidden, loss.map(|loss| loss.mul(factor)).transpose()?))
    }

    /// Computes the input of the head, and adds the scores of each mixture to `scores`.
    #[track_caller]
    fn scored<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        ids: Indices<'s>,
        documents: Option<Saved<'s, u32>>,
        mut scores: Option<&mut Vec<Var<'s, S>>>,
    ) -> Result<Var<'s, S>> {
        let mut x = self.tokens.forward(tape, ids)?;
        if let Some(scale) = self.config.embedding_scale {
            x = x.mul(scale)?;
        }
        if let Some(positions) = &self.positions {
            x = positions.add_positions(tape, &x)?;
        }
        // Blocks without a backward pass keep nothing, so a scope frees their memory. Only the
        // scores of a block leave it.
        let unrecorded = match (tape.is_evaluating(), x.wants_gradient()) {
            _ if scores.is_some() => 0,
            (true, _) => self.blocks.len(),
            (false, true) => 0,
            (false, false) => self.frozen_blocks,
        };
        let (unrecorded, recorded) = self.blocks.split_at(unrecorded);
        if !unrecorded.is_empty() {
            let blocks = unrecorded.to_vec();
            x = tape.recompute((x, documents), move |tape, (x, documents)| {
                blocks.iter().try_fold(x, |x, block| block.recomputed(tape, x, documents))
            })?;
        }
        for block in recorded {
            let mut own = None;
            x = match (self.recompute, &scores, block.feed_forward) {
                (true, Some(_), FeedForward::Mixture(_)) => {
                    let [y, of_block] = block.recomputed_scored(tape, x, documents)?;
                    own = Some(of_block);
                    y
                }
                (true, ..) => block.recomputed(tape, x, documents)?,
                (false, ..) => block.forward(tape, &x, documents, &mut own)?,
            };
            if let (Some(scores), Some(own)) = (&mut scores, own) {
                scores.push(own);
            }
        }
        self.norm.forward(tape, &x)
    }
}

impl Block {
    fn new(mut names: Scope<'_>, config: &ModelConfig, layer: &LayerConfig) -> Self {
        let (width, head) = (config.width, config.head_width);
        let count = if config.residual == Residual::Sandwich { 4 } else { 2 };
        let (early, late) = if count == 4 { (2, 4) } else { (1, 2) };
        let mut norms: Vec<Norm> = (1..=early).map(|number| norm(names.at(format!("norm{number}")), config)).collect();
        let mut scope = names.at("attention");
        let qkv = linear(scope.at("qkv_proj"), width, config.qkv_columns(), config.qkv_bias);
        let output = linear(scope.at("o_proj"), config.heads.saturating_mul(head), width, config.output_bias);
        let (heads, rotary, sees) = ([config.heads, config.kv_heads], layer.rotary, layer.mask);
        let mut attention =
            MultiHeadAttention { qkv, output, qk_norm: None, rotary, heads, sees, scale: config.score_scale };
        attention = match config.qk_norm {
            Some(QkNormKind::Heads) => attention.qk_norm(scope, head, config.epsilon),
            Some(QkNormKind::Projections) => attention.qk_norm_of_projections(scope, head, config.epsilon),
            None => attention,
        };
        norms.extend((early + 1..=late).map(|number| norm(names.at(format!("norm{number}")), config)));
        let feed_forward = FeedForward::new(names.at("mlp"), config, layer);
        Self { norms, attention, feed_forward, residual: config.residual }
    }

    /// Computes the block in a scope that frees everything but the result.
    #[track_caller]
    fn recomputed<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: Var<'s, S>,
        documents: Option<Saved<'s, u32>>,
    ) -> Result<Var<'s, S>> {
        let block = self.clone();
        tape.recompute((x, documents), move |tape, (x, documents)| block.forward(tape, &x, documents, &mut None))
    }

    /// Computes the block of a mixture like [`Block::recomputed`], and its scores.
    #[track_caller]
    fn recomputed_scored<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: Var<'s, S>,
        documents: Option<Saved<'s, u32>>,
    ) -> Result<[Var<'s, S>; 2]> {
        let block = self.clone();
        tape.recompute_all((x, documents), move |tape, (x, documents)| {
            let mut scores = None;
            let y = block.forward(tape, &x, documents, &mut scores)?;
            Ok([y, scores.expect("a mixture has scores")])
        })
    }

    /// Computes the block. A mixture sets `scores`.
    #[track_caller]
    fn forward<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        documents: Option<Saved<'s, u32>>,
        scores: &mut Option<Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        let heads: AttentionConfig<'s> = self.attention.config();
        let heads = &documents.map_or(heads, |documents| heads.documents(documents));
        let attend = |x: &Var<'s, S>, residual: Option<&Var<'s, S>>| match residual {
            Some(residual) => self.attention.forward_residual_masked(tape, x, residual, heads),
            None => self.attention.forward_masked(tape, x, heads),
        };
        self.forward_by(tape, x, attend, scores)
    }

    /// Computes the block with this attention of a value, to which it adds the residual if there is
    /// one.
    #[track_caller]
    fn forward_by<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        attend: impl FnOnce(&Var<'s, S>, Option<&Var<'s, S>>) -> Result<Var<'s, S>>,
        scores: &mut Option<Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        let first = || self.norms[0].forward(tape, x);
        match self.residual {
            Residual::PreNorm => {
                let h = attend(&first()?, Some(x))?;
                self.feed_forward.forward_residual(tape, &self.norms[1].forward(tape, &h)?, &h, scores)
            }
            Residual::Parallel => {
                let h = attend(&first()?, Some(x))?;
                self.feed_forward.forward_residual(tape, &self.norms[1].forward(tape, x)?, &h, scores)
            }
            Residual::PostNorm => self.after_attention(tape, x, &attend(x, None)?, scores),
            Residual::Sandwich => {
                let mixed = attend(&first()?, None)?;
                self.after_attention(tape, x, &mixed, scores)
            }
        }
    }

    /// Computes the rest of a block with a norm after each part, and perhaps also before it.
    #[track_caller]
    fn after_attention<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        mixed: &Var<'s, S>,
        scores: &mut Option<Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        if self.residual == Residual::PostNorm {
            let h = self.norms[0].forward(tape, mixed)?.add(x)?;
            let y = self.feed_forward.forward(tape, &h, scores)?;
            return self.norms[1].forward(tape, &y)?.add(h);
        }
        let mixed = self.norms[1].forward(tape, mixed)?;
        let [h, normed] = self.norms[2].forward_residual(tape, &mixed, x)?;
        let y = self.feed_forward.forward(tape, &normed, scores)?;
        self.norms[3].forward(tape, &y)?.add(h)
    }
}

impl FeedForward {
    fn new(mut names: Scope<'_>, config: &ModelConfig, layer: &LayerConfig) -> Self {
        let (width, hidden, bias) = (config.width, config.hidden, config.feed_forward_bias);
        if let Some(MixtureConfig { experts, chosen, hidden, normalized }) = layer.mixture {
            let mixture = Mixture::gated(names, [width, hidden], experts, chosen);
            return Self::Mixture(Mixture { normalized, ..mixture });
        }
        match config.feed_forward {
            FeedForwardKind::Gelu | FeedForwardKind::GeluExact | FeedForwardKind::ReluSquared => {
                let up = linear(names.at("up"), width, hidden, bias);
                let mlp = Mlp { up, down: linear(names.at("down"), hidden, width, bias) };
                match config.feed_forward {
                    FeedForwardKind::Gelu => Self::Gelu(mlp),
                    FeedForwardKind::GeluExact => Self::GeluExact(mlp),
                    _ => Self::ReluSquared(mlp),
                }
            }
            FeedForwardKind::SwiGlu | FeedForwardKind::GeGlu => {
                let gate = linear(names.at("gate_proj"), width, hidden, bias);
                let up = linear(names.at("up_proj"), width, hidden, bias);
                let gated = SwiGlu { gate, up, down: linear(names.at("down_proj"), hidden, width, bias) };
                match config.feed_forward {
                    FeedForwardKind::SwiGlu => Self::SwiGlu(gated),
                    _ => Self::GeGlu(gated),
                }
            }
        }
    }

    /// Computes the result. A mixture sets `scores`.
    #[track_caller]
    fn forward<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        scores: &mut Option<Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        match self {
            Self::Gelu(mlp) => mlp.forward(tape, x),
            Self::GeluExact(mlp) => mlp.down.forward(tape, &mlp.up.forward(tape, x)?.gelu_exact()?),
            Self::ReluSquared(mlp) => mlp.down.forward(tape, &mlp.up.forward(tape, x)?.relu_squared()?),
            Self::SwiGlu(gated) => gated.forward(tape, x),
            Self::Mixture(mixture) => {
                let (y, own) = mixture.forward_scored(tape, x)?;
                *scores = Some(own);
                Ok(y)
            }
            Self::GeGlu(gated) => gated.down.forward(tape, &geglu(gated, tape, x)?),
        }
    }

    /// Computes `residual + forward(x)`.
    #[track_caller]
    fn forward_residual<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
        scores: &mut Option<Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        match self {
            Self::Gelu(mlp) => mlp.forward_residual(tape, x, residual),
            Self::GeluExact(mlp) => mlp.down.forward_residual(tape, &mlp.up.forward(tape, x)?.gelu_exact()?, residual),
            Self::ReluSquared(mlp) => {
                mlp.down.forward_residual(tape, &mlp.up.forward(tape, x)?.relu_squared()?, residual)
            }
            Self::SwiGlu(gated) => gated.forward_residual(tape, x, residual),
            Self::Mixture(_) => self.forward(tape, x, scores)?.add(residual),
            Self::GeGlu(gated) => gated.down.forward_residual(tape, &geglu(gated, tape, x)?, residual),
        }
    }
}

/// Splits a name such as `blocks.0.attention.o_proj` into the number of its block and the rest.
fn block_of(name: &str) -> Option<(usize, &str)> {
    let (number, name) = name.strip_prefix("blocks.")?.split_once('.')?;
    Some((number.parse().ok()?, name))
}

/// Computes `gelu(x Wg) * (x Wu)`.
#[track_caller]
fn geglu<'s, S: Activation>(gated: &SwiGlu, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
    let [gate, up] = gated.gate.forward_both(&gated.up, tape, x)?;
    gate.gelu()?.mul(up)
}

fn norm(names: Scope<'_>, config: &ModelConfig) -> Norm {
    let (width, epsilon) = (config.width, config.epsilon);
    match config.norm {
        NormKind::Layer => Norm::Layer(LayerNorm { epsilon, ..LayerNorm::new(names, width) }),
        NormKind::Rms => Norm::Rms(RmsNorm { epsilon, ..RmsNorm::new(names, width) }),
    }
}

fn linear(names: Scope<'_>, inputs: usize, outputs: usize, bias: bool) -> Linear {
    match bias {
        true => Linear::new(names, inputs, outputs),
        false => Linear::without_bias(names, inputs, outputs),
    }
}
