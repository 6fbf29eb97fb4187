//! A mixture of experts.

use super::{Linear, Scope};
use stepscope_core::ops::{self, Activation};
use stepscope_core::{Error, Indices, Initializer, Parameter, Result, Tape, Var};

/// A feed-forward layer of several experts, of which each token uses the `chosen` best (Shazeer et
/// al., 2017; Fedus, Zoph and Shazeer, 2021). Expert e computes `silu(x Ue) De`.
///
/// An expert takes at most `capacity * chosen * tokens / experts` tokens, rounded up: the first in
/// their order. A token that an expert cannot take gets nothing from it, so a model adds the
/// layer's output to its input. All extents are fixed, so a step can be captured, and an expert's
/// tokens are found and added up in ascending order, so the bits do not depend on the device.
#[derive(Clone, Copy, Debug)]
pub struct Mixture {
    /// The layer whose outputs are the experts' scores.
    pub router: Linear,
    /// U of all experts, `[experts, width, hidden]`.
    pub up: Parameter,
    /// D of all experts, `[experts, hidden, width]`.
    pub down: Parameter,
    /// The number of experts.
    pub experts: usize,
    /// The number of experts that a token uses.
    pub chosen: usize,
    /// The tokens that an expert can take, as a multiple of those that it gets if the tokens are
    /// spread evenly.
    pub capacity: f32,
}

impl Mixture {
    /// The default capacity.
    pub const CAPACITY: f32 = 1.25;

    /// Adds `router.weight`, `up.weight` and `down.weight`, initialized with
    /// [`Initializer::fan_in`]. Uses [`Mixture::CAPACITY`].
    pub fn new(mut names: Scope<'_>, [width, hidden]: [usize; 2], experts: usize, chosen: usize) -> Self {
        let router = Linear::without_bias(names.at("router"), width, experts);
        let up = names.at("up").add("weight", [experts, width, hidden], Initializer::fan_in(width));
        let down = names.at("down").add("weight", [experts, hidden, width], Initializer::fan_in(hidden));
        Self { router, up, down, experts, chosen, capacity: Self::CAPACITY }
    }

    /// Computes the result and the auxiliary loss; `x`, result: `[.., width]`. The loss is
    /// `experts * sum of f p` over the experts, for the share f of the choices that fell on an
    /// expert and its mean probability p. It is 1 if the tokens are spread evenly, and is added to
    /// a model's loss with a factor such as 0.01.
    ///
    /// # Errors
    /// [`Error::Misuse`] for more experts of a token than there are, or other shapes;
    /// [`Error::ArenaFull`].
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<(Var<'s, S>, Var<'s>)> {
        let Self { experts, chosen, .. } = *self;
        let [tokens, width] = x.shape().as_rows();
        let rows = x.reshape([tokens, width])?;
        let routes = self.route(tape, &rows)?;

        // The tokens of each expert.
        let capacity = (self.capacity * (chosen * tokens) as f32 / experts.max(1) as f32).ceil().max(1.0) as usize;
        let taken = ops::first_occurrences(tape.step(), &routes.ids, experts, capacity)?;
        let inputs = rows.gather(0, &taken.rows)?.reshape([experts, capacity, width])?;
        let [up, down] = [self.up, self.down].map(|weight| tape.stored_as::<S>(&tape.parameter(weight)?));
        let outputs = inputs.matmul(&up?)?.silu()?.matmul(&down?)?.reshape([experts * capacity, width])?;
        let gates = routes.gates.reshape([tokens * chosen])?.gather(0, &taken.places)?;
        let gates = (gates * tape.input(taken.found))?.unsqueeze(-1)?;
        let gated = (outputs * tape.stored_as::<S>(&gates)?)?;

        let y = gated.segment_sum(0, &taken.rows, tokens)?.reshape(x.shape())?;
        Ok((y, routes.loss))
    }

    /// Chooses the experts of each token, in f32.
    fn route<'s, S: Activation>(&self, tape: &Tape<'_, 's>, rows: &Var<'s, S>) -> Result<Routes<'s>> {
        let Self { experts, chosen, .. } = *self;
        if chosen == 0 || chosen > experts {
            let expected = format!("1 to {experts} experts for each token");
            return Err(Error::misuse("Mixture", expected, chosen.to_string()));
        }
        let probabilities = tape.to_f32(&self.router.forward(tape, rows)?)?.softmax()?;
        let (best, ids) = probabilities.top_k(chosen)?;
        // One expert has its probability, so that the router has a gradient. Several share 1.
        let gates = if chosen == 1 { best } else { (best / best.sum_keep(-1)?)? };
        let counts = tape.input(ops::one_hot(tape.step(), &ids, experts)?).sum([0, 1])?;
        let share = (counts * (experts as f32 / ids.shape().elements().max(1) as f32))?;
        Ok(Routes { loss: (share * probabilities.mean(0)?)?.sum(..)?, ids, gates })
    }
}

/// The experts of each token, `[tokens, chosen]`.
struct Routes<'s> {
    ids: Indices<'s>,
    /// The factors of the experts' outputs.
    gates: Var<'s>,
    loss: Var<'s>,
}
