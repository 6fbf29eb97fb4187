//! Custom ops: a package outside the library can use a tape as the library's ops do.

use crate::elementwise::add_in_float64;
use crate::gradients::{Case, Handles, ParameterValues, SEEDS, extents, leaf, longest, normal, parameters_of, stack};
use crate::support::{Random, on_each_device};
use crate::{linear, transpose};
use std::cell::Cell;
use std::rc::Rc;
use stepscope::autograd::Backward;
use stepscope::ops::{self, Gemm};
use stepscope::parameters::StackedParameters;
use stepscope::tensor::{IndexBound, IndexSource, Saved};
use stepscope::{Arena, Capacity, Device, Error, Gradients, Parameters, Result, Tape, Tensor, Var};

/// Computes `h = x W^T` and `t = tanh(h)`, two outputs. The rows of W are those of every member;
/// `x`: `[rows, in]`, `w`: `[out, in]` each, `h`, `t`: `[rows, members out]`. Backward adds to the
/// gradient of x; `added` records if there was one.
fn fork<'s>(tape: &Tape<'_, 's>, x: &Var<'s>, w: &StackedParameters, added: &Rc<Cell<bool>>) -> Result<[Var<'s>; 2]> {
    const OP: &str = "fork";
    let (op, step, none) = (tape.op(OP, [x])?, tape.step(), None::<&Saved<'s>>);
    let (member, distance) = op.stack(w)?;
    let &[out, inner] = member.extents() else {
        return Err(Error::misuse(OP, "weights [out, in]", member.to_string()));
    };
    let [rows, _] = x.shape().as_rows();
    ops::same_shape(OP, [rows, inner].into(), x.shape())?;
    if w.members().len() > 1 && distance != member.elements() {
        return Err(Error::misuse(OP, "members without gaps", format!("{distance} elements apart")));
    }
    let outputs = w.members().len() * out;
    let mut h = step.empty([rows, outputs])?;
    let form = Gemm::new(rows, outputs, inner).transpose_b();
    ops::gemm_into(step, &form, x.value(), &op.stack_weights(w)?, none, &mut h)?;
    let t = ops::tanh(step, &h)?.save();
    let (x, w, added) = (*x, w.clone(), Rc::clone(added));
    Ok(op.record_all([h.save(), t], move |back, [dh, dt]| {
        let step = back.step();
        let through_t = dt.map(|dt| ops::launch::tanh_backward(step, &t, &dt)).transpose()?;
        let dh = match (dh, through_t) {
            (Some(mut dh), Some(more)) => ops::add_assign(step, &mut dh, &more).map(|()| dh)?,
            (dh, through_t) => dh.or(through_t).expect("the op runs only if an output has a gradient"),
        };
        // dW += dh^T x
        let (mut dw, accumulate) = back.stack_gradient(&w)?;
        let form = Gemm::new(outputs, inner, rows).transpose_a();
        let form = if accumulate { form.accumulate() } else { form };
        ops::gemm_into(step, &form, &dh, x.value(), none, &mut dw)?;
        // dx += dh W
        let so_far = back.take(&x)?;
        added.set(so_far.is_some());
        let form = Gemm::new(rows, inner, outputs);
        let (form, mut dx) = match so_far {
            Some(so_far) => (form.accumulate(), so_far),
            None => (form, step.empty(x.shape())?),
        };
        ops::gemm_into(step, &form, &dh, &back.stack_weights(&w)?, none, &mut dx)?;
        back.add(&x, dx)
    }))
}

/// Returns h and t of the float64 reference.
fn fork_reference(x: &[f64], w: &[f64], inner: usize) -> [Vec<f64>; 2] {
    let w = transpose::in_float64(w, w.len() / inner, inner);
    let h = linear::in_float64(x, &w, &[], inner, w.len() / inner);
    let t = h.iter().map(|h| h.tanh()).collect();
    [h, t]
}

/// The outputs that a loss depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Used {
    Both,
    First,
    Second,
    /// Both, and x by a later op, whose gradient exists when the fork's backward runs.
    BothAndInput,
}

/// The backward pass of a custom op, with two variables of its tape, one of another tape, and one
/// made later.
type Action = for<'t, 's> fn(&mut Backward<'_, 't, 's>, [Var<'s>; 4], Tensor<'s>, &Handles) -> Result<()>;

