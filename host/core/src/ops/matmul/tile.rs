//! The choice of a multiply's tile: the named one, or the one that should end first.
//!
//! Invariant: every tile of a kernel gives the same bits, so the choice may depend on the device.

use crate::error::{Error, Result};
use kernels::matmul::Cost;
use std::fmt;

/// A tile of any matmul kernel, as the choice sees it.
pub(super) trait Tile: Copy + PartialEq + fmt::Debug {
    /// The rows and the columns of the tile.
    fn extents(self) -> [usize; 2];

    /// The cycles of its block.
    fn cost(self) -> Cost;
}

macro_rules! tiles {
    ($($kernel:ident)*) => {$(
        impl Tile for kernels::$kernel::Tile {
            fn extents(self) -> [usize; 2] {
                [self.rows() as usize, self.cols() as usize]
            }

            fn cost(self) -> Cost {
                self.cost
            }
        }
    )*};
}

tiles! { matmul matmul_mma matmul_bf16 matmul_wgmma }

/// The tile whose last block should end first, for this many `m` x `n` matrices that are sums of k
/// products.
pub(super) fn fastest<T: Tile>(tiles: &[T], [m, n, k]: [usize; 3], matrices: usize, processors: usize) -> T {
    let time = |tile: &&T| {
        let ([rows, cols], Cost { latency, cycles, ends }) = (tile.extents(), tile.cost());
        let blocks = m.div_ceil(rows).saturating_mul(n.div_ceil(cols)).saturating_mul(matrices);
        let block = |for_one_k: u32| k.saturating_mul(for_one_k as usize).saturating_add(ends as usize);
        blocks.div_ceil(processors).saturating_mul(block(cycles)).max(block(latency))
    };
    *tiles.iter().min_by_key(time).expect("there are tiles")
}

/// The named tile if it is one of `tiles`, whose public name is `list`. Without a named tile, the
/// choice of `unnamed`.
pub(super) fn tile_of<T: Tile>(named: Option<T>, tiles: &[T], list: &str, unnamed: impl FnOnce() -> T) -> Result<T> {
    match named {
        Some(tile) if !tiles.contains(&tile) => {
            Err(Error::misuse("matmul", format!("one of `{list}`"), format!("{tile:?}")))
        }
        Some(tile) => Ok(tile),
        None => Ok(unnamed()),
    }
}
