//! Groups on the emulator, their ranks threads of this process: the same bits for any number of ranks, the tree over the shards, resumed
//! with other ranks, and errors that reach every rank.

#![forbid(unsafe_code)]

mod support;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use stepscope::faults::{Call, Fault, FaultPlan};
use stepscope::nn::{Linear, Mlp};
use stepscope::*;
use support::Random;

const INPUTS: usize = 12;
const CLASSES: usize = 3;
/// The parts of each batch, some of which are a sample longer than others.
const PARTS: usize = 16;
const UPDATES: usize = 4;

#[derive(Debug)]
struct Classifier {
    mlp: Mlp,
    head: Linear,
    drops: bool,
}

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &Batch<'s>) -> Result<Var<'s>> {
        let hidden = self.mlp.forward(tape, &tape.input(batch.input::<f32>(0)?))?;
        let hidden = if self.drops { tape.dropout(&hidden, 0.25)? } else { hidden };
        self.head.forward(tape, &hidden)
    }

    fn watched(&self) -> Option<Parameter> {
        Some(self.head.weight)
    }
}

/// How a group trains.
#[derive(Clone, Copy, Debug)]
struct Plan {
    ranks: usize,
    shards: usize,
    captured: bool,
    /// With dropout and a BF16 copy of the weights.
    more: bool,
}

