//! The trainer: the same weights however it runs, is observed or interrupted, and errors that reach
//! the caller.

#![forbid(unsafe_code)]

mod dropout;
mod non_finite;

use crate::support::{Random, on_each_device};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::error::Quantity;
use stepscope::nn::{Linear, Mlp};
use stepscope::ops;
use stepscope::optim::Schedule;
use stepscope::prelude::*;
use stepscope::report::Cause;
use stepscope::train::{Ended, Observer, Update};
use stepscope::upload::NonFinite;

const INPUTS: usize = 12;
const CLASSES: usize = 3;
/// The batches of an epoch, the last of which is short.
const BATCHES: [usize; 5] = [8, 8, 8, 8, 3];

struct Classifier {
    mlp: Mlp,
    head: Linear,
}

impl Classifier {
    fn state(device: &Device) -> TrainState<Self> {
        let mut spec = ParameterSpec::builder();
        let mlp = Mlp::new(spec.at("mlp"), INPUTS, 64, 64);
        let model = Self { mlp, head: Linear::new(spec.at("head"), 64, CLASSES) };
        let schedule = Schedule::cosine(2, 10, 0.1);
        let config = AdamW { learning_rate: 0.02, clip: Some(0.5), schedule, ..AdamW::default() };
        let head = model.head.weight;
        TrainState::new(device, model, &spec.build().unwrap(), 7, config).unwrap().with_monitored(head)
    }
}

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.head.forward(tape, &self.mlp.forward(tape, &tape.input(batch.input::<f32>(0)?))?)
    }
}

/// Points in three clouds.
type Points = crate::support::points::Points<INPUTS>;

/// Points of which two are one sample.
struct Pairs(Points);

impl HostBatch for Pairs {
    fn len(&self) -> usize {
        self.0.len() / 2
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        self.0.inputs()
    }
}

/// Returns an epoch's batches in parts of at most this many samples.
fn batches(epoch: u64, part: usize) -> Vec<Vec<Points>> {
    let mut random = Random::new(epoch);
    let mut batch = |samples: usize| {
        let labels = random.belows(samples, CLASSES as u32);
        let near = |label: u32, random: &mut Random| random.normals(INPUTS).into_iter().map(move |x| x + label as f32);
        let x: Vec<f32> = labels.iter().flat_map(|&label| near(label, &mut random)).collect();
        Points { x, labels }.in_parts(part)
    };
    BATCHES.map(&mut batch).into()
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap()
}

fn trainer<'a>(arena: &'a mut Arena, captured: bool, part: usize) -> Trainer<'a, Classifier> {
    let state = Classifier::state(arena.device());
    match captured {
        true => Trainer::captured(arena, state, &batches(0, part)[0][0]).unwrap(),
        false => Trainer::eager(arena, state),
    }
}

/// The observations of an epoch, and the update after which the stop flag is set.
#[derive(Default)]
struct Recorder<'f> {
    updates: Vec<Update>,
    stop: Option<(u64, &'f AtomicBool)>,
}

impl Observer for Recorder<'_> {
    fn updated(&mut self, update: &Update, progress: &EpochProgress, _: &Arena) -> Result<()> {
        self.updates.push(update.clone());
        if let Some((after, flag)) = self.stop {
            flag.store(progress.updates == after, Ordering::Relaxed);
        }
        Ok(())
    }

    fn notes(&self) -> Vec<(&str, String)> {
        vec![("heard", self.updates.len().to_string())]
    }
}

fn epoch(trainer: &mut Trainer<'_, Classifier>, part: usize, progress: &mut EpochProgress) -> (Vec<Update>, Ended) {
    let mut recorder = Recorder::default();
    let left = batches(1, part).into_iter().skip(progress.updates as usize).map(Ok);
    let ended = trainer.fit_with(left, progress, &mut recorder).unwrap();
    (recorder.updates, ended)
}

fn sha256(trainer: &Trainer<'_, Classifier>) -> String {
    trainer.state().parameters.sha256().unwrap()
}

/// Returns the weights after an undisturbed epoch.
fn undisturbed(device: &Device, part: usize) -> (String, Vec<Update>) {
    let mut arena = arena(device);
    let mut trainer = trainer(&mut arena, false, part);
    let (updates, ended) = epoch(&mut trainer, part, &mut EpochProgress::default());
    assert_eq!((ended, updates.len()), (Ended::Finished, BATCHES.len()));
    (sha256(&trainer), updates)
}

