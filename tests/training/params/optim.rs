//! The optimizer's protocol: each update is prepared once and applied once, eagerly or by a replay.

use crate::support::on_each_device;
use stepscope::error::Quantity;
use stepscope::ops;
use stepscope::optim::{ParameterGroup, ParameterGroups, Schedule, Sgd, UpdateArguments, UpdateRule, UpdateTicket};
use stepscope::parameters::Initializer;
use stepscope::prelude::*;
use stepscope::tensor::{OnDevice, Source};
use stepscope::upload::NonFinite;

const LEN: usize = 8;

/// One parameter, its gradient and an optimizer.
struct Model {
    w: Parameter,
    weights: Parameters,
    gradients: Gradients,
    optimizer: Optimizer<AdamW>,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self::with(device, AdamW { learning_rate: 0.1, ..AdamW::default() }).unwrap()
    }

    fn with(device: &Device, config: AdamW) -> Result<Self> {
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [LEN], Initializer::ONE);
        let weights = Parameters::new(device, &spec.build()?, 7)?;
        let (gradients, optimizer) = (Gradients::zeros(&weights)?, Optimizer::new(&weights, config)?);
        Ok(Self { w, weights, gradients, optimizer })
    }

    /// Applies an update with equal gradients.
    fn apply(&mut self, ticket: UpdateTicket, step: &Step<'_>, gradient: f32) -> Result<()> {
        ops::fill_into(step, &mut self.gradients.lend_mut(step, self.w)?, gradient)?;
        self.optimizer.apply(ticket, step, &mut self.weights, &self.gradients)
    }

    /// Returns the weights, and the number of updates made.
    fn state(&self) -> (Vec<f32>, u64) {
        (self.weights.read(self.w).unwrap(), self.optimizer.updates())
    }
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

#[track_caller]
fn refused<T>(result: Result<T>, words: &str) {
    let error = result.err().expect("an update that was not prepared must fail");
    assert!(matches!(&error, Error::Misuse { op: "adamw", .. }) && error.to_string().contains(words), "{error}");
}

/// Words of the error of a replay whose update was not prepared.
const MISSING: &str = "`advance()?.leave_to_replay()` before each replay";

/// Returns the weights and updates after this many correct updates.
fn after(device: &Device, updates: usize) -> (Vec<f32>, u64) {
    let (mut model, mut arena) = (Model::new(device), arena(device));
    for _ in 0..updates {
        let ticket = model.optimizer.advance().unwrap();
        arena.step(|step| model.apply(ticket, step, 5.0)).unwrap();
    }
    model.state()
}

