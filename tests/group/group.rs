//! Groups on the emulator, with threads of this process as ranks. Any number of ranks gives the
//! same bits, by one summation tree over the shards. A run resumes with another number of ranks,
//! and errors reach every rank.

#![forbid(unsafe_code)]

use crate::support::rank_threads::*;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::group::{Group, GroupConfig, RankFaultKind};
use stepscope::prelude::*;
use stepscope::train::Ended;

#[test]
fn rank_count_keeps_bits() {
    let batches = uneven();
    for (more, memory) in [
        (false, Memory::Full),
        (true, Memory::Full),
        (true, Memory::Small),
        (false, Memory::Smallest),
        (true, Memory::Smallest),
    ] {
        let one = train_ranks(Plan { ranks: 1, shards: 8, captured: false, more, memory }, &batches, None);
        assert!(one.0[3].loss < 0.9 * one.0[0].loss, "the loss must fall: {:?}", one.0);
        assert!(one.0.iter().all(|update| update.monitored_l2.is_some_and(|norm| norm > 0.0)));
        for ranks in [1, 2, 4, 8] {
            for captured in [false, true] {
                let plan = Plan { ranks, shards: 8, captured, more, memory };
                assert!(train_ranks(plan, &batches, None) == one, "{plan:?}");
            }
        }
        let other =
            train_ranks(Plan { ranks: 1, shards: 4, captured: false, more, memory: Memory::Full }, &batches, None);
        assert!(other.1 != one.1, "the number of shards must change a run's results");
    }
}

#[test]
fn one_shard_matches_no_group() {
    let batches = uneven();
    for more in [false, true] {
        let memory = if more { Memory::Full } else { Memory::Smallest };
        let plan = Plan { ranks: 1, shards: 1, captured: false, more, memory };
        let alone = train(plan, &Device::open(DeviceKind::Emulated).unwrap(), None, &batches, None).unwrap();
        assert!(train_ranks(plan, &batches, None) == alone);
        assert!(train_ranks(Plan { captured: true, ..plan }, &batches, None) == alone);
    }
}

#[test]
fn gradients_sum_in_one_shard_tree() {
    for memory in [Memory::Full, Memory::Smallest] {
        gradients_sum_in_tree(memory);
    }
}

fn gradients_sum_in_tree(memory: Memory) {
    let round = |sum: f32| if let Memory::Smallest = memory { bf16::from_f32(sum).to_f32() } else { sum };
    fn tree(shards: &[Vec<f32>], round: &impl Fn(f32) -> f32) -> Vec<f32> {
        match shards {
            [shard] => shard.clone(),
            _ => {
                let (left, right) = shards.split_at(shards.len() / 2);
                tree(left, round).iter().zip(tree(right, round)).map(|(left, right)| round(left + right)).collect()
            }
        }
    }
    let batch = &batches(|_| 4)[0];
    let plan = |ranks| Plan { ranks, shards: PARTS, captured: false, more: false, memory };
    let device = Device::open(DeviceKind::Emulated).unwrap();
    // The gradient of each shard by itself. The loss is divided by 64 samples and not by 4, so
    // these bits are an exact sixteenth.
    let alone: Vec<Vec<f32>> = batch
        .iter()
        .map(|shard| {
            let mut arena = arena(&device);
            let mut trainer = Trainer::eager(&mut arena, plan(1).state(&device).unwrap());
            trainer.accumulate(std::slice::from_ref(shard)).unwrap();
            let gradients = trainer.state().gradients.read_flat().unwrap();
            gradients.into_iter().map(|gradient| gradient / PARTS as f32).collect()
        })
        .collect();
    let want = tree(&alone, &round);
    for ranks in [1, 2, 8] {
        let updated = on_ranks((DeviceKind::Emulated, ranks), DEADLINE, |device, group| {
            let mut arena = arena(device);
            let state = plan(ranks).state(device)?.in_group(&group, PARTS)?;
            let mut trainer = Trainer::eager(&mut arena, state);
            trainer.accumulate(batch)?;
            let got = trainer.state().gradients.read_flat()?;
            let different = got.iter().zip(&want).position(|(got, want)| got.to_bits() != want.to_bits());
            assert_eq!(different, None, "{ranks} ranks: a gradient differs");
            trainer.apply()?;
            trainer.state().parameters.sha256()
        });
        let updated: Vec<String> = updated.into_iter().map(|sha| sha.unwrap()).collect();
        let whole = train_ranks(plan(1), std::slice::from_ref(batch), None).1;
        assert!(updated.iter().all(|sha| *sha == whole), "{ranks} ranks: the update after `accumulate` differs");
    }
}

