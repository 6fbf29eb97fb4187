//! A graph may write buffers, the slots of its inputs and its own part of an arena. It may not
//! write memory of a step that runs while it is recorded.
//!
//! Invariant: a recorded launch that names a tensor of a running step is refused, however the
//! tensor came into the state. The running step keeps its values, and earlier captures still run.

#![forbid(unsafe_code)]

use crate::support::on_each_device;
use kernels::fill::fill;
use kernels::guard::guard_write;
use std::cell::RefCell;
use stepscope::capture::{CaptureInputs, Record};
use stepscope::memory::Overflow;
use stepscope::ops;
use stepscope::parameters::Initializer;
use stepscope::prelude::*;
use stepscope::tensor::{Lent, Saved, Source, Target};

const LEN: usize = 64;

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

/// A recorded step that writes the tensor in its state.
fn overwrite<'a, T: Target<'a, f32>>(step: &mut Step<'_>, state: &mut Option<T>, _: &CaptureInputs<'_>) -> Result<()> {
    let Some(tensor) = state else { return Ok(()) };
    step.launch(fill { out: tensor.out(), length: LEN, value: 7.0 })
}

/// Checks that the error names the kernel, the argument and the arena, and gives advice.
#[track_caller]
fn refused<R>(captured: Result<R>, kernel: &str) {
    let error = captured.err().expect("capturing a running step's tensor must fail").to_string();
    assert!(matches!(error.split_once(": "), Some(("capture", _))), "{error}");
    for words in [&format!("kernel `{kernel}`"), "pointer ", "of the running step of arena ", "keep them in a `Buffer`"]
    {
        assert!(error.contains(words), "{words}: {error}");
    }
}

