//! Ranks of a group with different settings, weights or data. Every rank refuses each difference by
//! name, before any training. Settings that do not affect the numbers of a run may differ.

#![forbid(unsafe_code)]

mod custom_rules;

use crate::support::Random;
use crate::support::rank_threads::{in_threads, on_ranks};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use stepscope::device::MatrixInstruction;
use stepscope::group::{DifferentSetting, Group, GroupConfig};
use stepscope::nn::Linear;
use stepscope::ops::{self, Precision};
use stepscope::optim::{ParameterGroup, ParameterGroups, Schedule, Sgd, UpdateArguments, UpdateRule};
use stepscope::parameters::ParameterEntry;
use stepscope::parameters::{GradientType, MasterType, StateType};
use stepscope::prelude::*;
use stepscope::upload::NonFinite;

const INPUTS: usize = 4;
/// A deadline that no refusal reaches; each comes much sooner.
const DEADLINE: Duration = Duration::from_secs(60);

type Points = crate::support::points::Points<INPUTS>;

struct Classifier {
    hidden: Linear,
    head: Linear,
    drops: bool,
}

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let hidden = self.hidden.forward(tape, &tape.input(batch.input::<f32>(0)?))?.gelu()?;
        let hidden = if self.drops { tape.dropout(&hidden, 0.25)? } else { hidden };
        self.head.forward(tape, &hidden)
    }
}

/// The setup of a rank.
#[derive(Clone, Debug)]
struct Setup<R> {
    rule: R,
    seed: u64,
    hidden: usize,
    head: &'static str,
    no_decay: fn(&ParameterEntry) -> bool,
    precision: Precision,
    has_copy: bool,
    masters: MasterType,
    moments: StateType,
    gradients: GradientType,
    dropout: Option<u64>,
    watches: bool,
    shards: usize,
    lens: [usize; 4],
    numbers: NonFinite,
    eager: bool,
    /// The change made between `in_group` and the first update.
    late: Late,
    data: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Late {
    Nothing,
    Weights,
    Groups,
    Optimizer,
}

fn config() -> AdamW {
    let schedule = Schedule::cosine(2, 10, 0.1);
    AdamW { learning_rate: 0.01, clip: Some(1.0), schedule, ..AdamW::default() }
}

impl Setup<AdamW> {
    fn new() -> Self {
        Setup::by(config())
    }
}

impl<R: UpdateRule + Clone> Setup<R> {
    fn by(rule: R) -> Self {
        Self {
            rule,
            seed: 7,
            hidden: 16,
            head: "head",
            no_decay: ParameterGroups::is_gain_bias_or_embedding,
            precision: Precision::F32,
            has_copy: false,
            masters: MasterType::F32,
            moments: StateType::F32,
            gradients: GradientType::F32,
            dropout: None,
            watches: true,
            shards: 4,
            lens: [2, 2, 2, 2],
            numbers: NonFinite::Reject,
            eager: false,
            late: Late::Nothing,
            data: "a digest",
        }
    }

