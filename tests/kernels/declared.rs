//! Tests that follow from the declarations of ops: attacks on their contracts, and the refusal of
//! operands of different shapes. The files of the ops test their values.

use crate::hostile::{Attacked, Numbers, emulated, hostile_launches, room};
use crate::support::on_each_device;
use crate::trial::{assert_refused, trial};
use std::collections::BTreeSet;
use std::ops::Range;
use stepscope::bf16;
use stepscope::ops::Operand;
use stepscope::tensor::{Element, Shape, Stored};
use stepscope_core::internals::{ChosenArguments, ChosenLaunch, Declared, Operands, POINTWISE, UNARY, UnaryOp};

/// Hostile arguments of a launch.
struct Hostile<'a, 'n>(&'a mut Numbers<'n>, bool);

impl ChosenArguments for Hostile<'_, '_> {
    fn range(&mut self, argument: &'static str, honest: usize) -> Range<usize> {
        self.0.view(argument, honest)
    }

    fn word(&mut self, argument: &'static str, honest: u64, largest: u64) -> u64 {
        self.0.next_word(argument, honest, largest)
    }

    fn launches(&self) -> bool {
        self.1
    }
}

/// Returns the declared ops of one tensor.
fn unary() -> impl Iterator<Item = &'static UnaryOp> {
    UNARY.iter().copied().flatten()
}

/// Attacks the contract of a kernel.
fn attack<S: Stored>(family: &str, launch: ChosenLaunch<S>, shape: Shape) {
    let name = kernel(family, <S as Element>::NAME);
    emulated(|step| {
        let elements = room(shape.elements());
        let ones = vec![S::narrow(1.0); elements];
        let (a, b) = (step.upload(&ones, [elements])?, step.upload(&ones, [elements])?);
        let mut out = step.upload(&ones, [elements])?;
        hostile_launches(name, &[shape.elements() as u64], true, &mut |numbers, launches| {
            launch(step, shape, [&a, &b], &mut out, &mut Hostile(numbers, launches))
        });
        Ok(())
    });
}

/// Attacks the kernels of all declared ops, forward or backward.
fn attack_unary<S: Declared>(direction: usize) {
    for op in unary() {
        let shape: Shape = if op.operands == Operands::Elements { [9].into() } else { [3, 8].into() };
        attack::<S>(op.kernels[direction], S::chosen_unary(op)[direction], shape);
    }
}

/// Attacks the kernels of the pointwise functions, with a result of 24 elements, which the first
/// operand repeats.
fn attack_pointwise<S: Declared>() {
    for op in POINTWISE {
        let name = kernel(op.kernel, <S as Element>::NAME);
        let repeats = op.operands.len() > 1;
        let shapes: [Shape; 3] = [if repeats { [4].into() } else { [6, 4].into() }, [6, 1].into(), [6, 4].into()];
        emulated(|step| {
            let ones = vec![S::narrow(1.0); room(24)];
            let tensors = [(); 3].map(|()| step.upload(&ones, [ones.len()]));
            let [a, b, c] = tensors;
            let (a, b, c) = (a?, b?, c?);
            let mut out = step.upload(&ones, [ones.len()])?;
            // The numbers of a layout are many. Pairs of them are tried for one function.
            hostile_launches(name, &[4, 6, 24], op.name == "div", &mut |numbers, launches| {
                let operands = [(&a, shapes[0]), (&b, shapes[1]), (&c, shapes[2])];
                S::chosen_pointwise(op)(step, operands, (&mut out, [6, 4].into()), &mut Hostile(numbers, launches))
            });
            Ok(())
        });
    }
}

/// Returns the kernel of a family for a stored type.
fn kernel(family: &str, stored: &str) -> &'static str {
    let entry = kernels::entries().find(|entry| entry.name == format!("{family}_{stored}"));
    entry.unwrap_or_else(|| panic!("no kernel {family}_{stored}")).name
}

mod contracts {
    use super::*;

    fn names() -> Vec<&'static str> {
        let families = unary().flat_map(|op| op.kernels).chain(POINTWISE.iter().map(|op| op.kernel));
        let names: BTreeSet<&str> = families
            .flat_map(|family| [<f32 as Element>::NAME, <bf16 as Element>::NAME].map(|stored| kernel(family, stored)))
            .collect();
        names.into_iter().collect()
    }

    cuda_std::launch::inventory::submit! { Attacked(names) }

    #[test]
    fn forward_in_f32() {
        attack_unary::<f32>(0);
    }

    #[test]
    fn forward_in_bf16() {
        attack_unary::<bf16>(0);
    }

    #[test]
    fn backward_in_f32() {
        attack_unary::<f32>(1);
    }

    #[test]
    fn backward_in_bf16() {
        attack_unary::<bf16>(1);
    }

    #[test]
    fn pointwise_in_f32() {
        attack_pointwise::<f32>();
    }

    #[test]
    fn pointwise_in_bf16() {
        attack_pointwise::<bf16>();
    }
}

on_each_device! {
    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (a, b) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[1.0; 6], [3, 2])?);
            for op in unary() {
                let (_, backward) = op.in_f32;
                let name = format!("{}_backward", op.name);
                assert_refused(backward(trial, &a, &b), &[name.as_str(), "[2, 3]", "[3, 2]"]);
            }
            for op in POINTWISE.iter().filter(|op| op.operands.len() > 1) {
                let operands = [Operand::from(&a), Operand::from(&b), Operand::from(&a)];
                let refused = (op.in_f32)(trial, &operands[..op.operands.len()]);
                assert_refused(refused, &[op.name, "[2, 3]", "[3, 2]"]);
            }
            Ok(())
        });
    }
}
