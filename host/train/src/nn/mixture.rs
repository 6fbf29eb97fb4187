//! A mixture of experts.

use super::{Linear, Scope};
use stepscope_core::ops::{self, Activation, Draws, GroupedLowRank, Groups};
use stepscope_core::{Error, Indices, Initializer, Parameter, Result, Tape, Var};

/// A feed-forward layer of several experts, of which each token uses the `chosen` best (Shazeer et
/// al., 2017). Expert e computes `silu(x Ue) De`, or with gates `(silu(x Ge) * (x Ue)) De`. A
/// token's results are added up, each times the expert's weight.
///
/// Every token gets all its experts. The tokens of an expert are multiplied together
/// ([`Tape::grouped_linear`]), and only the device knows how many there are, so a step can be
/// captured. The order of every sum depends on nothing but the choices.
///
/// An expert's matrices are neighboring columns of one parameter, in the order of the experts. For
/// Muon and NF4, [`ParameterSpecBuilder::matrices`](stepscope_core::ParameterSpecBuilder::matrices)
/// divides the parameter into them.
#[derive(Clone, Copy, Debug)]
pub struct Mixture {
    /// The layer whose outputs are the experts' scores.
    pub router: Linear,
    /// G of all experts, `[width, experts * hidden]`, if they have gates.
    pub gate: Option<ExpertLinear>,
    /// U of all experts, `[width, experts * hidden]`.
    pub up: ExpertLinear,
    /// D of all experts, `[hidden, experts * width]`.
    pub down: ExpertLinear,
    /// The number of experts.
    pub experts: usize,
    /// The number of experts that a token uses.
    pub chosen: usize,
    /// True if the weights of a token's experts are their shares of the sum of the chosen
    /// probabilities. Otherwise they are the probabilities.
    pub normalized: bool,
}

/// A linear layer of each expert, without a bias. An adapter adds products of low rank, so that the
/// weights can stay frozen.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLinear {
    /// The weights of all experts, `[in, experts * out]`.
    pub weight: Parameter,
    /// The adapters, if there are any.
    pub adapter: Option<ExpertAdapter>,
}

/// A low-rank addition to the outputs of each expert's layer: `y += scale dropout(x) A B`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertAdapter {
    /// A and B of all experts.
    pub low_rank: GroupedLowRank,
    /// The probability with which dropout zeroes an element of the addition's input.
    pub dropout: f32,
}

impl ExpertLinear {
    /// Returns the layer of these weights, without an adapter.
    pub fn new(weight: Parameter) -> Self {
        Self { weight, adapter: None }
    }

    /// Adds an adapter of one rank and scale for each expert: `lora_a.weight` `[inputs, experts *
    /// rank]`, initialized with [`Initializer::fan_in`], and `lora_b.weight` `[rank, experts *
    /// outputs]`, initialized to zero.
    #[must_use]
    pub fn with_adapter(
        self,
        mut names: Scope<'_>,
        [inputs, outputs]: [usize; 2],
        experts: usize,
        (rank, scale): (usize, f32),
        dropout: f32,
    ) -> Self {
        let mut add = |name, rows, columns: usize, initializer| {
            names.at(name).add("weight", [rows, experts.saturating_mul(columns)], initializer)
        };
        let a = add("lora_a", inputs, rank, Initializer::fan_in(inputs));
        let b = add("lora_b", rank, outputs, Initializer::ZERO);
        Self { adapter: Some(ExpertAdapter { low_rank: GroupedLowRank { a, b, scale }, dropout }), ..self }
    }

    /// Computes the outputs of rows in the order of their experts; see [`Tape::grouped_linear`] and
    /// [`Tape::grouped_low_rank`].
    #[track_caller]
    fn forward<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        rows: &Var<'s, S>,
        groups: &Groups<'s>,
    ) -> Result<Var<'s, S>> {
        let Some(ExpertAdapter { low_rank, dropout }) = self.adapter else {
            return tape.grouped_linear(rows, self.weight, groups);
        };
        let draws = if dropout > 0.0 { tape.draws()? } else { None };
        let dropout = draws.map(|draws: &Draws<'s>| (dropout, draws.next()));
        tape.grouped_low_rank(rows, self.weight, &low_rank, dropout, groups)
    }
}

