//! Files in the layout of PyTorch's `state_dict`: names, shapes and every bit, there and back.

#![forbid(unsafe_code)]

mod support;

use std::collections::BTreeMap;
use std::path::Path;
use stepscope::nn::{Attention, Embedding, Linear, RmsNorm, SwiGlu};
use stepscope::*;
use support::on_each_device;

/// Enough of f32's bits that are not finite for any parameter here.
static INFINITE: [u8; 1 << 17] = [0xff; 1 << 17];

fn layout() -> Layout {
    let mut layout = Layout::builder();
    let mut names = layout.names();
    Linear::new(names.at("encoder").at("0"), 5, 3);
    RmsNorm::new(names.at("norm"), 7);
    Attention::new(names.at("attention"), 128);
    Embedding::new(names.at("wte"), 6, 4, 0.02);
    SwiGlu::new(names.at("mlp"), 3, 5, 2);
    layout.add("scalegain", [4], Initializer::ONE);
    layout.add("kernel", [2, 3, 4], Initializer::fan_in(6));
    layout.build().unwrap()
}

/// A file's tensors by name: extents and numbers.
fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let file = std::fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let numbers = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let named = tensors.tensors().into_iter();
    named.map(|(name, tensor)| (name, (tensor.shape().to_vec(), numbers(tensor.data())))).collect()
}

on_each_device! {
    fn weights_go_there_and_back(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let layout = layout();
        let parameters = Parameters::new(device, &layout, 7).unwrap();
        parameters.save_state_dict(&path).unwrap();
        let file = tensors(&path);
        let names: Vec<&str> = file.keys().map(String::as_str).collect();
        assert_eq!(names, [
            "attention.k_norm.weight", "attention.norm.weight", "attention.q_norm.weight", "attention.wk.weight",
            "attention.wo.weight", "attention.wq.weight", "attention.wv.weight", "encoder.0.bias", "encoder.0.weight",
            "kernel", "mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "norm.weight", "scalegain",
            "wte.weight",
        ]);
        let ours = parameters.flat().read().unwrap();
        let entry = |name: &str| layout.entries().iter().find(|entry| entry.name() == name).unwrap();
        let (shape, theirs) = &file["encoder.0.weight"];
        assert_eq!(shape, &[3, 5]);
        let start = entry("encoder.0.weight").start();
        for input in 0..5 {
            for output in 0..3 {
                assert_eq!(theirs[output * 5 + input].to_bits(), ours[start + input * 3 + output].to_bits());
            }
        }
        assert_eq!(file["mlp.down_proj.weight"].0, [2, 5]);
        // A table is as it is.
        assert_eq!(file["wte.weight"], (vec![6, 4], ours[entry("wte.weight").range()].to_vec()));
        assert_eq!(file["kernel"], (vec![2, 3, 4], ours[entry("kernel").range()].to_vec()));

        let mut other = Parameters::new(device, &layout, 8).unwrap();
        assert_ne!(other.sha256().unwrap(), parameters.sha256().unwrap());
        other.load_state_dict(&path).unwrap();
        assert_eq!(other.sha256().unwrap(), parameters.sha256().unwrap());
    }

    /// Neither written nor read; there is no way to ask for it.
    fn numbers_that_are_not_finite_are_refused_by_name(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut parameters = Parameters::new(device, &layout(), 7).unwrap();
        let before = parameters.sha256().unwrap();
        parameters.save_state_dict(&path).unwrap();
        let mut file = std::fs::read(&path).unwrap();
        // The first tensor of the file.
        let start = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let tensor = "`attention.k_norm.gain`".to_owned();
        let expected = Error::NotFinite { update: None, what: Quantity::Weight, tensor };
        for wrong in [f32::NAN, f32::INFINITY, -f32::INFINITY] {
            file[start..start + 4].copy_from_slice(&wrong.to_le_bytes());
            std::fs::write(&path, &file).unwrap();
            assert_eq!(parameters.load_state_dict(&path), Err(expected.clone()));
            assert_eq!(parameters.sha256().unwrap(), before);
        }
        file[start..start + 4].copy_from_slice(&1.0f32.to_le_bytes());
        std::fs::write(&path, &file).unwrap();
        parameters.load_state_dict(&path).unwrap();

        let words = std::fs::read(&path).unwrap();
        parameters.load(|entry| Some(&INFINITE[..entry.range().len() * 4]), Transfer::new().numbers(Numbers::Any)).unwrap();
        let saved = parameters.save_state_dict(&path).unwrap_err();
        assert!(matches!(&saved, Error::NotFinite { tensor, .. } if tensor == "`encoder.0.weight`"), "{saved}");
        assert_eq!(std::fs::read(&path).unwrap(), words, "the old file is untouched");
    }

    fn a_file_that_does_not_fit_changes_nothing(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let model = |add: &dyn Fn(&mut LayoutBuilder)| {
            let mut layout = Layout::builder();
            layout.add("head.weight", [2, 3], Initializer::fan_in(2));
            add(&mut layout);
            Parameters::new(device, &layout.build().unwrap(), 7).unwrap()
        };
        let bias = |extent: usize| move |layout: &mut LayoutBuilder| {
            layout.add("head.bias", [extent], Initializer::ONE);
        };
        let mut parameters = model(&bias(3));
        let before = parameters.sha256().unwrap();
        for (file, reason) in [
            (model(&|_| ()), "has no `head.bias`"),
            (model(&bias(4)), "`head.bias`: expected F32 [3], got F32 [4]"),
            (model(&|layout| {
                bias(3)(layout);
                layout.add("norm.gain", [3], Initializer::ONE);
            }), "has `norm.weight`, which is no parameter"),
        ] {
            let path = folder.path().join("other.safetensors");
            file.save_state_dict(&path).unwrap();
            let error = parameters.load_state_dict(&path).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("other.safetensors"), "{error}");
            assert_eq!(parameters.sha256().unwrap(), before, "{reason}");
        }
        let twice = model(&|layout| {
            layout.add("head.gain", [3], Initializer::ONE);
        });
        let error = twice.save_state_dict(folder.path().join("twice")).unwrap_err().to_string();
        assert!(error.contains("two named `head.weight`"), "{error}");
    }
}
