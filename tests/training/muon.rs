//! Muon: matrices match float64, other parameters have AdamW's bits, and runs have the same bits
//! captured, eager and resumed.

#![forbid(unsafe_code)]

use crate::support::{Random, bits, on_each_device, relative_l2};
use std::ops::Range;
use std::path::Path;
use stepscope::nn::{Linear, Mlp};
use stepscope::ops;
use stepscope::optim::{Muon, ParameterGroup, ParameterGroups, Schedule, UpdateArguments, UpdateRule};
use stepscope::parameters::{GradientType, Initializer, MasterType, StateType};
use stepscope::prelude::*;
use stepscope::tensor::Shape;

const RATE: f32 = 0.5;
const DECAY: f32 = 0.1;
const CLIP: f32 = 8.0;
/// The factor of the rate of `tall`.
const SLOW: f32 = 0.25;
/// The matrices of the test against float64, with the columns of each matrix of which they consist.
/// `odd` is not whole runs of 64 elements.
const MATRICES: [(&str, [usize; 2], &[usize]); 6] = [
    ("wide", [24, 96], &[96]),
    ("tall", [96, 24], &[24]),
    ("square", [40, 40], &[40]),
    ("odd", [7, 33], &[33]),
    ("stacked", [32, 92], &[60, 16, 16]),
    ("row", [1, 10], &[10]),
];

fn muon() -> Muon {
    let adamw = AdamW { learning_rate: RATE, weight_decay: DECAY, clip: Some(CLIP), ..AdamW::default() };
    Muon { adamw, except: vec!["head.".into()], ..Muon::default() }
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap()
}

/// Returns the spec of [`MATRICES`] with parameters of other kinds between them.
fn spec() -> ParameterSpec {
    let mut spec = ParameterSpec::builder();
    let others: [(&str, Shape); 6] = [
        ("first.bias", [50].into()),
        ("tokens", [16, 12].into()),
        ("gain", [1].into()),
        ("cube", [3, 4, 5].into()),
        ("head.weight", [24, 10].into()),
        ("last.bias", [3].into()),
    ];
    for ((matrix, shape, _), (other, other_shape)) in MATRICES.into_iter().zip(others) {
        if other == "tokens" {
            spec.add_table(other, other_shape, Initializer::Normal { deviation: 0.5 });
        } else {
            spec.add(other, other_shape, Initializer::Normal { deviation: 0.5 });
        }
        spec.add(matrix, shape, Initializer::Normal { deviation: 0.5 });
    }
    spec.matrices(|entry| (entry.name() == "stacked").then(|| vec![60, 16, 16]));
    spec.build().unwrap()
}

/// Returns the gradient of a parameter in an update. That of the square matrix is not nearly
/// singular.
fn gradient(update: u64, number: usize, name: &str, shape: Shape) -> Vec<f32> {
    let mut values = Random::new(100 * update + number as u64).normals(shape.elements());
    if name == "square" {
        let [_, cols] = shape.as_rows();
        values.iter_mut().for_each(|value| *value *= 0.2);
        values.iter_mut().step_by(cols + 1).for_each(|value| *value += 3.0);
    }
    values
}

/// Makes these updates of [`spec`], with a BF16 copy of the weights or without, and returns the
/// weights by parameter before and after them.
fn train<R: UpdateRule>(device: &Device, rule: R, copy: bool, updates: Range<u64>) -> [Vec<Vec<f32>>; 2] {
    let spec = spec();
    let handles: Vec<Parameter> = spec.iter().map(|(handle, _)| handle).collect();
    let mut weights = Parameters::new(device, &spec, 7).unwrap();
    if copy {
        weights = weights.with_bf16_copy().unwrap();
    }
    let mut gradients = Gradients::zeros(&weights).unwrap();
    let groups = ParameterGroups::new()
        .with(ParameterGroup { rate: SLOW, weight_decay: None }, |entry| entry.name() == "tall")
        .no_decay(ParameterGroups::is_gain_bias_or_embedding);
    let mut optimizer = Optimizer::new(&weights, rule).unwrap().with_parameter_groups(&groups).unwrap();
    let read = |weights: &Parameters| handles.iter().map(|&handle| weights.read(handle).unwrap()).collect();
    let (before, mut arena) = (read(&weights), arena(device));
    for update in updates {
        let ticket = optimizer.advance().unwrap();
        let step = arena.step(|step| {
            for (number, (handle, entry)) in spec.iter().enumerate() {
                let mut place = gradients.lend_mut(step, handle)?;
                let values = gradient(update, number, entry.name(), entry.shape());
                ops::copy_into(step, &step.upload(&values, entry.shape())?, &mut place)?;
            }
            optimizer.apply(ticket, step, &mut weights, &gradients)
        });
        step.unwrap();
    }
    let all = weights.read_flat().unwrap();
    let copy = weights.bf16_copy().map(|copy| copy.read().unwrap());
    assert!(
        copy.iter().all(|copy| all.iter().zip(copy).all(|(&weight, &copy)| bf16::from_f32(weight) == copy)),
        "the copy is not of the weights"
    );
    let mut between = vec![true; all.len()];
    spec.entries().iter().for_each(|entry| between[entry.range()].fill(false));
    assert!(all.iter().zip(between).all(|(value, between)| !between || value.to_bits() == 0), "padding is not zero");
    [before, read(&weights)]
}

