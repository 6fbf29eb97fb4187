//! The block of a matrix multiply for a CPU: few threads, many sums each, and much work between
//! barriers.
//!
//! A stage is stored in panels of [`PANEL`] rows (of A) or columns (of B). A thread then reads its
//! factors sequentially: vectors of B, single elements of A (Goto and van de Geijn, "Anatomy of
//! high-performance matrix multiplication", 2008).
//!
//! ```text
//! tile 128 x 256    B: panel  0    1    2  ..   7    of 32 columns each
//! A: panel 0         thread   0    1    2  ..   7    a thread has one panel of A and one of B:
//!          1                  8    9   10  ..  15    32 x 32 neighboring outputs
//!          2                 16   17   18  ..  23
//!          3                 24   25   26  ..  31
//!
//! stage (128 k):  | A 0 | A 1 | A 2 | A 3 | B 0 | .. | B 7 |  each 32 x 128 floats, then 16 unused
//! panel of B, or of an A that is contiguous along its rows:
//!                 k = 0: 32 floats | k = 1: 32 floats | ..
//! panel of an A that is contiguous along k:
//!                 row 0: 128 floats | row 1: 128 floats | ..
//! ```
//! A may keep its memory layout in its panels, because a thread reads it element by element.
//!
//! There is one stage. A panel of B and the rows of A that are multiplied at a time fit a CPU's L1
//! cache. The stage and the sums fit its L2. While a stage is multiplied, the source of the next
//! stage's copy is prefetched into L2, and so are the epilogue's operands.
//!
//! Invariant: the chains are the same as in every other tile.

mod epilogue;

use super::block::Problem;
use super::epilogue::{Epilogue, Places};
use super::operand::Operand;
use super::tile::{Cost, Tile};
use crate::machine::memory::{load_run, prefetch};
use crate::tile::SharedTile;
use crate::unroll;
use crate::vector::F4;
use cuda_std::{emulator, thread};

/// Rows of a panel of A, and columns of a panel of B: a thread has this many outputs in each
/// direction.
const PANEL: u32 = 32;
/// The panels of A and of B in the tile.
const PANELS: [u32; 2] = [4, 8];
/// The emulator's tile: one thread for each pair of panels.
pub(super) const TILE: Tile = Tile {
    warps: [1, 1],
    each: [PANEL as usize; 2],
    depth: DEPTH,
    stages: 1,
    at_once: 1,
    groups: 1,
    cost: Cost::new(0, 0, 0),
};
const ROWS: u32 = PANELS[0] * PANEL;
const COLS: u32 = PANELS[1] * PANEL;
const THREADS: u32 = PANELS[0] * PANELS[1];
/// The k of a stage.
const DEPTH: u32 = 128;
/// Floats from one panel of a stage to the next: one cache line more than a panel holds, so that
/// panels use different cache sets.
const PANEL_LEN: u32 = DEPTH * PANEL + 16;
/// Floats that a thread copies at once: two cache lines. It copies four such runs in each panel.
const RUN: usize = (PANEL * DEPTH / THREADS / 4) as usize;
/// Floats of a cache line. The epilogue processes this many at once.
const LINE: usize = 16;
const SHARED_BYTES: u32 = (PANELS[0] + PANELS[1]) * PANEL_LEN * 4;

const _: () = assert!(TILE.rows() == ROWS && TILE.cols() == COLS && TILE.threads() == THREADS);
const _: () = assert!(TILE.shared_bytes() >= SHARED_BYTES);

/// A thread's sums, row by row. The alignment keeps every vector within one cache line.
#[repr(align(64))]
struct Sums([[f32; PANEL as usize]; PANEL as usize]);

