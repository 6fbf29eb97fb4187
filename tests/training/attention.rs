//! `nn::MultiHeadAttention` as models use it: its parameter names, its equivalence to single ops,
//! and its training, captured and eager. Its memory grows only with the number of tokens.

#![forbid(unsafe_code)]

mod cached;

use crate::support::{Random, bits, on_each_device};
use std::num::NonZeroU32;
use stepscope::capture::{Captured, Output, Record};
use stepscope::nn::{Linear, MultiHeadAttention, QueryKeyNorm};
use stepscope::ops::{self, AttentionConfig, AttentionMask, Rotary};
use stepscope::optim::UpdateTicket;
use stepscope::prelude::*;
use stepscope::tensor::{Indices, Saved};

const BATCH: usize = 2;
const TOKENS: usize = 70;
const WIDTH: usize = 64;
const EPSILON: f32 = 1e-6;

/// A layer of each kind, in this order.
struct Layers {
    gpt2: MultiHeadAttention,
    vit: MultiHeadAttention,
    llama: MultiHeadAttention,
    qwen: MultiHeadAttention,
    local: MultiHeadAttention,
}

impl Layers {
    fn new() -> (Self, ParameterSpec) {
        let mut spec = ParameterSpec::builder();
        let layers = Self {
            gpt2: MultiHeadAttention::new(spec.at("gpt2"), WIDTH, 2).causal(),
            vit: MultiHeadAttention::new(spec.at("vit"), WIDTH, 1),
            llama: MultiHeadAttention::grouped(spec.at("llama"), WIDTH, [4, 2]).causal().rotary(Rotary::new(500_000.0)),
            qwen: MultiHeadAttention::grouped(spec.at("qwen"), WIDTH, [4, 1])
                .causal()
                .rotary(Rotary::default())
                .qk_norm(spec.at("qwen"), WIDTH / 4, EPSILON),
            local: MultiHeadAttention::new(spec.at("local"), WIDTH, 2)
                .sees(AttentionMask::SlidingWindow(NonZeroU32::new(16).unwrap()))
                .qk_norm(spec.at("local"), WIDTH / 2, EPSILON),
        };
        (layers, spec.build().expect("the names are different"))
    }
}

/// A layer or its equivalent ops, from an input and a tape to an output.
type Forward = for<'t, 's> fn(&Layers, &Tape<'t, 's>, &Var<'s>, Saved<'s, u32>) -> Result<Var<'s>>;

