//! Samples on the host, as the trainer takes them.

use std::sync::Arc;

use stepscope::{Inputs, Loader, Result, Samples};

use crate::dataset::{Dataset, Fold};
use crate::features::{FEATURES, SAMPLE_LEN, SCALES};

/// Samples that a step works on.
pub(crate) struct MicroBatch {
    /// Features, `[samples, 12, 193]`.
    pub(crate) x: Vec<f32>,
    /// Classes, `[samples]`.
    pub(crate) labels: Vec<u32>,
}

impl MicroBatch {
    /// So many samples, all zero.
    pub(crate) fn zeros(samples: usize) -> Self {
        Self { x: vec![0.0; samples * SAMPLE_LEN], labels: vec![0; samples] }
    }

    /// Features and labels of some samples.
    pub(crate) fn of(dataset: &Dataset, fold: &Fold, samples: &[usize]) -> Self {
        let mut batch = Self::zeros(samples.len());
        dataset.batch_features(samples, &mut batch.x);
        dataset.batch_labels(fold, samples, &mut batch.labels);
        batch
    }

    /// The extents of `x`.
    pub(crate) fn shape(&self) -> [usize; 3] {
        [self.labels.len(), SCALES.len(), FEATURES]
    }
}

impl Samples for MicroBatch {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn inputs(&self) -> Result<Inputs<'_>> {
        Inputs::new().with(&self.x, self.shape())?.with(&self.labels, [self.labels.len()])
    }
}

/// Samples in this order, in batches of so many, each in micro-batches of so many, made while others are trained on.
pub(crate) fn batches(
    dataset: &Arc<Dataset>,
    fold: &Fold,
    order: Vec<usize>,
    (batch, micro_batch): (usize, usize),
) -> Result<Loader<Vec<MicroBatch>>> {
    let (dataset, fold) = (Arc::clone(dataset), fold.clone());
    Loader::new((0..order.len().div_ceil(batch)).map(move |number| {
        let samples = &order[number * batch..order.len().min((number + 1) * batch)];
        Ok(samples.chunks(micro_batch).map(|samples| MicroBatch::of(&dataset, &fold, samples)).collect())
    }))
}
