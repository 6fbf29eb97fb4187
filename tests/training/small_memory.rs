//! Split masters and moments in 8 bits: what is stored, lent, saved and restored, and how much
//! memory it takes.

use crate::support::{Random, bits, on_each_device, words};
use std::process::Command;
use stepscope::memory::ProcessMemory;
use stepscope::nn::{Linear, RmsNorm};
use stepscope::ops::{self, LmHeadConfig};
use stepscope::optim::{Sgd, UpdateArguments, UpdateRule};
use stepscope::parameters::{AnyBuffer, GradientType, Initializer, MasterType, StateType};
use stepscope::prelude::*;

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap()
}

fn small(spec: ParameterSpec) -> ParameterSpec {
    spec.with_masters(MasterType::Split).with_state(StateType::Bits8)
}

fn smallest(spec: ParameterSpec) -> ParameterSpec {
    small(spec).with_gradients(GradientType::Bf16)
}

/// Returns a spec of one parameter with this many elements, and of another one.
fn spec_of(elements: usize) -> (ParameterSpec, [Parameter; 2]) {
    let mut spec = ParameterSpec::builder();
    let w = spec.add("w", [elements], Initializer::fan_in(4));
    let other = spec.add("other", [5], Initializer::Constant(0.1));
    (spec.build().unwrap(), [w, other])
}

/// Rounds to 24 bits, to nearest, ties to even.
fn rounded(value: f32) -> f32 {
    f32::from_bits((value.to_bits() + 0x7f + (value.to_bits() >> 8 & 1)) & !0xff)
}

on_each_device! {
    /// Initial weights, and written ones, are those in f32, rounded once. Other parameters and the
    /// padding do not change.
    fn weights_are_rounded_f32(device: &Device) {
        for elements in [1, 3, 10, 64, 1000] {
            let (spec, handles) = spec_of(elements);
            let exact = Parameters::new(device, &spec, 7).unwrap();
            let mut split = Parameters::new(device, &small(spec), 7).unwrap();
            let all = |parameters: &Parameters| handles.map(|handle| parameters.read(handle).unwrap());
            let [w, other] = all(&exact).map(|values| values.into_iter().map(rounded).collect::<Vec<_>>());
            assert_eq!(all(&split), [w.clone(), other.clone()]);
            let halves: Vec<u16> = split.read_as::<bf16>(handles[0]).unwrap().iter().map(|half| half.to_bits()).collect();
            assert!(halves.iter().zip(&w).all(|(half, w)| bf16::from_f32(*w).to_bits() == *half));
            let values = Random::new(3).normals(elements);
            split.write(handles[0], &values).unwrap();
            let values: Vec<f32> = values.into_iter().map(rounded).collect();
            assert_eq!(all(&split), [values.clone(), other.clone()]);
            let mut flat = split.read_flat().unwrap();
            flat[..elements].fill(0.0);
            let start = split.spec().entries()[1].start();
            flat[start..][..5].fill(0.0);
            assert!(bits(&flat).iter().all(|&word| word == 0));
            // A file in f32.
            let bytes: Vec<u8> = [w.clone(), other].concat().iter().flat_map(|value| value.to_le_bytes()).collect();
            let (first, second) = bytes.split_at(4 * elements);
            split.load(|entry| Some(if entry.name() == "w" { first } else { second }), stepscope::upload::Transfer::new()).unwrap();
            assert_eq!(split.read(handles[0]).unwrap(), w);
        }
    }

    /// Kernels get the BF16 half, or all 24 bits in f32.
    fn both_types_are_lent(device: &Device) {
        let (spec, [w, other]) = spec_of(10);
        let parameters = Parameters::new(device, &small(spec), 7).unwrap();
        let (wide, half, next) = arena(device)
            .step(|step| {
                let (wide, half) = (parameters.lend(step, w)?, parameters.lend_as::<bf16>(step, w)?);
                let next = parameters.lend(step, other)?;
                Ok((step.read(&wide)?, step.read(&half)?, step.read(&next)?))
            })
            .unwrap();
        assert_eq!(wide, parameters.read(w).unwrap());
        assert_eq!(next, parameters.read(other).unwrap());
        assert!(wide.iter().zip(&half).all(|(wide, half)| (wide / half.to_f32() - 1.0).abs() <= 1.0 / 256.0));
    }

    /// 10,000 updates of a 10,000th of the weight, which a BF16 weight would not show.
    fn small_changes_add_up(device: &Device) {
        let (spec, [w, _]) = spec_of(64);
        let rule = Sgd { learning_rate: 1e-4, weight_decay: 1.0, ..Sgd::default() };
        let mut parameters = Parameters::new(device, &small(spec), 7).unwrap();
        let before = parameters.read(w).unwrap();
        let gradients = Gradients::zeros(&parameters).unwrap();
        let mut optimizer = Optimizer::new(&parameters, rule).unwrap();
        let mut arena = arena(device);
        for _ in 0..10_000 {
            let ticket = optimizer.advance().unwrap();
            arena.step(|step| optimizer.apply(ticket, step, &mut parameters, &gradients)).unwrap();
        }
        let expected = (1.0 - 1e-4f64).powi(10_000);
        for (before, after) in before.iter().zip(parameters.read(w).unwrap()) {
            let ratio = f64::from(after) / f64::from(*before);
            assert!((ratio / expected - 1.0).abs() < 0.05, "{before}: {ratio} instead of {expected}");
        }
        // The same update of a BF16 weight is less than half of its last place.
        assert_eq!(bf16::from_f32(1.0 - 1e-4), bf16::ONE);
    }
}

