//! Ranks that are processes, which are killed or stopped at random times.

use super::*;
use crate::testing::{PLENTY, SLACK, call, free_port};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use stepscope_core::SplitMix64;

/// The deadline of the ranks in these tests.
const DEADLINE: Duration = Duration::from_secs(1);
/// The number of random times for each signal. STEPSCOPE_GROUP_ENDS overrides it.
const MOMENTS: u64 = 3;

#[test]
#[ignore = "a process of a rank, which the tests below start"]
fn a_rank() {
    // If all ignored tests run, this one was not started as a rank.
    let Some(config) = GroupConfig::from_environment().expect("variables") else { return };
    let mesh = Mesh::join(&config.deadline(PLENTY)).expect("the ranks meet");
    let mesh = Arc::into_inner(mesh).expect("no other handle of the mesh exists").within(DEADLINE);
    println!("met");
    let (next, last) = ((mesh.rank() + 1) % mesh.ranks(), (mesh.rank() + mesh.ranks() - 1) % mesh.ranks());
    let mut got = vec![0; 100_000];
    let error = loop {
        let round = mesh
            .agree(call("exchange", 100_000), &[])
            .and_then(|_| mesh.send(next, &vec![mesh.rank() as u8; 100_000]))
            .and_then(|()| mesh.receive(last, &mut got));
        if let Err(error) = round {
            break error;
        }
        assert!(got.iter().all(|byte| *byte as usize == last));
    };
    println!("ended: {error}");
}

fn start(rank: usize, ranks: usize, port: u16) -> Child {
    let program = std::env::current_exe().expect("this test's program");
    Command::new(program)
        .args(["--ignored", "--exact", "mesh::processes::a_rank", "--nocapture"])
        .envs(
            [("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_RANK", rank), ("MASTER_PORT", port.into())]
                .map(|(name, number)| (name, number.to_string())),
        )
        .env("MASTER_ADDR", "127.0.0.1")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a process")
}

/// Sends a signal to one of the ranks, at a time that the seed determines. Returns the time until
/// all others had ended.
fn ended(ranks: usize, signal: &str, seed: u64) -> Duration {
    let port = free_port();
    let mut random = SplitMix64::new(seed);
    let victim = random.next_u64() as usize % ranks;
    let mut children: Vec<_> = (0..ranks).map(|rank| start(rank, ranks, port)).collect();
    for child in &mut children {
        let (mut printed, mut byte) = (Vec::new(), [0]);
        let output = child.stdout.as_mut().expect("a pipe");
        while !printed.ends_with(b"met\n") {
            output.read_exact(&mut byte).expect("the ranks meet");
            printed.push(byte[0]);
        }
    }
    thread::sleep(Duration::from_micros(random.next_u64() % 300_000));
    let (start, mut took) = (Instant::now(), Duration::ZERO);
    let status = Command::new("kill").args([signal, &children[victim].id().to_string()]).status().expect("kill");
    assert!(status.success());
    for rank in (0..ranks).filter(|rank| *rank != victim) {
        let mut printed = String::new();
        children[rank].stdout.take().expect("a pipe").read_to_string(&mut printed).expect("text");
        took = start.elapsed();
        let what = format!("{signal} of rank {victim} of {ranks}, seed {seed}, rank {rank} after {took:?}: {printed}");
        // A closed connection is noticed at once.
        let most = if signal == "-KILL" { Duration::ZERO } else { DEADLINE };
        assert!(took < most + Duration::from_secs(1) + SLACK, "{what}");
        let fault = if signal == "-KILL" { "is gone" } else { "is late" };
        assert!(printed.contains(&format!("ended: rank {victim} of {ranks} {fault}")), "{what}");
        assert!(printed.contains("`exchange` (number ") && printed.contains("mesh/processes.rs:"), "{what}");
    }
    for child in &mut children {
        let _ = child.kill();
        let _ = child.wait();
    }
    took
}

fn at_random_moments(signal: &str) {
    let moments = std::env::var("STEPSCOPE_GROUP_ENDS")
        .map_or(MOMENTS, |text| text.parse().expect("STEPSCOPE_GROUP_ENDS is a number"));
    let ends = (0..moments).flat_map(|seed| [2, 4].map(|ranks| ended(ranks, signal, seed)));
    let took: Vec<_> = ends.collect();
    println!("{signal} of {} ranks: the others ended after at most {:?}", took.len(), took.iter().max());
}

#[test]
fn killed_process_is_named() {
    at_random_moments("-KILL");
}

#[test]
fn stopped_process_is_named() {
    at_random_moments("-STOP");
}
