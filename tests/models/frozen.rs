//! Models that are trained only in part: blocks below the first trained parameter keep nothing for
//! the backward pass, and all gradients keep the bits of a model that is trained as a whole.

use super::support::{Random, bits, on_each_device};
use stepscope::capture::{CaptureInputs, Output};
use stepscope::models::{Lora, ModelConfig, Targets, Transformer};
use stepscope::ops::LmHeadConfig;
use stepscope::parameters::{FrozenType, ParameterEntry};
use stepscope::prelude::*;
use stepscope::tensor::{Indices, Saved};

const SHAPE: [usize; 2] = [3, 24];

/// Returns a model of Llama with this many layers. The 24 tokens of a sample are in two documents.
fn config(layers: usize) -> ModelConfig {
    let json = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 48,
        "max_position_embeddings": 64, "tie_word_embeddings": false, "rope_theta": 1e4,
    });
    ModelConfig::from_json(json.to_string().as_bytes()).unwrap()
}

/// Returns a Qwen3-MoE of two layers with four experts.
fn mixture() -> ModelConfig {
    let json = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 48, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": true, "max_position_embeddings": 64,
        "tie_word_embeddings": false, "rope_theta": 1e4,
    });
    ModelConfig::from_json(json.to_string().as_bytes()).unwrap()
}

/// True for the matrices of experts.
fn is_of_experts(name: &str) -> bool {
    name.contains(".mlp.") && !name.contains("router")
}

fn ids() -> Vec<u32> {
    (0..(SHAPE[0] * SHAPE[1]) as u32).map(|at| at * 7 % 48).collect()
}

fn documents() -> Vec<u32> {
    (0..SHAPE[0] * SHAPE[1]).map(|at| u32::from(at % SHAPE[1] > 9)).collect()
}

/// A model in training.
struct Training {
    model: Transformer,
    parameters: Parameters,
    gradients: Gradients,
}

impl Training {
    fn new(device: &Device, (model, spec): (Transformer, ParameterSpec)) -> Self {
        let parameters = Parameters::new(device, &spec, 3).unwrap();
        let gradients = Gradients::zeros(&parameters).unwrap();
        Self { model, parameters, gradients }
    }

    /// Freezes the parameters for which `frozen` returns true.
    fn frozen(device: &Device, layers: usize, frozen: impl Fn(&str) -> bool) -> Self {
        let freeze = |name: &str| frozen(name).then_some(FrozenType::F32);
        Self::new(device, Transformer::frozen(config(layers), |entry| freeze(entry.name())).unwrap())
    }

    /// Takes the weights of another model.
    fn with_weights_of(mut self, other: &Self) -> Self {
        for (parameter, entry) in self.parameters.spec().clone().iter() {
            let (source, _) = other.parameters.spec().iter().find(|(_, other)| other.name() == entry.name()).unwrap();
            self.parameters.write(parameter, &other.parameters.read(source).unwrap()).unwrap();
        }
        self
    }

    fn learn<'s>(&mut self, step: &Step<'s>, ids: Indices<'s>, documents: Saved<'s, u32>) -> Result<Saved<'s>> {
        let tape = Tape::new(step, &self.parameters);
        let hidden: Var<'s> = self.model.forward(&tape, ids, Some(documents))?;
        let loss = tape.linear_cross_entropy(&hidden, self.model.head(), ids, LmHeadConfig::default().tied())?;
        let value = *loss.value();
        tape.backward_overwrite(&loss, &mut self.gradients)?;
        Ok(value)
    }

    /// Returns the bytes that a step takes.
    fn bytes(&mut self, arena: &Arena) -> usize {
        let measured = arena.measure(|step| {
            let (ids, documents) = (step.upload_indices(&ids(), SHAPE)?, step.upload(&documents(), SHAPE)?);
            self.learn(step, ids, documents.save()).map(drop)
        });
        measured.unwrap().high_water_bytes()
    }

    /// Returns the loss and the gradient of each parameter, from an eager or a captured step.
    fn results(&mut self, device: &Device, captured: bool) -> Vec<(String, Vec<u32>)> {
        let (ids, documents) = (ids(), documents());
        let inputs = HostInputs::new().with(&ids, SHAPE).unwrap().with(&documents, SHAPE).unwrap();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
        let loss = if captured {
            let mut captured = arena.capture(&mut *self, &inputs, record).unwrap();
            let replay = captured.replay(&inputs).unwrap();
            replay.read(*replay.outputs())
        } else {
            arena.step(|step| {
                let batch = step.upload_inputs(&inputs)?;
                step.read(&self.learn(step, batch.indices(0)?, batch.input(1)?)?)
            })
        };
        let gradient = |(parameter, entry): (Parameter, &ParameterEntry)| {
            (entry.name().to_owned(), bits(&self.gradients.read(parameter).unwrap()))
        };
        let gradients = self.parameters.spec().iter().filter(|(_, entry)| entry.frozen().is_none()).map(gradient);
        std::iter::once(("loss".to_owned(), bits(&loss.unwrap()))).chain(gradients).collect()
    }
}

fn record<'s>(step: &mut Step<'s>, training: &mut &mut Training, slots: &CaptureInputs<'s>) -> Result<Output> {
    Ok(slots.output(&training.learn(step, slots.indices(0)?, slots.input(1)?)?))
}