on_each_device! {
    also late;

    fn training_modes_give_same_bits(device: &Device) {
        for part in [8, 3] {
            let (expected, expected_updates) = undisturbed(device, part);
            assert!(expected_updates[4].loss < 0.8 * expected_updates[0].loss, "the loss must fall: {expected_updates:?}");
            let mut arena = arena(device);
            let mut progress = EpochProgress::default();
            let mut ahead = trainer(&mut arena, true, part);
            let (updates, _) = epoch(&mut ahead, part, &mut progress);
            assert_eq!((sha256(&ahead), updates), (expected.clone(), expected_updates.clone()), "parts of {part}");
            assert_eq!((progress.updates, progress.samples), (5, 35));
            let losses = expected_updates.iter().map(|update| update.loss * update.samples as f64);
            assert_eq!(progress.loss_sum, losses.sum::<f64>());
            assert_eq!(ahead.capture_report().unwrap().replays, if part == 8 { 5 } else { 13 });
            drop(ahead);

            // One at a time, and with the gradients read before each update.
            let mut arena = self::arena(device);
            let mut single = trainer(&mut arena, true, part);
            let updates: Vec<Update> = batches(1, part).iter().map(|batch| single.update(batch).unwrap()).collect();
            assert_eq!((sha256(&single), updates), (expected.clone(), expected_updates.clone()));
            drop(single);
            let mut arena = self::arena(device);
            let mut looked_at = trainer(&mut arena, true, part);
            for (batch, expected) in batches(1, part).iter().zip(&expected_updates) {
                let before = sha256(&looked_at);
                let only_accumulated = Update { gradient_l2: None, ..expected.clone() };
                assert_eq!(looked_at.accumulate(batch).unwrap(), only_accumulated);
                assert_eq!(sha256(&looked_at), before, "`accumulate` must change only gradients");
                looked_at.apply().unwrap();
                assert!(matches!(looked_at.apply(), Err(Error::Misuse { op: "apply", .. })));
            }
            assert_eq!(sha256(&looked_at), expected);
        }
    }

    fn resumed_training_matches_undisturbed(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let (expected, all) = undisturbed(device, 3);
        for (captured, after) in [(false, 1), (true, 1), (false, 4), (true, 3), (true, 5)] {
            let path = folder.path().join(format!("{captured}-{after}.safetensors"));
            let (flag, mut progress) = (AtomicBool::new(false), EpochProgress::default());
            let mut recorder = Recorder { stop: Some((after, &flag)), ..Recorder::default() };
            let mut arena = arena(device);
            let mut first = trainer(&mut arena, captured, 3).checkpoint(&path, None).stop_when(&flag);
            let ended = first.fit_with(batches(1, 3).into_iter().map(Ok), &mut progress, &mut recorder).unwrap();
            // The flag is read when the next update is queued, which is then the last.
            let stopped = (after + 1).min(5);
            assert_eq!(ended, if after < 5 { Ended::Stopped } else { Ended::Finished }, "{captured} {after}");
            assert_eq!((progress.updates, recorder.updates.len() as u64), (stopped, stopped));
            if ended == Ended::Finished {
                assert!(!path.exists(), "a checkpoint was written without a request");
                first.save(&progress, &recorder.notes()).unwrap();
            }
            drop(first);

            let checkpoint = Checkpoint::load(&path).unwrap();
            assert_eq!(checkpoint.note("heard").unwrap(), stopped.to_string());
            assert_eq!(EpochProgress::of(&checkpoint).unwrap(), progress);
            let mut arena = self::arena(device);
            let mut second = trainer(&mut arena, captured, 3);
            let mut restored = second.restore(&checkpoint).unwrap();
            let (rest, _) = epoch(&mut second, 3, &mut restored);
            assert_eq!(rest, all[stopped as usize..]);
            assert_eq!(sha256(&second), expected, "captured {captured}, stopped after {stopped}");
            assert_eq!(restored.mean_loss(), all.iter().map(|update| update.loss * update.samples as f64).sum::<f64>() / 35.0);
        }
    }

    fn checkpoints_follow_their_interval(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut arena = arena(device);
        let mut trainer = trainer(&mut arena, true, 8).checkpoint(&path, Some(2));
        let mut seen = Vec::new();
        let taken = batches(1, 8).into_iter().map(|batch| {
            // The checkpoint that exists when the trainer requests the next batch.
            seen.push(Checkpoint::load(&path).ok().map(|checkpoint| EpochProgress::of(&checkpoint).unwrap().updates));
            Ok(batch)
        });
        trainer.fit(taken).unwrap();
        assert_eq!(seen, [None, None, Some(2), Some(2), Some(4)]);
    }

    fn evaluation_is_read_only_and_means(device: &Device) {
        let mut arena = arena(device);
        let mut trainer = trainer(&mut arena, true, 8);
        let before = sha256(&trainer);
        let [whole] = batches(1, 8)[0].clone().try_into().unwrap();
        let (loss, classes) = trainer
            .evaluate_with(&whole, |step, logits| step.read(&ops::argmax_columns(step, logits.value())?))
            .unwrap();
        assert_eq!((sha256(&trainer), classes.len()), (before, 8));
        let mean = trainer.update(&[whole]).unwrap().loss;
        assert!((loss - mean).abs() < 1e-6, "the evaluation has {loss}, but the update {mean}");
    }

    /// The result matches a manual count. A batch with more labels than samples is refused.
    fn class_evaluation_counts_correct_answers(device: &Device) {
        let mut arena = arena(device);
        let mut trainer = trainer(&mut arena, true, 8);
        let [mut whole] = batches(1, 8)[0].clone().try_into().unwrap();
        let (loss, guesses) = trainer
            .evaluate_with(&whole, |step, logits| step.read(&ops::argmax_columns(step, logits.value())?))
            .unwrap();
        whole.labels = guesses.iter().zip(0..).map(|(&guess, at)| if at < 5 { guess } else { (guess + 1) % CLASSES as u32 }).collect();
        let (other, right) = trainer.evaluate_classes(&whole).unwrap();
        assert!(right == 5 && other != loss, "{right} of 8 right, {other}");
        let error = trainer.evaluate_classes(&Pairs(whole)).unwrap_err().to_string();
        assert!(error.ends_with("a label and a row of the output for each of 4 samples, got 8 labels and 8 rows"), "{error}");
    }

    /// Evaluation gives the logits of a manual forward pass, in the precision of training.
    fn evaluation_uses_the_training_precision(device: &Device) {
        let x = Random::new(3).normals(32 * INPUTS);
        let points = Points { x, labels: vec![1; 32] };
        let mut seen = Vec::new();
        for precision in ops::Precision::ALL {
            let mut arena = arena(device);
            let state = Classifier::state(device).with_precision(precision);
            let by_hand = arena.step(|step| {
                step.set_precision(precision);
                let batch = step.upload_inputs(&points.inputs()?)?;
                let tape = Tape::new(step, &state.parameters).evaluating();
                step.read(state.model.forward(&tape, &batch)?.value())
            });
            let mut trainer = Trainer::captured(&mut arena, state, &batches(0, 8)[0][0]).unwrap();
            let (_, logits) = trainer.evaluate_with(&points, |step, logits| step.read(logits.value())).unwrap();
            assert_eq!(logits, by_hand.unwrap(), "{precision}");
            assert!(!seen.contains(&logits), "{precision} has the bits of another precision");
            seen.push(logits);
        }
    }

    fn batch_errors_reach_the_caller(device: &Device) {
        let mut arena = arena(device);
        let mut trainer = trainer(&mut arena, false, 8);
        for empty in [vec![], vec![Points { x: vec![], labels: vec![] }]] {
            let error = trainer.update(&empty).unwrap_err().to_string();
            assert!(error.contains("samples in each part"), "{error}");
        }
        let broken = Error::Loader { reason: "the disk is gone".into() };
        let some = batches(1, 8).into_iter().take(2).map(Ok).chain([Err(broken.clone())]);
        let mut progress = EpochProgress::default();
        assert_eq!(trainer.fit_with(some, &mut progress, &mut ()).unwrap_err(), broken);
        assert_eq!(progress.updates, 2, "the update queued before the error must be counted");
    }
}

