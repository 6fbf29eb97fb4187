//! A block's shared memory, the copies that fill it, and the two products of a tile.
//!
//! ```text
//! qk_scores:                                            pv_accumulate:
//!   scores[resident, streamed] +=                         sums[resident, columns] +=
//!       resident . streamed over the columns                  weights[resident, streamed] streamed
//!   warp w, lane 4 g + t has                              the same lane has
//!     resident rows  16 M_TILES w + 16 m + g, 8 further     resident rows  the same
//!     streamed rows  8 n + 2 t, and the next                columns        8 n + 2 t, and the next
//! ```
//! Invariant: one slot is copied while the other is used. Everything past the rows or columns of a
//! head is 0 in shared memory.

use super::shape::{BLOCK, COLUMNS, rows_of};
use crate::block::{launder_index, launder_reg};
use crate::flash_attention::place::{MaskRange, Rows};
use crate::mma::element::MmaElement;
use crate::mma::fragments::{CHUNK_WORDS, Squares, Sums, multiply, swizzled};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::{Converged, LANES};
use cuda_std::{thread, warp};

/// The maximum of chunks that a thread copies at once.
const COPIES: usize = 16;

/// The tiles of a block's shared memory, and this thread's place in them.
#[derive(Clone, Copy)]
pub(super) struct Memory<const M_TILES: usize, const TILES: usize, const CHUNKS: usize> {
    /// This lane's squares of rows: of A or of k, and of B.
    pub(super) down: Squares,
    across: Squares,
    arrays: u32,
}

impl<const M_TILES: usize, const TILES: usize, const CHUNKS: usize> Memory<M_TILES, TILES, CHUNKS> {
    /// The resident rows of the block and of a warp, and the rows of a streamed tile.
    pub(super) const RESIDENT: u32 = rows_of(M_TILES);
    pub(super) const WARP_ROWS: u32 = 16 * M_TILES as u32;
    pub(super) const TILE: u32 = COLUMNS * TILES as u32;
    /// The words of a row.
    pub(super) const ROW: u32 = CHUNKS as u32 * CHUNK_WORDS;
    /// The rows that the block copies at once.
    const PASS: u32 = BLOCK / CHUNKS as u32;

    /// Returns the memory of a block with resident rows of `arrays` arrays, 1 or 2.
    ///
    /// # Safety
    /// The contract declares [`Shape::shared_bytes`](super::Shape::shared_bytes) for that many
    /// arrays, and for the values that the block uses.
    #[inline(always)]
    pub(super) unsafe fn new(arrays: u32) -> Self {
        const {
            assert!(
                Self::RESIDENT.div_ceil(Self::PASS) as usize <= COPIES
                    && Self::TILE.div_ceil(Self::PASS) as usize <= COPIES
            )
        };
        let chunks = CHUNKS as u32;
        Self { down: Squares::down(chunks, 0, 0), across: Squares::across(chunks, 0, 0), arrays }
    }

    /// Returns the resident rows of an array.
    #[inline(always)]
    pub(super) fn resident(&self, array: u32) -> SharedTile<u32> {
        // SAFETY: the arrays come first in the shared memory that the contract declares.
        unsafe { SharedTile::new(array * Self::RESIDENT * Self::ROW * 4, Self::RESIDENT * Self::ROW) }
    }

    /// Returns a slot's tile of the first streamed array (0) or the second (1).
    #[inline(always)]
    pub(super) fn slot(&self, slot: u32, array: u32) -> SharedTile<u32> {
        let before = self.arrays * Self::RESIDENT + (2 * slot + array) * Self::TILE;
        // SAFETY: the slots come after the resident arrays, in the memory that the contract
        // declares.
        unsafe { SharedTile::new(before * Self::ROW * 4, Self::TILE * Self::ROW) }
    }

    /// Returns a slot's values for the rows of its tile: `lse` (0) or `delta` (1).
    #[inline(always)]
    pub(super) fn numbers(&self, slot: u32, which: u32) -> SharedTile<f32> {
        let before = (self.arrays * Self::RESIDENT + 4 * Self::TILE) * Self::ROW + (2 * slot + which) * Self::TILE;
        // SAFETY: the values come after the slots, in the memory that the contract declares.
        unsafe { SharedTile::new(before * 4, Self::TILE) }
    }

