//! Deadlines that no clock can represent: they wait forever, or as long as the clock can count, and
//! nothing panics.

#![forbid(unsafe_code)]

use crate::support::rank_threads::*;
use std::time::Duration;
use stepscope::data::Loader;
use stepscope::group::{Group, GroupConfig};
use stepscope::memory::Overflow;
use stepscope::ops;
use stepscope::parameters::Initializer;
use stepscope::prelude::*;
use stepscope::upload::Transfer;

#[test]
fn group_trains_with_longest_deadline() {
    let batches = batches(|_| 2);
    for deadline in [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_secs(i64::MAX as u64)] {
        for captured in [false, true] {
            let outcomes = in_threads(GroupConfig::on_this_host(2).unwrap(), |config| {
                let device = Device::open(DeviceKind::Emulated)?;
                let group = Group::join(&device, &config.deadline(deadline))?;
                let plan = Plan { ranks: 2, shards: 2, captured, more: true, memory: Memory::Full };
                train(plan, &device, Some(group), &batches[..1], None)
            });
            let outcomes: Vec<_> = outcomes.into_iter().map(|(outcome, _)| outcome.unwrap()).collect();
            assert!(outcomes[0] == outcomes[1]);
        }
    }
}

/// Tests deadlines of devices, arenas, pools, uploads and loaders.
#[test]
fn other_deadlines_may_be_longest() {
    for deadline in [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_secs(1 << 62)] {
        let device = Device::builder(DeviceKind::Emulated).deadline(deadline).open().unwrap();
        assert_eq!(device.deadline(), deadline);
        device.synchronize(deadline).unwrap();
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [64, 64], Initializer::ONE);
        let mut weights = Parameters::new(&device, &spec.build().unwrap(), 7).unwrap();
        let twos: Vec<u8> = [2.0f32; 4096].iter().flat_map(|value| value.to_le_bytes()).collect();
        weights.load(|_| Some(&twos), Transfer::new().deadline(deadline)).unwrap();
        let pool = Overflow::Pool { cap_bytes: 1 << 20, prime_bytes: 1 << 16, deadline };
        let arena = Arena::builder(&device).capacity(Capacity::Bytes(4096)).overflow(pool);
        let mut arena = arena.step_deadline(deadline).build().unwrap();
        let sum = arena.step(|step| {
            // More elements than the arena holds.
            let copy = ops::copy(step, &weights.lend(step, w)?)?;
            step.read_scalar(&ops::sum(step, &copy)?)
        });
        assert_eq!(sum, Ok(8192.0));
        let loaded = Loader::new((0..3).map(Ok)).unwrap().deadline(deadline);
        assert_eq!(loaded.map(Result::unwrap).collect::<Vec<_>>(), [0, 1, 2]);
    }
}

/// A fault ends a group at once, however long its deadline.
#[test]
fn faults_end_groups_with_longest_deadline() {
    let outcomes = in_threads(GroupConfig::on_this_host(2).unwrap(), |config| {
        let device = Device::open(DeviceKind::Emulated)?;
        let group = Group::join(&device, &config.deadline(Duration::MAX))?;
        assert_eq!(group.deadline(), Duration::MAX);
        assert!(group.rank() == 0, "planted");
        group.agree_on(&[("data", "a")])
    });
    let text = outcomes[0].0.as_ref().unwrap_err().to_string();
    assert!(text.contains("rank 1 of 2 has failed") && text.contains("it panicked"), "{text}");
}

/// A deadline of zero is an error of its own.
#[test]
fn no_time_is_a_typed_error() {
    let outcomes = in_threads(GroupConfig::on_this_host(2).unwrap(), |config| {
        let device = Device::open(DeviceKind::Emulated)?;
        Group::join(&device, &config.deadline(Duration::ZERO)).map(drop)
    });
    assert!(outcomes.iter().any(|(outcome, _)| matches!(outcome, Err(Error::Rendezvous(_)))), "{outcomes:?}");
}