/// Returns the output and all gradients for a loss that weighs each output element differently.
fn run(device: &Device, forward: Forward) -> (Vec<u32>, Vec<u32>) {
    let (layers, spec) = Layers::new();
    let parameters = Parameters::new(device, &spec, 7).unwrap();
    let mut gradients = Gradients::zeros(&parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap();
    let x = Random::new(3).normals(BATCH * TOKENS * WIDTH);
    let y = arena.step(|step| {
        let tape = Tape::new(step, &parameters);
        let x = tape.input(step.upload(&x, [BATCH, TOKENS, WIDTH])?);
        let documents: Vec<u32> = (0..BATCH * TOKENS).map(|token| (token % TOKENS / 30) as u32).collect();
        let y = forward(&layers, &tape, &x, step.upload(&documents, [BATCH, TOKENS])?.save())?;
        let labels: Vec<u32> = (0..BATCH * TOKENS).map(|row| (row % WIDTH) as u32).collect();
        let labels = step.upload_indices(&labels, [labels.len()])?;
        let loss = tape.cross_entropy_by(
            &y.reshape([BATCH * TOKENS, WIDTH])?,
            labels,
            ops::LabelRules::default().weighted(1.0),
        )?;
        tape.backward_overwrite(&loss, &mut gradients)?;
        step.read(y.value())
    });
    (bits(&y.unwrap()), bits(&gradients.read_flat().unwrap()))
}

#[test]
fn names_match_other_libraries() {
    let (_, spec) = Layers::new();
    let shapes: Vec<String> =
        spec.entries().iter().map(|entry| format!("{} {}", entry.name(), entry.shape())).collect();
    let [projections, biases] = [["qkv_proj.weight", "o_proj.weight"], ["qkv_proj.bias", "o_proj.bias"]];
    let full = |name: &str| {
        let extents = [["[64, 192]", "[192]"], ["[64, 64]", "[64]"]];
        [0, 1]
            .map(|at| {
                [[projections[at], extents[at][0]], [biases[at], extents[at][1]]]
                    .map(|[kind, shape]| format!("{name}.{kind} {shape}"))
            })
            .concat()
    };
    let grouped = |name: &str, shape: &str| {
        vec![format!("{name}.qkv_proj.weight {shape}"), format!("{name}.o_proj.weight [64, 64]")]
    };
    let norms =
        |name: &str, head: usize| ["q_norm", "k_norm"].map(|norm| format!("{name}.{norm}.gain [{head}]")).to_vec();
    let expected = [
        full("gpt2"),
        full("vit"),
        grouped("llama", "[64, 128]"),
        grouped("qwen", "[64, 96]"),
        norms("qwen", 16),
        full("local"),
        norms("local", 32),
    ];
    assert_eq!(shapes, expected.concat());
}

on_each_device! {
    fn layers_match_their_formulas(device: &Device) {
        let pairs: [(&str, Forward, Forward); 6] = [
            ("gpt2", |layers, tape, x, _| layers.gpt2.forward(tape, x), |layers, tape, x, _| {
                let MultiHeadAttention { qkv, output, .. } = layers.gpt2;
                let qkv = tape.linear(x, qkv.weight, qkv.bias)?;
                let mixed = tape.attention(&qkv, None, &AttentionConfig::new(2).causal())?;
                tape.linear(&mixed, output.weight, output.bias)
            }),
            ("vit", |layers, tape, x, _| layers.vit.forward(tape, x), |layers, tape, x, _| {
                let MultiHeadAttention { qkv, output, .. } = layers.vit;
                let mixed = tape.attention(&tape.linear(x, qkv.weight, qkv.bias)?, None, &AttentionConfig::new(1).scale(0.125))?;
                tape.linear(&mixed, output.weight, output.bias)
            }),
            ("llama", |layers, tape, x, _| layers.llama.forward(tape, x), |layers, tape, x, _| {
                let MultiHeadAttention { qkv, output, .. } = layers.llama;
                let form = AttentionConfig::new(4).kv_heads(2).causal();
                let qkv = tape.rotary(&tape.linear(x, qkv.weight, None)?, Rotary::new(500_000.0), &form)?;
                tape.linear(&tape.attention(&qkv, None, &form)?, output.weight, None)
            }),
            ("qwen", |layers, tape, x, _| layers.qwen.forward(tape, x), |layers, tape, x, _| {
                let MultiHeadAttention { qkv, output, qk_norm, .. } = &layers.qwen;
                let form = AttentionConfig::new(4).kv_heads(1).causal();
                let Some(QueryKeyNorm::Heads { gains, .. }) = qk_norm else { panic!("{qk_norm:?}") };
                let qkv = tape.qk_norm(&tape.linear(x, qkv.weight, None)?, gains, EPSILON, &form)?;
                let qkv = tape.rotary(&qkv, Rotary::default(), &form)?;
                tape.linear(&tape.attention(&qkv, None, &form)?, output.weight, None)
            }),
            ("local", |layers, tape, x, _| layers.local.forward(tape, x), |layers, tape, x, _| {
                let MultiHeadAttention { qkv, output, qk_norm, .. } = &layers.local;
                let form = AttentionConfig::new(2).sees(AttentionMask::SlidingWindow(NonZeroU32::new(16).unwrap()));
                let Some(QueryKeyNorm::Heads { gains, .. }) = qk_norm else { panic!("{qk_norm:?}") };
                let qkv = tape.qk_norm(&tape.linear(x, qkv.weight, qkv.bias)?, gains, EPSILON, &form)?;
                tape.linear(&tape.attention(&qkv, None, &form)?, output.weight, output.bias)
            }),
            ("gpt2, documents", |layers, tape, x, documents| {
                layers.gpt2.forward_masked(tape, x, &layers.gpt2.config().documents(documents))
            }, |layers, tape, x, documents| {
                let MultiHeadAttention { qkv, output, .. } = layers.gpt2;
                let form = AttentionConfig::new(2).causal().documents(documents);
                tape.linear(&tape.attention(&tape.linear(x, qkv.weight, qkv.bias)?, None, &form)?, output.weight, output.bias)
            }),
        ];
        let mut all: Vec<Vec<u32>> = Vec::new();
        for (name, layer, ops) in pairs {
            let (layer, ops) = (run(device, layer), run(device, ops));
            assert!(layer == ops, "{name}: the bits differ from those of its ops");
            assert!(layer.1.iter().any(|&bits| bits << 1 != 0), "{name}: the gradient is zero");
            all.push(layer.0);
        }
        assert!(all[0] != all[5], "a document mask must change the result");
    }

    /// A token's label is the class of the token before it, which only attention can access.
    fn captured_attention_learns_like_eager(device: &Device) {
        let eager = losses(device, false);
        let captured = losses(device, true);
        assert_eq!(bits(&eager), bits(&captured));
        println!("{} -> {}", eager[0], eager[eager.len() - 1]);
        assert!(eager[eager.len() - 1] < 0.6 * eager[0], "{eager:?}");
    }
}

const CLASSES: usize = 6;
const UPDATES: usize = 60;

/// A layer that must copy the class of the previous token, by rotary positions.
struct Model {
    embed: Linear,
    attention: MultiHeadAttention,
    head: Linear,
    weights: Parameters,
    gradients: Gradients,
    adamw: Optimizer<AdamW>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let mut spec = ParameterSpec::builder();
        let embed = Linear::without_bias(spec.at("embed"), CLASSES, 32);
        let attention = MultiHeadAttention::grouped(spec.at("attention"), 32, [2, 1])
            .causal()
            .rotary(Rotary::new(100.0))
            .qk_norm(spec.at("attention"), 16, EPSILON);
        let head = Linear::new(spec.at("head"), 32, CLASSES);
        let weights = Parameters::new(device, &spec.build().unwrap(), 5).unwrap();
        let gradients = Gradients::zeros(&weights).unwrap();
        let config = AdamW { learning_rate: 0.02, ..AdamW::default() };
        let adamw = Optimizer::new(&weights, config).unwrap();
        Self { embed, attention, head, weights, gradients, adamw }
    }

    fn train<'s>(
        &mut self,
        ticket: UpdateTicket,
        step: &Step<'s>,
        x: Saved<'s>,
        documents: Saved<'s, u32>,
        labels: Indices<'s>,
    ) -> Result<Saved<'s>> {
        let tape = Tape::new(step, &self.weights);
        let h = self.embed.forward(&tape, &tape.input(x))?;
        let h = self.attention.forward_masked(&tape, &h, &self.attention.config().documents(documents))?;
        let logits = self.head.forward(&tape, &h)?.reshape([labels.shape().elements(), CLASSES])?;
        let loss = tape.cross_entropy(&logits, labels)?;
        tape.backward_overwrite(&loss, &mut self.gradients)?;
        self.adamw.apply(ticket, step, &mut self.weights, &self.gradients)?;
        Ok(*loss.value())
    }
}

