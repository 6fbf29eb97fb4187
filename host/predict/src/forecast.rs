//! The forecast of a sequence of launches: the time of each kernel, and of all.
//!
//! Invariant: the total time is the sum over launches. They are in one stream, and each begins
//! after the previous one has ended.

use std::collections::BTreeMap;

use serde::Serialize;
use stepscope_core::internals::Launch;

use crate::cache::Cache;
use crate::clock;
use crate::code::Kernels;
use crate::gpu::Gpu;
use crate::work::Work;

/// The total of the launches of one kernel.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// The name.
    pub kernel: &'static str,
    /// The number of launches.
    pub launches: usize,
    /// Bytes touched, each byte once per launch.
    pub touched_bytes: u64,
    /// Bytes moved from or to memory.
    pub memory_bytes: u64,
    /// Floating-point operations of products by multiply-adds.
    pub f32_operations: f64,
    /// Floating-point operations of products by tensor cores.
    pub matrix_operations: f64,
    /// Instructions of warps.
    pub instructions: f64,
    /// The time.
    pub microseconds: f64,
    /// The resource that binds the longest of them.
    pub bound: &'static str,
    #[serde(skip)]
    longest: f64,
}

/// The forecast of some launches.
#[derive(Clone, Debug, Serialize)]
pub struct Forecast {
    /// The time.
    pub microseconds: f64,
    /// The number of launches.
    pub launches: usize,
    /// Bytes moved from or to memory.
    pub memory_bytes: u64,
    /// The resource that binds for the longest time.
    pub bound: &'static str,
    /// Kernels by total time, longest first.
    pub kernels: Vec<Row>,
}

impl Forecast {
    /// Forecasts launches that repeat: a first round fills the cache.
    pub fn of(gpu: &Gpu, kernels: &Kernels, launches: &[Launch]) -> Self {
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
