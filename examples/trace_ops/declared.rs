//! The ops that the library declares in tables: a case for each row, with its formulas as notes.

use crate::case::{Case, Traced};
use stepscope::{Result, bf16};
use stepscope_core::internals::{BINARY, BinaryOp, Declared, Operands, UNARY, UnaryOp};

/// A case that is made from a row.
pub(crate) type RunRow = Box<dyn for<'c, 's> Fn(&Case<'c, 's>) -> Result<()>>;

/// Returns the cases of all rows.
pub(crate) fn cases() -> Vec<(String, RunRow)> {
    let mut cases: Vec<(String, RunRow)> = Vec::new();
    for op in UNARY.iter().copied().flatten() {
        cases.push((op.name.into(), Box::new(|c| unary::<f32>(c, op))));
        cases.push((format!("{}_bf16", op.name), Box::new(|c| unary::<bf16>(c, op))));
    }
    for op in BINARY {
        cases.push((op.name.into(), Box::new(|c| binary::<f32>(c, op))));
        cases.push((format!("{}_bf16", op.name), Box::new(|c| binary::<bf16>(c, op))));
    }
    cases
}

/// Returns the notes with the formulas of all rows: of the result and, if backward reads the
/// result, of the gradient.
pub(crate) fn formulas() -> Vec<(String, &'static str)> {
    let gradients =
        UNARY.iter().copied().flatten().filter(|op| op.saves == "y").map(|op| (format!("dx of {}", op.name), op.dx));
    let results = UNARY.iter().copied().flatten().map(|op| (format!("y of {}", op.name), op.y));
    gradients.chain(results).chain(BINARY.iter().map(|op| (format!("y of {}", op.name), op.y))).collect()
}

fn unary<S: Traced + Declared>(c: &Case<'_, '_>, op: &UnaryOp) -> Result<()> {
    let (shape, (forward, backward)) = (c.extents([70, 300]), S::unary(op));
    c.longest(if op.operands == Operands::Elements { 1 } else { shape[1] });
    let (x, dy) = (c.operand::<S>("x", shape)?, c.operand::<S>("dy", shape)?);
    let y = forward(c.step, &x)?;
    if op.saves == "y" {
        c.kept("y", &y)?;
        return c.result("dx", &backward(c.step, &y, &dy)?);
    }
    c.result("y", &y)?;
    c.result("dx", &backward(c.step, &x, &dy)?)
}

fn binary<S: Traced + Declared>(c: &Case<'_, '_>, op: &BinaryOp) -> Result<()> {
    c.pair::<S>(|c, a, b| S::binary(op)(c.step, a, b))
}
