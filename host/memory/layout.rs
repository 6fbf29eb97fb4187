//! Pure arithmetic of a bump arena with two ends.
//!
//! Invariant: two allocations between resets never overlap, from whichever ends they are; every offset is a multiple of [`ALIGN_BYTES`].
//! `ci/layout` proves it for all arguments, by a model of these functions that `layout_rows.rs` compares with them.

/// The alignment of every tensor: what the widest device access needs, and a cache line's multiple.
pub(crate) const ALIGN_BYTES: usize = 256;

/// A grown arena's capacity is a multiple of this: what large pages come in.
const GROWTH_BYTES: usize = 2 << 20;

/// An end of an arena, from which tensors are taken towards the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Where it starts: a step's own.
    Front,
    /// Where it ends.
    Back,
}

impl End {
    /// The opposite.
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Front => Self::Back,
            Self::Back => Self::Front,
        }
    }
}

/// Where a bump allocator stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bump {
    /// A multiple of the alignment.
    capacity: usize,
    /// Bytes from each end on.
    taken: [usize; 2],
}

impl Bump {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity: capacity / ALIGN_BYTES * ALIGN_BYTES, taken: [0; 2] }
    }

    /// Bytes that are taken.
    pub(crate) fn taken(self) -> usize {
        self.taken[0] + self.taken[1]
    }

    /// The offset of the next `bytes` from `end`, and the state after. `None`: they do not fit.
    pub(crate) fn take(mut self, end: End, bytes: usize) -> Option<(usize, Self)> {
        let bytes = padded(bytes)?;
        if self.taken().checked_add(bytes)? > self.capacity {
            return None;
        }
        let taken = &mut self.taken[end as usize];
        let before = *taken;
        *taken += bytes;
        Some((if end == End::Front { before } else { self.capacity - *taken }, self))
    }

    /// Offset and bytes of what was taken since `mark`, from either end.
    pub(crate) fn since(self, mark: Self) -> [(usize, usize); 2] {
        let offsets = [mark.taken[0], self.capacity - self.taken[1]];
        [0, 1].map(|end| (offsets[end], self.taken[end] - mark.taken[end]))
    }

    /// Without what was taken between two earlier marks: from either end, that or nothing was taken since.
    pub(crate) fn without(mut self, mark: Self, until: Self) -> Self {
        for ((taken, mark), until) in self.taken.iter_mut().zip(mark.taken).zip(until.taken) {
            debug_assert!(mark <= until && until <= *taken && (mark == until || until == *taken), "no hole is left");
            *taken = *taken - until + mark;
        }
        self
    }
}

/// `bytes` rounded up to the alignment.
pub(crate) fn padded(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(ALIGN_BYTES)
}

/// What a tensor of so many bytes takes with a guard behind it: more than any arena has, where no number says it.
pub(super) fn guarded(bytes: usize, guard_bytes: usize) -> usize {
    padded(bytes).and_then(|bytes| bytes.checked_add(guard_bytes)).unwrap_or(usize::MAX)
}

/// The capacity that an arena grows to when steps have needed so much.
pub(super) fn grown(needed: usize, max_bytes: usize) -> usize {
    needed.checked_next_multiple_of(GROWTH_BYTES).unwrap_or(usize::MAX).min(max_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn takes_are_disjoint_aligned_and_inside(capacity in 0usize..100_000, takes in prop::collection::vec((any::<bool>(), 0usize..5000), 0..64)) {
            let mut bump = Bump::new(capacity);
            // What is free.
            let (mut low, mut high) = (0, capacity / ALIGN_BYTES * ALIGN_BYTES);
            for (front, bytes) in takes {
                let end = if front { End::Front } else { End::Back };
                match bump.take(end, bytes) {
                    Some((offset, next)) => {
                        let padded = padded(bytes).unwrap();
                        prop_assert!(offset % ALIGN_BYTES == 0 && offset >= low && offset + padded <= high);
                        prop_assert_eq!(next.since(bump)[end as usize], (offset, padded));
                        prop_assert_eq!(next.since(bump)[end.other() as usize].1, 0);
                        if front { low = offset + padded } else { high = offset }
                        bump = next;
                    }
                    None => prop_assert!(bump.taken() + padded(bytes).unwrap() > capacity),
                }
                prop_assert_eq!(bump.taken(), low + (capacity / ALIGN_BYTES * ALIGN_BYTES - high));
            }
        }
    }

    #[test]
    fn what_a_scope_took_goes_and_what_came_after_stays() {
        let start = Bump::new(4096).take(End::Front, 256).unwrap().1;
        let (offset, inside) = start.take(End::Back, 1000).unwrap();
        assert_eq!((offset, inside.since(start)), (3072, [(256, 0), (3072, 1024)]));
        let (offset, after) = inside.take(End::Front, 512).unwrap();
        assert_eq!((offset, after.taken()), (256, 1792));
        let left = after.without(start, inside);
        assert_eq!(left, start.take(End::Front, 512).unwrap().1, "the scope's bytes are free, the others are not");
        assert_eq!(left.without(start, left), start);
    }

    #[test]
    fn sizes_near_the_end_of_the_address_space_do_not_wrap() {
        for end in [End::Front, End::Back] {
            assert_eq!(Bump::new(usize::MAX).take(end, usize::MAX), None);
            let (_, bump) = Bump::new(1024).take(end, 256).unwrap();
            assert_eq!(bump.take(end, usize::MAX - 256), None);
        }
    }
}
