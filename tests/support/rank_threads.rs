//! Groups whose ranks are threads of a test, and the model that they train.
//!
//! Invariant: all ranks get the same batches, and must give the same results.

#![allow(dead_code, reason = "each test binary uses its own part")]

use crate::support::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use stepscope::check::faults::FaultPlan;
use stepscope::group::{Group, GroupConfig};
use stepscope::nn::{Linear, Mlp};
use stepscope::optim::{ParameterGroups, Schedule};
use stepscope::parameters::{GradientType, MasterType, StateType};
use stepscope::prelude::*;
use stepscope::train::{Observer, Update};

pub(crate) const INPUTS: usize = 12;
pub(crate) const CLASSES: usize = 3;
/// The parts of each batch, some of which are a sample longer than others.
pub(crate) const PARTS: usize = 16;
pub(crate) const UPDATES: usize = 4;

#[derive(Debug)]
pub(crate) struct Classifier {
    mlp: Mlp,
    head: Linear,
    drops: bool,
}

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let hidden = self.mlp.forward(tape, &tape.input(batch.input::<f32>(0)?))?;
        let hidden = if self.drops { tape.dropout(&hidden, 0.25)? } else { hidden };
        self.head.forward(tape, &hidden)
    }
}

/// The types in which a model is stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    /// All in f32.
    Full,
    /// Split masters, and moments in 8 bits.
    Small,
    /// As `Small`, and gradients in BF16.
    Smallest,
}

/// The settings with which a group trains.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) ranks: usize,
    pub(crate) shards: usize,
    pub(crate) captured: bool,
    /// Enables dropout and a BF16 copy of the weights.
    pub(crate) more: bool,
    pub(crate) memory: Memory,
}

impl Plan {
    pub(crate) fn state(self, device: &Device) -> Result<TrainState<Classifier>> {
        let mut spec = ParameterSpec::builder();
        // 18 chunks of 4096 weights: of 8 ranks, 5 have a slice.
        let mlp = Mlp::new(spec.at("mlp"), INPUTS, 256, 256);
        let model = Classifier { mlp, head: Linear::new(spec.at("head"), 256, CLASSES), drops: self.more };
        let schedule = Schedule::cosine(2, 10, 0.1);
        let config = AdamW { learning_rate: 0.002, clip: Some(0.05), schedule, ..AdamW::default() };
        let head = model.head.weight;
        let small = |spec: ParameterSpec| spec.with_masters(MasterType::Split).with_state(StateType::Bits8);
        let spec = match self.memory {
            Memory::Full => spec.build()?,
            Memory::Small => small(spec.build()?),
            Memory::Smallest => small(spec.build()?).with_gradients(GradientType::Bf16),
        };
        let state = TrainState::new(device, model, &spec, 7, config)?.with_monitored(head);
        let groups = ParameterGroups::new().no_decay(ParameterGroups::is_gain_bias_or_embedding);
        let state = state.with_parameter_groups(&groups)?;
        if self.more { state.with_dropout(11)?.with_bf16_copy() } else { Ok(state) }
    }
}

pub(crate) type Points = crate::support::points::Points<INPUTS>;

impl Points {
    pub(crate) fn twice(self) -> Self {
        Self { x: [&self.x[..], &self.x].concat(), labels: [&self.labels[..], &self.labels].concat() }
    }
}

/// Returns the batches of a run, of parts with the lengths from `lens`.
pub(crate) fn batches(lens: impl Fn(usize) -> usize) -> Vec<Vec<Points>> {
    let mut random = Random::new(3);
    let mut part = |samples: usize| {
        let labels = random.belows(samples, CLASSES as u32);
        let near = |label: u32, random: &mut Random| random.normals(INPUTS).into_iter().map(move |x| x + label as f32);
        Points { x: labels.iter().flat_map(|&label| near(label, &mut random)).collect(), labels }
    };
    (0..UPDATES).map(|_| (0..PARTS).map(|number| part(lens(number))).collect()).collect()
}

pub(crate) fn uneven() -> Vec<Vec<Points>> {
    let mut batches = batches(|number| 3 + number % 2);
    // The last batch has fewer samples than shards.
    let short =
        batches[0][..5].iter().map(|part| Points { x: part.x[..INPUTS].into(), labels: part.labels[..1].into() });
    batches.push(short.collect());
    batches
}

