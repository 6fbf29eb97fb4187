//! Groups whose ranks keep slices of the weights, state and gradients. The bits are those of a group
//! whose ranks keep everything, and what cannot be done is refused by name.

#![forbid(unsafe_code)]

use crate::support::Random;
use crate::support::rank_threads::{DEADLINE, Recorder, on_ranks};
use std::path::Path;
use std::time::Duration;
use stepscope::group::Group;
use stepscope::nn::{Linear, Mlp};
use stepscope::ops::Activation;
use stepscope::optim::{Muon, ParameterGroups, UpdateRule};
use stepscope::parameters::{GradientType, Initializer, MasterType, ParameterSpecBuilder, StateType};
use stepscope::prelude::*;

const WIDTH: usize = 64;
/// Of 33 chunks of a block, rank 0 of 2 keeps 20, and rank 3 of 4 none.
const HIDDEN: usize = 1024;
const BLOCKS: usize = 3;
const CLASSES: usize = 8;
const SHARDS: usize = 4;

type Points = crate::support::points::Points<WIDTH>;

/// Residual blocks between two uses of one layer, whose gradient is a sum of two.
#[derive(Debug)]
struct Deep {
    shared: Linear,
    blocks: Vec<Mlp>,
    head: Linear,
    plan: Plan,
}

impl Model for Deep {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let x = self.shared.forward(tape, &tape.input(batch.input::<f32>(0)?))?;
        let x = match self.plan.small || self.plan.copied {
            true => tape.to_f32(&self.through_blocks(tape, tape.to_bf16(&x)?)?)?,
            false => self.through_blocks(tape, x)?,
        };
        let x = self.shared.forward(tape, &x)?;
        let x = if self.plan.copied { tape.dropout(&x, 0.25)? } else { x };
        self.head.forward(tape, &x)
    }
}

impl Deep {
    /// Runs the blocks, which read weights in S.
    fn through_blocks<'s, S: Activation>(&self, tape: &Tape<'_, 's>, mut x: Var<'s, S>) -> Result<Var<'s, S>> {
        for block in &self.blocks {
            let block = *block;
            x = match self.plan.recomputes {
                true => tape.recompute(x, move |tape, x| block.forward_residual(tape, &x, &x))?,
                false => block.forward_residual(tape, &x, &x)?,
            };
        }
        Ok(x)
    }
}

/// The settings of a run.
#[derive(Clone, Copy, Debug)]
struct Plan {
    sharded: bool,
    recomputes: bool,
    /// Trains with split masters, moments in 8 bits, and gradients and blocks in BF16.
    small: bool,
    /// Trains with a BF16 copy of the weights, blocks in BF16, and dropout.
    copied: bool,
}

const PLAIN: Plan = Plan { sharded: false, recomputes: false, small: false, copied: false };
const SHARDED: Plan = Plan { sharded: true, ..PLAIN };

impl Plan {
    fn state<R: UpdateRule>(self, device: &Device, group: &Group, rule: R) -> Result<TrainState<Deep, R>> {
        let mut spec = ParameterSpec::builder();
        let shared = Linear::new(spec.at("shared"), WIDTH, WIDTH);
        let blocks = (0..BLOCKS).map(|number| Mlp::new(spec.at(format!("blocks.{number}")), WIDTH, HIDDEN, WIDTH));
        let blocks = blocks.collect();
        let model = Deep { shared, blocks, head: Linear::new(spec.at("head"), WIDTH, CLASSES), plan: self };
        let spec = spec.build()?;
        let small = |spec: ParameterSpec| {
            spec.with_masters(MasterType::Split).with_state(StateType::Bits8).with_gradients(GradientType::Bf16)
        };
        let spec = if self.small { small(spec) } else { spec };
        let state = match self.sharded {
            true => TrainState::sharded(device, model, &spec, 7, rule, group, SHARDS)?,
            false => TrainState::new(device, model, &spec, 7, rule)?,
        };
        let groups = ParameterGroups::new().no_decay(ParameterGroups::is_gain_bias_or_embedding);
        let state = state.with_parameter_groups(&groups)?;
        let state = if self.copied { state.with_dropout(11)?.with_bf16_copy()? } else { state };
        if self.sharded { Ok(state) } else { state.in_group(group, SHARDS) }
    }

