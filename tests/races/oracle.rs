//! The detector against a plain search: random programs of reads, writes and barriers by a few
//! threads. The search follows every access to every later one.
//!
//! Invariant: the detector reports exactly the programs with two unordered conflicting accesses.
//! If barriers cover a part of a warp it may report more, as documented, and never less.

use cuda_std::emulator::{Cause, Kind, Machine, Mode};
use cuda_std::launch::{Contract, PointerMut, Slice, Words};
use cuda_std::{prelude::*, warp};
use kernels::contract;
use kernels::tile::SharedTile;
use kernels::vector::{load, store};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

const THREADS: u32 = 64;
const WORDS: u32 = 2;

/// An operation of one thread, one warp or one of two blocks.
#[derive(Clone, Copy, Debug)]
enum Op {
    Touch { block: u32, thread: u32, kind: Kind, global: bool, word: u32 },
    Barrier { block: u32 },
    Warp { block: u32, warp: u32, mask: u32 },
    Shuffle { block: u32, warp: u32 },
}

/// The words of an op.
const OP: usize = 5;

impl Op {
    fn encode(self) -> [u32; OP] {
        match self {
            Self::Touch { block, thread, kind, global, word } => {
                [u32::from(kind == Kind::Write) + 2 * u32::from(global), block, thread, word, 0]
            }
            Self::Barrier { block } => [4, block, 0, 0, 0],
            Self::Warp { block, warp, mask } => [5, block, warp, 0, mask],
            Self::Shuffle { block, warp } => [6, block, warp, 0, 0],
        }
    }
}

/// Runs a program, op by op; `memory`: `[2]`.
#[kernel]
unsafe fn script(program: &[u32], memory: *mut u32) {
    let thread = thread::thread_idx_x();
    // SAFETY: the words lie inside the program, the tile and the memory; masks name the lanes that
    // meet.
    unsafe {
        let tile = SharedTile::<u32>::new(0, WORDS);
        if thread < WORDS {
            tile.set(thread, 0);
        }
        thread::sync_threads();
        let mut at = 0;
        while at < program.len() {
            let [code, block, who, word, mask] = [0, 1, 2, 3, 4].map(|field| load(program, at + field));
            at += OP;
            if block != thread::block_idx_x() {
                continue;
            }
            match code {
                0 if who == thread => drop(tile.get(word)),
                1 if who == thread => tile.set(word, thread),
                2 if who == thread => {
                    let _ = kernels::vector::F4::load_part_raw::<f32>(memory.cast(), word as usize, ONE, 0.0);
                }
                3 if who == thread => store(memory, word as usize, thread),
                4 => thread::sync_threads(),
                5 if who == thread / 32 && mask >> warp::lane_id() & 1 == 1 => warp::sync_warp(mask),
                6 if who == thread / 32 => drop(warp::warp_shuffle_xor(u32::MAX, thread, 1, 32)),
                _ => {}
            }
        }
    }
}

const ONE: kernels::vector::VectorPart = kernels::vector::VectorPart::First(1);

// SAFETY: the tests make programs whose words lie inside the tile and inside `memory`, which have
// the same number of words.
contract! { unsafe script { block: THREADS, shared: WORDS * 4, align: 4 } |k| {
    Violation::unless_length("memory", WORDS as usize, k.memory.len())?;
    Grid::new(2, 1, 1)
}}

/// True if the detector reports a race.
fn detected(program: &[Op]) -> bool {
    let program: Vec<u32> = program.iter().flat_map(|op| op.encode()).collect();
    let mut memory = [0u32; WORDS as usize];
    // SAFETY: host memory is the emulator's device memory, alive and borrowed for the launch.
    let outcome = unsafe {
        let kernel = script {
            program: Slice::new(0, program.as_ptr() as u64, program.len()),
            memory: PointerMut::new(0, memory.as_mut_ptr() as u64, memory.len()),
        };
        let (entry, grid) = (kernel.entry().expect("one kernel"), kernel.grid().expect("the contract holds"));
        let words = Words::of(&kernel);
        Mode::RACES.scope(|| Machine::default().launch(entry, grid, &words, &|_| None))
    };
    match outcome {
        Ok(()) => false,
        Err(fault) if matches!(fault.cause, Cause::Race { .. }) => true,
        Err(fault) => panic!("{fault}"),
    }
}

