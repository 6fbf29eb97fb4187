//! Checks of the network to a second machine, and of Python packages.

use super::{Finding, is_gb10, unknown, warning, well};
use crate::doctor::facts::Facts;

/// The rate of each of a QSFP port's two cards.
const CARD_MEGABITS: u64 = 100_000;

pub(super) fn cards(facts: &Facts) -> Finding {
    let Some(cards) = &facts.network.cards else { return unknown(facts.why_unknown("network")) };
    let up: Vec<_> = cards.iter().filter(|card| card.up).map(|card| card.name.as_str()).collect();
    let rdma = cards.iter().filter(|card| card.rdma && card.up).count();
    let what = format!("{} cards, up: {}; {rdma} of them with RDMA", cards.len(), up.join(", "));
    if is_gb10(facts) && rdma == 1 {
        return warning(
            what,
            "each QSFP port of a GB10 has two cards; with only one, a second machine gets 98 instead of 161 Gb/s",
            "give the other card an address too, and list both in NCCL_IB_HCA",
        );
    }
    well(what)
}

pub(super) fn rate(facts: &Facts) -> Finding {
    let Some(cards) = &facts.network.cards else { return unknown(facts.why_unknown("network")) };
    let rdma = || cards.iter().filter(|card| card.rdma && card.up);
    let slow = rdma().find(|card| card.megabits_per_second.is_some_and(|rate| rate < CARD_MEGABITS));
    match slow {
        Some(card) if is_gb10(facts) => warning(
            format!("{} runs at {} Mb/s", card.name, card.megabits_per_second.unwrap_or(0)),
            "the exchange of gradients would be slow; a good link gives 21.875 GB/s",
            "use a 200 Gb/s cable, and check the card with `ethtool` on both machines",
        ),
        _ if rdma().next().is_none() => unknown("no card with RDMA is up: there is no second machine"),
        _ => well(
            rdma()
                .map(|card| format!("{} {:?} Mb/s", card.name, card.megabits_per_second))
                .collect::<Vec<_>>()
                .join(", "),
        ),
    }
}

pub(super) fn wheels(facts: &Facts) -> Finding {
    let Some(folders) = facts.python.folders else { return unknown(facts.why_unknown("python")) };
    if let Some(first) = facts.python.foreign_wheels.first() {
        return warning(
            format!("{} wheels for another processor: {first}", facts.python.foreign_wheels.len()),
            "importing them fails, or Python falls back to slow code",
            "reinstall them on this machine",
        );
    }
    well(format!("no wheels for another processor in {folders} folders"))
}