on_each_device! {
    /// Compares gradients with those of a model whose blocks all keep their activations.
    fn frozen_blocks_keep_all_bits(device: &Device) {
        let mut whole = Training::frozen(device, 3, |_| false);
        let expected = whole.results(device, false);
        let rules: [fn(&str) -> bool; 6] = [
            |name| !name.starts_with("blocks.2."),
            |name| name != "blocks.1.mlp.up_proj.weight",
            |name| !name.contains("norm"),
            |name| name.starts_with("blocks."),
            |name| name != "head.weight",
            |name| name == "tokens.weight",
        ];
        for rule in rules {
            for (recompute, captured) in [(false, false), (false, true), (true, false), (true, true)] {
                let mut part = Training::frozen(device, 3, rule).with_weights_of(&whole);
                part.model = part.model.recompute(recompute);
                let found = part.results(device, captured);
                assert!(found.len() > 1);
                for (name, found) in found {
                    let (_, expected) = expected.iter().find(|(known, _)| *known == name).unwrap();
                    assert!(found == *expected, "{name}, recompute {recompute}, captured {captured}");
                }
            }
        }
    }

    /// Gradients of a mixture are the same in eager and captured steps, recomputed, and next to
    /// frozen parameters.
    fn mixtures_keep_all_bits(device: &Device) {
        let freeze = |rule: fn(&str) -> bool| {
            let frozen = |entry: &ParameterEntry| rule(entry.name()).then_some(FrozenType::F32);
            Training::new(device, Transformer::frozen(mixture(), frozen).unwrap())
        };
        let mut whole = freeze(|_| false);
        let expected = whole.results(device, false);
        assert!(expected.iter().all(|(_, gradient)| gradient.iter().any(|&bits| bits << 1 != 0)));
        let rules: [fn(&str) -> bool; 4] =
            [|_| false, is_of_experts, |name| !name.contains("router"), |name| !name.contains("1.mlp.up")];
        for rule in rules {
            for (recompute, captured) in [(false, true), (true, false), (true, true)] {
                let mut part = freeze(rule).with_weights_of(&whole);
                part.model = part.model.recompute(recompute);
                for (name, found) in part.results(device, captured) {
                    let (_, expected) = expected.iter().find(|(known, _)| *known == name).unwrap();
                    assert!(found == *expected, "{name}, recompute {recompute}, captured {captured}");
                }
            }
        }
    }

    /// Experts in BF16 and NF4 give the gradients of the numbers that they hold.
    fn stored_experts_keep_all_bits(device: &Device) {
        for kind in [FrozenType::Bf16, FrozenType::Nf4] {
            let freeze = |kind| {
                let frozen = |entry: &ParameterEntry| is_of_experts(entry.name()).then_some(kind);
                Training::new(device, Transformer::frozen(mixture(), frozen).unwrap())
            };
            let mut stored = freeze(kind);
            for (parameter, entry) in stored.parameters.spec().clone().iter().filter(|(_, entry)| entry.frozen().is_some()) {
                let values = Random::new(entry.name().len() as u64).normals(entry.shape().elements());
                let values: Vec<f32> = values.into_iter().map(|value| 0.1 * value).collect();
                stored.parameters.write(parameter, &values).unwrap();
            }
            let expected = freeze(FrozenType::F32).with_weights_of(&stored).results(device, false);
            for captured in [false, true] {
                assert!(stored.results(device, captured) == expected, "{kind:?}, captured {captured}");
            }
        }
    }

    /// A step with one of 16 layers in training takes at most a sixth of the memory of a step that
    /// trains all of them.
    fn frozen_blocks_take_no_memory(device: &Device) {
        const LAYERS: usize = 16;
        let arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let whole = Training::frozen(device, LAYERS, |_| false).bytes(&arena);
        let lora = |targets: &[&str]| {
            let targets = Targets::Names(targets.iter().map(|&target| target.into()).collect());
            let lora = Lora { targets, ..Lora::new(4, 8.0) };
            Training::new(device, Transformer::with_lora(config(LAYERS), &lora, |_| FrozenType::Bf16).unwrap())
        };
        let of_last = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
            "mlp.up_proj", "mlp.down_proj"].map(|module| format!("layers.15.{module}"));
        let cases = [
            ("all adapters of the last block", lora(&of_last.each_ref().map(String::as_str))),
            ("one adapter of the last block", lora(&["layers.15.mlp.down_proj"])),
            ("the last block", Training::frozen(device, LAYERS, |name| !name.starts_with("blocks.15."))),
            ("the head", Training::frozen(device, LAYERS, |name| name != "head.weight")),
        ];
        for (name, mut training) in cases {
            let bytes = training.bytes(&arena);
            println!("{name}: {bytes} of {whole} bytes");
            assert!(6 * bytes <= whole, "{name}: {bytes} of {whole} bytes");
        }
        // A block in the middle keeps those above it, and a recomputed model keeps even less.
        let mut middle = Training::frozen(device, LAYERS, |name| !name.starts_with("blocks.8."));
        let bytes = middle.bytes(&arena);
        assert!(bytes > whole / 3 && bytes < whole * 2 / 3, "{bytes} of {whole}");
        middle.model = middle.model.recompute(true);
        assert!(middle.bytes(&arena) < bytes / 2);
    }
}
