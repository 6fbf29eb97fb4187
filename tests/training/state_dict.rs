//! Files in the layout of PyTorch's `state_dict`: names, shapes and every bit, there and back.

#![forbid(unsafe_code)]

mod pretrained;

use crate::support::on_each_device;
use std::collections::BTreeMap;
use std::path::Path;
use stepscope::error::Quantity;
use stepscope::nn::{Block, Embedding, LayerNorm, Linear, MultiHeadAttention, RmsNorm, SwiGlu};
use stepscope::ops::Rotary;
use stepscope::parameters::{Initializer, ParameterSpecBuilder};
use stepscope::prelude::*;
use stepscope::upload::{NonFinite, Transfer};

/// Enough non-finite f32 bits for any parameter here.
static INFINITE: [u8; 1 << 17] = [0xff; 1 << 17];

fn spec() -> ParameterSpec {
    let mut spec = ParameterSpec::builder();
    Linear::new(spec.at("encoder").at("0"), 5, 3);
    RmsNorm::new(spec.at("norm"), 7);
    Embedding::new(spec.at("wte"), 6, 4, 0.02);
    SwiGlu::new(spec.at("mlp"), 3, 5, 2);
    LayerNorm::new(spec.at("ln"), 7);
    MultiHeadAttention::new(spec.at("heads"), 8, 2);
    Block::gpt2(spec.at("gpt2"), 8, 2, 12);
    Block::llama(spec.at("llama"), 16, [4, 2], 12, Rotary::default());
    spec.add("scalegain", [4], Initializer::ONE);
    spec.add("kernel", [2, 3, 4], Initializer::fan_in(6));
    spec.build().unwrap()
}

/// Returns a file's tensors by name: extents and numbers.
fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let file = std::fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let numbers = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let named = tensors.tensors().into_iter();
    named.map(|(name, tensor)| (name, (tensor.shape().to_vec(), numbers(tensor.data())))).collect()
}