impl Plan {
    fn learner(self, device: &Device) -> Result<Learner<Classifier>> {
        let mut layout = Layout::builder();
        let mut names = layout.names();
        // 18 chunks of 4096 weights: of 8 ranks, 5 have a slice.
        let mlp = Mlp::new(names.at("mlp"), INPUTS, 256, 256);
        let model = Classifier { mlp, head: Linear::new(names.at("head"), 256, CLASSES), drops: self.more };
        let schedule = Schedule::WarmupCosine { warmup: 2, total: 10, floor: 0.1 };
        let config = AdamWConfig { learning_rate: 0.002, clip: Some(0.05), schedule, ..AdamWConfig::default() };
        let learner = Learner::new(device, model, &layout.build()?, 7, config)?;
        let groups = ParameterGroups::new().no_decay(ParameterGroups::is_gain_bias_or_embedding);
        let learner = learner.with_parameter_groups(&groups)?;
        if self.more { learner.with_dropout(11)?.with_bf16_copy() } else { Ok(learner) }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Points {
    x: Vec<f32>,
    labels: Vec<u32>,
}

impl Samples for Points {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn inputs(&self) -> Result<Inputs<'_>> {
        Inputs::new().with(&self.x, [self.labels.len(), INPUTS])?.with(&self.labels, [self.labels.len()])
    }
}

impl Points {
    fn twice(self) -> Self {
        Self { x: [&self.x[..], &self.x].concat(), labels: [&self.labels[..], &self.labels].concat() }
    }
}

/// The batches of a run, of parts whose lengths `lens` gives.
fn batches(lens: impl Fn(usize) -> usize) -> Vec<Vec<Points>> {
    let mut random = Random::new(3);
    let mut part = |samples: usize| {
        let labels = random.belows(samples, CLASSES as u32);
        let near = |label: u32, random: &mut Random| random.normals(INPUTS).into_iter().map(move |x| x + label as f32);
        Points { x: labels.iter().flat_map(|&label| near(label, &mut random)).collect(), labels }
    };
    (0..UPDATES).map(|_| (0..PARTS).map(|number| part(lens(number))).collect()).collect()
}

fn uneven() -> Vec<Vec<Points>> {
    let mut batches = batches(|number| 3 + number % 2);
    // The last batch has fewer samples than shards.
    let short =
        batches[0][..5].iter().map(|part| Points { x: part.x[..INPUTS].into(), labels: part.labels[..1].into() });
    batches.push(short.collect());
    batches
}

/// Runs a program on each rank of a group, in a thread and on a device of its own, and returns what the ranks returned.
fn on_ranks<T: Send>(
    (kind, ranks): (DeviceKind, usize),
    deadline: Duration,
    program: impl Fn(&Device, Group) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    on_ranks_with(kind, &vec![FaultPlan::new(); ranks], deadline, program)
}

/// The same, with a plan of faults for the device of each rank.
fn on_ranks_with<T: Send>(
    kind: DeviceKind,
    plans: &[FaultPlan],
    deadline: Duration,
    program: impl Fn(&Device, Group) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let configs = GroupConfig::on_this_host(plans.len()).unwrap();
    // Short deadlines are for the waits for others.
    let of_device = deadline.max(Duration::from_secs(20));
    thread::scope(|scope| {
        let start = |config: GroupConfig| {
            let program = &program;
            scope.spawn(move || {
                let run = || {
                    let plan = plans[config.rank()].clone();
                    let device =
                        Device::builder(kind).ordinal(config.local_rank()).deadline(of_device).faults(plan).open()?;
                    program(&device, Group::join(&device, &config.deadline(deadline))?)
                };
                let panicked = |_| Err(Error::Misuse { op: "test", expected: "no panic".into(), got: "one".into() });
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_or_else(panicked)
            })
        };
        let running: Vec<_> = configs.into_iter().map(start).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const DEADLINE: Duration = Duration::from_secs(120);

/// What a rank says of its run: its updates, its weights and their copy.
type Said = (Vec<Update>, String, Option<Vec<bf16>>);

#[derive(Default)]
struct Heard(Vec<Update>);

impl Observer for Heard {
    fn updated(&mut self, update: &Update, _: &EpochProgress, _: &Arena) -> Result<()> {
        self.0.push(*update);
        Ok(())
    }
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap()
}

/// Trains on these batches from where the checkpoint is, if there is one, and writes it behind each update.
fn train(
    plan: Plan,
    device: &Device,
    group: Option<Group>,
    batches: &[Vec<Points>],
    path: Option<&Path>,
) -> Result<Said> {
    let learner = plan.learner(device)?;
    let learner = match group {
        Some(group) => learner.in_group(&group, plan.shards)?,
        None => learner,
    };
    let mut arena = arena(device);
    let mut trainer = match plan.captured {
        true => Trainer::captured(&mut arena, learner, &batches[0][1])?,
        false => Trainer::eager(&mut arena, learner),
    };
    let mut progress = EpochProgress::default();
    if let Some(path) = path {
        trainer = trainer.checkpoint(path, Some(1));
        if path.exists() {
            progress = trainer.restore(&Checkpoint::load(path)?)?;
        }
    }
    let (mut heard, left) = (Heard::default(), batches.iter().skip(progress.updates as usize));
    trainer.epoch(left.cloned().map(Ok), &mut progress, &mut heard)?;
    let parameters = &trainer.learner().parameters;
    Ok((heard.0, parameters.sha256()?, parameters.bf16_copy().map(Buffer::read).transpose()?))
}

/// What all ranks say, which must be the same.
fn said_on(kind: DeviceKind, plan: Plan, batches: &[Vec<Points>], path: Option<&Path>) -> Said {
    let all = on_ranks((kind, plan.ranks), DEADLINE, |device, group| train(plan, device, Some(group), batches, path));
    let mut all = all.into_iter().map(|said| said.unwrap());
    let first = all.next().unwrap();
    all.enumerate()
        .for_each(|(rank, other)| assert!(other == first, "{plan:?}: rank {} says something else", rank + 1));
    first
}

/// What all ranks say on emulators.
fn said(plan: Plan, batches: &[Vec<Points>], path: Option<&Path>) -> Said {
    said_on(DeviceKind::Emulated, plan, batches, path)
}

#[test]
fn any_number_of_ranks_gives_the_same_bits() {
    let batches = uneven();
    for more in [false, true] {
        let one = said(Plan { ranks: 1, shards: 8, captured: false, more }, &batches, None);
        assert!(one.0[3].loss < 0.9 * one.0[0].loss, "it learns: {:?}", one.0);
        assert!(one.0.iter().all(|update| update.watched_l2.is_some_and(|norm| norm > 0.0)));
        for ranks in [1, 2, 4, 8] {
            for captured in [false, true] {
                let plan = Plan { ranks, shards: 8, captured, more };
                assert!(said(plan, &batches, None) == one, "{plan:?}");
            }
        }
        let other = said(Plan { ranks: 1, shards: 4, captured: false, more }, &batches, None);
        assert!(other.1 != one.1, "the shards are part of a run's numbers");
    }
}

#[test]
fn one_shard_is_as_no_group() {
    let batches = uneven();
    for more in [false, true] {
        let plan = Plan { ranks: 1, shards: 1, captured: false, more };
        let alone = train(plan, &Device::open(DeviceKind::Emulated).unwrap(), None, &batches, None).unwrap();
        assert!(said(plan, &batches, None) == alone);
        assert!(said(Plan { captured: true, ..plan }, &batches, None) == alone);
    }
}

#[test]
fn gradients_are_summed_in_one_tree_over_the_shards() {
    fn tree(shards: &[Vec<f32>]) -> Vec<f32> {
        match shards {
            [shard] => shard.clone(),
            _ => {
                let (left, right) = shards.split_at(shards.len() / 2);
                tree(left).iter().zip(tree(right)).map(|(left, right)| left + right).collect()
            }
        }
    }
    let batch = &batches(|_| 4)[0];
    let plan = |ranks| Plan { ranks, shards: PARTS, captured: false, more: false };
    let device = Device::open(DeviceKind::Emulated).unwrap();
    // The gradient of each shard alone. A sixteenth of it is the same bits, as the loss is divided by 64 samples and not by 4.
    let alone: Vec<Vec<f32>> = batch
        .iter()
        .map(|shard| {
            let mut arena = arena(&device);
            let mut trainer = Trainer::eager(&mut arena, plan(1).learner(&device).unwrap());
            trainer.accumulate(std::slice::from_ref(shard)).unwrap();
            let gradients = trainer.learner().gradients.flat().read().unwrap();
            gradients.into_iter().map(|gradient| gradient / PARTS as f32).collect()
        })
        .collect();
    let want = tree(&alone);
    for ranks in [1, 2, 8] {
        let updated = on_ranks((DeviceKind::Emulated, ranks), DEADLINE, |device, group| {
            let mut arena = arena(device);
            let learner = plan(ranks).learner(device)?.in_group(&group, PARTS)?;
            let mut trainer = Trainer::eager(&mut arena, learner);
            trainer.accumulate(batch)?;
            let got = trainer.learner().gradients.flat().read()?;
            let different = got.iter().zip(&want).position(|(got, want)| got.to_bits() != want.to_bits());
            assert_eq!(different, None, "{ranks} ranks: a gradient");
            trainer.apply()?;
            trainer.learner().parameters.sha256()
        });
        let updated: Vec<String> = updated.into_iter().map(|sha| sha.unwrap()).collect();
        let whole = said(plan(1), std::slice::from_ref(batch), None).1;
        assert!(updated.iter().all(|sha| *sha == whole), "{ranks} ranks: the update behind `accumulate`");
    }
}

#[test]
fn a_checkpoint_does_not_know_the_number_of_ranks() {
    let batches = uneven();
    let plan = |ranks| Plan { ranks, shards: 8, captured: ranks % 2 == 0, more: true };
    let (_, whole, _) = said(plan(2), &batches, None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint.safetensors");
    let mut digests = Vec::new();
    for (made, ranks) in [4, 1, 8, 2, 4].into_iter().enumerate() {
        let (updates, sha, _) = said(plan(ranks), &batches[..=made], Some(&path));
        assert_eq!(updates.len(), 1, "{ranks} ranks go on behind update {made}");
        digests.push(sha);
    }
    assert_eq!(digests[4], whole);
    // One device alone takes it, too.
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let mut learner = plan(1).learner(&device).unwrap();
    Checkpoint::load(&path).unwrap().restore(&mut learner.parameters, Some(&mut learner.optimizer)).unwrap();
    assert_eq!((learner.parameters.sha256().unwrap(), learner.optimizer.updates()), (whole, 5));
}

#[test]
fn a_stop_on_one_rank_stops_all_behind_the_same_update() {
    let batches = uneven();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint.safetensors");
    let plan = Plan { ranks: 4, shards: 4, captured: true, more: false };
    let ended = on_ranks((DeviceKind::Emulated, 4), DEADLINE, |device, group| {
        let (flag, rank) = (AtomicBool::new(false), group.rank());
        let mut arena = arena(device);
        let learner = plan.learner(device)?.in_group(&group, 4)?;
        let mut trainer = Trainer::captured(&mut arena, learner, &batches[0][1])?.checkpoint(&path, None);
        trainer = trainer.stop_when(&flag);
        let mut progress = EpochProgress::default();
        let given = batches.iter().enumerate().map(|(number, batch)| {
            flag.store(rank == 2 && number == 1, Ordering::Relaxed);
            Ok(batch.clone())
        });
        Ok((trainer.epoch(given, &mut progress, &mut ())?, progress.updates))
    });
    for ended in ended {
        assert_eq!(ended.unwrap(), (Ended::Stopped, 2));
    }
    assert_eq!(EpochProgress::of(&Checkpoint::load(&path).unwrap()).unwrap().updates, 2);
}

#[test]
fn shards_of_another_learner_or_of_none_are_refused() {
    let batch = &batches(|_| 2)[0];
    let said = on_ranks((DeviceKind::Emulated, 2), DEADLINE, |device, group| {
        let plan = Plan { ranks: 2, shards: 4, captured: false, more: false };
        let refused = |made: Result<_>, word: &str| {
            let error = made.map(drop).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        for shards in [0, 1, 3, 6, usize::MAX] {
            refused(plan.learner(device)?.in_group(&group, shards).map(drop), "a power of two that the ranks divide");
        }
        // The optimiser of one that is in no group has the state of all weights.
        let learner = Learner { shards: plan.learner(device)?.in_group(&group, 4)?.shards, ..plan.learner(device)? };
        let mut arena = arena(device);
        refused(Trainer::eager(&mut arena, learner).update(batch).map(drop), "another learner's");
        Ok(())
    });
    said.into_iter().for_each(|said| said.unwrap());
}

/// What goes wrong on a rank at its second update.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    /// Its program returns an error.
    Returns,
    /// It panics.
    Panics,
    /// A label is no class.
    Label,
    /// Its batch has another number of samples.
    Samples,
    /// It writes a checkpoint where the others train.
    LeftOut,
    /// It does nothing more, for longer than the deadline.
    Sleeps,
}

/// Ranks, of which one does something wrong: what each says, and which one it was.
fn others_say((kind, ranks): (DeviceKind, usize), wrong: Wrong, captured: bool) -> (Vec<String>, usize) {
    const DEADLINE: Duration = Duration::from_secs(5);
    let (batches, folder) = (batches(|_| 2), tempfile::tempdir().unwrap());
    let plan = Plan { ranks, shards: 4, captured, more: false };
    let (culprit, done) = (ranks / 2, AtomicBool::new(false));
    let program = |device: &Device, group: Group| {
        let rank = group.rank();
        let mut arena = arena(device);
        let learner = plan.learner(device)?.in_group(&group, 4)?;
        let trainer = match captured {
            true => Trainer::captured(&mut arena, learner, &batches[0][0])?,
            false => Trainer::eager(&mut arena, learner),
        };
        let mut trainer = trainer.checkpoint(folder.path().join("checkpoint.safetensors"), None);
        trainer.update(&batches[0])?;
        let mut batch = batches[1].clone();
        if rank == culprit {
            match wrong {
                Wrong::Returns => return Ok("it returned".into()),
                Wrong::Panics => panic!("planted"),
                Wrong::Label => batch[9].labels[1] = 77,
                Wrong::Samples => batch[3] = batches[1][0].clone().twice(),
                Wrong::LeftOut => trainer.save(&EpochProgress::default(), &[])?,
                Wrong::Sleeps => {
                    while !done.load(Ordering::Relaxed) {
                        thread::sleep(Duration::from_millis(5));
                    }
                }
            }
        }
        let start = Instant::now();
        let error = trainer.update(&batch).unwrap_err();
        assert!(
            rank == culprit || start.elapsed() < DEADLINE + Duration::from_secs(1) + BUSY,
            "{wrong:?}: {:?}",
            start.elapsed()
        );
        // It does not go on.
        let again = trainer.update(&batch).unwrap_err();
        assert!(rank == culprit || again.to_string().contains(&format!("rank {culprit} of")), "{again}");
        if rank != culprit {
            done.store(true, Ordering::Relaxed);
        }
        Ok(error.to_string())
    };
    let said: Vec<String> = on_ranks((kind, ranks), DEADLINE, program)
        .into_iter()
        .map(|said| said.unwrap_or_else(|error| error.to_string()))
        .collect();
    println!("{wrong:?}: {said:#?}");
    (said, culprit)
}

/// A machine with other work may be late.
const BUSY: Duration = Duration::from_secs(20);

fn what_goes_wrong_ends_all(kind: DeviceKind, ranks: usize) {
    for (wrong, word) in [
        (Wrong::Returns, "has left the group"),
        (Wrong::Panics, "has "),
        (Wrong::Label, "the label 77"),
        (Wrong::Samples, "calls something else"),
        (Wrong::LeftOut, "calls something else"),
        (Wrong::Sleeps, "is late"),
    ] {
        for captured in [false, true] {
            let (said, culprit) = others_say((kind, ranks), wrong, captured);
            for (rank, said) in said.iter().enumerate().filter(|(rank, _)| *rank != culprit) {
                let named = said.contains(&format!("rank {culprit} of {ranks}"))
                    && said.contains(word)
                    && said.contains("tests/group.rs:");
                assert!(named, "{wrong:?}: rank {rank} says: {said}");
            }
        }
    }
}

#[test]
fn what_goes_wrong_on_a_rank_ends_all_and_names_it() {
    what_goes_wrong_ends_all(DeviceKind::Emulated, 4);
}

/// One update, of a group of two whose second rank's device has this plan: what both say, and how long they took.
fn one_update(kind: DeviceKind, plan: &FaultPlan, deadline: Duration) -> (Vec<Result<String>>, Duration) {
    let batch = &batches(|_| 2)[0];
    let start = Instant::now();
    let said = on_ranks_with(kind, &[FaultPlan::new(), plan.clone()], deadline, |device, group| {
        let way = Plan { ranks: 2, shards: 4, captured: false, more: false };
        let mut arena = arena(device);
        let mut trainer = Trainer::eager(&mut arena, way.learner(device)?.in_group(&group, 4)?);
        trainer.update(batch)?;
        trainer.learner().parameters.sha256()
    });
    (said, start.elapsed())
}

fn a_call_of_a_link_never_returns(kind: DeviceKind) {
    const DEADLINE: Duration = Duration::from_secs(3);
    let counted = FaultPlan::new();
    let sound = one_update(kind, &counted, self::DEADLINE).0;
    let digest = sound[0].clone().unwrap();
    for call in [Call::JoinLink, Call::Exchange, Call::FollowExchanges, Call::LeaveLink] {
        let count = counted.count(call);
        assert!(count > 0, "{call:?} is not made");
        let mut numbers = vec![1, count];
        numbers.dedup();
        for number in numbers {
            let plan = FaultPlan::new().on(call, number, Fault::Never);
            let (said, took) = one_update(kind, &plan, DEADLINE);
            println!("{call:?} {number} of {count}: {said:?} after {took:?}");
            assert!(plan.count(call) >= number, "{call:?} {number} was never made");
            if call == Call::LeaveLink {
                // It gives back at the end, with nobody to tell.
                assert!(said.iter().all(|said| said.as_ref() == Ok(&digest)), "{said:?}");
                continue;
            }
            assert!(took < DEADLINE + Duration::from_secs(2) + BUSY, "{call:?} {number}: {took:?}");
            for said in said {
                let Err(Error::Rank(fault)) = said else { panic!("{call:?} {number}: {said:?}") };
                // Two GPUs wait for each other in step: who gives up first cannot tell which of them it is, and says so.
                let stuck = kind == DeviceKind::Cuda && fault.kind == RankFaultKind::Stuck;
                assert!(stuck || (fault.rank, &fault.kind) == (1, &RankFaultKind::Late), "{call:?} {number}: {fault}");
                assert!(fault.location.contains("tests/group.rs:"), "{fault}");
            }
        }
    }
}

#[test]
fn a_call_of_a_link_that_never_returns_ends_all_and_names_the_rank() {
    a_call_of_a_link_never_returns(DeviceKind::Emulated);
}

/// A rank that waits for its device, and not for the others, would learn of a fault at its deadline.
#[test]
fn the_link_ends_as_soon_as_another_rank_has_failed() {
    let plans = [FaultPlan::new(), FaultPlan::new()];
    let said = on_ranks_with(DeviceKind::Emulated, &plans, DEADLINE, |device, group| {
        let plan = Plan { ranks: 2, shards: 4, captured: false, more: false };
        let mut batch = batches(|_| 2).swap_remove(0);
        let mut arena = arena(device);
        let mut trainer = Trainer::eager(&mut arena, plan.learner(device)?.in_group(&group, 4)?);
        trainer.update(&batch)?;
        assert!(group.rank() == 0, "planted");
        let start = Instant::now();
        while plans[0].count(Call::LeaveLink) == 0 {
            assert!(start.elapsed() < DEADLINE, "the link stays");
            thread::sleep(Duration::from_millis(5));
        }
        // What it finds of its own is no reason any more.
        batch[0].labels[0] = 99;
        let error = trainer.update(&batch).unwrap_err().to_string();
        assert!(error.contains("rank 1 of 2 has failed") && error.contains("it panicked"), "{error}");
        Ok(())
    });
    assert_eq!(said[0], Ok(()));
}

/// The same by NCCL, of four.
#[cfg(feature = "cuda")]
mod four_gpus {
    use super::*;

    #[test]
    #[ignore = "needs four NVIDIA GPUs"]
    fn what_goes_wrong_on_a_rank_ends_all_and_names_it() {
        what_goes_wrong_ends_all(DeviceKind::Cuda, 4);
    }
}

/// The same by NCCL.
#[cfg(feature = "cuda")]
mod two_gpus {
    use super::*;

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn any_number_of_ranks_gives_the_emulators_bits() {
        let batches = uneven();
        for more in [false, true] {
            let plan = |ranks, captured| Plan { ranks, shards: 8, captured, more };
            let want = said(plan(2, false), &batches, None);
            for ranks in [1, 2] {
                for captured in [false, true] {
                    let got = said_on(DeviceKind::Cuda, plan(ranks, captured), &batches, None);
                    assert!(got == want, "{:?}: {got:?} is not {want:?}", plan(ranks, captured));
                }
            }
        }
    }

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn what_goes_wrong_on_a_rank_ends_all_and_names_it() {
        what_goes_wrong_ends_all(DeviceKind::Cuda, 2);
    }

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn a_call_of_a_link_that_never_returns_ends_all_and_names_the_rank() {
        a_call_of_a_link_never_returns(DeviceKind::Cuda);
    }

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn a_checkpoint_of_two_gpus_goes_on_on_one_and_on_the_emulator() {
        let batches = uneven();
        let plan = |ranks| Plan { ranks, shards: 8, captured: true, more: true };
        let (_, whole, _) = said(plan(1), &batches, None);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint.safetensors");
        let mut digest = String::new();
        let runs = [(DeviceKind::Cuda, 2), (DeviceKind::Emulated, 4), (DeviceKind::Cuda, 1), (DeviceKind::Cuda, 2)];
        for (made, (kind, ranks)) in runs.into_iter().enumerate() {
            digest = said_on(kind, plan(ranks), &batches[..=made], Some(&path)).1;
        }
        assert!(digest != whole);
        assert_eq!(said_on(DeviceKind::Cuda, plan(2), &batches, Some(&path)).1, whole);
    }
}