/// Runs a program on each rank of a group, in a thread and on a device of its own, and returns the
/// ranks' results.
pub(crate) fn on_ranks<T: Send>(
    (kind, ranks): (DeviceKind, usize),
    deadline: Duration,
    program: impl Fn(&Device, Group) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    on_ranks_with(kind, &vec![FaultPlan::new(); ranks], deadline, program)
}

/// Runs it like [`on_ranks`], with a fault plan for the device of each rank.
pub(crate) fn on_ranks_with<T: Send>(
    kind: DeviceKind,
    plans: &[FaultPlan],
    deadline: Duration,
    program: impl Fn(&Device, Group) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let configs = GroupConfig::on_this_host(plans.len()).unwrap();
    // Short deadlines apply only to waits for other ranks.
    let of_device = deadline.max(Duration::from_secs(20));
    let open = |config: &GroupConfig| {
        let plan = plans[config.rank()].clone();
        Device::builder(kind).ordinal(config.local_rank()).deadline(of_device).layer(plan).open()
    };
    let run = |config: GroupConfig| {
        let device = open(&config)?;
        program(&device, Group::join(&device, &config.deadline(deadline))?)
    };
    in_threads(configs, run).into_iter().map(|(outcome, _)| outcome).collect()
}

/// Runs each rank's program in its own thread. Returns each result, with panics as errors, and the
/// time at which all its objects were dropped.
pub(crate) fn in_threads<T: Send>(
    configs: Vec<GroupConfig>,
    program: impl Fn(GroupConfig) -> Result<T> + Sync,
) -> Vec<(Result<T>, Instant)> {
    thread::scope(|scope| {
        let start = |config: GroupConfig| {
            let program = &program;
            scope.spawn(move || {
                let panicked = |_| Err(Error::Misuse { op: "test", expected: "no panic".into(), got: "one".into() });
                let outcome = catch_unwind(AssertUnwindSafe(|| program(config))).unwrap_or_else(panicked);
                (outcome, Instant::now())
            })
        };
        let running: Vec<_> = configs.into_iter().map(start).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// The results of a rank's run: its updates, its weights and their copy.
pub(crate) type RankResult = (Vec<Update>, String, Option<Vec<bf16>>);

#[derive(Default)]
pub(crate) struct Recorder(pub(crate) Vec<Update>);

impl Observer for Recorder {
    fn updated(&mut self, update: &Update, _: &EpochProgress, _: &Arena) -> Result<()> {
        self.0.push(update.clone());
        Ok(())
    }
}

pub(crate) fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap()
}

/// Trains on these batches, resuming from the checkpoint if there is one, and writes it after each
/// update.
pub(crate) fn train(
    plan: Plan,
    device: &Device,
    group: Option<Group>,
    batches: &[Vec<Points>],
    path: Option<&Path>,
) -> Result<RankResult> {
    let state = plan.state(device)?;
    let state = match group {
        Some(group) => state.in_group(&group, plan.shards)?,
        None => state,
    };
    let mut arena = arena(device);
    let mut trainer = match plan.captured {
        true => Trainer::captured(&mut arena, state, &batches[0][1])?,
        false => Trainer::eager(&mut arena, state),
    };
    let mut progress = EpochProgress::default();
    if let Some(path) = path {
        trainer = trainer.checkpoint(path, Some(1));
        if path.exists() {
            progress = trainer.restore(&Checkpoint::load(path)?)?;
        }
    }
    let (mut recorder, left) = (Recorder::default(), batches.iter().skip(progress.updates as usize));
    trainer.fit_with(left.cloned().map(Ok), &mut progress, &mut recorder)?;
    let parameters = &trainer.state().parameters;
    Ok((recorder.0, parameters.sha256()?, parameters.bf16_copy().map(Buffer::read).transpose()?))
}

/// Returns the results of all ranks, which must be the same.
pub(crate) fn train_ranks_on(kind: DeviceKind, plan: Plan, batches: &[Vec<Points>], path: Option<&Path>) -> RankResult {
    let all = on_ranks((kind, plan.ranks), DEADLINE, |device, group| train(plan, device, Some(group), batches, path));
    let mut all = all.into_iter().map(|outcome| outcome.unwrap());
    let first = all.next().unwrap();
    all.enumerate()
        .for_each(|(rank, other)| assert!(other == first, "{plan:?}: rank {} returned a different result", rank + 1));
    first
}

/// Returns the results of all ranks on emulators.
pub(crate) fn train_ranks(plan: Plan, batches: &[Vec<Points>], path: Option<&Path>) -> RankResult {
    train_ranks_on(DeviceKind::Emulated, plan, batches, path)
}