/// A model with a gain, a bias and matrices, in BF16.
struct Small {
    hidden: Linear,
    norm: RmsNorm,
    head: Linear,
}

const INPUTS: usize = 12;
type Points = crate::support::points::Points<INPUTS>;

impl Model<bf16> for Small {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s, bf16>> {
        let x = tape.input(ops::to_bf16(tape.step(), &batch.input::<f32>(0)?)?);
        let x = self.norm.forward(tape, &self.hidden.forward(tape, &x)?)?;
        self.head.forward(tape, &x)
    }

    fn loss<'s>(&self, tape: &Tape<'_, 's>, y: &Var<'s, bf16>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        tape.cross_entropy(y, batch.indices(1)?)
    }
}

fn state(device: &Device, stored: impl FnOnce(ParameterSpec) -> ParameterSpec) -> TrainState<Small> {
    let mut spec = ParameterSpec::builder();
    let hidden = Linear::new(spec.at("hidden"), INPUTS, 64);
    let model = Small { hidden, norm: RmsNorm::new(spec.at("norm"), 64), head: Linear::new(spec.at("head"), 64, 8) };
    let rule = AdamW { learning_rate: 0.01, clip: Some(1.0), ..AdamW::default() };
    TrainState::new(device, model, &stored(spec.build().unwrap()), 7, rule).unwrap()
}

fn batches(count: usize) -> Vec<Vec<Points>> {
    let mut random = Random::new(3);
    (0..count)
        .map(|_| {
            let labels = random.belows(16, 8);
            let x = labels.iter().flat_map(|&label| random.normals(INPUTS).into_iter().map(move |x| x + label as f32));
            vec![Points { x: x.collect(), labels: labels.clone() }]
        })
        .collect()
}

type Bits = Vec<Vec<u32>>;

fn bits_of(trainer: &Trainer<'_, Small>) -> Bits {
    let TrainState { parameters, optimizer, .. } = trainer.state();
    parameters.regions().into_iter().chain(optimizer.state()).map(words).collect()
}

