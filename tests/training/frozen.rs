//! Frozen parameters: the gradients of all others keep their bits, nothing is computed or stored
//! for a frozen one, and a run continues only with the frozen weights that it began with.

#![forbid(unsafe_code)]

use crate::support::rank_threads::{DEADLINE, on_ranks};
use crate::support::{Random, bits, on_each_device};
use std::collections::BTreeMap;
use stepscope::check::faults::{Call, FaultPlan};
use stepscope::group::Group;
use stepscope::nn::{Block, Embedding, LayerNorm, Linear, Norm};
use stepscope::ops::{self, Activation, LabelRules, LmHeadConfig, Rotary};
use stepscope::parameters::{FrozenType, Initializer, ParameterEntry};
use stepscope::prelude::*;
use stepscope::tensor::{Element, Indices};

const WIDTH: usize = 32;
const VOCABULARY: usize = 40;
const SAMPLES: usize = 3;
const TOKENS: usize = 24;

/// A language model with every layer of the library, whose head may be its token table.
#[derive(Clone)]
struct Language {
    tokens: Embedding,
    positions: Embedding,
    blocks: [Block; 2],
    norm: Norm,
    head: Parameter,
    recompute: bool,
}

/// Chooses the type of a parameter that is frozen.
type Rule = fn(&str) -> bool;

fn language(tied: bool, frozen: Rule, stored: FrozenType) -> (Language, ParameterSpec) {
    let mut spec = ParameterSpec::builder();
    let tokens = Embedding::new(spec.at("tokens"), VOCABULARY, WIDTH, 0.5);
    let positions = Embedding::new(spec.at("positions"), TOKENS + 1, WIDTH, 0.5);
    let gpt2 = Block::gpt2(spec.at("gpt2"), WIDTH, 2, 64);
    let mut llama = Block::llama(spec.at("llama"), WIDTH, [4, 2], 48, Rotary::new(10_000.0));
    llama.attention = llama.attention.qk_norm(spec.at("llama.attention"), WIDTH / 4, 1e-6);
    let norm = Norm::Layer(LayerNorm::new(spec.at("norm"), WIDTH));
    let head = if tied { tokens.weight } else { Embedding::new(spec.at("head"), VOCABULARY, WIDTH, 0.5).weight };
    // Positions are added in f32, also to sums in BF16, so rounding them would change the sums.
    let is_exact = |name: &str| stored == FrozenType::F32 || name != "positions.weight";
    spec.freeze(|entry| (frozen(entry.name()) && is_exact(entry.name())).then_some(stored));
    let model = Language { tokens, positions, blocks: [gpt2, llama], norm, head, recompute: false };
    (model, spec.build().unwrap())
}

impl Language {
    fn loss<'s, S: Activation>(&self, tape: &Tape<'_, 's>, ids: &Indices<'s>) -> Result<Var<'s>> {
        let mut x: Var<'s, S> = self.positions.add_positions(tape, &self.tokens.forward(tape, *ids)?)?;
        for block in &self.blocks {
            x = match self.recompute {
                true => {
                    let block = block.clone();
                    tape.recompute(x, move |tape, x| block.forward(tape, &x))?
                }
                false => block.forward(tape, &x)?,
            };
        }
        let config = LmHeadConfig::default().tied().rules(LabelRules::default().weighted(0.01));
        tape.linear_cross_entropy(&self.norm.forward(tape, &x)?, self.head, *ids, config)
    }
}

/// The results of a step: the loss, each trained parameter's gradient, the clipping norm, and the
/// launches after the forward pass.
#[derive(Debug, PartialEq)]
struct Results {
    loss: u32,
    gradients: BTreeMap<String, Vec<u32>>,
    norm: u32,
    launches: u64,
}

fn ids() -> Vec<u32> {
    Random::new(5).belows(SAMPLES * TOKENS, VOCABULARY as u32)
}