    /// Trains on batches, from the checkpoint if there is one, and writes it after each update.
    fn train(self, device: &Device, group: &Group, batches: &[Vec<Points>], path: Option<&Path>) -> Result<Trained> {
        let state = self.state(device, group, adamw())?;
        let mut arena = arena(device);
        let mut trainer = Trainer::eager(&mut arena, state);
        let mut progress = EpochProgress::default();
        if let Some(path) = path {
            trainer = trainer.checkpoint(path, Some(1));
            if path.exists() {
                progress = trainer.restore(&Checkpoint::load(path)?)?;
            }
        }
        let mut recorder = Recorder::default();
        let left = batches.iter().skip(progress.updates as usize).cloned().map(Ok);
        trainer.fit_with(left, &mut progress, &mut recorder)?;
        let (evaluated, figures) = (trainer.evaluate(&batches[0][0])?, recorder.0.iter());
        let figures = figures.map(|update| (update.loss, update.gradient_l2)).collect();
        Ok((figures, evaluated, trainer.state().parameters.sha256()?))
    }

    /// Returns the result of all ranks, which must be the same.
    fn run(self, ranks: usize, batches: &[Vec<Points>], path: Option<&Path>) -> Trained {
        let outcomes = on_ranks((DeviceKind::Emulated, ranks), DEADLINE, |device, group| {
            self.train(device, &group, batches, path)
        });
        let mut outcomes = outcomes.into_iter().map(|outcome| outcome.unwrap());
        let first = outcomes.next().unwrap();
        assert!(outcomes.all(|other| other == first), "{self:?}: the ranks have different results");
        first
    }
}

/// The loss and the norm of each update, a loss after them, and the digest of the weights.
type Trained = (Vec<(f64, Option<f64>)>, f64, String);

fn adamw() -> AdamW {
    AdamW { learning_rate: 0.01, clip: Some(0.05), ..AdamW::default() }
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap()
}

fn batches(count: usize) -> Vec<Vec<Points>> {
    let mut random = Random::new(5);
    let mut part = |number| Points {
        x: random.normals((2 + number % 2) * WIDTH),
        labels: random.belows(2 + number % 2, CLASSES as u32),
    };
    (0..count).map(|_| (0..SHARDS).map(&mut part).collect()).collect()
}

#[test]
fn sharded_ranks_keep_bits() {
    let batches = batches(2);
    let small = Plan { small: true, ..PLAIN };
    for plan in [PLAIN, small, Plan { copied: true, ..PLAIN }] {
        let whole = plan.run(1, &batches, None);
        assert_eq!(plan.run(2, &batches, None), whole, "{plan:?} by 2 ranks");
        for recomputes in [false, true] {
            let plan = Plan { sharded: true, recomputes, ..plan };
            for ranks in [2, 4] {
                assert_eq!(plan.run(ranks, &batches, None), whole, "{plan:?} by {ranks} ranks");
            }
        }
    }
}

/// Checks that a checkpoint of sharded ranks has the bytes of any other, and continues anywhere.
#[test]
fn sharded_checkpoints_resume_anywhere() {
    let (batches, folder) = (batches(4), tempfile::tempdir().unwrap());
    for small in [false, true] {
        let (plain, sharded) = (Plan { small, ..PLAIN }, Plan { small, ..SHARDED });
        let [path, whole_path] =
            ["parts", "whole"].map(|name| folder.path().join(format!("{name}{small}.safetensors")));
        let whole = plain.run(1, &batches, Some(&whole_path));
        for (made, (plan, ranks)) in [(sharded, 2), (sharded, 4), (plain, 2), (sharded, 2)].into_iter().enumerate() {
            let (figures, evaluated, sha) = plan.run(ranks, &batches[..=made], Some(&path));
            assert_eq!(figures, whole.0[made..=made], "{plan:?} by {ranks} ranks");
            assert_eq!((evaluated, sha) == (whole.1, whole.2.clone()), made == 3, "{plan:?} by {ranks} ranks");
        }
        assert!(std::fs::read(&path).unwrap() == std::fs::read(&whole_path).unwrap(), "the files differ");
    }
}

