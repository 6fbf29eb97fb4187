//! Driver threads with a bug that loom must find.

use crate::model::mpsc::{self, Receiver, Sender};
use crate::model::thread;
use crate::{
    Answer, NoResult, Posts, Worker, call_after_timeout, callers_at_a_time, dropped_worker, explore, posted_calls,
};
use std::panic::catch_unwind;
use std::time::Duration;

type Job = Box<dyn FnOnce() -> Answer + Send>;
const TIMED_OUT: NoResult = NoResult::TimedOut { waited: Duration::ZERO };

/// One channel for all answers: a late answer reaches the next caller.
struct SharedAnswers {
    jobs: Sender<Job>,
    answers: Receiver<Answer>,
}

impl Worker for SharedAnswers {
    fn start() -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (answer, answers) = mpsc::channel();
        thread::spawn(move || queue.for_each(|job| drop(answer.send(job()))));
        Self { jobs, answers }
    }

    fn run(&self, deadline: Duration, call: impl FnOnce() -> Answer + Send + 'static) -> Result<Answer, NoResult> {
        let _ = self.jobs.send(Box::new(call));
        self.answers.recv_timeout(deadline).map_err(|_| TIMED_OUT)
    }
}

/// A worker that ends when its first caller has gone: later calls never run.
struct EndsEarly {
    jobs: Sender<(Job, Sender<Answer>)>,
}

impl Worker for EndsEarly {
    fn start() -> Self {
        let (jobs, queue) = mpsc::channel::<(Job, Sender<Answer>)>();
        thread::spawn(move || {
            for (job, answer) in queue {
                if answer.send(job()).is_err() {
                    break;
                }
            }
        });
        Self { jobs }
    }

    fn run(&self, deadline: Duration, call: impl FnOnce() -> Answer + Send + 'static) -> Result<Answer, NoResult> {
        let (answer, answers) = mpsc::channel();
        let _ = self.jobs.send((Box::new(call), answer));
        answers.recv_timeout(deadline).map_err(|_| TIMED_OUT)
    }
}

/// A worker that does not learn that the driver thread is dropped: it waits forever.
struct NeverEnds(EndsEarly);

impl Worker for NeverEnds {
    fn start() -> Self {
        let worker = EndsEarly::start();
        std::mem::forget(worker.jobs.clone());
        Self(worker)
    }

    fn run(&self, deadline: Duration, call: impl FnOnce() -> Answer + Send + 'static) -> Result<Answer, NoResult> {
        self.0.run(deadline, call)
    }
}

/// A worker whose posted calls run concurrently with the others, instead of in order.
struct PostsBeside(EndsEarly);

impl Worker for PostsBeside {
    fn start() -> Self {
        Self(EndsEarly::start())
    }

    fn run(&self, deadline: Duration, call: impl FnOnce() -> Answer + Send + 'static) -> Result<Answer, NoResult> {
        self.0.run(deadline, call)
    }
}

impl Posts for PostsBeside {
    fn post(&self, call: impl FnOnce() + Send + 'static) {
        thread::spawn(call);
    }
}

/// Checks that loom fails on a scenario with these words.
fn finds(scenario: fn(), words: &str) {
    let panic = catch_unwind(|| explore(scenario)).expect_err("the bug was not found");
    let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    assert!(message.contains(words), "{message}");
}

#[test]
fn shared_answers_are_found() {
    finds(call_after_timeout::<SharedAnswers>, "the call returned another call's result");
}

#[test]
fn early_ending_worker_is_found() {
    finds(callers_at_a_time::<EndsEarly>, "a call without a deadline is answered");
}

#[test]
fn unending_worker_is_found() {
    finds(dropped_worker::<NeverEnds>, "deadlock");
}

#[test]
fn concurrent_posted_calls_are_found() {
    finds(posted_calls::<PostsBeside>, "a call ran before its turn");
}
