//! A graph may write buffers, inputs' slots and its own part of an arena, and no memory of a step
//! that runs while it is recorded.
//!
//! Invariant: a recorded launch that names a tensor of a running step is refused, however the
//! tensor came into the state; the running step goes on with its numbers, and what was captured
//! before still runs.

#![forbid(unsafe_code)]

use crate::support::on_each_device;
use kernels::fill::fill;
use kernels::guard::guard_write;
use std::cell::RefCell;
use stepscope::*;

const LEN: usize = 64;

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

/// A recorded step that writes what its state has.
fn overwrite<'a, T: Target<'a, f32>>(step: &mut Step<'_>, state: &mut Option<T>, _: &Slots<'_>) -> Result<()> {
    let Some(tensor) = state else { return Ok(()) };
    step.launch(fill { out: tensor.out(), length: LEN, value: 7.0 })
}

/// The error names the kernel, the argument and the arena, and says what to do.
#[track_caller]
fn refused<R>(captured: Result<R>, kernel: &str) {
    let error = captured.err().expect("a graph of a running step's tensor").to_string();
    assert!(matches!(error.split_once(": "), Some(("capture", _))), "{error}");
    for words in [&format!("kernel `{kernel}`"), "pointer ", "of the running step of arena ", "keep them in a `Buffer`"]
    {
        assert!(error.contains(words), "{words}: {error}");
    }
}

