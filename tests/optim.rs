//! The optimiser's protocol: each update is set up once and made once, eagerly or by a replay.

#![forbid(unsafe_code)]

mod support;

use stepscope::*;
use support::on_each_device;

const LEN: usize = 8;

/// One parameter, its gradient and an optimiser.
struct Model {
    w: Parameter,
    weights: Parameters,
    gradients: Gradients,
    optimizer: AdamW,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self::with(device, AdamWConfig { learning_rate: 0.1, ..AdamWConfig::default() }).unwrap()
    }

    fn with(device: &Device, config: AdamWConfig) -> Result<Self> {
        let mut layout = Layout::builder();
        let w = layout.add("w", [LEN], Initializer::ONE);
        let weights = Parameters::new(device, &layout.build()?, 7)?;
        let (gradients, optimizer) = (Gradients::zeros(&weights)?, AdamW::new(&weights, config)?);
        Ok(Self { w, weights, gradients, optimizer })
    }

    /// An update by gradients that are all the same.
    fn apply(&mut self, step: &Step<'_>, gradient: f32) -> Result<()> {
        ops::fill_into(step, &mut self.gradients.lend_mut(step, self.w)?, gradient)?;
        self.optimizer.apply(step, &mut self.weights, &self.gradients).map(drop)
    }

    /// The weights, and the updates made.
    fn state(&self) -> (Vec<f32>, u64) {
        (self.weights.read(self.w).unwrap(), self.optimizer.updates())
    }
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

#[track_caller]
fn refused<T>(result: Result<T>) {
    let error = result.err().expect("an update that was not set up");
    assert!(matches!(&error, Error::Misuse { op: "adamw", .. }), "{error}");
}

/// Weights and updates after so many that were made as they should be.
fn after(device: &Device, updates: usize) -> (Vec<f32>, u64) {
    let (mut model, mut arena) = (Model::new(device), arena(device));
    for _ in 0..updates {
        model.optimizer.advance().unwrap();
        arena.step(|step| model.apply(step, 5.0)).unwrap();
    }
    model.state()
}

