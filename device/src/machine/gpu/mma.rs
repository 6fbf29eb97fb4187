//! Tensor core products by mma instructions, and the exchange of their accumulators by shuffles.

use crate::format::{Bf16, Format, Tf32};
use crate::mma::fragments::{CHUNK_WORDS, Sums, Words, quads_place, swizzled};
use crate::mma::{Factor, Sums as PackedSums};
use crate::tile::SharedTile;
use crate::unroll;
use crate::vector::{F4, load_pair, load_word_raw, store_words};
use crate::warp::Converged;
use cuda_std::warp;
use half::bf16;

/// A format of mma operands that has an instruction.
pub trait Instruction {
    /// Executes one mma instruction: 16 rows by 8 columns over 8 words. Lanes hold the operands as
    /// PTX defines.
    fn mma(_: Converged, a: [u32; 4], b: [u32; 2], sums: [f32; 4]) -> [f32; 4];
}

macro_rules! instruction {
    ($format:ty, $instruction:literal) => {
        impl Instruction for $format {
            #[inline(always)]
            fn mma(_: Converged, a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
                let (d0, d1, d2, d3): (u32, u32, u32, u32);
                // Inline assembly without `pure`, because LLVM treats its own intrinsic as plain
                // arithmetic and copies it into the branches before it.
                // SAFETY: the token shows that all lanes of the warp execute this, converged.
                unsafe {
                    core::arch::asm!(
                        concat!($instruction, " {{{0},{1},{2},{3}}}, {{{4},{5},{6},{7}}}, {{{8},{9}}}, {{{10},{11},{12},{13}}};"),
                        out(reg32) d0, out(reg32) d1, out(reg32) d2, out(reg32) d3,
                        in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
                        in(reg32) c[0].to_bits(), in(reg32) c[1].to_bits(), in(reg32) c[2].to_bits(), in(reg32) c[3].to_bits(),
                        options(nomem, nostack, preserves_flags)
                    );
                }
                [d0, d1, d2, d3].map(f32::from_bits)
            }
        }
    };
}
instruction!(Tf32, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32");
instruction!(Bf16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32");

/// Accumulates the products of the warp's packed fragments; see [`mma`](crate::mma).
#[inline(always)]
pub fn multiply_packed(warp: Converged, sums: &mut PackedSums, a: Factor, b: Factor) {
    unroll!(pair < 2 => {
        // The instruction's rows g and g + 8 are neighbors here. Its columns 2 t and 2 t + 1 are 16
        // apart here.
        let [upper, lower] = [2 * pair, 2 * pair + 1];
        unroll!(column < 4 => {
            let rows = [a[upper][0], a[lower][0], a[upper][1], a[lower][1]];
            let old = [sums[upper][column], sums[upper][column + 4], sums[lower][column], sums[lower][column + 4]];
            let new = Tf32::mma(warp, rows, b[column], old);
            [sums[upper][column], sums[upper][column + 4], sums[lower][column], sums[lower][column + 4]] = new;
        });
    });
}

/// Accumulates the products of squares; see [`multiply`](crate::mma::fragments::multiply).
#[inline(always)]
pub fn multiply<F: Format, const ROWS: usize, const COLS: usize, const TILES: usize>(
    warp: Converged,
    sums: &mut Sums<ROWS, TILES>,
    first: usize,
    a: &[[u32; 4]; ROWS],
    b: &[[u32; 4]; COLS],
) {
    unroll!(row < ROWS => {
        unroll!(tile < 2 * COLS => {
            let [b0, b1, b2, b3] = b[tile / 2];
            let pair = if tile % 2 == 0 { [b0, b1] } else { [b2, b3] };
            sums[row][2 * first + tile] = F::mma(warp, a[row], pair, sums[row][2 * first + tile]);
        });
    });
}

/// Converts the accumulators of two adjacent mma tiles to four neighboring columns in row g and
/// four in row g + 8 of one tile. [`quads_place`] returns their location.
#[inline(always)]
pub fn quads(warp: Converged, tiles: [[f32; 4]; 2]) -> [F4; 2] {
    let [left, right] = tiles.map(|tile| tile.map(f32::to_bits));
    [0, 2].map(|at| {
        let [near, far] = exchanged(warp, [left[at], left[at + 1]], [right[at], right[at + 1]]);
        F4([near[0], near[1], far[0], far[1]].map(f32::from_bits))
    })
}

/// Exchanges words between neighboring lanes. A lane brings two columns of a row in the left tile
/// and two in the right. It gets four neighboring columns of one tile. An odd lane gives its
/// columns of the left tile for its neighbor's of the right tile.
#[inline(always)]
fn exchanged<const WORDS: usize>(converged: Converged, left: [u32; WORDS], right: [u32; WORDS]) -> [[u32; WORDS]; 2] {
    // Selected by masks: a condition would become a branch and diverge the warp.
    let odd = (warp::lane_id() % 2).wrapping_neg();
    let choose = |if_odd: [u32; WORDS], if_even: [u32; WORDS]| -> [u32; WORDS] {
        core::array::from_fn(|at| if_even[at] ^ (if_odd[at] ^ if_even[at]) & odd)
    };
    let kept = choose(right, left);
    let given = converged.shfl_xor(choose(left, right), 1);
    [choose(given, kept), choose(kept, given)]
}

/// Rounds the [`quads`] and writes them to `out`, in the rows whose 16 columns begin at these
/// indices.
///
/// # Safety
/// The columns may be written, and begin on a boundary of four elements.
#[inline(always)]
pub unsafe fn write_quads(warp: Converged, tiles: [[f32; 4]; 2], out: *mut bf16, at: [usize; 2]) {
    let at = at.map(|at| at + quads_place()[1] as usize);
    // Rounded first: a word then holds two columns, so lanes exchange half as many words.
    let [left, right] = tiles.map(Bf16::words);
    unroll!(row < 2 => {
        let [[near], [far]] = exchanged(warp, [left[row]], [right[row]]);
        // SAFETY: the columns may be written, on such a boundary: the function's contract.
        unsafe { store_words(out, at[row], [near, far]) };
    });
}

/// Rounds the accumulators of two adjacent tiles and writes them to 16 rows of `chunks` chunks, in
/// chunks `2 pair` and `2 pair + 1`, [`swizzled`]. `lane` is the lane's own number.
#[inline(always)]
pub fn put_words(rows: SharedTile<u32>, chunks: u32, pair: u32, lane: u32, tiles: [[f32; 4]; 2]) {
    let (g, t) = (lane / 4, lane % 4);
    let words = tiles.map(Bf16::words);
    // The swizzle is an xor, the same in row g + 8.
    let first = swizzled(chunks, g, 0) * CHUNK_WORDS + t;
    unroll!(tile < 2 => {
        let word = first ^ ((2 * pair + tile as u32) * CHUNK_WORDS);
        unroll!(half < 2 => { rows.set(word + 8 * half as u32 * chunks * CHUNK_WORDS, words[tile][half]); });
    });
}

/// Writes the f32 sums of two adjacent tiles, pair `pair` of their rows, to rows of `chunks`
/// chunks. `lane` is the lane's own number.
#[inline(always)]
pub fn put_floats(rows: SharedTile<u32>, chunks: u32, pair: u32, lane: u32, tiles: [[f32; 4]; 2]) {
    let (g, t) = (lane / 4, lane % 4);
    unroll!(tile < 2 => {
        unroll!(half < 2 => {
            let chunk = swizzled(chunks, 8 * half as u32 + g, 4 * pair + 2 * tile as u32 + t / 2);
            unroll!(at < 2 => {
                rows.set(chunk * CHUNK_WORDS + t % 2 * 2 + at as u32, tiles[tile][2 * half + at].to_bits());
            });
        });
    });
}

/// Reads `c` at a lane's accumulators of two adjacent tiles, in the rows whose 16 columns begin at
/// these indices. `lane` is the lane's own number.
///
/// # Safety
/// The columns may be read, and begin on a boundary of four elements.
#[inline(always)]
pub unsafe fn read_words(c: *const bf16, lane: u32, at: [usize; 2]) -> [Words; 2] {
    let pair = 2 * (lane % 4) as usize;
    // SAFETY: the columns may be read, on such a boundary: the function's contract.
    [0, 8].map(|tile| at.map(|at| unsafe { load_word_raw(c, at + tile + pair) }))
}

/// Reads the bias of a lane's accumulators of two adjacent tiles, whose 16 columns begin at this
/// index. `lane` is the lane's own number.
///
/// # Safety
/// The columns lie inside `bias`, and begin on a boundary of four elements.
#[inline(always)]
pub unsafe fn read_bias(bias: &[f32], lane: u32, at: usize) -> [[f32; 4]; 2] {
    let pair = 2 * (lane % 4) as usize;
    [0, 8].map(|tile| {
        // SAFETY: the columns lie inside `bias`, on such a boundary: the function's contract.
        let [near, far] = unsafe { load_pair(bias, at + tile + pair) };
        // Both rows have the same bias.
        [near, far, near, far]
    })
}
