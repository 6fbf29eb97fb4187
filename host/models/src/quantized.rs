//! Matrices in NF4 in a folder of transformers, as bitsandbytes saves them.
//!
//! ```text
//! NAME                                    U8 [bytes, 1]   two codes in each byte, row by row
//! NAME.absmax                             U8 [blocks]     the codes of the scales
//! NAME.nested_absmax                      F32 [groups]    the factors of the scales
//! NAME.quant_state.bitsandbytes__nf4      U8              JSON: the offset, extents and sizes
//! NAME.quant_map, NAME.nested_quant_map   F32             the values of the codes
//! ```
//! Invariant: a matrix is accepted only if its sizes and the values of its codes are those of
//! [`Nf4Matrix`].

use crate::config::keys::{Keys, shown};
use serde_json::{Value, json};
use std::path::Path;
use stepscope_core::{Error, Nf4Matrix, Result};
use stepscope_train::TensorFiles;

/// The ends of the names of a matrix' tensors.
const SCALES: &str = ".absmax";
const FACTORS: &str = ".nested_absmax";
const STATE: &str = ".quant_state.bitsandbytes__nf4";
const MAPS: [&str; 2] = [".quant_map", ".nested_quant_map"];

/// Returns the names of all tensors of a matrix.
pub(crate) fn names(name: &str) -> Vec<String> {
    ["", SCALES, FACTORS, STATE, MAPS[0], MAPS[1]].iter().map(|end| format!("{name}{end}")).collect()
}

/// Returns true if the files have this matrix in NF4.
pub(crate) fn has(files: &TensorFiles, name: &str) -> bool {
    files.get(name).is_none() && files.has_bytes(name)
}

/// A matrix in NF4, read from a file.
#[derive(Debug)]
pub(crate) struct Quantized {
    codes: Vec<u8>,
    scales: Vec<u8>,
    factors: Vec<f32>,
    offset: f32,
}

impl Quantized {
    /// Reads a matrix of these extents.
    pub(crate) fn read(folder: &Path, files: &mut TensorFiles, name: &str, shape: [usize; 2]) -> Result<Self> {
        let [codes, scales, state] = ["", SCALES, STATE].map(|end| files.read_bytes(&format!("{name}{end}")));
        let factors = files.read(&format!("{name}{FACTORS}"))?;
        let refused = |reason: String| Error::file(folder, format!("`{name}` in NF4: {reason}"));
        let state: Value = serde_json::from_slice(&state?).map_err(|reason| refused(format!("its state: {reason}")))?;
        let offset = Keys::of(&state).and_then(|keys| offset(&keys, shape)).map_err(refused)?;
        for (map, known) in MAPS.into_iter().zip(Nf4Matrix::code_values()) {
            if files.read::<f32>(&format!("{name}{map}"))? != known {
                return Err(refused(format!(
                    "expected the values of bitsandbytes' codes in `{name}{map}`, got other values"
                )));
            }
        }
        let matrix = Self { codes: codes?, scales: scales?, factors, offset };
        matrix.matrix().check(shape).map_err(refused)?;
        Ok(matrix)
    }

    pub(crate) fn matrix(&self) -> Nf4Matrix<'_> {
        Nf4Matrix { codes: &self.codes, scales: &self.scales, factors: &self.factors, offset: self.offset }
    }
}

/// Checks the state of a matrix `[outputs, inputs]`, and returns the offset of its scales.
fn offset(keys: &Keys<'_>, shape: [usize; 2]) -> std::result::Result<f32, String> {
    for (key, value) in [
        ("quant_type", json!("nf4")),
        ("blocksize", json!(64)),
        ("nested_blocksize", json!(256)),
        ("nested_dtype", json!("float32")),
        ("shape", json!(shape)),
    ] {
        match keys.get(key) {
            Some(found) if *found == value => {}
            _ => return keys.refuse(key, shown(&value)),
        }
    }
    let offset = keys.real("nested_offset", 0.0..=f64::from(f32::MAX))?;
    keys.finish(&["dtype"])?;
    offset.map_or_else(|| keys.refuse("nested_offset", "a number"), |offset| Ok(offset as f32))
}
