//! The floating-point mode of the caller's thread does not affect any bit, does not end the
//! process, and is unchanged afterwards. It may flush subnormal numbers, round differently or trap.
//! It may be set before the device is opened, before a step or on another thread.

mod register;

use crate::support::Random;
use cuda_std::kernel;
use kernels::contract;
use register::{MODES, Mode};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::thread;
use stepscope::check::same_bits::{CaseSize, cases, compare, line, run};
use stepscope::check::{GradCheck, MemoryRecorder};
use stepscope::data::{Loader, TokenSampler, TokenSamplerConfig};
use stepscope::device::SelfTest;
use stepscope::files::StateDict;
use stepscope::models::{Lora, Transformer, WeightFiles, Weights};
use stepscope::nn::{Dropout, Linear, Mlp};
use stepscope::ops;
use stepscope::optim::{ParameterGroup, ParameterGroups, Schedule, Sgd, UpdateRule};
use stepscope::parameters::{FrozenType, Initializer};
use stepscope::prelude::*;
use stepscope::tensor::Target;
use stepscope::train::Update;
use stepscope::upload::Transfer;

const INPUTS: usize = 12;
const CLASSES: usize = 3;

type Points = crate::support::points::Points<INPUTS>;

fn device() -> Device {
    crate::support::open(DeviceKind::Emulated)
}

/// Runs the library's cases in `form`, and returns those whose bits differ from the committed ones.
fn wrong_digests(device: &Device, form: CaseSize) -> Vec<String> {
    let lines = cases().iter().map(|(name, case)| line(name, &run(device, case, form).unwrap())).collect::<Vec<_>>();
    let found = lines.concat();
    let verdicts = compare(&found, form.golden());
    assert!(verdicts.len() > 100, "{}", verdicts.len());
    verdicts.iter().filter(|verdict| !verdict.equal()).map(|verdict| format!("{verdict:?}")).collect()
}

#[test]
fn every_kernel_keeps_its_bits() {
    for mode in MODES {
        let wrong = mode.within(|| wrong_digests(&device(), CaseSize::Smallest));
        assert!(wrong.is_empty(), "{}: {wrong:#?}", mode.0);
    }
}

/// The critical case is a flushing thread; whole cases have the most subnormal numbers.
#[test]
fn whole_cases_keep_their_bits() {
    let wrong = MODES[0].within(|| wrong_digests(&device(), CaseSize::Whole));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_self_test_passes() {
    let opened = MODES[4].within(|| Device::builder(DeviceKind::Emulated).self_test(SelfTest::Always).open());
    assert!(opened.is_ok(), "{opened:?}");
}

struct Net {
    input: Linear,
    mlp: Mlp,
    dropout: Dropout,
    head: Linear,
}

impl Model for Net {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let x = self.input.forward(tape, &tape.input(batch.input::<f32>(0)?))?;
        let x = self.dropout.forward(tape, &self.mlp.forward_residual(tape, &x, &x)?)?;
        self.head.forward(tape, &x)
    }
}

fn state(device: &Device) -> TrainState<Net> {
    let mut spec = ParameterSpec::builder();
    let net = Net {
        input: Linear::new(spec.at("input"), INPUTS, 16),
        mlp: Mlp::new(spec.at("mlp"), 16, 32, 16),
        dropout: Dropout { p: 0.3 },
        head: Linear::new(spec.at("head"), 16, CLASSES),
    };
    spec.initialize(|entry| entry.name().starts_with("mlp").then(|| Initializer::he(16)));
    let schedule = Schedule::cosine(3, 9, 0.1);
    let config = AdamW { learning_rate: 0.02, clip: Some(0.3), schedule, ..AdamW::default() };
    let groups = ParameterGroups::new().no_decay(ParameterGroups::is_gain_bias_or_embedding);
    let state = TrainState::new(device, net, &spec.build().unwrap(), 7, config).unwrap();
    let head = state.model.head.weight;
    let state = state.with_monitored(head);
    state.with_parameter_groups(&groups).unwrap().with_dropout(5).unwrap().with_bf16_copy().unwrap()
}

