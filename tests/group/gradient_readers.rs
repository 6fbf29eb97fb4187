//! Custom ops whose backward passes read parameter gradients: the bits are the same for any number
//! of ranks, captured and eager.
//!
//! In a group, a captured step is split where gradients are complete. Gradients of other shards are
//! added to them in place while the rest of the step runs. An op must never see such a sum.

#![forbid(unsafe_code)]

use crate::support::Random;
use crate::support::rank_threads::{DEADLINE, on_ranks};
use std::cell::RefCell;
use stepscope::autograd::Backward;
use stepscope::ops;
use stepscope::optim::Sgd;
use stepscope::parameters::Initializer;
use stepscope::prelude::*;
use stepscope::tensor::Source;

/// A layer's weights are 4 MiB, the size of the smallest bucket.
const WIDTH: usize = 1024;
const SHARDS: usize = 4;

type Points = crate::support::points::Points<WIDTH>;

/// The gradient that an op reads, and the way it reads it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reads {
    /// Reads none.
    Nothing,
    /// Reads that of a layer whose backward op has run.
    Later,
    /// Reads that of a layer whose backward op has not run.
    Earlier,
    /// Reads its own, after it was written.
    Own,
    /// Reads all.
    All,
    /// Reads some rows of a layer whose backward op has run, through a copy.
    Slices,
    /// Reads that of a layer whose backward op has run, in a recomputed part.
    Recomputed,
}

struct Spying {
    first: Parameter,
    layers: [Parameter; 2],
    reads: Reads,
}

/// An op that does nothing forward. Backward, it multiplies the gradient by the result of `factor`.
fn spy<'t, 's>(
    tape: &Tape<'t, 's>,
    x: Var<'s>,
    factor: impl FnOnce(&mut Backward<'_, 't, 's>) -> Result<Tensor<'s>> + 't,
) -> Result<Var<'s>> {
    let op = tape.op("spy", [&x])?;
    let y = ops::copy(tape.step(), x.value())?.save();
    Ok(op.record(y, move |back, dy| {
        let factor = factor(back)?;
        back.add(&x, ops::scale_by(back.step(), &dy, &factor)?)
    }))
}

impl Model for Spying {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let Self { first, layers: [a, b], reads } = *self;
        let x = tape.input(batch.input::<f32>(0)?);
        let samples = x.shape().extents()[0];
        let one = tape.input(ops::fill(tape.step(), [samples, 1], 1.0)?);
        let mut start = tape.linear(&one, first, None)?;
        // Its backward pass runs last.
        if reads == Reads::Recomputed {
            start = tape.recompute(start, move |tape, start| {
                spy(tape, start, move |back| {
                    let step = back.step();
                    ops::sum(step, &back.gradient(b)?.0)
                })
            })?;
        }
        let start = spy(tape, start, move |back| {
            let step = back.step();
            match reads {
                Reads::Later => ops::sum(step, &back.gradient(b)?.0),
                Reads::Own => {
                    let (mut own, adds) = back.gradient(first)?;
                    if adds {
                        let gain = ops::fill(step, own.shape(), 0.125)?;
                        ops::add_assign(step, &mut own, &gain)?;
                    } else {
                        ops::fill_into(step, &mut own, 0.25)?;
                    }
                    ops::sum(step, &own)
                }
                Reads::All => {
                    let (all, _) = back.gradients([b, first, a])?;
                    let mut sum = ops::fill(step, [1], 0.0)?;
                    for gradient in &all {
                        ops::add_assign(step, &mut sum, &ops::sum(step, gradient)?)?;
                    }
                    Ok(sum)
                }
                Reads::Slices => {
                    let (gradient, _) = back.gradient(b)?;
                    let rows = ops::slice(step, &gradient, 0, 100..103)?;
                    ops::sum(step, &ops::copy(step, &rows)?)
                }
                Reads::Earlier | Reads::Recomputed | Reads::Nothing => ops::fill(step, [1], 0.5),
            }
        })?;
        let x = tape.linear(&x.add(start)?, a, None)?;
        // Its backward pass runs before that of `a`.
        let x = spy(tape, x, move |back| {
            let step = back.step();
            let mut factor = ops::fill(step, [1], 0.5)?;
            if reads == Reads::Earlier {
                for earlier in [first, a] {
                    // In the first part of a shard, no gradient has arrived yet: it reads zeros.
                    let (gradient, _) = back.gradient(earlier)?;
                    ops::add_assign(step, &mut factor, &ops::sum(step, &gradient)?)?;
                }
            }
            Ok(factor)
        })?;
        tape.linear(&x, b, None)
    }
}

fn part(random: &mut Random) -> Points {
    Points { x: random.normals(WIDTH), labels: random.belows(1, WIDTH as u32) }
}