/// Returns the losses of some updates.
fn losses(device: &Device, captured: bool) -> Vec<f32> {
    let mut random = Random::new(4);
    let mut arena = Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap();
    let batches: Vec<_> = (0..UPDATES)
        .map(|_| {
            let classes = random.belows(BATCH * TOKENS, CLASSES as u32);
            let mut x = vec![0.0; classes.len() * CLASSES];
            classes.iter().enumerate().for_each(|(token, &class)| x[token * CLASSES + class as usize] = 1.0);
            let documents: Vec<u32> = (0..classes.len()).map(|token| u32::from(token % TOKENS >= 40)).collect();
            // The first token of a document has no predecessor.
            let label = |token: usize| if (token % TOKENS).is_multiple_of(40) { 0 } else { classes[token - 1] };
            let labels: Vec<u32> = (0..classes.len()).map(label).collect();
            (x, documents, labels)
        })
        .collect();
    let shapes = ([BATCH, TOKENS, CLASSES], [BATCH, TOKENS], [BATCH * TOKENS]);
    let mut model = Model::new(device);
    if !captured {
        let mut update = |(x, documents, labels): &(Vec<f32>, Vec<u32>, Vec<u32>)| {
            let ticket = model.adamw.advance()?;
            arena.step(|step| {
                let (x, documents) = (step.upload(x, shapes.0)?.save(), step.upload(documents, shapes.1)?.save());
                let loss = model.train(ticket, step, x, documents, step.upload_indices(labels, shapes.2)?)?;
                step.read_scalar(&loss)
            })
        };
        return batches.iter().map(|batch| update(batch).unwrap()).collect();
    }
    let mut all = Vec::new();
    let mut recorded: Option<Captured<Model, Output>> = None;
    let mut model = Some(model);
    for (x, documents, labels) in &batches {
        let inputs = HostInputs::new().with(x, shapes.0).unwrap();
        let inputs = inputs.with(documents, shapes.1).unwrap().with(labels, shapes.2).unwrap();
        let captured = recorded.get_or_insert_with(|| {
            let record: Record<Model, Output> = |step, model, slots| {
                let loss = model.train(
                    UpdateTicket::each_replay(slots),
                    step,
                    slots.input(0)?,
                    slots.input(1)?,
                    slots.indices(2)?,
                )?;
                Ok(slots.output(&loss))
            };
            arena.capture(model.take().unwrap(), &inputs, record).unwrap()
        });
        captured.state_mut().adamw.advance().unwrap().leave_to_replay();
        let replay = captured.replay(&inputs).unwrap();
        all.push(replay.read_scalar(*replay.outputs()).unwrap());
    }
    all
}