on_each_device! {
    /// One call has the bits of the four calls that it replaces. Earlier gradients do not count.
    fn an_update_in_one_call(device: &Device) {
        fn loss<'s>(step: &EagerStep<'s>, tape: &Tape<'_, 's>, w: Parameter, value: f32) -> Result<Var<'s>> {
            let x = tape.input(step.upload(&[value; 3 * LEN], [3, LEN])?);
            tape.mean(&tape.linear(&x, w, None)?)
        }
        let model = || {
            let mut spec = ParameterSpec::builder();
            let w = spec.add("w", [LEN, 2], Initializer::fan_in(LEN));
            let weights = Parameters::new(device, &spec.build().unwrap(), 7).unwrap();
            let (gradients, sgd) = (Gradients::zeros(&weights).unwrap(), Optimizer::new(&weights, Sgd::default()).unwrap());
            (w, weights, gradients, sgd)
        };
        let mut arena = arena(device);
        let [in_one_call, written_out] = [true, false].map(|in_one_call| {
            let (w, mut weights, mut gradients, mut sgd) = model();
            let losses: Vec<f32> = (1..4).map(|value| {
                let value = value as f32;
                if in_one_call {
                    return sgd.update(&mut arena, &mut weights, &mut gradients, |step, tape| loss(step, tape, w, value)).unwrap();
                }
                let ticket = sgd.advance().unwrap();
                arena.step(|step| {
                    gradients.zero(step)?;
                    let tape = Tape::new(step, &weights);
                    let loss = loss(step, &tape, w, value)?;
                    tape.backward(&loss, &mut gradients)?;
                    sgd.apply(ticket, step, &mut weights, &gradients)?;
                    step.read_scalar(loss.value())
                }).unwrap()
            }).collect();
            assert_eq!(sgd.updates(), 3);
            (losses, weights.read(w).unwrap())
        });
        assert_eq!(in_one_call, written_out);
        assert_ne!(in_one_call.1, model().1.read(model().0).unwrap_or_default(), "the update must change the weights");

        // A non-finite loss is an error that names its place.
        let (w, mut weights, mut gradients, mut sgd) = model();
        let error = sgd.update(&mut arena, &mut weights, &mut gradients, |step, tape| loss(step, tape, w, f32::INFINITY)).unwrap_err();
        let Error::NotFinite { update: Some(1), tensor, .. } = &error else { panic!("{error}") };
        assert!(tensor.contains("`w`"), "{error}");
        // A failing step makes no update.
        let (w, mut weights, mut gradients, mut sgd) = model();
        let before = weights.read(w).unwrap();
        sgd.update(&mut arena, &mut weights, &mut gradients, |_, _| Err(Error::misuse("test", "a loss", "none"))).unwrap_err();
        assert_eq!((weights.read(w).unwrap(), sgd.updates()), (before, 0));
    }

    fn updates_are_prepared_and_applied_once(device: &Device) {
        let (mut model, mut arena) = (Model::new(device), arena(device));
        for made in 0..3 {
            let before = model.state();
            assert_eq!(before, after(device, made));
            // Repeated calls prepare the same update. Only the last ticket is valid.
            for _ in 0..=made {
                let withdrawn = model.optimizer.advance().unwrap();
                let ticket = model.optimizer.advance().unwrap();
                assert_eq!([withdrawn.number(), ticket.number()], [Some(made as u64 + 1); 2]);
                refused(arena.step(|step| model.apply(withdrawn, step, 5.0)), "from before another `advance`");
                assert_eq!(model.state(), before, "a refused update must change nothing");
                // Neither a dry run nor a failing step applies it.
                arena.measure(|step| model.apply(ticket, step, 5.0)).unwrap();
            }
            let ticket = model.optimizer.advance().unwrap();
            let full = arena.step(|step| {
                while step.empty::<f32>([1 << 10]).is_ok() {}
                while step.empty::<f32>([1]).is_ok() {}
                model.apply(ticket, step, 5.0)
            });
            assert!(matches!(full, Err(Error::ArenaFull { .. })), "{full:?}");
            assert_eq!(model.state(), before);
            let ticket = model.optimizer.advance().unwrap();
            arena.step(|step| model.apply(ticket, step, 5.0)).unwrap();
        }
        assert_eq!(model.state(), after(device, 3));
    }

    fn foreign_and_stale_tickets_are_refused(device: &Device) {
        let slow = || ParameterGroups::new().with(ParameterGroup { rate: 0.1, weight_decay: Some(0.0) }, |_| true);
        let (mut model, mut other, mut arena) = (Model::new(device), Model::new(device), arena(device));
        let _own = model.optimizer.advance().unwrap();
        let foreign = other.optimizer.advance().unwrap();
        refused(arena.step(|step| model.apply(foreign, step, 5.0)), "of update 1, of another optimizer");
        assert_eq!(model.state(), after(device, 0));

        let stale = model.optimizer.advance().unwrap();
        let Model { w, weights, gradients, optimizer } = model;
        let mut model = Model { w, weights, gradients, optimizer: optimizer.with_parameter_groups(&slow()).unwrap() };
        refused(arena.step(|step| model.apply(stale, step, 5.0)), "from before `with_parameter_groups`");

        // A ticket of one step is not recorded, and one for replays is not applied now.
        let ticket = other.optimizer.advance().unwrap();
        refused(arena.capture((other, Some(ticket)), &HostInputs::new(), |step, (model, ticket), _| {
            ticket.take().map_or(Ok(()), |ticket| model.apply(ticket, step, 5.0))
        }), "the ticket of update 1");
        let mut smuggled = arena.capture(None, &HostInputs::new(), |_, ticket, slots| {
            *ticket = Some(UpdateTicket::each_replay(slots));
            Ok(())
        }).unwrap();
        let smuggled = smuggled.state_mut().take().unwrap();
        refused(arena.step(|step| model.apply(smuggled, step, 5.0)), "`UpdateTicket::each_replay`");
        assert_eq!(model.state(), after(device, 0));
    }

    fn replay_applies_the_prepared_update(device: &Device) {
        let mut arena = arena(device);
        let mut captured = arena.capture(Model::new(device), &HostInputs::new(), |step, model, slots| model.apply(UpdateTicket::each_replay(slots), step, 5.0)).unwrap();
        for made in 0..3 {
            refused(captured.replay(&HostInputs::new()), MISSING);
            refused(captured.repeat(), MISSING);
            // Another recording, whose closure runs twice, does not apply one either.
            refused(captured.replay(&HostInputs::new().variant(made as u64 + 1)), MISSING);
            // A ticket that was withdrawn is not left to it.
            let withdrawn = captured.state_mut().optimizer.advance().unwrap();
            let _last = captured.state_mut().optimizer.advance().unwrap();
            withdrawn.leave_to_replay();
            refused(captured.replay(&HostInputs::new()), MISSING);
            assert_eq!(captured.state().state(), after(device, made), "a refused update must change nothing");
            assert_eq!(captured.report().replays, made as u64);
            captured.state_mut().optimizer.advance().unwrap().leave_to_replay();
            match made {
                0 => captured.replay(&HostInputs::new()).map(drop).unwrap(),
                1 => captured.repeat().map(drop).unwrap(),
                _ => captured.replay(&HostInputs::new().variant(9)).map(drop).unwrap(),
            }
        }
        // EagerStep and replayed updates are counted together.
        let mut model = captured.into_state();
        let ticket = model.optimizer.advance().unwrap();
        arena.step(|step| model.apply(ticket, step, 5.0)).unwrap();
        assert_eq!(model.state(), after(device, 4));
    }

    fn recorded_step_applies_one_update(device: &Device) {
        let mut arena = arena(device);
        refused(arena.capture(Model::new(device), &HostInputs::new(), |step, model, slots| {
            model.apply(UpdateTicket::each_replay(slots), step, 5.0)?;
            model.apply(UpdateTicket::each_replay(slots), step, 5.0)
        }), "a second `apply`");
        // If there are two optimizers, both updates must be prepared, or none is applied.
        let models = [Model::new(device), Model::new(device)];
        let mut captured = arena
            .capture(models, &HostInputs::new(), |step, models, slots| models.iter_mut().try_for_each(|model| model.apply(UpdateTicket::each_replay(slots), step, 5.0)))
            .unwrap();
        for one in [0, 1] {
            captured.state_mut()[one].optimizer.advance().unwrap().leave_to_replay();
            if one == 0 {
                refused(captured.replay(&HostInputs::new()), MISSING);
                assert_eq!(captured.state()[one].state(), after(device, 0));
            }
        }
        captured.replay(&HostInputs::new()).unwrap();
        captured.state().iter().for_each(|model| assert_eq!(model.state(), after(device, 1)));
    }

    /// An update that was prepared for other weights is not applied to those from a file.
    fn restored_optimizer_must_prepare_again(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let (mut model, mut arena) = (Model::new(device), arena(device));
        let ticket = model.optimizer.advance().unwrap();
        arena.step(|step| model.apply(ticket, step, 5.0)).unwrap();
        Checkpoint::save(&path, &model.weights, Some(&model.optimizer), &[]).unwrap();
        let stale = model.optimizer.advance().unwrap();
        Checkpoint::load(&path).unwrap().restore(&mut model.weights, Some(&mut model.optimizer)).unwrap();
        refused(arena.step(|step| model.apply(stale, step, 5.0)), "or a restored checkpoint");
        let ticket = model.optimizer.advance().unwrap();
        assert_eq!(ticket.number(), Some(2));
        arena.step(|step| model.apply(ticket, step, 5.0)).unwrap();
        assert_eq!(model.state(), after(device, 2));
    }

    /// A moment may overflow although the weights do not.
    fn non_finite_moments_are_not_saved(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let (mut model, mut arena) = (Model::new(device), arena(device));
        let ticket = model.optimizer.advance().unwrap();
        arena.step(|step| model.apply(ticket, step, 1e25)).unwrap();
        assert!(model.state().0.iter().all(|weight| weight.is_finite()));
        let (update, what, tensor) = (Some(1), Quantity::OptimizerState, "`adamw.second.w`".to_owned());
        let error = Error::NotFinite { update, what, tensor };
        assert_eq!(Checkpoint::save(&path, &model.weights, Some(&model.optimizer), &[]), Err(error.clone()));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        Checkpoint::save_with(&path, &model.weights, Some(&model.optimizer), &[], NonFinite::Allow).unwrap();
        let (mut other, checkpoint) = (Model::new(device), Checkpoint::load(&path).unwrap());
        assert_eq!(checkpoint.restore(&mut other.weights, Some(&mut other.optimizer)), Err(error));
        assert_eq!(other.state(), after(device, 0), "a failed restore must change nothing");
        // The weights themselves are finite.
        checkpoint.restore(&mut other.weights, None).unwrap();
        assert_eq!(other.state().0, model.state().0);
    }
}