on_each_device! {
    /// A BF16 model with split masters learns, eager and captured alike, and after a restart; with
    /// gradients in f32 and in BF16.
    fn model_in_bf16_learns(device: &Device) {
        for small in [small, smallest] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint.safetensors");
        let batches = batches(12);
        let mut space = arena(device);
        let mut eager = Trainer::eager(&mut space, state(device, small));
        let losses: Vec<f64> = batches.iter().map(|batch| eager.update(batch).unwrap().loss).collect();
        assert!(losses[11] < 0.8 * losses[0], "{losses:?}");
        let expected = bits_of(&eager);
        drop(eager);
        let mut space = arena(device);
        let captured = Trainer::captured(&mut space, state(device, small), &batches[0][0]).unwrap();
        let mut captured = captured.checkpoint(&path, None);
        for batch in &batches[..5] {
            captured.update(batch).unwrap();
        }
        captured.save(&EpochProgress::default(), &[]).unwrap();
        for batch in &batches[5..] {
            captured.update(batch).unwrap();
        }
        assert_eq!(bits_of(&captured), expected);
        drop(captured);
        let mut space = arena(device);
        let mut resumed = Trainer::eager(&mut space, state(device, small));
        resumed.restore(&Checkpoint::load(&path).unwrap()).unwrap();
        for batch in &batches[5..] {
            resumed.update(batch).unwrap();
        }
        assert_eq!(bits_of(&resumed), expected);
        // The same data order in f32 gives nearly the same losses.
        drop(resumed);
        let mut space = arena(device);
        let mut full = Trainer::eager(&mut space, state(device, |spec| spec));
        for (batch, small) in batches.iter().zip(&losses) {
            let loss = full.update(batch).unwrap().loss;
            assert!((loss - small).abs() < 0.05 * loss, "{loss} {small}");
        }
        }
    }

    /// Gradients in BF16 are those in f32, rounded once. Those of a second pass are added in f32,
    /// and rounded again. The padding stays zero.
    fn gradients_are_rounded_sums(device: &Device) {
        let batches = batches(2);
        let mut space = arena(device);
        let mut gradients_of = |stored: fn(ParameterSpec) -> ParameterSpec, batches: &[Vec<Points>]| {
            let mut state = state(device, stored);
            for batch in batches {
                space.step(|step| {
                    let batch = step.upload_inputs(&batch[0].inputs()?)?;
                    let tape = Tape::new(step, &state.parameters);
                    let loss = state.model.training_loss(&tape, &batch)?;
                    tape.backward(&loss, &mut state.gradients)
                }).unwrap();
            }
            let TrainState { model: Small { hidden, norm, head }, gradients, .. } = &state;
            let all = [hidden.weight, norm.gain, head.bias.unwrap(), head.weight].map(|of| gradients.read(of).unwrap());
            let region = gradients.region().unwrap();
            (all.concat(), words(region), region.bytes())
        };
        let round = |value: f32| bf16::from_f32(value).to_f32();
        let [(first, ..), (second, ..)] = [0, 1].map(|at| gradients_of(small, &batches[at..][..1]));
        let (rounded, stored, bytes) = gradients_of(smallest, &batches[..1]);
        assert_eq!(rounded, first.iter().copied().map(round).collect::<Vec<_>>());
        assert_eq!(bytes, 2 * state(device, smallest).parameters.spec().elements());
        let used = stored.iter().flat_map(|word| [word & 0xffff, word >> 16]).filter(|half| half & 0x7fff != 0).count();
        assert!(used <= state(device, small).parameters.spec().trained_weights(), "{used}");
        let (sum, ..) = gradients_of(smallest, &batches);
        for (sum, (first, second)) in sum.iter().zip(first.iter().zip(&second)) {
            let expected = round(*first) + second;
            let largest = first.abs().max(second.abs());
            assert!((sum - expected).abs() <= expected.abs() / 256.0 + largest * 1e-5, "{sum} {expected}");
            assert_eq!(*sum, round(*sum));
        }
    }

    /// The head of a language model gives the memory of its gradient away. The result is the
    /// gradient in f32, rounded once, whatever the loss is multiplied by.
    fn head_gradients_are_rounded(device: &Device) {
        const ROWS: usize = 24;
        let mut space = arena(device);
        let (x, labels) = (Random::new(5).normals(ROWS * 16), Random::new(6).belows(ROWS, 40));
        for factor in [1.0, 0.3] {
            let mut gradient = |stored: GradientType| {
                let mut spec = ParameterSpec::builder();
                let w = spec.add("w", [40, 16], Initializer::fan_in(16));
                let parameters = Parameters::new(device, &spec.build().unwrap().with_gradients(stored), 7).unwrap();
                let mut gradients = Gradients::zeros(&parameters).unwrap();
                space.step(|step| {
                    let tape = Tape::new(step, &parameters);
                    let x = tape.input(step.upload(&x, [ROWS, 16])?);
                    let labels = step.upload_indices(&labels, [ROWS])?;
                    let loss = tape.linear_cross_entropy(&x, w, labels, LmHeadConfig::default().tied())?;
                    tape.backward_overwrite(&(loss * factor)?, &mut gradients)
                }).unwrap();
                gradients.read(w).unwrap()
            };
            let [exact, rounded] = [GradientType::F32, GradientType::Bf16].map(&mut gradient);
            assert!(exact.iter().any(|&value| value != 0.0));
            assert_eq!(rounded, exact.iter().map(|&value| bf16::from_f32(value).to_f32()).collect::<Vec<_>>());
        }
    }
}

