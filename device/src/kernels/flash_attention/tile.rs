//! The products of a tile, between resident and streamed rows, and the copies that feed them.
//!
//! ```text
//! resident rows: 16 EACH, whole in shared memory  streamed tile: 64 rows, in chunks of 32 columns
//!
//! qk_scores:                                        pv_accumulate:
//!   pairs[resident, streamed] +=                      sums[resident, columns of a chunk] +=
//!       resident . streamed over a chunk                  pairs[resident, streamed] streamed
//!   warp w, lane 8 y + x has                          the same thread has
//!     resident rows  4 EACH w + y + 4 r,  r < EACH      resident rows  the same
//!     streamed rows  x + 8 k,             k < 8         columns        4 x .. 4 x + 3 of the chunk
//!
//! shared memory: see `shape.rs`
//! ```
//! Invariant: the eight lanes that share a row write and read its pairs. A chunk is copied while
//! the one before it is used.

use super::place::{MaskRange, Rows};
use super::shape::{ACROSS, AT_ONCE, CHUNK_LEN, CHUNK_ROW, COLUMNS, PAIR_ROW, PAIRS, Shape, TILE};
use crate::block::{launder_reg, no_unroll};
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::LANES;
use cuda_std::{GpuFloat, thread};

/// A thread's pairs: each of its resident rows with every eighth streamed row.
pub(super) type Pairs<const EACH: usize> = [[f32; PAIRS]; EACH];
/// A thread's sums: four columns of a chunk for each of its resident rows.
pub(super) type Sums<const EACH: usize> = [F4; EACH];

/// The tiles of a block's shared memory, and this thread's place in them.
#[derive(Clone, Copy)]
pub(super) struct Memory<const EACH: usize, const CHUNKS: usize> {
    /// The resident rows of the first array and of the second.
    pub(super) resident: [SharedTile<f32>; 2],
    pairs: SharedTile<f32>,
    chunks: [SharedTile<f32>; 2],
    /// The index of the chunk that is being copied or was copied last.
    turn: u32,
    /// This thread's first resident row, and its place among the lanes of a row.
    pub(super) row: u32,
    pub(super) across: u32,
}

impl<const EACH: usize, const CHUNKS: usize> Memory<EACH, CHUNKS> {
    const SHAPE: Shape = Shape { each: EACH, chunks: CHUNKS };
    const RESIDENT_ROW: u32 = Self::SHAPE.resident_row();
    pub(super) const ROWS: u32 = Self::SHAPE.rows();

    /// Returns the memory of a block with resident rows of `arrays` arrays, 1 or 2.
    ///
    /// # Safety
    /// The contract declares [`Shape::shared_bytes`] for that many arrays.
    #[inline(always)]
    pub(super) unsafe fn new(arrays: u32) -> Self {
        let resident_len = Self::ROWS * Self::RESIDENT_ROW;
        let pairs = arrays * resident_len;
        let chunks = pairs + Self::ROWS * PAIR_ROW;
        let thread = thread::thread_idx_x();
        let (warp, lane) = (thread / LANES, thread % LANES);
        // SAFETY: the tiles follow each other in the shared memory that the contract declares. If
        // there is one array, the second tile is the first.
        unsafe {
            Self {
                resident: [
                    SharedTile::new(0, resident_len),
                    SharedTile::new((arrays - 1) * resident_len * 4, resident_len),
                ],
                pairs: SharedTile::new(pairs * 4, Self::ROWS * PAIR_ROW),
                chunks: [SharedTile::new(chunks * 4, CHUNK_LEN), SharedTile::new((chunks + CHUNK_LEN) * 4, CHUNK_LEN)],
                turn: 0,
                row: warp * (4 * EACH as u32) + lane / ACROSS,
                across: lane % ACROSS,
            }
        }
    }

    /// Prevents unrolling at the head of a loop for the widest heads, which leave no registers for
    /// overlapping iterations.
    #[inline(always)]
    fn spare_registers() {
        if CHUNKS > 4 {
            no_unroll();
        }
    }

    /// The mask of the lanes that share this thread's rows.
    #[inline(always)]
    pub(super) fn mask(&self) -> u32 {
        ((1 << ACROSS) - 1) << (thread::thread_idx_x() % LANES / ACROSS * ACROSS)
    }

    /// Returns the index in the block of this thread's resident row `r`.
    #[inline(always)]
    pub(super) fn resident_row(&self, r: usize) -> u32 {
        self.row + 4 * r as u32
    }

