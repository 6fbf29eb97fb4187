//! The kernels of checked mode's guards; `tests/checked.rs` shows what they find.

use crate::hostile::attack;

attack! {
    guard::guard_write { block: out_u32 100, length: number 100, start: number 40 }
    guard::guard_check { block: u32s 100, start: number 40, place: number 1, found: out_u32 2 }
}
