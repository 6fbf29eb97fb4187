use super::*;
use crate::testing::{PLENTY, SLACK, all, call, met, rank_fault};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The deadline for events that do not happen.
const SHORT: Duration = Duration::from_millis(400);

impl Mesh {
    /// Sets another deadline.
    pub(crate) fn within(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

pub(super) fn in_time(took: Duration, deadline: Duration) {
    assert!(took < deadline + Duration::from_secs(1) + SLACK, "took {took:?} with a deadline of {deadline:?}");
}

#[test]
fn words_arrive_by_rank() {
    for ranks in [1, 2, 4, 8] {
        let rounds = all(met(ranks, PLENTY), |mesh| {
            assert_eq!((mesh.ranks(), mesh.deadline()), (ranks, PLENTY));
            for round in 0..50 {
                let word = |rank: usize| vec![rank as u8; 1 + round * rank];
                let words = mesh.agree(call("all_gather", round as u64), &word(mesh.rank())).expect("all agree");
                assert_eq!(words, (0..ranks).map(word).collect::<Vec<_>>(), "rank {} round {round}", mesh.rank());
            }
        });
        assert_eq!(rounds.len(), ranks);
    }
}

#[test]
fn word_length_is_limited() {
    all(met(2, PLENTY), |mesh| {
        let words =
            mesh.agree(call("word", 1), &vec![7; MOST_WORD]).expect("a word of the greatest length is accepted");
        assert!(words.iter().all(|word| *word == vec![7; MOST_WORD]));
        let refused = mesh.agree(call("word", 1), &vec![7; MOST_WORD + 1]);
        assert!(matches!(refused, Err(Error::Misuse { op: "word", .. })), "{refused:?}");
    });
}

#[test]
fn large_simultaneous_sends_do_not_deadlock() {
    const BYTES: usize = 64 << 20;
    all(met(2, PLENTY), |mesh| {
        let other = 1 - mesh.rank();
        let sent: Vec<u8> = (0..BYTES).map(|at| ((at * (7 + mesh.rank())) >> 3) as u8).collect();
        mesh.send(other, &sent).expect("the send succeeds");
        mesh.agree(call("exchange", 1), &[]).expect("a round may overtake data");
        let mut got = vec![0; BYTES];
        mesh.receive(other, &mut got).expect("the receive succeeds");
        assert!(got.iter().enumerate().all(|(at, byte)| *byte == ((at * (7 + other)) >> 3) as u8));
    });
}

#[test]
fn messages_arrive_in_order() {
    let lengths = [0, 1, 5, MOST_PIECE - 1, MOST_PIECE, MOST_PIECE + 1, 0, 3 * MOST_PIECE, 17];
    for ranks in [2, 4] {
        all(met(ranks, PLENTY), |mesh| {
            let others: Vec<_> = (0..ranks).filter(|rank| *rank != mesh.rank()).collect();
            for (number, length) in lengths.into_iter().enumerate() {
                for to in &others {
                    mesh.send(*to, &vec![(16 * mesh.rank() + number) as u8; length]).expect("the send succeeds");
                }
            }
            for from in others {
                for (number, length) in lengths.into_iter().enumerate() {
                    let mut got = vec![0; length];
                    mesh.receive(from, &mut got).expect("the receive succeeds");
                    assert!(got.iter().all(|byte| *byte == (16 * from + number) as u8));
                }
            }
        });
    }
}

#[test]
fn sending_to_itself_is_refused() {
    all(met(2, PLENTY), |mesh| {
        for rank in [mesh.rank(), 2, usize::MAX] {
            assert!(matches!(mesh.send(rank, &[1]), Err(Error::Misuse { op: "send", .. })));
            assert!(matches!(mesh.receive(rank, &mut [1]), Err(Error::Misuse { op: "receive", .. })));
        }
    });
}

#[test]
fn a_length_that_differs_is_named() {
    let meshes = met(2, SHORT);
    all(&meshes, |mesh| mesh.agree(call("exchange", 4), &[]).expect("all agree"));
    let faults = all(meshes, |mesh| {
        if mesh.rank() == 1 {
            // Rank 0 may report the length before this rank has sent all bytes.
            return rank_fault(mesh.send(0, &[1, 2, 3]).and_then(|()| mesh.receive(0, &mut [0])));
        }
        rank_fault(mesh.receive(1, &mut [0; 4]))
    });
    for (fault, took) in faults {
        in_time(took, SHORT);
        assert_eq!((fault.rank, fault.found_by, fault.op.as_str(), fault.sequence), (1, 0, "exchange", 1));
        assert_eq!(fault.kind, RankFaultKind::Differs { expected: "4 bytes".into(), got: "3".into() });
        assert!(fault.location.contains("mesh/tests.rs:"), "{fault}");
    }
}

/// Checks the error on all ranks when rank `odd` makes another call than the others.
fn differing(ranks: usize, odd: usize, common: Call, other: Call) {
    let meshes = met(ranks, PLENTY);
    all(&meshes, |mesh| mesh.agree(call("before", 1), &[]).expect("all agree"));
    let faults = all(meshes, |mesh| {
        let fault = rank_fault(mesh.agree(if mesh.rank() == odd { other } else { common }, &[]));
        assert_eq!(rank_fault(mesh.agree(common, &[])), fault, "every later call must return the same fault");
        fault
    });
    // Two ranks have no majority, and rank 0 counts.
    let culprit = if ranks == 2 { 1 } else { odd };
    for (fault, took) in faults {
        in_time(took, VOTE_TIMEOUT);
        let text = fault.to_string();
        assert_eq!((fault.rank, fault.sequence), (culprit, 2), "{text}");
        assert!(text.contains(&format!("rank {culprit} of {ranks} makes a different call than the others")), "{text}");
        for Call { op, element, count, location } in [common, other] {
            assert!(text.contains(&format!("`{op}` of {count} {element} at {location}")), "{text}");
        }
    }
}

#[test]
fn differing_calls_name_rank_and_lines() {
    let common = call("all_reduce", 1024);
    for ranks in [2, 4] {
        for odd in [0, ranks - 1] {
            differing(ranks, odd, common, Call { op: "all_gather", ..common });
            differing(ranks, odd, common, Call { element: "bf16", ..common });
            differing(ranks, odd, common, Call { count: 1025, ..common });
            differing(ranks, odd, common, call("all_reduce", 1024));
        }
    }
}

#[test]
fn skipped_call_is_found_at_next() {
    let [first, second] = [call("all_reduce", 8), call("all_gather", 8)];
    let faults = all(met(4, PLENTY), |mesh| {
        if mesh.rank() != 2 {
            let fault = mesh.agree(first, &[]);
            return rank_fault(fault);
        }
        rank_fault(mesh.agree(second, &[]))
    });
    for (fault, took) in faults {
        in_time(took, VOTE_TIMEOUT);
        assert_eq!((fault.rank, fault.sequence), (2, 1), "{fault}");
        let text = fault.to_string();
        assert!(text.contains(&first.location.to_string()) && text.contains(&second.location.to_string()), "{text}");
    }
}

#[test]
fn late_rank_and_last_call_named() {
    for ranks in [2, 4] {
        let late = ranks - 1;
        let before = call("before", 3);
        let meshes = met(ranks, SHORT);
        all(&meshes, |mesh| mesh.agree(before, &[]).expect("all agree"));
        let faults = all(meshes, |mesh| {
            if mesh.rank() == late {
                // It is notified in the end, too.
                let start = Instant::now();
                while mesh.shared.lock().verdict.is_none() {
                    assert!(start.elapsed() < PLENTY, "no rank named the late rank");
                    thread::sleep(Duration::from_millis(5));
                }
            }
            let start = Instant::now();
            (rank_fault(mesh.agree(call("step", 1), &[])), start.elapsed())
        });
        for (rank, ((fault, waited), _)) in faults.into_iter().enumerate() {
            in_time(waited, SHORT);
            assert!(rank == late || fault.found_by != rank || waited >= SHORT, "{waited:?}");
            assert_eq!((fault.rank, &fault.kind), (late, &RankFaultKind::Late), "{fault}");
            assert_eq!((fault.op.as_str(), fault.sequence), ("step", 2), "{fault}");
            let last = fault.last.as_ref().expect("the late rank sent a message before");
            assert_eq!((last.op.as_str(), last.sequence, &last.location), ("before", 1, &before.location.to_string()));
            assert!(fault.to_string().contains("Last message from"), "{fault}");
        }
    }
}

#[test]
fn missing_transfers_name_the_rank() {
    let meshes = met(2, SHORT);
    all(&meshes, |mesh| mesh.agree(call("exchange", 4), &[]).expect("all agree"));
    let faults = all(meshes, |mesh| {
        let result = if mesh.rank() == 0 { mesh.receive(1, &mut [0; 4]) } else { Ok(()) };
        // Nothing is dropped before rank 0 has its result.
        if mesh.rank() == 0 {
            return Some(rank_fault(result));
        }
        while mesh.shared.lock().verdict.is_none() {
            thread::sleep(Duration::from_millis(5));
        }
        None
    });
    in_time(faults[0].1, SHORT);
    let fault = faults[0].0.as_ref().expect("rank 0's");
    assert_eq!((fault.rank, &fault.kind, fault.op.as_str()), (1, &RankFaultKind::Late, "exchange"), "{fault}");
}

#[test]
fn waiting_ranks_are_not_blamed() {
    // Rank 0 waits for 1, which waits for 2, which waits for none. Rank 0 is the first to reach its
    // deadline.
    let meshes = met(3, PLENTY);
    all(&meshes, |mesh| mesh.agree(call("exchange", 4), &[]).expect("all agree"));
    let faults = all(meshes, |mesh| match mesh.rank() {
        0 => {
            let mesh =
                Arc::into_inner(mesh).expect("no other handle of the mesh exists").within(Duration::from_secs(1));
            Some(rank_fault(mesh.receive(1, &mut [0; 4])))
        }
        1 => Some(rank_fault(mesh.receive(2, &mut [0; 4]))),
        _ => {
            while mesh.shared.lock().verdict.is_none() {
                thread::sleep(Duration::from_millis(5));
            }
            None
        }
    });
    for (fault, _) in &faults[..2] {
        assert_eq!(fault.as_ref().map(|fault| (fault.rank, fault.found_by)), Some((2, 0)), "{fault:?}");
    }
}

#[test]
fn departed_rank_is_named_at_once() {
    let mut meshes = met(3, PLENTY);
    drop(meshes.remove(1));
    for (fault, took) in all(meshes, |mesh| rank_fault(mesh.agree(call("step", 1), &[]))) {
        in_time(took, Duration::ZERO);
        assert_eq!((fault.rank, &fault.kind), (1, &RankFaultKind::Left), "{fault}");
        assert!(fault.to_string().contains("rank 1 of 3 has left the group"), "{fault}");
    }
}

#[test]
fn data_of_departed_rank_still_arrives() {
    let mut meshes = met(2, PLENTY);
    let (last, first) = (meshes.pop().expect("rank 1"), meshes.pop().expect("rank 0"));
    thread::scope(|scope| {
        scope.spawn(|| {
            last.send(0, &vec![9; 3 * MOST_PIECE]).expect("the send succeeds");
            drop(last);
        });
        let mut got = vec![0; 3 * MOST_PIECE];
        first.receive(1, &mut got).expect("the receive succeeds");
        assert!(got.iter().all(|byte| *byte == 9));
        let fault = rank_fault(first.receive(1, &mut got));
        assert_eq!((fault.rank, fault.kind), (1, RankFaultKind::Left));
    });
}

#[test]
fn orderly_end_is_not_a_fault() {
    for _ in 0..10 {
        all(met(4, PLENTY), |mesh| {
            for _ in 0..3 {
                mesh.agree(call("step", 1), &[]).expect("all agree");
            }
            let start = Instant::now();
            drop(mesh);
            assert!(start.elapsed() < GOODBYE + SLACK);
        });
    }
}

#[test]
fn failure_reaches_all_with_its_reason() {
    let step = call("step", 1);
    let meshes = met(4, PLENTY);
    all(&meshes, |mesh| mesh.agree(step, &[]).expect("all agree"));
    let faults = all(meshes, |mesh| {
        if mesh.rank() == 2 {
            mesh.fail(&Error::Label { sample: 3, label: 9, classes: 5 });
        }
        rank_fault(mesh.agree(call("next", 1), &[]))
    });
    for (fault, took) in faults {
        in_time(took, Duration::ZERO);
        assert_eq!((fault.rank, fault.sequence, &fault.location), (2, 1, &step.location.to_string()), "{fault}");
        assert!(fault.to_string().contains("sample 3 has the label or id 9"), "{fault}");
    }
}

#[test]
fn fault_actions_run_once_per_rank() {
    let (done, on_rank) = mpsc::channel();
    let meshes = met(3, PLENTY);
    for mesh in &meshes {
        let (done, rank) = (done.clone(), mesh.rank());
        mesh.at_fault(move || done.send(rank).expect("the test waits")).expect("a thread");
    }
    assert_eq!(on_rank.recv_timeout(Duration::from_millis(50)), Err(mpsc::RecvTimeoutError::Timeout));
    // No rank waits for anything here.
    meshes[1].fail(&Error::Label { sample: 3, label: 9, classes: 5 });
    meshes[1].fail(&Error::Label { sample: 4, label: 9, classes: 5 });
    let mut ranks: Vec<_> =
        (0..3).map(|_| on_rank.recv_timeout(PLENTY).expect("all three ranks report the fault")).collect();
    ranks.sort();
    assert_eq!(ranks, [0, 1, 2]);
    // A callback that is registered too late also runs.
    let done_late = done.clone();
    meshes[0].at_fault(move || done_late.send(7).expect("the test waits")).expect("a thread");
    assert_eq!(on_rank.recv_timeout(PLENTY), Ok(7));
    drop((meshes, done));
    assert_eq!(
        on_rank.recv_timeout(PLENTY),
        Err(mpsc::RecvTimeoutError::Disconnected),
        "`at_fault` must run only once"
    );

    // A normal end is no fault.
    let (done, undone) = mpsc::channel::<usize>();
    for mesh in met(2, PLENTY) {
        let done = done.clone();
        mesh.at_fault(move || done.send(0).expect("the test waits")).expect("a thread");
    }
    drop(done);
    assert_eq!(undone.recv_timeout(PLENTY), Err(mpsc::RecvTimeoutError::Disconnected));
}

#[test]
fn panic_reaches_all_at_once() {
    let meshes = met(2, PLENTY);
    all(&meshes, |mesh| mesh.agree(call("step", 1), &[]).expect("all agree"));
    let faults = all(meshes, |mesh| {
        if mesh.rank() == 1 {
            let panicked = catch_unwind(AssertUnwindSafe(move || {
                let _dropped = mesh;
                panic!("planted");
            }));
            assert!(panicked.is_err());
            return None;
        }
        Some(rank_fault(mesh.agree(call("next", 1), &[])))
    });
    in_time(faults[0].1, Duration::ZERO);
    let fault = faults[0].0.as_ref().expect("rank 0's");
    assert!(matches!(&fault.kind, RankFaultKind::Failed { reason } if reason.contains("panicked")), "{fault}");
    assert_eq!((fault.rank, fault.op.as_str()), (1, "step"));
}

#[test]
fn the_culprit_is_passed_on() {
    // Rank 2 does not arrive. Rank 1 ends because of it, long before rank 0 would, and also returns
    // the fault itself.
    let meshes: Vec<_> = met(3, PLENTY);
    let faults = all(meshes, |mesh| {
        let step = call("step", 1);
        match mesh.rank() {
            0 => Some(rank_fault(mesh.agree(step, &[]))),
            1 => {
                let mesh = Arc::into_inner(mesh).expect("no other handle of the mesh exists").within(SHORT);
                let error = mesh.agree(step, &[]).expect_err("rank 2 is late");
                mesh.fail(&error);
                Some(rank_fault(Err::<(), _>(error)))
            }
            _ => {
                while mesh.shared.lock().verdict.is_none() {
                    thread::sleep(Duration::from_millis(5));
                }
                None
            }
        }
    });
    for (fault, _) in &faults[..2] {
        let fault = fault.as_ref().expect("a fault");
        assert_eq!((fault.rank, fault.found_by, &fault.kind), (2, 1, &RankFaultKind::Late), "{fault}");
    }
}

/// Checks that a word of another program is its rank's fault, on all ranks.
#[test]
fn unreadable_words_name_their_rank() {
    let faults = all(met(2, PLENTY), |mesh| {
        let word: &[u8] = if mesh.rank() == 1 { b"17, then" } else { b"[17]" };
        match mesh.agree(call("agree_on", 0), word) {
            Ok(words) if mesh.rank() == 0 => rank_fault(mesh.parse::<Vec<u64>>(&words)),
            // This rank learns of it in its next call, or now if rank 0 was quick.
            Ok(_) => rank_fault(mesh.agree(call("agree_on", 0), word)),
            Err(error) => rank_fault(Err::<(), _>(error)),
        }
    });
    for (fault, _) in faults {
        assert_eq!((fault.rank, fault.found_by, fault.op.as_str(), fault.sequence), (1, 0, "agree_on", 1));
        assert!(matches!(fault.kind, RankFaultKind::Unreadable { .. }), "{fault}");
        let text = fault.to_string();
        for part in ["rank 1 of 2 sent a message", "rank 0 cannot read", "Start the same program"] {
            assert!(text.contains(part), "{text}");
        }
    }
    let readable = all(met(2, PLENTY), |mesh| {
        let words = mesh.agree(call("agree_on", 0), format!("[{}]", mesh.rank()).as_bytes()).expect("all agree");
        mesh.parse::<Vec<u64>>(&words).expect("both words are lists")
    });
    assert!(readable.into_iter().all(|(lists, _)| lists == [[0], [1]]));
}
