//! The contexts of one step, with the inputs of preference losses.
//!
//! Invariant: a place without a pair has a weight of 0, so that the loss of contexts does not depend
//! on the empty ones that fill a step.

use stepscope::{HostBatch, HostInputs, Result};
use stepscope_chat::{IGNORED, Packed};

use crate::finetune::cli::Preferences;
use crate::run::updates::TokenBatch;

/// The contexts of pairs of answers.
pub(super) const TWO: usize = 2;

/// The contexts of one step.
#[derive(Clone, Debug)]
pub(crate) struct Contexts {
    context: usize,
    pub(crate) ids: Vec<u32>,
    labels: Vec<u32>,
    documents: Vec<u32>,
    /// 1 for each token and 0 for padding, if the model reads it.
    real: Option<Vec<f32>>,
    /// The contexts of the whole batch divided by its counted tokens.
    share: [f32; 1],
    pairs: Option<Pairs>,
    counted: usize,
    tokens: usize,
}

/// The form of pairs.
#[derive(Clone, Copy, Debug)]
pub(super) struct PairForm {
    pub(super) preferences: Preferences,
    /// The most pairs of two contexts.
    pub(super) places: usize,
}

/// The inputs of a preference loss; see [`crate::train::model::preferences`].
#[derive(Clone, Debug)]
struct Pairs {
    form: PairForm,
    weights: Vec<f32>,
    references: Vec<f32>,
    /// ORPO's weights of tokens in their answers, and of a token of the chosen contexts.
    of_tokens: (Vec<f32>, [f32; 1]),
    /// KTO's weights of good answers, and minus those of bad ones.
    sides: Vec<f32>,
    /// The number of pairs.
    count: usize,
}

/// Counts of contexts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Tokens that count.
    pub(super) counted: usize,
    pub(super) pairs: usize,
    /// Pairs with a good answer.
    desirable: usize,
    /// Tokens of the first contexts of twos that have a predecessor in their sample.
    chosen: usize,
}

impl Counts {
    pub(super) fn of(contexts: &[&Packed]) -> Self {
        let mut all = Self { counted: contexts.iter().map(|packed| packed.counted).sum(), ..Self::default() };
        for packed in contexts.iter().step_by(TWO) {
            all.pairs += packed.samples();
            all.desirable += packed.desirable.iter().filter(|desirable| **desirable).count();
            all.chosen += packed.tokens - packed.samples();
        }
        all
    }
}

impl Contexts {
    /// Joins packed contexts, and as many without tokens as `count` lacks. An input marks padding
    /// if `marks_padding`.
    pub(crate) fn new<'p>(
        packed: impl IntoIterator<Item = &'p Packed>,
        count: usize,
        context: usize,
        share: f64,
        marks_padding: bool,
    ) -> Self {
        let mut all = Self {
            context,
            ids: Vec::new(),
            labels: Vec::new(),
            documents: Vec::new(),
            real: marks_padding.then(Vec::new),
            share: [share as f32],
            pairs: None,
            counted: 0,
            tokens: 0,
        };
        for packed in packed {
            all.ids.extend(&packed.ids);
            all.labels.extend(&packed.labels);
            all.documents.extend(&packed.documents);
            if let Some(real) = &mut all.real {
                real.extend((0..packed.ids.len()).map(|at| if at < packed.tokens { 1.0 } else { 0.0 }));
            }
            all.counted += packed.counted;
            all.tokens += packed.tokens;
        }
        all.ids.resize(count * context, 0);
        all.labels.resize(count * context, IGNORED);
        all.documents.resize(count * context, 0);
        if let Some(real) = &mut all.real {
            real.resize(count * context, 0.0);
        }
        all
    }

    /// Adds the pairs of packed contexts and their references. `counts` are those of the whole
    /// batch, and means over it are divided by its contexts, which are `whole`.
    pub(super) fn with_pairs(
        mut self,
        packed: &[&Packed],
        form: PairForm,
        counts: Counts,
        whole: usize,
        mut references: Vec<f32>,
    ) -> Self {
        let (contexts, context, places) = (self.len(), self.context, form.places);
        let weight = |count: usize| (whole as f64 / (count.max(1) * contexts) as f64) as f32;
        let (mut weights, mut sides) = (vec![0.0; contexts / TWO * places], vec![0.0; contexts / TWO * places]);
        let of_sides = [-weight(counts.pairs - counts.desirable), weight(counts.desirable)];
        for (two, packed) in packed.iter().step_by(TWO).enumerate() {
            for (place, &desirable) in (two * places..).zip(&packed.desirable) {
                weights[place] = weight(counts.pairs);
                sides[place] = of_sides[usize::from(desirable)];
            }
        }
        references.resize(contexts * places, 0.0);
        let mut of_tokens = (Vec::new(), [weight(counts.chosen)]);
        if form.preferences == Preferences::Orpo {
            of_tokens.0 = packed.iter().flat_map(|packed| shares(packed)).collect();
            of_tokens.0.resize(contexts * context, 0.0);
            for (packed, labels) in packed.iter().zip(self.labels.chunks_mut(context)).step_by(TWO) {
                all_labels(packed, labels);
            }
        }
        let count = packed.iter().step_by(TWO).map(|packed| packed.samples()).sum();
        self.pairs = Some(Pairs { form, weights, references, of_tokens, sides, count });
        self
    }
}

/// Returns the share of each token in the answer of its sample.
fn shares(packed: &Packed) -> impl Iterator<Item = f32> {
    let mut lengths = vec![0; packed.samples() + 1];
    let counted = move |at: usize| packed.labels[at] != IGNORED;
    for at in (0..packed.labels.len()).filter(|&at| counted(at)) {
        lengths[packed.documents[at] as usize] += 1;
    }
    let share = move |at| if counted(at) { 1.0 / lengths[packed.documents[at] as usize] as f32 } else { 0.0 };
    (0..packed.labels.len()).map(share)
}

/// Writes the successor of each token in its sample, also of those in a prompt.
fn all_labels(packed: &Packed, labels: &mut [u32]) {
    for at in 1..packed.tokens {
        if packed.documents[at] == packed.documents[at - 1] {
            labels[at - 1] = packed.ids[at];
        }
    }
}

impl HostBatch for Contexts {
    fn len(&self) -> usize {
        self.ids.len() / self.context
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        let shape = [self.len(), self.context];
        let inputs = HostInputs::new().with(&self.ids, shape)?.with(&self.labels, shape)?;
        let inputs = inputs.with(&self.documents, shape)?;
        let inputs = match &self.pairs {
            Some(Pairs { form: PairForm { preferences, places }, weights, references, of_tokens, sides, .. }) => {
                let (twos, places) = (self.len() / TWO, *places);
                let inputs = inputs.with(weights, [twos, places])?;
                let of_pairs = [twos, TWO, places];
                match preferences {
                    Preferences::Dpo => inputs.with(references, of_pairs)?,
                    Preferences::Orpo => inputs.with(&of_tokens.0, shape)?.with(&of_tokens.1, [1])?,
                    Preferences::Kto => inputs.with(references, of_pairs)?.with(sides, [twos, places])?,
                }
            }
            None => inputs.with(&self.share, [1])?,
        };
        match &self.real {
            Some(real) => inputs.with(real, shape),
            None => Ok(inputs),
        }
    }
}

impl TokenBatch for Contexts {
    fn weight(&self) -> usize {
        self.pairs.as_ref().map_or(self.counted, |pairs| pairs.count)
    }

    fn tokens(&self) -> usize {
        self.tokens
    }
}