/// Returns batches in which some numbers are subnormal.
fn batches() -> Vec<Vec<Points>> {
    let mut random = Random::new(3);
    let mut batch = |samples: usize| {
        let labels = random.belows(samples, CLASSES as u32);
        let mut x = random.normals(samples * INPUTS);
        x.iter_mut().step_by(5).for_each(|x| *x *= 1e-39);
        Points { x, labels }.in_parts(4)
    };
    [8, 8, 8, 6].map(&mut batch).into()
}

/// Returns the digest of the weights after an epoch, its mean loss and the loss of an evaluation,
/// all as bits.
fn trained(device: &Device, captured: bool, batches: &[Vec<Points>]) -> (String, [u64; 2]) {
    let mut arena = Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap();
    let state = state(device);
    let mut trainer = match captured {
        true => Trainer::captured(&mut arena, state, &batches[0][0]).unwrap(),
        false => Trainer::eager(&mut arena, state),
    };
    let mut progress = EpochProgress::default();
    let batches = batches.to_vec();
    let first = batches[0][0].clone();
    let loaded = Loader::new(batches.into_iter().map(Ok)).unwrap();
    trainer.fit_with(loaded, &mut progress, &mut ()).unwrap();
    let loss = trainer.evaluate(&first).unwrap();
    (trainer.state().parameters.sha256().unwrap(), [progress.mean_loss().to_bits(), loss.to_bits()])
}

#[test]
fn training_ends_with_the_same_weights() {
    let batches = batches();
    let device = device();
    for captured in [false, true] {
        let expected = trained(&device, captured, &batches);
        for mode in MODES {
            let before_it_opens = mode.within(|| trained(&self::device(), captured, &batches));
            assert_eq!(before_it_opens, expected, "{}, before the device is opened, captured {captured}", mode.0);
            let after = mode.within(|| trained(&device, captured, &batches));
            assert_eq!(after, expected, "{}, after the device was opened, captured {captured}", mode.0);
        }
    }
}

/// The opener's thread has one mode, and the training thread another.
#[test]
fn another_thread_may_have_another_mode() {
    let batches = batches();
    let expected = trained(&device(), true, &batches);
    let opened = MODES[4].within(device);
    let found = thread::scope(|scope| {
        let train = |mode: Mode| {
            let (opened, batches) = (&opened, &batches);
            scope.spawn(move || mode.within(|| trained(opened, true, batches)))
        };
        MODES.map(train).map(|thread| thread.join().unwrap())
    });
    assert!(found.iter().all(|found| *found == expected), "found the modes {found:?}, not {expected:?}");
}

/// The mode changes while a step runs, as when a shared library is loaded there.
#[test]
fn mode_changes_do_not_reach_kernels() {
    let device = device();
    let tiny: Vec<f32> = (1..=4096).map(|at| at as f32 * 1e-42).collect();
    let halved = |mode: Option<Mode>| {
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
        arena
            .step(|step| {
                let x = step.upload(&tiny, [tiny.len()])?;
                let scaled = || ops::scale(step, &x, 0.7);
                let y = match mode {
                    Some(mode) => mode.within(scaled)?,
                    None => scaled()?,
                };
                Ok(crate::support::bits(&step.read(&y)?))
            })
            .unwrap()
    };
    let expected = halved(None);
    assert!(expected.iter().any(|&word| word != 0));
    for mode in MODES {
        assert_eq!(halved(Some(mode)), expected, "{}", mode.0);
    }
}

/// Divides, which is inexact, and panics in the last of its blocks.
#[kernel]
unsafe fn divides_and_panics(divisor: f32, y: *mut f32) {
    let index = cuda_std::thread::index_1d() as usize;
    let quotient = index as f32 / divisor;
    assert!(index < 99, "planted, at {quotient}");
    // SAFETY: `y` has an element for each thread.
    unsafe { kernels::vector::store(y, index, quotient) };
}

