//! The inputs of a kernel, and the rows of their heads: in memory, and in tensor maps.
//!
//! ```text
//! a map's    packed q, k and v                   stacked                            dout
//! matrices   all heads: q's, then k's, then v's  a part's heads                     heads
//! rows       all samples' tokens                 q's of all samples, k's, then v's  all samples' tokens
//! ```
//! Invariant: a map has no columns past the width of a head, so that a box has zeros there. It has
//! rows past the tokens of a sample.

#[cfg(not(target_arch = "nvptx64"))]
use super::shape::GROUP_ROWS;
use crate::block::launder_reg;
use crate::flash_attention::place::{Problem, Rows};
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::launch::{self, Slice, Violation};
use cuda_std::tensor_map::TensorMap;
use half::bf16;

/// The part that is dout.
const DOUT: u32 = 3;

/// The inputs of a kernel.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'k> {
    pub(super) problem: Problem<'k, bf16>,
    pub(super) samples: u32,
    pub(super) qkv_map: TensorMap<bf16>,
    /// The gradient of the output, with its map: empty, with any map, in the forward pass.
    pub(super) dout: &'k [bf16],
    pub(super) dout_map: TensorMap<bf16>,
}

/// A head of q, k, v or dout.
#[derive(Clone, Copy)]
pub(super) struct Head<'k> {
    inputs: Inputs<'k>,
    part: u32,
    sample: u32,
    head: u32,
}

impl<'k> Inputs<'k> {
    /// Returns a head of q (`part` 0), k (1) or v (2).
    #[inline(always)]
    pub(super) fn head(self, part: u32, sample: usize, head: u32) -> Head<'k> {
        Head { inputs: self, part, sample: sample as u32, head }
    }

    /// Returns a head of dout.
    #[inline(always)]
    pub(super) fn output_head(self, sample: usize, head: u32) -> Head<'k> {
        self.head(DOUT, sample, head)
    }
}

impl<'k> Head<'k> {
    /// Returns the rows in memory. They are computed where they are used: few registers can hold
    /// them.
    #[inline(always)]
    pub(super) fn rows(self) -> Rows<'k, bf16> {
        let Inputs { problem, dout, .. } = self.inputs;
        let (sample, head) = (launder_reg(self.sample) as usize, launder_reg(self.head));
        if self.part == DOUT { problem.output_rows(dout, sample, head) } else { problem.rows(self.part, sample, head) }
    }

    /// Returns the tensor map, and the row of token 0 and the matrix there.
    #[inline(always)]
    pub(super) fn place(self) -> (TensorMap<bf16>, u32, u32) {
        let Inputs { problem, samples, qkv_map, dout_map, .. } = self.inputs;
        if self.part == DOUT {
            return (dout_map, self.sample * problem.tokens, self.head);
        }
        if problem.stacked != 0 {
            return (qkv_map, (self.part * samples + self.sample) * problem.tokens, self.head);
        }
        let before = match self.part {
            0 => 0,
            1 => problem.heads,
            _ => problem.heads + problem.kv_heads,
        };
        (qkv_map, self.sample * problem.tokens, before + self.head)
    }
}

/// Returns the tensor map of `qkv`, in which q has `heads`, and k and v have `kv_heads` heads of
/// `width` columns.
#[cfg(not(target_arch = "nvptx64"))]
pub fn qkv_map(
    qkv: Slice<'_, bf16>,
    [heads, kv_heads, width]: [u32; 3],
    is_stacked: bool,
) -> launch::TensorMap<'_, bf16> {
    let in_a_row = if is_stacked { heads } else { heads.saturating_add(kv_heads).saturating_add(kv_heads) };
    map_of_heads(qkv, in_a_row, width)
}

/// Returns the tensor map of `dout`, which has `heads` heads of `width` columns.
#[cfg(not(target_arch = "nvptx64"))]
pub fn dout_map(dout: Slice<'_, bf16>, heads: u32, width: u32) -> launch::TensorMap<'_, bf16> {
    map_of_heads(dout, heads, width)
}

/// Returns the map of rows of `heads` heads: a matrix for each head, with all tokens as rows.
#[cfg(not(target_arch = "nvptx64"))]
fn map_of_heads(memory: Slice<'_, bf16>, heads: u32, width: u32) -> launch::TensorMap<'_, bf16> {
    let row = (heads as usize).saturating_mul(width as usize);
    let rows = u32::try_from(memory.len() / row.max(1)).unwrap_or(u32::MAX);
    launch::TensorMap { memory, extents: [width, rows, heads], strides: [row, width as usize], box_rows: GROUP_ROWS }
}

/// Returns Ok if a map is the expected one, of any memory of that length, and a box can begin at
/// each of its rows.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn check_map(
    name: &'static str,
    map: &launch::TensorMap<'_, bf16>,
    expected: &launch::TensorMap<'_, bf16>,
) -> Result<(), Violation> {
    let place = |map: &launch::TensorMap<'_, bf16>| (map.extents, map.strides, map.box_rows);
    Violation::unless(place(map) == place(expected), name, "the map of the heads' rows", std::format_args!("{map:?}"))?;
    // The copy engine numbers rows in 31 bits.
    Violation::unless(map.extents[1] <= i32::MAX as u32, name, "less than 2^31 rows", map.extents[1])?;
    map.check(name)
}