/// A checkpoint states the types that it stores, and a run of other types refuses it.
#[test]
fn other_types_are_refused() {
    let device = crate::support::open(DeviceKind::Emulated);
    let folder = tempfile::tempdir().unwrap();
    let types = |masters, state| move |spec: ParameterSpec| spec.with_masters(masters).with_state(state);
    let all = [
        (MasterType::F32, StateType::F32, "weights and state in f32"),
        (MasterType::F32, StateType::Bits8, "f32 masters and bits8 state"),
        (MasterType::Split, StateType::F32, "split masters and f32 state"),
        (MasterType::Split, StateType::Bits8, "split masters and bits8 state"),
    ];
    let path = |text: &str| folder.path().join(text);
    for (masters, moments, text) in all {
        let TrainState { parameters, optimizer, .. } = state(&device, types(masters, moments));
        Checkpoint::save(path(text), &parameters, Some(&optimizer), &[]).unwrap();
    }
    for (masters, moments, ours) in all {
        let TrainState { mut parameters, mut optimizer, .. } = state(&device, types(masters, moments));
        for (.., theirs) in all {
            let restored = Checkpoint::load(path(theirs)).unwrap().restore(&mut parameters, Some(&mut optimizer));
            if ours == theirs {
                restored.unwrap();
                continue;
            }
            let error = restored.unwrap_err().to_string();
            assert!(error.contains(&format!("was saved with {theirs}, but the model has {ours}")), "{error}");
        }
    }
}

/// Values that are not finite are found in each type.
#[test]
fn not_finite_weights_are_named() {
    let device = crate::support::open(DeviceKind::Emulated);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint.safetensors");
    let TrainState { model, mut parameters, optimizer, .. } = state(&device, small);
    parameters.write(model.norm.gain, &[f32::NAN; 64]).unwrap();
    let error = Checkpoint::save(&path, &parameters, Some(&optimizer), &[]).unwrap_err().to_string();
    assert!(error.contains("norm.gain"), "{error}");
    assert!(parameters.check_finite(0).unwrap_err().to_string().contains("norm.gain"));
}

/// A rule that knows only f32 is refused by name.
#[test]
fn rule_without_small_update_is_refused() {
    struct Still;
    impl UpdateRule for Still {
        fn name(&self) -> &'static str {
            "still"
        }

        fn settings(&self, _: u64, _: &stepscope::optim::ParameterGroup) -> Vec<f32> {
            vec![0.0]
        }

        fn queue<'s>(&self, _: &Step<'s>, _: UpdateArguments<'_, 's>) -> Result<()> {
            Ok(())
        }
    }
    let device = crate::support::open(DeviceKind::Emulated);
    let (spec, _) = spec_of(3);
    let mut parameters = Parameters::new(&device, &small(spec), 7).unwrap();
    let gradients = Gradients::zeros(&parameters).unwrap();
    let mut optimizer = Optimizer::new(&parameters, Still).unwrap();
    let ticket = optimizer.advance().unwrap();
    let error = arena(&device).step(|step| optimizer.apply(ticket, step, &mut parameters, &gradients)).unwrap_err();
    assert!(error.to_string().contains("still: expected weights and state in f32"), "{error}");
}

