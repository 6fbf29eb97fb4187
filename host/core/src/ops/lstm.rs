//! A long short-term memory over all tokens of a sequence.
//!
//! Invariant: the sums of a token's gates are those of [`Tape::linear_residual`]. The gradient of
//! the weights is one product over all tokens, in their order.

use super::Activation;
use super::matmul::{Gemm, gemm_into};
use super::views::{Places, copy, taken};
use crate::elementary;
use crate::error::{Error, Result};
use crate::params::Parameter;
use crate::step::Step;
use crate::tape::{AnyVar, Backward, Tape, Var};
use crate::tensor::{Lent, LentMut, Saved, Shape, Source, Stored, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::lstm::{lstm_backward, lstm_forward};
use std::ops::Range;

const OP: &str = "lstm";

/// The extents of a sequence, which is stored token by token. The states, h or c, are the one
/// before the first token, if it is given, and that of each token.
#[derive(Clone, Copy, Debug)]
struct Sequence {
    batch: usize,
    /// The samples of a token as stored: zeros follow the batch until a token has whole vectors.
    rows: usize,
    tokens: usize,
    width: usize,
    /// 1 if the state before the first token is given.
    given: usize,
}

impl Sequence {
    fn new<S: Stored>(gates: Shape, weights: Shape, state: Option<[&Var<'_, S>; 2]>) -> Result<Self> {
        if let (&[batch, tokens @ (1..), columns], &[width @ (1..), all]) = (gates.extents(), weights.extents())
            && columns == all
            && columns == 4 * width
            && state.iter().flatten().all(|state| state.shape() == [batch, width].into())
        {
            let together = (1..=8).find(|rows| (rows * width).is_multiple_of(8)).expect("8 rows have whole vectors");
            let rows = batch.max(1).next_multiple_of(together);
            return Ok(Self { batch, rows, tokens, width, given: usize::from(state.is_some()) });
        }
        let expected = "gates [batch, at least one token, 4 width], weights [width, 4 width] and states [batch, width]";
        let states = state.map_or_else(String::new, |[h, c]| format!(", {} and {}", h.shape(), c.shape()));
        Err(Error::misuse(OP, expected, format!("{gates}, {weights}{states}")))
    }

    /// The number of states.
    fn states(&self) -> usize {
        self.given + self.tokens
    }

    /// The number of the state before a token.
    fn before(&self, token: usize) -> Option<usize> {
        (self.given + token).checked_sub(1)
    }

    /// Returns memory for tokens. It is zeros if `zeros`, or if rows follow the batch.
    fn empty<'s, S: Stored>(
        &self,
        step: &Step<'s>,
        tokens: usize,
        columns: usize,
        zeros: bool,
    ) -> Result<Tensor<'s, S>> {
        let mut out = step.empty([tokens, self.rows, columns])?;
        if zeros || self.rows > self.batch {
            elementary::fill_into(step, &mut out, 0.0)?;
        }
        Ok(out)
    }

    /// Copies samples, `[batch, .., columns]`, to tokens from `first` on.
    fn put<'s, S: Stored>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        out: &mut impl Target<'s, S>,
        first: usize,
    ) -> Result<()> {
        let [count, columns] = match *x.shape().extents() {
            [_, columns] => [1, columns],
            ref extents => [extents[1], extents[2]],
        };
        let from = Places { start: 0, strides: strides([columns, count * columns]) };
        let to = Places { start: first * self.rows * columns, strides: strides([self.rows * columns, columns]) };
        copy(step, [count, self.batch, columns].into(), (x, &from), (out, &to))
    }

    /// Returns tokens as samples, `[batch, tokens, columns]`.
    fn samples<'s, S: Stored>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        tokens: Range<usize>,
    ) -> Result<Tensor<'s, S>> {
        let columns = x.shape().extents()[2];
        let from =
            Places { start: tokens.start * self.rows * columns, strides: strides([columns, self.rows * columns]) };
        taken(step, [self.batch, tokens.len(), columns].into(), x, &from)
    }
}

/// Returns the strides of three extents, of which the last is packed.
fn strides(of: [usize; 2]) -> Vec<isize> {
    of.into_iter().chain([1]).map(|stride| stride as isize).collect()
}