/// A faulty rule, with variable numbers of settings, which may queue nothing.
struct Odd {
    settings: fn(u64, &ParameterGroup) -> usize,
    groups: bool,
    fails: bool,
}

impl Default for Odd {
    fn default() -> Self {
        Self { settings: |_, _| 1, groups: true, fails: false }
    }
}

impl UpdateRule for Odd {
    fn name(&self) -> &'static str {
        "odd"
    }

    fn has_groups(&self) -> bool {
        self.groups
    }

    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32> {
        vec![0.0; (self.settings)(number, group)]
    }

    fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
        if self.fails {
            return Err(Error::Misuse { op: "odd", expected: "nothing".into(), got: "a failure".into() });
        }
        assert_eq!(arguments.groups.is_some(), arguments.settings.shape().elements() > 1);
        if let Some(groups) = &arguments.groups {
            // The settings of each run.
            let _: Tensor<'_> = ops::embedding(step, &arguments.settings, &OnDevice(groups))?;
        }
        ops::fill_into(step, &mut arguments.weights, 0.0)
    }
}

on_each_device! {
    fn faulty_rules_are_refused(device: &Device) {
        let mut model = Model::new(device);
        let weights = &model.weights;
        let refused_with = |error: Result<Optimizer<Odd>>, words: &str| {
            let error = error.err().expect("the settings must be refused").to_string();
            assert!(error.contains(words), "{error}");
        };
        refused_with(Optimizer::new(weights, Odd { settings: |_, _| 0, ..Odd::default() }), "odd: expected at least one setting");
        let halves = || ParameterGroups::new().with(ParameterGroup { rate: 0.5, weight_decay: None }, |_| true);
        let odd = |odd| Optimizer::new(weights, odd).unwrap();
        refused_with(odd(Odd { groups: false, ..Odd::default() }).with_parameter_groups(&halves()), "`has_groups` returns false, got 2");
        let by_group: fn(u64, &ParameterGroup) -> usize = |_, group| if group.rate < 1.0 { 2 } else { 1 };
        refused_with(odd(Odd { settings: by_group, ..Odd::default() }).with_parameter_groups(&halves()), "1 settings for each group, got 2");
        refused_with(odd(Odd::default()).with_parameter_groups(&ParameterGroups::new().no_decay(|entry| entry.name() == "v")), "none for group 0");
        let mut more = odd(Odd { settings: |number, _| number as usize, ..Odd::default() });
        let ticket_of_more = more.advance().unwrap();
        let mut fails = odd(Odd { fails: true, ..Odd::default() });
        let mut sound = odd(Odd::default()).with_parameter_groups(&halves()).unwrap();
        let mut arena = arena(device);
        // An update that was not queued does not count, and can be prepared again.
        for _ in 0..2 {
            let ticket = fails.advance().unwrap();
            assert_eq!(ticket.number(), Some(1));
            let failed = arena.step(|step| fails.apply(ticket, step, &mut model.weights, &model.gradients)).unwrap_err();
            assert!(failed.to_string().contains("a failure"), "{failed}");
            assert_eq!(fails.updates(), 0);
        }
        arena.step(|step| more.apply(ticket_of_more, step, &mut model.weights, &model.gradients)).unwrap();
        assert!(more.advance().unwrap_err().to_string().contains("1 settings for each update, got 2"));
        assert_eq!(model.state().0, [0.0; LEN]);
        model.weights.write(model.w, &[1.0; LEN]).unwrap();
        let ticket = sound.advance().unwrap();
        arena.step(|step| sound.apply(ticket, step, &mut model.weights, &model.gradients)).unwrap();
        assert_eq!((sound.updates(), model.state().0), (1, vec![0.0; LEN]));
    }

    /// A graph captured before still has the old groups.
    fn new_groups_invalidate_captures(device: &Device) {
        let slow = || ParameterGroups::new().with(ParameterGroup { rate: 0.1, weight_decay: Some(0.0) }, |_| true);
        let mut arena = arena(device);
        let mut captured = arena.capture(Some(Model::new(device)), &HostInputs::new(), |step, model, slots| model.as_mut().unwrap().apply(UpdateTicket::each_replay(slots), step, 5.0)).unwrap();
        captured.state_mut().as_mut().unwrap().optimizer.advance().unwrap().leave_to_replay();
        captured.replay(&HostInputs::new()).unwrap();
        captured.state_mut().as_mut().unwrap().optimizer.advance().unwrap().leave_to_replay();
        let model = captured.state_mut().take().unwrap();
        let after_one = model.state();
        let model = Model { optimizer: model.optimizer.with_parameter_groups(&slow()).unwrap(), ..model };
        *captured.state_mut() = Some(model);
        captured.state_mut().as_mut().unwrap().optimizer.advance().unwrap().leave_to_replay();
        assert!(captured.replay(&HostInputs::new()).is_err(), "a second replay must fail without another `advance`");
        assert_eq!(captured.state().as_ref().unwrap().state(), after_one);
        // Another recording applies it: a tenth of the rate, without decay, with a second moment of
        // one gradient.
        captured.replay(&HostInputs::new().variant(1)).unwrap();
        let (weights, updates) = captured.state().as_ref().unwrap().state();
        assert_eq!(updates, 2);
        assert!(weights.iter().zip(&after_one.0).all(|(now, before)| (before - now - 0.01).abs() < 1e-6), "{weights:?}");
    }

    /// A file names the optimizer of its state.
    fn foreign_optimizer_state_is_refused(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut model = Model::new(device);
        let mut sgd = Optimizer::new(&model.weights, Sgd { momentum: 0.9, ..Sgd::default() }).unwrap();
        let ticket = sgd.advance().unwrap();
        arena(device).step(|step| sgd.apply(ticket, step, &mut model.weights, &model.gradients)).unwrap();
        Checkpoint::save(&path, &model.weights, Some(&sgd), &[]).unwrap();
        let checkpoint = Checkpoint::load(&path).unwrap();
        let before = model.state();
        let expected = |expected, got: &str| Error::OtherOptimizer { path: path.clone(), expected, got: got.into() };
        let error = checkpoint.restore(&mut model.weights, Some(&mut model.optimizer)).unwrap_err();
        assert_eq!(error, expected("adamw", "sgd"));
        assert!(error.to_string().contains("expected the state of the optimizer `adamw`, got that of `sgd`"), "{error}");
        assert_eq!(model.state(), before);
        checkpoint.restore(&mut model.weights, None).unwrap();
        let mut other = Optimizer::new(&model.weights, *sgd.rule()).unwrap();
        checkpoint.restore(&mut model.weights, Some(&mut other)).unwrap();
        assert_eq!(other.updates(), 1);

        Checkpoint::save(&path, &model.weights, Some(&model.optimizer), &[]).unwrap();
        let restored = Checkpoint::load(&path).unwrap().restore(&mut model.weights, Some(&mut other));
        assert_eq!(restored, Err(expected("sgd", "adamw")));
        assert_eq!(other.updates(), 1);
    }
}