    /// Returns the word of a chunk of a row.
    #[inline(always)]
    fn place(row: u32, chunk: u32) -> u32 {
        swizzled(CHUNKS as u32, row, chunk) * CHUNK_WORDS
    }

    /// Returns the index of this warp's first resident row in the block.
    #[inline(always)]
    pub(super) fn first_row(&self) -> u32 {
        thread::thread_idx_x() / LANES * Self::WARP_ROWS
    }

    /// Returns the index in the block of this lane's resident row `half` of square `m`.
    #[inline(always)]
    pub(super) fn resident_row(&self, m: usize, half: usize) -> u32 {
        self.first_row() + 16 * m as u32 + 8 * half as u32 + warp::lane_id() / 4
    }

    /// Returns the index in the tile of this lane's first streamed row of score tile `n`. The next
    /// row is its second.
    #[inline(always)]
    pub(super) fn streamed_row(&self, n: usize) -> u32 {
        8 * n as u32 + 2 * (warp::lane_id() % 4)
    }

    /// Returns the word of the chunk that is `down` rows, a multiple of four, below the chunk at
    /// `place`.
    #[inline(always)]
    fn below(place: u32, down: u32) -> u32 {
        // Steps of four rows alternate between the halves of the swizzle.
        (place ^ (down % 8 * CHUNK_WORDS)) + down * Self::ROW
    }

    /// Starts to copy `count` rows from token `first` on. Rows from `limit` on, and columns from
    /// `width` on, become 0.
    ///
    /// # Safety
    /// The rows below `limit` lie inside `rows.values`, with `width` columns each, on 16-byte
    /// boundaries. The tile has `count` rows.
    #[inline(always)]
    pub(super) unsafe fn copy<S: MmaElement>(
        &self,
        to: SharedTile<u32>,
        count: u32,
        rows: Rows<'_, S>,
        first: u32,
        [limit, width]: [u32; 2],
    ) {
        // Recomputed for each tile: addresses kept live would take registers from the accumulators.
        let thread = launder_reg(thread::thread_idx_x());
        let (row, chunk) = (thread / CHUNKS as u32, thread % CHUNKS as u32);
        let pass = Self::PASS;
        let mut from = rows.start + (first + row) as usize * rows.stride + (chunk * S::CHUNK) as usize;
        let apart = pass as usize * rows.stride;
        if first + count <= limit && width == CHUNKS as u32 * S::CHUNK {
            let place = Self::place(row, chunk);
            unroll_on_gpu!(n < COPIES, at most 16 => {
                let down = n as u32 * pass;
                if down < count {
                    // SAFETY: all rows and columns exist.
                    unsafe { to.copy_chunk(Self::below(place, down), rows.values, from) };
                    from = launder_index(from + apart);
                }
            });
            return;
        }
        let mut row = row;
        while row < count {
            let there = first + row < limit && chunk * S::CHUNK < width;
            // SAFETY: the caller guarantees that the chunk lies inside the rows if `there` is true.
            unsafe { to.copy_chunk_or_zero(Self::place(row, chunk), rows.values, from, there) };
            (row, from) = (row + pass, from + apart);
        }
    }

    /// Rounds the elements that this thread has copied of `count` rows to the mma operand format,
    /// if memory holds another. Called between [`wait_copies`](crate::tile::wait_copies) and a
    /// barrier.
    #[inline(always)]
    #[track_caller]
    pub(super) fn round<S: MmaElement>(&self, rows: SharedTile<u32>, count: u32) {
        let thread = launder_reg(thread::thread_idx_x());
        let place = Self::place(thread / CHUNKS as u32, thread % CHUNKS as u32);
        unroll_on_gpu!(n < COPIES, at most 16 => {
            let down = n as u32 * Self::PASS;
            if down < count {
                S::round(rows, Self::below(place, down));
            }
        });
    }