on_each_device! {
    fn a_tensor_of_a_running_step(device: &Device) {
        let (mut a, mut b) = (arena(device), arena(device));
        a.step(|step| {
            let saved = ops::fill(step, [LEN], 1.0)?;
            refused(b.capture(Some(saved), &Inputs::new(), overwrite), "fill_f32");
            // So is one without elements, and one that is read.
            let empty = step.empty::<f32>([0])?;
            let record: Record<Tensor<'_>, ()> = |step, tensor, _| step.launch(fill { out: tensor.out(), length: 0, value: 7.0 });
            refused(b.capture(empty, &Inputs::new(), record), "fill_f32");
            let saved = ops::fill(step, [LEN], 1.0)?.save();
            let record: Record<(Saved<'_>, Buffer<f32>), ()> = |step, (saved, buffer), _| {
                let mut out = step.lend_mut(buffer, [LEN])?;
                step.launch(kernels::elementwise::scale { x: saved.slice(), factor: 2.0, out: out.out() })
            };
            refused(b.capture((saved, Buffer::zeros(device, LEN)?), &Inputs::new(), record), "scale_f32");
            assert_eq!(step.read(&saved)?, [1.0; LEN]);
            Ok(())
        })
        .unwrap();
    }

    /// The memory of a nested scope, of the overflow pool and of an arena in checked mode has the
    /// same owner.
    fn a_tensor_of_any_scope_and_place(device: &Device) {
        let mut b = arena(device);
        arena(device)
            .step(|step| {
                let mut outer = ops::fill(step, [LEN], 1.0)?;
                step.scratch(|inner| {
                    refused(b.capture(Some(ops::fill(inner, [LEN], 1.0)?), &Inputs::new(), overwrite), "fill_f32");
                    refused(b.capture(Some(inner.lend_mut(&mut outer)), &Inputs::new(), overwrite), "fill_f32");
                    inner.scratch(|third| {
                        refused(b.capture(Some(third.empty::<f32>([LEN])?), &Inputs::new(), overwrite), "fill_f32");
                        Ok(())
                    })
                })?;
                assert_eq!(step.read(&outer)?, [1.0; LEN]);
                Ok(())
            })
            .unwrap();
        let mut overflows =
            Arena::builder(device).capacity(Capacity::Bytes(256)).overflow(Overflow::pool(1 << 20)).build().unwrap();
        let mut checked = Arena::builder(device).capacity(Capacity::mib(1)).checked(true).build().unwrap();
        for arena in [&mut overflows, &mut checked] {
            arena
                .step(|step| {
                    let _fills_the_arena = step.empty::<f32>([LEN])?;
                    refused(b.capture(Some(ops::fill(step, [LEN], 1.0)?), &Inputs::new(), overwrite), "fill_f32");
                    Ok(())
                })
                .unwrap();
        }
    }

    /// What holds it does not matter: a variable of a tape, a cell, or a state that gets it behind
    /// the first recording.
    fn a_tensor_that_is_hidden(device: &Device) {
        let (mut a, mut b) = (arena(device), arena(device));
        let mut layout = Layout::builder();
        let w = layout.add("w", [LEN, 2], Initializer::Constant(1.0));
        let weights = Parameters::new(device, &layout.build().unwrap(), 1).unwrap();
        a.step(|step| {
            let tape = Tape::new(step, &weights);
            let x = tape.input(ops::fill(step, [1, LEN], 1.0)?);
            let y = tape.linear(&x, w, None)?;
            let record: Record<(Var<'_>, Buffer<f32>), ()> = |step, (y, buffer), _| {
                let mut out = step.lend_mut(buffer, [2])?;
                step.launch(kernels::elementwise::scale { x: y.value().slice(), factor: 2.0, out: out.out() })
            };
            refused(b.capture((y, Buffer::zeros(device, 2)?), &Inputs::new(), record), "scale_f32");
            let hidden = RefCell::new(Some(ops::fill(step, [LEN], 1.0)?));
            let record: Record<&RefCell<Option<Tensor<'_>>>, ()> = |step, cell, _| match &mut *cell.borrow_mut() {
                Some(tensor) => step.launch(fill { out: tensor.out(), length: LEN, value: 7.0 }),
                None => Ok(()),
            };
            refused(b.capture(&hidden, &Inputs::new(), record), "fill_f32");
            let mut captured = b.capture(None, &Inputs::new(), overwrite)?;
            *captured.state_mut() = hidden.take();
            captured.replay(&Inputs::new())?;
            refused(captured.replay(&Inputs::new().variant(1)), "fill_f32");
            captured.replay(&Inputs::new())?;
            let tensor = captured.into_state().expect("it was put there");
            assert_eq!(step.read(&tensor)?, [1.0; LEN]);
            // An op of the outer step would launch on the device itself.
            let record: Record<&Tape<'_, '_>, ()> = |_, tape, _| tape.sum(&tape.input(ops::fill(tape.step(), [2], 1.0)?)).map(drop);
            let error = b.capture(&tape, &Inputs::new(), record).unwrap_err().to_string();
            assert!(error.contains("only tensors and kernels of the step, while it is recorded"), "{error}");
            Ok(())
        })
        .unwrap();
    }

    /// Within a step that is only measured, its tensors are refused by captures of its own device
    /// and of the real one. A measure itself takes tensors of running steps, since nothing of it is
    /// replayed.
    fn a_tensor_of_a_measured_step(device: &Device) {
        let (mut a, b) = (arena(device), arena(device));
        a.step(|step| {
            let mut outer = ops::fill(step, [LEN], 1.0)?;
            b.measure(|measured| measured.launch(fill { out: outer.out(), length: LEN, value: 7.0 }))?;
            b.measure(|measured| {
                let mut inside = Arena::builder(measured.device()).capacity(Capacity::mib(1)).build()?;
                refused(inside.capture(Some(ops::fill(measured, [LEN], 1.0)?), &Inputs::new(), overwrite), "fill_f32");
                let mut state = Some(&mut outer);
                let record: Record<Option<&mut Tensor<'_>>, ()> = |step, outer, _| match outer {
                    Some(outer) => step.launch(fill { out: outer.out(), length: LEN, value: 7.0 }),
                    None => Ok(()),
                };
                refused(inside.capture(state.take(), &Inputs::new(), record), "fill_f32");
                Ok(())
            })?;
            b.measure(|measured| {
                let tensor = ops::fill(measured, [LEN], 1.0)?;
                let error = a_capture_of(device, tensor).unwrap_err().to_string();
                assert!(error.contains("another device's, or a rehearsal's"), "{error}");
                Ok(())
            })?;
            assert_eq!(step.read(&outer)?, [1.0; LEN]);
            Ok(())
        })
        .unwrap();
    }

    /// What outlives steps may be recorded inside one: a buffer that the state owns, borrows, or
    /// was lent by the step. A replay within the step that was lent it is refused where one of both
    /// writes.
    fn buffers_are_recorded_inside_a_step(device: &Device) {
        let (mut a, mut b) = (arena(device), arena(device));
        let (mut owned, mut borrowed) = (Buffer::<f32>::zeros(device, LEN).unwrap(), Buffer::<f32>::zeros(device, LEN).unwrap());
        let mut lent = Buffer::from_slice(device, &[1.0f32; LEN]).unwrap();
        a.step(|step| {
            let record: Record<(&mut Buffer<f32>, &mut Buffer<f32>), ()> = |step, (x, y), _| {
                ops::fill_into(step, &mut step.lend_mut(x, [LEN])?, 3.0)?;
                ops::fill_into(step, &mut step.lend_mut(y, [LEN])?, 4.0)
            };
            b.capture((&mut owned, &mut borrowed), &Inputs::new(), record)?.repeat()?;
            let record: Record<(Lent<'_, '_>, Buffer<f32>), ()> = |step, (x, buffer), _| {
                let mut out = step.lend_mut(buffer, [LEN])?;
                step.launch(kernels::elementwise::scale { x: x.slice(), factor: 2.0, out: out.out() })
            };
            let mut reads = b.capture((step.lend(&lent, [LEN])?, Buffer::zeros(device, LEN)?), &Inputs::new(), record)?;
            reads.repeat()?;
            assert_eq!(reads.into_state().1.read()?, [2.0; LEN]);
            let mut writes = b.capture(Some(step.lend_mut(&mut lent, [LEN])?), &Inputs::new(), overwrite)?;
            let error = writes.repeat().map(drop).expect_err("the step has the buffer").to_string();
            assert!(error.contains("a replay inside that step"), "{error}");
            Ok(())
        })
        .unwrap();
        assert_eq!((owned.read().unwrap(), borrowed.read().unwrap()), (vec![3.0; LEN], vec![4.0; LEN]));
        assert_eq!(lent.read().unwrap(), [1.0; LEN]);
    }
}

