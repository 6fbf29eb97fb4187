//! What a live graph names is not freed under it.
//!
//! A graph holds bare addresses. Whoever records one pins the addresses of every launch, before the borrow that made the
//! address valid can end; a free of memory in which a pinned address lies waits until the last such pin is gone. Invariant:
//! no memory goes back to the driver while a live graph can reach it, whatever the owner of the memory does.

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
    /// Addresses of each live set.
    sets: BTreeMap<u64, BTreeSet<u64>>,
    /// Address and bytes of what was freed meanwhile.
    waiting: Vec<(u64, usize)>,
}

impl Table {
    fn holds(&self, address: u64, bytes: usize) -> bool {
        let range = address..address.saturating_add(bytes as u64);
        self.sets.values().any(|addresses| addresses.range(range.clone()).next().is_some())
    }
}

impl PinTable {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A set of pins without any so far.
    pub(super) fn pins(&self) -> Pins {
        let mut table = self.table();
        table.next += 1;
        let identity = table.next;
        table.sets.insert(identity, BTreeSet::new());
        Pins { set: Arc::new(Set { table: self.clone(), identity }) }
    }

    /// Whether memory must wait to be freed; it is remembered then.
    pub(super) fn postpone(&self, address: u64, bytes: usize) -> bool {
        let mut table = self.table();
        let holds = table.holds(address, bytes);
        if holds {
            table.waiting.push((address, bytes));
        }
        holds
    }

    /// Whether a live graph names memory.
    #[cfg(feature = "dlpack")]
    pub(super) fn holds(&self, address: u64, bytes: usize) -> bool {
        self.table().holds(address, bytes)
    }

    /// Memory to be freed once nothing pins it, whether anything does now or not.
    pub(super) fn wait(&self, address: u64, bytes: usize) {
        self.table().waiting.push((address, bytes));
    }

    /// What waited and need not any more.
    pub(super) fn take_free(&self) -> Vec<(u64, usize)> {
        let mut table = self.table();
        let waiting = std::mem::take(&mut table.waiting);
        let (held, free) = waiting.into_iter().partition(|&(address, bytes)| table.holds(address, bytes));
        table.waiting = held;
        free
    }
}

/// The pins of one graph, or of one to be, until the last clone is dropped.
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
    /// Pins the memory in which these addresses lie.
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
    fn what_a_set_names_waits_until_the_set_is_gone() {
        let table = PinTable::default();
        let (first, second) = (table.pins(), table.pins());
        first.add([0x1000, 7]);
        second.add([0x1010]);
        assert!(table.postpone(0x1000, 0x100));
        assert!(!table.postpone(0x2000, 0x100), "nothing names it");
        assert!(!table.postpone(0x0f00, 0x100), "the end is not inside");
        assert_eq!(table.take_free(), []);
        drop(first);
        assert_eq!(table.take_free(), [], "the second set names it too");
        drop(second);
        assert_eq!(table.take_free(), [(0x1000, 0x100)]);
        assert_eq!(table.take_free(), []);
    }

    #[test]
    fn what_waits_for_nothing_is_free_at_once() {
        let table = PinTable::default();
        table.wait(0x3000, 16);
        assert_eq!(table.take_free(), [(0x3000, 16)]);
    }
}
