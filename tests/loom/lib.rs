//! The worker lane under loom: the interleavings of callers, worker and passing deadlines.
//!
//! Invariant, for each scenario below: a call's result reaches its own caller or nobody; a call that was handed over runs
//! whatever became of its caller; nothing waits for ever and nothing leaks (loom sees both). [`mutants`] holds lanes that
//! break this, and loom must find each. A call that panics ends its thread, which loom cannot explore: the lane's own unit
//! tests have it.

#![cfg(all(loom, test))]

#[path = "../../host/driver/lane.rs"]
mod lane;
mod model;
mod mutants;

use lane::{Lane, TimedOut};
use loom::sync::Arc;
use model::{NEVER, mpsc, thread};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How often a thread is interrupted where it could go on; when it waits, any other may run. Without a bound there are too
/// many interleavings to see, and bugs take one or two.
const PREEMPTIONS: usize = 2;
/// A deadline that passes, sooner or later.
const SOME_TIME: Duration = Duration::ZERO;

/// What a lane is, to the scenarios.
trait Worker: Send + Sync + 'static {
    fn start() -> Self;
    fn run(&self, deadline: Duration, call: impl FnOnce() -> Answer + Send + 'static) -> Result<Answer, TimedOut>;
}

/// One that also takes calls that nobody waits for.
trait Posts: Worker {
    fn post(&self, call: impl FnOnce() + Send + 'static);
}

impl Worker for Lane {
    fn start() -> Self {
        Self::start().expect("a thread")
    }

    fn run(&self, deadline: Duration, call: impl FnOnce() -> Answer + Send + 'static) -> Result<Answer, TimedOut> {
        Self::run(self, deadline, call)
    }
}

impl Posts for Lane {
    fn post(&self, call: impl FnOnce() + Send + 'static) {
        Self::post(self, call);
    }
}

/// The result of a call. The `Arc` shows that it is dropped just once.
#[derive(Debug)]
struct Answer(Arc<u32>);

/// Runs a call that answers with `number`; its own answer, or the timeout.
fn ask(lane: &impl Worker, deadline: Duration, number: u32) -> Result<(), TimedOut> {
    let Answer(answer) = lane.run(deadline, move || Answer(Arc::new(number)))?;
    assert_eq!(*answer, number, "another call's result");
    Ok(())
}

/// Two callers at a time, of whom one may give up.
fn callers_at_a_time<W: Worker>() {
    let lane = Arc::new(W::start());
    let other = Arc::clone(&lane);
    let other = thread::spawn(move || ask(&*other, SOME_TIME, 1));
    ask(&*lane, NEVER, 2).expect("a call without a deadline is answered");
    let _ = other.join().expect("the other caller");
}

/// A caller that may give up and asks again: the late result is not the second call's.
fn a_call_after_a_timeout<W: Worker>() {
    let lane = W::start();
    let _ = ask(&lane, SOME_TIME, 1);
    ask(&lane, NEVER, 2).expect("a call without a deadline is answered");
}

/// The lane is dropped while its last call waits, runs or has ended.
fn a_dropped_lane<W: Worker>() {
    let lane = W::start();
    let (ran, waiting) = mpsc::channel();
    let _ = lane.run(SOME_TIME, move || {
        ran.send(()).expect("somebody waits");
        Answer(Arc::new(1))
    });
    drop(lane);
    waiting.recv_timeout(NEVER).expect("a call that was handed over runs");
}

/// Calls that nobody waits for, and one that somebody does: each runs when those before it have.
fn posted_calls<W: Posts>() {
    let lane = W::start();
    let (ran, order) = mpsc::channel();
    for number in 0..2 {
        let ran = ran.clone();
        lane.post(move || ran.send(number).expect("somebody waits"));
    }
    let last = move || {
        ran.send(2).expect("somebody waits");
        Answer(Arc::new(2))
    };
    lane.run(NEVER, last).expect("a call without a deadline is answered");
    assert_eq!(order.collect::<Vec<_>>(), [0, 1, 2], "a call before its turn");
}

/// Every interleaving of a scenario with at most [`PREEMPTIONS`]; returns how many there are.
fn explore(scenario: fn()) -> usize {
    let count = std::sync::Arc::new(AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&count);
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(PREEMPTIONS);
    model.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        scenario();
    });
    count.load(Ordering::Relaxed)
}

#[test]
fn callers_get_their_own_results() {
    println!("two callers at a time: {} interleavings", explore(callers_at_a_time::<Lane>));
}

#[test]
fn a_late_result_reaches_nobody() {
    println!("a call after a timeout: {} interleavings", explore(a_call_after_a_timeout::<Lane>));
}

#[test]
fn a_lane_can_be_dropped_at_any_moment() {
    println!("a dropped lane: {} interleavings", explore(a_dropped_lane::<Lane>));
}

#[test]
fn posted_calls_run_in_their_turn() {
    println!("posted calls: {} interleavings", explore(posted_calls::<Lane>));
}
