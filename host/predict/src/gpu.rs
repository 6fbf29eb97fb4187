//! Figures of GPUs: rates of instructions and copies, with their sources.
//!
//! Invariant: no figure is fitted to the time of a predicted kernel. Only instructions, the copy
//! and the smallest launch calibrate the model. Figures that nobody measured are marked as assumed.

use clap::ValueEnum;

/// The GPU to predict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// NVIDIA GB10 (DGX Spark); no figure here was measured on one
    Gb10,
    /// NVIDIA H200
    H200,
}

/// The rate of `wgmma`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wgmma {
    /// BF16 operations per cycle and multiprocessor.
    pub per_cycle: f64,
    /// The clock when such kernels reach the power limit, in GHz.
    pub loaded_clock: f64,
}

/// The capabilities of a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// The name.
    pub name: &'static str,
    /// A line about the sources of its figures.
    pub sources: &'static str,
    /// The architecture of the assembled kernels.
    pub arch: &'static str,
    /// The number of multiprocessors.
    pub processors: u32,
    /// The multiprocessor clock under a load of instructions, in GHz.
    pub clock: f64,
    /// The clock when BF16 tensor-core kernels reach the power limit.
    pub loaded_clock: f64,
    /// BF16 tensor-core operations of `mma.sync` per cycle and multiprocessor. TF32 reaches half.
    pub bf16_per_cycle: f64,
    /// The rate of `wgmma`, if it multiplies matrices by that instruction.
    pub wgmma: Option<Wgmma>,
    /// True if it shares the host's memory.
    pub integrated: bool,
    /// The copy rate in GB/s, reads plus writes.
    pub copy: f64,
    /// The L2 cache's rate to all multiprocessors, in GB/s.
    pub cache_rate: f64,
    /// The size of the L2 cache.
    pub cache_bytes: u64,
    /// The latency in ns of a read that hits the L2 cache.
    pub cache_latency: f64,
    /// The latency in ns of a read that misses it.
    pub memory_latency: f64,
    /// The time from one launch of a graph to the next for a nearly empty kernel, in ns.
    pub launch: f64,
    /// The shared memory of a multiprocessor.
    pub shared_bytes: u32,
    /// The most threads on a multiprocessor.
    pub threads: u32,
    /// The most blocks on a multiprocessor.
    pub blocks: u32,
}

impl Gpu {
    /// The figures of the H200:
    ///
    /// - Measured: FFMA, TF32 and BF16 from registers (65.3, 309.5, 618.9 TFLOP/s: FFMA at 1.93
    ///   GHz).
    /// - Measured: the loaded clock, in `docs/lab/products.md`, 8192 cubed with tiles of 128 x
    ///   128.
    /// - Measured, in `benches/runs/2026-11-21-h200-kernels.json`: the copy rate (2^28), the launch
    ///   (`fill` at 2^12, less its own instructions), and the latencies (`copy` at 2^12 and 2^20,
    ///   less launch, instructions and bytes).
    /// - Published: 132 multiprocessors, 50 MB of L2 cache, 228 KiB of shared memory.
    /// - Published: `wgmma` of 989 TFLOP/s at 1.83 GHz, which is 4,096 operations per cycle. Its
    ///   loaded clock is the middle of the 1.26 to 1.7 GHz that an H100 had at 700 W.
    /// - Assumed: 5,120 bytes per cycle from the L2 cache, which NVIDIA states for the A100.
    pub const H200: Self = Self {
        name: "H200",
        sources: "instruction rates, copy and launch measured on an H200; L2 cache rate assumed",
        arch: "sm_90",
        processors: 132,
        clock: 1.932,
        loaded_clock: 1.56,
        bf16_per_cycle: 618.9e3 / 132.0 / 1.932,
        wgmma: Some(Wgmma { per_cycle: 4096.0, loaded_clock: 1.48 }),
        integrated: false,
        copy: 4266.0,
        cache_rate: 5120.0 * 1.932,
        cache_bytes: 50_000_000,
        cache_latency: 168.0,
        memory_latency: 750.0,
        launch: 472.0,
        shared_bytes: 228 << 10,
        threads: 2048,
        blocks: 32,
    };

    /// The figures of the GB10:
    ///
    /// - Measured by others: 219 GB/s copied, BF16 91 TFLOP/s.
    /// - Published: 48 multiprocessors, 24 MB of L2 cache, 100 KiB of shared memory, 31 TFLOP/s of
    ///   f32, which is 2.52 GHz.
    /// - Assumed: TF32 at half of BF16's rate, a clock of 2.42 GHz under load, and the H200's L2
    ///   bytes per cycle and multiprocessor, latencies and launch.
    pub const GB10: Self = Self {
        name: "GB10",
        sources: "rates measured by others (219 GB/s copied, 91 TFLOP/s BF16); clocks, caches, latencies and launches assumed",
        arch: "sm_121",
        processors: 48,
        clock: 2.418,
        loaded_clock: 2.418,
        bf16_per_cycle: 91e3 / 48.0 / 2.418,
        wgmma: None,
        integrated: true,
        copy: 219.0,
        cache_rate: 5120.0 * 48.0 / 132.0 * 2.418,
        cache_bytes: 24_000_000,
        cache_latency: 168.0,
        memory_latency: 750.0,
        launch: 472.0,
        shared_bytes: 100 << 10,
        threads: 1536,
        blocks: 24,
    };

    /// Returns a GPU by name.
    pub const fn of(name: Name) -> Self {
        match name {
            Name::Gb10 => Self::GB10,
            Name::H200 => Self::H200,
        }
    }

    /// Returns the operations per cycle and multiprocessor of tensor-core instructions of this
    /// size. Instructions of 16 x 8 x 8 are TF32, and larger ones than 16 x 8 x 16 are `wgmma`.
    pub fn matrix_rate(&self, of_one: f64) -> f64 {
        match self.wgmma {
            Some(wgmma) if of_one > 4096.0 => wgmma.per_cycle,
            _ if of_one < 4096.0 => self.bf16_per_cycle / 2.0,
            _ => self.bf16_per_cycle,
        }
    }
}
