//! Ranks that stop, and connections that are cut or changed.

use super::tests::in_time;
use super::*;
use crate::testing::{Harm, PLENTY, all, call, configs, met, proxy, rank_fault};
use stepscope_core::SplitMix64;

#[test]
fn faults_arrive_before_goodbyes() {
    let mut meshes = met(3, PLENTY);
    {
        // Rank 2 notifies only rank 1, as if the others had not received it yet.
        let mut table = meshes[2].shared.lock();
        let fault = table.fault(2, RankFaultKind::Failed { reason: "planted".into() }, Duration::ZERO);
        table.peers[1].as_mut().expect("a peer").send(&Message::Fault(Box::new(fault)));
    }
    let start = Instant::now();
    while meshes[1].shared.lock().verdict.is_none() {
        assert!(start.elapsed() < PLENTY, "rank 1 is not notified");
        thread::sleep(Duration::from_millis(1));
    }
    drop(meshes.remove(1));
    let fault = rank_fault(meshes[0].agree(call("step", 1), &[]));
    assert!(fault.rank == 2 && matches!(fault.kind, RankFaultKind::Failed { .. }), "{fault}");
}

#[test]
fn external_waits_name_the_late_rank() {
    let waited = Duration::from_secs(7);
    let step = call("all_reduce", 1);
    let meshes = met(3, PLENTY);
    all(&meshes, |mesh| mesh.agree(step, &[]).expect("all agree"));
    // All are in the same op.
    let fault = rank_fault(Err::<(), _>(meshes[0].late(waited)));
    assert_eq!((fault.rank, &fault.kind, fault.waited), (0, &RankFaultKind::Stuck, waited), "{fault}");
    assert!(fault.to_string().contains("all 3 ranks are in `all_reduce` (number 1)"), "{fault}");

    // Another has not even begun it.
    let meshes = met(3, PLENTY);
    meshes[0].shared.lock().begin(step, &[]);
    meshes[2].shared.lock().begin(step, &[]);
    let start = Instant::now();
    while meshes[0].shared.lock().stuck(waited).rank == 2 {
        assert!(start.elapsed() < PLENTY, "rank 2's beats never name its op");
        thread::sleep(Duration::from_millis(5));
    }
    let fault = rank_fault(Err::<(), _>(meshes[0].late(waited)));
    assert_eq!((fault.rank, &fault.kind), (1, &RankFaultKind::Late), "{fault}");

    // Another has left.
    let mut meshes = met(2, PLENTY);
    all(&meshes, |mesh| mesh.agree(step, &[]).expect("all agree"));
    drop(meshes.pop());
    let fault = rank_fault(Err::<(), _>(meshes[0].late(waited)));
    assert_eq!((fault.rank, &fault.kind), (1, &RankFaultKind::Left), "{fault}");

    // The others have gone on, so this rank is late.
    let meshes = met(2, PLENTY);
    all(&meshes, |mesh| mesh.agree(step, &[]).expect("all agree"));
    meshes[1].shared.lock().begin(step, &[]);
    let start = Instant::now();
    while meshes[0].shared.lock().stuck(waited).kind == RankFaultKind::Stuck {
        assert!(start.elapsed() < PLENTY, "rank 1's beats never name its op");
        thread::sleep(Duration::from_millis(5));
    }
    let fault = rank_fault(Err::<(), _>(meshes[0].late(waited)));
    assert_eq!((fault.rank, &fault.kind), (0, &RankFaultKind::Late), "{fault}");
}

#[test]
fn cut_connection_is_noticed_at_once() {
    let meshes = met(3, PLENTY);
    // As the system does for a process that was killed.
    let killed = &meshes[1];
    let faults = all([0, 2], |rank: usize| {
        if rank == 2 {
            thread::sleep(Duration::from_millis(50));
            killed.streams.iter().flatten().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
        }
        rank_fault(meshes[rank].agree(call("step", 1), &[]))
    });
    for (fault, took) in faults {
        in_time(took, Duration::ZERO);
        // It is not visible which end cut a connection. The end that notices first names the other.
        assert!(matches!(fault.kind, RankFaultKind::Gone { .. }), "{fault}");
        assert!(fault.rank == 1 || fault.found_by == 1, "{fault}");
    }
}