/// Returns the weights after two updates, which must be the same on all ranks.
fn train(kind: DeviceKind, ranks: usize, captured: bool, reads: Reads) -> String {
    let outcomes = on_ranks((kind, ranks), DEADLINE, |device, group| {
        let mut spec = ParameterSpec::builder();
        let first = spec.add("first", [1, WIDTH], Initializer::Constant(0.1));
        let layers = ["a", "b"].map(|name| spec.add(name, [WIDTH, WIDTH], Initializer::fan_in(WIDTH)));
        let config = Sgd { learning_rate: 0.5, momentum: 0.9, ..Sgd::default() };
        let state = TrainState::new(device, Spying { first, layers, reads }, &spec.build()?, 7, config)?;
        let state = state.in_group(&group, SHARDS)?;
        let mut random = Random::new(11);
        let batches: Vec<Vec<Points>> = (0..2).map(|_| (0..SHARDS + 1).map(|_| part(&mut random)).collect()).collect();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(64)).build()?;
        let mut trainer = match captured {
            true => Trainer::captured(&mut arena, state, &batches[0][0])?,
            false => Trainer::eager(&mut arena, state),
        };
        batches.iter().try_for_each(|batch| trainer.update(batch).map(drop))?;
        trainer.state().parameters.sha256()
    });
    let digests: Vec<String> = outcomes.into_iter().map(|outcome| outcome.unwrap()).collect();
    assert!(digests.iter().all(|other| *other == digests[0]), "{reads:?}: {digests:?}");
    digests.into_iter().next().unwrap()
}

#[track_caller]
fn has_the_bits_of_one_rank(reads: Reads) {
    let on = |ranks, captured, reads| train(DeviceKind::Emulated, ranks, captured, reads);
    let one = on(1, false, reads);
    for (ranks, captured) in [(1, true), (2, false), (2, true), (4, false), (4, true)] {
        assert_eq!(on(ranks, captured, reads), one, "{reads:?}: {ranks} ranks, captured {captured}");
    }
    assert_ne!(one, on(1, false, Reads::Nothing), "{reads:?} must change the result");
}

#[test]
fn reads_of_later_layers_keep_bits() {
    has_the_bits_of_one_rank(Reads::Later);
}

#[test]
fn reads_of_earlier_layers_keep_bits() {
    has_the_bits_of_one_rank(Reads::Earlier);
}

#[test]
fn reads_of_own_gradients_keep_bits() {
    has_the_bits_of_one_rank(Reads::Own);
}

#[test]
fn reads_of_all_gradients_keep_bits() {
    has_the_bits_of_one_rank(Reads::All);
}

#[test]
fn reads_of_slices_keep_bits() {
    has_the_bits_of_one_rank(Reads::Slices);
}

#[test]
fn reads_in_recomputed_parts_keep_bits() {
    has_the_bits_of_one_rank(Reads::Recomputed);
}

/// An op that reads before any gradient has arrived reads zeros, whatever the previous update left
/// there.
#[test]
fn unwritten_gradients_read_as_zeros() {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let mut spec = ParameterSpec::builder();
    let (w, other) = (spec.add("w", [8], Initializer::ONE), spec.add("other", [8, 4], Initializer::ONE));
    let stack = spec.add_stack(2, |number| format!("s.{number}"), [4], Initializer::ONE);
    let weights = Parameters::new(&device, &spec.build().unwrap(), 7).unwrap();
    let mut gradients = Gradients::zeros(&weights).unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    for _ in 0..2 {
        let stack = &stack;
        let values = arena.step(|step| {
            let seen = RefCell::new(Vec::new());
            let tape = Tape::new(step, &weights);
            let x = tape.input(ops::fill(step, [8], 1.0)?);
            let op = tape.op("reads", [&x])?;
            let loss = ops::sum(step, x.value())?.save();
            let seen = &seen;
            let loss = op.record(loss, move |back, _| {
                let step = back.step();
                let mut seen = seen.borrow_mut();
                seen.push(ops::sum(step, &back.gradient(w)?.0)?);
                let (both, adds) = back.gradients([other, w])?;
                assert_eq!(adds, [false, true]);
                seen.push(ops::sum(step, &both[0])?);
                let (mut members, adds) = back.stack_gradient(stack)?;
                assert!(!adds);
                seen.push(ops::sum(step, &members)?);
                ops::fill_into(step, &mut members, 3.0)?;
                ops::fill_into(step, &mut back.gradient(w)?.0, 5.0)?;
                ops::fill_into(step, &mut back.gradient(other)?.0, 7.0)
            });
            tape.backward_overwrite(&loss, &mut gradients)?;
            seen.take().iter().map(|sum| step.read_scalar(sum)).collect::<Result<Vec<f32>>>()
        });
        assert_eq!(values.unwrap(), [0.0; 3]);
    }
}

/// Runs the test with NCCL.
#[cfg(feature = "cuda")]
mod two_gpus {
    use super::*;

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn reads_of_gradients_keep_bits() {
        for reads in [Reads::Later, Reads::Earlier, Reads::Own, Reads::All, Reads::Slices, Reads::Recomputed] {
            let one = train(DeviceKind::Emulated, 1, false, reads);
            for (ranks, captured) in [(1, true), (2, false), (2, true)] {
                let got = train(DeviceKind::Cuda, ranks, captured, reads);
                assert_eq!(got, one, "{reads:?}: {ranks} ranks, captured {captured}");
            }
        }
    }
}
