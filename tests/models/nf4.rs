//! NF4: matrices have bitsandbytes' values, and a model in NF4 with adapters has the logits, the
//! loss, the gradients and the updates of PEFT with the weights that bitsandbytes decodes.
//!
//! `tests/models/make_nf4.py` writes the cases.

use super::case;
use super::lora::{Adapted, arena};
use super::support::{bits, on_each_device};
use safetensors::{Dtype, SafeTensors};
use std::fs;
use std::path::PathBuf;
use stepscope::models::{Lora, ModelConfig, Transformer, WeightFiles, Weights};
use stepscope::parameters::{FrozenType, Initializer, Nf4Matrix, ParameterEntry};
use stepscope::prelude::*;

fn folder(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/models/nf4", name].iter().collect()
}

/// Returns a matrix `[outputs, inputs]` as `[inputs, outputs]`.
fn transposed<T: Copy>(values: &[T], [outputs, inputs]: [usize; 2]) -> Vec<T> {
    (0..inputs * outputs).map(|at| values[at % outputs * inputs + at / outputs]).collect()
}

on_each_device! {
    /// Decoded weights have the bits of bitsandbytes, on the host and on the device. So have all
    /// parts of quantised ones.
    fn matrices_have_the_bits_of_bitsandbytes(device: &Device) {
        let bytes = fs::read(folder("matrices.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut count = 0;
        while let Ok(weight) = tensors.tensor(&format!("{count}.weight")) {
            let shape: [usize; 2] = weight.shape().try_into().unwrap();
            let part = |name: &str| tensors.tensor(&format!("{count}.{name}")).unwrap().data().to_vec();
            let floats = |name: &str| bytemuck::pod_collect_to_vec::<u8, f32>(&part(name));
            let mut spec = ParameterSpec::builder();
            let w = spec.add("w", [shape[1], shape[0]], Initializer::ZERO);
            spec.freeze(|_| Some(FrozenType::Nf4));
            let mut parameters = Parameters::new(device, &spec.build().unwrap(), 1).unwrap();

            let (codes, scales, factors) = (part("codes"), part("scales"), floats("factors"));
            let offset = floats("offset")[0];
            let matrix = Nf4Matrix { codes: &codes, scales: &scales, factors: &factors, offset };
            parameters.write_nf4(w, 0, &matrix).unwrap();
            let wide = transposed(&floats("f32"), shape);
            let narrow = transposed(&bytemuck::pod_collect_to_vec::<u8, u16>(&part("bf16")), shape);
            let narrow: Vec<bf16> = narrow.into_iter().map(bf16::from_bits).collect();
            assert!(bits(&parameters.read(w).unwrap()) == bits(&wide), "{count}");
            assert!(parameters.read_as::<bf16>(w).unwrap() == narrow, "{count}");
            let (of_device, narrow_of_device) = arena(device)
                .step(|step| Ok((step.read(&parameters.lend(step, w)?)?, step.read(&parameters.lend_as::<bf16>(step, w)?)?)))
                .unwrap();
            assert!(bits(&of_device) == bits(&wide), "{count}");
            assert!(narrow_of_device == narrow, "{count}");

            let stored = parameters.frozen_sha256().unwrap();
            let halves = || bytemuck::pod_collect_to_vec::<u8, u16>(weight.data()).into_iter();
            let values: Vec<f32> = match weight.dtype() {
                Dtype::BF16 => halves().map(|half| bf16::from_bits(half).to_f32()).collect(),
                Dtype::F16 => halves().map(|half| half::f16::from_bits(half).to_f32()).collect(),
                _ => floats("weight"),
            };
            parameters.write(w, &transposed(&values, shape)).unwrap();
            assert_eq!(parameters.frozen_sha256().unwrap(), stored, "{count}");
            // The same from the order of the file, in its type.
            parameters.write(w, &vec![0.5; values.len()]).unwrap();
            match weight.dtype() {
                Dtype::BF16 => parameters.quantise(w, 0, &values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>()),
                _ => parameters.quantise(w, 0, &values),
            }
            .unwrap();
            assert_eq!(parameters.frozen_sha256().unwrap(), stored, "{count}");
            let error = parameters.quantise(w, 1, &values).unwrap_err().to_string();
            assert!(error.contains("number 1"), "{error}");
            let error = parameters.quantise(w, 0, &values[1..]).unwrap_err().to_string();
            assert!(error.contains("`w`"), "{error}");
            count += 1;
        }
        assert_eq!(count, 6);
    }

    /// Folders in NF4, against PEFT in float64 with the weights that bitsandbytes decodes. All
    /// matrices of a mixture are in NF4, those of the experts and of the routers too.
    fn adapters_agree_with_peft(device: &Device) {
        for (model, adapter) in [("model", "adapter"), ("mixture", "mixture_adapter")] {
            let files = WeightFiles::open(folder(model)).unwrap();
            let is_matrix = |entry: &ParameterEntry| !entry.is_table() && entry.shape().extents().len() == 2;
            let mut adapted = Adapted::with(device, &folder(adapter), &folder(model), |entry| {
                let stored = files.stored(entry);
                assert_eq!(stored == FrozenType::Nf4, is_matrix(entry), "{}", entry.name());
                stored
            });
            adapted.agrees(device, model);
            adapted.updates_agree(device, model);
        }
    }

    /// The gradients of a model in NF4 are those of the same weights in f32, and recompute keeps
    /// their bits. So do merged weights.
    fn decoded_weights_have_the_same_gradients(device: &Device) {
        let mut nf4 = Adapted::with(device, &folder("adapter"), &folder("model"), |entry| {
            if entry.is_table() { FrozenType::F32 } else { FrozenType::Nf4 }
        });
        let f32 = Adapted::with(device, &folder("adapter"), &folder("model"), |_| FrozenType::F32);
        assert_ne!(nf4.parameters.frozen_sha256().unwrap(), f32.parameters.frozen_sha256().unwrap());
        let (logits, loss, gradients) = f32.results(&mut arena(device));
        let merged = Weights::merged(&f32.model, &f32.parameters).unwrap();
        assert!(Weights::merged(&nf4.model, &nf4.parameters).unwrap() == merged);
        for recompute in [false, true] {
            nf4.model = nf4.model.clone().recompute(recompute);
            let (found, found_loss, found_gradients) = nf4.results(&mut arena(device));
            assert!((bits(&found), bits(&found_loss)) == (bits(&logits), bits(&loss)), "recompute {recompute}");
            assert!(found_gradients.read_flat().unwrap() == gradients.read_flat().unwrap(), "recompute {recompute}");
        }
    }
}

/// Other formats are refused, and so are matrices that a file has in pieces.
#[test]
fn other_formats_are_refused() {
    let config = fs::read_to_string(folder("model").join("config.json")).unwrap();
    for (before, after, words) in [
        ("\"nf4\"", "\"fp4\"", &["`quantization_config.bnb_4bit_quant_type`", "\"nf4\"", "\"fp4\""][..]),
        ("\"bnb_4bit_use_double_quant\": true", "\"bnb_4bit_use_double_quant\": false", &["use_double_quant", "false"]),
        ("\"bitsandbytes\"", "\"gptq\"", &["`quantization_config.quant_method`", "\"gptq\""]),
        ("\"load_in_8bit\": false", "\"load_in_8bit\": true", &["load_in_8bit", "true"]),
        ("\"llm_int8_threshold\"", "\"bits\"", &["`quantization_config.bits`", "unknown"]),
    ] {
        assert!(config.contains(before), "{before}");
        let error = ModelConfig::from_json(config.replace(before, after).as_bytes()).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    for (name, word) in [("phi3", "gate_proj"), ("gpt_neox", "qkv_proj")] {
        let config = ModelConfig::read(case(name)).unwrap();
        let error = Transformer::with_lora(config, &Lora::new(4, 8.0), |_| FrozenType::Nf4).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("whole tensors of the file"), "{error}");
    }
    // A head of 12 columns would leave the file's k and v at multiples of 4.
    let config = fs::read_to_string(case("qwen2").join("config.json")).unwrap();
    let config = config.replace("\"intermediate_size\": 24", "\"intermediate_size\": 20");
    let config = ModelConfig::from_json(config.as_bytes()).unwrap();
    let error = Transformer::with_lora(config, &Lora::new(4, 8.0), |_| FrozenType::Nf4).unwrap_err().to_string();
    assert!(error.contains("multiples of 8") && error.contains("[16, 20]"), "{error}");
}

/// A file that lacks a tensor, or has other extents, codes or scales, is refused.
#[test]
fn damaged_matrices_are_refused() {
    let path = folder("model").join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let refused = |damage: &dyn Fn(&mut Vec<u8>), word: &str| {
        let scratch = tempfile::tempdir().unwrap();
        fs::copy(folder("model").join("config.json"), scratch.path().join("config.json")).unwrap();
        let mut bytes = bytes.clone();
        damage(&mut bytes);
        fs::write(scratch.path().join("model.safetensors"), bytes).unwrap();
        let opened = WeightFiles::open(scratch.path()).and_then(|mut files| {
            let (_, spec) = Transformer::frozen(files.config().clone(), |entry| Some(files.stored(entry)))?;
            files.load(&mut Parameters::new(&device, &spec, 1)?)
        });
        let error = opened.unwrap_err().to_string();
        assert!(error.contains(word), "{word}: {error}");
    };
    let replace = |bytes: &mut Vec<u8>, before: &str, after: &str| {
        assert_eq!(before.len(), after.len());
        let at = bytes.windows(before.len()).position(|window| window == before.as_bytes()).unwrap();
        bytes[at..at + before.len()].copy_from_slice(after.as_bytes());
    };
    refused(
        &|bytes| replace(bytes, "gate_proj.weight.absmax", "gate_proj.weight.absmix"),
        "gate_proj.weight.absmax`, which a matrix",
    );
    refused(&|bytes| replace(bytes, "\"blocksize\": 64", "\"blocksize\": 32"), "`blocksize`: expected 64, got 32");
    refused(
        &|bytes| replace(bytes, "\"nested_blocksize\": 256", "\"nested_blocksize\": 128"),
        "`nested_blocksize`: expected 256",
    );
    refused(
        &|bytes| replace(bytes, "\"shape\": [16, 24]", "\"shape\": [24, 16]"),
        "`shape`: expected [16,24], got [24,16]",
    );
    refused(&|bytes| replace(bytes, "\"nested_offset\"", "\"nestes_offset\""), "nestes_offset");
    // The second value of the codes.
    let map = 0.722_956_84_f32.to_le_bytes();
    refused(
        &|bytes| {
            let at = bytes.windows(4).position(|window| window == map).unwrap();
            bytes[at] ^= 1;
        },
        "expected the values of bitsandbytes' codes",
    );
}
