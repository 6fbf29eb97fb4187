//! Linear layers.

use super::Scope;
use stepscope_core::ops::{Activation, Draws, LOW_RANK_PARTS, LowRank, LowRankDropout, LowRankPart};
use stepscope_core::{Error, Initializer, Parameter, Result, Tape, Var};

/// `y = x w + b`; `x`: `[.., in]`, `w`: `[in, out]`, `b`: `[out]`, `y`: `[.., out]`. An adapter
/// adds a product of low rank, so that w and b can stay frozen:
///
/// ```
/// use stepscope::nn::{AdapterPart, Linear};
/// use stepscope::parameters::FrozenType;
/// use stepscope::ParameterSpec;
///
/// # fn main() -> stepscope::Result<()> {
/// let mut spec = ParameterSpec::builder();
/// let layer = Linear::new(spec.at("layer"), 64, 32);
/// spec.freeze(|_| Some(FrozenType::Bf16));
/// let part = AdapterPart { name: "", first: 0, outputs: 32, rank: 8, scale: 2.0 };
/// let layer = layer.with_adapter(spec.at("layer"), 64, &[part], 0.05)?;
/// let spec = spec.build()?;
/// let names: Vec<&str> = spec.entries().iter().map(|entry| entry.name()).collect();
/// assert_eq!(names, ["layer.lora_a.weight", "layer.lora_b.weight"]);
/// # assert!(layer.adapter.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// The weight w.
    pub weight: Parameter,
    /// The bias b, if there is one.
    pub bias: Option<Parameter>,
    /// The adapter, if there is one.
    pub adapter: Option<Adapter>,
}

/// A low-rank addition to a linear layer's outputs (Hu et al., "LoRA", 2021): `y += scale
/// dropout(x) A B`.
#[derive(Clone, Copy, Debug)]
pub struct Adapter {
    /// A and B.
    pub low_rank: LowRank,
    /// The probability with which dropout zeroes an element of the addition's input. Each part has
    /// its own choice.
    pub dropout: f32,
}

impl Adapter {
    /// Draws the random numbers of the adapter's dropout, if it has any and the tape is not for an
    /// evaluation.
    #[track_caller]
    fn draw<'s>(&self, tape: &Tape<'_, 's>) -> Result<Option<LowRankDropout<'s>>> {
        if self.dropout == 0.0 {
            return Ok(None);
        }
        let dropout =
            |draws: &Draws<'s>| LowRankDropout { p: self.dropout, draws: [(); LOW_RANK_PARTS].map(|()| draws.next()) };
        Ok(tape.draws()?.map(dropout))
    }
}

/// A part of an adapter, which adds to neighboring outputs of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterPart<'n> {
    /// The name of the part's B within `lora_b`, such as `q_proj`. It may be empty.
    pub name: &'n str,
    /// The first output, a multiple of 8.
    pub first: usize,
    /// The number of outputs.
    pub outputs: usize,
    /// The rank: the columns of A and the rows of B.
    pub rank: usize,
    /// The factor of the addition, for example `alpha / rank`.
    pub scale: f32,
}

impl Linear {
    /// Adds `weight`, initialized with [`Initializer::fan_in`], and `bias`, initialized to zero.
    pub fn new(mut names: Scope<'_>, inputs: usize, outputs: usize) -> Self {
        let weight = names.add("weight", [inputs, outputs], Initializer::fan_in(inputs));
        Self { weight, bias: Some(names.add("bias", [outputs], Initializer::ZERO)), adapter: None }
    }

    /// Adds only `weight`, initialized with [`Initializer::fan_in`].
    pub fn without_bias(mut names: Scope<'_>, inputs: usize, outputs: usize) -> Self {
        let weight = names.add("weight", [inputs, outputs], Initializer::fan_in(inputs));
        Self { weight, bias: None, adapter: None }
    }

