//! A safetensors file that is assembled in memory from named tensors and notes.
//!
//! Invariant: the same tensors and notes give the same bytes, so traces of two devices can be
//! compared by digest.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensorError, TensorView};
use stepscope::files::replace_file;
use stepscope::tensor::{Element, Shape};
use stepscope::{Error, Result};

/// Tensors and notes, to be written together.
#[derive(Default)]
pub(crate) struct TensorFile {
    tensors: Vec<(String, Dtype, Shape, Vec<u8>)>,
    notes: BTreeMap<String, String>,
}

impl TensorFile {
    /// Adds a tensor.
    pub(crate) fn add<T: Element>(&mut self, name: impl Into<String>, shape: impl Into<Shape>, values: &[T]) {
        let dtype = if T::NAME == f32::NAME { Dtype::F32 } else { Dtype::U32 };
        self.tensors.push((name.into(), dtype, shape.into(), bytemuck::cast_slice(values).to_vec()));
    }

    /// Adds a note.
    pub(crate) fn note(&mut self, name: impl Into<String>, text: impl ToString) {
        self.notes.insert(name.into(), text.to_string());
    }

    /// Writes the file atomically. On failure, the previous file stays.
    ///
    /// # Errors
    /// When it cannot be written, or a tensor's element count differs from its shape.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let refused = |reason: SafeTensorError| Error::File { path: path.into(), reason: reason.to_string() };
        let mut views = Vec::new();
        for (name, dtype, shape, bytes) in &self.tensors {
            let view = TensorView::new(*dtype, shape.extents().to_vec(), bytes).map_err(refused)?;
            views.push((name, view));
        }
        // All notes are stored as one, because the format keeps no order among several.
        let notes = serde_json::to_string(&self.notes).expect("a map of texts has a JSON form");
        let notes = HashMap::from([("notes".to_owned(), notes)]);
        replace_file(path, &safetensors::serialize(views, Some(notes)).map_err(refused)?)
    }
}
