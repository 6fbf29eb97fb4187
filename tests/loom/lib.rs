//! The driver thread under loom: all interleavings of callers, worker and passing deadlines.
//!
//! Invariant, for each scenario below: only a call's own caller can receive its result. A call that
//! was handed over runs, whatever happens to its caller. Nothing waits forever and nothing leaks;
//! loom detects both. [`mutants`] holds driver threads that break this, and loom must find each.
//! The driver thread's own unit tests cover calls that panic.

#![cfg(all(loom, test))]

#[path = "../../host/core/src/device/driver_thread.rs"]
mod driver_thread;
mod model;
mod mutants;

use driver_thread::{DriverThread, NoResult};
use loom::sync::Arc;
use model::{NEVER, mpsc, thread};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The number of times that a thread is interrupted while it could continue. When it waits, any
/// other may run. Without a bound there are too many interleavings to explore, and bugs need only
/// one or two.
const PREEMPTIONS: usize = 2;
/// A deadline that passes, sooner or later.
const SOME_TIME: Duration = Duration::ZERO;

/// A driver thread, as the scenarios use it.
trait Worker: Send + Sync + 'static {
    fn start() -> Self;
    fn run(&self, deadline: Duration, call: impl FnOnce() -> Answer + Send + 'static) -> Result<Answer, NoResult>;
}

/// A driver thread that also takes calls without waiting callers.
trait Posts: Worker {
    fn post(&self, call: impl FnOnce() + Send + 'static);
}

impl Worker for DriverThread {
    fn start() -> Self {
        Self::start().expect("a thread")
    }

    fn run(&self, deadline: Duration, call: impl FnOnce() -> Answer + Send + 'static) -> Result<Answer, NoResult> {
        Self::run(self, deadline, call)
    }
}

impl Posts for DriverThread {
    fn post(&self, call: impl FnOnce() + Send + 'static) {
        Self::post(self, call);
    }
}

/// The result of a call. The `Arc` shows that it is dropped exactly once.
#[derive(Debug)]
struct Answer(Arc<u32>);

/// Runs a call that answers with `number`. Returns its own answer, or the timeout.
fn ask(worker: &impl Worker, deadline: Duration, number: u32) -> Result<(), NoResult> {
    let Answer(answer) = worker.run(deadline, move || Answer(Arc::new(number)))?;
    assert_eq!(*answer, number, "the call returned another call's result");
    Ok(())
}

/// Runs two concurrent callers, of which one may time out.
fn callers_at_a_time<W: Worker>() {
    let worker = Arc::new(W::start());
    let other = Arc::clone(&worker);
    let other = thread::spawn(move || ask(&*other, SOME_TIME, 1));
    ask(&*worker, NEVER, 2).expect("a call without a deadline is answered");
    let _ = other.join().expect("the other caller returns");
}

/// Runs a caller that may time out and then calls again. The second call must not receive the late
/// result.
fn call_after_timeout<W: Worker>() {
    let worker = W::start();
    let _ = ask(&worker, SOME_TIME, 1);
    ask(&worker, NEVER, 2).expect("a call without a deadline is answered");
}

/// Drops the driver thread while its last call waits, runs or has ended.
fn dropped_worker<W: Worker>() {
    let worker = W::start();
    let (ran, waiting) = mpsc::channel();
    let _ = worker.run(SOME_TIME, move || {
        ran.send(()).expect("the caller still waits");
        Answer(Arc::new(1))
    });
    drop(worker);
    waiting.recv_timeout(NEVER).expect("a posted call runs");
}

/// Runs calls without waiting callers, and one with. Each runs after those before it.
fn posted_calls<W: Posts>() {
    let worker = W::start();
    let (ran, order) = mpsc::channel();
    for number in 0..2 {
        let ran = ran.clone();
        worker.post(move || ran.send(number).expect("the caller still waits"));
    }
    let last = move || {
        ran.send(2).expect("the caller still waits");
        Answer(Arc::new(2))
    };
    worker.run(NEVER, last).expect("a call without a deadline is answered");
    assert_eq!(order.collect::<Vec<_>>(), [0, 1, 2], "a call ran before its turn");
}

/// Explores every interleaving of a scenario with at most [`PREEMPTIONS`], and returns their
/// number.
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
    println!("two callers at a time: {} interleavings", explore(callers_at_a_time::<DriverThread>));
}

#[test]
fn late_results_are_dropped() {
    println!("a call after a timeout: {} interleavings", explore(call_after_timeout::<DriverThread>));
}

#[test]
fn worker_may_be_dropped_any_time() {
    println!("a dropped worker: {} interleavings", explore(dropped_worker::<DriverThread>));
}

#[test]
fn posted_calls_run_in_their_turn() {
    println!("posted calls: {} interleavings", explore(posted_calls::<DriverThread>));
}