/// Marks the process that measures its own memory.
const MEASURES: &str = "STEPSCOPE_SMALL_MEMORY_MEASURES";

/// Returns the bytes that the process has for weights, their gradients and AdamW's moments, and
/// those that their buffers own.
fn measured(device: &Device, spec: &ParameterSpec) -> [u64; 2] {
    let resident = || {
        device.synchronize(device.deadline()).unwrap();
        ProcessMemory::read().unwrap().resident_bytes
    };
    let before = resident();
    let parameters = Parameters::new(device, spec, 7).unwrap().with_bf16_copy().unwrap();
    let gradients = Gradients::zeros(&parameters).unwrap();
    let optimizer = Optimizer::new(&parameters, AdamW::default()).unwrap();
    let taken = resident() - before;
    let regions = parameters.regions().into_iter().chain(optimizer.state()).map(AnyBuffer::bytes).sum::<usize>();
    // The halves of split masters are among the regions.
    let copy = parameters.bf16_copy().filter(|_| spec.masters() == MasterType::F32).map_or(0, |copy| copy.len());
    let owned = regions + copy * size_of::<bf16>() + gradients.region().map_or(0, AnyBuffer::bytes);
    [taken, owned as u64]
}

/// The bytes for each weight, by setting: on paper, by the spec, as the buffers own them, and as
/// the process has them, within 2 %. docs/finetune.md has the table.
#[cfg(target_os = "linux")]
#[test]
fn bytes_of_a_weight_are_counted() {
    const NAME: &str = "small_memory::bytes_of_a_weight_are_counted";
    const WEIGHTS: usize = 1 << 22;
    if std::env::var_os(MEASURES).is_none() {
        // Other tests of this process take memory too.
        let mut own = Command::new(std::env::current_exe().unwrap());
        assert!(own.args(["--exact", NAME, "--nocapture"]).env(MEASURES, "1").status().unwrap().success());
        return;
    }
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/finetune.md")).unwrap();
    let device = crate::support::open(DeviceKind::Emulated);
    let settings = [
        (MasterType::F32, StateType::F32, GradientType::F32, 4.0 + 2.0 + 4.0 + 8.0),
        (MasterType::F32, StateType::Bits8, GradientType::F32, 4.0 + 2.0 + 4.0 + 2.125),
        (MasterType::Split, StateType::F32, GradientType::F32, 3.0 + 4.0 + 8.0),
        (MasterType::Split, StateType::Bits8, GradientType::F32, 3.0 + 4.0 + 2.125),
        (MasterType::Split, StateType::Bits8, GradientType::Bf16, 3.0 + 2.0 + 2.125),
        (MasterType::Split, StateType::Bits8, GradientType::Released, 3.0 + 2.125),
    ];
    for (masters, state, of_gradients, paper) in settings {
        let mut spec = ParameterSpec::builder();
        spec.add("w", [WEIGHTS / 64, 64], Initializer::fan_in(64));
        let spec = spec.build().unwrap().with_masters(masters).with_state(state).with_gradients(of_gradients);
        // Upload slots and threads are made once.
        measured(&device, &spec);
        let counted = measured(&device, &spec).map(|bytes| bytes as f64 / WEIGHTS as f64);
        let copy = if masters == MasterType::F32 { 2.0 } else { 0.0 };
        let stored = spec.masters_bytes() + 2 * spec.state_bytes() + spec.gradients_bytes();
        let computed = stored as f64 / WEIGHTS as f64 + copy;
        println!(
            "{masters:?} {state:?} {of_gradients:?}: {paper} on paper, {counted:?} by the process and the buffers"
        );
        assert_eq!(computed, paper, "{masters:?} {state:?}");
        assert!(
            counted.iter().all(|counted| (counted / paper - 1.0).abs() < 0.02),
            "{masters:?} {state:?}: {counted:?}"
        );
        let row = format!("| {masters:?} | {state:?} | {of_gradients:?} | {paper:.3} | {:.3} |", counted[1]);
        assert!(page.contains(&row), "docs/finetune.md must have the row {row}");
    }
}
