//! Rules and groups over several updates: they match float64, and give the same bits however they
//! run.

use crate::support::{Random, on_each_device, relative_l2, tolerance, words};
use stepscope::nn::{Linear, Mlp};
use stepscope::ops;
use stepscope::optim::{ParameterGroup, ParameterGroups, Schedule, Sgd, UpdateArguments, UpdateRule};
use stepscope::parameters::{Initializer, MasterType, StateType};
use stepscope::prelude::*;
use stepscope::tensor::Source;

const UPDATES: u64 = 6;
const CLIP: f32 = 8.0;
const SCHEDULE: Schedule = Schedule::cosine(2, 5, 0.25);
/// Parameters by name and shape, and the number of their group in [`groups`]. Some sizes are not
/// whole vectors, some are whole runs, and neighbours belong to different groups.
const SHAPES: [(&str, [usize; 2], usize); 6] = [
    ("body.weight", [7, 33], 0),
    ("body.gain", [1, 1], 2),
    ("tail.weight", [3, 1], 1),
    ("tokens.embedding", [16, 4], 2),
    ("tail.bias", [1, 5], 1),
    ("last.weight", [130, 2], 0),
];
/// The rate's factor and the weight decay of a group.
const TAIL: ParameterGroup = ParameterGroup { rate: 0.5, weight_decay: Some(0.2) };

fn groups() -> ParameterGroups {
    ParameterGroups::new()
        .with(TAIL, |entry| entry.name().starts_with("tail."))
        .no_decay(ParameterGroups::is_gain_bias_or_embedding)
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap()
}

/// Returns a parameter's gradient in an update: the third update is inside the norm; all others are
/// clipped.
fn gradient(update: u64, parameter: usize, elements: usize) -> Vec<f32> {
    let size = if update == 3 { 0.1 } else { 1.0 };
    Random::new(100 * update + parameter as u64).normals(elements).into_iter().map(|value| size * value).collect()
}

/// Returns the weights before and after [`UPDATES`] updates, by parameter.
fn train<R: UpdateRule>(device: &Device, rule: R, groups: Option<ParameterGroups>) -> [Vec<Vec<f32>>; 2] {
    let mut spec = ParameterSpec::builder();
    let handles = SHAPES.map(|(name, shape, _)| spec.add(name, shape, Initializer::fan_in(2)));
    let mut weights = Parameters::new(device, &spec.build().unwrap(), 7).unwrap();
    let mut gradients = Gradients::zeros(&weights).unwrap();
    let mut optimizer = Optimizer::new(&weights, rule).unwrap();
    if let Some(groups) = groups {
        optimizer = optimizer.with_parameter_groups(&groups).unwrap();
    }
    let all = |weights: &Parameters| handles.map(|handle| weights.read(handle).unwrap()).to_vec();
    let before = all(&weights);
    let mut arena = arena(device);
    for update in 1..=UPDATES {
        let ticket = optimizer.advance().unwrap();
        assert_eq!(ticket.number(), Some(update));
        arena
            .step(|step| {
                for (number, handle) in handles.into_iter().enumerate() {
                    let mut place = gradients.lend_mut(step, handle)?;
                    let values = gradient(update, number, place.shape().elements());
                    ops::copy_into(step, &step.upload(&values, place.shape())?, &mut place)?;
                }
                optimizer.apply(ticket, step, &mut weights, &gradients)
            })
            .unwrap();
    }
    let space = weights.read_flat().unwrap();
    let mut between = vec![true; space.len()];
    weights.spec().entries().iter().for_each(|entry| between[entry.range()].fill(false));
    assert!(
        space.iter().zip(between).all(|(value, between)| !between || value.to_bits() == 0),
        "the gaps between parameters must stay zero"
    );
    [before, all(&weights)]
}

