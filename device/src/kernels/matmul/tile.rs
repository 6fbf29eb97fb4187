//! Tiles: what part of the output a block computes, how its threads divide it, and what it stages.
//!
//! A warp is 4 x 8 threads. A thread has `each[0] x each[1]` outputs, in groups of up to four neighbours that are spread over the tile:
//!
//! ```text
//! a warp's lanes:  0  2  4  6  8 10 12 14     64 x 128: 2 x 2 warps, each thread 8 x 8 outputs as 2 x 2 groups of 4 x 4
//!                  1  3  5  7  9 11 13 15       columns 0..31  32..63  64..95  96..127     lane 3 of warp 0 has
//!                 16 18 20 22 24 26 28 30       rows  0..15 w0      w1      w0      w1       rows    4..7  36..39
//!                 17 19 21 23 25 27 29 31            16..31 w2      w3      w2      w3       columns 4..7  68..71
//!                                                    32..47 w0      w1      w0      w1
//! a stage, k-major:                                  48..63 w2      w3      w2      w3
//!   k = 0 | A: 64 rows | B: 128 columns | 4 unused |
//!   k = 1 | A: 64 rows | B: 128 columns | 4 unused |   pitch 196: in every tile 4 banks further than the k before
//! ```
//! The emulator's own tile (`cpu.rs`) differs: its 32 threads have one square of neighbouring outputs each.
//!
//! Invariant: every tile gives the same bits.

use cuda_std::thread;

/// Unused floats behind each k of a stage. They start the next k four banks further, and keep its alignment to 16 bytes.
const PAD: u32 = 4;

/// A block's part of the output and the stages that feed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Warps along the rows and along the columns of the tile.
    pub warps: [u32; 2],
    /// Outputs of a thread along the rows and along the columns: 1, 2, or a multiple of four.
    pub each: [usize; 2],
    /// Depth of a stage along k.
    pub depth: u32,
    /// Stages in shared memory: one is in use, the others are being copied.
    pub stages: u32,
    /// A thread reads the factors of so many k together, one such group ahead of their use. The fewer outputs it has, the more k it needs
    /// to hide the latency of a read.
    pub at_once: usize,
    /// Groups of `at_once` k in the body of the loop. The number is even, so that no register is copied at the body's end. Large
    /// tiles have few, so that the loop fits the instruction cache.
    pub groups: usize,
    /// How long a block takes.
    pub cost: Cost,
}

/// Cycles of a block, fitted to times on an H200. The host compares tiles by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// For one k, when the block is alone on its multiprocessor.
    pub latency: u32,
    /// For one k, per block, when several blocks share a multiprocessor.
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

    /// Floats from one k to the next in a stage: a column of A, a row of B, `PAD`.
    #[inline(always)]
    pub const fn pitch(self) -> u32 {
        self.rows() + self.cols() + PAD
    }

    /// Floats of a stage.
    #[inline(always)]
    pub const fn stage_len(self) -> u32 {
        self.depth * self.pitch()
    }

    /// [`Tile::groups`] on the GPU. One on the CPU, where more would gain nothing and compile slowly.
    #[inline(always)]
    pub const fn unrolled(self) -> usize {
        if cfg!(target_arch = "nvptx64") { self.groups } else { 1 }
    }

    /// The k that one turn of the loop covers.
    #[inline(always)]
    pub const fn step(self) -> u32 {
        (self.at_once * self.unrolled()) as u32
    }

    /// Whether it is the emulator's own tile, which no GPU runs.
    #[cfg(not(target_arch = "nvptx64"))]
    pub const fn is_on_cpu(self) -> bool {
        self.warps[0] * self.warps[1] == 1
    }

    /// Shared bytes of a block.
    pub const fn shared_bytes(self) -> u32 {
        4 * self.stages * self.stage_len()
    }
}

/// Row and column of this block's tile among `rows` x `cols` tiles. Blocks run down the columns within each `group` rows of tiles. So
/// blocks that run together share operands in the L2 cache.
///
/// ```text
/// block of each tile, 4 x 5 tiles, group 2:     0  2  4  6  8
///                                               1  3  5  7  9
///                                              10 12 14 16 18
///                                              11 13 15 17 19
/// ```
#[inline(always)]
pub(crate) fn place([rows, cols]: [u32; 2], group: u32) -> [u32; 2] {
    let block = thread::block_idx_x();
    let height = rows.min(group);
    let above = block / (height * cols) * height;
    let (height, within) = (height.min(rows - above), block - above * cols);
    [above + within % height, within / height]
}