/// A capture whose state is a tensor, on an arena of its own.
fn a_capture_of(device: &Device, tensor: Tensor<'_>) -> Result<()> {
    arena(device).capture(Some(tensor), &Inputs::new(), overwrite).map(drop)
}

/// A recorded step's tensor, in the state of a capture of another device.
#[test]
fn a_tensor_of_another_recording() {
    let [one, other] = [(); 2].map(|()| crate::support::open(DeviceKind::Emulated));
    let record: Record<Arena, ()> = |step, other, _| {
        let tensor = ops::fill(step, [LEN], 1.0)?;
        let error = other.capture(Some(tensor), &Inputs::new(), overwrite).unwrap_err().to_string();
        assert!(error.contains("another device's, or a rehearsal's"), "{error}");
        Ok(())
    };
    arena(&one).capture(arena(&other), &Inputs::new(), record).unwrap();
}

/// A wrong guard would be written by a kernel, too: no kernel is exempt.
#[test]
fn a_kernel_of_the_checks() {
    let device = crate::support::open(DeviceKind::Emulated);
    let (mut a, mut b) = (arena(&device), arena(&device));
    let refusal = a.step(|step| {
        let halves = step.empty::<bf16>([LEN])?;
        let record: Record<Tensor<'_, bf16>, ()> = |step, halves, _| {
            let length = halves.shape().elements();
            step.launch(guard_write { guard: halves.out(), length })
        };
        b.capture(halves, &Inputs::new(), record).map(drop)
    });
    refused(refusal, "guard_write");
}