/// Returns the transpose of a matrix of `rows`.
fn transposed(x: &[f64], rows: usize) -> Vec<f64> {
    let cols = x.len() / rows;
    (0..x.len()).map(|at| x[at % rows * cols + at / rows]).collect()
}

/// Returns `a b` of `[m, k]` and `[k, n]`.
fn product(a: &[f64], b: &[f64], m: usize) -> Vec<f64> {
    let (k, n) = (a.len() / m, b.len() * m / a.len());
    let element = |at: usize| (0..k).map(|k_at| a[at / n * k + k_at] * b[k_at * n + at % n]).sum();
    (0..m * n).map(element).collect()
}

/// Returns a matrix of `rows` orthogonalized in float64, as Jordan's program computes it. `rounded`
/// rounds to BF16 where the library does.
fn orthogonalized(x: &[f64], rows: usize, rounded: bool) -> Vec<f64> {
    let round = |x: Vec<f64>| if rounded { x.iter().map(|&x| bf16::from_f64(x).to_f64()).collect() } else { x };
    let cols = x.len() / rows;
    if rows > cols {
        return transposed(&orthogonalized(&transposed(x, rows), cols, rounded), cols);
    }
    let scale = 0.2 * (cols as f64).sqrt();
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt() + 1e-7;
    let mut x = round(x.iter().map(|x| x / norm).collect());
    for number in 0..5 {
        let a = round(product(&x, &transposed(&x, rows), rows));
        let squared = product(&a, &a, rows);
        let b = round(a.iter().zip(&squared).map(|(a, squared)| -4.7750 * a + 2.0315 * squared).collect());
        let change = product(&b, &x, rows);
        let scale = if number == 4 { scale } else { 1.0 };
        x = round(x.iter().zip(&change).map(|(x, change)| scale * (3.4445 * x + change)).collect());
    }
    x
}

/// Returns the weights of a matrix after the updates in float64, from those before.
fn reference(before: &[f32], name: &str, [rows, cols]: [usize; 2], matrices: &[usize], rounded: bool) -> Vec<f64> {
    let mut weights: Vec<f64> = before.iter().map(|&w| f64::from(w)).collect();
    let mut momentum = vec![0.0; weights.len()];
    let rate = f64::from(RATE) * if name == "tall" { f64::from(SLOW) } else { 1.0 };
    let spec = spec();
    for update in UPDATES {
        let (mut own, mut squares) = (Vec::new(), 0.0);
        for (number, (_, entry)) in spec.iter().enumerate() {
            let values: Vec<f64> =
                gradient(update, number, entry.name(), entry.shape()).into_iter().map(f64::from).collect();
            squares += values.iter().map(|g| g * g).sum::<f64>();
            if entry.name() == name {
                own = values;
            }
        }
        let clip = (f64::from(CLIP) / (squares.sqrt() + 1e-6)).min(1.0);
        assert!(clip < 1.0, "the norm must be clipped");
        own.iter_mut().for_each(|g| *g *= clip);
        momentum.iter_mut().zip(&own).for_each(|(m, g)| *m = f64::from(0.95f32) * *m + g);
        let direction: Vec<f64> = momentum.iter().zip(&own).map(|(m, g)| g + f64::from(0.95f32) * m).collect();
        let mut first = 0;
        for &columns in matrices {
            let places: Vec<usize> =
                (0..rows).flat_map(|row| row * cols + first..row * cols + first + columns).collect();
            let matrix: Vec<f64> = places.iter().map(|&at| direction[at]).collect();
            for (at, change) in places.into_iter().zip(orthogonalized(&matrix, rows, rounded)) {
                weights[at] = weights[at] * (1.0 - rate * f64::from(DECAY)) - rate * change;
            }
            first += columns;
        }
    }
    weights
}

