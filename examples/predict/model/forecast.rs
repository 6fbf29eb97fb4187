//! The forecast of a sequence of launches: the time of each kernel, and of all.
//!
//! Invariant: the total time is the sum over launches. They are in one stream, and each begins
//! after the previous one has ended.

use std::collections::BTreeMap;

use serde::Serialize;
use stepscope::Launch;

use super::cache::Cache;
use super::clock;
use super::code::Kernels;
use super::gpu::Gpu;
use super::work::Work;

/// The total of the launches of one kernel.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) kernel: &'static str,
    pub(crate) launches: usize,
    /// Bytes touched, each byte once per launch, and bytes moved from or to memory.
    pub(crate) touched_bytes: u64,
    pub(crate) memory_bytes: u64,
    /// Floating-point operations of products: by multiply-adds, and by tensor cores.
    pub(crate) f32_operations: f64,
    pub(crate) matrix_operations: f64,
    /// Instructions of warps.
    pub(crate) instructions: f64,
    pub(crate) microseconds: f64,
    /// The resource that binds the longest of them.
    pub(crate) bound: &'static str,
    #[serde(skip)]
    longest: f64,
}

/// The forecast of some launches.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Forecast {
    pub(crate) microseconds: f64,
    pub(crate) launches: usize,
    pub(crate) memory_bytes: u64,
    /// The resource that binds for the longest time.
    pub(crate) bound: &'static str,
    /// Kernels by total time, longest first.
    pub(crate) kernels: Vec<Row>,
}

impl Forecast {
    /// Forecasts launches that repeat: a first round fills the cache.
    pub(crate) fn of(gpu: &Gpu, kernels: &Kernels, launches: &[Launch]) -> Self {
        let mut cache = Cache::new(gpu.cache_bytes);
        let works: Vec<Work> = launches.iter().map(|launch| Work::of(launch, kernels)).collect();
        for work in &works {
            cache.run(&work.touches);
        }
        let mut rows: BTreeMap<&'static str, Row> = BTreeMap::new();
        let mut bounds: BTreeMap<&'static str, f64> = BTreeMap::new();
        for (launch, work) in launches.iter().zip(&works) {
            let memory_bytes = cache.run(&work.touches);
            let time = clock::time(gpu, work, memory_bytes as f64);
            let name = launch.entry.name;
            let row = rows.entry(name).or_insert_with(|| Row { kernel: name, ..Row::default() });
            row.launches += 1;
            row.touched_bytes += work.touched();
            row.memory_bytes += memory_bytes;
            row.f32_operations += work.flops[0];
            row.matrix_operations += work.flops[1];
            row.instructions += work.instructions();
            row.microseconds += time.nanoseconds / 1e3;
            if time.nanoseconds > row.longest {
                (row.longest, row.bound) = (time.nanoseconds, time.bound);
            }
            *bounds.entry(time.bound).or_default() += time.nanoseconds;
        }
        let mut kernels: Vec<Row> = rows.into_values().collect();
        kernels.sort_by(|a, b| b.microseconds.total_cmp(&a.microseconds));
        let bound = bounds.into_iter().max_by(|(_, a), (_, b)| a.total_cmp(b)).map_or("nothing", |(bound, _)| bound);
        Self {
            microseconds: kernels.iter().map(|row| row.microseconds).sum(),
            launches: launches.len(),
            memory_bytes: kernels.iter().map(|row| row.memory_bytes).sum(),
            bound,
            kernels,
        }
    }
}