fn results<S: Activation>(
    device: &Device,
    counted: Option<&FaultPlan>,
    model: &Language,
    spec: &ParameterSpec,
) -> Results {
    let parameters = Parameters::new(device, spec, 7).unwrap();
    let parameters = if <S as Element>::NAME == bf16::NAME { parameters.with_bf16_copy().unwrap() } else { parameters };
    let mut gradients = Gradients::zeros(&parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
    let launches = || counted.map_or(0, |plan| plan.count(Call::Launch));
    let (loss, launches) = arena
        .step(|step| {
            let tape = Tape::new(step, &parameters);
            let loss = model.loss::<S>(&tape, &step.upload_indices(&ids(), [SAMPLES, TOKENS])?)?;
            let value = step.read(loss.value())?;
            let before = launches();
            tape.backward_overwrite(&loss, &mut gradients)?;
            step.read(loss.value())?;
            Ok((value[0], launches() - before))
        })
        .unwrap();
    let norm = arena.step(|step| step.read(&ops::squared_norm(step, &gradients.lend_flat_mut::<f32>(step)?)?)).unwrap();
    let all = gradients.read_flat().unwrap();
    let named = |entry: &ParameterEntry| (entry.name().to_owned(), bits(&all[entry.range()]));
    let gradients = spec.entries().iter().map(named).collect();
    Results { loss: loss.to_bits(), gradients, norm: norm[0].to_bits(), launches }
}

/// The choices of frozen parameters: a list of a name and a rule.
const RULES: [(&str, Rule); 9] = [
    ("all but biases and gains", |name| !name.ends_with("bias") && !name.ends_with("gain")),
    ("biases and gains", |name| name.ends_with("bias") || name.ends_with("gain")),
    ("gains", |name| name.ends_with("gain")),
    ("biases", |name| name.ends_with("bias")),
    ("tables", |name| ["tokens.weight", "positions.weight"].contains(&name)),
    ("head and norm", |name| name.starts_with("head") || name.starts_with("norm")),
    ("first block", |name| name.starts_with("gpt2") || name.starts_with("tokens") || name.starts_with("positions")),
    ("last block", |name| name.starts_with("llama")),
    ("all but one matrix", |name| name != "gpt2.mlp.down.weight"),
];

fn gradients_keep_their_bits<S: Activation>(device: &Device, stored: FrozenType) {
    for tied in [false, true] {
        let (model, spec) = language(tied, |_| false, stored);
        let all = results::<S>(device, None, &model, &spec);
        for (what, rule) in RULES {
            for recompute in [false, true] {
                let (model, spec) = language(tied, rule, stored);
                let is_known = |name: &str| !rule(name) || name == "positions.weight";
                assert!(spec.has_frozen() && spec.entries().iter().all(|entry| is_known(entry.name())));
                let some = results::<S>(device, None, &Language { recompute, ..model }, &spec);
                assert_eq!(some.loss, all.loss, "{what}");
                assert_eq!(some.gradients.len(), spec.entries().len());
                for (name, gradient) in &some.gradients {
                    assert!(gradient.iter().any(|&bits| bits << 1 != 0), "{what}: the gradient of {name} is zero");
                    assert!(gradient == &all.gradients[name], "{what}: the gradient of {name} differs");
                }
            }
        }
    }
}

/// Checks that weights frozen in one type, and the same numbers in another, give the same bits,
/// with and without recompute.
fn same_as_converted<S: Activation>(device: &Device, rule: Rule, stored: FrozenType, plain: FrozenType) {
    let (model, spec) = language(true, rule, stored);
    assert!(!spec.frozen(stored).is_empty());
    let (plain_model, plain_spec) = language(true, rule, plain);
    let source = Parameters::new(device, &spec, 7).unwrap();
    let same = Parameters::new(device, &plain_spec, 7).unwrap();
    let is_bf16 = <S as Element>::NAME == bf16::NAME;
    let mut same = if is_bf16 { same.with_bf16_copy().unwrap() } else { same };
    for (parameter, entry) in plain_spec.iter() {
        let (ours, _) = spec.iter().find(|(_, ours)| ours.name() == entry.name()).unwrap();
        same.write(parameter, &source.read(ours).unwrap()).unwrap();
    }
    for recompute in [false, true] {
        let found = results::<S>(device, None, &Language { recompute, ..model.clone() }, &spec);
        let model = Language { recompute, ..plain_model.clone() };
        let mut gradients = Gradients::zeros(&same).unwrap();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
        let loss = arena.step(|step| {
            let tape = Tape::new(step, &same);
            let loss = model.loss::<S>(&tape, &step.upload_indices(&ids(), [SAMPLES, TOKENS])?)?;
            let value = step.read(loss.value())?;
            tape.backward_overwrite(&loss, &mut gradients)?;
            Ok(value[0])
        });
        assert_eq!(loss.unwrap().to_bits(), found.loss, "{stored:?}");
        let all = gradients.read_flat().unwrap();
        for entry in plain_spec.entries() {
            assert_eq!(bits(&all[entry.range()]), found.gradients[entry.name()], "{stored:?}: {}", entry.name());
        }
    }
}

on_each_device! {
    fn f32_gradients_keep_their_bits(device: &Device) {
        gradients_keep_their_bits::<f32>(device, FrozenType::F32);
    }

    /// A frozen weight in BF16 gives the bits of the BF16 copy of a trained one, and so does the
    /// copy of a frozen one in f32.
    fn bf16_gradients_keep_their_bits(device: &Device) {
        gradients_keep_their_bits::<bf16>(device, FrozenType::Bf16);
        gradients_keep_their_bits::<bf16>(device, FrozenType::F32);
    }

    /// Products in f32 read frozen weights in BF16 as f32, exactly.
    fn f32_reads_bf16_exactly(device: &Device) {
        let rule: Rule = |name| name.ends_with("proj.weight") || name == "tokens.weight";
        same_as_converted::<f32>(device, rule, FrozenType::Bf16, FrozenType::F32);
    }

    /// Frozen matrices in NF4 have the gradients of the weights that they decode to.
    fn nf4_has_gradients_of_its_weights(device: &Device) {
        let rule: Rule = |name| name.ends_with("weight") && name != "positions.weight";
        same_as_converted::<f32>(device, rule, FrozenType::Nf4, FrozenType::F32);
        same_as_converted::<bf16>(device, rule, FrozenType::Nf4, FrozenType::Bf16);
    }

    /// The norm that clips gradients sums over the trained parameters only.
    fn norm_excludes_frozen_parameters(device: &Device) {
        let (model, spec) = language(false, |name| name != "llama.mlp.down_proj.weight", FrozenType::F32);
        let found = results::<f32>(device, None, &model, &spec);
        let squares = found.gradients["llama.mlp.down_proj.weight"].iter().map(|&x| f64::from(f32::from_bits(x)).powi(2));
        let (got, want) = (f64::from(f32::from_bits(found.norm)), squares.sum::<f64>());
        assert!((got - want).abs() <= 1e-6 * want, "got {got}, expected {want}");
    }

    /// Captured steps of a model with frozen parameters have the bits of eager ones, with and
    /// without recompute.
    fn captured_steps_equal_eager_ones(device: &Device) {
        let rule: Rule = |name| !name.starts_with("llama.mlp") && !name.ends_with("bias");
        for stored in [FrozenType::Bf16, FrozenType::Nf4] {
            let mut digests = Vec::new();
            for captured in [false, true] {
                for recompute in [false, true] {
                    let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
                    let mut trainer = trainer(&mut arena, captured, recompute, rule, stored);
                    trainer.fit(batches(3)).unwrap();
                    digests.push(trainer.state().parameters.sha256().unwrap());
                }
            }
            assert!(digests.windows(2).all(|pair| pair[0] == pair[1]), "{stored:?}: {digests:?}");
        }
    }
}

/// Counts launches of a backward pass: none for a model that is frozen as a whole, and none for the
/// gradients of a frozen layer, or below the first trained one.
#[test]
fn frozen_gradients_are_not_launched() {
    let plan = FaultPlan::new();
    let device = Device::builder(DeviceKind::Emulated).layer(plan.clone()).open().unwrap();
    let (model, spec) = language(false, |_| true, FrozenType::F32);
    let none = results::<bf16>(&device, Some(&plan), &model, &spec);
    assert_eq!((none.launches, none.gradients.len()), (0, 0));

    let launches = |frozen: [bool; 2]| {
        let mut spec = ParameterSpec::builder();
        let layers = [Linear::new(spec.at("0"), 8, 8), Linear::new(spec.at("1"), 8, 8)];
        spec.freeze(|entry| frozen[usize::from(entry.name().starts_with('1'))].then_some(FrozenType::F32));
        let parameters = Parameters::new(&device, &spec.build().unwrap(), 7).unwrap();
        let mut gradients = Gradients::zeros(&parameters).unwrap();
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
        let launches = arena.step(|step| {
            let tape = Tape::new(step, &parameters);
            let x = tape.input(step.upload(&[0.5; 4 * 8], [4, 8])?);
            let loss = tape.mean(&layers[1].forward(&tape, &layers[0].forward(&tape, &x)?)?)?;
            step.read(loss.value())?;
            let before = plan.count(Call::Launch);
            tape.backward_overwrite(&loss, &mut gradients)?;
            step.read(loss.value())?;
            Ok(plan.count(Call::Launch) - before)
        });
        launches.unwrap()
    };
    let [both, lower, upper] = [[false, false], [false, true], [true, false]].map(launches);
    let of_one_layer = both - lower;
    assert!(of_one_layer >= 2, "a layer's backward computes the gradients of its weight and bias: {of_one_layer}");
    assert_eq!(both - upper, of_one_layer + 1, "a trained lower layer adds only the gradient of its result");
}

/// A frozen weight in BF16 takes 2 bytes, and no memory of gradients, moments or a copy.
#[test]
fn frozen_weights_take_two_bytes() {
    let plan = FaultPlan::new();
    let device = Device::builder(DeviceKind::Emulated).layer(plan.clone()).open().unwrap();
    let mut spec = ParameterSpec::builder();
    Linear::without_bias(spec.at("body"), 1000, 1001);
    let head = Linear::new(spec.at("head"), 10, 3);
    spec.freeze(|entry| entry.name().starts_with("body").then_some(FrozenType::Bf16));
    let spec = spec.build().unwrap();
    assert_eq!(spec.frozen_bytes(), (2 * 1000 * 1001u64).next_multiple_of(256));
    assert_eq!((spec.elements(), spec.trained_weights(), spec.weights()), (128, 33, 1000 * 1001 + 33));
    let before = plan.count(Call::Allocate);
    let parameters = Parameters::new(&device, &spec, 7).unwrap();
    assert_eq!(plan.count(Call::Allocate) - before, 2, "the trained and the frozen weights are one allocation each");
    let parameters = parameters.with_bf16_copy().unwrap();
    assert_eq!(plan.count(Call::Allocate) - before, 3, "the BF16 copy of the trained weights is a third allocation");
    assert_eq!((parameters.spec().elements(), parameters.bf16_copy().unwrap().len()), (128, 128));
    assert_eq!(Gradients::zeros(&parameters).unwrap().spec().elements(), 128);
    assert_eq!(parameters.read(head.weight).unwrap().len(), 30);
}

/// A model for a trainer.
struct Learner {
    language: Language,
}

impl Model<bf16> for Learner {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s, bf16>> {
        self.language.tokens.forward(tape, batch.indices(0)?)
    }

    fn loss<'s>(&self, tape: &Tape<'_, 's>, _: &Var<'s, bf16>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.language.loss::<bf16>(tape, &batch.indices(0)?)
    }
}

