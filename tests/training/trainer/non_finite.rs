//! Batches with numbers that end training, NaN, infinity and labels of no class: the error names
//! what was found where, and no update uses them.

use super::*;

/// Returns an epoch's batches, one of which is damaged.
fn spoilt(part: usize, number: usize, spoil: impl Fn(&mut Points)) -> Vec<Vec<Points>> {
    let mut batches = batches(1, part);
    batches[number].last_mut().into_iter().for_each(spoil);
    batches
}

on_each_device! {
    /// The error names the update and the sample, however steps run. Nothing is reported or saved
    /// after the update before.
    fn non_finite_batch_ends_training(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        // If parts have 3 samples, the last part begins with sample 6.
        for (captured, part, bad, sample) in [(true, 8, f32::NAN, 1), (false, 8, f32::INFINITY, 1), (true, 3, f32::NAN, 7), (false, 3, -f32::INFINITY, 7)] {
            let batches = spoilt(part, 2, |points| points.x[INPUTS + 5] = bad);
            let expected = Error::NotFinite {
                update: Some(3),
                what: Quantity::Loss,
                tensor: format!("input 0 of the batch, sample {sample}"),
            };
            let mut memory = arena(device);
            let mut training = trainer(&mut memory, captured, part).checkpoint(&path, Some(1));
            let (mut recorder, mut progress) = (Recorder::default(), EpochProgress::default());
            let ended = training.fit_with(batches.clone().into_iter().map(Ok), &mut progress, &mut recorder);
            assert_eq!(ended, Err(expected.clone()));
            assert_eq!((recorder.updates.len(), progress.updates), (2, 2));
            let saved = training.save(&progress, &[]).unwrap_err();
            assert!(matches!(saved, Error::NotFinite { what: Quantity::Weight, .. }), "{saved}");

            // The checkpoint is the one before, and training resumes from it.
            let checkpoint = Checkpoint::load(&path).unwrap();
            let mut progress = training.restore(&checkpoint).unwrap();
            assert_eq!(progress.updates, 2);
            let rest = self::batches(1, part).into_iter().skip(2).map(Ok);
            training.fit_with(rest, &mut progress, &mut ()).unwrap();
            assert_eq!(sha256(&training), undisturbed(device, part).0);

            // One by one.
            assert_eq!(training.accumulate(&batches[2]).unwrap_err().to_string(), expected.to_string().replace("update 3", "update 6"));
            assert_eq!(sha256(&training), undisturbed(device, part).0, "a refused update changed the weights");
            assert!(matches!(training.update(&batches[2]), Err(Error::NotFinite { update: Some(6), what: Quantity::Loss, .. })));
            let lost = training.update(&self::batches(1, part)[0]).unwrap_err();
            let Error::NotFinite { update: Some(7), tensor, .. } = &lost else { panic!("{lost}") };
            assert_eq!(tensor, "the gradient of `mlp.up.weight`");
            std::fs::remove_file(&path).unwrap();
        }
    }

    /// The next update is already queued, so only its results can be examined, and the error
    /// states this.
    fn diverging_weights_end_training(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        for captured in [false, true] {
            let mut state = Classifier::state(device);
            let config = AdamW { learning_rate: 1e30, ..AdamW::default() };
            state.optimizer = Optimizer::new(&state.parameters, config).unwrap();
            let mut memory = arena(device);
            let training = match captured {
                true => Trainer::captured(&mut memory, state, &batches(0, 8)[0][0]).unwrap(),
                false => Trainer::eager(&mut memory, state),
            };
            let mut training = training.checkpoint(&path, Some(1));
            let mut recorder = Recorder::default();
            let ended = training.fit_with(batches(1, 8).into_iter().map(Ok), &mut EpochProgress::default(), &mut recorder);
            let Err(Error::NotFinite { update: Some(update), tensor, .. }) = &ended else { panic!("{ended:?}") };
            assert!(*update > 1 && recorder.updates.len() as u64 == update - 1, "{ended:?}");
            assert!(tensor.contains("gradient of `mlp."), "{tensor}");
            // The checkpoints saved on the way can be restored.
            Checkpoint::load(&path).unwrap().restore(&mut Parameters::new(device, training.state().parameters.spec(), 0).unwrap(), None).unwrap();
        }
    }

    /// The last update of an epoch may damage the weights: its loss and gradients are from before.
    fn weights_are_checked_after_an_epoch(device: &Device) {
        for captured in [false, true] {
            let mut state = Classifier::state(device);
            // The decay, 1 - rate times decay, overflows.
            let config = AdamW { learning_rate: 1e38, weight_decay: 1e3, ..AdamW::default() };
            state.optimizer = Optimizer::new(&state.parameters, config).unwrap();
            let mut memory = arena(device);
            let mut training = match captured {
                true => Trainer::captured(&mut memory, state, &batches(0, 8)[0][0]).unwrap(),
                false => Trainer::eager(&mut memory, state),
            };
            let one = batches(1, 8).into_iter().take(1).map(Ok);
            let tensor = "`mlp.up.weight`".to_owned();
            let expected = Error::NotFinite { update: Some(1), what: Quantity::Weight, tensor };
            assert_eq!(training.fit(one), Err(expected));
            // A later evaluation reports it, too.
            let error = training.evaluate(&batches(1, 8)[0][0]).unwrap_err();
            let words = "after update 1: the loss of an evaluation is not finite; the first tensor concerned: `mlp.up.weight`";
            assert!(error.to_string().starts_with(words), "{error}");
        }
    }

    /// Finite gradients whose squares overflow, eager, captured and in two calls.
    fn overflowing_norm_ends_training(device: &Device) {
        struct Steep(Classifier);

        impl Model for Steep {
            fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
                self.0.forward(tape, batch)
            }

            fn loss<'s>(&self, tape: &Tape<'_, 's>, output: &Var<'s>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
                let labels = batch.indices(1)?;
                let rules = ops::LabelRules::default().weighted(1e30 / labels.shape().elements() as f32);
                tape.cross_entropy_by(output, labels, rules)
            }
        }

        for captured in [false, true] {
            let state = Classifier::state(device).map_model(Steep);
            let (mut memory, batch) = (arena(device), batches(1, 8).swap_remove(0));
            let mut training = match captured {
                true => Trainer::captured(&mut memory, state, &batch[0]).unwrap(),
                false => Trainer::eager(&mut memory, state),
            };
            let check = |update, ended: Result<()>| {
                let Err(Error::NotFinite { update: Some(found), what: Quantity::GradientNorm, tensor }) = &ended else {
                    panic!("{ended:?}")
                };
                assert!(*found == update && tensor.contains("all gradients and weights are finite"), "{ended:?}");
            };
            check(1, training.update(&batch).map(drop));
            training.accumulate(&batch).unwrap();
            check(2, training.apply());
            // `NonFinite::Allow` accepts it.
            training.non_finite(NonFinite::Allow).update(&batch).unwrap();
        }
    }

    /// Clipping by an infinite norm makes the gradients zero. So the update queued after it has a
    /// finite loss again, which must not be reported.
    fn no_reports_after_non_finite_update(device: &Device) {
        for captured in [false, true] {
            let batches = spoilt(8, 2, |points| points.x[..INPUTS].fill(1e25));
            let mut memory = arena(device);
            let mut training = trainer(&mut memory, captured, 8);
            let (mut recorder, mut progress) = (Recorder::default(), EpochProgress::default());
            let ended = training.fit_with(batches.into_iter().map(Ok), &mut progress, &mut recorder);
            let Err(Error::NotFinite { update: Some(3), what: Quantity::GradientNorm, tensor }) = &ended else { panic!("{ended:?}") };
            assert!(tensor.contains("found after update 4"), "{tensor}");
            assert_eq!((recorder.updates.len(), progress.updates), (2, 2));
            training.update(&self::batches(1, 8)[0]).unwrap();
        }
    }

    fn non_finite_numbers_can_be_allowed(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        for captured in [false, true] {
            let batches = spoilt(8, 2, |points| points.x[0] = f32::NAN);
            let mut memory = arena(device);
            let mut training = trainer(&mut memory, captured, 8).checkpoint(&path, None).non_finite(NonFinite::Allow);
            let mut progress = EpochProgress::default();
            assert_eq!(training.fit_with(batches.into_iter().map(Ok), &mut progress, &mut ()), Ok(Ended::Finished));
            assert!(progress.updates == 5 && progress.loss_sum.is_nan());
            training.save(&progress, &[]).unwrap();
            let checkpoint = Checkpoint::load(&path).unwrap();
            assert_eq!(training.restore(&checkpoint).unwrap().updates, 5);
            let mut strict = training.non_finite(NonFinite::Reject);
            let before = sha256(&strict);
            let refused = strict.restore(&checkpoint).unwrap_err();
            assert!(matches!(refused, Error::NotFinite { update: Some(5), what: Quantity::Weight, .. }), "{refused}");
            assert_eq!(sha256(&strict), before);
        }
    }

    /// An invalid label is named by its place in the whole batch, before it is trained on.
    fn invalid_label_names_its_sample(device: &Device) {
        for (captured, part, sample) in [(true, 8, 4), (false, 8, 4), (true, 3, 7), (false, 3, 7)] {
            let within = sample % part;
            let batches = spoilt(part, 1, |points| points.labels[within] = CLASSES as u32);
            let expected = Error::Label { sample, label: CLASSES as u32, classes: CLASSES };
            let mut memory = arena(device);
            let mut training = trainer(&mut memory, captured, part);
            let mut progress = EpochProgress::default();
            let ended = training.fit_with(batches.clone().into_iter().map(Ok), &mut progress, &mut ());
            assert_eq!((ended, progress.updates), (Err(expected.clone()), 1));
            assert_eq!(training.accumulate(&batches[1]).unwrap_err(), expected);
            // Gradients of a part of a batch are not applied; those of a whole one are applied
            // once.
            let before = sha256(&training);
            let apply = |training: &mut Trainer<'_, Classifier>| training.apply().map_err(|error| error.to_string());
            assert!(apply(&mut training).unwrap_err().starts_with("apply: expected a successful `accumulate`"));
            assert_eq!(sha256(&training), before);
            let last = batches[1].last().unwrap();
            assert_eq!(training.evaluate(last).unwrap_err(), Error::Label { sample: within, label: CLASSES as u32, classes: CLASSES });
            // No weight has changed, and the update is not counted: the right batches give the
            // usual weights.
            let rest = self::batches(1, part).into_iter().skip(1).map(Ok);
            training.fit_with(rest, &mut progress, &mut ()).unwrap();
            assert_eq!(sha256(&training), undisturbed(device, part).0);
        }
    }
}