    /// Makes two updates, and returns the digest of the weights.
    fn train(&self, device: &Device, group: &Group) -> Result<String> {
        group.agree_on(&[("data", self.data)])?;
        let mut spec = ParameterSpec::builder();
        let hidden = Linear::new(spec.at("hidden"), INPUTS, self.hidden);
        let head = Linear::new(spec.at(self.head), self.hidden, 3);
        let model = Classifier { hidden, head, drops: self.dropout.is_some() };
        let spec = spec.build()?.with_masters(self.masters).with_state(self.moments).with_gradients(self.gradients);
        let mut state = TrainState::new(device, model, &spec, self.seed, self.rule.clone())?;
        state.monitored = self.watches.then_some(head.weight);
        if self.rule.has_groups() {
            state = state.with_parameter_groups(&ParameterGroups::new().no_decay(self.no_decay))?;
        }
        let mut state = state.in_group(group, self.shards)?.with_precision(self.precision);
        if let Some(seed) = self.dropout {
            state = state.with_dropout(seed)?;
        }
        if self.has_copy {
            state = state.with_bf16_copy()?;
        }
        match self.late {
            Late::Nothing => {}
            Late::Weights => state.parameters.write(head.weight, &vec![0.5; 3 * self.hidden])?,
            Late::Groups => {
                let group = ParameterGroup { rate: 0.5, weight_decay: None };
                let of_head = ParameterGroups::new().with(group, |entry| entry.name().starts_with("head"));
                state = state.with_parameter_groups(&of_head)?;
            }
            Late::Optimizer => state.optimizer = Optimizer::new(&state.parameters, self.rule.clone())?,
        }
        let mut random = Random::new(3);
        let mut part =
            |samples: usize| Points { x: random.normals(samples * INPUTS), labels: random.belows(samples, 3) };
        let batches: Vec<Vec<Points>> = (0..2).map(|_| self.lens.map(&mut part).into()).collect();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build()?;
        let trainer = match self.eager {
            true => Trainer::eager(&mut arena, state),
            false => Trainer::captured(&mut arena, state, &batches[0][0])?,
        };
        let mut trainer = trainer.non_finite(self.numbers);
        trainer.fit(batches.into_iter().map(Ok))?;
        trainer.state().parameters.sha256()
    }
}

/// Returns the result of each of four ranks, of which `odd` has the other setup.
fn with_odd<R: UpdateRule + Clone + Sync, O: UpdateRule + Clone + Sync>(
    setup: &Setup<R>,
    other: &Setup<O>,
    odd: usize,
) -> Vec<Result<String>> {
    let start = Instant::now();
    let outcomes = on_ranks((DeviceKind::Emulated, 4), DEADLINE, |device, group| match group.rank() == odd {
        true => other.train(device, &group),
        false => setup.train(device, &group),
    });
    assert!(start.elapsed() < DEADLINE, "{:?}", start.elapsed());
    outcomes
}

/// Checks that all ranks refuse exactly these settings, and name the odd rank.
#[track_caller]
fn refuses<R: UpdateRule + Clone + Sync, O: UpdateRule + Clone + Sync>(
    setup: &Setup<R>,
    other: &Setup<O>,
    odd: usize,
    names: &[&str],
) {
    let outcomes = with_odd(setup, other, odd);
    for (rank, outcome) in outcomes.iter().enumerate() {
        let Err(Error::Disagreement(disagreement)) = outcome else { panic!("{names:?}: rank {rank}: {outcome:?}") };
        let found: Vec<&str> = disagreement.settings.iter().map(|setting| &*setting.name).collect();
        assert_eq!(found, names, "rank {rank}: {disagreement}");
        let text = disagreement.to_string();
        for DifferentSetting { name, values, .. } in &disagreement.settings {
            assert_eq!(values.len(), 2, "{text}");
            assert!(values.iter().any(|value| value.ranks == [odd]), "{text}");
            assert!(text.contains(&format!("`{name}`: ")) && text.contains(&format!("on rank {odd}")), "{text}");
        }
    }
    assert!(outcomes.iter().all(|other| *other == outcomes[0]), "all ranks return the same error");
}

/// Returns the usual setup with `change` applied.
fn with(change: impl FnOnce(&mut Setup<AdamW>)) -> Setup<AdamW> {
    let mut setup = Setup::new();
    change(&mut setup);
    setup
}

#[test]
fn optimizer_settings_are_compared() {
    let schedule = |warmup, total, floor| Schedule::cosine(warmup, total, floor);
    let next = |value: f32| f32::from_bits(value.to_bits() + 1);
    let base = config();
    let changes = [
        ("learning_rate", AdamW { learning_rate: next(base.learning_rate), ..base }),
        ("beta1", AdamW { beta1: 0.85, ..base }),
        ("beta2", AdamW { beta2: next(base.beta2), ..base }),
        ("epsilon", AdamW { epsilon: 1e-7, ..base }),
        ("weight_decay", AdamW { weight_decay: 0.0, ..base }),
        ("clip", AdamW { clip: None, ..base }),
        ("clip", AdamW { clip: Some(next(1.0)), ..base }),
        // Differences that the first update does not show.
        ("schedule", AdamW { schedule: schedule(2, 11, 0.1), ..base }),
        ("schedule", AdamW { schedule: schedule(2, 10, 0.1 + f64::EPSILON), ..base }),
        ("schedule", AdamW { schedule: Schedule::default(), ..base }),
    ];
    for (number, (name, rule)) in changes.into_iter().enumerate() {
        let name = format!("optimizer.{name}");
        refuses(&Setup::new(), &with(|setup| setup.rule = rule), number % 4, &[&name]);
    }
    let sgd = Sgd { learning_rate: 0.1, ..Sgd::default() };
    let changes = [
        ("momentum", Sgd { momentum: 0.9, ..sgd }),
        ("nesterov", Sgd { momentum: 0.9, nesterov: true, ..sgd }),
        ("schedule", Sgd { schedule: schedule(1, 2, 0.0), ..sgd }),
    ];
    for (name, rule) in changes {
        let base = if name == "nesterov" { Sgd { momentum: 0.9, ..sgd } } else { sgd };
        refuses(&Setup::by(base), &Setup::by(rule), 2, &[&format!("optimizer.{name}")]);
    }
}

#[test]
fn another_optimizer_is_refused() {
    let outcomes = with_odd(&Setup::new(), &Setup::by(Sgd::default()), 1);
    for outcome in outcomes {
        let Err(Error::Disagreement(disagreement)) = outcome else { panic!("{outcome:?}") };
        let text = disagreement.to_string();
        assert!(text.contains("`optimizer`: `adamw` on ranks 0, 2, 3, `sgd` on rank 1"), "{text}");
        assert!(text.contains("`optimizer.beta1`: `0.9` on ranks 0, 2, 3, not set on rank 1"), "{text}");
    }
}

#[test]
fn parameters_and_groups_are_compared() {
    let base = Setup::new();
    refuses(&base, &with(|setup| setup.seed = 8), 3, &["weights"]);
    let text = with_odd(&base, &with(|setup| setup.hidden = 32), 1)[0].clone().unwrap_err().to_string();
    assert!(text.contains("`parameters`: `4: hidden.weight"), "{text}");
    let text = with_odd(&base, &with(|setup| setup.head = "top"), 2)[3].clone().unwrap_err().to_string();
    assert!(text.contains("`parameters`: "), "{text}");
    // Other members of groups with the same rates.
    let groups = ["parameter group 0", "parameter group 1"];
    refuses(&base, &with(|setup| setup.no_decay = |entry| entry.name().starts_with("hidden")), 1, &groups);
    refuses(&base, &with(|setup| setup.no_decay = |entry| entry.name() == "head.bias"), 0, &groups);
}

#[test]
fn train_settings_are_compared() {
    let base = Setup::new();
    refuses(&base, &with(|setup| setup.shards = 8), 1, &["shards"]);
    refuses(&base, &with(|setup| setup.precision = Precision::Tf32), 1, &["precision", "compute capability"]);
    let names = ["BF16 copy of the weights", "compute capability"];
    refuses(&base, &with(|setup| setup.has_copy = true), 2, &names);
    let names = ["master weights", "BF16 copy of the weights"];
    refuses(&base, &with(|setup| setup.masters = MasterType::Split), 1, &names);
    refuses(&base, &with(|setup| setup.moments = StateType::Bits8), 0, &["type of the optimizer's state"]);
    let in_bf16 = with(|setup| setup.gradients = GradientType::Bf16);
    refuses(&base, &in_bf16, 1, &["type of gradients"]);
    let released = with(|setup| setup.gradients = GradientType::Released);
    for outcome in with_odd(&released, &released, 0) {
        assert!(outcome.unwrap_err().to_string().contains("gradients that are stored, because ranks exchange them"));
    }
    refuses(&base, &with(|setup| setup.dropout = Some(1)), 3, &["dropout's seed"]);
    let (one, other) = (with(|setup| setup.dropout = Some(1)), with(|setup| setup.dropout = Some(2)));
    refuses(&one, &other, 0, &["dropout's seed"]);
    refuses(&base, &with(|setup| setup.watches = false), 1, &["monitored parameter"]);
    refuses(&base, &with(|setup| setup.numbers = NonFinite::Allow), 1, &["non-finite values"]);
    // Two differences in one error.
    let two = with(|setup| (setup.watches, setup.dropout) = (false, Some(1)));
    refuses(&base, &two, 1, &["dropout's seed", "monitored parameter"]);
}

/// Ranks with different instructions are not refused, in TF32 either.
/// `tests/kernels/tensor_core_bits.rs` compares the bits of their products.
#[test]
fn matrix_instructions_train_together() {
    for precision in Precision::ALL {
        let setup = with(|setup| setup.precision = precision);
        let program = |config: GroupConfig| {
            let instruction = MatrixInstruction::ALL[config.rank() % 2];
            let device = Device::builder(DeviceKind::Emulated).matrix_instruction(instruction).open()?;
            setup.train(&device, &Group::join(&device, &config.deadline(DEADLINE))?)
        };
        let outcomes = in_threads(GroupConfig::on_this_host(2).unwrap(), program);
        assert_eq!(outcomes[0].0.as_ref().unwrap(), outcomes[1].0.as_ref().unwrap(), "{precision}");
    }
}

#[test]
fn program_settings_are_compared() {
    refuses(&Setup::new(), &with(|setup| setup.data = "another digest"), 1, &["data"]);
    // As many samples, in parts of other lengths.
    let lens = with(|setup| setup.lens = [2, 3, 1, 2]);
    refuses(&Setup::new(), &lens, 2, &["samples in the parts of the batch"]);
}

#[test]
fn changes_after_joining_are_compared() {
    let base = Setup::new();
    refuses(&base, &with(|setup| setup.late = Late::Weights), 1, &["weights"]);
    let groups = ["parameter group 0", "parameter group 1"];
    refuses(&base, &with(|setup| setup.late = Late::Groups), 2, &groups);
    // An optimizer without slices does not belong to the group.
    let outcomes = with_odd(&base, &with(|setup| setup.late = Late::Optimizer), 1);
    assert!(
        outcomes[1].as_ref().unwrap_err().to_string().contains("the shards or the optimizer of another train state"),
        "{outcomes:?}"
    );
    for rank in [0, 2, 3] {
        let text = outcomes[rank].as_ref().unwrap_err().to_string();
        assert!(
            text.contains("rank 1 of 4 has failed")
                && text.contains("the shards or the optimizer of another train state"),
            "{text}"
        );
    }
}

/// A training state whose optimizer has made updates with a constant gradient.
fn updated(device: &Device, updates: u64, gradient: f32) -> Result<TrainState<Classifier>> {
    let mut spec = ParameterSpec::builder();
    let (hidden, head) = (Linear::new(spec.at("hidden"), 4, 4), Linear::new(spec.at("head"), 4, 3));
    let model = Classifier { hidden, head, drops: false };
    let rule = AdamW { learning_rate: 0.0, ..AdamW::default() };
    let mut state = TrainState::new(device, model, &spec.build()?, 7, rule)?;
    let TrainState { parameters, gradients, optimizer, .. } = &mut state;
    let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
    for _ in 0..updates {
        let ticket = optimizer.advance()?;
        arena.step(|step| {
            ops::fill_into(step, &mut gradients.lend_mut(step, head.weight)?, gradient)?;
            optimizer.apply(ticket, step, parameters, gradients)
        })?;
    }
    Ok(state)
}

#[test]
fn optimizers_with_other_pasts_are_refused() {
    let join = |of_rank: fn(usize) -> (u64, f32)| {
        on_ranks((DeviceKind::Emulated, 2), DEADLINE, |device, group| {
            let (updates, gradient) = of_rank(group.rank());
            updated(device, updates, gradient)?.in_group(&group, 2).map(drop)
        })
    };
    assert!(join(|_| (2, 0.5)).iter().all(Result::is_ok));
    for outcome in join(|rank| (1 + rank as u64, 0.0)) {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("`updates made`: `1` on rank 0, `2` on rank 1"), "{text}");
    }
    for outcome in join(|rank| (1, rank as f32)) {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("`digest of the optimizer's state`: "), "{text}");
    }
}

