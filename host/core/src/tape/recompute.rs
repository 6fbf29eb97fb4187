//! Recompute (Chen et al., 2016): a part of the forward pass keeps only its inputs and runs again
//! in the backward pass.
//!
//! ```text
//!             front of the arena                            back of the arena
//! forward     | x | ..                                      | what the closure makes |
//!             | x | .. | y |          <- copied out            gone
//! backward    | x | .. | y | .. | dy |                      | the same again | its gradients |
//!             | x | .. | y | .. | dx |  <- in dy's place       gone
//! ```
//!
//! Invariant: everything that the closure's ops make is freed when the closure ends, in both runs.
//! Nothing can reach it then: the closure's brand is fresh, and the closure owns what it uses, so
//! it holds nothing of a step. Gradients are summed in the same order as without recompute, because
//! the second run continues from its inputs' gradients so far.

#![forbid(unsafe_code)]

use super::backward::{Backward, Record, Upstream};
use super::recompute_input::{Lender, OP, RecomputeInput};
use super::record::{Tape, TapeContext};
use super::var::{Var, check};
use crate::elementary;
use crate::error::{Error, Result};
use crate::step::{Numerics, Step};
use crate::tensor::{AnyTensor, Lent, Saved, Shape, Source, Stored, Tensor};
use std::panic::Location;