    /// Starts to copy the block's resident rows, from token `first` on. Rows from `limit` on, and
    /// columns from `width` on, become 0.
    ///
    /// # Safety
    /// The rows below `limit` lie inside `rows.values`, with `width` columns each.
    #[inline(always)]
    pub(super) unsafe fn copy_resident(&self, array: usize, rows: Rows<'_, f32>, first: u32, limit: u32, width: u32) {
        let mut chunk = 0;
        while chunk * COLUMNS < width {
            // SAFETY: the caller guarantees it.
            unsafe {
                copy::<EACH>(
                    self.resident[array],
                    Self::RESIDENT_ROW,
                    chunk * COLUMNS,
                    rows,
                    first,
                    limit,
                    [chunk, width],
                )
            };
            chunk += 1;
        }
    }

    /// Starts to copy a chunk of a tile.
    ///
    /// # Safety
    /// The caller meets the requirements of [`Memory::copy_resident`]. All threads have finished
    /// reading the chunk in this slot.
    #[inline(always)]
    unsafe fn copy_chunk(&self, next: Next<'_>, limit: u32, width: u32) {
        let to = if self.turn == 0 { self.chunks[0] } else { self.chunks[1] };
        // SAFETY: the caller guarantees it.
        unsafe { copy::<4>(to, CHUNK_ROW, 0, next.rows, next.tile * TILE, limit, [next.chunk, width]) };
    }

    /// Starts to copy the very first chunk, in one group with the copies already started.
    ///
    /// # Safety
    /// The caller meets the requirements of [`Memory::copy_resident`].
    #[inline(always)]
    pub(super) unsafe fn begin(&self, first: Next<'_>, limit: u32, width: u32) {
        // SAFETY: the caller guarantees it; nothing was read yet.
        unsafe { self.copy_chunk(first, limit, width) };
        commit_copies();
    }

    /// Waits for the chunk that is being copied, returns it, and starts to copy the next. It is a
    /// barrier: afterwards a thread can read what the block's threads wrote before it.
    ///
    /// # Safety
    /// The caller meets the requirements of [`Memory::copy_resident`]. All threads of the block
    /// call it together, and no thread reads an earlier chunk after it.
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn turn(&mut self, next: Option<Next<'_>>, limit: u32, width: u32) -> SharedTile<f32> {
        wait_copies::<0>();
        thread::sync_threads();
        let chunk = if self.turn == 0 { self.chunks[0] } else { self.chunks[1] };
        self.turn ^= 1;
        if let Some(next) = next {
            // SAFETY: the other chunk was read before the barrier.
            unsafe { self.copy_chunk(next, limit, width) };
            commit_copies();
        }
        chunk
    }

    /// Accumulates the products of a chunk's columns in the pairs of resident and streamed rows.
    #[inline(always)]
    pub(super) fn qk_scores(&self, pairs: &mut Pairs<EACH>, array: usize, number: u32, chunk: SharedTile<f32>) {
        let resident = self.row * Self::RESIDENT_ROW + number * COLUMNS;
        let mut column = 0;
        while column < COLUMNS {
            Self::spare_registers();
            let mut x = [F4::splat(0.0); EACH];
            unroll_on_gpu!(r < 4 => {
                if r < EACH {
                    x[r] = self.resident[array].get4(resident + 4 * r as u32 * Self::RESIDENT_ROW + column);
                }
            });
            unroll_on_gpu!(k < PAIRS => {
                let y = chunk.get4((self.across + ACROSS * k as u32) * CHUNK_ROW + column);
                unroll_on_gpu!(r < 4 => {
                    if r < EACH {
                        pairs[r][k] = chain(pairs[r][k], x[r], y);
                    }
                });
            });
            column += F4::LEN as u32;
        }
    }

    /// Writes pairs for [`Memory::pv_accumulate`].
    #[inline(always)]
    pub(super) fn set_pairs(&self, pairs: &Pairs<EACH>) {
        unroll_on_gpu!(r < 4 => {
            if r < EACH {
                unroll_on_gpu!(k < PAIRS => {
                    self.pairs.set(self.resident_row(r) * PAIR_ROW + self.across + ACROSS * k as u32, pairs[r][k]);
                });
            }
        });
    }