#[test]
fn restored_ranks_compare_again() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["one", "two"].map(|name| folder.path().join(name));
    let train = |device: &Device, group: &Group, from: Option<&Path>, to: Option<&Path>| -> Result<String> {
        let state = updated(device, 0, 0.0)?.in_group(group, 2)?;
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
        let mut trainer = Trainer::eager(&mut arena, state);
        if let Some(from) = from {
            trainer.restore(&Checkpoint::load(from)?)?;
        }
        let part = || Points { x: vec![0.5; INPUTS], labels: vec![1] };
        trainer.update(&[part(), part()])?;
        if let Some(to) = to {
            trainer.checkpoint(to, None).save(&EpochProgress::default(), &[])?;
            return Ok(String::new());
        }
        trainer.state().parameters.sha256()
    };
    let on_two = |from: [Option<&Path>; 2], to: Option<&Path>| {
        on_ranks((DeviceKind::Emulated, 2), DEADLINE, |device, group| train(device, &group, from[group.rank()], to))
    };
    let [one, two] = [&*paths[0], &*paths[1]];
    assert!(on_two([None; 2], Some(one)).iter().all(Result::is_ok));
    assert!(on_two([Some(one); 2], Some(two)).iter().all(Result::is_ok));
    assert!(on_two([Some(two); 2], None).iter().all(Result::is_ok));
    for outcome in on_two([Some(one), Some(two)], None) {
        assert!(outcome.unwrap_err().to_string().contains("`checkpoint`: "));
    }
    // Only one of them resumes.
    for outcome in on_two([Some(one), None], None) {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("rank 1") && text.contains("restore"), "{text}");
    }
}

