//! Groups of threads, with a fault at a random moment. All other ranks end within the deadline and
//! name the rank, the op and its line. Half of the ranks then resume from the checkpoint, and reach
//! the weights of an undisturbed run.

#![forbid(unsafe_code)]

use crate::support::Random;
use crate::support::cable::{Cable, free_port};
use crate::support::moments::{MARGIN, moments, tell};
use crate::support::rank_threads::*;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::group::{Group, GroupConfig, RankFaultKind, RendezvousFaultKind};
use stepscope::prelude::*;

/// The time that a rank waits for the others.
const PEER_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that a rank waits for the others at the rendezvous.
const TO_MEET: Duration = Duration::from_secs(2);
/// The extra time for a busy machine.
const BUSY: Duration = Duration::from_secs(20);
const SHARDS: usize = 8;

/// A fault on a rank, or between two ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    /// A part of its batch has another number of samples.
    HostBatch,
    /// Writes a checkpoint while the others train.
    Saves,
    /// Trains while the others write a checkpoint.
    SavesNot,
    /// Ends its program.
    Ends,
    /// Fails to read its samples.
    Fails,
    /// Panics.
    Panics,
    /// A label is outside the classes.
    Label,
    /// A call of its device's driver fails.
    Driver,
    /// Loses its connection to rank 0.
    Cut,
    /// Does nothing more, for longer than the deadline.
    Sleeps,
}

/// The faults that the tests are named after, and the ways in which each occurs.
const SHAPE: (&str, &[Wrong]) = ("another shape", &[Wrong::HostBatch]);
const LEFT_OUT: (&str, &[Wrong]) = ("a collective left out", &[Wrong::SavesNot, Wrong::Saves, Wrong::Ends]);
const EXCEPTION: (&str, &[Wrong]) = ("an exception", &[Wrong::Fails, Wrong::Panics, Wrong::Label, Wrong::Driver]);
const CUT: (&str, &[Wrong]) = ("a cut connection", &[Wrong::Cut]);
const LATE: (&str, &[Wrong]) = ("a rank that sleeps", &[Wrong::Sleeps]);

impl Wrong {
    /// Returns the word for it in the other ranks' errors.
    fn word(self) -> &'static str {
        match self {
            Self::HostBatch | Self::Saves | Self::SavesNot => "makes a different call",
            Self::Ends => "has left the group",
            Self::Fails => "no more samples",
            Self::Panics => "it panicked",
            Self::Label => "the label or id 77",
            Self::Driver => "planted on ",
            Self::Cut => "is gone",
            Self::Sleeps => "is late",
        }
    }
}

/// The time, place and kind of a fault.
#[derive(Clone, Debug)]
struct Moment {
    seed: u64,
    wrong: Wrong,
    plan: Plan,
    /// The number of updates per checkpoint.
    every: u64,
    /// The rank with the fault. For a cut connection, the end that is not rank 0.
    culprit: usize,
    update: usize,
    /// The part of the batch, which belongs to the culprit. For a cut connection, the part of any
    /// rank.
    part: usize,
    /// The driver call that fails, counted from that part.
    call: (Call, u64),
}

impl Moment {
    fn new(seed: u64, ranks: usize, ways: &[Wrong]) -> Self {
        let mut random = Random::new(1000 * seed + 10 * ranks as u64 + ways[0] as u64);
        let mut below = |bound: usize| random.below(bound as u32) as usize;
        let number = seed as usize;
        let wrong = ways[number % ways.len()];
        // Each way occurs both eager and captured.
        let captured = (number % ways.len() + number / ways.len()).is_multiple_of(2);
        let culprit = if wrong == Wrong::Cut { 1 + below(ranks - 1) } else { below(ranks) };
        let own = PARTS / ranks;
        let part = if wrong == Wrong::Cut { below(PARTS) } else { culprit * own + below(own) };
        // Ranks that make other calls must first have finished their queued work.
        let every = if matches!(wrong, Wrong::SavesNot | Wrong::Saves | Wrong::Ends) { 1 } else { 1 + below(3) as u64 };
        // Each kind of call may follow any part of an update.
        let call =
            if below(2) == 0 { (Call::Exchange, 1 + below(3) as u64) } else { (Call::Launch, 1 + below(2) as u64) };
        let plan = Plan { ranks, shards: SHARDS, captured, more: false, memory: Memory::Full };
        Self { seed, wrong, plan, every, culprit, update: below(UPDATES), part, call }
    }