const UPDATES: Range<u64> = 1..3;

on_each_device! {
    /// In f32 only rounding errors remain. With a BF16 copy, the difference from exact arithmetic
    /// is that of five iterations in BF16. If float64 rounds where the library does, only f32's
    /// errors remain there too, unless a sum is so close to the middle of two numbers in BF16 that
    /// it is rounded to the other.
    fn matrices_match_float64(device: &Device) {
        let mut equal = 0;
        for (copy, limits) in
            [(false, vec![(false, 1e-4)]), (true, vec![(true, 2f64.powi(-7)), (false, 2f64.powi(-5))])]
        {
            let [before, after] = train(device, muon(), copy, UPDATES);
            let [_, by_adamw] = train(device, muon().adamw, copy, UPDATES);
            for (number, (_, entry)) in spec().iter().enumerate() {
                let Some((name, shape, columns)) = MATRICES.into_iter().find(|(name, ..)| *name == entry.name()) else {
                    assert_eq!(bits(&after[number]), bits(&by_adamw[number]), "{}", entry.name());
                    continue;
                };
                for &(rounded, limit) in &limits {
                    let want = reference(&before[number], name, shape, columns, rounded);
                    // The change counts, and not the old weight.
                    let change = |new: f64, old: f32| new - f64::from(old);
                    let want: Vec<f64> =
                        want.iter().zip(&before[number]).map(|(&new, &old)| change(new, old)).collect();
                    let got: Vec<f32> = after[number].iter().zip(&before[number]).map(|(new, old)| new - old).collect();
                    let error = relative_l2(&got, &want);
                    assert!(error < limit, "{name}, copy {copy}, rounded {rounded}: {error}");
                    equal += usize::from(rounded && error < 1e-5);
                }
            }
        }
        assert!(equal >= 4, "only {equal} matrices have float64's numbers in BF16");
    }
}

const INPUTS: usize = 12;
const CLASSES: usize = 3;

type Points = crate::support::points::Points<INPUTS>;

struct Classifier {
    mlp: Mlp,
    head: Linear,
}

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.head.forward(tape, &self.mlp.forward(tape, &tape.input(batch.input::<f32>(0)?))?)
    }
}

impl Classifier {
    fn state<R: UpdateRule>(device: &Device, rule: R) -> TrainState<Self, R> {
        let mut spec = ParameterSpec::builder();
        let mlp = Mlp::new(spec.at("mlp"), INPUTS, 48, 16);
        let model = Self { mlp, head: Linear::new(spec.at("head"), 16, CLASSES) };
        let groups = ParameterGroups::new().no_decay(ParameterGroups::is_gain_bias_or_embedding);
        let state = TrainState::new(device, model, &spec.build().unwrap(), 7, rule).unwrap();
        state.with_parameter_groups(&groups).unwrap().with_bf16_copy().unwrap()
    }
}

fn trained_by() -> Muon {
    let schedule = Schedule::cosine(2, 12, 0.1);
    let adamw = AdamW { learning_rate: 0.1, clip: Some(0.5), schedule, ..AdamW::default() };
    Muon { adamw, ..muon() }
}

/// Returns batches of points in three clouds, of two parts each.
fn batches() -> Vec<Vec<Points>> {
    let mut random = Random::new(3);
    let mut batch = || {
        let labels = random.belows(16, CLASSES as u32);
        let near = |label: u32, random: &mut Random| random.normals(INPUTS).into_iter().map(move |x| x + label as f32);
        Points { x: labels.iter().flat_map(|&label| near(label, &mut random)).collect(), labels }.in_parts(8)
    };
    (0..12).map(|_| batch()).collect()
}

/// Trains on these batches, from the checkpoint if there is one, and writes it after each update.
/// Returns the losses, and the digest of the weights.
fn run(device: &Device, captured: bool, batches: &[Vec<Points>], path: &Path) -> (Vec<f64>, String) {
    let (mut arena, state) = (arena(device), Classifier::state(device, trained_by()));
    let mut trainer = match captured {
        true => Trainer::captured(&mut arena, state, &batches[0][0]).unwrap(),
        false => Trainer::eager(&mut arena, state),
    }
    .checkpoint(path, Some(1));
    let mut progress = EpochProgress::default();
    if path.exists() {
        progress = trainer.restore(&Checkpoint::load(path).unwrap()).unwrap();
    }
    let mut recorder = crate::support::rank_threads::Recorder::default();
    let left = batches.iter().skip(progress.updates as usize).cloned().map(Ok);
    trainer.fit_with(left, &mut progress, &mut recorder).unwrap();
    (recorder.0.iter().map(|update| update.loss).collect(), trainer.state().parameters.sha256().unwrap())
}

