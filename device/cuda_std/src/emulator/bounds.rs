//! The reach of each pointer of a launch: a hash table whose lookup takes a few instructions.
//!
//! Invariant: a slot that holds a base also holds the bytes that the launch may read and write from
//! there on. [`Arguments`](super::arguments) checks a base without a slot: a pointer that the
//! kernel has moved, or that is not the launch's.

use crate::launch::Extent;

/// The number of slots, as a power of two: several times the number of a launch's pointers.
const SLOT_BITS: u32 = 6;
/// The right shift that turns a base's product into the index of its slot.
pub(super) const SHIFT: u32 = u64::BITS - SLOT_BITS;

/// The reach of each pointer. Assembly in [`access`](super::access) reads it by its fields'
/// offsets.
#[repr(C)]
pub(super) struct Bounds {
    /// The factor of every base: the highest bits of the product are its slot.
    pub(super) factor: u64,
    pub(super) slots: [Slot; 1 << SLOT_BITS],
}

/// A base from which a kernel computes addresses, and its reach.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Slot {
    pub(super) base: u64,
    pub(super) reach: Reach,
}

/// The number of bytes from a base on, and a flag for read-only memory.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(super) struct Reach(pub(super) u64);

impl Reach {
    const NONE: Self = Self(0);
    const READ_ONLY: u64 = 1 << 63;

    /// Returns the bytes that may be read.
    #[inline(always)]
    pub(super) fn readable(self) -> usize {
        (self.0 & !Self::READ_ONLY) as usize
    }

    /// Returns the bytes that may be written.
    #[inline(always)]
    pub(super) fn writable(self) -> usize {
        if self.0 & Self::READ_ONLY == 0 { self.0 as usize } else { 0 }
    }
}

impl Bounds {
    /// The bounds outside a launch, without entries.
    pub(super) const NONE: Self = Self { factor: 0, slots: [Slot { base: 0, reach: Reach::NONE }; _] };

    pub(super) fn new(extents: &[Extent]) -> Self {
        // The golden ratio, or another odd number if that maps two bases to one slot.
        let factors = (0..64).map(|at| 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(2 * at + 1));
        let mut bounds = Self::NONE;
        for factor in factors {
            bounds = Self { factor, ..Self::NONE };
            if extents.iter().all(|extent| bounds.add(extent)) {
                return bounds;
            }
        }
        // No factor works: some base has no slot, and each of its accesses is slower.
        bounds
    }

    /// Returns the result of the assembly in [`access`](super::access).
    #[cfg_attr(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)), cfg(test))]
    pub(super) fn reach(&self, base: u64) -> Reach {
        let slot = &self.slots[slot_of(base, self.factor)];
        if slot.base == base { slot.reach } else { Reach::NONE }
    }

    /// Adds a pointer. Returns true if there was a slot for it. If one base may be both written and
    /// read, the slot keeps the part that may be written. A read past that part is slower.
    fn add(&mut self, extent: &Extent) -> bool {
        let bytes = extent.bytes() as u64;
        let slot = &mut self.slots[slot_of(extent.address, self.factor)];
        if slot.base != 0 && slot.base != extent.address {
            return false;
        }
        slot.base = extent.address;
        let (old, new) = (slot.reach, Reach(if extent.written { bytes } else { bytes | Reach::READ_ONLY }));
        if (new.writable(), new.readable()) > (old.writable(), old.readable()) {
            slot.reach = new;
        }
        true
    }
}

/// Returns the index of a base's slot.
fn slot_of(base: u64, factor: u64) -> usize {
    (base.wrapping_mul(factor) >> SHIFT) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_neighbours_have_a_slot_each() {
        for apart in [4, 16, 256, 4096, 1 << 20, 12_345_678] {
            let extents: Vec<Extent> = (0..16)
                .map(|at| Extent {
                    address: 0x7f12_3456_7000 + at * apart,
                    length: 1,
                    element_bytes: 4,
                    written: at % 2 == 0,
                })
                .collect();
            let bounds = Bounds::new(&extents);
            for extent in &extents {
                let reach = bounds.reach(extent.address);
                assert_eq!(reach.readable(), 4, "{apart} bytes apart");
                assert_eq!(reach.writable(), if extent.written { 4 } else { 0 });
                assert_eq!(bounds.reach(extent.address + 1).readable(), 0);
            }
        }
    }

    /// An address that one argument reads and another writes may be written.
    #[test]
    fn aliased_arguments_stay_writable() {
        let extent = |length, written| Extent { address: 256, length, element_bytes: 4, written };
        let [read, written, empty] = [extent(8, false), extent(8, true), extent(0, true)];
        for extents in [[read, written, empty], [written, read, empty], [empty, read, written]] {
            let reach = Bounds::new(&extents).reach(256);
            assert_eq!((reach.readable(), reach.writable()), (32, 32));
        }
        let reach = Bounds::new(&[empty, read]).reach(256);
        assert_eq!((reach.readable(), reach.writable()), (32, 0));
    }
}
