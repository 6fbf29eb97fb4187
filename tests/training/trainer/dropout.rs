//! Dropout in a trainer: the same weights however it runs or is interrupted, and no dropout in an
//! evaluation.

use crate::support::{Random, on_each_device};
use crate::trainer::{BATCHES, CLASSES, INPUTS, Points, arena};
use std::path::Path;
use stepscope::nn::{Dropout, Linear, Mlp};
use stepscope::prelude::*;

const SEED: u64 = 0x5eed_0000_0001;

/// A block with dropout, optionally recomputed, and a head after a dropout of its own.
#[derive(Clone, Copy)]
struct Net {
    input: Linear,
    mlp: Mlp,
    head: Linear,
    dropout: Dropout,
    recompute: bool,
}

impl Net {
    fn block<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s>> {
        self.dropout.forward(tape, &self.mlp.forward_residual(tape, x, x)?)
    }
}

impl Model for Net {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let mut x = self.input.forward(tape, &tape.input(batch.input::<f32>(0)?))?;
        for _ in 0..2 {
            let net = *self;
            x = match self.recompute {
                true => tape.recompute(x, move |tape, x| net.block(tape, &x))?,
                false => self.block(tape, &x)?,
            };
        }
        self.head.forward(tape, &self.dropout.forward(tape, &x)?)
    }
}

/// Returns a training state without a generator.
fn bare(device: &Device, p: f32, recompute: bool) -> TrainState<Net> {
    let mut spec = ParameterSpec::builder();
    let net = Net {
        input: Linear::new(spec.at("input"), INPUTS, 32),
        mlp: Mlp::new(spec.at("mlp"), 32, 64, 32),
        head: Linear::new(spec.at("head"), 32, CLASSES),
        dropout: Dropout { p },
        recompute,
    };
    let config = AdamW { learning_rate: 0.02, clip: Some(0.5), ..AdamW::default() };
    TrainState::new(device, net, &spec.build().unwrap(), 7, config).unwrap()
}

fn state(device: &Device, recompute: bool) -> TrainState<Net> {
    bare(device, 0.3, recompute).with_dropout(SEED).unwrap()
}

/// Returns an epoch's batches in parts of at most this many samples.
fn batches(part: usize) -> Vec<Vec<Points>> {
    let mut random = Random::new(1);
    let mut batch = |samples: usize| {
        let labels = random.belows(samples, CLASSES as u32);
        let x = random.normals(samples * INPUTS);
        Points { x, labels }.in_parts(part)
    };
    BATCHES.map(&mut batch).into()
}

fn trainer<'a>(arena: &'a mut Arena, captured: bool, part: usize, recompute: bool) -> Trainer<'a, Net> {
    let state = state(arena.device(), recompute);
    match captured {
        true => Trainer::captured(arena, state, &batches(part)[0][0]).unwrap(),
        false => Trainer::eager(arena, state),
    }
}

fn epoch(trainer: &mut Trainer<'_, Net>, part: usize, progress: &mut EpochProgress) -> String {
    let left = batches(part).into_iter().skip(progress.updates as usize).map(Ok);
    trainer.fit_with(left, progress, &mut ()).unwrap();
    sha256(trainer)
}

fn sha256(trainer: &Trainer<'_, Net>) -> String {
    trainer.state().parameters.sha256().unwrap()
}

/// Returns the weights after an undisturbed epoch.
fn undisturbed(device: &Device, part: usize) -> String {
    epoch(&mut trainer(&mut arena(device), false, part, false), part, &mut EpochProgress::default())
}

/// Saves a checkpoint after this many updates.
fn save_behind(device: &Device, captured: bool, updates: usize, path: &Path) {
    let mut arena = arena(device);
    let mut trainer = trainer(&mut arena, captured, 3, captured).checkpoint(path, None);
    let mut progress = EpochProgress::default();
    trainer.fit_with(batches(3).into_iter().take(updates).map(Ok), &mut progress, &mut ()).unwrap();
    trainer.save(&progress, &[]).unwrap();
}

