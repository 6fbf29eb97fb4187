//! Tiles: what part of the output a block computes, how it divides it among its threads, and what it stages.
//!
//! Invariant: every tile gives the same bits. A warp is 4 x 8 threads; each has `each[0] x each[1]` outputs, in groups
//! of up to four neighbours that are spread over the tile.

use cuda_std::thread;

/// Floats between rows of a stage beyond its width: spreads a column over the banks, keeps 16-byte alignment.
const PAD: u32 = 4;

/// A block's part of the output and the stages that feed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Warps along the rows and the columns of the tile.
    pub warps: [u32; 2],
    /// Outputs of a thread along both: 1, 2, or a multiple of four.
    pub each: [usize; 2],
    /// Depth of a stage along k.
    pub depth: u32,
    /// Stages in shared memory: one in use, the others on their way.
    pub stages: u32,
    /// K whose factors a thread reads together, one time ahead of their use: the fewer outputs, the more hide the latency.
    pub at_once: usize,
    /// Groups of so many k in the body of the loop: an even number, so that no register is copied at its end; with large
    /// tiles few, so that the loop stays in the instruction cache.
    pub groups: usize,
    /// How long it takes.
    pub cost: Cost,
}

/// Cycles of a block, fitted to times on an H200: how the host compares tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// For one k, where the block is alone on its multiprocessor.
    pub latency: u32,
    /// For one k of each block where several share a multiprocessor.
    pub cycles: u32,
    /// Before the first k and after the last.
    pub ends: u32,
}

impl Cost {
    pub(crate) const fn new(latency: u32, cycles: u32, ends: u32) -> Self {
        Self { latency, cycles, ends }
    }
}

impl Tile {
    /// Rows of the tile.
    #[inline(always)]
    pub const fn rows(self) -> u32 {
        4 * self.warps[0] * self.each[0] as u32
    }

    /// Columns of the tile.
    #[inline(always)]
    pub const fn cols(self) -> u32 {
        8 * self.warps[1] * self.each[1] as u32
    }

    /// Threads of a block.
    #[inline(always)]
    pub const fn threads(self) -> u32 {
        32 * self.warps[0] * self.warps[1]
    }

    /// Floats from one k to the next in a stage: a column of A, a row of B, padding.
    #[inline(always)]
    pub const fn pitch(self) -> u32 {
        self.rows() + self.cols() + PAD
    }

    /// Floats of a stage.
    #[inline(always)]
    pub const fn stage_len(self) -> u32 {
        self.depth * self.pitch()
    }

    /// [`Tile::groups`], or one on the CPU, which gains nothing by more and compiles them long.
    #[inline(always)]
    pub const fn unrolled(self) -> usize {
        if cfg!(target_arch = "nvptx64") { self.groups } else { 1 }
    }

    /// K that the body of the loop covers.
    #[inline(always)]
    pub const fn step(self) -> u32 {
        (self.at_once * self.unrolled()) as u32
    }

    /// Whether it is the emulator's own, which no GPU has.
    #[cfg(not(target_arch = "nvptx64"))]
    pub const fn is_on_cpu(self) -> bool {
        self.warps[0] * self.warps[1] == 1
    }

    /// Bytes of shared memory of a block.
    pub const fn shared_bytes(self) -> u32 {
        4 * self.stages * self.stage_len()
    }
}

/// Row and column of this block's tile among `rows` x `cols` tiles. `group` rows of tiles are walked column by column, so that
/// blocks that run together share operands in the L2 cache.
#[inline(always)]
pub(crate) fn place([rows, cols]: [u32; 2], group: u32) -> [u32; 2] {
    let block = thread::block_idx_x();
    let height = rows.min(group);
    let above = block / (height * cols) * height;
    let (height, within) = (height.min(rows - above), block - above * cols);
    [above + within % height, within / height]
}