/// Checks that the ranks together keep everything once, and a rank two more blocks.
#[test]
fn a_rank_keeps_its_share() {
    for small in [false, true] {
        let bytes = |ranks: usize, sharded: bool| -> Vec<[usize; 5]> {
            let of_ranks = on_ranks((DeviceKind::Emulated, ranks), DEADLINE, |device, group| {
                let state = Plan { small, sharded, ..PLAIN }.state(device, &group, adamw())?;
                let (parameters, sum) = (&state.parameters, |bytes: Vec<usize>| bytes.into_iter().sum::<usize>());
                let own = sum(parameters.regions().iter().map(|region| region.bytes()).collect());
                let moments = sum(state.optimizer.state().iter().map(|region| region.bytes()).collect());
                let starts =
                    |name: &str| parameters.spec().entries().iter().find(|entry| entry.name().starts_with(name));
                let [first, second] = ["blocks.0.", "blocks.1."].map(|name| starts(name).expect("a block").start());
                let gradients = state.gradients.region()?.bytes();
                Ok([own, moments, gradients, parameters.trained_bytes() - own, second - first])
            });
            of_ranks.into_iter().map(|bytes| bytes.unwrap()).collect()
        };
        let (whole, parts) = (bytes(1, false)[0], bytes(2, true));
        for (at, whole) in whole.into_iter().enumerate().take(3) {
            assert_eq!(parts[0][at] + parts[1][at], whole, "small: {small}, region {at}");
            assert!(parts.iter().all(|part| part[at] * 10 <= whole * 7), "small: {small}, region {at}: {parts:?}");
        }
        let weight = if small { 3 } else { 4 };
        let slots = |part: &[usize; 5]| part[3] == 2 * weight * part[4];
        assert!(whole[3] == 0 && parts.iter().all(slots), "small: {small}: {parts:?}");
    }
}

/// Returns the error of each rank of two.
fn errors<T: Send>(program: impl Fn(&Device, Group) -> Result<T> + Sync) -> Vec<String> {
    let outcomes = on_ranks((DeviceKind::Emulated, 2), Duration::from_secs(5), program);
    outcomes.into_iter().map(|outcome| outcome.err().expect("an error").to_string()).collect()
}

#[track_caller]
fn assert_named(errors: &[String], names: &[&str]) {
    for error in errors {
        assert!(names.iter().all(|name| error.contains(name)), "{names:?}: {error}");
    }
}

#[test]
fn captured_steps_are_refused() {
    let batches = batches(1);
    let errors = errors(|device, group| {
        let state = SHARDED.state(device, &group, adamw())?;
        let mut arena = arena(device);
        Trainer::captured(&mut arena, state, &batches[0][1]).map(drop)
    });
    assert_named(&errors, &["an eager step", "`Trainer::eager`"]);
}

#[test]
fn whole_gradients_are_refused() {
    let batches = batches(1);
    let accumulated = errors(|device, group| {
        let state = SHARDED.state(device, &group, adamw())?;
        Trainer::eager(&mut arena(device), state).accumulate(&batches[0]).map(drop)
    });
    assert_named(&accumulated, &["accumulate", "no rank has all gradients"]);
    let monitored = errors(|device, group| {
        let state = SHARDED.state(device, &group, adamw())?;
        let head = state.model.head.weight;
        Trainer::eager(&mut arena(device), state.with_monitored(head)).update(&batches[0]).map(drop)
    });
    assert_named(&monitored, &["`with_monitored`"]);
    let muon = errors(|device, group| SHARDED.state(device, &group, Muon::default()).map(drop));
    assert_named(&muon, &["`muon`", "`in_group`"]);
}

#[test]
fn parts_must_be_shards() {
    let batch = batches(2).concat();
    let errors = errors(|device, group| {
        let state = SHARDED.state(device, &group, adamw())?;
        Trainer::eager(&mut arena(device), state).update(&batch).map(drop)
    });
    assert_named(&errors, &["a batch of 4 parts", "8 parts"]);
}

#[test]
fn a_lend_needs_an_op() {
    let errors = errors(|device, group| {
        let state = SHARDED.state(device, &group, adamw())?;
        arena(device).step(|step| state.parameters.lend(step, state.model.head.weight).map(drop))
    });
    assert_named(&errors, &["lend", "an op of a tape"]);
}