/// True if two conflicting accesses of the program are unordered, by the ops that happen before
/// each, op for op.
fn racy(program: &[Op]) -> bool {
    // For each block and thread: the ops that happen before its next one, a bit each.
    let mut seen = [[0u64; THREADS as usize]; 2];
    for (number, &op) in program.iter().enumerate() {
        match op {
            Op::Touch { block, thread, .. } => {
                let seen = &mut seen[block as usize][thread as usize];
                let races = |(earlier, &other): (usize, &Op)| conflict(op, other) && *seen >> earlier & 1 == 0;
                if program[..number].iter().enumerate().any(races) {
                    return true;
                }
                *seen |= 1 << number;
            }
            Op::Barrier { block } => meet(&mut seen[block as usize], |_| true),
            Op::Warp { block, warp, mask } => {
                meet(&mut seen[block as usize], |thread| thread / 32 == warp && mask >> (thread % 32) & 1 == 1);
            }
            Op::Shuffle { .. } => {}
        }
    }
    false
}

fn meet(seen: &mut [u64; THREADS as usize], comes: impl Fn(u32) -> bool) {
    let all = (0..THREADS).filter(|&thread| comes(thread)).fold(0, |all, thread| all | seen[thread as usize]);
    (0..THREADS).filter(|&thread| comes(thread)).for_each(|thread| seen[thread as usize] = all);
}

fn conflict(a: Op, b: Op) -> bool {
    let (
        Op::Touch { block: x, thread: s, kind: k, global: g, word: v },
        Op::Touch { block: y, thread: t, kind: l, global: h, word: w },
    ) = (a, b)
    else {
        return false;
    };
    let same_place = g == h && v == w && (g || x == y);
    same_place && (x, s) != (y, t) && (k == Kind::Write || l == Kind::Write)
}

fn op(masks: &'static [u32]) -> impl Strategy<Value = Op> {
    let (block, warp) = (0..2u32, 0..2u32);
    let thread = prop::sample::select(&[0u32, 1, 2, 32, 33][..]);
    let kind = prop_oneof![2 => Just(Kind::Read), 1 => Just(Kind::Write)];
    prop_oneof![
        6 => (block.clone(), thread, kind, any::<bool>(), 0..WORDS)
            .prop_map(|(block, thread, kind, global, word)| Op::Touch { block, thread, kind, global, word }),
        1 => block.clone().prop_map(|block| Op::Barrier { block }),
        3 => (block.clone(), warp.clone(), prop::sample::select(masks))
            .prop_map(|(block, warp, mask)| Op::Warp { block, warp, mask }),
        1 => (block, warp).prop_map(|(block, warp)| Op::Shuffle { block, warp }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn detector_agrees_with_plain_search(program in prop::collection::vec(op(&[u32::MAX]), 2..16)) {
        prop_assert_eq!(detected(&program), racy(&program));
    }

    #[test]
    fn partial_barriers_hide_no_race(program in prop::collection::vec(op(&[0b011, 0b101, 0b110, 0b111]), 2..16)) {
        prop_assert!(detected(&program) || !racy(&program));
    }
}

#[test]
fn programs_include_both_verdicts() {
    let mut runner = TestRunner::deterministic();
    let programs = prop::collection::vec(op(&[u32::MAX]), 2..16);
    let racy = (0..400).filter(|_| racy(&programs.new_tree(&mut runner).expect("a program").current())).count();
    assert!((40..360).contains(&racy), "{racy} of 400 programs race");
}