/// The elements of tokens, or of states.
fn part<'b, 's, S: Stored>(x: &impl Source<'s, S>, numbers: Range<usize>) -> Lent<'b, 's, S> {
    let shape = x.shape().with(0, numbers.len());
    let each = shape.extents()[1] * shape.extents()[2];
    Lent::new(x.memory().part(numbers.start * each, numbers.len() * each), shape)
}

/// The elements of one token, or of one state.
fn one<'b, 's, S: Stored>(x: &impl Source<'s, S>, number: usize) -> Lent<'b, 's, S> {
    part(x, number..number + 1)
}

/// The elements of one token, or of one state, for writing.
fn one_mut<'b, 's, S: Stored>(x: &'b mut impl Target<'s, S>, number: usize) -> LentMut<'b, 's, S> {
    let of = one(x, number);
    LentMut::new(of.memory(), of.shape())
}

/// The values that the backward pass needs.
#[derive(Clone, Copy)]
struct Passed<'s, S: Stored> {
    sequence: Sequence,
    gates: Saved<'s, S>,
    /// h and c of all states.
    h: Saved<'s, S>,
    c: Saved<'s, S>,
}

impl<'s> Tape<'_, 's> {
    /// Computes a long short-term memory (Hochreiter and Schmidhuber, 1997) over all tokens, from
    /// the inputs' part of its gates i, f, g and o before their functions; `gates`: `[batch,
    /// tokens, 4 width]`, `weights` U: `[width, 4 width]`, `state`: h and c before the first token,
    /// `[batch, width]` each, which are 0 unless given. Returns h of every token, `[batch, tokens,
    /// width]`, and the last h and c.
    ///
    /// ```text
    /// i, f, g, o = gates + h U        c' = sigmoid(i) tanh(g) + sigmoid(f) c        h' = sigmoid(o) tanh(c')
    /// ```
    /// Two launches for each token, forward and backward. Keeps the gates, and h and c of every
    /// token.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes; [`Error::ArenaFull`].
    #[track_caller]
    pub fn lstm<S: Activation>(
        &self,
        gates: &Var<'s, S>,
        weights: Parameter,
        state: Option<[&Var<'s, S>; 2]>,
    ) -> Result<[Var<'s, S>; 3]> {
        let vars: Vec<&dyn AnyVar> =
            [gates].into_iter().chain(state.into_iter().flatten()).map(|var| var as _).collect();
        let (op, step) = (self.op_of(OP, &vars)?, self.step());
        let sequence = Sequence::new(gates.shape(), op.shape(weights)?, state)?;
        let Sequence { batch, rows, tokens, width, .. } = sequence;
        let u = op.matrix::<S>(weights)?;
        let mut sums = sequence.empty(step, tokens, 4 * width, false)?;
        sequence.put(step, gates.value(), &mut sums, 0)?;
        let mut h = sequence.empty(step, sequence.states(), width, false)?;
        let mut c = sequence.empty(step, sequence.states(), width, false)?;
        for (first, states) in state.into_iter().flatten().zip([&mut h, &mut c]) {
            sequence.put(step, first.value(), states, 0)?;
        }
        let product = Gemm::new(rows, 4 * width, width).accumulate();
        for token in 0..tokens {
            let (before, mut gates) = (sequence.before(token), one_mut(&mut sums, token));
            if let Some(before) = before {
                gemm_into(step, &product, &one(&h, before), &u, None::<&Tensor<'s>>, &mut gates)?;
            }
            let c_before = before.map(|before| one(&c, before));
            step.launch(lstm_forward {
                gates: gates.slice(),
                c: c_before.as_ref().map_or_else(Slice::empty, Source::slice),
                width,
                c_out: one_mut(&mut c, sequence.given + token).out(),
                h: one_mut(&mut h, sequence.given + token).out(),
            })?;
        }
        u.free(step);
        let (all, last) = (sequence.given..sequence.states(), sequence.states() - 1..sequence.states());
        let y = sequence.samples(step, &h, all)?;
        let [h_last, c_last] = [sequence.samples(step, &h, last.clone())?, sequence.samples(step, &c, last)?];
        let outputs = [y, h_last.reshape([batch, width])?, c_last.reshape([batch, width])?].map(Tensor::save);
        let passed = Passed { sequence, gates: sums.save(), h: h.save(), c: c.save() };
        let (gates, state) = (*gates, state.map(|state| state.map(|var| *var)));
        Ok(op.record_all(outputs, move |back, upstream| passed.backward(back, &gates, weights, state, upstream)))
    }
}

impl<'s, S: Activation> Passed<'s, S> {
    /// Computes the gradients from those of h of every token, and of the last h and c.
    fn backward(
        &self,
        back: &mut Backward<'_, '_, 's>,
        gates: &Var<'s, S>,
        weights: Parameter,
        state: Option<[Var<'s, S>; 2]>,
        [dy, dh_last, dc_last]: [Option<Tensor<'s, S>>; 3],
    ) -> Result<()> {
        let (step, Self { sequence, .. }) = (back.step(), *self);
        let Sequence { batch, rows, tokens, width, given } = sequence;
        let mut dh = sequence.empty(step, sequence.states(), width, given > 0 || dy.is_none())?;
        if let Some(dy) = dy {
            sequence.put(step, &dy, &mut dh, given)?;
            step.free(dy);
        }
        if let Some(last) = dh_last {
            let mut sum = one_mut(&mut dh, sequence.states() - 1).part(0..batch * width);
            elementary::add_assign(step, &mut sum, &last.reshape([batch * width])?)?;
        }
        let mut dc = None;
        if let Some(last) = dc_last {
            sequence.put(step, &last, dc.insert(sequence.empty(step, 1, width, false)?), 0)?;
            step.free(last);
        }

        let u = back.matrix::<S>(weights)?;
        let product = Gemm::new(rows, width, 4 * width).transpose_b().accumulate();
        let mut dgates = step.empty(self.gates.shape())?;
        for token in (0..tokens).rev() {
            let before = sequence.before(token);
            let c = before.map(|before| one(&self.c, before));
            let mut dc_before = c.map(|_| step.empty([1, rows, width])).transpose()?;
            step.launch(lstm_backward {
                gates: one(&self.gates, token).slice(),
                c: c.as_ref().map_or_else(Slice::empty, Source::slice),
                c_out: one(&self.c, given + token).slice(),
                dh: one(&dh, given + token).slice(),
                dc_out: dc.as_ref().map_or_else(Slice::empty, Source::slice),
                width,
                dgates: one_mut(&mut dgates, token).out(),
                dc: dc_before.as_mut().map_or_else(PointerMut::empty, Target::out),
            })?;
            if let Some(after) = std::mem::replace(&mut dc, dc_before) {
                step.free(after);
            }
            if let Some(before) = before {
                let (of, into) = (one(&dgates, token), &mut one_mut(&mut dh, before));
                gemm_into(step, &product, &of, &u, None::<&Tensor<'s>>, into)?;
            }
        }
        u.free(step);

        if sequence.states() > 1
            && let Some((mut into, accumulate)) = back.gradient_if_trained(weights)?
        {
            let products = sequence.states() - 1;
            let form = Gemm::new(width, 4 * width, products * rows).transpose_a();
            let form = if accumulate { form.accumulate() } else { form };
            let (h, dgates) = (part(&self.h, 0..products), part(&dgates, tokens - products..tokens));
            gemm_into(step, &form, &h, &dgates, None::<&Tensor<'s>>, &mut into)?;
        }
        if gates.wants_gradient() {
            let of_gates = sequence.samples(step, &dgates, 0..tokens)?;
            back.add(gates, of_gates)?;
        }
        if let Some([h, c]) = state {
            for (var, gradient) in [(h, Some(&dh)), (c, dc.as_ref())] {
                let gradient = gradient.expect("the first token had a state before it");
                let gradient = sequence.samples(step, gradient, 0..1)?.reshape(var.shape())?;
                back.add(&var, gradient)?;
            }
        }
        [Some(dgates), Some(dh), dc].into_iter().flatten().for_each(|scratch| step.free(scratch));
        Ok(())
    }
}
