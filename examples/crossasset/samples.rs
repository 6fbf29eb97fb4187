//! Host batches of samples for the trainer.

use std::ops::Range;
use std::sync::Arc;

use stepscope::data::Loader;
use stepscope::group::Group;
use stepscope::memory::PageLocked;
use stepscope::{Device, HostBatch, HostInputs, Result};

use crate::dataset::{Dataset, Fold};
use crate::features::SAMPLE_LEN;
use crate::sizes::{FEATURES, SCALES};

/// The samples of one step. For another rank's samples, only their number is stored.
pub(crate) struct MicroBatch {
    samples: usize,
    /// Features, `[samples, 12, 193]`, in pinned memory, so that the device can read them while the
    /// host makes the next batch.
    x: Option<PageLocked<f32>>,
    /// Classes, `[samples]`.
    pub(crate) labels: Vec<u32>,
}

impl MicroBatch {
    /// Returns samples of zeros.
    pub(crate) fn zeros(device: &Device, samples: usize) -> Result<Self> {
        let x = PageLocked::zeros(device, samples * SAMPLE_LEN)?;
        Ok(Self { samples, x: Some(x), labels: vec![0; samples] })
    }

    /// Returns the placeholder for samples of another rank.
    fn elsewhere(samples: usize) -> Self {
        Self { samples, x: None, labels: Vec::new() }
    }

    /// Returns the features and labels of these samples.
    pub(crate) fn of(device: &Device, dataset: &Dataset, fold: &Fold, samples: &[usize]) -> Result<Self> {
        let mut x = PageLocked::zeros(device, samples.len() * SAMPLE_LEN)?;
        dataset.batch_features(samples, x.write()?);
        let mut labels = vec![0; samples.len()];
        dataset.batch_labels(fold, samples, &mut labels);
        Ok(Self { samples: samples.len(), x: Some(x), labels })
    }

    /// Returns the features, `[samples, 12, 193]`, or an empty slice for another rank's samples.
    pub(crate) fn x(&self) -> &[f32] {
        self.x.as_deref().unwrap_or_default()
    }

    /// Returns the shape of `x`.
    pub(crate) fn shape(&self) -> [usize; 3] {
        [self.labels.len(), SCALES.len(), FEATURES]
    }
}

impl HostBatch for MicroBatch {
    fn len(&self) -> usize {
        self.samples
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        HostInputs::new().with(self.x(), self.shape())?.with(&self.labels, [self.labels.len()])
    }
}

/// The partition of samples into batches, of batches into shards, and of shards into micro-batches
/// of at most this many samples.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    pub(crate) batch: usize,
    pub(crate) shards: usize,
    pub(crate) micro_batch: usize,
}

impl Cut {
    /// Returns the parts of a batch of `samples` samples. Each shard has the same number of parts,
    /// and each part has at least one sample.
    fn parts(self, samples: usize) -> impl Iterator<Item = Range<usize>> {
        let Self { shards, micro_batch, .. } = self;
        let parts = (shards * samples.div_ceil(shards).div_ceil(micro_batch)).min(samples);
        // A single shard keeps its original partition, whose last part may be much shorter.
        let start = move |part: usize| if shards == 1 { part * micro_batch } else { part * samples / parts };
        (0..parts).map(move |part| start(part)..samples.min(start(part + 1)))
    }

    /// Returns the number of samples of the largest part.
    pub(crate) fn largest(self, samples: usize) -> usize {
        self.parts(samples.min(self.batch)).map(|part| part.len()).max().unwrap_or(0)
    }
}

/// Returns batches of samples in this order, prepared for the device while it trains on earlier
/// ones. Batches of other ranks of the group are placeholders.
pub(crate) fn batches(
    device: &Device,
    dataset: &Arc<Dataset>,
    fold: &Fold,
    order: Vec<usize>,
    cut: Cut,
    group: Option<&Group>,
) -> Result<Loader<Vec<MicroBatch>>> {
    let (device, dataset, fold) = (device.clone(), Arc::clone(dataset), fold.clone());
    let (batch, group) = (cut.batch, group.cloned());
    Loader::new((0..order.len().div_ceil(batch)).map(move |number| {
        let samples = &order[number * batch..order.len().min((number + 1) * batch)];
        let parts: Vec<_> = cut.parts(samples.len()).collect();
        let own = group.as_ref().map(|group| group.own_parts(cut.shards, parts.len()));
        let is_own = |at: usize| own.as_ref().is_none_or(|own| own.iter().any(|shard| shard.contains(&at)));
        let part = |(at, part): (usize, Range<usize>)| match is_own(at) {
            true => MicroBatch::of(&device, &dataset, &fold, &samples[part]),
            false => Ok(MicroBatch::elsewhere(part.len())),
        };
        parts.into_iter().enumerate().map(part).collect()
    }))
}
