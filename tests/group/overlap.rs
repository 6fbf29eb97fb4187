//! Exchanges of a group's gradients while the backward pass of a captured step still runs. The bits
//! are those of one rank, and only complete buckets are exchanged. An exchange that does not return
//! ends the group with an error that names the rank.

#![forbid(unsafe_code)]

use crate::support::Random;
use crate::support::rank_threads::{DEADLINE, on_ranks_with};
use std::path::Path;
use std::time::{Duration, Instant};
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::group::{Group, RankFaultKind};
use stepscope::nn::Linear;
use stepscope::ops;
use stepscope::optim::ParameterGroups;
use stepscope::parameters::GradientType;
use stepscope::prelude::*;

const LAYERS: usize = 4;
/// A layer's weights are 4 MiB, the size of the smallest bucket.
const WIDTH: usize = 1024;
const CLASSES: usize = 8;
const PARTS: usize = 4;
/// One bucket for the last layer with the head, and one for each other layer. Some first rows of a
/// layer belong to the bucket before.
const BUCKETS: u64 = LAYERS as u64;

#[derive(Debug)]
struct Deep {
    layers: Vec<Linear>,
    head: Linear,
    /// True if an op that does not declare it adds to the head's gradient after all others have
    /// run.
    adds_late: bool,
}

impl Model for Deep {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let mut x = tape.input(batch.input::<f32>(0)?);
        if self.adds_late {
            let (op, head) = (tape.op("adds late", [&x])?, self.head.weight);
            x = op.record(*x.value(), move |back, _| {
                let weights = back.weights(head)?;
                let step = back.step();
                let (mut gradient, adds) = back.gradient(head)?;
                assert!(adds, "the head's own op must run first");
                ops::add_assign(step, &mut gradient, &weights)
            });
        }
        for layer in &self.layers {
            x = layer.forward(tape, &x)?.gelu()?;
        }
        self.head.forward(tape, &x)
    }
}

/// The settings with which a group trains.
#[derive(Clone, Copy, Debug)]
struct Plan {
    shards: usize,
    captured: bool,
    adds_late: bool,
    gradients: GradientType,
}

impl Plan {
    const CAPTURED: Self = Self { shards: 2, captured: true, adds_late: false, gradients: GradientType::F32 };
}

type Points = crate::support::points::Points<WIDTH>;

/// Returns batches of this many parts with two samples each.
fn batches(count: usize, parts: usize) -> Vec<Vec<Points>> {
    let mut random = Random::new(5);
    let mut part = |_| Points { x: random.normals(2 * WIDTH), labels: random.belows(2, CLASSES as u32) };
    (0..count).map(|_| (0..parts).map(&mut part).collect()).collect()
}

impl Plan {
    /// Trains on these batches, resuming from the checkpoint if there is one, and then writes it.
    /// Returns the losses and the weights.
    fn train(
        self,
        device: &Device,
        group: &Group,
        batches: &[Vec<Points>],
        path: Option<&Path>,
    ) -> Result<(Vec<f64>, String)> {
        let mut spec = ParameterSpec::builder();
        let layers = (0..LAYERS).map(|number| Linear::new(spec.at(format!("layers.{number}")), WIDTH, WIDTH)).collect();
        let model = Deep { layers, head: Linear::new(spec.at("head"), WIDTH, CLASSES), adds_late: self.adds_late };
        let config = AdamW { clip: Some(0.05), ..AdamW::default() };
        let head = model.head.weight;
        let spec = spec.build()?.with_gradients(self.gradients);
        let state = TrainState::new(device, model, &spec, 7, config)?.with_monitored(head).with_bf16_copy()?;
        let groups = ParameterGroups::new().no_decay(ParameterGroups::is_gain_bias_or_embedding);
        let state = state.with_parameter_groups(&groups)?.in_group(group, self.shards)?;
        // An update converts 4 Mi gradients in BF16 at a time.
        let mut arena = Arena::builder(device).capacity(Capacity::mib(24)).build()?;
        let mut trainer = match self.captured {
            true => Trainer::captured(&mut arena, state, &batches[0][0])?,
            false => Trainer::eager(&mut arena, state),
        };
        if let Some(path) = path {
            trainer = trainer.checkpoint(path, None);
            if path.exists() {
                trainer.restore(&Checkpoint::load(path)?)?;
            }
        }
        let losses = batches.iter().map(|batch| Ok(trainer.update(batch)?.loss)).collect::<Result<_>>()?;
        if path.is_some() {
            trainer.save(&EpochProgress::default(), &[])?;
        }
        Ok((losses, trainer.state().parameters.sha256()?))
    }

