//! `GradCheck` accepts right backward passes, and names wrong ones by input and element.

use crate::support::{Random, on_each_device};
use stepscope::check::GradCheck;
use stepscope::ops;
use stepscope::prelude::*;
use stepscope::tensor::{Saved, Shape};

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

/// Computes x^2 with a custom backward pass: dy times `derivative` of x.
fn square<'s>(
    tape: &Tape<'_, 's>,
    x: &Var<'s>,
    derivative: impl FnOnce(&Step<'s>, &Saved<'s>) -> Result<Tensor<'s>> + 'static,
) -> Result<Var<'s>> {
    let value = ops::mul(tape.step(), x.value(), x.value())?.save();
    let x = *x;
    Ok(tape.op("square", [&x])?.record(value, move |back, dy| {
        let derivative = derivative(back.step(), x.value())?;
        back.add(&x, ops::mul(back.step(), &derivative, &dy)?)
    }))
}

on_each_device! {
    fn right_backward_passes_pass(device: &Device) {
        let mut random = Random::new(3);
        let (x, y, rows) = (random.normals(12), random.normals(12), random.normals(400));
        let mut arena = arena(device);
        let two: [(&[f32], Shape); 2] = [(&x, [3, 4].into()), (&y, [3, 4].into())];
        let worst = GradCheck::default().run(&mut arena, &two, |_, inputs| {
            let both = Var::cat(&[inputs[0].gelu()?, inputs[0].mul(inputs[1])?], 1)?;
            both.softmax()
        }).unwrap();
        assert!(worst > 0.0 && worst < 1e-4, "{worst}");
        // More elements than are tried, and an unused input.
        let inputs: [(&[f32], Shape); 2] = [(&rows, [20, 20].into()), (&x, [12].into())];
        GradCheck::default().run(&mut arena, &inputs, |_, inputs| inputs[0].tanh()).unwrap();
        GradCheck::default().run(&mut arena, &two, |tape, inputs| {
            square(tape, &inputs[1], |step, x| ops::scale(step, x, 2.0))
        }).unwrap();
    }

    fn wrong_gradient_names_its_element(device: &Device) {
        let mut arena = arena(device);
        let inputs: [(&[f32], Shape); 2] = [(&[1.0], [1].into()), (&[0.5, 2.0, -1.5, 3.0], [2, 2].into())];
        // The derivative is 0 for a negative x.
        let error = GradCheck::default().run(&mut arena, &inputs, |tape, inputs| {
            square(tape, &inputs[1], |step, x| ops::scale(step, &ops::relu(step, x)?, 2.0))
        }).unwrap_err();
        let Error::Gradient { input: 1, element: 2, backward, difference, .. } = error else { panic!("{error}") };
        assert!(backward == 0.0 && difference != 0.0, "{error}");
        // One percent too much, and NaN.
        for factor in [2.02, f32::NAN] {
            let error = GradCheck::default().run(&mut arena, &inputs, |tape, inputs| {
                square(tape, &inputs[1], move |step, x| ops::scale(step, x, factor))
            }).unwrap_err();
            assert!(matches!(error, Error::Gradient { input: 1, .. }), "{factor}: {error}");
            assert!(error.to_string().contains("input 1, element"), "{error}");
        }
    }

    fn values_must_fit_their_shape(device: &Device) {
        let inputs: [(&[f32], Shape); 1] = [(&[1.0, 2.0], [3].into())];
        let refused = GradCheck::default().run(&mut arena(device), &inputs, |_, x| x[0].tanh());
        assert!(matches!(refused, Err(Error::Misuse { .. })), "{refused:?}");
    }
}
