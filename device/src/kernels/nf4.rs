//! Decoding of frozen matrices in NF4.
//!
//! ```text
//! words: [outputs, inputs]                      out: [inputs, columns]
//!
//!            8 inputs                                       8 outputs   (thread 1)
//!   output 0  a word  \                          input 0   16 bytes    16 bytes
//!   output 1  a word   > thread 0        ->      input 1   16 bytes    16 bytes
//!   ..                                           ..
//!   output 7  a word  /                          input 7   16 bytes    16 bytes
//! ```
//! A thread decodes a square of 8 x 8, and a block a tile of 64 outputs and 256 inputs. Eight
//! neighboring threads have neighboring outputs, so they write 128 bytes of a row of BF16. The four
//! groups of eight in a warp have neighboring inputs, so a warp reads 16 bytes of each of its rows.
//!
//! Invariant: each weight has the bits that bitsandbytes decodes.

use crate::block::{BLOCK, divide};
use crate::nf4_format::{GROUP, Layout, PER_WORD, scale, shift, weight};
use crate::vector::{F4, load, store8};
use crate::{family, unroll};
use cuda_std::prelude::*;
use half::bf16;

/// The side of a thread's square.
const SIDE: usize = PER_WORD;
/// The squares of a block along the outputs, and along the inputs.
const ACROSS: usize = 8;
const DOWN: usize = BLOCK as usize / ACROSS;

family! {
    /// Decodes matrices of equal extents: `out[i, first + n outputs + o] = w_n[o, i]`. Shapes:
    /// `words`: those of each `w_n`: `[outputs, inputs]`, one matrix after another, `out`:
    /// `[inputs, columns]`. Overwrites these columns of `out`.
    nf4_decode<S: Stored> { nf4_decode_f32: f32; nf4_decode_bf16: bf16; }
    unsafe fn(
        words: &[u32],
        inputs: usize,
        outputs: usize,
        matrices: usize,
        columns: usize,
        first: usize,
        out: *mut S,
    ) {
        let (thread, number) = (thread::thread_idx_x() as usize, thread::block_idx_y() as usize);
        // SAFETY: the contract checks that there are at least 8 outputs, that `words` has all words
        // of the matrices, and that `out` has all of their columns. The square lies inside its
        // matrix.
        unsafe {
            let (down, across) = divide(thread::block_idx_x() as usize, (outputs / SIDE).div_ceil(ACROSS));
            let (down, across) = (down * DOWN + thread / ACROSS, across * ACROSS + thread % ACROSS);
            if down >= inputs / SIDE || across >= outputs / SIDE || number >= matrices {
                return;
            }
            let layout = Layout::new(inputs * outputs);
            let start = number * layout.words;
            let offset = f32::from_bits(load(words, start + layout.offset));
            let (mut codes, mut scales) = ([0; SIDE], [0.0; SIDE]);
            unroll!(row < 8 => {
                let at = (across * SIDE + row) * inputs + down * SIDE;
                let block = at / crate::nf4_format::BLOCK;
                let factor = f32::from_bits(load(words, start + layout.factors + block / GROUP));
                let code = load(words, start + layout.scales + block / 4) >> (8 * (block % 4));
                codes[row] = load(words, start + at / PER_WORD);
                scales[row] = scale(code, factor, offset);
            });
            unroll!(input < 8 => {
                let mut values = [0.0; SIDE];
                unroll!(row < 8 => {
                    values[row] = weight(codes[row] >> shift(input), scales[row]);
                });
                let [a, b, c, d, e, f, g, h] = values;
                let at = (down * SIDE + input) * columns + first + number * outputs + across * SIDE;
                store8([F4([a, b, c, d]), F4([e, f, g, h])], out, at);
            });
        }
    }
    // SAFETY: `inputs`, `outputs`, `columns` and `first` are multiples of 8, so the squares cover
    // the matrix and each row of a square begins on a boundary of eight elements. `words` has the
    // words of the matrices. Their columns lie inside the rows of `out`, which has `inputs` rows. A
    // thread whose square lies outside its matrix does nothing. There are as many blocks as tiles.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        for (name, number) in [("inputs", k.inputs), ("outputs", k.outputs), ("columns", k.columns), ("first", k.first)] {
            Violation::unless_aligned(name, number, SIDE)?;
        }
        Violation::unless(k.inputs > 0, "inputs", "at least 8", k.inputs)?;
        Violation::unless(k.outputs > 0, "outputs", "at least 8", k.outputs)?;
        let inside = Size::of(k.matrices).times(k.outputs).plus(k.first).at_most(k.columns);
        Violation::unless(inside, "columns", "at least `first` + `matrices` times `outputs`", k.columns)?;
        Violation::unless_length("out", Size::of(k.inputs).times(k.columns), k.out.len())?;
        // As many as in `out`, at most, so the product does not overflow.
        let weights = k.inputs.saturating_mul(k.outputs);
        Violation::unless_length("words", Size::of(k.matrices).times(Layout::new(weights).words), k.words.len())?;
        let [across, down] = [(k.outputs, ACROSS), (k.inputs, DOWN)].map(|(extent, squares)| {
            Size::of(extent).div_ceil(SIDE).div_ceil(squares)
        });
        Grid::new(across.times(down), k.matrices, 1_u32)
    }
}