    /// Multiplies the written pairs with a chunk's rows, ascending, and accumulates in the sums of
    /// its columns.
    #[inline(always)]
    pub(super) fn pv_accumulate(&self, sums: &mut Sums<EACH>, chunk: SharedTile<f32>) {
        let mut streamed = 0;
        while streamed < TILE {
            Self::spare_registers();
            let (mut factors, mut rows) = ([F4::splat(0.0); EACH], [F4::splat(0.0); F4::LEN]);
            unroll_on_gpu!(r < 4 => {
                if r < EACH {
                    factors[r] = self.pairs.get4(self.resident_row(r) * PAIR_ROW + streamed);
                }
            });
            unroll_on_gpu!(at < 4 => {
                rows[at] = chunk.get4((streamed + at as u32) * CHUNK_ROW + self.across * F4::LEN as u32);
            });
            unroll_on_gpu!(at < 4 => {
                unroll_on_gpu!(r < 4 => {
                    if r < EACH {
                        sums[r] = sums[r].fma(F4::splat(factors[r].0[at]), rows[at]);
                    }
                });
            });
            streamed += F4::LEN as u32;
        }
    }

    /// Returns the mask of this thread's pairs: bit `8 r + k` for resident row `r` and streamed row
    /// `k`. Resident rows begin at `first`, and the tile's streamed rows at `streamed`. If
    /// `resident_keys`, resident rows are keys; otherwise queries.
    #[inline(always)]
    pub(super) fn seen(&self, mask: MaskRange<'_>, first: u32, streamed: u32, resident_keys: bool) -> u32 {
        let (resident, streamed_rows) = ([first, Self::ROWS], [streamed, TILE]);
        if if resident_keys { mask.all_seen(streamed_rows, resident) } else { mask.all_seen(resident, streamed_rows) } {
            return u32::MAX;
        }
        let mut seen = 0;
        let mut documents = [0; EACH];
        unroll_on_gpu!(r < 4 => {
            if r < EACH {
                documents[r] = mask.document(first + self.resident_row(r));
            }
        });
        unroll_on_gpu!(k < PAIRS => {
            let streamed = streamed + self.across + ACROSS * k as u32;
            let document = mask.document(streamed);
            unroll_on_gpu!(r < 4 => {
                if r < EACH {
                    let resident = first + self.resident_row(r);
                    let sees = if resident_keys { mask.sees(streamed, resident) } else { mask.sees(resident, streamed) };
                    if sees && document == documents[r] {
                        seen |= 1 << (PAIRS * r + k);
                    }
                }
            });
        });
        seen
    }
}

/// A chunk to copy: its array, its tile, and its columns.
#[derive(Clone, Copy)]
pub(super) struct Next<'k> {
    pub(super) rows: Rows<'k, f32>,
    pub(super) tile: u32,
    pub(super) chunk: u32,
}

/// Returns `sum + x . y`, one product after another.
#[inline(always)]
fn chain(sum: f32, x: F4, y: F4) -> f32 {
    let ([a, b, c, d], [e, f, g, h]) = (x.0, y.0);
    let fma = GpuFloat::mul_add;
    fma(d, h, fma(c, g, fma(b, f, fma(a, e, sum))))
}

/// Starts to copy 16 `TIMES` rows from token `first` on: the 32 columns of a chunk, to columns `at`
/// of rows that are `pitch` apart. Elements past the rows or columns become 0.
///
/// # Safety
/// The rows below `limit` lie inside `rows.values`, with `width` columns each.
#[inline(always)]
unsafe fn copy<const TIMES: usize>(
    to: SharedTile<f32>,
    pitch: u32,
    at: u32,
    rows: Rows<'_, f32>,
    first: u32,
    limit: u32,
    [chunk, width]: [u32; 2],
) {
    // Recomputed for each chunk: addresses kept live until the next chunk would take registers from
    // the sums.
    let thread = launder_reg(thread::thread_idx_x());
    let (row, quad) = (thread / ACROSS, thread % ACROSS * F4::LEN as u32);
    let column = chunk * COLUMNS + quad;
    unroll_on_gpu!(time < 4 => {
        if time < TIMES {
            let row = row + AT_ONCE * time as u32;
            let (token, there) = (first + row, first + row < limit && column < width);
            let from = rows.start + token as usize * rows.stride + column as usize;
            // SAFETY: the caller guarantees that the vector lies inside the rows if `there` is
            // true.
            unsafe { to.copy4_or_zero(row * pitch + at + quad, rows.values, from, there) };
        }
    });
}