#[test]
fn other_settings_may_differ() {
    let same = with_odd(&Setup::new(), &Setup::new(), 0)[0].clone().unwrap();
    // Captured or eager steps, a stop flag, a deadline.
    let (setup, stop) = (Setup::new(), AtomicBool::new(false));
    let outcomes = with_odd(&setup, &with(|setup| setup.eager = true), 1);
    assert!(outcomes.iter().all(|outcome| outcome.as_ref() == Ok(&same)), "{outcomes:?}");
    let outcomes = in_threads(GroupConfig::on_this_host(2).unwrap(), |config| {
        let deadline = DEADLINE + Duration::from_secs(config.rank() as u64);
        let device = Device::builder(DeviceKind::Emulated).deadline(deadline).open()?;
        let group = Group::join(&device, &config.deadline(deadline))?;
        let state = updated(&device, 0, 0.0)?.in_group(&group, 2)?;
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(1 + group.rank())).build()?;
        let mut trainer = Trainer::eager(&mut arena, state);
        if group.rank() == 1 {
            trainer = trainer.stop_when(&stop);
        }
        let part = || Points { x: vec![0.5; INPUTS], labels: vec![1] };
        trainer.update(&[part(), part()])?;
        trainer.state().parameters.sha256()
    });
    assert!(outcomes[0].0.is_ok() && outcomes[0].0 == outcomes[1].0);
}

