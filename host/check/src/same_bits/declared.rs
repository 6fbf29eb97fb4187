//! The cases of declared ops, which follow from their declarations.

#![forbid(unsafe_code)]

use super::case::Case;
use super::inputs::Inputs;
use half::bf16;
use stepscope_core::internals::{Declared, Operands, POINTWISE, PointwiseOp, UNARY, UnaryOp};
use stepscope_core::ops::{self, Operand};
use stepscope_core::{Element, Result, Shape};

/// Returns the cases of a module's declared ops of one tensor, for each of their kernels. Ops that
/// share kernels share a case.
pub(super) fn declared(module: &'static str) -> Vec<(&'static str, Case)> {
    fn of<S: Declared>(ops: &[&'static UnaryOp], direction: usize) -> Case {
        let ops = ops.to_vec();
        Case::new(move |i| {
            if ops[0].operands == Operands::Elements {
                return i.flat::<S>(|i, [x, dy]| {
                    ops.iter().map(|op| S::unary(op)).try_for_each(|(forward, backward)| {
                        i.keep(&if direction == 0 { forward(i.step, x)? } else { backward(i.step, x, dy)? })
                    })
                });
            }
            i.rows::<S>(|i, x| {
                for op in &ops {
                    let (forward, backward) = S::unary(op);
                    let below_zero = op.operands == Operands::RowsBelowZero;
                    i.keep(&match (direction, below_zero) {
                        (0, _) => forward(i.step, x)?,
                        (_, false) => backward(i.step, x, &i.normals(x.shape())?)?,
                        (_, true) => {
                            let y = ops::scale(i.step, &ops::relu(i.step, x)?, -1.0)?;
                            backward(i.step, &y, &i.normals(x.shape())?)?
                        }
                    })?;
                }
                Ok(())
            })
        })
    }
    let all: Vec<&UnaryOp> = UNARY.iter().copied().flatten().filter(|op| op.module == module).collect();
    let mut cases = Vec::new();
    for op in &all {
        for (direction, &kernel) in op.kernels.iter().enumerate() {
            let names = [<f32 as Element>::NAME, <bf16 as Element>::NAME].map(|stored| kernel_name(kernel, stored));
            if cases.iter().any(|&(name, _)| name == names[0]) {
                continue;
            }
            let sharing: Vec<&UnaryOp> = all.iter().copied().filter(|op| op.kernels[direction] == kernel).collect();
            cases.extend([(names[0], of::<f32>(&sharing, direction)), (names[1], of::<bf16>(&sharing, direction))]);
        }
    }
    cases
}

/// Returns the cases of the pointwise functions, for each of their kernels. The kernels that some
/// have for operands of one shape are cases of their own.
pub(super) fn declared_pointwise() -> Vec<(&'static str, Case)> {
    POINTWISE.iter().flat_map(|op| [pointwise::<f32>(op), pointwise::<bf16>(op)]).flatten().collect()
}

fn pointwise<S: Declared>(op: &'static PointwiseOp) -> Vec<(&'static str, Case)> {
    let (stored, function) = (<S as Element>::NAME, S::pointwise(op));
    let mut cases = Vec::new();
    if op.kernel != op.name {
        let case = Case::new(move |i| i.flat::<S>(|i, [a, b]| i.keep(&function(i.step, &[a.into(), b.into()])?)));
        cases.push((kernel_name(op.name, stored), case));
    }
    let case = Case::new(move |i| {
        if op.kernel == op.name {
            i.flat::<S>(|i, [a, b]| {
                let a = &if op.positive { ops::pointwise::abs(i.step, a)? } else { ops::copy(i.step, a)? };
                let c = i.normals::<S>(a.shape())?;
                let all = [Operand::from(a), Operand::from(b), Operand::from(&c)];
                i.keep(&function(i.step, &all[..op.operands.len()])?)
            })?;
        }
        match op.operands.len() {
            1 => Ok(()),
            operands => repeated::<S>(i, op, operands),
        }
    });
    cases.push((kernel_name(op.kernel, stored), case));
    cases
}

/// Runs a function on operands that broadcast: with rows that are vectors and rows that are not,
/// with neighbors that merge, and on a number.
fn repeated<S: Declared>(i: &Inputs<'_, '_>, op: &PointwiseOp, operands: usize) -> Result<()> {
    let shapes: [[Shape; 3]; 4] = [
        [[5, 1, 12].into(), [7, 12].into(), [5, 7, 12].into()],
        [[6, 5, 1, 7].into(), [3, 1].into(), [6, 1, 1, 7].into()],
        [[2, 3, 4, 5].into(), [1].into(), [4, 5].into()],
        [[300, 9].into(), [9].into(), [300, 1].into()],
    ];
    let whole = i.by_size(&shapes[..], &shapes[..2]);
    for (number, shapes) in whole.iter().enumerate() {
        let mut values = Vec::new();
        for &shape in shapes {
            values.push(i.normals::<S>(shape)?);
        }
        if op.positive {
            values[0] = ops::pointwise::abs(i.step, &values[0])?;
        }
        let mut all: Vec<Operand<'_, '_, S>> = values[..operands].iter().map(Operand::from).collect();
        if number == 1 {
            all[operands - 1] = Operand::from(0.75);
        }
        i.keep(&S::pointwise(op)(i.step, &all)?)?;
    }
    Ok(())
}

/// Returns the name of the kernel of a family for a stored type, as the library's list has it.
fn kernel_name(family: &str, stored: &str) -> &'static str {
    let entry = kernels::entries().find(|entry| entry.name == format!("{family}_{stored}"));
    entry.map_or_else(|| panic!("no kernel {family}_{stored}"), |entry| entry.name)
}