/// Computes the tile in this row and this column of tiles.
///
/// # Safety
/// The contract has accepted the problem.
#[inline(always)]
pub(crate) unsafe fn compute(mut problem: Problem<'_>, [row, col]: [u32; 2]) {
    let Epilogue { m, n, .. } = problem.epilogue;
    let first = [row * ROWS, col * COLS];
    let panels = [thread::thread_idx_x() / PANELS[1], thread::thread_idx_x() % PANELS[1]];
    let [first_row, first_col] = [first[0] + panels[0] * PANEL, first[1] + panels[1] * PANEL];
    let is_inside = first_row < m && first_col < n;

    let mut sums = Sums([[0.0; _]; _]);
    // The sums stay in memory while other threads run. LLVM vectorizes loops that store to memory,
    // so it vectorizes these.
    let Sums(sums) = core::hint::black_box(&mut sums);
    loop {
        let [from, until] = problem.k.chain();
        // The whole stage at once: the copies would otherwise wait for one row after another.
        fetch_stage(&problem, first, [from, until]);
        for first_k in (from..until).step_by(DEPTH as usize) {
            copy_stage(&problem, first, [first_k, until]);
            thread::sync_threads();
            let left = until - first_k;
            if left > DEPTH {
                fetch_stage(&problem, first, [first_k + DEPTH, until]);
            } else if is_inside {
                fetch_outputs(&problem.epilogue, first_row, first_col);
            }
            if is_inside {
                let (a, b) = (panel(panels[0]), panel(PANELS[0] + panels[1]));
                let depth = if left < DEPTH { left } else { DEPTH };
                match (emulator::is_wide(), problem.a.along_k) {
                    (true, true) => multiply::<8, 32, true>(sums, a, b, depth),
                    (true, false) => multiply::<8, 32, false>(sums, a, b, depth),
                    (false, true) => multiply::<4, 16, true>(sums, a, b, depth),
                    (false, false) => multiply::<4, 16, false>(sums, a, b, depth),
                }
            }
            if left > DEPTH {
                // After this barrier no thread reads this stage.
                thread::sync_threads();
            }
        }
        if is_inside {
            for (i, row) in (first_row..m).zip(&*sums) {
                for (j, run) in (first_col..n).step_by(LINE).zip(row.as_chunks().0) {
                    // SAFETY: row and columns lie inside the output.
                    unsafe {
                        if n - j >= LINE as u32 {
                            problem.epilogue.finish_run::<LINE>(i, j, *run);
                            continue;
                        }
                        for (j, four) in (j..n).step_by(F4::LEN).zip(run.as_chunks().0) {
                            problem.epilogue.finish(Places::new(i, [j], 4), [[F4(*four)]]);
                        }
                    }
                }
            }
        }
        if !problem.goes_on(until) {
            return;
        }
        *sums = [[0.0; _]; _];
        // After this barrier no thread reads factors of this chain.
        thread::sync_threads();
    }
}

/// Accumulates the products of `depth` k in a thread's sums, `R x C` sums at a time: as many as the
/// processor's registers hold. `ALONG_K` is true if `a` is contiguous along k. `b` is contiguous
/// across k.
#[inline(always)]
fn multiply<const R: usize, const C: usize, const ALONG_K: bool>(
    sums: &mut [[f32; PANEL as usize]; PANEL as usize],
    a: SharedTile<f32>,
    b: SharedTile<f32>,
    depth: u32,
) {
    for i in (0..PANEL as usize).step_by(R) {
        for j in (0..PANEL as usize).step_by(C) {
            let mut held = [[0.0; C]; R];
            unroll!(row < R => { held[row].copy_from_slice(&sums[i + row][j..j + C]); });
            for p in 0..depth {
                let mut right = [0.0; C];
                unroll!(four < C / 4 => {
                    right[four * 4..][..4].copy_from_slice(&b.get4(p * PANEL + (j + four * 4) as u32).0);
                });
                unroll!(row < R => {
                    let left = a.get(place_in_panel(ALONG_K, (i + row) as u32, p));
                    unroll!(four < C / 4 => {
                        unroll!(col < 4 => {
                            held[row][four * 4 + col] = left.mul_add(right[four * 4 + col], held[row][four * 4 + col]);
                        });
                    });
                });
            }
            unroll!(row < R => { sums[i + row][j..j + C].copy_from_slice(&held[row]); });
        }
    }
}

/// Returns the panel with this number: A's come first, then B's.
#[inline(always)]
fn panel(number: u32) -> SharedTile<f32> {
    // SAFETY: the panels follow each other in the shared memory that the contract declares.
    unsafe { SharedTile::new(number * PANEL_LEN * 4, PANEL_LEN) }
}

/// Copies this thread's share of a stage.
#[inline(always)]
fn copy_stage(problem: &Problem<'_>, first: [u32; 2], k: [u32; 2]) {
    for number in 0..PANELS[0] {
        problem.a.copy_panel::<false>(panel(number), first[0] + number * PANEL, k);
    }
    for number in 0..PANELS[1] {
        problem.b.copy_panel::<true>(panel(PANELS[0] + number), first[1] + number * PANEL, k);
    }
}

/// Prefetches the memory that `copy_stage` will copy.
#[inline(always)]
fn fetch_stage(problem: &Problem<'_>, first: [u32; 2], k: [u32; 2]) {
    for number in 0..PANELS[0] {
        problem.a.fetch_panel(first[0] + number * PANEL, k);
    }
    for number in 0..PANELS[1] {
        problem.b.fetch_panel(first[1] + number * PANEL, k);
    }
}

/// Prefetches the memory that the epilogue of a thread's sums accesses.
#[inline(always)]
fn fetch_outputs(epilogue: &Epilogue<'_, f32>, first_row: u32, first_col: u32) {
    for i in first_row..epilogue.m.min(first_row + PANEL) {
        for j in (first_col..epilogue.n.min(first_col + PANEL)).step_by(LINE) {
            epilogue.fetch_run(i, j);
        }
    }
}

/// Returns the index in a panel of row `i` (of A) or column `i` (of B), at the `p`th k.
#[inline(always)]
fn place_in_panel(along_k: bool, i: u32, p: u32) -> u32 {
    if along_k { i * DEPTH + p } else { p * PANEL + i }
}

/// A thread's share of a panel: `rows` rows from the `i`th on, and `depth` k from the `p`th on.
struct Share {
    i: u32,
    p: u32,
    rows: u32,
    depth: u32,
}