    /// Trains on ranks whose devices have these fault plans, each in its own thread, and returns
    /// each result.
    fn on_ranks(
        self,
        kind: DeviceKind,
        plans: &[FaultPlan],
        deadline: Duration,
        (batches, path): (&[Vec<Points>], Option<&Path>),
    ) -> Vec<Result<(Vec<f64>, String)>> {
        on_ranks_with(kind, plans, deadline, |device, group| self.train(device, &group, batches, path))
    }

    /// Returns the result of all ranks, which must be the same.
    fn run(self, kind: DeviceKind, ranks: usize, batches: &[Vec<Points>], path: Option<&Path>) -> (Vec<f64>, String) {
        let outcomes = self.on_ranks(kind, &vec![FaultPlan::new(); ranks], DEADLINE, (batches, path));
        let outcomes: Vec<_> = outcomes.into_iter().map(|outcome| outcome.unwrap()).collect();
        assert!(outcomes.iter().all(|other| *other == outcomes[0]), "{self:?} by {ranks} ranks: {outcomes:?}");
        outcomes.into_iter().next().unwrap()
    }
}

fn bits_match_one_rank(kind: DeviceKind, most: usize) {
    // The last batch leaves some shards without a part.
    let mut batches = batches(2, PARTS);
    batches.push(vec![Points { x: Random::new(6).normals(WIDTH), labels: vec![3] }]);
    for (adds_late, gradients) in
        [(false, GradientType::F32), (true, GradientType::F32), (false, GradientType::Bf16), (true, GradientType::Bf16)]
    {
        let plan = |captured| Plan { shards: 4, captured, adds_late, gradients };
        let one = plan(false).run(DeviceKind::Emulated, 1, &batches, None);
        for ranks in [1, 2, 4].into_iter().filter(|&ranks| ranks <= most) {
            // A late addition only changes where a recording is split.
            for captured in [false, true].into_iter().filter(|&captured| captured || !adds_late) {
                assert_eq!(
                    plan(captured).run(kind, ranks, &batches, None),
                    one,
                    "{:?} by {ranks} ranks",
                    plan(captured)
                );
            }
        }
    }
}

#[test]
fn early_buckets_match_one_rank() {
    bits_match_one_rank(DeviceKind::Emulated, 4);
}