impl Mixture {
    /// Adds `router.weight`, `up.weight` and `down.weight`, initialized with
    /// [`Initializer::fan_in`]. The weights of several experts are shares, and that of one is its
    /// probability, so that the router has a gradient (Fedus, Zoph and Shazeer, 2021).
    pub fn new(mut names: Scope<'_>, [width, hidden]: [usize; 2], experts: usize, chosen: usize) -> Self {
        let router = Linear::without_bias(names.at("router"), width, experts);
        let [up, down] = [("up", width, hidden), ("down", hidden, width)].map(|(name, inputs, outputs)| {
            let shape = [inputs, experts.saturating_mul(outputs)];
            ExpertLinear::new(names.at(name).add("weight", shape, Initializer::fan_in(inputs)))
        });
        Self { router, gate: None, up, down, experts, chosen, normalized: chosen > 1 }
    }

    /// Adds the parameters of [`Mixture::new`], and `gate.weight`.
    pub fn gated(mut names: Scope<'_>, [width, hidden]: [usize; 2], experts: usize, chosen: usize) -> Self {
        let shape = [width, experts.saturating_mul(hidden)];
        let gate = names.at("gate").add("weight", shape, Initializer::fan_in(width));
        Self { gate: Some(ExpertLinear::new(gate)), ..Self::new(names, [width, hidden], experts, chosen) }
    }

    /// Computes the result; `x`, result: `[.., width]`.
    ///
    /// # Errors
    /// [`Error::Misuse`] for more experts of a token than there are, or other shapes;
    /// [`Error::ArenaFull`].
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        self.computed(tape, x, &self.route(tape, x)?)
    }

    /// Computes the result and the scores of the router, `[tokens, experts]`, of which a model may
    /// compute a loss of its own.
    ///
    /// # Errors
    /// The errors of [`Mixture::forward`].
    #[track_caller]
    pub fn forward_scored<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
    ) -> Result<(Var<'s, S>, Var<'s, S>)> {
        let routes = self.route(tape, x)?;
        Ok((self.computed(tape, x, &routes)?, routes.scores))
    }

    /// Computes the result and the auxiliary loss. The loss is `experts * sum of f p` over the
    /// experts, for the share f of the choices that fell on an expert and its mean probability p.
    /// It is 1 if the tokens are spread evenly, and is added to a model's loss with a factor such
    /// as 0.01.
    ///
    /// # Errors
    /// The errors of [`Mixture::forward`].
    #[track_caller]
    pub fn forward_balanced<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
    ) -> Result<(Var<'s, S>, Var<'s>)> {
        let routes = self.route(tape, x)?;
        let counts = tape.input(ops::one_hot(tape.step(), &routes.ids, self.experts)?).sum([0, 1])?;
        let share = (counts * (self.experts as f32 / routes.ids.shape().elements().max(1) as f32))?;
        let loss = (share * routes.probabilities.mean(0)?)?.sum(..)?;
        Ok((self.computed(tape, x, &routes)?, loss))
    }

    /// Chooses the experts of each token, in f32.
    #[track_caller]
    fn route<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Routes<'s, S>> {
        let Self { experts, chosen, .. } = *self;
        if chosen == 0 || chosen > experts {
            let expected = format!("1 to {experts} experts for each token");
            return Err(Error::misuse("Mixture", expected, chosen.to_string()));
        }
        let rows = x.reshape(x.shape().as_rows())?;
        let scores = self.router.forward(tape, &rows)?;
        let probabilities = tape.to_f32(&scores)?.softmax()?;
        let (best, ids) = probabilities.top_k(chosen)?;
        let weights = if self.normalized { (best / best.sum_keep(-1)?)? } else { best };
        Ok(Routes { ids, weights, probabilities, scores })
    }

    /// Computes the experts of each token.
    #[track_caller]
    fn computed<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        routes: &Routes<'s, S>,
    ) -> Result<Var<'s, S>> {
        let groups = ops::group_by(tape.step(), &routes.ids, self.experts)?;
        let rows = tape.dispatch(&x.reshape(x.shape().as_rows())?, &groups)?;
        let up = self.up.forward(tape, &rows, &groups)?;
        let hidden = match self.gate {
            Some(gate) => tape.swiglu(&gate.forward(tape, &rows, &groups)?, &up)?,
            None => up.silu()?,
        };
        let outputs = self.down.forward(tape, &hidden, &groups)?;
        tape.combine(&outputs, &routes.weights, &groups)?.reshape(x.shape())
    }
}

/// The experts of each token, `[tokens, chosen]`, and the probabilities and scores of all.
struct Routes<'s, S: Activation> {
    ids: Indices<'s>,
    /// The factors of the experts' outputs.
    weights: Var<'s>,
    probabilities: Var<'s>,
    scores: Var<'s, S>,
}
