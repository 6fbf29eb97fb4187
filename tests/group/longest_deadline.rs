//! Deadlines that no clock can express: they wait for ever, or as long as the clock can tell, and
//! nothing panics.

#![forbid(unsafe_code)]

use crate::support::rank_threads::*;
use std::time::Duration;
use stepscope::*;

#[test]
fn group_trains_with_longest_deadline() {
    let batches = batches(|_| 2);
    for deadline in [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_secs(i64::MAX as u64)] {
        for captured in [false, true] {
            let said = in_threads(GroupConfig::on_this_host(2).unwrap(), |config| {
                let device = Device::open(DeviceKind::Emulated)?;
                let group = Group::join(&device, &config.deadline(deadline))?;
                let plan = Plan { ranks: 2, shards: 2, captured, more: true };
                train(plan, &device, Some(group), &batches[..1], None)
            });
            let said: Vec<_> = said.into_iter().map(|(said, _)| said.unwrap()).collect();
            assert!(said[0] == said[1]);
        }
    }
}