/// Computes [`train`] in float64. `update` gets a weight, its clipped gradient, its two state
/// values, the rate, the decay and the update's number, and returns the new weight.
fn exact(
    before: &[Vec<f32>],
    (rate, decay): (f64, f64),
    update: impl Fn(f64, f64, &mut [f64; 2], f64, f64, i32) -> f64,
) -> Vec<Vec<f64>> {
    let mut weights: Vec<Vec<f64>> =
        before.iter().map(|values| values.iter().map(|&value| f64::from(value)).collect()).collect();
    let mut kept: Vec<Vec<[f64; 2]>> = weights.iter().map(|values| vec![[0.0; 2]; values.len()]).collect();
    for number in 1..=UPDATES {
        let gradients: Vec<Vec<f64>> = weights
            .iter()
            .enumerate()
            .map(|(at, values)| gradient(number, at, values.len()).into_iter().map(f64::from).collect())
            .collect();
        let norm = gradients.iter().flatten().map(|value| value * value).sum::<f64>().sqrt();
        let clip = (f64::from(CLIP) / (norm + 1e-6)).min(1.0);
        assert_eq!(clip < 1.0, number != 3, "{norm}");
        // Up over two updates, then half a cosine down to a quarter at the fifth.
        let done = (number.max(2) - 2).min(3) as f64 / 3.0;
        let fall = 0.25 + 0.75 * 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        let factor = if number == 1 { 0.5 } else { fall };
        for (at, (values, gradients)) in weights.iter_mut().zip(&gradients).enumerate() {
            let (own, decay) = [(1.0, decay), (0.5, f64::from(0.2f32)), (1.0, 0.0)][SHAPES[at].2];
            for ((weight, gradient), kept) in values.iter_mut().zip(gradients).zip(&mut kept[at]) {
                *weight = update(*weight, gradient * clip, kept, rate * factor * own, decay, number as i32);
            }
        }
    }
    weights
}

#[track_caller]
fn assert_close(got: &[Vec<f32>], want: &[Vec<f64>]) {
    for (((got, want), (name, ..)), number) in got.iter().zip(want).zip(SHAPES).zip(0..) {
        let error = relative_l2(got, want);
        println!("{name}: {error:.2e}");
        assert!(error <= tolerance(UPDATES as usize), "parameter {number} `{name}`: {error:e}");
    }
}

fn adamw() -> AdamW {
    AdamW { learning_rate: 0.05, weight_decay: 0.1, clip: Some(CLIP), schedule: SCHEDULE, ..AdamW::default() }
}

fn sgd(nesterov: bool) -> Sgd {
    let config = Sgd { learning_rate: 0.1, momentum: 0.9, nesterov, weight_decay: 0.1, ..Sgd::default() };
    Sgd { clip: Some(CLIP), schedule: SCHEDULE, ..config }
}

on_each_device! {
    fn adamw_groups_match_float64(device: &Device) {
        let [before, after] = train(device, adamw(), Some(groups()));
        let [rate, beta1, beta2, epsilon, decay] = [0.05f32, 0.9, 0.999, 1e-8, 0.1].map(f64::from);
        let want = exact(&before, (rate, decay), |w, g, [m, v], rate, decay, number| {
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * g * g;
            let (m, v) = (*m / (1.0 - beta1.powi(number)), *v / (1.0 - beta2.powi(number)));
            w - rate * decay * w - rate * m / (v.sqrt() + epsilon)
        });
        assert_close(&after, &want);
    }

    fn sgd_groups_match_float64(device: &Device) {
        for nesterov in [false, true] {
            let [before, after] = train(device, sgd(nesterov), Some(groups()));
            let [rate, momentum, decay] = [0.1f32, 0.9, 0.1].map(f64::from);
            let want = exact(&before, (rate, decay), |w, g, [velocity, _], rate, decay, _| {
                let g = g + decay * w;
                *velocity = momentum * *velocity + g;
                w - rate * if nesterov { g + momentum * *velocity } else { *velocity }
            });
            assert_close(&after, &want);
        }
    }

    /// Groups with the optimizer's own settings change no bit.
    fn equal_groups_change_nothing(device: &Device) {
        let alike = || Some(ParameterGroups::new().with(ParameterGroup::default(), ParameterGroups::is_gain_bias_or_embedding));
        assert_eq!(train(device, adamw(), alike()), train(device, adamw(), None));
        assert_eq!(train(device, adamw(), Some(ParameterGroups::new())), train(device, adamw(), None));
        assert_eq!(train(device, sgd(true), alike()), train(device, sgd(true), None));
        assert_ne!(train(device, adamw(), Some(groups())), train(device, adamw(), None));
    }
}

