//! The ops that the library declares in tables: a case for each row, with its formulas as notes.

use crate::case::{Case, Traced};
use stepscope::ops::Operand;
use stepscope::tensor::Shape;
use stepscope::{Result, bf16};
use stepscope_core::internals::{Declared, Operands, POINTWISE, PointwiseOp, UNARY, UnaryOp};

/// A case that is made from a row.
pub(crate) type RunRow = Box<dyn for<'c, 's> Fn(&Case<'c, 's>) -> Result<()>>;

/// Returns the cases of all rows.
pub(crate) fn cases() -> Vec<(String, RunRow)> {
    let mut cases: Vec<(String, RunRow)> = Vec::new();
    for op in UNARY.iter().copied().flatten() {
        cases.push((op.name.into(), Box::new(|c| unary::<f32>(c, op))));
        cases.push((format!("{}_bf16", op.name), Box::new(|c| unary::<bf16>(c, op))));
    }
    for op in POINTWISE {
        cases.push((op.name.into(), Box::new(|c| pointwise::<f32>(c, op))));
        cases.push((format!("{}_bf16", op.name), Box::new(|c| pointwise::<bf16>(c, op))));
    }
    cases
}

/// Returns the notes with the formulas of all rows: of the result and, if backward reads the
/// result, of the gradient. The formula of a pointwise function names its operands.
pub(crate) fn formulas() -> Vec<(String, String)> {
    let gradients = UNARY
        .iter()
        .copied()
        .flatten()
        .filter(|op| op.saves == "y")
        .map(|op| (format!("dx of {}", op.name), op.dx.into()));
    let results = UNARY.iter().copied().flatten().map(|op| (format!("y of {}", op.name), op.y.into()));
    let functions = POINTWISE.iter().map(|op| {
        let operands: Vec<&str> = op.operands.iter().map(|name| traced_name(name)).collect();
        (format!("y of {}", op.name), format!("lambda {}: {}", operands.join(", "), op.y.replace("dy", "gradient")))
    });
    gradients.chain(results).chain(functions).collect()
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

/// Returns the name of an operand in the trace. There `dy` is the gradient of the case's own
/// result.
fn traced_name(name: &str) -> &str {
    if name == "dy" { "gradient" } else { name }
}

/// Traces a function of operands that broadcast. The gradients of ops are functions of their own.
fn pointwise<S: Traced + Declared>(c: &Case<'_, '_>, op: &PointwiseOp) -> Result<()> {
    let [a, b, cols] = c.extents([20, 9, 70]);
    // Up to four roundings.
    c.longest(4);
    let shapes: [Shape; 3] = [[a, b, cols].into(), [b, 1].into(), [a, 1, cols].into()];
    let mut operands = Vec::new();
    for (number, (name, shape)) in op.operands.iter().zip(shapes).enumerate() {
        let drawn: Vec<f32> = c.random.borrow_mut().normals(shape.elements());
        let values = drawn.into_iter().map(|x| if op.positive && number == 0 { x.abs() } else { x });
        let values: Vec<S> = values.map(S::narrow).collect();
        operands.push(c.stored(traced_name(name), shape, &values)?);
    }
    let all: Vec<Operand<'_, '_, S>> = operands.iter().map(Operand::from).collect();
    c.result("y", &S::pointwise(op)(c.step, &all)?)
}
