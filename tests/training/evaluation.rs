//! An evaluation that is not finite: its error is about the evaluation, and names what went into
//! its loss.

#![forbid(unsafe_code)]

use stepscope::nn::Linear;
use stepscope::{
    AdamWConfig, Arena, Batch, Capacity, Device, DeviceKind, EpochProgress, Error, Inputs, Layout, Learner, Model,
    Numbers, Quantity, Result, Samples, Tape, Trainer, Var,
};

struct Line(Linear);

impl Model for Line {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &Batch<'s>) -> Result<Var<'s>> {
        self.0.forward(tape, &tape.input(batch.input::<f32>(0)?))
    }
}

#[derive(Clone)]
struct Points([f32; 4]);

impl Samples for Points {
    fn len(&self) -> usize {
        2
    }

    fn inputs(&self) -> Result<Inputs<'_>> {
        Inputs::new().with(&self.0, [2, 2])?.with(&[0_u32, 1], [2])
    }
}

const GOOD: Points = Points([1.0, 0.0, 0.0, 1.0]);

/// A trainer that has made an update, and whose gradients are not finite where asked.
fn with_trainer(bad_gradients: bool, look: impl FnOnce(&mut Trainer<'_, Line>)) {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let mut layout = Layout::builder();
    let model = Line(Linear::new(layout.names().at("line"), 2, 2));
    let learner = Learner::new(&device, model, &layout.build().unwrap(), 7, AdamWConfig::default()).unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let mut trainer = Trainer::eager(&mut arena, learner).numbers(Numbers::Any);
    trainer.epoch([Ok(vec![GOOD])], &mut EpochProgress::default(), &mut ()).unwrap();
    if bad_gradients {
        trainer.accumulate(&[Points([f32::NAN; 4])]).unwrap();
    }
    look(&mut trainer.numbers(Numbers::Finite));
}

#[track_caller]
fn refused(result: Result<(f64, ())>, expected: &str) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::NotFinite { what: Quantity::EvaluationLoss, update: Some(1 | 2), .. }), "{error:?}");
    let told = error.to_string();
    assert!(told.contains("the loss of an evaluation is not finite") && told.starts_with("after update "), "{told}");
    assert!(told.contains(&format!("the first tensor concerned: {expected}. ")), "{told}");
}

/// The gradients of the last batch did not go into the loss: they are not named.
#[test]
fn gradients_are_not_blamed() {
    for bad_gradients in [false, true] {
        // Finite inputs and losses, whose sum is not finite for one of the two signs.
        with_trainer(bad_gradients, |trainer| {
            let told = "none, all weights are finite: a sum of finite numbers was too large";
            let large = [f32::MAX, f32::MAX, -f32::MAX, -f32::MAX];
            let points = [Points(large), Points(large.map(|value| -value))];
            let mut lost = points.iter().map(|points| trainer.evaluate(points, |_, _| Ok(())));
            refused(lost.find(Result::is_err).unwrap(), told);
            assert!(trainer.evaluate(&GOOD, |_, _| Ok(())).is_ok(), "and the trainer goes on");
        });
    }
}

#[test]
fn inputs_are_named_by_their_sample() {
    for bad_gradients in [false, true] {
        with_trainer(bad_gradients, |trainer| {
            let bad = Points([1.0, 0.0, f32::INFINITY, 1.0]);
            refused(trainer.evaluate(&bad, |_, _| Ok(())), "input 0 of the batch, sample 1");
            let classes = trainer.evaluate_classes(&bad, &[0, 1]).map(|(loss, _)| (loss, ()));
            refused(classes, "input 0 of the batch, sample 1");
        });
    }
}

/// The weights that an update has spoilt, and not the gradients that did it.
#[test]
fn weights_are_named() {
    with_trainer(true, |trainer| {
        trainer.apply().unwrap_err();
        refused(trainer.evaluate(&GOOD, |_, _| Ok(())), "`line.weight`");
    });
}
