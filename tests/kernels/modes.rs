//! Every kernel in every mode of the emulator: watched for races, and in shuffled orders.
//!
//! Invariant: no kernel is reported, and none gives other bits than the committed ones in another order of its threads or
//! blocks. The cases are those of [`stepscope::same_bits`], which launch every kernel that there is.

use crate::same_bits::run;
use crate::support;
use cuda_std::emulator::Mode;
use stepscope::DeviceKind;
use stepscope::same_bits::{Form, cases, line};

/// Fails unless every case gives the committed bits in `mode`.
fn assert_committed(mode: Mode) {
    let (device, golden) = (support::open(DeviceKind::Emulated), Form::Whole.golden());
    for (name, case) in cases() {
        let results = mode.scope(|| run(&device, &case, Form::Whole));
        assert!(golden.contains(&line(name, &results)), "{name} gives other bits in {mode:?}");
    }
}

/// Watched in an order of its own: what is reported would depend on it. `STEPSCOPE_ORDERS` says how many others follow.
#[test]
fn no_kernel_races_and_every_order_gives_the_same_bits() {
    let orders = std::env::var("STEPSCOPE_ORDERS").map_or(1, |orders| orders.parse().expect("a number of orders"));
    assert_committed(Mode { races: true, shuffle: Some(orders) });
    for seed in 1..orders {
        assert_committed(Mode { races: false, shuffle: Some(seed) });
    }
}