#[test]
fn checkpoints_resume_with_other_ranks() {
    for memory in [Memory::Full, Memory::Smallest] {
        checkpoints_resume(memory);
    }
}

fn checkpoints_resume(memory: Memory) {
    let batches = uneven();
    let plan = |ranks| Plan { ranks, shards: 8, captured: ranks % 2 == 0, more: true, memory };
    let (_, whole, _) = train_ranks(plan(2), &batches, None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint.safetensors");
    let mut digests = Vec::new();
    for (made, ranks) in [4, 1, 8, 2, 4].into_iter().enumerate() {
        let (updates, sha, _) = train_ranks(plan(ranks), &batches[..=made], Some(&path));
        assert_eq!(updates.len(), 1, "{ranks} ranks: more than update {made} was made");
        digests.push(sha);
    }
    assert_eq!(digests[4], whole);
    // A single device resumes from it, too.
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let mut state = plan(1).state(&device).unwrap();
    Checkpoint::load(&path).unwrap().restore(&mut state.parameters, Some(&mut state.optimizer)).unwrap();
    assert_eq!((state.parameters.sha256().unwrap(), state.optimizer.updates()), (whole, 5));
}

/// Checks that all ranks stop after the same update.
#[test]
fn stop_on_one_rank_stops_all() {
    let batches = uneven();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint.safetensors");
    let plan = Plan { ranks: 4, shards: 4, captured: true, more: false, memory: Memory::Full };
    let ended = on_ranks((DeviceKind::Emulated, 4), DEADLINE, |device, group| {
        let (flag, rank) = (AtomicBool::new(false), group.rank());
        let mut arena = arena(device);
        let state = plan.state(device)?.in_group(&group, 4)?;
        let mut trainer = Trainer::captured(&mut arena, state, &batches[0][1])?.checkpoint(&path, None);
        trainer = trainer.stop_when(&flag);
        let mut progress = EpochProgress::default();
        let given = batches.iter().enumerate().map(|(number, batch)| {
            flag.store(rank == 2 && number == 1, Ordering::Relaxed);
            Ok(batch.clone())
        });
        Ok((trainer.fit_with(given, &mut progress, &mut ())?, progress.updates))
    });
    for ended in ended {
        assert_eq!(ended.unwrap(), (Ended::Stopped, 2));
    }
    assert_eq!(EpochProgress::of(&Checkpoint::load(&path).unwrap()).unwrap().updates, 2);
}

/// The shards of another training state, or an optimizer outside the group.
#[test]
fn mismatched_shards_are_refused() {
    let batch = &batches(|_| 2)[0];
    let joined = Barrier::new(2);
    let outcomes = on_ranks((DeviceKind::Emulated, 2), DEADLINE, |device, group| {
        let plan = Plan { ranks: 2, shards: 4, captured: false, more: false, memory: Memory::Full };
        let refused = |made: Result<_>, word: &str| {
            let error = made.map(drop).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        for shards in [0, 1, 3, 6, usize::MAX] {
            refused(
                plan.state(device)?.in_group(&group, shards).map(drop),
                "a power of two and a multiple of the ranks",
            );
        }
        // An optimizer outside the group holds the state of all weights.
        let mut state = plan.state(device)?.in_group(&group, 4)?;
        state.optimizer = plan.state(device)?.optimizer;
        let mut arena = arena(device);
        // Until both have joined, the refusal of one would end the other's call.
        joined.wait();
        refused(
            Trainer::eager(&mut arena, state).update(batch).map(drop),
            "the shards or the optimizer of another train state",
        );
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

/// The extra time for a busy machine.
const BUSY: Duration = Duration::from_secs(20);

/// Makes one update in a group of two; the device of rank 1 has this plan. Returns both results,
/// and the time that they took.
fn one_update(kind: DeviceKind, plan: &FaultPlan, deadline: Duration) -> (Vec<Result<String>>, Duration) {
    let batch = &batches(|_| 2)[0];
    let start = Instant::now();
    let outcomes = on_ranks_with(kind, &[FaultPlan::new(), plan.clone()], deadline, |device, group| {
        let way = Plan { ranks: 2, shards: 4, captured: false, more: false, memory: Memory::Full };
        let mut arena = arena(device);
        let mut trainer = Trainer::eager(&mut arena, way.state(device)?.in_group(&group, 4)?);
        trainer.update(batch)?;
        trainer.state().parameters.sha256()
    });
    (outcomes, start.elapsed())
}

fn link_call_never_returns(kind: DeviceKind) {
    const DEADLINE: Duration = Duration::from_secs(3);
    let counted = FaultPlan::new();
    let sound = one_update(kind, &counted, self::DEADLINE).0;
    let digest = sound[0].clone().unwrap();
    for call in [Call::JoinLink, Call::Exchange, Call::FollowExchanges, Call::LeaveLink] {
        let count = counted.count(call);
        assert!(count > 0, "the program never makes {call:?}");
        let mut numbers = vec![1, count];
        numbers.dedup();
        for number in numbers {
            let plan = FaultPlan::new().on(call, number, Fault::Never);
            let (outcomes, took) = one_update(kind, &plan, DEADLINE);
            println!("{call:?} {number} of {count}: {outcomes:?} after {took:?}");
            assert!(plan.count(call) >= number, "{call:?} {number} was never made");
            if call == Call::LeaveLink {
                // It frees at the end, with no caller to report to.
                assert!(outcomes.iter().all(|outcome| outcome.as_ref() == Ok(&digest)), "{outcomes:?}");
                continue;
            }
            assert!(took < DEADLINE + Duration::from_secs(2) + BUSY, "{call:?} {number}: {took:?}");
            for outcome in outcomes {
                let Err(Error::Rank(fault)) = outcome else { panic!("{call:?} {number}: {outcome:?}") };
                // Two GPUs wait for each other in step. The rank that times out first cannot know
                // which of them is stuck, and reports that.
                let stuck = kind == DeviceKind::Cuda && fault.kind == RankFaultKind::Stuck;
                assert!(stuck || (fault.rank, &fault.kind) == (1, &RankFaultKind::Late), "{call:?} {number}: {fault}");
                // The line that joins the group, or the line that uses it.
                let lines = ["support/rank_threads.rs:", "tests/group/group.rs:"];
                assert!(lines.iter().any(|line| fault.location.contains(line)), "{fault}");
            }
        }
    }
}

#[test]
fn hung_link_call_names_its_rank() {
    link_call_never_returns(DeviceKind::Emulated);
}

/// A device may wait for another rank, so the group's deadline applies, whatever the device's own
/// deadline.
#[test]
fn device_wait_meets_group_deadline() {
    const PEER_TIMEOUT: Duration = Duration::from_secs(3);
    let batch = &batches(|_| 2)[0];
    for captured in [false, true] {
        let plan = FaultPlan::new();
        let outcomes = in_threads(GroupConfig::on_this_host(2).unwrap(), |config| {
            let (rank, faults) = (config.rank(), if config.rank() == 0 { plan.clone() } else { FaultPlan::new() });
            let device = Device::builder(DeviceKind::Emulated).deadline(DEADLINE).layer(faults).open()?;
            let group = Group::join(&device, &config.deadline(PEER_TIMEOUT))?;
            let state = Plan { ranks: 2, shards: 4, captured, more: false, memory: Memory::Full }
                .state(&device)?
                .in_group(&group, 4)?;
            let mut arena = arena(&device);
            let mut trainer = match captured {
                true => Trainer::captured(&mut arena, state, &batch[0])?,
                false => Trainer::eager(&mut arena, state),
            };
            trainer.update(batch)?;
            if rank == 0 {
                for look in [Call::Poll, Call::PollFence] {
                    drop(plan.clone().on(look, plan.count(look) + 1, Fault::Stalls));
                }
            }
            let start = Instant::now();
            let error = trainer.update(batch).unwrap_err();
            assert!(start.elapsed() < PEER_TIMEOUT + Duration::from_secs(1) + BUSY, "{error}");
            Err::<(), _>(error)
        });
        for (rank, (outcome, _)) in outcomes.into_iter().enumerate() {
            let Err(Error::Rank(fault)) = outcome else { panic!("rank {rank}: {outcome:?}") };
            // The rank that notices first cannot know if its device is the cause.
            assert!(fault.rank == 0 && fault.location.contains("tests/group/group.rs:"), "rank {rank}: {fault}");
        }
    }
}

/// A rank that waits only for its device would otherwise learn of a fault at its deadline.
#[test]
fn link_ends_when_a_rank_fails() {
    let plans = [FaultPlan::new(), FaultPlan::new()];
    let updated = Barrier::new(2);
    let outcomes = on_ranks_with(DeviceKind::Emulated, &plans, DEADLINE, |device, group| {
        let plan = Plan { ranks: 2, shards: 4, captured: false, more: false, memory: Memory::Full };
        let mut batch = batches(|_| 2).swap_remove(0);
        let mut arena = arena(device);
        let mut trainer = Trainer::eager(&mut arena, plan.state(device)?.in_group(&group, 4)?);
        trainer.update(&batch)?;
        updated.wait();
        assert!(group.rank() == 0, "planted");
        let start = Instant::now();
        while plans[0].count(Call::LeaveLink) == 0 {
            assert!(start.elapsed() < DEADLINE, "the link must end when the other rank fails");
            thread::sleep(Duration::from_millis(5));
        }
        // This rank would also find an error of its own; the other rank's is reported.
        batch[0].labels[0] = 99;
        let error = trainer.update(&batch).unwrap_err().to_string();
        assert!(error.contains("rank 1 of 2 has failed") && error.contains("it panicked"), "{error}");
        Ok(())
    });
    assert_eq!(outcomes[0], Ok(()));
}

/// Repeats tests with NCCL.
#[cfg(feature = "cuda")]
mod two_gpus {
    use super::*;

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn gpu_groups_match_emulator_bits() {
        let batches = uneven();
        for (more, memory) in [(false, Memory::Full), (true, Memory::Full), (true, Memory::Smallest)] {
            let plan = |ranks, captured| Plan { ranks, shards: 8, captured, more, memory };
            let want = train_ranks(plan(2, false), &batches, None);
            for ranks in [1, 2] {
                for captured in [false, true] {
                    let got = train_ranks_on(DeviceKind::Cuda, plan(ranks, captured), &batches, None);
                    assert!(got == want, "{:?}: {got:?} is not {want:?}", plan(ranks, captured));
                }
            }
        }
    }

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn hung_link_call_names_its_rank() {
        link_call_never_returns(DeviceKind::Cuda);
    }

    /// Saves on two GPUs, then resumes on the emulator and on one GPU.
    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn checkpoint_resumes_on_other_devices() {
        let batches = uneven();
        let plan = |ranks| Plan { ranks, shards: 8, captured: true, more: true, memory: Memory::Full };
        let (_, whole, _) = train_ranks(plan(1), &batches, None);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint.safetensors");
        let mut digest = String::new();
        let runs = [(DeviceKind::Cuda, 2), (DeviceKind::Emulated, 4), (DeviceKind::Cuda, 1), (DeviceKind::Cuda, 2)];
        for (made, (kind, ranks)) in runs.into_iter().enumerate() {
            digest = train_ranks_on(kind, plan(ranks), &batches[..=made], Some(&path)).1;
        }
        assert!(digest != whole);
        assert_eq!(train_ranks_on(DeviceKind::Cuda, plan(2), &batches, Some(&path)).1, whole);
    }
}
