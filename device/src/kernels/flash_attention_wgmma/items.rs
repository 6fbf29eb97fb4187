//! The items of a launch of the kernels `forward` and `queries`, and the block that computes each.
//! An item is a tile of a head's queries. Tiles are counted from the last row on, so the first rows
//! of a head are the short tile: under a causal mask, they see the fewest keys.
//!
//! Heads are taken in sections. A section begins with the last tiles of its heads, which have the
//! most work under a causal mask. Blocks take its slots in rounds. If the work falls along a
//! section, every second round goes backwards: a block that got more work in one round gets less in
//! the next. Such a section has as many heads as two rounds have room for, and its last slots can
//! be empty.
//!
//! ```text
//! round 0   block  0  1  2  ..  n - 1        the longest items
//! round 1   block  n - 1  ..  2  1  0        the shortest, then empty slots
//! ```
//! Invariant: each tile of each head is in one slot, and each slot belongs to one block.

use super::heads::Inputs;
use super::shape::GROUP_ROWS;
use crate::block::{divide_short, launder_reg};
use crate::flash_attention::place::{Problem, ResidentRows};
use cuda_std::thread;
use half::bf16;

/// The heads of a section if rounds do not turn back and blocks have several items. Their keys and
/// values are in use at about the same time.
const HEADS_AT_ONCE: u32 = 16;

/// The items of a launch.
pub(super) struct Items {
    /// The slots of all sections, and those before the last section.
    pub(super) end: u32,
    last_start: u32,
    /// The heads before the last section.
    last_before: u32,
    /// The slots of a section, those that have items, and its heads. The last section also has the
    /// heads that fill none, in any number of slots.
    slots: u32,
    filled: u32,
    at_once: u32,
    /// The heads of all samples.
    heads: u32,
}

impl Items {
    /// Returns the items, which have up to `GROUPS` groups of rows.
    #[inline(always)]
    pub(super) fn new<const GROUPS: u32>(Inputs { problem, samples, .. }: &Inputs<'_>) -> Self {
        let tiles = problem.tokens.div_ceil(GROUPS * GROUP_ROWS);
        let heads = samples * problem.heads;
        let two_rounds = 2 * thread::grid_dim_x();
        let at_once = if !turns_back(problem) {
            // Blocks that have one item each take one head after another.
            if thread::grid_dim_x() == heads * tiles { 1 } else { HEADS_AT_ONCE }
        } else if two_rounds < tiles {
            1
        } else {
            // SAFETY: the contract has checked that there are tokens.
            unsafe { divide_short(two_rounds, tiles).0 }
        };
        let at_once = if at_once < heads { at_once } else { heads };
        let filled = at_once * tiles;
        // Each section begins with a round that goes forwards.
        // SAFETY: a grid has blocks, and a section has heads.
        let [rounds, sections] =
            unsafe { [divide_short(filled + two_rounds - 1, two_rounds).0, divide_short(heads, at_once).0] };
        let slots = if turns_back(problem) { rounds * two_rounds } else { filled };
        let last = sections - 1;
        let (last_start, last_before) = (last * slots, last * at_once);
        Self { end: last_start + (heads - last_before) * tiles, last_start, last_before, slots, filled, at_once, heads }
    }

    /// Returns the first round from `round` on in which this block's slot is occupied or past the
    /// end.
    #[inline(always)]
    pub(super) fn occupied(&self, problem: &Problem<'_, bf16>, mut round: u32) -> u32 {
        loop {
            let slot = slot_of(problem, round);
            // SAFETY: a section has slots.
            let (_, at) = unsafe { divide_short(slot, self.slots) };
            if self.filled == self.slots || slot >= self.last_start || at < self.filled {
                return round;
            }
            round += 1;
        }
    }

    /// Returns the place of a slot's item, and its rows.
    ///
    /// # Safety
    /// The contract has accepted the problem. The slot is occupied, and below `end`.
    #[inline(always)]
    pub(super) unsafe fn place<'k, const GROUPS: u32>(
        &self,
        problem: &Problem<'k, bf16>,
        slot: u32,
    ) -> (ResidentRows<'k>, u32) {
        // A number that is cheap to compute again would take a register meanwhile.
        let units = launder_reg(problem.tokens).div_ceil(GROUP_ROWS);
        // SAFETY: sections have heads and slots, and the contract has checked that there are heads.
        unsafe {
            let (section, at) = divide_short(slot, self.slots);
            let last = slot >= self.last_start;
            let before = if last { self.last_before } else { section * self.at_once };
            let heads = if last { self.heads - before } else { self.at_once };
            let (tile, head) = divide_short(if last { slot - self.last_start } else { at }, heads);
            let (sample, head) = divide_short(before + head, problem.heads);
            let end = units - tile * GROUPS;
            let groups = if end < GROUPS { end } else { GROUPS };
            (ResidentRows::of(problem, sample as usize, head, (end - groups) * GROUP_ROWS), groups * GROUP_ROWS)
        }
    }
}

/// True if every second round goes backwards: under a mask that is causal, or almost. The tiles of
/// a short window differ less. Samples of unequal lengths differ more.
#[inline(always)]
fn turns_back(problem: &Problem<'_, bf16>) -> bool {
    problem.window > problem.tokens / 3 * 2 && problem.lengths.is_empty()
}

/// Returns this block's slot of a round.
#[inline(always)]
pub(super) fn slot_of(problem: &Problem<'_, bf16>, round: u32) -> u32 {
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    round * blocks + if turns_back(problem) && round % 2 == 1 { blocks - 1 - block } else { block }
}
