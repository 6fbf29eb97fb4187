//! GPT-2 and Llama: token embedding, blocks of attention and a feed-forward network, a norm, and a
//! head over the vocabulary.
//!
//! For `ids: [samples, context]`: `x = tokens[ids]`, plus `positions` in GPT-2. Each block computes
//! `h = x + attention(norm1(x))` and `x = h + mlp(norm2(h))`. The loss is `cross_entropy(norm(x)
//! head^T, labels)`. Blocks and head are the library's. The head computes the logits of one chunk
//! of tokens at a time.
//!
//! Activations are f32 or BF16; weights, their gradients and the loss are f32.

use std::marker::PhantomData;

use stepscope::nn::{Block, Embedding, KeyValueCache, LayerNorm, Norm, RmsNorm};
use stepscope::ops::{self, AttentionElement, Gemm, GemmElement, LmHeadConfig, Rotary};
use stepscope::{
    DeviceBatch, Indices, Initializer, Parameter, ParameterGroups, ParameterSpec, ParameterSpecBuilder, Parameters,
    Result, Saved, ScratchStep, Source, Step, Tape, Tensor, Var,
};

use crate::train::cli::{Arch, Size};

/// The size and architecture of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) arch: Arch,
    pub(crate) vocabulary: usize,
    /// The most tokens in a sample.
    pub(crate) context: usize,
    pub(crate) layers: usize,
    pub(crate) width: usize,
    /// Heads of queries, and heads of keys and values.
    pub(crate) heads: [usize; 2],
    /// Hidden columns of the feed-forward network.
    pub(crate) hidden: usize,
    /// True if the head shares the token embedding.
    pub(crate) tied: bool,
    pub(crate) epsilon: f32,
    /// The base of the rotary frequencies.
    pub(crate) base: f64,
}

impl Sizes {
    pub(crate) fn new(size: Size, arch: Arch, vocabulary: usize, context: usize) -> Self {
        let (layers, width, query_heads, key_heads): (usize, usize, usize, usize) = match size {
            Size::Tiny => (4, 128, 4, 2),
            Size::Small => (12, 768, 12, 4),
            Size::Medium => (24, 1024, 16, 8),
            Size::Large => (36, 1280, 20, 10),
            Size::Xl => (48, 1600, 25, 5),
        };
        // SwiGLU has three matrices and GELU two, so its hidden width is 2/3 of 4 x width.
        let (heads, hidden, tied, epsilon) = match arch {
            Arch::Gpt2 => ([query_heads; 2], 4 * width, true, 1e-5),
            Arch::Llama => ([query_heads, key_heads], (8 * width / 3).next_multiple_of(64), false, 1e-6),
        };
        Self { arch, vocabulary, context, layers, width, heads, hidden, tied, epsilon, base: 10_000.0 }
    }
}

/// The way a model runs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mode {
    /// True if each block keeps only its input and runs again in the backward pass. Also set for
    /// passes without backward, where nothing is recomputed.
    pub(crate) recompute: bool,
    /// True if tokens attend only to their own document, which is input 2 of the batch.
    pub(crate) documents: bool,
}

/// An element type of activations: f32 or BF16.
pub(crate) trait Activation: AttentionElement + GemmElement<Self> + GemmElement<f32> {}

impl<S: AttentionElement + GemmElement<S> + GemmElement<f32>> Activation for S {}

/// The layers, as handles of parameters. Activations are stored as `S`.
#[derive(Clone, Debug)]
pub(crate) struct Gpt<S = f32> {
    pub(crate) sizes: Sizes,
    mode: Mode,
    tokens: Embedding,
    positions: Option<Embedding>,
    blocks: Vec<Block>,
    norm: Norm,
    /// `[vocabulary, width]`.
    head: Parameter,
    stored: PhantomData<S>,
}

impl<S: Activation> Gpt<S> {
    /// Builds the model and its parameter spec, initialized as GPT-2: matrices have a standard
    /// deviation of 0.02, and matrices before a residual less, the deeper the model.
    ///
    /// # Errors
    /// Never, since names are unique.
    pub(crate) fn new(sizes: Sizes, mode: Mode) -> Result<(Self, ParameterSpec)> {
        let Sizes { arch, vocabulary, context, layers, width, heads, hidden, tied, epsilon, base } = sizes;
        let mut layout: ParameterSpecBuilder = ParameterSpec::builder();
        let mut names = layout.names();
        let tokens = Embedding::new(names.at("tokens"), vocabulary, width, 0.02);
        let positions = (arch == Arch::Gpt2).then(|| Embedding::new(names.at("positions"), context, width, 0.02));
        let block = |layer| {
            let names = names.at(format!("blocks.{layer}"));
            let mut block = match arch {
                Arch::Gpt2 => Block::gpt2(names, width, heads[0], hidden),
                Arch::Llama => Block::llama(names, width, heads, hidden, Rotary::new(base)),
            };
            block.norms = block.norms.map(|norm| with_epsilon(norm, epsilon));
            block
        };
        let blocks = (0..layers).map(block).collect();
        let norm = match arch {
            Arch::Gpt2 => Norm::Layer(LayerNorm::new(names.at("norm"), width)),
            Arch::Llama => Norm::Rms(RmsNorm::new(names.at("norm"), width)),
        };
        let head = if tied { tokens.weight } else { Embedding::new(names.at("head"), vocabulary, width, 0.02).weight };
        layout.initialize(|entry| {
            let before_residual = ["o_proj.weight", "down.weight", "down_proj.weight"];
            let share = if before_residual.iter().any(|end| entry.name().ends_with(end)) { 2 * layers } else { 1 };
            let deviation = 0.02 / (share as f32).sqrt();
            (entry.shape().extents().len() == 2).then_some(Initializer::Normal { deviation })
        });
        let norm = with_epsilon(norm, epsilon);
        Ok((Self { sizes, mode, tokens, positions, blocks, norm, head, stored: PhantomData }, layout.build()?))
    }

