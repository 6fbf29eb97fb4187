//! The kernels of checked mode's guards; `tests/memory/checked.rs` shows what they find.

use crate::hostile::attack;

attack! {
    guard::guard_write { guard: out_halves 101, length: number 101 }
    guard::guard_check { guard: halves 101, place: number 1, found: out_u32 2 }
}