/// A full arena and a missed deadline are reported as everywhere: with the arena's report, and as
/// the loss of the device.
#[test]
fn arena_and_deadline_errors_pass_through() {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let mut small = Arena::builder(&device).capacity(Capacity::Bytes(4096)).build().unwrap();
    let mut cramped = Trainer::eager(&mut small, Classifier::state(&device));
    let error = cramped.update(&batches(1, 8)[0]).unwrap_err();
    assert!(matches!(&error, Error::ArenaFull { cause: Cause::WorkingSetLargerThanArena, .. }), "{error}");

    // A busy machine may need longer for each call than any fixed deadline.
    let start = Instant::now();
    let mut sound = arena(&device);
    trainer(&mut sound, true, 8).update(&batches(1, 8)[0]).unwrap();
    let deadline = (50 * start.elapsed()).max(Duration::from_millis(50));
    for (call, fault) in [(Call::PollFence, Fault::Never), (Call::QueueDownload, Fault::Spoil)] {
        let plan = FaultPlan::new();
        let device = Device::builder(DeviceKind::Emulated).deadline(deadline).layer(plan.clone()).open().unwrap();
        let mut arena = arena(&device);
        let mut trainer = trainer(&mut arena, true, 8);
        trainer.update(&batches(1, 8)[0]).unwrap();
        let _ = plan.clone().on(call, plan.count(call) + 1, fault);
        let error = trainer.update(&batches(1, 8)[1]).unwrap_err();
        match fault {
            Fault::Never => assert!(matches!(error, Error::Timeout { call: "download", .. }), "{error}"),
            _ => assert!(matches!(error, Error::Driver { fatal: true, .. }), "{error}"),
        }
        assert!(device.lost().is_some());
        let later = trainer.update(&batches(1, 8)[2]).unwrap_err();
        assert!(matches!(later, Error::DeviceLost { .. }), "{later}");
    }
}

