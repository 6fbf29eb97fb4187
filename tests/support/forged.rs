//! Complete checkpoints with notes that the library never writes.

use safetensors::SafeTensors;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Changes the notes of a checkpoint, and updates its digest.
pub(crate) fn forge(path: &Path, change: &[(&str, &str)]) {
    let bytes = fs::read(path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut notes: BTreeMap<String, String> = header.metadata().clone().unwrap().into_iter().collect();
    notes.remove("stepscope.sha256");
    notes.extend(change.iter().map(|(key, value)| (key.to_string(), value.to_string())));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors: BTreeMap<_, _> = file.tensors().into_iter().collect();
    let mut hash = Sha256::new();
    for (key, value) in &notes {
        hash.update(format!("{}:{key}{}:{value}", key.len(), value.len()));
    }
    for (name, tensor) in &tensors {
        hash.update(format!("{}:{name}{:?}", name.len(), tensor.shape()));
        hash.update(tensor.data());
    }
    notes.insert("stepscope.sha256".into(), hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
    fs::write(path, safetensors::serialize(tensors, Some(notes.into_iter().collect())).unwrap()).unwrap();
}