/// Samples of tokens.
#[derive(Clone)]
struct Texts(Vec<u32>);

impl HostBatch for Texts {
    fn len(&self) -> usize {
        self.0.len() / TOKENS
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        HostInputs::new().with(&self.0, [self.len(), TOKENS])
    }
}

fn batches(count: u64) -> impl Iterator<Item = Result<Vec<Texts>>> {
    (0..count).map(|number| {
        let part = |part| Texts(Random::new(2 * number + part).belows(SAMPLES * TOKENS, VOCABULARY as u32));
        Ok(vec![part(0), part(1)])
    })
}

fn state(device: &Device, recompute: bool, rule: Rule, stored: FrozenType) -> TrainState<Learner> {
    let (language, spec) = language(true, rule, stored);
    let model = Learner { language: Language { recompute, ..language } };
    TrainState::new(device, model, &spec, 7, AdamW { learning_rate: 0.01, clip: Some(0.5), ..AdamW::default() })
        .unwrap()
}

fn trainer<'a>(
    arena: &'a mut Arena,
    captured: bool,
    recompute: bool,
    rule: Rule,
    stored: FrozenType,
) -> Trainer<'a, Learner> {
    let state = state(arena.device(), recompute, rule, stored);
    match captured {
        true => Trainer::captured(arena, state, &batches(1).next().unwrap().unwrap()[0]).unwrap(),
        false => Trainer::eager(arena, state),
    }
}

