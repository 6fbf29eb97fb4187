//! Every pattern that a training program needs compiles, and runs.

use stepscope::parameters::Initializer;
use stepscope::tensor::Saved;
use stepscope::{
    AdamW, Arena, Buffer, Capacity, Device, DeviceKind, Gradients, Optimizer, ParameterSpec, Parameters, Result, Step,
    Tape, Tensor, ops,
};

/// Doubles x: a custom op takes a bare step and returns a tensor of that step.
fn double<'s>(step: &Step<'s>, x: &Saved<'s>) -> Result<Tensor<'s>> {
    let mut sum = ops::copy(step, x)?;
    ops::add_assign(step, &mut sum, x)?;
    Ok(sum)
}

fn values_leave_a_step(arena: &mut Arena) -> Result<()> {
    let values = arena.step(|step| {
        let saved = step.upload(&[1.0f32, 2.0], [2])?.save();
        let again = saved;
        let doubled = double(step, &saved)?.reshape([2, 1])?;
        assert_eq!(step.read(&again)?, [1.0, 2.0]);
        step.read(&doubled)
    })?;
    assert_eq!(values, [2.0, 4.0]);
    Ok(())
}

fn scratches_read_and_write_outer_tensors(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let x = step.upload(&[1.0f32], [1])?.save();
        let mut result = step.empty([1])?;
        step.scratch(|inner| {
            let twice = ops::scale(inner, &inner.lend(&x), 2.0)?.save();
            let mut out = inner.lend_mut(&mut result);
            inner.scratch(|innermost| {
                let twice = innermost.lend(&twice);
                let sum = ops::add(innermost, &twice, &twice)?;
                ops::copy_into(innermost, &sum, &mut innermost.lend_mut(&mut out))
            })
        })?;
        let after = ops::scale(step, &result, 10.0)?;
        assert_eq!(step.read(&after)?, [40.0]);
        Ok(())
    })
}

fn arenas_meet_through_the_host(arena: &mut Arena, other: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let x = step.upload(&[1.0f32], [1])?;
        let values = step.read(&x)?;
        let back = other.step(|foreign| {
            let y = ops::scale(foreign, &foreign.upload(&values, [1])?, 3.0)?;
            foreign.read_scalar(&y)
        })?;
        assert_eq!(back, 3.0);
        Ok(())
    })
}

fn buffers_outlive_steps(arena: &mut Arena, device: &Device) -> Result<()> {
    let mut buffer = Buffer::from_slice(device, &[1.0f32])?;
    for _ in 0..3 {
        arena.step(|step| {
            let doubled = {
                let lent = step.lend(&buffer, [1])?;
                ops::add(step, &lent, &lent)?
            };
            ops::copy_into(step, &doubled, &mut step.lend_mut(&mut buffer, [1])?)?;
            assert_eq!(step.read(&doubled)?, buffer.read()?);
            Ok(())
        })?;
    }
    assert_eq!(buffer.read()?, [8.0]);
    Ok(())
}

fn a_step_trains(arena: &mut Arena, device: &Device) -> Result<()> {
    let mut spec = ParameterSpec::builder();
    let weight = spec.add("weight", [1, 2], Initializer::Constant(0.5));
    let spec = spec.build()?;
    let mut parameters = Parameters::new(device, &spec, 0)?;
    let mut gradients = Gradients::zeros(&parameters)?;
    let mut optimizer = Optimizer::new(&parameters, AdamW::default())?;
    arena.step(|step| {
        gradients.zero(step)?;
        // Two tapes of one step, one of which is dropped.
        let (first, second, given_up) =
            (Tape::new(step, &parameters), Tape::new(step, &parameters), Tape::new(step, &parameters));
        drop(given_up);
        for tape in [first, second] {
            let x = tape.input(step.upload(&[1.0f32], [1, 1])?);
            let labels = step.upload_indices(&[1], [1])?;
            let loss = tape.cross_entropy(&tape.linear(&x, weight, None)?, labels)?;
            tape.backward(&loss, &mut gradients)?;
        }
        let ticket = optimizer.advance()?;
        optimizer.apply(ticket, step, &mut parameters, &gradients)?;
        Ok(())
    })?;
    let weights = parameters.read(weight)?;
    assert!(weights[0] < 0.5 && weights[1] > 0.5, "{weights:?}");
    Ok(())
}

fn checkpoints_are_lent_what_they_need(arena: &mut Arena, device: &Device) -> Result<()> {
    let mut spec = ParameterSpec::builder();
    let weight = spec.add("weight", [2, 2], Initializer::Constant(0.5));
    let parameters = Parameters::new(device, &spec.build()?, 0)?;
    let mut gradients = Gradients::zeros(&parameters)?;
    let name = String::from("owned");
    arena.step(|step| {
        let tape = Tape::new(step, &parameters);
        let x = tape.input(step.upload(&[1.0f32, 2.0], [1, 2])?);
        let labels = step.upload_indices(&[1], [1])?;
        let loss = tape.recompute((x, labels), move |tape, (x, labels)| {
            assert_eq!(name, "owned");
            let [h, y] = tape.recompute_all([x, x], move |tape, [x, again]| {
                let h = tape.linear(&x, weight, None)?;
                Ok([h, h.add(again)?])
            })?;
            tape.cross_entropy(&h.add(y)?, labels)
        })?;
        tape.backward(&loss, &mut gradients)
    })?;
    // The logits are 2 h + x; the second is larger by 1.
    let wrong = 1.0 / (1.0 + 1.0f32.exp());
    let want = [2.0, -2.0, 4.0, -4.0].map(|factor| factor * wrong);
    let gradients = gradients.read(weight)?;
    assert!(
        gradients.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6),
        "got the gradients {gradients:?}, expected {want:?}"
    );
    Ok(())
}

fn run() -> Result<()> {
    let device = Device::open(DeviceKind::Emulated)?;
    let build = || Arena::builder(&device).capacity(Capacity::mib(1)).build();
    let (mut arena, mut other) = (build()?, build()?);
    values_leave_a_step(&mut arena)?;
    scratches_read_and_write_outer_tensors(&mut arena)?;
    arenas_meet_through_the_host(&mut arena, &mut other)?;
    buffers_outlive_steps(&mut arena, &device)?;
    a_step_trains(&mut arena, &device)?;
    checkpoints_are_lent_what_they_need(&mut arena, &device)?;
    // An arena may move to another thread between steps. Weights and devices may be shared.
    std::thread::spawn(move || values_leave_a_step(&mut other)).join().expect("no panic")
}

pub(crate) fn main() {
    run().unwrap();
}
