//! Points with labels: what a classifier in a test is trained on.

use stepscope::{Inputs, Result, Samples};

/// Of `INPUTS` numbers each, one point behind the other, and as many labels as points.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Points<const INPUTS: usize> {
    pub(crate) x: Vec<f32>,
    pub(crate) labels: Vec<u32>,
}

impl<const INPUTS: usize> Points<INPUTS> {
    /// These points, in parts of at most so many.
    pub(crate) fn in_parts(self, part: usize) -> Vec<Self> {
        let parts = self.labels.chunks(part).zip(self.x.chunks(part * INPUTS));
        parts.map(|(labels, x)| Self { x: x.to_vec(), labels: labels.to_vec() }).collect()
    }
}

impl<const INPUTS: usize> Samples for Points<INPUTS> {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn inputs(&self) -> Result<Inputs<'_>> {
        Inputs::new().with(&self.x, [self.labels.len(), INPUTS])?.with(&self.labels, [self.labels.len()])
    }
}