/// A rank keeps the optimizer state of a slice of each bucket. The file holds all of it, in the
/// order of the parameters.
#[test]
fn checkpoints_are_independent_of_slices() {
    let batches = batches(3, PARTS);
    let plan = Plan { shards: 4, ..Plan::CAPTURED };
    let (_, whole) = plan.run(DeviceKind::Emulated, 1, &batches, None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint.safetensors");
    let mut digest = String::new();
    for (batch, ranks) in batches.chunks(1).zip([2, 4, 1]) {
        digest = plan.run(DeviceKind::Emulated, ranks, batch, Some(&path)).1;
    }
    assert_eq!(digest, whole);
}

/// Returns how many exchanges of an update are queued before each of its replays. The rank's replay
/// is made to fail at that point.
fn exchanges_before_replays(plan: Plan) -> Vec<u64> {
    let (batch, counted) = (batches(1, plan.shards), FaultPlan::new());
    let outcomes = |first: &FaultPlan| {
        plan.on_ranks(DeviceKind::Emulated, &[first.clone(), FaultPlan::new()], DEADLINE, (&batch, None))
    };
    outcomes(&counted).into_iter().for_each(|outcome| drop(outcome.unwrap()));
    let exchanges = counted.count(Call::Exchange);
    // After the buckets come the squares of the norm, the monitored gradient, and the weights.
    assert_eq!(exchanges, BUCKETS + 3);
    let before = |number: u64| {
        let fails = FaultPlan::new().on(Call::Replay, number, Fault::Fail);
        assert!(outcomes(&fails)[0].is_err());
        fails.count(Call::Exchange)
    };
    (1..=counted.count(Call::Replay)).map(before).collect()
}

#[test]
fn buckets_precede_the_last_segment() {
    // A segment ends after each bucket. The gradient of the first weights is the last launch.
    let plan = Plan::CAPTURED;
    assert_eq!(exchanges_before_replays(plan), [0, 1, 2, 3]);
    assert_eq!(exchanges_before_replays(Plan { gradients: GradientType::Bf16, ..plan }), [0, 1, 2, 3]);
    // The first of two shards waits for the second.
    assert_eq!(exchanges_before_replays(Plan { shards: 4, ..plan }), [0, 0, 0, 0, 0, 1, 2, 3]);
}

/// A bucket that an op writes late is exchanged late, and later buckets wait for it, whatever the
/// op declares.
#[test]
fn late_write_delays_its_bucket() {
    let plan = Plan { adds_late: true, ..Plan::CAPTURED };
    assert_eq!(exchanges_before_replays(plan), [0]);
}

fn lost_bucket_ends_all(kind: DeviceKind) {
    const DEADLINE: Duration = Duration::from_secs(3);
    /// The extra time for a busy machine.
    const BUSY: Duration = Duration::from_secs(20);
    let (batch, plan) = (batches(1, 2), Plan::CAPTURED);
    let counted = FaultPlan::new();
    let sound = plan.on_ranks(kind, &[FaultPlan::new(), counted.clone()], self::DEADLINE, (&batch, None));
    sound.into_iter().for_each(|outcome| drop(outcome.unwrap()));
    let follows = counted.count(Call::FollowExchanges);
    for (call, number) in [
        (Call::Exchange, 1),
        (Call::Exchange, 2),
        (Call::Exchange, BUCKETS),
        (Call::FollowExchanges, 1),
        (Call::FollowExchanges, follows),
    ] {
        let stuck = FaultPlan::new().on(call, number, Fault::Never);
        let start = Instant::now();
        let outcomes = plan.on_ranks(kind, &[FaultPlan::new(), stuck.clone()], DEADLINE, (&batch, None));
        let took = start.elapsed();
        println!("{call:?} {number}: {outcomes:?} after {took:?}");
        assert_eq!(stuck.count(call), number, "{call:?} {number} was never made");
        assert!(took < DEADLINE + Duration::from_secs(2) + BUSY, "{call:?} {number}: {took:?}");
        for outcome in outcomes {
            let Err(Error::Rank(fault)) = outcome else { panic!("{call:?} {number}: {outcome:?}") };
            // Two GPUs wait for each other in step. The rank that times out first cannot know which
            // of them is stuck, and reports that.
            let stuck = kind == DeviceKind::Cuda && fault.kind == RankFaultKind::Stuck;
            assert!(stuck || (fault.rank, &fault.kind) == (1, &RankFaultKind::Late), "{call:?} {number}: {fault}");
            assert!(fault.location.contains("tests/group/overlap.rs:"), "{fault}");
        }
    }
}

#[test]
fn lost_bucket_names_its_rank() {
    lost_bucket_ends_all(DeviceKind::Emulated);
}

/// Repeats tests with NCCL.
#[cfg(feature = "cuda")]
mod two_gpus {
    use super::*;

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn early_buckets_match_emulator_bits() {
        bits_match_one_rank(DeviceKind::Cuda, 2);
    }

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn lost_bucket_names_its_rank() {
        lost_bucket_ends_all(DeviceKind::Cuda);
    }
}
