//! Fuzzes arena programs of steps, scratches, overflows, growth, trims, errors, panics and faults.
//!
//! The programs, the reference allocator and the rules are those of `tests/memory_model`. There a
//! seed generates a program; here the fuzzer's bytes do, so that it can steer each choice. Calls
//! that stall are left out, since each would wait for its deadline. With `STEPSCOPE_PLANT` set,
//! each step overwrites the buffer that outlives it.
//!
//! Invariant: no program breaks a rule.

#![no_main]

#[path = "../../tests/memory/memory_model/program.rs"]
#[allow(dead_code, reason = "calls that stall are not generated here")]
mod program;
#[path = "../../tests/memory/memory_model/reference.rs"]
mod reference;
#[path = "../../tests/memory/memory_model/rules.rs"]
#[allow(dead_code, reason = "nothing is planted or counted here")]
mod rules;
#[path = "../../tests/memory/memory_model/world.rs"]
mod world;

use libfuzzer_sys::fuzz_target;
use program::{Kind, Program};
use rules::Planted;
use std::cell::RefCell;
use stepscope::DeviceKind;
use support::Random;
use world::{Rig, Execution};

#[path = "../../tests/support/witness.rs"]
mod witness;

/// The source of the programs' choices: here, the fuzzer's bytes.
mod support {
    pub(crate) use super::witness;

    /// A generator that takes bytes, and zeros when they are used up.
    pub(crate) struct Random(std::vec::IntoIter<u8>);

    impl Random {
        pub(crate) fn new(bytes: &[u8]) -> Self {
            Self(bytes.to_vec().into_iter())
        }

        pub(crate) fn next_u64(&mut self) -> u64 {
            u64::from(self.0.next().unwrap_or(0)) << 8 | u64::from(self.0.next().unwrap_or(0))
        }

        /// Returns a number in `0..bound`.
        pub(crate) fn below(&mut self, bound: u32) -> u32 {
            u32::from(self.0.next().unwrap_or(0)) % bound
        }

        /// Returns a number in `from..=to`.
        pub(crate) fn extent(&mut self, from: usize, to: usize) -> usize {
            from + self.next_u64() as usize % (to - from + 1)
        }
    }

    pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }
}

thread_local! {
    /// The rig, shared by programs without faults, as in `tests/memory_model`.
    static RIG: RefCell<Option<Rig>> = const { RefCell::new(None) };
}

fuzz_target!(|bytes: &[u8]| {
    let random = &mut Random::new(bytes);
    let kind = if random.below(2) == 0 { Kind::Sound } else { Kind::Faulty };
    let program = Program::draw(random, kind);
    let at_hand = RIG.take().filter(|_| kind == Kind::Sound);
    let mut rig = at_hand.unwrap_or_else(|| Rig::open(DeviceKind::Emulated, kind));
    let planted = std::env::var_os("STEPSCOPE_PLANT").map(|_| Planted::BufferOverwritten);
    if let Err(violation) = Execution::run(&mut rig, &program, planted) {
        panic!("{violation:?}\nin {program:#?}");
    }
    RIG.set(Some(rig).filter(|rig| rig.is_clean(&program)));
});
