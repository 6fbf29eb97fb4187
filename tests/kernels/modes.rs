//! Every kernel in every mode of the emulator: with race checks, and in shuffled orders.
//!
//! Invariant: no kernel is reported, and each gives the committed bits in any order of its threads
//! or blocks. The cases of [`stepscope::check::same_bits`] launch every kernel of the library.

use crate::same_bits::run;
use crate::support;
use cuda_std::emulator::Mode;
use stepscope::DeviceKind;
use stepscope::check::same_bits::{CaseSize, cases, line};

/// Checks that every case gives the committed bits in `mode`.
fn assert_committed(mode: Mode) {
    let (device, golden) = (support::open(DeviceKind::Emulated), CaseSize::Whole.golden());
    for (name, case) in cases() {
        let results = mode.scope(|| run(&device, &case, CaseSize::Whole));
        assert!(golden.contains(&line(name, &results)), "the bits of {name} differ in {mode:?}");
    }
}

/// Checks races in one shuffled order; reports could depend on it. `STEPSCOPE_ORDERS` is the total
/// number of orders.
#[test]
fn every_order_keeps_bits_without_races() {
    let orders =
        std::env::var("STEPSCOPE_ORDERS").map_or(1, |orders| orders.parse().expect("STEPSCOPE_ORDERS is a number"));
    assert_committed(Mode { races: true, shuffle: Some(orders) });
    for seed in 1..orders {
        assert_committed(Mode { races: false, shuffle: Some(seed) });
    }
}