#[test]
fn invalid_sgd_settings_are_refused() {
    let device = crate::support::open(DeviceKind::Emulated);
    let model = Model::new(&device);
    let base = Sgd { momentum: 0.9, ..Sgd::default() };
    for (config, words) in [
        (Sgd { learning_rate: -1.0, ..base }, "`learning_rate` finite and at least 0, got -1"),
        (Sgd { momentum: f32::NAN, ..base }, "`momentum` finite"),
        (Sgd { momentum: 0.0, nesterov: true, ..base }, "`momentum` above 0 with `nesterov`, got 0"),
        (Sgd { weight_decay: f32::INFINITY, ..base }, "`weight_decay` finite"),
        (Sgd { clip: Some(0.0), ..base }, "`clip` above 0, got 0"),
        (Sgd { schedule: Schedule::cosine(1, 2, 2.0), ..base }, "`floor` in [0, 1]"),
    ] {
        let error = Optimizer::new(&model.weights, config).err().unwrap().to_string();
        assert!(error.contains("sgd: expected ") && error.contains(words), "{error}");
    }
}

#[test]
fn invalid_schedules_are_refused() {
    let device = crate::support::open(DeviceKind::Emulated);
    for floor in [f64::NAN, f64::INFINITY, -0.1, 1.1] {
        let schedule = Schedule::cosine(1, 2, floor);
        let error = Model::with(&device, AdamW { schedule, ..AdamW::default() }).err().unwrap();
        assert!(error.to_string().contains("`floor` in [0, 1]"), "{error}");
    }
}
