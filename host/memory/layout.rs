//! Pure arithmetic of a bump arena.
//!
//! Invariant: two allocations between resets never overlap; every offset is a multiple of [`ALIGN_BYTES`].

/// The alignment of every tensor: what the widest device access needs, and a cache line's multiple.
pub(crate) const ALIGN_BYTES: usize = 256;

/// Where a bump allocator stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bump {
    capacity: usize,
    offset: usize,
}

impl Bump {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, offset: 0 }
    }

    pub(crate) fn offset(self) -> usize {
        self.offset
    }

    /// The offset of the next `bytes`, and the state after. `None`: they do not fit.
    pub(crate) fn take(self, bytes: usize) -> Option<(usize, Self)> {
        let end = self.offset.checked_add(padded(bytes)?)?;
        (end <= self.capacity).then_some((self.offset, Self { offset: end, ..self }))
    }

    /// Back to an offset that was taken earlier.
    pub(crate) fn rewind(self, offset: usize) -> Self {
        debug_assert!(offset <= self.offset, "a rewind never goes forward");
        Self { offset, ..self }
    }
}

/// `bytes` rounded up to the alignment.
pub(crate) fn padded(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(ALIGN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn takes_are_disjoint_aligned_and_inside(capacity in 0usize..100_000, sizes in prop::collection::vec(0usize..5000, 0..64)) {
            let mut bump = Bump::new(capacity);
            let mut end = 0;
            for bytes in sizes {
                match bump.take(bytes) {
                    Some((offset, next)) => {
                        prop_assert!(offset % ALIGN_BYTES == 0 && offset >= end && offset + bytes <= capacity);
                        end = offset + bytes;
                        bump = next;
                    }
                    None => prop_assert!(bump.offset() + padded(bytes).unwrap() > capacity),
                }
            }
        }
    }

    #[test]
    fn sizes_near_the_end_of_the_address_space_do_not_wrap() {
        assert_eq!(Bump::new(usize::MAX).take(usize::MAX), None);
        let (_, bump) = Bump::new(1024).take(256).unwrap();
        assert_eq!(bump.take(usize::MAX - 256), None);
    }
}
