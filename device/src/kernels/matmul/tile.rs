//! Tiles: the part of the output that a block computes, how its threads divide it, and its stages.
//!
//! A warp is 4 x 8 threads. A thread has `each[0] x each[1]` outputs, in groups of up to four
//! neighbors that are spread over the tile:
//!
//! ```text
//! a warp's lanes:  0  2  4  6  8 10 12 14     64 x 128: 2 x 2 warps, each thread 8 x 8 outputs
//!                  1  3  5  7  9 11 13 15       as 2 x 2 groups of 4 x 4
//!                 16 18 20 22 24 26 28 30       columns 0..31  32..63  64..95  96..127
//!                 17 19 21 23 25 27 29 31       rows  0..15 w0      w1      w0      w1
//!                                                    16..31 w2      w3      w2      w3
//! a stage, k-major:                                  32..47 w0      w1      w0      w1
//!   k = 0 | A: 64 rows | B: 128 columns | 4 unused | 48..63 w2      w3      w2      w3
//!   k = 1 | A: 64 rows | B: 128 columns | 4 unused | lane 3 of warp 0: rows 4..7 and 36..39,
//!   pitch 196: in every tile 4 banks further                           columns 4..7 and 68..71
//!   than the previous k
//! ```
//! The emulator's own tile (`cpu.rs`) differs: each of its 32 threads has one square of neighboring
//! outputs.
//!
//! Invariant: every tile gives the same bits.

use crate::machine::IS_GPU;
use cuda_std::thread;

/// The unused floats after each k of a stage. They shift the next k by four banks, and keep its
/// 16-byte alignment.
const PAD: u32 = 4;

/// A block's part of the output and the stages that feed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The warps along the rows and along the columns of the tile.
    pub warps: [u32; 2],
    /// The outputs of a thread along the rows and along the columns: 1, 2, or a multiple of four.
    pub each: [usize; 2],
    /// The depth of a stage along k.
    pub depth: u32,
    /// The stages in shared memory: one is in use, and the others are being copied.
    pub stages: u32,
    /// The number of k whose factors a thread reads together, one such group ahead of their use.
    /// The fewer outputs a thread has, the more k it needs to hide the latency of a read.
    pub at_once: usize,
    /// The groups of `at_once` k in the loop's body. The number is even, so that no register is
    /// copied at the body's end. Large tiles have few groups, so that the loop fits the instruction
    /// cache.
    pub groups: usize,
    /// The time a block takes.
    pub cost: Cost,
}

/// The cycles of a block, fitted to times on an H200. The host compares tiles by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// The cycles for one k, if the block has a multiprocessor to itself.
    pub latency: u32,
    /// The cycles for one k, per block, if several blocks share a multiprocessor.
    pub cycles: u32,
    /// The cycles before the first k and after the last.
    pub ends: u32,
}

impl Cost {
    pub(crate) const fn new(latency: u32, cycles: u32, ends: u32) -> Self {
        Self { latency, cycles, ends }
    }
}

impl Tile {
    /// The rows of the tile.
    #[inline(always)]
    pub const fn rows(self) -> u32 {
        4 * self.warps[0] * self.each[0] as u32
    }

    /// The columns of the tile.
    #[inline(always)]
    pub const fn cols(self) -> u32 {
        8 * self.warps[1] * self.each[1] as u32
    }

    /// The threads of a block.
    #[inline(always)]
    pub const fn threads(self) -> u32 {
        32 * self.warps[0] * self.warps[1]
    }

    /// The floats from one k to the next in a stage: a column of A, a row of B, and `PAD`.
    #[inline(always)]
    pub const fn pitch(self) -> u32 {
        self.rows() + self.cols() + PAD
    }

    /// The floats of a stage.
    #[inline(always)]
    pub const fn stage_len(self) -> u32 {
        self.depth * self.pitch()
    }

    /// Returns [`Tile::groups`] on the GPU, and one on the CPU, where more would gain nothing and
    /// compile slowly.
    #[inline(always)]
    pub const fn unrolled(self) -> usize {
        if IS_GPU { self.groups } else { 1 }
    }

    /// The k that one iteration of the loop covers.
    #[inline(always)]
    pub const fn step(self) -> u32 {
        (self.at_once * self.unrolled()) as u32
    }

    /// True if it is the emulator's own tile, which no GPU runs.
    #[cfg(not(target_arch = "nvptx64"))]
    pub const fn is_on_cpu(self) -> bool {
        self.warps[0] * self.warps[1] == 1
    }

    /// The shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        4 * self.stages * self.stage_len()
    }
}

/// Returns row and column of this block's tile among `rows` x `cols` tiles. Blocks run down the
/// columns within each `group` rows of tiles, so that concurrent blocks share operands in the L2
/// cache.
///
/// ```text
/// block of each tile, 4 x 5 tiles, group 2:     0  2  4  6  8
///                                               1  3  5  7  9
///                                              10 12 14 16 18
///                                              11 13 15 17 19
/// ```
#[inline(always)]
pub(crate) fn place(extents: [u32; 2], group: u32) -> [u32; 2] {
    place_of(thread::block_idx_x(), extents, group)
}

/// Returns [`place`] of the tile with this number.
#[inline(always)]
pub(crate) fn place_of(block: u32, [rows, cols]: [u32; 2], group: u32) -> [u32; 2] {
    let height = rows.min(group);
    let above = block / (height * cols) * height;
    let (height, within) = (height.min(rows - above), block - above * cols);
    [above + within % height, within / height]
}
