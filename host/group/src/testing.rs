//! Groups for the tests of this folder, whose ranks are threads of a test.

#![forbid(unsafe_code)]

use super::config::GroupConfig;
use super::mesh::{Call, Mesh};
use super::secret::random;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::panic::Location;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use stepscope_core::{Error, RankFault, RendezvousFault, Result};

/// The time that anything may take beyond its deadline on a busy machine.
pub(super) const SLACK: Duration = Duration::from_secs(4);
/// A time that no test reaches.
pub(super) const PLENTY: Duration = Duration::from_secs(60);

#[track_caller]
pub(super) fn call(op: &'static str, count: u64) -> Call {
    Call { op, element: "f32", count, location: Location::caller() }
}

/// Returns a free port of this host, outside the range that the system hands out to callers.
pub(super) fn free_port() -> u16 {
    let ports = std::iter::repeat_with(|| 20_000 + u16::from_le_bytes(random().expect("random numbers")) % 10_000);
    ports.take(1000).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a free port")
}

/// Returns one configuration per rank, with this deadline.
pub(super) fn configs(ranks: usize, deadline: Duration) -> Vec<GroupConfig> {
    let configs = GroupConfig::on_this_host(ranks).expect("a port");
    configs.into_iter().map(|config| config.deadline(deadline)).collect()
}

/// Runs `work` for each item on a thread of its own, and returns the results with their times.
pub(super) fn all<C: Send, T: Send>(
    each: impl IntoIterator<Item = C>,
    work: impl Fn(C) -> T + Sync,
) -> Vec<(T, Duration)> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = each
            .into_iter()
            .map(|one| {
                scope.spawn(move || {
                    let start = Instant::now();
                    (work(one), start.elapsed())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank of the test panicked")).collect()
    })
}

/// Returns a group that has met with ample time, and then has this deadline.
pub(super) fn met(ranks: usize, deadline: Duration) -> Vec<Arc<Mesh>> {
    let met = all(configs(ranks, PLENTY), |config| Mesh::join(&config).expect("the ranks meet"));
    let within = |(mesh, _): (Arc<Mesh>, _)| {
        Arc::new(Arc::into_inner(mesh).expect("no other handle of the mesh exists").within(deadline))
    };
    met.into_iter().map(within).collect()
}

pub(super) fn rank_fault<T: std::fmt::Debug>(result: Result<T>) -> RankFault {
    match result.expect_err("the call must fail because of another rank") {
        Error::Rank(fault) => *fault,
        other => panic!("{other}"),
    }
}

pub(super) fn rendezvous_fault<T: std::fmt::Debug>(result: Result<T>) -> RendezvousFault {
    match result.expect_err("the rendezvous must fail") {
        Error::Rendezvous(fault) => *fault,
        other => panic!("{other}"),
    }
}

/// The harm that a proxy does to the connections that it forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Harm {
    /// It cuts them.
    Cut,
    /// It changes one bit, and forwards all else.
    Alter,
}

/// Starts a proxy between two ranks that forwards this many bytes in total, and then does harm.
/// Returns its address.
pub(super) fn proxy(to: String, bytes: usize, harm: Harm) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let left = Arc::new(std::sync::atomic::AtomicIsize::new(bytes as isize));
    thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            if harm == Harm::Cut && left.load(std::sync::atomic::Ordering::SeqCst) <= 0 {
                return;
            }
            let Ok(far) = TcpStream::connect(&to) else { return };
            for (from, to) in [(&near, &far), (&far, &near)] {
                let (mut from, mut to) = (from.try_clone().expect("a handle"), to.try_clone().expect("a handle"));
                let left = left.clone();
                thread::spawn(move || {
                    let mut some = [0; 97];
                    while let Ok(got) = from.read(&mut some)
                        && got > 0
                    {
                        let before = left.fetch_sub(got as isize, std::sync::atomic::Ordering::SeqCst);
                        let mut passed = before.clamp(0, got as isize) as usize;
                        if harm == Harm::Alter {
                            if let Some(byte) = usize::try_from(before).ok().and_then(|at| some[..got].get_mut(at)) {
                                *byte ^= 1;
                            }
                            passed = got;
                        }
                        if to.write_all(&some[..passed]).is_err() || passed < got {
                            break;
                        }
                    }
                    let _ = from.shutdown(Shutdown::Both);
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    });
    address
}
