//! The sum of equal parts in a binary tree.

use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Source, Target};
use kernels::sum_parts::sum_parts;

/// `out[i]` = the sum of `parts[s, i]` over s, in a binary tree: ((0 + 1) + (2 + 3)) + ..; `parts`:
/// `[count, pitch]`, where `count` is a power of two up to 64 and `pitch` a multiple of 4; `out`:
/// at most `pitch` elements, the first of each part.
///
/// Overwrites `out`. Queues the work, and needs no scratch memory. A part may itself be such a sum:
/// a sum over neighboring parts of a longer tree gives the same bits. The sums of a group of GPUs
/// rely on this.
///
/// # Errors
/// [`Error::Misuse`] unless `parts` has two extents. [`Error::Contract`] for other counts, pitches
/// and lengths.
#[track_caller]
pub fn sum_parts_into<'s>(step: &Step<'s>, parts: &impl Source<'s, f32>, out: &mut impl Target<'s, f32>) -> Result<()> {
    let shape = parts.shape();
    let &[count, pitch] = shape.extents() else {
        return Err(Error::misuse("sum_parts", "parts `[count, pitch]`", shape.to_string()));
    };
    let length = out.shape().elements();
    step.launch(sum_parts { parts: parts.slice(), count, pitch, length, out: out.out() })
}
