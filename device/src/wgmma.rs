//! The operands of wgmma, Hopper's matrix instruction, in shared memory.
//!
//! A warpgroup, four warps, multiplies 64 rows of A with up to 256 columns of B over 64 k, a stage.
//! Both operands lie in shared memory, in rows of 128 bytes whose 16-byte chunks are
//! [`swizzled`]:
//!
//! ```text
//! along k                             across k
//!   row 0   | k 0..7 | k 8..15 | ..     k 0    | rows 0..7 | .. | rows 56..63 |    panel 0
//!   row 1   | k 8..15 | k 0..7 | ..     ..
//!   ..                                  k 63   | ..
//!                                       k 0    | rows 64..71 | ..                  panel 1
//! ```
//! Warp w of a warpgroup gets rows 16 w to 16 w + 15 of the sums, in the layout of `mma.sync`'s
//! tiles of 16 x 8. The instruction adds sixteen k at once, as [`mma`](crate::mma) describes, with the
//! bits of `mma.sync`.

use crate::format::round_tf32;
use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use half::bf16;

pub use crate::machine::wgmma::{Products, align_stages, fence_async, no_sums, undefined_sums};

/// The k of a stage.
pub const DEPTH: u32 = 64;
/// The k of an instruction.
pub const STEP: u32 = 16;
/// The rows of A that a warpgroup multiplies.
pub const GROUP_ROWS: u32 = 64;
/// The rows or columns of a panel of an operand that is stored across k.
pub const PANEL: u32 = 64;
/// The 16-byte chunks in a row of 128 bytes.
pub const CHUNKS: u32 = 8;
/// The words in a row of 128 bytes.
pub const ROW_WORDS: u32 = CHUNKS * CHUNK_WORDS;

/// Returns the word of a stage that holds this element, which is in its upper half if `row` (across
/// k) or `k` (along k) is odd.
#[inline(always)]
pub fn word_of(along_k: bool, row: u32, k: u32) -> u32 {
    let (down, along) = if along_k { (row, k) } else { (row / PANEL * DEPTH + k, row % PANEL) };
    swizzled(CHUNKS, down, along / 8) * CHUNK_WORDS + along % 8 / 2
}

/// Returns the word of a stage of TF32 that holds this element. A row of 128 bytes has 32 k.
#[inline(always)]
pub fn word_of_tf32(row: u32, k: u32) -> u32 {
    swizzled(CHUNKS, row, k / CHUNK_WORDS) * CHUNK_WORDS + k % CHUNK_WORDS
}

/// Returns the rows of a box of an operand of elements `T`. Across k, a row of f32 has 32 columns,
/// and a stage 32 k.
#[inline(always)]
pub const fn box_rows<T>(along_k: bool) -> u32 {
    if along_k || size_of::<T>() == size_of::<bf16>() { 64 } else { 32 }
}

/// An element of a tensor map, which becomes bits of a word of a stage.
pub trait BoxElement: Copy {
    /// Returns the element's bits in a stage.
    fn bits(self) -> u32;
}

impl BoxElement for bf16 {
    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }
}

impl BoxElement for f32 {
    fn bits(self) -> u32 {
        round_tf32(self)
    }
}
