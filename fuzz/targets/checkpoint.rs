//! Fuzzes the checkpoint reader with arbitrary bytes, and with well-formed files of arbitrary
//! content.
//!
//! Invariant: a file is loaded, or refused with an error that names it. A loaded file either fits
//! the model, which then holds the file's bytes, or is refused without changes. A fuzzer cannot
//! guess the digest, so safetensors files are tried again with format and digest corrected. With
//! `STEPSCOPE_PLANT` set, a weight is corrupted after it was restored.

#![no_main]

use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::sync::{LazyLock, Mutex};
use stepscope::parameters::Initializer;
use stepscope::upload::{NonFinite, Transfer};
use stepscope::{AdamW, Checkpoint, Device, DeviceKind, Error, Optimizer, ParameterSpec, Parameters};
use tempfile::TempDir;

/// The prefixes of a parameter's tensors: weights and both moments.
const PREFIXES: [&str; 3] = ["", "adamw.first.", "adamw.second."];

struct Model {
    folder: TempDir,
    parameters: Parameters,
    optimizer: Optimizer<AdamW>,
}

static MODEL: LazyLock<Mutex<Model>> = LazyLock::new(|| {
    let device = Device::open(DeviceKind::Emulated).expect("the emulator opens");
    let mut spec = ParameterSpec::builder();
    spec.add("w", [2, 3], Initializer::fan_in(2));
    spec.add("b", [1], Initializer::Constant(0.0));
    let spec = spec.build().expect("a spec");
    let parameters = Parameters::new(&device, &spec, 1).expect("parameters");
    let optimizer = Optimizer::new(&parameters, AdamW::default()).expect("an optimizer");
    Mutex::new(Model { folder: tempfile::tempdir().expect("a folder"), parameters, optimizer })
});

fuzz_target!(|bytes: &[u8]| {
    let mut model = MODEL.lock().expect("no run has panicked");
    let loaded = model.try_file(bytes);
    if let Some(sealed) = sealed(bytes) {
        assert!(model.try_file(&sealed), "a file with the right format and digest was refused");
    } else {
        assert!(!loaded, "a file was loaded that safetensors cannot read");
    }
});

impl Model {
    /// Returns true if a file of these bytes is loaded.
    fn try_file(&mut self, bytes: &[u8]) -> bool {
        let path = self.folder.path().join("model.safetensors");
        fs::write(&path, bytes).expect("a file");
        let checkpoint = match Checkpoint::load(&path) {
            Ok(checkpoint) => checkpoint,
            Err(Error::File { .. }) => return false,
            Err(error) => panic!("not about the file: {error:?}"),
        };
        let before = self.state();
        let all = Transfer::new().non_finite(NonFinite::Allow);
        match checkpoint.restore_with(&mut self.parameters, Some(&mut self.optimizer), all) {
            Ok(()) => {
                let mut restored = self.state();
                if std::env::var_os("STEPSCOPE_PLANT").is_some() {
                    restored.0[0][0] ^= 1;
                }
                assert_eq!(restored, self.expected(bytes), "what was restored is not what the file holds");
            }
            Err(Error::File { .. } | Error::OtherOptimizer { .. }) => {
                assert_eq!(self.state(), before, "a refused file changed the model");
            }
            Err(error) => panic!("not about the file: {error:?}"),
        }
        true
    }

    /// Returns weights and moments as bytes, and the number of updates.
    fn state(&self) -> ([Vec<u8>; 3], u64) {
        let [first, second] = self.optimizer.state() else { unreachable!("two moments") };
        let bytes = [self.parameters.flat(), first, second].map(|flat| {
            let values = flat.read().expect("a region is read");
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        });
        (bytes, self.optimizer.updates())
    }

    /// Returns the expected state after a file that fits the model. Padding between parameters
    /// stays unchanged.
    fn expected(&self, file: &[u8]) -> ([Vec<u8>; 3], u64) {
        let tensors = SafeTensors::deserialize(file).expect("a file that was loaded");
        let (mut regions, _) = self.state();
        for (prefix, region) in PREFIXES.into_iter().zip(&mut regions) {
            for entry in self.parameters.spec().entries() {
                let tensor = tensors.tensor(&format!("{prefix}{}", entry.name())).expect("a tensor that was restored");
                let at = entry.range().start * 4;
                region[at..at + tensor.data().len()].copy_from_slice(tensor.data());
            }
        }
        let updates = notes(file)["stepscope.updates"].parse().expect("a number that was restored");
        (regions, updates)
    }
}

fn notes(file: &[u8]) -> HashMap<String, String> {
    let (_, header) = SafeTensors::read_metadata(file).expect("a file that was read");
    header.metadata().clone().unwrap_or_default()
}

/// Returns a safetensors file with the same tensors and notes, but the right format and digest;
/// none for other bytes.
fn sealed(bytes: &[u8]) -> Option<Vec<u8>> {
    let file = SafeTensors::deserialize(bytes).ok()?;
    let mut notes = notes(bytes);
    notes.insert("stepscope.format".into(), "1".into());
    notes.remove("stepscope.sha256");
    let tensors: BTreeMap<_, _> = file.tensors().into_iter().collect();
    let mut hash = Sha256::new();
    for (key, value) in notes.iter().collect::<BTreeMap<_, _>>() {
        hash.update(format!("{}:{key}{}:{value}", key.len(), value.len()));
    }
    for (name, tensor) in &tensors {
        hash.update(format!("{}:{name}{:?}", name.len(), tensor.shape()));
        hash.update(tensor.data());
    }
    let digest = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    notes.insert("stepscope.sha256".into(), digest);
    Some(safetensors::serialize(tensors, Some(notes)).expect("tensors of a file"))
}