/// Checks that an op cannot read more blocks than there are slots, which would overwrite the first.
#[test]
fn an_op_reads_two_blocks() {
    let names = ["a.0.w", "a.1.w", "a.2.w"];
    let errors = errors(|device, group| {
        let mut spec = ParameterSpec::builder();
        let parameters = names.map(|name| spec.add(name, [64], Initializer::ONE));
        let plan = SHARDED;
        let linear = |spec: &mut ParameterSpecBuilder, name| Linear::new(spec.at(name), 1, 1);
        let (shared, head) = (linear(&mut spec, "shared"), linear(&mut spec, "head"));
        let model = Deep { shared, blocks: Vec::new(), head, plan };
        let state = TrainState::sharded(device, model, &spec.build()?, 7, adamw(), &group, SHARDS)?;
        arena(device).step(|step| {
            let tape = Tape::new(step, &state.parameters);
            let op = tape.op("three", [])?;
            let lent = parameters.map(|parameter| op.weights(parameter).map(drop));
            assert!(lent[0].is_ok() && lent[1].is_ok());
            lent.into_iter().collect::<Result<Vec<_>>>().map(drop)
        })
    });
    assert_named(&errors, &["three", "at most 2 blocks"]);
}

#[test]
fn ranks_must_shard_alike() {
    let errors = errors(|device, group| {
        let plan = Plan { sharded: group.rank() == 1, ..PLAIN };
        plan.state(device, &group, adamw()).map(drop)
    });
    assert_named(&errors, &["rank 1", "in_group", "sharded"]);
}

/// Returns the error of rank 0, which evaluates while rank 1 does something else.
fn error_without(rank_1: impl Fn() -> Result<f64> + Sync) -> String {
    let batches = batches(1);
    let outcomes = on_ranks((DeviceKind::Emulated, 2), Duration::from_secs(5), |device, group| {
        let state = SHARDED.state(device, &group, adamw())?;
        let (mut arena, rank) = (arena(device), group.rank());
        let mut trainer = Trainer::eager(&mut arena, state);
        trainer.update(&batches[0])?;
        if rank == 1 { rank_1() } else { trainer.evaluate(&batches[0][0]) }
    });
    let error = outcomes.into_iter().next().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Rank(fault) if fault.rank == 1), "{error}");
    error.to_string()
}

/// Checks that a rank is named that ends, or is late, while another gathers weights.
#[test]
fn missing_ranks_are_named() {
    let ended = error_without(|| Ok(0.0));
    assert!(ended.contains("has left the group") && ended.contains("gather_weights"), "{ended}");
    let late = error_without(|| {
        std::thread::sleep(Duration::from_secs(8));
        Ok(0.0)
    });
    assert!(late.contains("is late") && late.contains("gather_weights"), "{late}");
}

/// Checks that each rank keeps its slices of weights that a program writes, and gathers them again.
#[test]
fn written_weights_are_gathered() {
    for small in [false, true] {
        let outcomes = on_ranks((DeviceKind::Emulated, 4), DEADLINE, |device, group| {
            let plan = |sharded| Plan { small, sharded, ..PLAIN };
            let mut state = plan(true).state(device, &group, adamw())?;
            let mut whole = plan(false).state(device, &group, adamw())?;
            assert_eq!(state.parameters.sha256()?, whole.parameters.sha256()?, "as drawn");
            let of = |state: &TrainState<Deep>| (state.model.blocks[1].down.weight, state.model.blocks[1].down.bias);
            let (weight, bias) = of(&state);
            let values: Vec<f32> = (0..WIDTH * HIDDEN).map(|at| at as f32 * 0.001 - 7.0).collect();
            state.parameters.write(weight, &values)?;
            state.parameters.write(bias.expect("a bias"), &values[..WIDTH])?;
            let (weight, bias) = of(&whole);
            whole.parameters.write(weight, &values)?;
            whole.parameters.write(bias.expect("a bias"), &values[..WIDTH])?;
            assert!(state.parameters.read_flat()? == whole.parameters.read_flat()?, "as written");
            assert_eq!(state.parameters.sha256()?, whole.parameters.sha256()?, "as written");
            Ok(())
        });
        outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    }
}
