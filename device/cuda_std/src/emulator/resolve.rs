//! The threads that may resume: those at an operation that all participating threads have reached.
//!
//! Invariant: a thread becomes ready only when every thread that it waits for has reached the same
//! operation at the same source line.

use super::WARP;
use super::block::Block;
use super::collective::Collective;
use super::fault::Cause;
use std::ops::Range;
use std::panic::Location;

/// The operation at which a thread waits, and its value.
#[derive(Clone, Copy)]
pub(super) struct Wait {
    pub(super) collective: Collective,
    pub(super) location: &'static Location<'static>,
    pub(super) value: u64,
}

/// The progress of a thread.
#[derive(Clone, Copy)]
pub(super) enum State {
    Fresh,
    /// The thread resumes at its next turn, on its carrier.
    Ready,
    Waiting(Wait),
    Done,
}

/// Makes threads of `threads` ready if all lanes of their operation have arrived. Returns true if
/// there are any.
pub(super) fn resolve_lanes(block: &Block, threads: Range<u32>) -> bool {
    let mut states = block.states.borrow_mut();
    let mut exchange = block.exchange.borrow_mut();
    let mut progress = false;
    for thread in threads {
        let State::Waiting(wait) = states[thread as usize] else { continue };
        if let Collective::Phase { byte, is_odd } = wait.collective {
            if block.has_ended(byte, is_odd) {
                states[thread as usize] = State::Ready;
                progress = true;
            }
            continue;
        }
        let Some(mask) = wait.collective.mask() else { continue };
        let lanes = (0..WARP).filter(|lane| mask >> lane & 1 == 1).map(|lane| thread / WARP * WARP + lane);
        if missing(&states, wait, lanes.clone()).is_none() {
            complete(&mut states, &mut exchange, wait.collective, lanes);
            block.met(wait.collective, thread);
            progress = true;
        }
    }
    progress
}

/// Makes the block ready, when no lanes can resume by themselves. If no thread waits for a phase
/// that has ended, all threads must wait at one barrier. A thread that is missing now never
/// arrives, which is an error. Returns false if every thread has ended.
pub(super) fn resolve_block(block: &Block) -> Result<bool, (u32, Cause)> {
    if !block.phases.borrow().is_empty() && resolve_lanes(block, 0..block.threads) {
        return Ok(true);
    }
    let mut states = block.states.borrow_mut();
    let mut exchange = block.exchange.borrow_mut();
    if block.gathered.replace(0) == block.threads {
        states.fill(State::Ready);
        block.met(Collective::Barrier, 0);
        return Ok(true);
    }
    let first = states.iter().zip(0..).find_map(|(state, thread)| match state {
        State::Waiting(wait) => Some((thread, *wait)),
        _ => None,
    });
    let Some((thread, wait)) = first else { return Ok(false) };
    if let Collective::Phase { byte, .. } = wait.collective {
        let waits_at = format!("{} ({:?})", wait.location, wait.collective);
        let (missing, found) = (thread, format!("waits for arrivals at byte {byte} that never come"));
        return Err((thread, Cause::Divergence { waits_at, missing, found }));
    }
    let lanes: Vec<u32> = match wait.collective.mask() {
        None => (0..block.threads).collect(),
        Some(mask) => (0..WARP).filter(|lane| mask >> lane & 1 == 1).map(|lane| thread / WARP * WARP + lane).collect(),
    };
    if let Some(missing) = missing(&states, wait, lanes.iter().copied()) {
        let found = match states.get(missing as usize) {
            Some(State::Waiting(other)) => format!("waits at {} ({:?})", other.location, other.collective),
            Some(_) => "has ended".into(),
            None => "does not exist".into(),
        };
        let waits_at = format!("{} ({:?})", wait.location, wait.collective);
        return Err((thread, Cause::Divergence { waits_at, missing, found }));
    }
    complete(&mut states, &mut exchange, wait.collective, lanes.iter().copied());
    block.met(wait.collective, thread);
    Ok(true)
}

/// Returns the first of `threads` that does not wait at the operation of `wait`.
fn missing(states: &[State], wait: Wait, mut threads: impl Iterator<Item = u32>) -> Option<u32> {
    threads.find(|&thread| match states.get(thread as usize) {
        Some(State::Waiting(other)) => {
            !other.collective.same(wait.collective)
                || (!core::ptr::eq(other.location, wait.location) && *other.location != *wait.location)
        }
        _ => true,
    })
}

/// Distributes the results, and makes `threads` ready.
fn complete(
    states: &mut [State],
    exchange: &mut [u64],
    collective: Collective,
    threads: impl Iterator<Item = u32> + Clone,
) {
    let (mut count, mut total, mut ballot) = (0u64, 0u64, 0u64);
    for thread in threads.clone() {
        if let State::Waiting(wait) = states[thread as usize] {
            exchange[thread as usize] = wait.value;
            count += u64::from(wait.value != 0);
            total += 1;
            ballot |= u64::from(wait.value != 0) << (thread % WARP);
        }
    }
    let result = match collective {
        Collective::Barrier | Collective::Warp(_) => Some(0),
        Collective::BarrierCount => Some(count),
        Collective::BarrierAnd => Some(u64::from(count == total)),
        Collective::BarrierOr => Some(u64::from(count != 0)),
        Collective::Ballot(_) => Some(ballot),
        Collective::Gather(_) | Collective::Shuffle { .. } | Collective::Phase { .. } => None,
    };
    for thread in threads {
        if let Some(result) = result {
            exchange[thread as usize] = result;
        }
        states[thread as usize] = State::Ready;
    }
}