/// A checkpoint has the trained weights only. It is restored with the frozen weights that it was
/// saved with, and with no others.
#[test]
fn checkpoints_name_their_frozen_weights() {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let rule: Rule = |name| !name.starts_with("llama.mlp");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(16)).build().unwrap();
    let mut first = trainer(&mut arena, false, false, rule, FrozenType::Bf16);
    let mut progress = EpochProgress::default();
    first.fit_with(batches(2), &mut progress, &mut ()).unwrap();
    Checkpoint::save(&path, &first.state().parameters, Some(&first.state().optimizer), &[]).unwrap();
    first.fit_with(batches(4).skip(2), &mut progress, &mut ()).unwrap();
    let want = first.state().parameters.sha256().unwrap();
    drop(first);

    let checkpoint = Checkpoint::load(&path).unwrap();
    let mut resumed = state(&device, false, rule, FrozenType::Bf16);
    let digest = resumed.parameters.frozen_sha256().unwrap().unwrap();
    assert_eq!(checkpoint.note("stepscope.frozen_sha256").unwrap(), digest);
    checkpoint.restore(&mut resumed.parameters, Some(&mut resumed.optimizer)).unwrap();
    let mut trainer = Trainer::eager(&mut arena, resumed);
    trainer.fit(batches(4).skip(2)).unwrap();
    assert_eq!(trainer.state().parameters.sha256().unwrap(), want);
    drop(trainer);

    let refused = |state: TrainState<Learner>, words: &str| {
        let TrainState { mut parameters, .. } = state;
        let before = parameters.sha256().unwrap();
        let error = checkpoint.restore(&mut parameters, None).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("load the frozen weights"), "{error}");
        assert_eq!(parameters.sha256().unwrap(), before);
    };
    refused(state(&device, false, |_| false, FrozenType::F32), "but the model has no frozen weights");
    refused(state(&device, false, rule, FrozenType::F32), "but the model has frozen weights with SHA-256");
    let mut other = state(&device, false, rule, FrozenType::Bf16);
    let (parameter, entry) = other.parameters.spec().iter().find(|(_, entry)| entry.frozen().is_some()).unwrap();
    let values = vec![0.5; entry.shape().elements()];
    other.parameters.write(parameter, &values).unwrap();
    refused(other, "but the model has frozen weights with SHA-256");
}