impl Operand<'_> {
    /// Copies this thread's share of a panel: `PANEL` rows from `first_row`, `DEPTH` k from
    /// `first_k`. The panel keeps the operand's layout, or is contiguous across k if `ACROSS`. Rows
    /// past the operand become zero. Nothing is written past `end`.
    #[inline(always)]
    fn copy_panel<const ACROSS: bool>(&self, panel: SharedTile<f32>, first_row: u32, [first_k, end]: [u32; 2]) {
        if first_row >= self.rows {
            return;
        }
        let Share { i, p, rows, depth } = self.share();
        let (row, k) = (first_row + i, first_k + p);
        if row + rows <= self.rows && k + depth <= end {
            self.runs::<ACROSS>(panel, [i, p], self.index(row, k));
        } else {
            self.elements::<ACROSS>(panel, [i, p], [row, k], [rows, depth], end);
        }
    }

    /// Prefetches this thread's share of a panel, if the share is whole.
    #[inline(always)]
    fn fetch_panel(&self, first_row: u32, [first_k, end]: [u32; 2]) {
        let Share { i, p, rows, depth } = self.share();
        let (row, k) = (first_row + i, first_k + p);
        if row + rows <= self.rows && k + depth <= end {
            let from = self.index(row, k);
            for at in 0..4 {
                for line in (0..RUN).step_by(LINE) {
                    prefetch(self.values, from + at * self.stride as usize + line);
                }
            }
        }
    }

    /// Returns this thread's share of a panel: four runs, each contiguous in memory, so whole cache
    /// lines.
    #[inline(always)]
    fn share(&self) -> Share {
        let length = if self.along_k { DEPTH } else { PANEL };
        let runs = length / RUN as u32;
        let (across, along) = (thread::thread_idx_x() / runs * 4, thread::thread_idx_x() % runs * RUN as u32);
        if self.along_k {
            Share { i: across, p: along, rows: 4, depth: RUN as u32 }
        } else {
            Share { i: along, p: across, rows: RUN as u32, depth: 4 }
        }
    }

    /// Copies four runs that lie inside the operand.
    #[inline(always)]
    fn runs<const ACROSS: bool>(&self, panel: SharedTile<f32>, [i, p]: [u32; 2], from: usize) {
        let mut runs = [[0.0; RUN]; 4];
        // `copy_panel` has compared the runs with the operand's rows and k. A closure would stay a
        // call.
        unroll!(at < 4 => { runs[at] = load_run(self.values, from + at * self.stride as usize); });
        let at = place_in_panel(self.along_k && !ACROSS, i, p);
        if self.along_k && ACROSS {
            unroll!(square < RUN / 4 => {
                let mut four = [F4::splat(0.0); 4];
                unroll!(of < 4 => { four[of].0.copy_from_slice(&runs[of][4 * square..][..4]); });
                let four = transposed(four);
                unroll!(of < 4 => { panel.set_run(at + (4 * square + of) as u32 * PANEL, four[of].0); });
            });
        } else {
            let pitch = if self.along_k { DEPTH } else { PANEL };
            unroll!(of < 4 => { panel.set_run(at + of as u32 * pitch, runs[of]); });
        }
    }

    /// Copies `rows` x `depth` elements one by one. Elements outside the operand or past `end` are
    /// skipped or become zero.
    #[inline(always)]
    fn elements<const ACROSS: bool>(
        &self,
        panel: SharedTile<f32>,
        [i, p]: [u32; 2],
        [row, k]: [u32; 2],
        [rows, depth]: [u32; 2],
        end: u32,
    ) {
        for ahead in 0..rows * depth {
            let [down, right] = [ahead / depth, ahead % depth];
            let at = place_in_panel(self.along_k && !ACROSS, i + down, p + right);
            if k + right >= end {
                continue;
            }
            if row + down < self.rows {
                // SAFETY: inside the operand.
                unsafe { panel.copy(at, self.values, self.index(row + down, k + right)) };
            } else {
                panel.set(at, 0.0);
            }
        }
    }

    /// Returns the index of an element.
    #[inline(always)]
    fn index(&self, row: u32, k: u32) -> usize {
        let [across, along] = if self.along_k { [row, k] } else { [k, row] };
        self.start + across as usize * self.stride as usize + along as usize
    }
}

/// Returns the transpose of a 4 x 4 matrix.
#[inline(always)]
fn transposed(four: [F4; 4]) -> [F4; 4] {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{__m128, _MM_TRANSPOSE4_PS};
        // SAFETY: both types are the same 16 floats, as four SSE registers, which every x86-64
        // processor has.
        unsafe {
            let [mut a, mut b, mut c, mut d] = core::mem::transmute::<[F4; 4], [__m128; 4]>(four);
            _MM_TRANSPOSE4_PS(&mut a, &mut b, &mut c, &mut d);
            core::mem::transmute::<[__m128; 4], [F4; 4]>([a, b, c, d])
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let [F4(a), F4(b), F4(c), F4(d)] = four;
        let mut columns = [F4::splat(0.0); 4];
        unroll!(at < 4 => { columns[at] = F4([a[at], b[at], c[at], d[at]]); });
        columns
    }
}
