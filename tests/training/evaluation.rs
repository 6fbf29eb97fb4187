//! Evaluations with a non-finite loss: the error is about the evaluation, and names the inputs of
//! its loss.

#![forbid(unsafe_code)]

use stepscope::error::Quantity;
use stepscope::nn::Linear;
use stepscope::upload::NonFinite;
use stepscope::{
    AdamW, Arena, Capacity, Device, DeviceBatch, DeviceKind, Error, HostBatch, HostInputs, Model, ParameterSpec,
    Result, Tape, TrainState, Trainer, Var,
};

struct Line(Linear);

impl Model for Line {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.0.forward(tape, &tape.input(batch.input::<f32>(0)?))
    }
}

#[derive(Clone)]
struct Points([f32; 4]);

impl HostBatch for Points {
    fn len(&self) -> usize {
        2
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        HostInputs::new().with(&self.0, [2, 2])?.with(&[0u32, 1], [2])
    }
}

const GOOD: Points = Points([1.0, 0.0, 0.0, 1.0]);

/// Passes on a trainer that has made an update, with non-finite gradients if requested.
fn with_trainer(bad_gradients: bool, look: impl FnOnce(&mut Trainer<'_, Line>)) {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let mut spec = ParameterSpec::builder();
    let model = Line(Linear::new(spec.at("line"), 2, 2));
    let state = TrainState::new(&device, model, &spec.build().unwrap(), 7, AdamW::default()).unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let mut trainer = Trainer::eager(&mut arena, state).non_finite(NonFinite::Allow);
    trainer.fit([Ok(vec![GOOD])]).unwrap();
    if bad_gradients {
        trainer.accumulate(&[Points([f32::NAN; 4])]).unwrap();
    }
    look(&mut trainer.non_finite(NonFinite::Reject));
}

#[track_caller]
fn refused(result: Result<f64>, expected: &str) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::NotFinite { what: Quantity::EvaluationLoss, update: Some(1 | 2), .. }), "{error:?}");
    let message = error.to_string();
    assert!(
        message.contains("the loss of an evaluation is not finite") && message.starts_with("after update "),
        "{message}"
    );
    assert!(message.contains(&format!("the first tensor concerned: {expected}. ")), "{message}");
}

/// The last batch's gradients did not affect the loss, so the error does not name them.
#[test]
fn gradients_are_not_blamed() {
    for bad_gradients in [false, true] {
        // Finite inputs and losses, whose sum is not finite for one of the two signs.
        with_trainer(bad_gradients, |trainer| {
            let expected = "none, all weights are finite: a sum of finite numbers overflowed";
            let large = [f32::MAX, f32::MAX, -f32::MAX, -f32::MAX];
            let points = [Points(large), Points(large.map(|value| -value))];
            let mut lost = points.iter().map(|points| trainer.evaluate(points));
            refused(lost.find(Result::is_err).unwrap(), expected);
            assert!(trainer.evaluate(&GOOD).is_ok(), "the trainer must work after the error");
        });
    }
}

#[test]
fn inputs_are_named_by_their_sample() {
    for bad_gradients in [false, true] {
        with_trainer(bad_gradients, |trainer| {
            let bad = Points([1.0, 0.0, f32::INFINITY, 1.0]);
            refused(trainer.evaluate(&bad), "input 0 of the batch, sample 1");
            let classes = trainer.evaluate_classes(&bad).map(|(loss, _)| loss);
            refused(classes, "input 0 of the batch, sample 1");
        });
    }
}

/// The error names the weights that an update has made non-finite, and not the gradients that
/// caused it.
#[test]
fn weights_are_named() {
    with_trainer(true, |trainer| {
        trainer.apply().unwrap_err();
        refused(trainer.evaluate(&GOOD), "`line.weight`");
    });
}