/// Two ranks train the same weights as one, and refuse to begin with different frozen weights.
#[test]
fn ranks_compare_frozen_weights() {
    let rule: Rule = |name| !name.starts_with("llama.mlp");
    let train = |device: &Device, group: Group, changes: bool| {
        let mut state = state(device, false, rule, FrozenType::Bf16);
        if changes && group.rank() == 1 {
            let spec = state.parameters.spec().clone();
            let (parameter, entry) = spec.iter().find(|(_, entry)| entry.frozen().is_some()).unwrap();
            state.parameters.write(parameter, &vec![0.5; entry.shape().elements()])?;
        }
        let state = state.in_group(&group, 2)?;
        let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build()?;
        let mut trainer = Trainer::eager(&mut arena, state);
        trainer.fit(batches(3))?;
        trainer.state().parameters.sha256()
    };
    let run = |ranks, changes| {
        on_ranks((DeviceKind::Emulated, ranks), DEADLINE, |device, group| train(device, group, changes))
    };
    let [one, two] = [1, 2].map(|ranks| run(ranks, false).into_iter().map(Result::unwrap).collect::<Vec<_>>());
    assert_eq!([&one[0], &one[0]], [&two[0], &two[1]]);
    for refused in run(2, true) {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("frozen weights"), "{error}");
    }
}

/// Handles of frozen parameters have no gradients, and stacks are trained or frozen as a whole.
#[test]
fn misuses_of_frozen_parameters_are_refused() {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let mut spec = ParameterSpec::builder();
    let head = spec.add("head", [4, 4], Initializer::ONE);
    let body = spec.add("body", [4, 4], Initializer::ONE);
    let stack = spec.add_stack(2, |number| format!("gain{number}"), [4], Initializer::ONE);
    spec.freeze(|entry| ["body", "gain0"].contains(&entry.name()).then_some(FrozenType::Bf16));
    let spec = spec.build().unwrap();
    let parameters = Parameters::new(&device, &spec, 7).unwrap();
    let gradients = Gradients::zeros(&parameters).unwrap();
    let refused = |result: Result<()>, words: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(gradients.read(body).map(drop), "`body`, which is frozen");
    refused(spec.stack(&stack).map(drop), "all trained, or all frozen in one type, got `gain0` and `gain1`");
    assert_eq!(gradients.read(head).unwrap(), [0.0; 16]);
    assert_eq!(parameters.read(body).unwrap(), [1.0; 16]);
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let mut gradients = gradients;
    let error = arena.step(|step| {
        let tape = Tape::new(step, &parameters);
        let x = tape.input(step.upload(&[0.5; 8], [2, 4])?);
        let y = tape.linear(&tape.linear(&x, head, None)?, body, None)?;
        let spy = tape.op("spy", [&y])?.record(*y.value(), move |back, _| back.gradient(body).map(drop));
        let loss = tape.mean(&spy)?;
        tape.backward(&loss, &mut gradients)
    });
    refused(error, "`body`, which is frozen");
    // Matrices that are not the parameter's outputs, also where the sum overflows.
    for outputs in [vec![8], vec![0, 16], vec![4, 12], vec![usize::MAX - 7, 24], vec![1 << 63, 1 << 63, 16]] {
        let mut spec = ParameterSpec::builder();
        spec.add("w", [16, 16], Initializer::ZERO);
        spec.freeze(|_| Some(FrozenType::Nf4));
        spec.matrices(|_| Some(outputs.clone()));
        refused(spec.build().map(drop), "of 8 outputs in each matrix, in NF4, got `w` [16, 16] of outputs [");
    }
}