    /// Returns the products of this warp's resident rows of an array with the rows of a tile, over
    /// all columns.
    #[inline(always)]
    #[track_caller]
    pub(super) fn qk_scores<S: MmaElement>(
        &self,
        warp: Converged,
        array: u32,
        streamed: SharedTile<u32>,
    ) -> Sums<M_TILES, TILES> {
        let mut sums = [[[0.0; 4]; TILES]; M_TILES];
        let (resident, first) = (self.resident(array), self.first_row());
        let (down, across) = (self.down.anew(), self.across.anew());
        let warp = warp.again();
        unroll_on_gpu!(step < CHUNKS / 2, at most 16 => {
            let mut left = [[0; 4]; M_TILES];
            unroll_on_gpu!(m < 2 => {
                if m < M_TILES {
                    left[m] = down.read(warp, resident, first + 16 * m as u32, step as u32, false);
                }
            });
            unroll_on_gpu!(square < TILES / 2 => {
                let right = across.read(warp, streamed, 16 * square as u32, step as u32, false);
                multiply::<S::Factors, M_TILES, 1, TILES>(warp, &mut sums, square, &left, &[right]);
            });
        });
        sums
    }

    /// Reads the operands of this warp's rows, for products with [`Memory::held_scores`]. All
    /// chunks of the rows are read: `STEPS` is half of them.
    #[inline(always)]
    #[track_caller]
    pub(super) fn operands<const STEPS: usize>(
        &self,
        warp: Converged,
        rows: SharedTile<u32>,
    ) -> [[[u32; 4]; M_TILES]; STEPS] {
        let mut left = [[[0; 4]; M_TILES]; STEPS];
        let (first, down, warp) = (self.first_row(), self.down.anew(), warp.again());
        unroll_on_gpu!(step < STEPS, at most 16 => {
            unroll_on_gpu!(m < 2 => {
                if m < M_TILES {
                    left[step][m] = down.read(warp, rows, first + 16 * m as u32, step as u32, false);
                }
            });
        });
        left
    }

    /// Returns the products of rows that registers hold with the rows of a tile, over all columns.
    #[inline(always)]
    #[track_caller]
    pub(super) fn held_scores<S: MmaElement, const STEPS: usize>(
        &self,
        warp: Converged,
        left: &[[[u32; 4]; M_TILES]; STEPS],
        streamed: SharedTile<u32>,
    ) -> Sums<M_TILES, TILES> {
        let mut sums = [[[0.0; 4]; TILES]; M_TILES];
        let (across, warp) = (self.across.anew(), warp.again());
        unroll_on_gpu!(step < STEPS, at most 16 => {
            unroll_on_gpu!(square < TILES / 2 => {
                let right = across.read(warp, streamed, 16 * square as u32, step as u32, false);
                multiply::<S::Factors, M_TILES, 1, TILES>(warp, &mut sums, square, &left[step], &[right]);
            });
        });
        sums
    }

    /// Rounds `weights`, multiplies them with the rows of a tile, and accumulates in `MADE` mma
    /// tiles of columns, from tile `first`, a multiple of `MADE`, on.
    #[inline(always)]
    #[track_caller]
    pub(super) fn pv_accumulate<S: MmaElement, const MADE: usize>(
        &self,
        warp: Converged,
        sums: &mut Sums<M_TILES, MADE>,
        weights: &Sums<M_TILES, TILES>,
        streamed: SharedTile<u32>,
        first: usize,
    ) {
        let down = self.down.anew();
        S::pv_accumulate::<M_TILES, TILES, CHUNKS, MADE>(warp.again(), sums, weights, down, streamed, first);
    }

