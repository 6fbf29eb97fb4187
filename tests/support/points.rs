//! Labelled points: the training data of classifiers in tests.

use stepscope::{HostBatch, HostInputs, Result};

/// Points of `INPUTS` numbers each, one after the other, with a label for each.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Points<const INPUTS: usize> {
    pub(crate) x: Vec<f32>,
    pub(crate) labels: Vec<u32>,
}

impl<const INPUTS: usize> Points<INPUTS> {
    /// Splits the points into parts of at most `part`.
    pub(crate) fn in_parts(self, part: usize) -> Vec<Self> {
        let parts = self.labels.chunks(part).zip(self.x.chunks(part * INPUTS));
        parts.map(|(labels, x)| Self { x: x.to_vec(), labels: labels.to_vec() }).collect()
    }
}

impl<const INPUTS: usize> HostBatch for Points<INPUTS> {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        HostInputs::new().with(&self.x, [self.labels.len(), INPUTS])?.with(&self.labels, [self.labels.len()])
    }
}
