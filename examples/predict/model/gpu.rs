//! GPUs, as figures: what instructions and copies reach, and where each figure is from.
//!
//! Invariant: no figure is fitted to the time of a kernel that is predicted. Instructions, the copy and the smallest launch calibrate; what
//! nobody measured is said to be assumed.

use clap::ValueEnum;

/// Which GPU is predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    /// NVIDIA GB10 (DGX Spark): nothing here was measured on one.
    Gb10,
    /// NVIDIA H200.
    H200,
}

/// What a GPU can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gpu {
    pub(crate) name: &'static str,
    /// Where its figures are from, in a line.
    pub(crate) sources: &'static str,
    /// The architecture whose assembled kernels it runs.
    pub(crate) arch: &'static str,
    pub(crate) processors: u32,
    /// Of its multiprocessors under a load of instructions, in GHz.
    pub(crate) clock: f64,
    /// The same where matrix instructions on BF16 tensors take all the power that there is.
    pub(crate) loaded_clock: f64,
    /// Matrix instructions in BF16: operations a cycle of a multiprocessor. TF32 has half of it.
    pub(crate) bf16_per_cycle: f64,
    /// Bytes of memory a second, in a copy: read and written, in GB/s.
    pub(crate) copy: f64,
    /// Bytes that the L2 cache gives to all multiprocessors, in GB/s.
    pub(crate) cache_rate: f64,
    pub(crate) cache_bytes: u64,
    /// What a read takes that hits the L2 cache, and one that does not, in ns.
    pub(crate) cache_latency: f64,
    pub(crate) memory_latency: f64,
    /// From one launch of a graph to the next, when it does next to nothing, in ns.
    pub(crate) launch: f64,
    /// Of a multiprocessor.
    pub(crate) shared_bytes: u32,
    pub(crate) threads: u32,
    pub(crate) blocks: u32,
}

impl Gpu {
    /// Measured: FFMA, TF32 and BF16 from registers (65.3, 309.5, 618.9 TFLOP/s: FFMA at 1.93 GHz); the loaded clock in `docs/lab/matmul.md`, 8192 cubed by
    /// tiles of 128 x 128; in `benches/runs/2026-11-21-h200-kernels.json` the copy's rate (2^28), the launch (`fill` at 2^12, less its own
    /// instructions), and the latencies (`copy` at 2^12 and 2^20, less launch, instructions and bytes). Published: 132 multiprocessors, 50 MB of L2 cache, 228 KiB of shared memory. Assumed: 5,120 bytes a
    /// cycle of the L2 cache, which NVIDIA names for the A100.
    pub(crate) const H200: Self = Self {
        name: "H200",
        sources: "by instruction rates, copy and launch as measured on an H200; the L2 cache's rate is assumed",
        arch: "sm_90",
        processors: 132,
        clock: 1.932,
        loaded_clock: 1.56,
        bf16_per_cycle: 618.9e3 / 132.0 / 1.932,
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

    /// Measured by others: 219 GB/s copied, BF16 91 TFLOP/s. Published: 48 multiprocessors, 24 MB of L2 cache, 100 KiB of shared
    /// memory, 31 TFLOP/s of f32, which is 2.52 GHz. Assumed: that TF32 has half of BF16's rate, and that the
    /// clock under load is 2.42 GHz; the L2 cache's bytes a cycle of a multiprocessor, latencies and the launch as those of the H200.
    pub(crate) const GB10: Self = Self {
        name: "GB10",
        sources: "by rates that others measured (219 GB/s copied, 91 TFLOP/s BF16); clocks, caches, latencies and launches are assumed",
        arch: "sm_121",
        processors: 48,
        clock: 2.418,
        loaded_clock: 2.418,
        bf16_per_cycle: 91e3 / 48.0 / 2.418,
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

    pub(crate) const fn of(name: Name) -> Self {
        match name {
            Name::Gb10 => Self::GB10,
            Name::H200 => Self::H200,
        }
    }

    /// Operations a cycle of a multiprocessor by matrix instructions of so many operations: those of 16 x 8 x 8 multiply TF32.
    pub(crate) fn matrix_rate(&self, of_one: f64) -> f64 {
        if of_one < 4096.0 { self.bf16_per_cycle / 2.0 } else { self.bf16_per_cycle }
    }
}