/// Clipped gradient descent made of ops, like a rule outside the library.
#[derive(Clone, Copy, Debug)]
struct Descent;

impl UpdateRule for Descent {
    fn name(&self) -> &'static str {
        "descent"
    }

    fn state(&self) -> &'static [&'static str] {
        &["mean"]
    }

    /// Returns the negated rate.
    fn settings(&self, number: u64, _: &ParameterGroup) -> Vec<f32> {
        vec![-0.5 / number as f32]
    }

    fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
        let factor = ops::clip_factor(step, arguments.squared_norm, CLIP)?;
        let clipped = ops::scale_by(step, &arguments.gradients, &factor)?;
        let rest = ops::scale(step, &arguments.state[0], 0.5)?;
        ops::copy_into(step, &ops::add(step, &rest, &clipped)?, &mut arguments.state[0])?;
        let change = ops::scale_by(step, &arguments.state[0], &arguments.settings)?;
        ops::add_assign(step, &mut arguments.weights, &change)
    }
}

/// The types of weights and state.
const F32: (MasterType, StateType) = (MasterType::F32, StateType::F32);
const SMALL: (MasterType, StateType) = (MasterType::Split, StateType::Bits8);

const INPUTS: usize = 12;
const CLASSES: usize = 3;

struct Classifier {
    mlp: Mlp,
    head: Linear,
}

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.head.forward(tape, &self.mlp.forward(tape, &tape.input(batch.input::<f32>(0)?))?)
    }
}

fn state<R: UpdateRule>(
    device: &Device,
    rule: R,
    groups: Option<ParameterGroups>,
    (masters, moments): (MasterType, StateType),
) -> TrainState<Classifier, R> {
    let mut spec = ParameterSpec::builder();
    let mlp = Mlp::new(spec.at("mlp"), INPUTS, 64, 64);
    let model = Classifier { mlp, head: Linear::new(spec.at("tail"), 64, CLASSES) };
    let spec = spec.build().unwrap().with_masters(masters).with_state(moments);
    let state = TrainState::new(device, model, &spec, 7, rule).unwrap();
    match groups {
        Some(groups) => state.with_parameter_groups(&groups).unwrap(),
        None => state,
    }
}

type Points = crate::support::points::Points<INPUTS>;

/// Returns four batches of eight points, in parts of at most `part`.
fn batches(part: usize) -> Vec<Vec<Points>> {
    let mut random = Random::new(3);
    let mut points =
        |count: usize| Points { x: random.normals(count * INPUTS), labels: random.belows(count, CLASSES as u32) };
    (0..4).map(|_| [part, 8 - part].into_iter().filter(|&count| count > 0).map(&mut points).collect()).collect()
}

/// Returns weights and state, as bits, and the number of updates.
fn bits_of<R: UpdateRule>(trainer: &Trainer<'_, Classifier, R>) -> (Vec<Vec<u32>>, u64) {
    let TrainState { parameters, optimizer, .. } = trainer.state();
    (parameters.regions().into_iter().chain(optimizer.state()).map(words).collect(), optimizer.updates())
}