// SAFETY: a thread touches the element of its index, and `y` has one for each.
contract! { unsafe divides_and_panics { block: 50 } |k| {
    Violation::unless_length("y", 100, k.y.len())?;
    Grid::new(2, 1, 1)
}}

#[test]
fn panicking_kernel_keeps_the_mode() {
    let device = device();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let mut failed = |mode: Mode| {
        mode.within(|| {
            let mut launch =
                || arena.step(|step| step.launch(divides_and_panics { divisor: 3.0, y: step.empty([100])?.out() }));
            [launch(), launch()]
        })
    };
    for mode in MODES {
        for outcome in failed(mode) {
            let Err(Error::Kernel(fault)) = outcome else { panic!("{}: {outcome:?}", mode.0) };
            assert!(fault.to_string().contains("planted, at 33"), "{fault}");
        }
    }
}

#[test]
fn panicking_step_keeps_the_mode() {
    let device = device();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    for mode in MODES {
        let panicked = mode
            .within(|| catch_unwind(AssertUnwindSafe(|| arena.step(|_| -> Result<()> { panic!("planted") }))).is_err());
        assert!(panicked, "{}", mode.0);
        let refused = mode.within(|| arena.step(|step| ops::scale(step, &step.upload(&[1.0], [2])?, 0.5).map(drop)));
        assert!(matches!(refused, Err(Error::Misuse { .. })), "{refused:?}");
    }
}

/// Returns the results of host computations outside steps, as bits.
fn host_numbers(arena: &mut Arena, logits: &[f32]) -> Vec<u64> {
    let mut numbers = Vec::new();
    let schedule = Schedule::cosine(7, 100, 0.07);
    numbers.extend([1, 3, 8, 50, 99, 1000].map(|number| schedule.factor(number).to_bits()));
    let adamw = AdamW { schedule, ..AdamW::default() };
    let sgd = Sgd { schedule, ..Sgd::default() };
    for number in [1, 2, 77] {
        let group = ParameterGroup::default();
        let settings = adamw.settings(number, &group).into_iter().chain(sgd.settings(number, &group));
        numbers.extend(settings.map(|setting| u64::from(setting.to_bits())));
    }
    for initializer in [Initializer::fan_in(7), Initializer::glorot(3, 8), Initializer::he(11)] {
        let (Initializer::Uniform { bound: number } | Initializer::Normal { deviation: number }) = initializer else {
            unreachable!()
        };
        numbers.push(u64::from(number.to_bits()));
    }
    let config = TokenSamplerConfig { temperature: 0.7, top_k: Some(40), top_p: Some(0.9) };
    let mut sampler = TokenSampler::new(config, 3).unwrap();
    numbers.extend((0..50).map(|_| u64::from(sampler.next(logits).unwrap())));
    let mut progress = EpochProgress::default();
    for number in 1..9 {
        let loss = f64::from_bits(0x3fb9_9999_9999_999a);
        progress.add(&Update { number, samples: 3, loss, ..Update::default() });
    }
    numbers.push(progress.mean_loss().to_bits());
    let check = GradCheck::default().run(arena, &[(&logits[..6], [6].into())], |_, inputs| inputs[0].tanh());
    numbers.push(check.unwrap().to_bits());
    numbers
}

#[test]
fn host_results_are_the_same() {
    let device = device();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let logits = Random::new(9).normals(300);
    let expected = host_numbers(&mut arena, &logits);
    for mode in MODES {
        assert_eq!(mode.within(|| host_numbers(&mut arena, &logits)), expected, "{}", mode.0);
    }
}