on_each_device! {
    also late;

    fn captured_and_resumed_keep_bits(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let batches = batches();
        let (losses, weights) = run(device, false, &batches, &path("eager"));
        assert_eq!(losses.len(), 12);
        let sum = |losses: &[f64]| losses.iter().sum::<f64>();
        assert!(sum(&losses[8..]) < 0.7 * sum(&losses[..4]), "the loss must fall: {losses:?}");
        assert_eq!(run(device, true, &batches, &path("captured")), (losses.clone(), weights.clone()));
        // Each part of the run begins with the checkpoint of the one before.
        let mut resumed = Vec::new();
        for (end, captured) in [(3, true), (8, false), (12, true)] {
            let (part, sha) = run(device, captured, &batches[..end], &path("resumed"));
            resumed.extend(part);
            assert_eq!(sha == weights, end == 12);
        }
        assert_eq!(resumed, losses);
    }
}

on_each_device! {
    /// A matrix whose gradients were all zero stays as it is, but for its decay.
    fn zero_gradients_only_decay(device: &Device) {
        for weight_decay in [0.0, DECAY] {
            let spec = spec();
            let mut weights = Parameters::new(device, &spec, 7).unwrap();
            let gradients = Gradients::zeros(&weights).unwrap();
            let adamw = AdamW { weight_decay, ..muon().adamw };
            let mut optimizer = Optimizer::new(&weights, Muon { adamw, ..muon() }).unwrap();
            let (before, mut arena) = (weights.read_flat().unwrap(), arena(device));
            for _ in 0..2 {
                let ticket = optimizer.advance().unwrap();
                arena.step(|step| optimizer.apply(ticket, step, &mut weights, &gradients)).unwrap();
            }
            let left = (1.0 - RATE * weight_decay).powi(2);
            let after = weights.read_flat().unwrap();
            assert!(before.iter().zip(&after).all(|(old, new)| (old * left - new).abs() <= 1e-6 * old.abs()));
            assert!(weight_decay > 0.0 || bits(&before) == bits(&after));
            assert!(optimizer.state().into_iter().all(|state| crate::support::words(state).iter().all(|&word| word == 0)));
        }
    }

    /// Finite gradients whose squares overflow are the same error as with AdamW.
    fn non_finite_norm_is_reported(device: &Device) {
        fn error<R: UpdateRule>(device: &Device, rule: R, captured: bool) -> Error {
            let mut batch = batches().remove(0);
            batch[1].x.iter_mut().for_each(|x| *x *= 1e25);
            let (mut arena, state) = (arena(device), Classifier::state(device, rule));
            let mut trainer = match captured {
                true => Trainer::captured(&mut arena, state, &batch[0]).unwrap(),
                false => Trainer::eager(&mut arena, state),
            };
            trainer.update(&batch).unwrap_err()
        }
        for captured in [false, true] {
            let by_muon = error(device, trained_by(), captured);
            assert!(matches!(by_muon, Error::NotFinite { update: Some(1), .. }), "{by_muon}");
            assert_eq!(by_muon, error(device, trained_by().adamw, captured));
        }
    }
}

/// Returns the error of an optimizer for one matrix, or of its first update.
#[track_caller]
fn refused<R: UpdateRule>(change: impl FnOnce(ParameterSpec) -> ParameterSpec, rule: R) -> String {
    let device = crate::support::open(DeviceKind::Emulated);
    let mut spec = ParameterSpec::builder();
    spec.add("w", [8, 8], Initializer::ONE);
    let mut weights = Parameters::new(&device, &change(spec.build().unwrap()), 7).unwrap();
    let gradients = Gradients::zeros(&weights).unwrap();
    let update = || {
        let mut optimizer = Optimizer::new(&weights, rule)?;
        let ticket = optimizer.advance()?;
        arena(&device).step(|step| optimizer.apply(ticket, step, &mut weights, &gradients))
    };
    let error = update().unwrap_err();
    assert!(matches!(error, Error::Misuse { .. }), "{error}");
    error.to_string()
}

/// A rule that wraps Muon without its declaration.
struct Wrapper(Muon);

impl UpdateRule for Wrapper {
    fn name(&self) -> &'static str {
        "wrapper"
    }

    fn state(&self) -> &'static [&'static str] {
        self.0.state()
    }

    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32> {
        self.0.settings(number, group)
    }

    fn queue<'s>(&self, step: &Step<'s>, arguments: UpdateArguments<'_, 's>) -> Result<()> {
        self.0.queue(step, arguments)
    }
}

