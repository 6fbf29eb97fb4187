//! The cases of declared ops, which follow from their declarations.

#![forbid(unsafe_code)]

use super::case::Case;
use half::bf16;
use stepscope_core::internals::{BINARY, BinaryOp, Declared, Operands, UNARY, UnaryOp};
use stepscope_core::{Element, ops};

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

/// Returns the cases of the declared ops of two tensors.
pub(super) fn declared_binary() -> Vec<(&'static str, Case)> {
    fn of<S: Declared>(op: &'static BinaryOp) -> (&'static str, Case) {
        let case = Case::new(|i| i.flat::<S>(|i, [a, b]| i.keep(&S::binary(op)(i.step, a, b)?)));
        (kernel_name(op.kernel, <S as Element>::NAME), case)
    }
    BINARY.iter().flat_map(|op| [of::<f32>(op), of::<bf16>(op)]).collect()
}

/// Returns the name of the kernel of a family for a stored type, as the library's list has it.
fn kernel_name(family: &str, stored: &str) -> &'static str {
    let entry = kernels::entries().find(|entry| entry.name == format!("{family}_{stored}"));
    entry.map_or_else(|| panic!("no kernel {family}_{stored}"), |entry| entry.name)
}