/// Returns the bytes that a step with attention over this many tokens needs.
fn bytes(device: &Device, tokens: usize, norm: bool) -> usize {
    let mut spec = ParameterSpec::builder();
    let layer = MultiHeadAttention::new(spec.at("attention"), WIDTH, 1).causal().rotary(Rotary::default());
    let layer = if norm { layer.qk_norm(spec.at("attention"), WIDTH, EPSILON) } else { layer };
    let weights = Parameters::new(device, &spec.build().unwrap(), 5).unwrap();
    let mut gradients = Gradients::zeros(&weights).unwrap();
    let arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
    let measured = arena.measure(|step| {
        let tape = Tape::new(step, &weights);
        let x = tape.input(step.empty::<f32>([1, tokens, WIDTH])?);
        let y = layer.forward(&tape, &x)?;
        let labels = Indices::on_device(step.empty([tokens])?.save());
        let loss =
            tape.cross_entropy_by(&y.reshape([tokens, WIDTH])?, labels, ops::LabelRules::default().weighted(1.0))?;
        tape.backward_overwrite(&loss, &mut gradients)
    });
    measured.unwrap().high_water_bytes()
}

/// A single matrix of 32,768 x 32,768 would take 4 GiB.
#[test]
fn memory_is_linear_in_tokens() {
    let device = crate::support::open(DeviceKind::Emulated);
    for norm in [false, true] {
        let [short, long] = [1024, 32_768].map(|tokens| bytes(&device, tokens, norm));
        println!("{} bytes a token", long / 32_768);
        assert!(long <= 32 * short, "{short} bytes for 1024 tokens, {long} for 32768");
    }
}