/// A copy that fails and leaves the device usable fails the update, and leaks no memory.
#[test]
fn failed_readbacks_leak_nothing() {
    let plan = FaultPlan::new();
    let device = Device::builder(DeviceKind::Emulated).layer(plan.clone()).open().unwrap();
    {
        let mut arena = arena(&device);
        let mut trainer = trainer(&mut arena, true, 8);
        let _ = plan.clone().on(Call::QueueDownload, 2, Fault::Fail);
        assert!(trainer.update(&batches(1, 8)[0]).is_err());
        trainer.update(&batches(1, 8)[1]).unwrap();
    }
    drop(device);
    let count = |call| plan.count(call);
    assert_eq!(count(Call::FreePinned), count(Call::AllocatePinned));
    assert_eq!(count(Call::DestroyFence), count(Call::CreateFence));
    assert_eq!(count(Call::Free), count(Call::Allocate));
}

/// The next update has been queued when the observer receives one, and no other. So the device has
/// work while the host observes.
#[test]
fn exactly_one_update_runs_ahead() {
    struct Ahead(FaultPlan, Vec<u64>);

    impl Observer for Ahead {
        fn updated(&mut self, _: &Update, progress: &EpochProgress, _: &Arena) -> Result<()> {
            self.1.push(self.0.count(Call::Replay) - progress.updates);
            Ok(())
        }
    }

    let plan = FaultPlan::new();
    let device = Device::builder(DeviceKind::Emulated).layer(plan.clone()).open().unwrap();
    let mut arena = arena(&device);
    let mut trainer = trainer(&mut arena, true, 8);
    let mut ahead = Ahead(plan, Vec::new());
    trainer.fit_with(batches(1, 8).into_iter().map(Ok), &mut EpochProgress::default(), &mut ahead).unwrap();
    assert_eq!(ahead.1, [1, 1, 1, 1, 0]);
}

on_each_device! {
    /// A model that was built over another spec than its weights.
    fn model_of_another_spec_is_refused(device: &Device) {
        let foreign = Classifier::state(device).model;
        let mut memory = arena(device);
        let mut state = Classifier::state(device);
        state.model = foreign;
        let error = Trainer::captured(&mut memory, state, &batches(0, 8)[0][0]).err().unwrap();
        assert!(matches!(error, Error::Misuse { op: "mlp_gelu", .. }), "{error}");
        let mut state = Classifier::state(device);
        state.gradients = Classifier::state(device).gradients;
        let error = Trainer::eager(&mut memory, state).update(&batches(0, 8)[0]).unwrap_err();
        assert!(matches!(error, Error::Misuse { op: "backward", .. }), "{error}");
    }
}
