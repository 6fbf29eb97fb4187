//! Attacks on the guard kernels of checked mode. `tests/memory/checked.rs` tests what they find.

use crate::hostile::attack;

attack! {
    guard::guard_write { guard: out_halves 101, length: number 101 }
    guard::guard_check { guard: halves 101, place: number 1, found: out_u32 2 }
}