/// Checks that the bits are the same eager and captured, in whole batches and parts of them,
/// straight and resumed from a file.
fn however_it_runs<R: UpdateRule + Copy>(
    device: &Device,
    rule: R,
    groups: impl Fn() -> Option<ParameterGroups>,
    stored: (MasterType, StateType),
) {
    let folder = tempfile::tempdir().unwrap();
    for part in [8, 5] {
        let mut arena = arena(device);
        let mut eager = Trainer::eager(&mut arena, state(device, rule, groups(), stored));
        let first = eager.state().parameters.sha256().unwrap();
        let losses: Vec<f64> = batches(part).iter().map(|batch| eager.update(batch).unwrap().loss).collect();
        let expected = bits_of(&eager);
        assert_ne!(eager.state().parameters.sha256().unwrap(), first);
        drop(eager);

        let path = folder.path().join(format!("{part}.safetensors"));
        let mut arena = self::arena(device);
        let mut captured = Trainer::captured(&mut arena, state(device, rule, groups(), stored), &batches(part)[0][0])
            .unwrap()
            .checkpoint(&path, None);
        let mut progress = EpochProgress::default();
        captured.fit_with(batches(part).into_iter().take(2).map(Ok), &mut progress, &mut ()).unwrap();
        captured.save(&progress, &[]).unwrap();
        captured.fit_with(batches(part).into_iter().skip(2).map(Ok), &mut progress, &mut ()).unwrap();
        assert_eq!(bits_of(&captured), expected);
        assert_eq!(progress.loss_sum, losses.iter().map(|loss| loss * 8.0).sum::<f64>());
        drop(captured);

        // A new process starts with other weights; then the test resumes the trained ones.
        let mut arena = self::arena(device);
        let mut resumed = Trainer::eager(&mut arena, state(device, rule, groups(), stored));
        resumed.update(&batches(part)[3]).unwrap();
        let progress = resumed.restore(&Checkpoint::load(&path).unwrap()).unwrap();
        assert_eq!(progress.updates, 2);
        for batch in &batches(part)[2..] {
            resumed.update(batch).unwrap();
        }
        assert_eq!(bits_of(&resumed), expected);
    }
}

on_each_device! {
    fn adamw_groups_keep_bits(device: &Device) {
        however_it_runs(device, adamw(), || Some(groups()), F32);
    }

    fn small_updates_keep_bits(device: &Device) {
        for stored in [(MasterType::F32, StateType::Bits8), (MasterType::Split, StateType::F32), SMALL] {
            however_it_runs(device, adamw(), || Some(groups()), stored);
            however_it_runs(device, sgd(false), || Some(groups()), stored);
        }
    }

    fn sgd_keeps_bits(device: &Device) {
        however_it_runs(device, sgd(true), || None, F32);
        however_it_runs(device, sgd(false), || Some(groups()), F32);
    }

    fn custom_rule_keeps_bits(device: &Device) {
        however_it_runs(device, Descent, || None, F32);
    }

    /// Any number of groups takes one launch, after that of the norm.
    fn groups_add_no_launch(device: &Device) {
        let nodes = |groups: Option<ParameterGroups>| {
            let mut arena = arena(device);
            let mut trainer =
                Trainer::captured(&mut arena, state(device, sgd(true), groups, F32), &batches(8)[0][0]).unwrap();
            trainer.update(&batches(8)[0]).unwrap();
            trainer.capture_report().unwrap().nodes
        };
        let many = (0..6).fold(ParameterGroups::new(), |groups, number| {
            let rate = 1.0 / (number + 2) as f32;
            groups.with(ParameterGroup { rate, weight_decay: None }, move |entry| entry.name() == PARAMETERS[number])
        });
        assert!(nodes(None) > 4);
        assert_eq!(nodes(Some(many)), nodes(None));
        assert_eq!(nodes(Some(groups())), nodes(None));
    }
}

/// The parameters of [`Classifier`].
const PARAMETERS: [&str; 6] =
    ["mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias", "tail.weight", "tail.bias"];