on_each_device! {
    fn an_update_is_set_up_and_made_once(device: &Device) {
        let (mut model, mut arena) = (Model::new(device), arena(device));
        for made in 0..3 {
            let before = model.state();
            assert_eq!(before, after(device, made));
            refused(arena.step(|step| model.apply(step, 5.0)));
            assert_eq!(model.state(), before, "nothing ran");
            // Called again, it sets up the same update.
            for _ in 0..=made {
                assert_eq!(model.optimizer.advance().unwrap(), made as u64 + 1);
            }
            // Neither a step that is measured nor one that fails makes it.
            arena.measure(|step| (0..2).try_for_each(|_| model.apply(step, 5.0))).unwrap();
            let full = arena.step(|step| {
                while step.empty::<f32>([1 << 10]).is_ok() {}
                while step.empty::<f32>([1]).is_ok() {}
                model.apply(step, 5.0)
            });
            assert!(matches!(full, Err(Error::ArenaFull { .. })), "{full:?}");
            assert_eq!(model.state(), before);
            arena.step(|step| model.apply(step, 5.0)).unwrap();
        }
        assert_eq!(model.state(), after(device, 3));
    }

    fn a_replay_makes_the_update_that_was_set_up(device: &Device) {
        let mut arena = arena(device);
        let mut captured = arena.capture(Model::new(device), &Inputs::new(), |step, model, _| model.apply(step, 5.0)).unwrap();
        for made in 0..3 {
            refused(captured.replay(&Inputs::new()));
            refused(captured.repeat());
            // Another recording, whose closure runs twice, makes none either.
            refused(captured.replay(&Inputs::new().variant(made as u64 + 1)));
            assert_eq!(captured.state().state(), after(device, made), "nothing ran");
            assert_eq!(captured.report().replays, made as u64);
            captured.state_mut().optimizer.advance().unwrap();
            match made {
                0 => captured.replay(&Inputs::new()).map(drop).unwrap(),
                1 => captured.repeat().map(drop).unwrap(),
                _ => captured.replay(&Inputs::new().variant(9)).map(drop).unwrap(),
            }
        }
        // Eager and replayed updates are counted together.
        let mut model = captured.into_state();
        refused(arena.step(|step| model.apply(step, 5.0)));
        model.optimizer.advance().unwrap();
        arena.step(|step| model.apply(step, 5.0)).unwrap();
        assert_eq!(model.state(), after(device, 4));
    }

    fn a_recorded_step_makes_one_update_of_an_optimiser(device: &Device) {
        let mut arena = arena(device);
        refused(arena.capture(Model::new(device), &Inputs::new(), |step, model, _| {
            model.apply(step, 5.0)?;
            model.apply(step, 5.0)
        }));
        // Of two optimisers, both must be set up, or none is made.
        let models = [Model::new(device), Model::new(device)];
        let mut captured = arena
            .capture(models, &Inputs::new(), |step, models, _| models.iter_mut().try_for_each(|model| model.apply(step, 5.0)))
            .unwrap();
        for one in [0, 1] {
            captured.state_mut()[one].optimizer.advance().unwrap();
            if one == 0 {
                refused(captured.replay(&Inputs::new()));
                assert_eq!(captured.state()[one].state(), after(device, 0));
            }
        }
        captured.replay(&Inputs::new()).unwrap();
        captured.state().iter().for_each(|model| assert_eq!(model.state(), after(device, 1)));
    }

    /// What was set up for other weights is not made to those that a file gave.
    fn a_restored_optimiser_must_be_set_up_anew(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let (mut model, mut arena) = (Model::new(device), arena(device));
        model.optimizer.advance().unwrap();
        arena.step(|step| model.apply(step, 5.0)).unwrap();
        Checkpoint::save(&path, &model.weights, Some(&model.optimizer), &[]).unwrap();
        model.optimizer.advance().unwrap();
        Checkpoint::load(&path).unwrap().restore(&mut model.weights, Some(&mut model.optimizer)).unwrap();
        refused(arena.step(|step| model.apply(step, 5.0)));
        assert_eq!(model.optimizer.advance().unwrap(), 2);
        arena.step(|step| model.apply(step, 5.0)).unwrap();
        assert_eq!(model.state(), after(device, 2));
    }

    /// A moment may overflow where the weights do not.
    fn moments_that_are_not_finite_are_not_saved(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let (mut model, mut arena) = (Model::new(device), arena(device));
        model.optimizer.advance().unwrap();
        arena.step(|step| model.apply(step, 1e25)).unwrap();
        assert!(model.state().0.iter().all(|weight| weight.is_finite()));
        let (update, what, tensor) = (Some(1), Quantity::OptimizerState, "`adamw.second.w`".to_owned());
        let error = Error::NotFinite { update, what, tensor };
        assert_eq!(Checkpoint::save(&path, &model.weights, Some(&model.optimizer), &[]), Err(error.clone()));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        Checkpoint::save_with(&path, &model.weights, Some(&model.optimizer), &[], Numbers::Any).unwrap();
        let (mut other, checkpoint) = (Model::new(device), Checkpoint::load(&path).unwrap());
        assert_eq!(checkpoint.restore(&mut other.weights, Some(&mut other.optimizer)), Err(error));
        assert_eq!(other.state(), after(device, 0), "all or nothing");
        // The weights alone are sound.
        checkpoint.restore(&mut other.weights, None).unwrap();
        assert_eq!(other.state().0, model.state().0);
    }
}

#[test]
fn a_schedule_out_of_range_is_refused() {
    let device = support::open(DeviceKind::Emulated);
    for floor in [f64::NAN, f64::INFINITY, -0.1, 1.1] {
        let schedule = Schedule::WarmupCosine { warmup: 1, total: 2, floor };
        let error = Model::with(&device, AdamWConfig { schedule, ..AdamWConfig::default() }).err().unwrap();
        assert!(error.to_string().contains("`floor` in [0, 1]"), "{error}");
    }
}