/// Returns the settings of all committed models and adapters, and the weights that are read,
/// merged and written, as a hash of their bits.
fn models(device: &Device) -> Vec<String> {
    let folders = |name: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(name);
        let mut folders: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        folders.sort();
        folders
    };
    let hash = |state: StateDict| {
        let words = state.iter().flat_map(|(_, _, values)| values).map(|value| u64::from(value.to_bits()));
        format!("{:x}", words.fold(0u64, |hash, word| (hash ^ word).wrapping_mul(0x100_0000_01b3)))
    };
    let mut found = Vec::new();
    for folder in folders("cases").into_iter().chain(folders("nf4")) {
        let Ok(mut files) = WeightFiles::open(&folder) else { continue };
        let (_, spec) = Transformer::frozen(files.config().clone(), |_| Some(FrozenType::F32)).unwrap();
        let mut parameters = Parameters::new(device, &spec, 1).unwrap();
        files.load(&mut parameters).unwrap();
        found.push(format!("{:?}", files.config()));
        found.push(hash(Weights::tensors(files.config(), &parameters).unwrap()));
    }
    for folder in folders("lora") {
        let lora = Lora::read(&folder).unwrap();
        let base = folder.join("../../cases").join(lora.base_model.as_ref().unwrap());
        let mut files = WeightFiles::open(base).unwrap();
        let (model, spec) = Transformer::with_lora(files.config().clone(), &lora, |_| FrozenType::F32).unwrap();
        let mut parameters = Parameters::new(device, &spec, 1).unwrap();
        let initial = parameters.sha256().unwrap();
        files.load(&mut parameters).unwrap();
        lora.load(&folder, files.config(), &mut parameters).unwrap();
        found.push(format!("{lora:?} {} {initial}", lora.scale(3, 10.0)));
        found.push(hash(Weights::merged(&model, &parameters).unwrap()));
    }
    found
}

#[test]
fn models_and_adapters_are_the_same() {
    let device = device();
    let expected = models(&device);
    assert!(expected.len() > 40, "{}", expected.len());
    for mode in MODES {
        let found = mode.within(|| models(&device));
        let differs = found.iter().zip(&expected).find(|(found, expected)| found != expected);
        assert!(differs.is_none() && found.len() == expected.len(), "{}: {differs:#?}", mode.0);
    }
}

/// Reports, errors and settings that are only displayed, or read from the environment, must not
/// trap either.
#[test]
fn displayed_values_do_not_trap() {
    let device = device();
    for mode in MODES {
        let text = mode.within(|| {
            let mut arena = Arena::builder(&device).capacity(Capacity::FractionOfAvailable(0.001)).build().unwrap();
            let recorder = MemoryRecorder::start(&mut arena, 100);
            let full = arena.step(|step| step.empty::<f32>([1 << 40]).map(drop)).unwrap_err();
            let snapshot = recorder.recording().pickle();
            let refused = Arena::builder(&device).capacity(Capacity::gib(1 << 20)).build().unwrap_err();
            format!("{full}{refused}{}{}", arena.report(), snapshot.len())
        });
        assert!(text.contains("MiB"), "{text}");
    }
}

/// A NaN or a subnormal number in loaded data is compared without a trap.
#[test]
fn non_finite_numbers_are_found() {
    let device = device();
    let mut spec = ParameterSpec::builder();
    let w = spec.add("w", [3], Initializer::ONE);
    let spec = spec.build().unwrap();
    for mode in MODES {
        mode.within(|| {
            let mut weights = Parameters::new(&device, &spec, 1).unwrap();
            let signalling = [f32::from_bits(0x7f80_0001), f32::from_bits(1), 1.0].map(f32::to_le_bytes);
            let refused = weights.load(|_| Some(signalling.as_flattened()), Transfer::new());
            assert!(matches!(refused, Err(Error::NotFinite { .. })), "{refused:?}");
            let subnormal = [f32::from_bits(1), f32::from_bits(7), 1.0].map(f32::to_le_bytes);
            weights.load(|_| Some(subnormal.as_flattened()), Transfer::new()).unwrap();
            assert_eq!(crate::support::bits(&weights.read(w).unwrap()), [1, 7, 0x3f80_0000]);
        });
    }
}