/// Returns the op that refused, or `None` on success.
fn refused<T>(result: Result<T>) -> Option<&'static str> {
    match result {
        Ok(_) => None,
        Err(Error::Misuse { op, .. }) => Some(op),
        Err(error) => panic!("{error}"),
    }
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

on_each_device! {
    fn outputs_stacks_and_existing_gradients(device: &Device) {
        for seed in SEEDS {
            for used in [Used::Both, Used::First, Used::Second, Used::BothAndInput] {
                let mut random = Random::new(seed);
                let [rows, members, half] = extents(&mut random, seed, [37, 3, 9]);
                // Members without gaps between them have a multiple of 64 elements.
                let [out, inner] = if members == 1 { [half, 5] } else { [8, 8 * half] };
                let mut w = stack(&mut random, members, &[out, inner]);
                w.values.iter_mut().for_each(|w| *w /= (inner as f32).sqrt());
                let outputs = members * out;
                let other = linear::operands(&mut random, [1, inner, outputs]).swap_remove(1);
                let x = normal(&mut random, &[rows, inner]);
                let added = Rc::new(Cell::new(false));
                let mut case = Case::new("fork", seed, longest(&[rows, inner, outputs]), vec![x, w, other]);
                case.sample = 100;
                case.check(device, |_, tape, p| {
                    let x = leaf(tape, p[0])?;
                    let [h, t] = fork(tape, &x, &p.stacks[1], &added)?;
                    match used {
                        Used::Both => t.add(h.mul(-0.5)?),
                        Used::First => Ok(h),
                        Used::Second => Ok(t),
                        Used::BothAndInput => tape.linear_residual(&x, p[2], None, &h.add(t)?),
                    }
                }, |p| {
                    let [h, t] = fork_reference(&p[0], &p[1], inner);
                    match used {
                        Used::Both => h.iter().zip(&t).map(|(h, t)| t - 0.5 * h).collect(),
                        Used::First => h,
                        Used::Second => t,
                        Used::BothAndInput => {
                            add_in_float64(&add_in_float64(&h, &t), &linear::in_float64(&p[0], &p[2], &[], inner, outputs))
                        }
                    }
                });
                assert_eq!(added.get(), used == Used::BothAndInput, "{used:?}");
            }
        }
    }

    /// The loss's own gradient is one, and the other output has none. No backward runs for an op
    /// that does not affect the loss.
    fn one_output_may_be_the_loss(device: &Device) {
        let operands = [(1.5, "x"), (0.25, "w")].map(|(value, _)| ParameterValues { count: 1, shape: vec![1, 1], values: vec![value] });
        let (parameters, p) = parameters_of(device, &operands);
        let mut gradients = Gradients::zeros(&parameters).unwrap();
        let added = Rc::default();
        let t = 0.375f64.tanh();
        for (output, slope) in [(0, 1.0), (1, 1.0 - t * t)] {
            arena(device).step(|step| {
                let tape = Tape::new(step, &parameters);
                let both = fork(&tape, &leaf(&tape, p[0])?, &p.stacks[1], &added)?;
                let dead = tape.op("dead", [&both[0]])?.record(*both[0].value(), |_, _| panic!("an output without a gradient ran backward"));
                assert!(dead.wants_gradient());
                tape.backward_overwrite(&both[output], &mut gradients)
            }).unwrap();
            for (parameter, expected) in [(p[0], 0.25 * slope), (p[1], 1.5 * slope)] {
                let got = f64::from(gradients.read(parameter).unwrap()[0]);
                assert!((got - expected).abs() < 1e-6, "output {output}: {got}, not {expected}");
            }
        }
    }

    /// Each misuse is an error in the op's name, and no gradient is lost without an error.
    fn misuse_names_the_op(device: &Device) {
        const ACTIONS: [(&str, Action, Option<&str>); 14] = [
            ("add", |back, [a, ..], dy, _| back.add(&a, dy), None),
            ("take and add", |back, [a, ..], dy, _| {
                let so_far = back.take(&a)?.expect("the op after this one added it");
                back.add(&a, dy)?;
                back.add(&a, so_far)
            }, None),
            ("an input", |back, [_, input, ..], dy, _| {
                assert!(back.take(&input)?.is_none());
                back.add(&input, dy)
            }, None),
            ("nothing", |_, _, _, _| Ok(()), None),
            ("another shape", |back, [a, ..], dy, _| back.add(&a, dy.reshape([3, 2])?), Some("mine")),
            ("another shape for an input", |back, [_, input, ..], dy, _| back.add(&input, dy.reshape([6])?), Some("mine")),
            ("add to another tape's variable", |back, [_, _, theirs, _], dy, _| back.add(&theirs, dy), Some("mine")),
            ("take from another tape's variable", |back, [_, _, theirs, _], _, _| back.take(&theirs).map(drop), Some("mine")),
            ("add to a later variable", |back, [.., later], dy, _| back.add(&later, dy), Some("mine")),
            ("take twice", |back, [a, ..], _, _| back.take(&a).and_then(|_| back.take(&a)).map(drop), Some("mine")),
            ("take and keep", |back, [a, ..], _, _| back.take(&a).map(drop), Some("mine")),
            ("gradient", |back, _, _, foreign| back.gradient(foreign[0]).map(drop), Some("mine")),
            ("stack_gradient", |back, _, _, foreign| back.stack_gradient(&foreign.stacks[0]).map(drop), Some("mine")),
            ("stack_weights", |back, _, _, foreign| back.stack_weights(&foreign.stacks[0]).map(drop), Some("mine")),
        ];
        let operand = ParameterValues { count: 1, shape: vec![2, 3], values: vec![1.0; 6] };
        let (parameters, p) = parameters_of(device, std::slice::from_ref(&operand));
        let (_, foreign) = parameters_of(device, &[operand]);
        let foreign = Rc::new(foreign);
        let mut gradients = Gradients::zeros(&parameters).unwrap();
        for (name, action, expected) in ACTIONS {
            let got = arena(device).step(|step| {
                let (tape, other) = (Tape::new(step, &parameters), Tape::new(step, &parameters));
                let (a, theirs) = (leaf(&tape, p[0])?, leaf(&other, p[0])?);
                let (input, later) = (tape.input(*a.value()), Rc::new(Cell::new(None)));
                let (known, foreign) = (Rc::clone(&later), Rc::clone(&foreign));
                let y = tape.op("mine", [&a])?.record(*a.value(), move |back, dy| {
                    action(back, [a, input, theirs, known.get().unwrap()], dy, &foreign)
                });
                // Gives `a` a gradient before the op runs.
                let y = y.add(a)?;
                later.set(Some(y));
                let loss = tape.sum(&y)?;
                Ok(refused(tape.backward_overwrite(&loss, &mut gradients)))
            });
            assert_eq!(got.unwrap(), expected, "{name}");
        }
    }

    /// Tests the forward checks that run before the op is on the tape.
    fn forward_misuse_is_refused(device: &Device) {
        let operand = ParameterValues { count: 2, shape: vec![2, 3], values: vec![1.0; 12] };
        let (parameters, p): (Parameters, Handles) = parameters_of(device, std::slice::from_ref(&operand));
        let (_, foreign) = parameters_of(device, &[operand]);
        let added = Rc::default();
        arena(device).step(|step| {
            let (tape, other) = (Tape::new(step, &parameters), Tape::new(step, &parameters));
            let x = leaf(&tape, p[0])?;
            assert_eq!(refused(fork(&other, &x, &p.stacks[0], &added)), Some("fork"), "a variable of another tape");
            assert_eq!(refused(fork(&tape, &x, &foreign.stacks[0], &added)), Some("fork"), "a stack of another spec");
            let wide = tape.input(ops::fill(step, [2, 5], 0.0)?);
            assert_eq!(refused(fork(&tape, &wide, &p.stacks[0], &added)), Some("fork"), "another shape");
            assert_eq!(refused(fork(&tape, &x, &p.stacks[0], &added)), Some("fork"), "a gap between the members");
            let op = tape.op("mine", [&x])?;
            assert_eq!(refused(op.weights(foreign[0])), Some("mine"));
            assert_eq!(refused(op.stack_weights(&foreign.stacks[0])), Some("mine"));
            let two = ops::fill(step, [2], 0.0)?.save();
            assert_eq!(refused(op.record_scalar(two, &x, |_| unreachable!())), Some("mine"), "an output of two elements is no scalar");
            // Labels that the host knows are checked for any op.
            let labels = step.upload_indices(&[0, 3, 1], [3])?;
            labels.within(step, IndexBound::below(4))?;
            let error = Error::Label { sample: 1, label: 3, classes: 3 };
            assert_eq!(labels.within(step, IndexBound::below(3)).err(), Some(error));
            Ok(())
        }).unwrap();
    }
}