#[test]
fn any_cut_connection_reaches_all() {
    // Several run at a time, because most of the time is waiting.
    all(0..20, |seed| {
        let mut random = SplitMix64::new(seed);
        let near = random.next_u64() as usize % 4;
        let far = (near + 1 + random.next_u64() as usize % 3) % 4;
        let moment = Duration::from_micros(random.next_u64() % 20_000);
        let meshes = met(4, PLENTY);
        let faults = all([Some(0), Some(1), Some(2), Some(3), None], |rank: Option<usize>| {
            let Some(rank) = rank else {
                thread::sleep(moment);
                meshes[near].streams[far]
                    .as_ref()
                    .expect("a connection")
                    .shutdown(Shutdown::Both)
                    .expect("the connection is open");
                return None;
            };
            let (next, last) = ((rank + 1) % 4, (rank + 3) % 4);
            let mut got = [0; 5_000];
            let error = loop {
                let round = meshes[rank]
                    .agree(call("step", 1), &[])
                    .and_then(|_| meshes[rank].send(next, &[rank as u8; 5_000]))
                    .and_then(|()| meshes[rank].receive(last, &mut got));
                if let Err(error) = round {
                    break error;
                }
            };
            Some(rank_fault(Err::<(), _>(error)))
        });
        for (fault, took) in faults {
            in_time(took, moment);
            let Some(fault) = fault else { continue };
            // Each end names the other. Both of them and the rest return what was reported first.
            let ends = [(near, far), (far, near)];
            assert!(ends.contains(&(fault.rank, fault.found_by)), "seed {seed}, {near} and {far}: {fault}");
            assert!(matches!(fault.kind, RankFaultKind::Gone { .. }), "seed {seed}: {fault}");
        }
    });
}

#[test]
fn original_faults_precede_their_consequences() {
    let waits_for_verdict = |mesh: &Mesh| {
        let start = Instant::now();
        while mesh.shared.lock().verdict.is_none() {
            assert!(start.elapsed() < PLENTY, "the rank is never notified");
            thread::sleep(Duration::from_millis(1));
        }
        mesh.fault_of_others().map(|error| rank_fault(Err::<(), _>(error)))
    };
    // One end of a cut connection may first be notified that it is itself gone.
    let meshes = met(2, PLENTY);
    let table = meshes[0].shared.lock();
    let fault = table.fault(1, RankFaultKind::Gone { reason: "planted".into() }, Duration::ZERO);
    meshes[0].conclude(table, fault.clone());
    for mesh in &meshes {
        assert_eq!(waits_for_verdict(mesh), Some(fault.clone()));
    }
    // A rank returns what it reported about itself.
    let meshes = met(2, PLENTY);
    meshes[0].fail(&Error::Label { sample: 3, label: 9, classes: 5 });
    assert_eq!(waits_for_verdict(&meshes[0]), None);
    assert_eq!(waits_for_verdict(&meshes[1]).map(|fault| fault.rank), Some(0));
}

#[test]
fn cut_anywhere_ends_all_in_time() {
    // Several run at a time, because most of the time is waiting.
    all(0..20, |seed| {
        let mut random = SplitMix64::new(seed);
        let deadline = Duration::from_millis(800);
        let mut configs = configs(3, deadline);
        // About the size of the rendezvous, and then of some rounds and data.
        let bytes = random.next_u64() as usize % if seed % 2 == 0 { 900 } else { 200_000 };
        configs[1].address = proxy(configs[0].address.clone(), bytes, Harm::Cut);
        let ends = all(configs, |config| -> Result<()> {
            let mesh = Mesh::join(&config)?;
            let start = Instant::now();
            loop {
                let work = || -> Result<()> {
                    mesh.agree(call("step", 1), &[1; 100])?;
                    let next = (mesh.rank() + 1) % 3;
                    mesh.send(next, &[mesh.rank() as u8; 5_000])?;
                    let mut got = [0; 5_000];
                    let last = (mesh.rank() + 2) % 3;
                    mesh.receive(last, &mut got)?;
                    assert!(got.iter().all(|byte| *byte as usize == last));
                    Ok(())
                };
                work()?;
                assert!(start.elapsed() < PLENTY, "the proxy never cut the connection");
            }
        });
        for (rank, (end, took)) in ends.into_iter().enumerate() {
            let error = end.expect_err("the connection is cut");
            // The rendezvous and one call. No deadline is added to another.
            in_time(took, 2 * deadline);
            assert!(matches!(error, Error::Rank(_) | Error::Rendezvous(_)), "seed {seed}, rank {rank}: {error}");
        }
    });
}