    /// Returns the ranks of which the others name one.
    fn named(&self) -> Vec<usize> {
        match self.wrong {
            Wrong::Cut => vec![0, self.culprit],
            // If two ranks make different calls, neither can know which is right.
            Wrong::HostBatch | Wrong::Saves | Wrong::SavesNot if self.plan.ranks == 2 => vec![1],
            _ => vec![self.culprit],
        }
    }

    /// Returns the ranks that must end in time and give the cause.
    fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.plan.ranks).filter(|rank| self.wrong == Wrong::Cut || *rank != self.culprit)
    }
}

/// The data that all ranks of a run share.
struct Run<'r> {
    kind: DeviceKind,
    moment: &'r Moment,
    batches: &'r [Vec<Points>],
    folder: &'r Path,
    /// The time of the fault.
    at: OnceLock<Instant>,
    /// The number of other ranks that have received it.
    notified: AtomicUsize,
    plans: Vec<FaultPlan>,
    cable: Option<Cable>,
}

/// A part of a batch, and the run whose fault occurs when its values are requested.
struct FaultyBatch<'r>(Points, Option<&'r Run<'r>>);

impl HostBatch for FaultyBatch<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        self.1.map_or(Ok(()), Run::strike)?;
        self.0.inputs()
    }
}

impl Run<'_> {
    /// Records that the fault occurs now.
    fn now(&self) {
        self.at.set(Instant::now()).expect("once");
    }

    /// Causes the fault at a part of the batch.
    fn strike(&self) -> Result<()> {
        self.now();
        match self.moment.wrong {
            Wrong::Fails => {
                return Err(Error::Misuse { op: "test", expected: "samples".into(), got: "no more samples".into() });
            }
            Wrong::Panics => panic!("planted"),
            Wrong::Driver => {
                let (call, later) = self.moment.call;
                let plan = &self.plans[self.moment.culprit];
                drop(plan.clone().on(call, plan.count(call) + later, Fault::Fail));
            }
            Wrong::Cut => self.cable.as_ref().expect("the run has a cable").cut(),
            Wrong::Sleeps => {
                let others = self.moment.others().count();
                while self.notified.load(Ordering::Relaxed) < others && self.at.get().expect("now").elapsed() < DEADLINE
                {
                    thread::sleep(Duration::from_millis(5));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns batch `number` as a rank has it.
    fn batch(&self, rank: usize, number: usize) -> Vec<FaultyBatch<'_>> {
        let Moment { wrong, culprit, update, part, .. } = *self.moment;
        let mut batch: Vec<_> = self.batches[number].iter().map(|points| FaultyBatch(points.clone(), None)).collect();
        let strikes_here =
            if wrong == Wrong::Cut { part * self.moment.plan.ranks / PARTS == rank } else { rank == culprit };
        if number != update || !strikes_here {
            return batch;
        }
        let FaultyBatch(points, strikes) = &mut batch[part];
        match wrong {
            Wrong::HostBatch => {
                self.now();
                *points = points.clone().twice();
            }
            Wrong::Saves | Wrong::SavesNot | Wrong::Ends => {}
            _ => *strikes = Some(self),
        }
        if wrong == Wrong::Label {
            batch[part].0.labels[1] = 77;
        }
        batch
    }

    /// Runs a rank's program.
    fn train(&self, device: &Device, group: &Group) -> Result<()> {
        let Moment { wrong, plan, every, culprit, update, .. } = *self.moment;
        let rank = group.rank();
        let path = self.folder.join("checkpoint.safetensors");
        let mut arena = arena(device);
        let state = plan.state(device)?.in_group(group, plan.shards)?;
        let trainer = match plan.captured {
            true => Trainer::captured(&mut arena, state, &self.batches[0][1])?,
            false => Trainer::eager(&mut arena, state),
        };
        let mut trainer = trainer.checkpoint(&path, Some(every));
        let mut progress = EpochProgress::default();
        // The ranks must make their calls from the same line.
        let ended = |trainer: &mut Trainer<'_, _>, progress: &mut EpochProgress, numbers: Range<usize>| {
            trainer.fit_with(numbers.map(|number| Ok(self.batch(rank, number))), progress, &mut ())
        };
        let all = self.batches.len();
        if rank == culprit && matches!(wrong, Wrong::Saves | Wrong::SavesNot | Wrong::Ends) {
            ended(&mut trainer, &mut progress, 0..update)?;
            self.now();
            match wrong {
                Wrong::Saves => trainer.save(&progress, &[])?,
                Wrong::SavesNot => {
                    let mut trainer = trainer.checkpoint(&path, None);
                    ended(&mut trainer, &mut progress, update..all)?;
                }
                _ => {}
            }
            return Ok(());
        }
        let Err(error) = ended(&mut trainer, &mut progress, 0..all) else { return Ok(()) };
        if self.moment.others().any(|other| other == rank) {
            // Another update is refused.
            let again = trainer.update(&self.batches[0]).unwrap_err();
            let lost = self.waits_in_step() && matches!(again, Error::DeviceLost { .. });
            assert!(lost || self.names(&again), "{error}, and then: {again}");
            self.notified.fetch_add(1, Ordering::Relaxed);
        }
        Err(error)
    }

    /// True if two GPUs wait for each other. The rank that times out first cannot know which of
    /// them is stuck, and reports that. Its device is then lost.
    fn waits_in_step(&self) -> bool {
        self.kind == DeviceKind::Cuda && self.moment.wrong == Wrong::Sleeps
    }

    /// True if an error names the right rank.
    fn names(&self, error: &Error) -> bool {
        let Error::Rank(fault) = error else { return false };
        let (named, wrong) = (self.moment.named(), self.moment.wrong);
        if self.waits_in_step() && fault.kind == RankFaultKind::Stuck {
            return true;
        }
        let rightly = named.contains(&fault.rank) && error.to_string().contains(wrong.word());
        // Each end of a connection names the other.
        rightly && (wrong != Wrong::Cut || named.contains(&fault.found_by) && fault.found_by != fault.rank)
    }
}

/// Runs with the fault at this moment, and returns the time until the last other rank has ended.
/// Then the ranks on `left` resume. `whole` is the digest of an undisturbed run.
fn at(kind: DeviceKind, moment: &Moment, batches: &[Vec<Points>], left: &[Device], whole: &str) -> Duration {
    let Plan { ranks, .. } = moment.plan;
    let folder = tempfile::tempdir().unwrap();
    let (mut configs, mut cable) = (GroupConfig::on_this_host(ranks).unwrap(), None);
    if moment.wrong == Wrong::Cut {
        let address = format!("127.0.0.1:{}", free_port());
        let near = Cable::to(address.clone());
        let called = |rank| if rank == moment.culprit { near.address.clone() } else { address.clone() };
        configs = (0..ranks).map(|rank| GroupConfig::new(rank, ranks, called(rank))).collect();
        cable = Some(near);
    }
    let run = Run {
        kind,
        moment,
        batches,
        folder: folder.path(),
        at: OnceLock::new(),
        notified: AtomicUsize::new(0),
        plans: (0..ranks).map(|_| FaultPlan::new()).collect(),
        cable,
    };
    let ended = in_threads(configs, |config| {
        let plan = run.plans[config.rank()].clone();
        let device = Device::builder(kind).ordinal(config.local_rank()).deadline(DEADLINE).layer(plan).open()?;
        run.train(&device, &Group::join(&device, &config.deadline(PEER_TIMEOUT))?)
    });
    let at = *run.at.get().unwrap_or_else(|| panic!("{moment:?} was never reached: {ended:?}"));
    let mut took = Duration::ZERO;
    for rank in moment.others() {
        let (outcome, end) = &ended[rank];
        let Err(error) = outcome else { panic!("{moment:?}: rank {rank} returned no error") };
        let text = error.to_string();
        let placed = text.contains("(number ") && text.contains("tests/group/group_faults.rs:");
        assert!(placed && run.names(error), "{moment:?}: rank {rank} returned: {text}");
        took = took.max(end.saturating_duration_since(at));
    }
    assert!(took < PEER_TIMEOUT + MARGIN + BUSY, "{moment:?}: {took:?}");
    let path = folder.path().join("checkpoint.safetensors");
    let plan = Plan { ranks: ranks / 2, ..moment.plan };
    let outcomes = in_threads(GroupConfig::on_this_host(plan.ranks).unwrap(), |config| {
        let device = &left[config.rank()];
        train(plan, device, Some(Group::join(device, &config.deadline(DEADLINE))?), batches, Some(&path))
    });
    let mut updates = Vec::new();
    for (outcome, _) in outcomes {
        let digest;
        (updates, digest, _) =
            outcome.unwrap_or_else(|error| panic!("{moment:?}: the remaining ranks failed to resume: {error}"));
        assert_eq!(digest, whole, "{moment:?}: the remaining ranks' weights differ after {updates:?}");
    }
    let outcome =
        ended[moment.others().next().expect("another rank")].0.as_ref().expect_err("the check above found only errors");
    let Moment { seed, wrong, plan, .. } = moment;
    let how = if plan.captured { "captured" } else { "eager" };
    println!(
        "{wrong:?} of {ranks}, {how}, seed {seed}: {took:?}, and {} updates by those left: {outcome}",
        updates.len()
    );
    took
}

/// Runs a fault at random moments.
fn at_moments(kind: DeviceKind, ranks: usize, (name, ways): (&str, &[Wrong]), usual: u64) {
    let batches = uneven();
    let whole = train_ranks(
        Plan { ranks: 1, shards: SHARDS, captured: false, more: false, memory: Memory::Full },
        &batches,
        None,
    )
    .1;
    // A GPU takes long to open.
    let open = |ordinal| Device::builder(kind).ordinal(ordinal).deadline(DEADLINE).open().unwrap();
    let left: Vec<Device> = (0..ranks / 2).map(open).collect();
    let moment = |seed| at(kind, &Moment::new(seed, ranks, ways), &batches, &left, &whole);
    let seeds = moments(usual);
    // Some of them take as long as the deadline.
    let few = (seeds.end - seeds.start).div_ceil(4);
    let seeds = if name == LATE.0 { seeds.start..seeds.start + few } else { seeds };
    tell(name, ranks, PEER_TIMEOUT, seeds.map(moment).collect());
}

/// Runs a rendezvous whose port is taken, checks the error of each other rank, and returns the time
/// that they took.
fn at_a_taken_port(devices: &[Device], seed: u64) -> Duration {
    let ranks = devices.len();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let config = |rank| GroupConfig::new(rank, ranks, &address).secret("the secret of this test");
    match Random::new(1000 * seed + ranks as u64).below(4) {
        // The port accepts connections and never answers.
        0 => drop(thread::spawn(move || {
            thread::sleep(TO_MEET + BUSY);
            drop(taken);
        })),
        // The port closes connections, or sends something.
        says @ (1 | 2) => drop(thread::spawn(move || {
            while let Ok((mut stream, _)) = taken.accept() {
                let words: &[u8] = if says == 1 { b"" } else { b"HTTP/1.1 400 Bad Request\r\n\r\n" };
                let _ = stream.write_all(words);
            }
        })),
        // The port belongs to rank 0 of another group.
        _ => {
            drop(taken);
            let other = GroupConfig::new(0, 2, &address).secret("the secret of another group").deadline(3 * TO_MEET);
            thread::spawn(move || Group::join(&Device::open(DeviceKind::Emulated)?, &other).map(drop));
            while TcpStream::connect(&address).is_err() {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    let begun = Instant::now();
    let ended = in_threads((0..ranks).map(config).collect(), |config| {
        Group::join(&devices[config.rank()], &config.deadline(TO_MEET)).map(drop)
    });
    for (rank, (outcome, _)) in ended.iter().enumerate() {
        let Err(Error::Rendezvous(fault)) = outcome else { panic!("seed {seed}: rank {rank} returned {outcome:?}") };
        let text = fault.to_string();
        assert!(text.contains("rank 0 ") && text.contains(&address), "seed {seed}: rank {rank} returned: {text}");
        assert!(rank > 0 || matches!(fault.kind, RendezvousFaultKind::Taken { .. }), "seed {seed}: {text}");
    }
    in_time(begun, ended.iter().map(|(_, end)| *end))
}

/// Runs a rendezvous in which one rank has another secret.
fn at_a_wrong_secret(devices: &[Device], seed: u64) -> Duration {
    let ranks = devices.len();
    let mut random = Random::new(1000 * seed + ranks as u64);
    let culprit = random.below(ranks as u32) as usize;
    let mut configs = GroupConfig::on_this_host(ranks).unwrap();
    configs[culprit] = configs[culprit].clone().secret(format!("a wrong secret {}", random.below(u32::MAX)));
    let begun = Instant::now();
    let ended = in_threads(configs, |config| Group::join(&devices[config.rank()], &config.deadline(TO_MEET)).map(drop));
    for (rank, (outcome, _)) in ended.iter().enumerate() {
        let Err(Error::Rendezvous(fault)) = outcome else { panic!("seed {seed}: rank {rank} returned {outcome:?}") };
        let text = fault.to_string();
        let named = match &fault.kind {
            // The calling rank is refused at once.
            RendezvousFaultKind::Secret { rank: 0 } => culprit == 0 || rank == culprit,
            // Rank 0 knows the missing ranks and the reason, and so do the ranks that it can still
            // reach.
            RendezvousFaultKind::Missing { ranks: missing, .. } => {
                let all_others = (1..ranks).collect::<Vec<_>>();
                *missing == if culprit == 0 { all_others } else { vec![culprit] }
                    && (rank > 0 || text.contains("a different secret"))
            }
            _ => false,
        };
        assert!(named, "seed {seed}: rank {culprit} has a different secret; rank {rank} returned: {text}");
    }
    in_time(begun, ended.iter().enumerate().filter(|(rank, _)| *rank != culprit).map(|(_, (_, end))| *end))
}

fn in_time(begun: Instant, ends: impl Iterator<Item = Instant>) -> Duration {
    let took = ends.max().expect("another rank").saturating_duration_since(begun);
    assert!(took < TO_MEET + MARGIN + BUSY, "{took:?}");
    took
}

/// Runs failing rendezvous concurrently, because most of their time is waiting.
fn no_meetings(kind: DeviceKind, ranks: usize, usual: u64) {
    let open = |ordinal| Device::builder(kind).ordinal(ordinal).open().unwrap();
    let devices: Vec<Device> = (0..ranks).map(open).collect();
    let tell_of = |name, fault: fn(&[Device], u64) -> Duration| {
        let took = thread::scope(|scope| {
            let devices = &devices;
            let running: Vec<_> = moments(usual).map(|seed| scope.spawn(move || fault(devices, seed))).collect();
            running.into_iter().map(|moment| moment.join().unwrap()).collect()
        });
        tell(name, ranks, TO_MEET, took);
    };
    tell_of("a port that is taken", at_a_taken_port);
    tell_of("a wrong secret", at_a_wrong_secret);
}

/// Defines the tests for a kind of device and a number of ranks, each with its usual number of
/// moments.
macro_rules! faults_of {
    ($kind:ident, $ranks:literal,
     [$shape:literal, $left_out:literal, $exception:literal, $cut:literal, $late:literal, $meeting:literal], $(#[$how:meta])*) => {
        #[test]
        $(#[$how])*
        fn different_shape_is_named() {
            at_moments(DeviceKind::$kind, $ranks, SHAPE, $shape);
        }

        #[test]
        $(#[$how])*
        fn skipped_collective_is_named() {
            at_moments(DeviceKind::$kind, $ranks, LEFT_OUT, $left_out);
        }

        #[test]
        $(#[$how])*
        fn exception_reaches_all_ranks() {
            at_moments(DeviceKind::$kind, $ranks, EXCEPTION, $exception);
        }

        #[test]
        $(#[$how])*
        fn cut_connection_is_named() {
            at_moments(DeviceKind::$kind, $ranks, CUT, $cut);
        }

        #[test]
        $(#[$how])*
        fn sleeping_rank_is_late() {
            at_moments(DeviceKind::$kind, $ranks, LATE, $late);
        }

        #[test]
        $(#[$how])*
        fn failed_rendezvous_gives_its_cause() {
            no_meetings(DeviceKind::$kind, $ranks, $meeting);
        }
    };
}

mod two {
    use super::*;

    faults_of!(Emulated, 2, [1, 1, 1, 1, 1, 1],);
}

mod four {
    use super::*;

    faults_of!(Emulated, 4, [2, 3, 4, 2, 4, 2],);
}

/// Repeats the tests with NCCL.
#[cfg(feature = "cuda")]
mod two_gpus {
    use super::*;

    faults_of!(Cuda, 2, [2, 6, 8, 2, 8, 4], #[ignore = "needs two NVIDIA GPUs"]);
}

/// Repeats the tests with NCCL, for four ranks.
#[cfg(feature = "cuda")]
mod four_gpus {
    use super::*;

    faults_of!(Cuda, 4, [2, 6, 8, 2, 8, 4], #[ignore = "needs four NVIDIA GPUs"]);
}