on_each_device! {
    fn running_steps_tensor_is_refused(device: &Device) {
        let (mut a, mut b) = (arena(device), arena(device));
        a.step(|step| {
            let saved = ops::fill(step, [LEN], 1.0)?;
            refused(b.capture(Some(saved), &HostInputs::new(), overwrite), "fill_f32");
            // A tensor without elements is refused too, and so is one that is only read.
            let empty = step.empty::<f32>([0])?;
            let record: Record<Tensor<'_>, ()> = |step, tensor, _| step.launch(fill { out: tensor.out(), length: 0, value: 7.0 });
            refused(b.capture(empty, &HostInputs::new(), record), "fill_f32");
            let saved = ops::fill(step, [LEN], 1.0)?.save();
            let record: Record<(Saved<'_>, Buffer<f32>), ()> = |step, (saved, buffer), _| {
                let mut out = step.lend_mut(buffer, [LEN])?;
                step.launch(kernels::elementwise::scale { x: saved.slice(), factor: 2.0, out: out.out() })
            };
            refused(b.capture((saved, Buffer::zeros(device, LEN)?), &HostInputs::new(), record), "scale_f32");
            assert_eq!(step.read(&saved)?, [1.0; LEN]);
            Ok(())
        })
        .unwrap();
    }

    /// Memory of a nested scope, of the overflow pool and of a checked arena has the same owner.
    fn tensors_of_any_scope_are_refused(device: &Device) {
        let mut b = arena(device);
        arena(device)
            .step(|step| {
                let mut outer = ops::fill(step, [LEN], 1.0)?;
                step.scratch(|inner| {
                    refused(b.capture(Some(ops::fill(inner, [LEN], 1.0)?), &HostInputs::new(), overwrite), "fill_f32");
                    refused(b.capture(Some(inner.lend_mut(&mut outer)), &HostInputs::new(), overwrite), "fill_f32");
                    inner.scratch(|third| {
                        refused(b.capture(Some(third.empty::<f32>([LEN])?), &HostInputs::new(), overwrite), "fill_f32");
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
                    refused(b.capture(Some(ops::fill(step, [LEN], 1.0)?), &HostInputs::new(), overwrite), "fill_f32");
                    Ok(())
                })
                .unwrap();
        }
    }

    /// The holder of the tensor does not matter: a tape's variable, a cell, or a state that gets it
    /// after the first recording.
    fn hidden_tensor_is_refused(device: &Device) {
        let (mut a, mut b) = (arena(device), arena(device));
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [LEN, 2], Initializer::Constant(1.0));
        let weights = Parameters::new(device, &spec.build().unwrap(), 1).unwrap();
        a.step(|step| {
            let tape = Tape::new(step, &weights);
            let x = tape.input(ops::fill(step, [1, LEN], 1.0)?);
            let y = tape.linear(&x, w, None)?;
            let record: Record<(Var<'_>, Buffer<f32>), ()> = |step, (y, buffer), _| {
                let mut out = step.lend_mut(buffer, [2])?;
                step.launch(kernels::elementwise::scale { x: y.value().slice(), factor: 2.0, out: out.out() })
            };
            refused(b.capture((y, Buffer::zeros(device, 2)?), &HostInputs::new(), record), "scale_f32");
            let hidden = RefCell::new(Some(ops::fill(step, [LEN], 1.0)?));
            let record: Record<&RefCell<Option<Tensor<'_>>>, ()> = |step, cell, _| match &mut *cell.borrow_mut() {
                Some(tensor) => step.launch(fill { out: tensor.out(), length: LEN, value: 7.0 }),
                None => Ok(()),
            };
            refused(b.capture(&hidden, &HostInputs::new(), record), "fill_f32");
            let mut captured = b.capture(None, &HostInputs::new(), overwrite)?;
            *captured.state_mut() = hidden.take();
            captured.replay(&HostInputs::new())?;
            refused(captured.replay(&HostInputs::new().variant(1)), "fill_f32");
            captured.replay(&HostInputs::new())?;
            let tensor = captured.into_state().expect("the captured closure stored a tensor in its state");
            assert_eq!(step.read(&tensor)?, [1.0; LEN]);
            // An op of the outer step would launch on the device directly.
            let record: Record<&Tape<'_, '_>, ()> = |_, tape, _| tape.sum(&tape.input(ops::fill(tape.step(), [2], 1.0)?)).map(drop);
            let error = b.capture(&tape, &HostInputs::new(), record).unwrap_err().to_string();
            assert!(error.contains("only the step's own tensors and kernels while it is recorded"), "{error}");
            Ok(())
        })
        .unwrap();
    }

    /// Tensors of a dry run are refused by captures of the dry-run device and of the real device. A
    /// dry run itself accepts tensors of running steps, because nothing in it is replayed.
    fn dry_run_tensor_is_refused(device: &Device) {
        let (mut a, b) = (arena(device), arena(device));
        a.step(|step| {
            let mut outer = ops::fill(step, [LEN], 1.0)?;
            b.measure(|measured| measured.launch(fill { out: outer.out(), length: LEN, value: 7.0 }))?;
            b.measure(|measured| {
                let mut inside = Arena::builder(measured.device()).capacity(Capacity::mib(1)).build()?;
                refused(inside.capture(Some(ops::fill(measured, [LEN], 1.0)?), &HostInputs::new(), overwrite), "fill_f32");
                let mut state = Some(&mut outer);
                let record: Record<Option<&mut Tensor<'_>>, ()> = |step, outer, _| match outer {
                    Some(outer) => step.launch(fill { out: outer.out(), length: LEN, value: 7.0 }),
                    None => Ok(()),
                };
                refused(inside.capture(state.take(), &HostInputs::new(), record), "fill_f32");
                Ok(())
            })?;
            b.measure(|measured| {
                let tensor = ops::fill(measured, [LEN], 1.0)?;
                let error = a_capture_of(device, tensor).unwrap_err().to_string();
                assert!(error.contains("memory of another device or of a dry run"), "{error}");
                Ok(())
            })?;
            assert_eq!(step.read(&outer)?, [1.0; LEN]);
            Ok(())
        })
        .unwrap();
    }

    /// Memory that outlives steps may be recorded inside a step: a buffer that the state owns or
    /// borrows, or that the step lent. A replay within the step that lent the buffer is refused if
    /// either of them writes it.
    fn buffers_are_recorded_inside_a_step(device: &Device) {
        let (mut a, mut b) = (arena(device), arena(device));
        let (mut owned, mut borrowed) = (Buffer::<f32>::zeros(device, LEN).unwrap(), Buffer::<f32>::zeros(device, LEN).unwrap());
        let mut lent = Buffer::from_slice(device, &[1.0f32; LEN]).unwrap();
        a.step(|step| {
            let record: Record<(&mut Buffer<f32>, &mut Buffer<f32>), ()> = |step, (x, y), _| {
                ops::fill_into(step, &mut step.lend_mut(x, [LEN])?, 3.0)?;
                ops::fill_into(step, &mut step.lend_mut(y, [LEN])?, 4.0)
            };
            b.capture((&mut owned, &mut borrowed), &HostInputs::new(), record)?.repeat()?;
            let record: Record<(Lent<'_, '_>, Buffer<f32>), ()> = |step, (x, buffer), _| {
                let mut out = step.lend_mut(buffer, [LEN])?;
                step.launch(kernels::elementwise::scale { x: x.slice(), factor: 2.0, out: out.out() })
            };
            let mut reads = b.capture((step.lend(&lent, [LEN])?, Buffer::zeros(device, LEN)?), &HostInputs::new(), record)?;
            reads.repeat()?;
            assert_eq!(reads.into_state().1.read()?, [2.0; LEN]);
            let mut writes = b.capture(Some(step.lend_mut(&mut lent, [LEN])?), &HostInputs::new(), overwrite)?;
            let error = writes.repeat().map(drop).expect_err("the running step has borrowed the buffer").to_string();
            assert!(error.contains("a replay inside that step"), "{error}");
            Ok(())
        })
        .unwrap();
        assert_eq!((owned.read().unwrap(), borrowed.read().unwrap()), (vec![3.0; LEN], vec![4.0; LEN]));
        assert_eq!(lent.read().unwrap(), [1.0; LEN]);
    }
}

/// Captures a step whose state is the tensor, on another arena.
fn a_capture_of(device: &Device, tensor: Tensor<'_>) -> Result<()> {
    arena(device).capture(Some(tensor), &HostInputs::new(), overwrite).map(drop)
}

/// A tensor of a recorded step, in the state of a capture on another device.
#[test]
fn other_recordings_tensor_is_refused() {
    let [one, other] = [(); 2].map(|()| crate::support::open(DeviceKind::Emulated));
    let record: Record<Arena, ()> = |step, other, _| {
        let tensor = ops::fill(step, [LEN], 1.0)?;
        let error = other.capture(Some(tensor), &HostInputs::new(), overwrite).unwrap_err().to_string();
        assert!(error.contains("memory of another device or of a dry run"), "{error}");
        Ok(())
    };
    arena(&one).capture(arena(&other), &HostInputs::new(), record).unwrap();
}

/// No kernel is exempt: the checks' own kernel would write a wrong guard.
#[test]
fn guard_kernels_are_refused_too() {
    let device = crate::support::open(DeviceKind::Emulated);
    let (mut a, mut b) = (arena(&device), arena(&device));
    let refusal = a.step(|step| {
        let halves = step.empty::<bf16>([LEN])?;
        let record: Record<Tensor<'_, bf16>, ()> = |step, halves, _| {
            let length = halves.shape().elements();
            step.launch(guard_write { guard: halves.out(), length })
        };
        b.capture(halves, &HostInputs::new(), record).map(drop)
    });
    refused(refusal, "guard_write");
}