impl<'t, 's> Tape<'t, 's> {
    /// `y = run(kept)`, where the step keeps only `kept` and y. Everything else that `run` makes in
    /// the forward pass is freed when it returns. It is computed again when the backward pass
    /// reaches it. The result y and all gradients have the same bits as without recompute.
    ///
    /// Memory: a stack of recomputed blocks takes one input per block, and all intermediates of one
    /// block at a time. Time: one more forward pass, and a copy of y. PyTorch calls this
    /// `torch.utils.checkpoint`.
    ///
    /// `run` owns what it uses (clone a layer into it, which is a few handles), and reaches only
    /// what it is lent of the step. It runs twice and must do the same both times. It may recompute
    /// parts of its own.
    ///
    /// ```
    /// use stepscope::nn::Mlp;
    /// use stepscope::prelude::*;
    ///
    /// # fn main() -> Result<()> {
    /// # let device = Device::open(DeviceKind::Emulated)?;
    /// let mut spec = ParameterSpec::builder();
    /// let blocks: Vec<Mlp> = (0..4).map(|n| Mlp::new(spec.at(format!("blocks.{n}")), 8, 32, 8)).collect();
    /// let weights = Parameters::new(&device, &spec.build()?, 7)?;
    /// let mut gradients = Gradients::zeros(&weights)?;
    /// let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    /// arena.step(|step| {
    ///     let tape = Tape::new(step, &weights);
    ///     let mut x = tape.input(step.upload(&[0.5; 3 * 8], [3, 8])?);
    ///     for block in &blocks {
    ///         let block = *block;
    ///         x = tape.recompute(x, move |tape, x| block.forward_residual(tape, &x, &x))?;
    ///     }
    ///     let loss = tape.mean(&x)?;
    ///     tape.backward_overwrite(&loss, &mut gradients)
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Misuse`] for a variable of another tape and, in the backward pass, when the second
    /// run differs from the first.
    #[track_caller]
    pub fn recompute<K: RecomputeInput<'s> + 't, S: Stored>(
        &self,
        kept: K,
        run: impl for<'i> Fn(&Tape<'_, 'i>, K::Lent<'i>) -> Result<Var<'i, S>> + 'static,
    ) -> Result<Var<'s, S>> {
        let [y] = self.recompute_all(kept, move |tape, lent| Ok([run(tape, lent)?]))?;
        Ok(y)
    }

    /// Recomputes a closure with several results; see [`Tape::recompute`].
    #[track_caller]
    pub fn recompute_all<K: RecomputeInput<'s> + 't, S: Stored, const N: usize>(
        &self,
        kept: K,
        run: impl for<'i> Fn(&Tape<'_, 'i>, K::Lent<'i>) -> Result<[Var<'i, S>; N]> + 'static,
    ) -> Result<[Var<'s, S>; N]> {
        let site = Location::caller();
        let block = Block { kept, run, around: self.around()?, numerics: self.step.numerics() };
        let first = self.open.outputs();
        let (results, trace, numerics) = self.step.aside(|step, exit| {
            let tape = block.around.tape(step);
            let (results, inputs) = block.run(&tape)?;
            self.note_uses_of(&tape);
            let trace = Trace::of(&tape, &results);
            let outer = exit.leave();
            let before = outer.region().attribute(Some(site));
            let mut copied: Vec<(usize, Var<'s, S>)> = Vec::new();
            let mut take_out = |result: &Var<'_, S>| {
                let (tape, region) = (self.identity, self.step.region());
                let known = result.output.and_then(|number| copied.iter().find(|(of, _)| *of == number));
                match (result.output, known) {
                    (_, Some((_, var))) => Ok(*var),
                    (Some(number), None) if number < inputs.len() => {
                        let value = Saved::new(result.value.memory(), result.shape());
                        Ok(Var { value, region, tape, output: Some(inputs[number]), constant: false })
                    }
                    (Some(number), None) => {
                        let output = Some(first + copied.len());
                        let value = copy(outer, &result.value)?.save();
                        let var = Var { value, region, tape, output, constant: false };
                        copied.push((number, var));
                        Ok(var)
                    }
                    (None, None) => {
                        let value = copy(outer, &result.value)?.save();
                        Ok(Var { value, region, tape, output: None, constant: result.constant })
                    }
                }
            };
            let taken = results.iter().map(&mut take_out).collect::<Result<Vec<_>>>();
            outer.region().attribute(before);
            let made = copied.into_iter().map(|(number, _)| number).collect();
            Ok((taken?, Trace { made, ..trace }, step.numerics()))
        })?;
        // The tape continues as if the closure's ops had been queued on it.
        self.step.set_numerics(numerics);
        if let (Some(draws), Some(calls)) = (self.draws.get(), trace.calls) {
            draws.skip_to(calls);
        }
        let Ok(results) = <[Var<'s, S>; N]>::try_from(results) else { unreachable!("as many as the closure gave") };
        if let Some(result) = results.iter().find(|result| result.output == Some(first)) {
            let (shape, outputs) = (result.shape(), trace.made.len());
            let again = move |back: &mut Backward<'_, 't, 's>, upstream: Vec<_>| block.again(back, upstream, &trace);
            self.push(outputs, |first| Record { op: OP, site, first, shape, backward: Box::new(again) });
        }
        Ok(results)
    }
}

/// A closure with everything that a run of it depends on.
struct Block<'t, 's, K, F> {
    kept: K,
    run: F,
    around: TapeContext<'t, 's>,
    /// The step's settings when the first run began.
    numerics: Numerics,
}

impl<'t, 's, K: RecomputeInput<'s>, F> Block<'t, 's, K, F> {
    /// Runs the closure on its own tape. Returns its results and, for each input that wants a
    /// gradient, its number on the enclosing tape.
    fn run<'i, S: Stored, const N: usize>(&self, tape: &Tape<'_, 'i>) -> Result<([Var<'i, S>; N], Vec<usize>)>
    where
        F: for<'a> Fn(&Tape<'_, 'a>, K::Lent<'a>) -> Result<[Var<'a, S>; N]>,
    {
        let tapes = [self.around.identity, tape.identity];
        let mut lender = Lender { region: tape.step.region(), tapes, outputs: Vec::new() };
        let lent = self.kept.lend(&mut lender)?;
        tape.open.begin_after(lender.outputs.len());
        let results = (self.run)(tape, lent)?;
        results.iter().try_for_each(|result| check(result, OP, tape.identity))?;
        Ok((results, lender.outputs))
    }

    /// Runs the closure again, and then its records backwards.
    fn again<S: Stored, const N: usize>(
        &self,
        back: &mut Backward<'_, 't, 's>,
        upstream: Vec<Upstream<'s>>,
        first: &Trace,
    ) -> Result<()>
    where
        F: for<'a> Fn(&Tape<'_, 'a>, K::Lent<'a>) -> Result<[Var<'a, S>; N]>,
    {
        let around = back.step();
        around.aside(|step, exit| {
            // Its ops appear under their own lines in the reports.
            let site = step.region().attribute(None);
            step.set_numerics(self.numerics);
            let tape = self.around.tape(step);
            let (results, inputs) = self.run(&tape)?;
            first.check(&Trace::of(&tape, &results))?;
            step.set_numerics(around.numerics());

            let identity = tape.identity;
            let (records, outputs, first_uses) = tape.into_records();
            let mut pending: Vec<_> = (0..outputs).map(|_| Upstream::Nothing).collect();
            // Tensors of the enclosing step, which the inner pass uses exclusively until it ends.
            let mut given: Vec<AnyTensor<'s>> = Vec::new();
            let mut give = |upstream: Upstream<'s>| match upstream {
                Upstream::Nothing => Upstream::Nothing,
                Upstream::Loss(gradient) => Upstream::Loss(gradient),
                Upstream::Sum(sum) => {
                    given.push(sum.rebrand());
                    Upstream::Sum(sum.rebrand())
                }
            };
            for (place, &output) in pending.iter_mut().zip(&inputs) {
                *place = give(std::mem::replace(&mut back.pending[output], Upstream::Nothing));
            }
            for (&number, upstream) in first.made.iter().zip(upstream) {
                pending[number] = give(upstream);
            }
            let pending = back.run_within(step, identity, pending, (records, first_uses))?;

            step.region().attribute(site);
            let outer = exit.leave();
            // Gradients that are in the enclosing step's tensors stay there. Then the others are
            // copied out, into tensors that are no longer needed.
            let mut left = Vec::new();
            for (output, upstream) in inputs.into_iter().zip(pending) {
                match upstream {
                    Upstream::Sum(sum) => match given.iter().position(|given| given.address() == sum.address()) {
                        Some(place) => {
                            given.swap_remove(place);
                            back.pending[output] = Upstream::Sum(sum.rebrand());
                        }
                        None => left.push((output, sum)),
                    },
                    Upstream::Loss(gradient) => back.pending[output] = Upstream::Loss(gradient),
                    Upstream::Nothing => {}
                }
            }
            left.into_iter().try_for_each(|(output, sum)| {
                back.pending[output] = Upstream::Sum(match sum {
                    AnyTensor::F32(sum) => AnyTensor::F32(copy_over(outer, &sum, &mut given)?),
                    AnyTensor::Bf16(sum) => AnyTensor::Bf16(copy_over(outer, &sum, &mut given)?),
                });
                Ok(())
            })
        })
    }
}

/// Copies a tensor of a nested scope into the step, into a tensor from `free` of the same shape if
/// there is one.
fn copy_over<'s, S: Stored>(
    step: &Step<'s>,
    inner: &Tensor<'_, S>,
    free: &mut Vec<AnyTensor<'s>>,
) -> Result<Tensor<'s, S>> {
    let shape = inner.shape();
    while let Some(place) = free.iter().position(|free| free.shape() == shape) {
        if let Some(mut out) = S::restore(free.swap_remove(place)) {
            elementary::copy_into(step, &Lent::new(inner.memory(), shape), &mut out)?;
            return Ok(out);
        }
    }
    copy(step, inner)
}

/// Copies a tensor of a nested scope into the step.
fn copy<'s, 'i, S: Stored>(step: &Step<'s>, inner: &impl Source<'i, S>) -> Result<Tensor<'s, S>> {
    elementary::copy(step, &Lent::new(inner.memory(), inner.shape()))
}

/// The trace of a run, by which the second run is compared with the first.
#[derive(Debug)]
struct Trace {
    /// The name of each op, and the number and shape of its first output.
    ops: Vec<(&'static str, usize, Shape)>,
    /// The number and shape of each result.
    results: Vec<(Option<usize>, Shape)>,
    /// The number of calls that asked for random numbers.
    calls: Option<u32>,
    /// The results that ops made, each once, in the order of the enclosing outputs.
    made: Vec<usize>,
}

impl Trace {
    fn of<S: Stored>(tape: &Tape<'_, '_>, results: &[Var<'_, S>]) -> Self {
        let ops = tape.recorded();
        let results = results.iter().map(|result| (result.output, result.shape())).collect();
        Self { ops, results, calls: tape.draws.get().map(|draws| draws.calls()), made: Vec::new() }
    }

    /// Returns an error unless the second run did the same as this one.
    fn check(&self, second: &Self) -> Result<()> {
        let differ = |expected: String, got: String| {
            let expected = format!("a closure that does the same in both runs: {expected}");
            Err(Error::misuse(OP, expected, got))
        };
        let op = |(name, _, shape): &(&str, usize, Shape)| format!("`{name}` {shape}");
        let places = self.ops.len().max(second.ops.len());
        if let Some(place) = (0..places).find(|&place| self.ops.get(place) != second.ops.get(place)) {
            let [expected, got] = [self, second].map(|run| run.ops.get(place).map_or_else(|| "none".into(), op));
            return differ(format!("{expected} as op {place}"), got);
        }
        if self.results != second.results {
            let [expected, got] = [self, second].map(|run| format!("{:?}", run.results));
            return differ(format!("the results {expected}"), got);
        }
        if self.calls != second.calls {
            let [expected, got] = [self, second].map(|run| run.calls.unwrap_or(0).to_string());
            return differ(format!("{expected} draws of random numbers"), got);
        }
        Ok(())
    }
}