#[test]
fn settings_of_a_program_have_limits() {
    let outcomes = on_ranks((DeviceKind::Emulated, 2), DEADLINE, |_, group| {
        let many: Vec<(String, String)> = (0..400).map(|number| (format!("s{number}"), "x".repeat(100))).collect();
        group.agree_on(&many)?;
        group.agree_on(&[("long", "y".repeat(1 << 20))])?;
        group.agree_on(&[] as &[(&str, &str)])?;
        match group.rank() {
            0 => group.agree_on(&[("a", "1"), ("a", "2")]),
            _ => group.agree_on(&[("a", "1")]),
        }
    });
    let texts: Vec<String> = outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    assert!(texts[0].contains("each name once, got `a` twice"), "{texts:?}");
    assert!(texts[1].contains("rank 0 of 2 has failed") && texts[1].contains("each name once"), "{texts:?}");
    let outcomes = on_ranks((DeviceKind::Emulated, 2), DEADLINE, |_, group| {
        let many: Vec<(String, String)> = (0..1000).map(|number| (format!("s{number}"), "x".repeat(100))).collect();
        group.agree_on(&many)
    });
    assert!(outcomes[0].as_ref().unwrap_err().to_string().contains("at most 65536 bytes"), "{outcomes:?}");
    // A single rank has no other rank to differ from.
    let outcomes = on_ranks((DeviceKind::Emulated, 1), DEADLINE, |_, group| group.agree_on(&[("a", "1")]));
    assert_eq!(outcomes, [Ok(())]);
}

/// A rank that comes late, or never, is named within the deadline.
#[test]
fn absent_ranks_are_named() {
    const SHORT: Duration = Duration::from_secs(2);
    let start = Instant::now();
    let outcomes = on_ranks((DeviceKind::Emulated, 2), SHORT, |_, group| match group.rank() {
        0 => group.agree_on(&[("data", "a")]),
        _ => {
            std::thread::sleep(2 * SHORT);
            Ok(())
        }
    });
    let text = outcomes[0].as_ref().unwrap_err().to_string();
    assert!(text.contains("rank 1 of 2 is late") && text.contains("agree_on"), "{text}");
    assert!(start.elapsed() < DEADLINE);
}