on_each_device! {
    fn capture_and_recompute_keep_bits(device: &Device) {
        for part in [8, 3] {
            let expected = undisturbed(device, part);
            for (captured, recompute) in [(false, true), (true, false), (true, true)] {
                let mut arena = arena(device);
                let mut trainer = trainer(&mut arena, captured, part, recompute);
                let got = epoch(&mut trainer, part, &mut EpochProgress::default());
                assert_eq!(got, expected, "parts of {part}, captured {captured}, recompute {recompute}");
            }
        }
        let mut arena = arena(device);
        let mut plain = Trainer::eager(&mut arena, bare(device, 0.0, false).with_dropout(SEED).unwrap());
        assert_ne!(epoch(&mut plain, 8, &mut EpochProgress::default()), undisturbed(device, 8), "dropout must change the result");
    }

    /// Each update draws its own numbers, and so does each part of it.
    fn updates_and_parts_draw_anew(device: &Device) {
        let mut arena = arena(device);
        let mut state = state(device, false);
        let still = AdamW { learning_rate: 0.0, weight_decay: 0.0, ..AdamW::default() };
        state.optimizer = Optimizer::new(&state.parameters, still).unwrap();
        let mut trainer = Trainer::eager(&mut arena, state);
        let point = batches(1)[0][0].clone();
        let losses: Vec<f64> = (0..5).map(|_| trainer.update(std::slice::from_ref(&point)).unwrap().loss).collect();
        let all_differ = |losses: &[f64]| losses.iter().enumerate().all(|(at, loss)| !losses[..at].contains(loss));
        assert!(all_differ(&losses), "{losses:?}");
        // If two parts drew the same numbers, their mean would be the first one's loss.
        let twice = trainer.update(&[point.clone(), point]).unwrap().loss;
        assert!(all_differ(&[&losses[..], &[twice]].concat()), "{losses:?}, {twice}");
    }

    /// Resumes after any update, from either way of running into the other, whatever seed the
    /// resumed program has.
    fn resuming_keeps_bits(device: &Device) {
        let expected = undisturbed(device, 3);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("net.safetensors");
        for updates in 0..=BATCHES.len() {
            let captured = updates % 2 == 0;
            save_behind(device, captured, updates, &path);
            let mut arena = arena(device);
            let other = bare(device, 0.3, !captured).with_dropout(1).unwrap();
            let mut trainer = match captured {
                true => Trainer::eager(&mut arena, other),
                false => Trainer::captured(&mut arena, other, &batches(3)[0][0]).unwrap(),
            };
            // Its earlier updates do not matter.
            trainer.update(&batches(3)[1]).unwrap();
            let mut progress = trainer.restore(&Checkpoint::load(&path).unwrap()).unwrap();
            assert_eq!(progress.updates, updates as u64);
            assert_eq!(epoch(&mut trainer, 3, &mut progress), expected, "after {updates} updates the result differs");
        }
    }

    /// Evaluations drop and draw nothing, failed updates leave no trace, and observed updates do
    /// not change.
    fn work_between_updates_changes_nothing(device: &Device) {
        let expected = undisturbed(device, 3);
        for captured in [false, true] {
            let mut arena = arena(device);
            let mut trainer = trainer(&mut arena, captured, 3, true);
            for (number, batch) in batches(3).into_iter().enumerate() {
                let evaluate = |trainer: &mut Trainer<'_, Net>| {
                    trainer.evaluate_with(&batch[0], |step, logits| step.read(logits.value())).unwrap()
                };
                let first = evaluate(&mut trainer);
                assert_eq!(evaluate(&mut trainer), first);
                if number % 2 == 0 {
                    let mut wrong = batch.clone();
                    wrong.last_mut().unwrap().labels[0] = 99;
                    assert!(matches!(trainer.update(&wrong), Err(Error::Label { .. })));
                }
                if number % 3 == 0 {
                    trainer.accumulate(&batch).unwrap();
                    trainer.apply().unwrap();
                } else {
                    trainer.update(&batch).unwrap();
                }
            }
            assert_eq!(sha256(&trainer), expected, "captured {captured}");
        }
    }

    /// An evaluation has the bits of a model without dropout.
    fn evaluation_drops_nothing(device: &Device) {
        let batch = batches(8).remove(0);
        let evaluate = |state| {
            let mut arena = arena(device);
            let mut trainer = Trainer::eager(&mut arena, state);
            let (loss, logits) = trainer.evaluate_with(&batch[0], |step, logits| step.read(logits.value())).unwrap();
            assert!(trainer.state().generator.as_ref().is_none_or(|generator| generator.read().unwrap() == (SEED, 0)));
            (loss, logits)
        };
        let dropping = evaluate(state(device, true));
        assert_eq!(dropping, evaluate(bare(device, 0.0, false).with_dropout(SEED).unwrap()));
        assert_eq!(dropping, evaluate(bare(device, 0.3, false)), "an evaluation needs no generator");
    }

    fn dropout_needs_a_generator(device: &Device) {
        let batch = batches(8).remove(0);
        for recompute in [false, true] {
            let mut arena = arena(device);
            let eager = Trainer::eager(&mut arena, bare(device, 0.3, recompute)).update(&batch).map(drop);
            let captured = Trainer::captured(&mut arena, bare(device, 0.3, recompute), &batch[0]).map(drop);
            for outcome in [eager, captured] {
                let error = outcome.expect_err("training without a generator must fail").to_string();
                assert!(["dropout", "TrainState::with_dropout"].iter().all(|tell| error.contains(tell)), "{error}");
            }
        }
    }

    /// A training state with dropout refuses a file without a seed, and nothing is changed.
    fn file_without_seed_is_refused(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("net.safetensors");
        let mut other = arena(device);
        let mut plain = Trainer::eager(&mut other, bare(device, 0.0, false).with_dropout(3).unwrap());
        plain.update(&batches(8)[0]).unwrap();
        let progress = EpochProgress::default().to_string();
        let note = |seed: Option<&str>| {
            let mut notes = vec![("stepscope.epoch", progress.clone())];
            notes.extend(seed.map(|seed| ("stepscope.dropout_seed", seed.to_owned())));
            let TrainState { parameters, optimizer, .. } = plain.state();
            Checkpoint::save(&path, parameters, Some(optimizer), &notes).unwrap();
            Checkpoint::load(&path).unwrap()
        };
        let mut arena = arena(device);
        let mut trainer = Trainer::eager(&mut arena, state(device, false));
        let before = sha256(&trainer);
        for (seed, tells) in [(None, "stepscope.dropout_seed"), (Some("-1"), "`-1`")] {
            let error = trainer.restore(&note(seed)).expect_err("a note without a seed must fail").to_string();
            assert!(error.contains(tells), "{error}");
            assert_eq!((sha256(&trainer), trainer.state().optimizer.updates()), (before.clone(), 0));
        }
        trainer.restore(&note(Some("17"))).unwrap();
        assert_eq!(trainer.state().generator.as_ref().unwrap().seed(), 17);
        assert_ne!(sha256(&trainer), before);
    }
}
