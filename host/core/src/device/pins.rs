//! Pins that keep memory alive while a live graph uses it.
//!
//! A graph contains bare addresses. The recorder of a graph pins the addresses of every launch
//! before the borrow that made them valid can end. Memory that contains a pinned address is not
//! freed (see `deferred_free`) until the last such pin is gone. Invariant: a pin exists from the
//! listing of a launch until its graph has ended.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All pins of a device.
#[derive(Clone, Debug, Default)]
pub(super) struct PinTable {
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    /// The addresses of each live set.
    sets: BTreeMap<u64, BTreeSet<u64>>,
}

impl PinTable {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates an empty set of pins.
    pub(super) fn pins(&self) -> Pins {
        let mut table = self.table();
        table.next += 1;
        let identity = table.next;
        table.sets.insert(identity, BTreeSet::new());
        Pins { set: Arc::new(Set { table: self.clone(), identity }) }
    }

    /// Returns true if a live graph uses this memory.
    pub(super) fn holds(&self, address: u64, bytes: usize) -> bool {
        let range = address..address.saturating_add(bytes as u64);
        self.table().sets.values().any(|addresses| addresses.range(range.clone()).next().is_some())
    }
}

/// The pins of one graph, or of one being recorded, until the last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    set: Arc<Set>,
}

#[derive(Debug)]
struct Set {
    table: PinTable,
    identity: u64,
}

impl Pins {
    /// Pins the memory that contains these addresses.
    pub(crate) fn add(&self, addresses: impl IntoIterator<Item = u64>) {
        if let Some(set) = self.set.table.table().sets.get_mut(&self.set.identity) {
            set.extend(addresses);
        }
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        self.table.table().sets.remove(&self.identity);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_last_as_long_as_sets() {
        let table = PinTable::default();
        let (first, second) = (table.pins(), table.pins());
        first.add([0x1000, 7]);
        second.add([0x1010]);
        assert!(table.holds(0x1000, 0x100));
        assert!(!table.holds(0x2000, 0x100), "nothing names it");
        assert!(!table.holds(0x0f00, 0x100), "the end is not inside");
        drop(first);
        assert!(table.holds(0x1000, 0x100), "the second set names it too");
        drop(second);
        assert!(!table.holds(0x1000, 0x100));
    }
}