#[test]
fn wrapper_must_need_whole_parameters() {
    let error = refused(|spec| spec, Wrapper(muon()));
    assert!(error.contains("`needs_whole_parameters`, got those of 0 of 64 elements"), "{error}");
}

#[test]
fn small_memory_names_muon() {
    let error = refused(|spec| spec.with_masters(MasterType::Split), muon());
    assert!(error.contains("muon") && error.contains("weights and state in f32"), "{error}");
    let error = refused(|spec| spec.with_state(StateType::Bits8), muon());
    assert!(error.contains("muon") && error.contains("weights and state in f32"), "{error}");
    for stored in [GradientType::Bf16, GradientType::Released] {
        let error = refused(|spec| spec.with_gradients(stored), muon());
        assert!(error.contains("muon") && error.contains("leave out `ParameterSpec::with_gradients`"), "{error}");
    }
}

#[test]
fn invalid_muon_settings_are_refused() {
    let adamw = |learning_rate| AdamW { learning_rate, ..AdamW::default() };
    for (rule, words) in [
        (Muon { momentum: 1.0, ..muon() }, "muon: expected `momentum` in [0, 1), got 1"),
        (Muon { momentum: f32::NAN, ..muon() }, "`momentum` in [0, 1)"),
        (Muon { momentum: 0.0, ..muon() }, "`momentum` above 0 with `nesterov`, got 0"),
        (Muon { adamw: adamw(-1.0), ..muon() }, "`learning_rate` finite and at least 0, got -1"),
    ] {
        let error = refused(|spec| spec, rule);
        assert!(error.contains(words), "{error}");
    }
}

on_each_device! {
    /// Singular values of at least a hundredth of the norm become numbers from 0.68 to 1.14, of
    /// each matrix by itself. Elements after the matrices stay.
    fn orthogonalized_matrices_have_unit_values(device: &Device) {
        let mut arena = arena(device);
        for (rows, columns) in [(32, vec![8]), (8, vec![32]), (12, vec![30, 4, 12])] {
            let cols: usize = columns.iter().sum();
            let mut values = Random::new(rows as u64).normals(rows * cols);
            values.extend([1.5, -0.0, -2.5]);
            let got = arena.step(|step| {
                let mut x = step.upload(&values, [values.len()])?;
                ops::orthogonalize_assign::<bf16>(step, &mut x, [rows, cols], &columns, 0.5)?;
                step.read(&x)
            });
            let got = got.unwrap();
            assert_eq!(bits(&got[rows * cols..]), bits(&[1.5, -0.0, -2.5]));
            let mut first = 0;
            for columns in columns {
                let scale = 0.5 * (rows.max(columns) as f64).sqrt();
                let element = |row: usize, col: usize| f64::from(got[row * cols + first + col]) / scale;
                let matrix: Vec<f64> =
                    (0..rows * columns).map(|at| element(at / columns, at % columns)).collect();
                let small = if rows > columns { transposed(&matrix, rows) } else { matrix };
                let least = rows.min(columns);
                // The squares of the singular values are the eigenvalues of the Gram matrix G. For
                // any vector v, |G v| / |v| is between the least and the greatest.
                let gram = product(&small, &transposed(&small, least), least);
                for seed in 0..20 {
                    let v: Vec<f64> = Random::new(seed).normals(least).into_iter().map(f64::from).collect();
                    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
                    let stretch = norm(&product(&gram, &v, least)) / norm(&v);
                    assert!((0.66f64.powi(2)..1.16f64.powi(2)).contains(&stretch), "[{rows}, {columns}]: {stretch}");
                }
                first += columns;
            }
        }
    }

    fn wrong_columns_are_refused(device: &Device) {
        let mut arena = arena(device);
        let mut refused = |shape: [usize; 2], columns: &[usize], words: &str| {
            let error = arena.step(|step| {
                let mut x = ops::fill(step, [64], 1.0)?;
                ops::orthogonalize_assign::<bf16>(step, &mut x, shape, columns, 0.2)
            });
            let error = error.unwrap_err();
            assert!(matches!(error, Error::Misuse { op: "orthogonalize_assign", .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        };
        refused([9, 8], &[], "at least the elements of [9, 8]");
        refused([usize::MAX, 2], &[2], "at least the elements of");
        refused([8, 8], &[4, 3], "matrices of 8 columns together, got [4, 3]");
        refused([8, 8], &[usize::MAX, 9], "matrices of 8 columns together");
    }
}
