//! Every kernel in every mode of the emulator: watched for races, and in shuffled orders.
//!
//! Invariant: no kernel is reported, and none gives other bits in another order of its threads or blocks. The cases are
//! those of [`stepscope::same_bits`], which launch every kernel that there is.

use crate::same_bits::run;
use crate::support;
use crate::trial::canonical;
use cuda_std::emulator::Mode;
use std::time::{Duration, Instant};
use stepscope::DeviceKind;
use stepscope::same_bits::{Form, cases};

/// The words of everything that a case keeps.
type Outputs = Vec<Vec<u32>>;

/// What every case gives in `mode`, all NaNs alike, and how long it took.
fn outputs(mode: Mode) -> (Vec<Outputs>, Duration) {
    let device = support::open(DeviceKind::Emulated);
    let start = Instant::now();
    let mut outputs: Vec<Outputs> =
        mode.scope(|| cases().iter().map(|(_, case)| run(&device, case, Form::Whole)).collect());
    let elapsed = start.elapsed();
    for word in outputs.iter_mut().flatten().flatten() {
        *word = canonical(f32::from_bits(*word));
    }
    (outputs, elapsed)
}

#[track_caller]
fn assert_equal(plain: &[Outputs], other: &[Outputs], mode: Mode) {
    for (((name, _), plain), other) in cases().iter().zip(plain).zip(other) {
        assert!(plain == other, "{name} gives other bits in {mode:?}");
    }
}

/// Watched in an order of its own: what is reported would depend on it. `STEPSCOPE_ORDERS` says how many others follow.
#[test]
fn no_kernel_races_and_every_order_gives_the_same_bits() {
    let orders = std::env::var("STEPSCOPE_ORDERS").map_or(1, |orders| orders.parse().expect("a number of orders"));
    let (plain, plain_time) = outputs(Mode::default());
    let watched = Mode { races: true, shuffle: Some(orders) };
    let (got, watched_time) = outputs(watched);
    assert_equal(&plain, &got, watched);
    let ratio = watched_time.as_secs_f64() / plain_time.as_secs_f64();
    println!("{} cases: {plain_time:.2?} plain, {watched_time:.2?} watched, {ratio:.1} times", cases().len());
    for seed in 1..orders {
        let mode = Mode { races: false, shuffle: Some(seed) };
        assert_equal(&plain, &outputs(mode).0, mode);
    }
}
