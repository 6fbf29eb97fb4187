//! The host's side of a launch of [`round_to_tf32`]: its arguments, and the checks of its contract.

use super::{ACROSS, ALONG, LEFT, SQUARE, WARPS, bits, round_to_tf32, side};
use crate::matmul::checks::holds;
use crate::mma::{Side, fragments};
use cuda_std::launch::{Grid, PointerMut, Size, Slice, Violation};

/// The value of `sides` for B; see [`LEFT`].
const RIGHT: u32 = 2;

/// Returns the grid, from the [`check`] of all three operands.
#[deny(clippy::arithmetic_side_effects)]
pub(super) fn grid(p: &round_to_tf32<'_>) -> Result<Grid, Violation> {
    let a = check(
        ["a", "a_along", "a_across"],
        [p.a.len(), p.a_along.len(), p.a_across.len()],
        [p.a_rows, p.a_cols, p.a_ld],
        [p.a_batches, p.a_stride],
        bits(p.sides, 0),
    )?;
    let b = check(
        ["b", "b_along", "b_across"],
        [p.b.len(), p.b_along.len(), p.b_across.len()],
        [p.b_rows, p.b_cols, p.b_ld],
        [p.b_batches, p.b_stride],
        bits(p.sides, 1),
    )?;
    let c = check(
        ["c", "c_along", "c_across"],
        [p.c.len(), p.c_along.len(), p.c_across.len()],
        [p.c_rows, p.c_cols, p.c_ld],
        [p.c_batches, p.c_stride],
        bits(p.sides, 2),
    )?;
    Grid::cover(a.plus(b).plus(c), WARPS)
}

impl<'a> round_to_tf32<'a> {
    /// Returns the launch that rounds these operands.
    pub fn of([mut a, mut b, mut c]: [Rounding<'a>; 3]) -> Self {
        let ([a_along, a_across], of_a) = a.wanted();
        let ([b_along, b_across], of_b) = b.wanted();
        let ([c_along, c_across], of_c) = c.wanted();
        Self {
            a: a.values.unwrap_or_else(Slice::empty),
            a_along,
            a_across,
            a_rows: a.rows,
            a_cols: a.cols,
            a_ld: a.ld,
            a_batches: a.batches,
            a_stride: a.stride,
            b: b.values.unwrap_or_else(Slice::empty),
            b_along,
            b_across,
            b_rows: b.rows,
            b_cols: b.cols,
            b_ld: b.ld,
            b_batches: b.batches,
            b_stride: b.stride,
            c: c.values.unwrap_or_else(Slice::empty),
            c_along,
            c_across,
            c_rows: c.rows,
            c_cols: c.cols,
            c_ld: c.ld,
            c_batches: c.batches,
            c_stride: c.stride,
            sides: of_a | of_b << 4 | of_c << 8,
        }
    }
}

/// One operand of a launch: `batches` of `rows` x `cols` elements, with row stride `ld` and batch
/// stride `stride`. For each wanted form, it has the destination of the fragments, and their side
/// of the product.
#[derive(Default)]
#[allow(missing_docs, reason = "named as the kernels' parameters")]
pub struct Rounding<'a> {
    pub values: Option<Slice<'a, f32>>,
    pub rows: usize,
    pub cols: usize,
    pub ld: usize,
    pub batches: usize,
    pub stride: usize,
    pub along: Option<(Side, PointerMut<'a, u32>)>,
    pub across: Option<(Side, PointerMut<'a, u32>)>,
}

impl<'a> Rounding<'a> {
    /// Returns the destinations of the fragments, and this operand's bits of `sides`.
    fn wanted(&mut self) -> ([PointerMut<'a, u32>; 2], u32) {
        let mut sides = 0;
        let outs = [(ALONG, self.along.take()), (ACROSS, self.across.take())].map(|(form, wanted)| match wanted {
            None => PointerMut::empty(),
            Some((side, out)) => {
                sides |= if side == Side::Left { LEFT } else { RIGHT } << (2 * form);
                out
            }
        });
        (outs, sides)
    }
}

/// Checks one operand for the contract. Returns the warps that it needs.
fn check(
    [argument, along, across]: [&'static str; 3],
    [len, along_len, across_len]: [usize; 3],
    [rows, cols, ld]: [usize; 3],
    [batches, stride]: [usize; 2],
    sides: u32,
) -> Result<Size, Violation> {
    holds(argument, len, batches, stride, [rows, cols], ld)?;
    let squares = Size::of(batches).times(rows.div_ceil(SQUARE)).times(cols.div_ceil(SQUARE));
    Violation::unless(squares.at_most((1 << 28) - 1), argument, "below 2^28 squares of 32 x 32", squares)?;
    let mut turns = Size::of(0);
    for (form, name, len, extents) in
        [(ALONG, along, along_len, [rows, cols]), (ACROSS, across, across_len, [cols, rows])]
    {
        if side(sides, form) != 0 {
            Violation::unless_length(name, Size::of(batches).times(fragments(extents)), len)?;
            turns = turns.plus(squares);
        }
    }
    Ok(turns)
}
