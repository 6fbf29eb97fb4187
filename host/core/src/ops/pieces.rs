//! Batches that are computed in pieces, so that the scratch of an op does not grow with the batch.
//!
//! Invariant: a piece depends only on shapes and stored types, and its operands begin on 16 bytes.

use crate::tensor::{LentMut, Saved, Source, Stored, Target};
use std::ops::Range;

/// The most bytes of scratch of a piece, unless its fewest items need more. It fits the L2 cache of
/// a large GPU, and is little next to the activations of a large batch.
const SCRATCH_BYTES: usize = 32 << 20;
/// The elements of 16 bytes, in BF16.
const ALIGNED: usize = 8;

/// Returns ranges of items that need `bytes` of scratch each. `lengths` are the elements of an item
/// in each tensor that is read or written from the start of a piece on.
pub(super) fn pieces(items: usize, bytes: usize, lengths: &[usize]) -> impl Iterator<Item = Range<usize>> + use<> {
    let is_aligned = lengths.iter().all(|length| length.is_multiple_of(ALIGNED));
    let count = (SCRATCH_BYTES / bytes.max(1)).max(1);
    let count = if is_aligned { count } else { count.saturating_add(ALIGNED - 1) / ALIGNED * ALIGNED };
    (0..items).step_by(count).map(move |first| first..items.min(first.saturating_add(count)))
}

/// Returns a piece of the first extent of a tensor.
pub(super) fn part<'s, S: Stored>(x: &impl Source<'s, S>, piece: &Range<usize>) -> Saved<'s, S> {
    let shape = x.shape();
    let item: usize = shape.extents()[1..].iter().product();
    Saved::new(x.memory().part(piece.start * item, piece.len() * item), shape.with(0, piece.len()))
}

/// Returns a piece of the first extent of a tensor that is being written.
pub(super) fn part_mut<'o, 's, S: Stored>(x: &'o mut impl Target<'s, S>, piece: &Range<usize>) -> LentMut<'o, 's, S> {
    let part = part(x, piece);
    LentMut::new(part.memory(), part.shape())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_all_items() {
        let of = |items, bytes, lengths: &[usize]| pieces(items, bytes, lengths).collect::<Vec<_>>();
        assert!(of(0, 1, &[1]).is_empty());
        assert_eq!(of(5, 0, &[]).as_slice(), std::slice::from_ref(&(0..5)));
        assert_eq!(of(5, SCRATCH_BYTES / 2, &[8, 16]), [0..2, 2..4, 4..5]);
        assert_eq!(of(3, usize::MAX, &[0]), [0..1, 1..2, 2..3]);
        assert_eq!(of(9, SCRATCH_BYTES, &[8, 3]), [0..8, 8..9]);
    }
}