on_each_device! {
    fn weights_round_trip(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let spec = spec();
        let parameters = Parameters::new(device, &spec, 7).unwrap();
        stepscope::files::save_state_dict(&parameters, &path).unwrap();
        let file = tensors(&path);
        let names: Vec<&str> = file.keys().map(String::as_str).collect();
        assert_eq!(names, [
            "encoder.0.bias", "encoder.0.weight",
            "gpt2.attention.o_proj.bias", "gpt2.attention.o_proj.weight", "gpt2.attention.qkv_proj.bias",
            "gpt2.attention.qkv_proj.weight", "gpt2.mlp.down.bias", "gpt2.mlp.down.weight", "gpt2.mlp.up.bias",
            "gpt2.mlp.up.weight", "gpt2.norm1.bias", "gpt2.norm1.weight", "gpt2.norm2.bias", "gpt2.norm2.weight",
            "heads.o_proj.bias", "heads.o_proj.weight", "heads.qkv_proj.bias", "heads.qkv_proj.weight", "kernel",
            "llama.attention.o_proj.weight", "llama.attention.qkv_proj.weight", "llama.mlp.down_proj.weight",
            "llama.mlp.gate_proj.weight", "llama.mlp.up_proj.weight", "llama.norm1.weight", "llama.norm2.weight",
            "ln.bias", "ln.weight", "mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "norm.weight", "scalegain",
            "wte.weight",
        ]);
        let ours = parameters.read_flat().unwrap();
        let entry = |name: &str| spec.entries().iter().find(|entry| entry.name() == name).unwrap();
        // The queries of grouped heads, and the keys and values that two of them share, next to
        // each other.
        for (name, inputs, outputs) in [
            ("encoder.0.weight", 5, 3),
            ("heads.qkv_proj.weight", 8, 24),
            ("gpt2.attention.qkv_proj.weight", 8, 24),
            ("gpt2.mlp.up.weight", 8, 12),
            ("gpt2.mlp.down.weight", 12, 8),
            ("llama.attention.qkv_proj.weight", 16, 32),
            ("llama.mlp.gate_proj.weight", 16, 12),
        ] {
            let (shape, theirs) = &file[name];
            assert_eq!(shape, &[outputs, inputs], "{name}");
            let start = entry(name).start();
            for (input, output) in (0..inputs).flat_map(|input| (0..outputs).map(move |output| (input, output))) {
                assert_eq!(theirs[output * inputs + input].to_bits(), ours[start + input * outputs + output].to_bits(), "{name}");
            }
        }
        for (theirs, ours_name) in [("ln.weight", "ln.gain"), ("gpt2.norm2.weight", "gpt2.norm2.gain"), ("gpt2.norm2.bias", "gpt2.norm2.bias"), ("heads.o_proj.bias", "heads.o_proj.bias")] {
            let entry = entry(ours_name);
            assert_eq!(file[theirs], (entry.shape().extents().to_vec(), ours[entry.range()].to_vec()), "{theirs}");
        }
        assert_eq!(file["mlp.down_proj.weight"].0, [2, 5]);
        // A table is stored unchanged.
        assert_eq!(file["wte.weight"], (vec![6, 4], ours[entry("wte.weight").range()].to_vec()));
        assert_eq!(file["kernel"], (vec![2, 3, 4], ours[entry("kernel").range()].to_vec()));

        let mut other = Parameters::new(device, &spec, 8).unwrap();
        assert_ne!(other.sha256().unwrap(), parameters.sha256().unwrap());
        stepscope::files::load_state_dict(&mut other, &path).unwrap();
        assert_eq!(other.sha256().unwrap(), parameters.sha256().unwrap());
    }

    /// Files of BF16, of F32 and of both are read exactly. Weights written as BF16 are rounded
    /// once, and take half the bytes.
    fn bf16_weights_read_exactly_write_rounded(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let [whole, halves, mixed] = ["whole", "halves", "mixed"].map(|name| folder.path().join(name));
        let spec = spec();
        let parameters = Parameters::new(device, &spec, 7).unwrap();
        stepscope::files::save_state_dict(&parameters, &whole).unwrap();
        stepscope::files::save_state_dict_as::<bf16>(&parameters, &halves).unwrap();
        let [file, rounded] = [&whole, &halves].map(|path| std::fs::read(path).unwrap());
        let [file, rounded] = [&file, &rounded].map(|file| safetensors::SafeTensors::deserialize(file).unwrap());
        for (name, tensor) in file.tensors() {
            let half = rounded.tensor(&name).unwrap();
            assert_eq!((half.dtype(), half.shape()), (safetensors::Dtype::BF16, tensor.shape()));
            let numbers = tensor.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
            let expected: Vec<[u8; 2]> = numbers.map(|number| bf16::from_f32(number).to_le_bytes()).collect();
            assert_eq!(half.data(), expected.as_flattened(), "{name}");
        }
        assert_eq!(rounded.len(), file.len());
        let ours = parameters.read_flat().unwrap();
        let expected: Vec<f32> = ours.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
        assert_ne!(ours, expected);
        let mut other = Parameters::new(device, &spec, 8).unwrap();
        stepscope::files::load_state_dict(&mut other, &halves).unwrap();
        assert_eq!(other.read_flat().unwrap(), expected);

        // Every other tensor from each file.
        let tensors = file.names().into_iter().enumerate().map(|(number, name)| {
            (name, [&file, &rounded][number % 2].tensor(name).unwrap())
        });
        std::fs::write(&mixed, safetensors::serialize(tensors, None).unwrap()).unwrap();
        let mut other = Parameters::new(device, &spec, 8).unwrap();
        stepscope::files::load_state_dict(&mut other, &mixed).unwrap();
        let got = other.read_flat().unwrap();
        for entry in spec.entries() {
            let is = |values: &[f32]| got[entry.range()] == values[entry.range()];
            assert!(is(&ours) || is(&expected), "{}", entry.name());
        }
        assert!(got != ours && got != expected);
    }

    /// The largest f32 is finite, and rounds to infinity in BF16.
    fn rounding_to_infinity_is_refused(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut builder = ParameterSpec::builder();
        let [_, b] = ["a", "b"].map(|name| builder.add(name, [3], Initializer::ONE));
        let mut parameters = Parameters::new(device, &builder.build().unwrap(), 7).unwrap();
        parameters.write(b, &[0.0, -f32::MAX, 0.0]).unwrap();
        stepscope::files::save_state_dict(&parameters, &path).unwrap();
        let before = std::fs::read(&path).unwrap();
        let expected = Error::NotFinite { update: None, what: Quantity::Weight, tensor: "`b`".to_owned() };
        assert_eq!(stepscope::files::save_state_dict_as::<bf16>(&parameters, &path), Err(expected));
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }

    fn other_types_are_refused_by_name(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut builder = ParameterSpec::builder();
        builder.add("w", [3], Initializer::ONE);
        let mut parameters = Parameters::new(device, &builder.build().unwrap(), 7).unwrap();
        for (dtype, bytes) in [(safetensors::Dtype::F16, 2), (safetensors::Dtype::F64, 8), (safetensors::Dtype::I32, 4)] {
            let zeros = vec![0; 3 * bytes];
            let tensor = safetensors::tensor::TensorView::new(dtype, vec![3], &zeros).unwrap();
            std::fs::write(&path, safetensors::serialize([("w", tensor)], None).unwrap()).unwrap();
            let error = stepscope::files::load_state_dict(&mut parameters, &path).unwrap_err().to_string();
            assert!(error.contains(&format!("`w`: expected F32 or BF16 [3], got {dtype:?} [3]")), "{error}");
        }
        assert_eq!(parameters.read_flat().unwrap()[..3], [1.0; 3]);
    }

    /// Non-finite numbers are neither written nor read, and no option allows it.
    fn non_finite_numbers_are_refused(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut parameters = Parameters::new(device, &spec(), 7).unwrap();
        let before = parameters.sha256().unwrap();
        stepscope::files::save_state_dict(&parameters, &path).unwrap();
        let mut file = std::fs::read(&path).unwrap();
        // The first tensor of the file.
        let start = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let tensor = "`encoder.0.bias`".to_owned();
        let expected = Error::NotFinite { update: None, what: Quantity::Weight, tensor };
        for wrong in [f32::NAN, f32::INFINITY, -f32::INFINITY] {
            file[start..start + 4].copy_from_slice(&wrong.to_le_bytes());
            std::fs::write(&path, &file).unwrap();
            assert_eq!(stepscope::files::load_state_dict(&mut parameters, &path), Err(expected.clone()));
            assert_eq!(parameters.sha256().unwrap(), before);
        }
        file[start..start + 4].copy_from_slice(&1.0f32.to_le_bytes());
        std::fs::write(&path, &file).unwrap();
        stepscope::files::load_state_dict(&mut parameters, &path).unwrap();

        let words = std::fs::read(&path).unwrap();
        parameters.load(|entry| Some(&INFINITE[..entry.range().len() * 4]), Transfer::new().non_finite(NonFinite::Allow)).unwrap();
        let saved = stepscope::files::save_state_dict(&parameters, &path).unwrap_err();
        assert!(matches!(&saved, Error::NotFinite { tensor, .. } if tensor == "`encoder.0.weight`"), "{saved}");
        assert_eq!(std::fs::read(&path).unwrap(), words, "a failed save must leave the old file");
    }

    fn mismatched_files_change_nothing(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let model = |add: &dyn Fn(&mut ParameterSpecBuilder)| {
            let mut spec = ParameterSpec::builder();
            spec.add("head.weight", [2, 3], Initializer::fan_in(2));
            add(&mut spec);
            Parameters::new(device, &spec.build().unwrap(), 7).unwrap()
        };
        let bias = |extent: usize| move |spec: &mut ParameterSpecBuilder| {
            spec.add("head.bias", [extent], Initializer::ONE);
        };
        let mut parameters = model(&bias(3));
        let before = parameters.sha256().unwrap();
        for (file, reason) in [
            (model(&|_| ()), "has no `head.bias`"),
            (model(&bias(4)), "`head.bias`: expected F32 or BF16 [3], got F32 [4]"),
            (model(&|spec| {
                bias(3)(spec);
                spec.add("norm.gain", [3], Initializer::ONE);
            }), "has `norm.weight`, which is not a parameter"),
        ] {
            let path = folder.path().join("other.safetensors");
            stepscope::files::save_state_dict(&file, &path).unwrap();
            let error = stepscope::files::load_state_dict(&mut parameters, &path).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("other.safetensors"), "{error}");
            assert_eq!(parameters.sha256().unwrap(), before, "{reason}");
        }
        let twice = model(&|spec| {
            spec.add("head.gain", [3], Initializer::ONE);
        });
        let error = stepscope::files::save_state_dict(&twice, folder.path().join("twice")).unwrap_err().to_string();
        assert!(error.contains("two named `head.weight`"), "{error}");
    }
}