    /// Applies weight decay to matrices and tables, but not to gains and biases.
    pub(crate) fn groups() -> ParameterGroups {
        ParameterGroups::new().no_decay(|entry| entry.shape().extents().len() == 1)
    }

    /// Returns the input of the head: `[samples, tokens, width]` for `ids: [samples, tokens]`.
    ///
    /// # Errors
    /// When an op fails, for example because the arena is full.
    pub(crate) fn hidden<'s>(
        &self,
        tape: &Tape<'_, 's>,
        ids: Indices<'s>,
        documents: Option<Saved<'s, u32>>,
    ) -> Result<Var<'s, S>> {
        let mut x = self.tokens.forward(tape, ids)?;
        if let Some(positions) = &self.positions {
            x = positions.add_positions(tape, &x)?;
        }
        for block in &self.blocks {
            let form = block.attention.form();
            let form = documents.map_or(form, |documents| form.documents(documents));
            let block = block.clone();
            x = match self.mode.recompute || tape.is_evaluating() {
                true => tape.recompute((x, form), move |tape, (x, form)| block.forward_masked(tape, &x, &form))?,
                false => block.forward_masked(tape, &x, &form)?,
            };
        }
        self.norm.forward(tape, &x)
    }

    /// Allocates the key-value caches of the blocks for one sample that is being generated.
    ///
    /// # Errors
    /// When the arena is full.
    pub(crate) fn caches<'s>(&self, step: &Step<'s>) -> Result<Vec<KeyValueCache<'s>>> {
        let Sizes { context, width, heads: [heads, key_heads], .. } = self.sizes;
        self.blocks.iter().map(|_| KeyValueCache::new(step, context, key_heads * width / heads)).collect()
    }

    /// Returns the logits `[1, vocabulary]` of the token that follows `token: [1, 1]`, given the
    /// cached keys and values of all tokens before it.
    ///
    /// # Errors
    /// When an op fails.
    pub(crate) fn next<'i, 's>(
        &self,
        scratch: &ScratchStep<'i, 's>,
        weights: &Parameters,
        [token, place]: [&Indices<'s>; 2],
        caches: &mut [KeyValueCache<'s>],
    ) -> Result<Tensor<'i>> {
        let row = |table: Parameter, id: &Indices<'s>| -> Result<Tensor<'i>> {
            ops::embedding(scratch, &weights.lend(scratch, table)?, &scratch.lend_indices(id))
        };
        let mut x = row(self.tokens.weight, token)?;
        if let Some(positions) = self.positions {
            x = ops::add(scratch, &x, &row(positions.weight, place)?)?;
        }
        let tape = Tape::new(scratch, weights).evaluating();
        let mut x = tape.input(x);
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.forward_cached(&tape, &x, cache.next(scratch)?)?;
        }
        self.logits(scratch, weights, self.norm.forward(&tape, &x)?.value())
    }

    /// Returns the logits `[rows, vocabulary]` of rows `[rows, width]` of the output of
    /// [`Gpt::hidden`].
    ///
    /// # Errors
    /// When an op fails.
    pub(crate) fn logits<'s>(
        &self,
        step: &Step<'s>,
        weights: &Parameters,
        rows: &impl Source<'s, f32>,
    ) -> Result<Tensor<'s>> {
        let Sizes { vocabulary, width, .. } = self.sizes;
        let count = rows.shape().elements() / width;
        let mut logits = step.empty([count, vocabulary])?;
        let product = Gemm::new(count, vocabulary, width).transpose_b();
        ops::gemm_into(step, &product, rows, &weights.lend(step, self.head)?, None::<&Tensor<'_>>, &mut logits)?;
        Ok(logits)
    }
}

/// The inputs of a batch are the ids, the labels, and optionally the documents.
impl<S: Activation> stepscope::Model for Gpt<S> {
    type Stored = S;

    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s, S>> {
        let documents = if self.mode.documents { Some(batch.input(2)?) } else { None };
        self.hidden(tape, batch.indices(0)?, documents)
    }

    /// Averages over the tokens of each sample.
    fn loss<'s>(
        &self,
        tape: &Tape<'_, 's>,
        hidden: &Var<'s, S>,
        batch: &DeviceBatch<'s>,
        weight: f32,
    ) -> Result<Var<'s>> {
        let labels = batch.indices(1)?;
        let tokens = labels.shape().extents()[1] as f32;
        tape.linear_cross_entropy(hidden, self.head, labels, weight / tokens, LmHeadConfig::default().tied())
    }
}

fn with_epsilon(norm: Norm, epsilon: f32) -> Norm {
    match norm {
        Norm::Layer(norm) => Norm::Layer(LayerNorm { epsilon, ..norm }),
        Norm::Rms(norm) => Norm::Rms(RmsNorm { epsilon, ..norm }),
    }
}
