//! The forecast of a row of launches.

use std::collections::BTreeMap;

use stepscope::Launch;

use crate::cache::Cache;
use crate::clock;
use crate::code::Kernels;
use crate::gpu::Gpu;
use crate::work::Work;

/// What the launches of one kernel take together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Row {
    pub(crate) launches: usize,
    pub(crate) us: f64,
    pub(crate) bytes: f64,
    pub(crate) flops: [f64; 2],
    pub(crate) bound: &'static str,
    most: f64,
}

/// The kernels, the longest first, and microseconds of one of `calls` calls; the first half of the launches fills the cache.
pub(crate) fn forecast(gpu: &Gpu, kernels: &Kernels, launches: &[Launch], calls: usize) -> (Vec<(&'static str, Row)>, f64) {
    let mut cache = Cache::new(gpu.cache_bytes);
    let mut rows: BTreeMap<&'static str, Row> = BTreeMap::new();
    let mut total = 0.0;
    for (at, launch) in launches.iter().enumerate() {
        let work = Work::of(launch, kernels, gpu.processors);
        let bytes = cache.run(&work.touches) as f64;
        if 2 * at < launches.len() {
            continue;
        }
        let time = clock::time(gpu, &work, bytes);
        let row = rows.entry(launch.entry.name).or_default();
        row.launches += 1;
        row.us += time.total / 1e3;
        row.bytes += bytes;
        row.flops[0] += work.flops[0];
        row.flops[1] += work.flops[1];
        if time.total > row.most {
            (row.most, row.bound) = (time.total, time.bound);
        }
        total += time.total / 1e3;
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by(|(_, a), (_, b)| b.us.total_cmp(&a.us));
    (rows, total / (calls as f64 / 2.0))
}