#[test]
fn no_altered_data_is_accepted() {
    // Several run at a time, because most of the time is waiting.
    all(0..20, |seed| {
        let mut random = SplitMix64::new(seed);
        let deadline = Duration::from_millis(800);
        let mut configs = configs(3, deadline);
        // Within the rendezvous, or after it. A rank whose handshake fails connects again.
        let in_rendezvous = seed % 2 == 0;
        let bytes = random.next_u64() as usize % if in_rendezvous { 900 } else { 200_000 };
        let bytes = if in_rendezvous { bytes } else { 3_000 + bytes };
        configs[1].address = proxy(configs[0].address.clone(), bytes, Harm::Alter);
        let ends = all(configs, |config| -> Result<()> {
            let mesh = Mesh::join(&config)?;
            for round in 0..if in_rendezvous { 2 } else { 200 } {
                let words = mesh.agree(call("step", round), &[mesh.rank() as u8; 100])?;
                assert_eq!(words, [[0; 100], [1; 100], [2; 100]]);
                mesh.send((mesh.rank() + 1) % 3, &[mesh.rank() as u8; 5_000])?;
                let (last, mut got) = ((mesh.rank() + 2) % 3, [0; 5_000]);
                mesh.receive(last, &mut got)?;
                assert!(got.iter().all(|byte| *byte as usize == last), "seed {seed}: altered data was accepted");
            }
            Ok(())
        });
        let errors: Vec<_> = ends.into_iter().filter_map(|(end, _)| end.err()).collect();
        let is_named = |error: &Error| error.to_string().contains("was altered, repeated or left out");
        if !in_rendezvous {
            assert_eq!(errors.len(), 3, "seed {seed}: {errors:?}");
            assert!(errors.iter().any(is_named), "seed {seed}: {errors:?}");
        }
        assert!(errors.iter().all(|error| matches!(error, Error::Rank(_) | Error::Rendezvous(_))), "{errors:?}");
    });
}

#[test]
fn silent_rank_delays_at_most_deadline() {
    // Rank 1 meets the others and then stops, as by SIGSTOP. It neither reads nor writes.
    let deadline = Duration::from_millis(500);
    let results = all(configs(2, PLENTY), |config| {
        if config.rank() == 1 {
            let channels = rendezvous::meet(&config).expect("the ranks meet");
            thread::sleep(Duration::from_secs(4));
            drop(channels);
            return None;
        }
        let mesh = Arc::into_inner(Mesh::join(&config).expect("the ranks meet"))
            .expect("no other handle of the mesh exists")
            .within(deadline);
        let start = Instant::now();
        let fault = rank_fault(mesh.send(1, &vec![1; 256 << 20]));
        let took = start.elapsed();
        let start = Instant::now();
        drop(mesh);
        Some((fault, took, start.elapsed()))
    });
    let (fault, took, dropped) = results[0].0.as_ref().expect("rank 0's");
    assert!(*took >= deadline && *took < Duration::from_secs(4), "took {took:?}");
    assert!(*dropped < GOODBYE + Duration::from_secs(2), "the drop took {dropped:?}");
    assert_eq!((fault.rank, &fault.kind), (1, &RankFaultKind::Late), "{fault}");
}

#[test]
fn threads_end_with_the_mesh() {
    let shared: Vec<_> = met(4, PLENTY).into_iter().map(|mesh| mesh.shared.clone()).collect();
    let start = Instant::now();
    while !shared.iter().all(|shared| shared.lock().is_quiet()) {
        assert!(start.elapsed() < PLENTY, "threads outlive their mesh");
        thread::sleep(Duration::from_millis(5));
    }
}