    /// Writes a lane's accumulators of the resident rows, times `factor`, to mma tiles of columns
    /// from tile `first` on. Tokens that do not exist get 0. `bounds` holds the block's first
    /// token, the tokens that exist, all tokens, and the columns.
    ///
    /// # Safety
    /// The rows lie inside `out`, up to the last token.
    #[inline(always)]
    pub(super) unsafe fn store<S: MmaElement, const MADE: usize>(
        &self,
        warp: Converged,
        sums: &Sums<M_TILES, MADE>,
        factor: f32,
        rows: Rows<'_, S>,
        first: usize,
        bounds: [u32; 4],
        out: *mut S,
    ) {
        let [first_token, length, tokens, width] = bounds;
        // Recomputed: keeping it live across the loop would take registers from the accumulators.
        let first_token = launder_reg(first_token) + self.first_row();
        unroll_on_gpu!(m < 2 => {
            if m < M_TILES {
                let square = first_token + 16 * m as u32;
                let warp = warp.again();
                unroll_on_gpu!(n < MADE, at most 32 => {
                    let ([row, column], value) = S::neighbours(warp, &sums[m], n);
                    let (token, column) = (square + row, first as u32 * COLUMNS + column);
                    if token < tokens && column < width {
                        let value = if token < length { value * F4::splat(factor) } else { F4::splat(0.0) };
                        let at = rows.start + token as usize * rows.stride + column as usize;
                        // SAFETY: the row lies inside `out`, and the columns in the row.
                        unsafe { value.store(out, at) };
                    }
                });
            }
        });
    }

    /// Replaces each masked score by `hidden`, for resident rows from `first` and a tile of
    /// streamed rows from `streamed`. If `resident_keys`, the resident rows are keys; otherwise
    /// queries.
    #[inline(always)]
    pub(super) fn apply_mask(
        &self,
        scores: &mut Sums<M_TILES, TILES>,
        mask: MaskRange<'_>,
        [first, streamed]: [u32; 2],
        resident_keys: bool,
        hidden: f32,
    ) {
        // Computed here because few tiles need it: keeping it live would take registers from the
        // accumulators.
        let (resident_row, streamed) =
            (launder_reg(self.resident_row(0, 0)), launder_reg(streamed) + self.streamed_row(0));
        unroll_on_gpu!(m < 2 => {
            if m < M_TILES {
                unroll_on_gpu!(half < 2 => {
                    let resident = first + resident_row + (16 * m + 8 * half) as u32;
                    let [from, until] = if resident_keys { mask.queries_seeing(resident) } else { mask.keys_seen(resident) };
                    let from_here = streamed.wrapping_sub(from);
                    unroll_on_gpu!(n < TILES => {
                        unroll_on_gpu!(column < 2 => {
                            if from_here.wrapping_add((8 * n + column) as u32) >= until - from {
                                scores[m][n][2 * half + column] = hidden;
                            }
                        });
                    });
                    if mask.has_documents() {
                        let document = mask.document(resident);
                        unroll_on_gpu!(n < TILES => {
                            unroll_on_gpu!(column < 2 => {
                                if mask.document(streamed + (8 * n + column) as u32) != document {
                                    scores[m][n][2 * half + column] = hidden;
                                }
                            });
                        });
                    }
                });
            }
        });
    }

    /// True if the mask lets each of this warp's resident rows and each row of a tile see each
    /// other. See [`Memory::apply_mask`] for the arguments.
    #[inline(always)]
    pub(super) fn all_seen(&self, mask: MaskRange<'_>, place: [u32; 2], resident_keys: bool) -> bool {
        let [queries, keys] = self.ranges(place, resident_keys);
        mask.all_seen(queries, keys)
    }

    /// True if the mask hides every row of a tile from all of this warp's resident rows. See
    /// [`Memory::apply_mask`] for the arguments.
    #[inline(always)]
    pub(super) fn none_seen(&self, mask: MaskRange<'_>, place: [u32; 2], resident_keys: bool) -> bool {
        let [queries, keys] = self.ranges(place, resident_keys);
        mask.none_seen(queries, keys)
    }

    /// Returns the first and the number of this warp's queries and of its keys.
    #[inline(always)]
    fn ranges(&self, [first, streamed]: [u32; 2], resident_keys: bool) -> [[u32; 2]; 2] {
        let (resident, streamed_rows) = ([first + self.first_row(), Self::WARP_ROWS], [streamed, Self::TILE]);
        if resident_keys { [streamed_rows, resident] } else { [resident, streamed_rows] }
    }
}