    /// Adds an adapter of these parts: `lora_a.weight` `[inputs, columns]`, initialized
    /// with [`Initializer::fan_in`] as PEFT does, and for each part `lora_b.NAME.weight`
    /// `[rank, outputs]`, initialized to zero.
    ///
    /// # Errors
    /// [`Error::Misuse`] unless there are one to three parts.
    pub fn with_adapter(
        self,
        mut names: Scope<'_>,
        inputs: usize,
        parts: &[AdapterPart<'_>],
        dropout: f32,
    ) -> Result<Self> {
        let (_, columns) = LowRankPart::columns(parts.iter().map(|part| part.rank));
        let a = names.at("lora_a").add("weight", [inputs, columns], Initializer::fan_in(inputs));
        self.with_shared_adapter(names, a, parts, dropout)
    }

    /// Adds an adapter like [`Linear::with_adapter`], with an A that another layer of the same
    /// input may have too.
    pub fn with_shared_adapter(
        self,
        mut names: Scope<'_>,
        a: Parameter,
        parts: &[AdapterPart<'_>],
        dropout: f32,
    ) -> Result<Self> {
        if parts.is_empty() || parts.len() > LOW_RANK_PARTS {
            let expected = format!("1 to {LOW_RANK_PARTS} parts of an adapter");
            return Err(Error::misuse("with_adapter", expected, parts.len().to_string()));
        }
        let mut names = names.at("lora_b");
        let mut made = [None; LOW_RANK_PARTS];
        for (place, part) in made.iter_mut().zip(parts) {
            let name = if part.name.is_empty() { "weight".into() } else { format!("{}.weight", part.name) };
            let b = names.add(name, [part.rank, part.outputs], Initializer::ZERO);
            *place = Some(LowRankPart { b, first: part.first, scale: part.scale });
        }
        Ok(Self { adapter: Some(Adapter { low_rank: LowRank { a, parts: made }, dropout }), ..self })
    }

    /// Adds `bias`, initialized to zero, after the parameters that `names` has so far.
    #[must_use]
    pub fn with_bias(self, mut names: Scope<'_>, outputs: usize) -> Self {
        Self { bias: Some(names.add("bias", [outputs], Initializer::ZERO)), ..self }
    }

    /// Computes y; see [`Tape::linear`] and [`Tape::linear_low_rank`].
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        match &self.adapter {
            None => tape.linear(x, self.weight, self.bias),
            Some(adapter) => self.adapted(tape, x, adapter, adapter.draw(tape)?, None),
        }
    }

    /// Computes [`Linear::forward`] of this layer and of another one. If their adapters share A, as
    /// those of two halves of one matrix in a file do, they also share the choice of dropout.
    #[track_caller]
    pub fn forward_both<'s, S: Activation>(
        &self,
        other: &Self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
    ) -> Result<[Var<'s, S>; 2]> {
        match (&self.adapter, &other.adapter) {
            (Some(ours), Some(theirs)) if ours.low_rank.a == theirs.low_rank.a => {
                let dropout = ours.draw(tape)?;
                Ok([self.adapted(tape, x, ours, dropout, None)?, other.adapted(tape, x, theirs, dropout, None)?])
            }
            _ => Ok([self.forward(tape, x)?, other.forward(tape, x)?]),
        }
    }

    /// Computes `residual + forward(x)`, without an adapter in one launch; see
    /// [`Tape::linear_residual`].
    #[track_caller]
    pub fn forward_residual<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        match &self.adapter {
            None => tape.linear_residual(x, self.weight, self.bias, residual),
            Some(adapter) => self.adapted(tape, x, adapter, adapter.draw(tape)?, Some(residual)),
        }
    }

    #[track_caller]
    fn adapted<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        adapter: &Adapter,
        dropout: Option<LowRankDropout<'s>>,
        residual: Option<&Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        tape.linear_low_rank(x, (self.weight, self.bias), &adapter.low_rank, dropout, residual)
    }
}
