//! Benchmarks allocation: in a step, at a reset, and from the overflow pool. Compares with
//! `torch.empty` and `cuMemAllocFromPoolAsync` where available.
//!
//! Run `cargo bench --bench arena` (the emulator) or `cargo bench --features cuda --bench arena --
//! --device cuda`. Prints a table of medians and spreads, and writes every sample to
//! `benches/runs/DATE-GPU-arena.json`.

#![forbid(unsafe_op_in_unsafe_fn)]

#[allow(dead_code, reason = "an allocation is timed within its step, not by the harness")]
mod harness;

use clap::Parser;
use harness::{Common, Peer, Samples, record};
use serde::Serialize;
use std::time::{Duration, Instant};
use stepscope::memory::Overflow;
use stepscope::{Arena, Capacity, Device, EagerStep, Result};

/// A tanh output of 12 tokens x 1024, which is the allocation that broke ztensor on GB10.
const ELEMENTS: usize = 12 * 1024;
const SAMPLES: usize = 50;
const PER_SAMPLE: usize = 2000;

/// Times allocations, in a step and around it
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
}

/// A line of the table.
#[derive(Debug, Serialize)]
struct Line {
    name: &'static str,
    nanoseconds: Samples,
}

fn main() -> harness::Result<()> {
    let Args { common } = Args::parse();
    let device = common.builder().open()?;
    let mut lines = vec![
        Line { name: "48 KiB in a step", nanoseconds: in_a_step(&device)? },
        Line { name: "reset after 10 tensors", nanoseconds: reset(&device, 10)? },
        Line { name: "reset after 100,000 tensors", nanoseconds: reset(&device, 100_000)? },
        Line { name: "48 KiB from the primed overflow pool", nanoseconds: overflow(&device)? },
    ];
    #[cfg(feature = "cuda")]
    if device.description().kind == stepscope::DeviceKind::Cuda {
        lines.push(Line { name: "cuMemAllocFromPoolAsync + free, 48 KiB", nanoseconds: pool::samples()? });
    }
    let (torch, failed) = Peer::start("arena.py", &[]).rest::<Samples>();
    lines.extend(torch.into_iter().map(|nanoseconds| Line { name: "torch.empty, 48 KiB", nanoseconds }));
    if let Some(reason) = failed {
        println!("torch.empty: not measured here ({reason})");
    }
    println!("{:<42} {:>12} {:>12} {:>12}", device.description().name, "median ns", "p10", "p99");
    for line in &lines {
        let [median, low, high] = [0.5, 0.1, 0.99].map(|share| line.nanoseconds.quantile(share));
        println!("{:<42} {median:>12.1} {low:>12.1} {high:>12.1}", line.name);
    }
    println!("samples in {}", record("arena", &device, &lines)?);
    Ok(())
}

/// Returns nanoseconds per allocation; each sample is a step of many.
fn in_a_step(device: &Device) -> Result<Samples> {
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(PER_SAMPLE * ELEMENTS * 4)).build()?;
    let mut sample = || {
        arena.step(|step| {
            let start = Instant::now();
            for _ in 0..PER_SAMPLE {
                std::hint::black_box(step.empty::<f32>([ELEMENTS])?);
            }
            Ok(start.elapsed().as_nanos() as f64 / PER_SAMPLE as f64)
        })
    };
    sample()?;
    (0..SAMPLES).map(|_| sample()).collect()
}

/// Returns the nanoseconds from the end of a step's closure to the return of the step.
fn reset(device: &Device, tensors: usize) -> Result<Samples> {
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(tensors * 256)).build()?;
    let fill = |step: &mut EagerStep<'_>| {
        for _ in 0..tensors {
            std::hint::black_box(step.empty::<f32>([1])?);
        }
        Ok(Instant::now())
    };
    (0..SAMPLES).map(|_| Ok(arena.step(fill)?.elapsed().as_nanos() as f64)).collect()
}

/// Returns nanoseconds per allocation beyond a full arena, including the switch to the worker
/// thread.
fn overflow(device: &Device) -> Result<Samples> {
    const BLOCKS: usize = 64;
    let cap_bytes = 4 * BLOCKS * ELEMENTS * 4;
    let overflow = Overflow::Pool { cap_bytes, prime_bytes: cap_bytes / 2, deadline: Duration::from_secs(1) };
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(256)).overflow(overflow).build()?;
    let mut nanoseconds = Vec::new();
    for round in 0..40 {
        arena.step(|step| {
            for _ in 0..BLOCKS {
                let start = Instant::now();
                std::hint::black_box(step.empty::<f32>([ELEMENTS])?);
                // The first rounds fill the pool with blocks of this size.
                if round >= 10 {
                    nanoseconds.push(start.elapsed().as_nanos() as f64);
                }
            }
            Ok(())
        })?;
    }
    Ok(Samples(nanoseconds))
}

/// Direct calls of the driver's stream-ordered pool.
#[cfg(feature = "cuda")]
mod pool {
    use crate::harness::Samples;
    use cust::sys::{self, CUresult};
    use std::time::Instant;

    fn check(result: CUresult) -> Result<(), String> {
        if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{result:?}")) }
    }

    pub(super) fn samples() -> Result<Samples, String> {
        let _context = cust::quick_init().map_err(|error| error.to_string())?;
        let stream =
            cust::stream::Stream::new(cust::stream::StreamFlags::NON_BLOCKING, None).map_err(|e| e.to_string())?;
        // SAFETY: zero is valid for this plain C struct; the pool and its blocks do not outlive
        // this function.
        unsafe {
            let mut properties: sys::CUmemPoolProps = std::mem::zeroed();
            properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
            let mut pool = std::ptr::null_mut();
            check(sys::cuMemPoolCreate(&mut pool, &properties))?;
            let mut threshold = u64::MAX;
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            check(sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()))?;
            let mut nanoseconds = Vec::new();
            for round in 0..2100 {
                let start = Instant::now();
                let mut address = 0;
                check(sys::cuMemAllocFromPoolAsync(&mut address, super::ELEMENTS * 4, pool, stream.as_inner()))?;
                check(sys::cuMemFreeAsync(address, stream.as_inner()))?;
                if round >= 100 {
                    nanoseconds.push(start.elapsed().as_nanos() as f64);
                }
            }
            check(sys::cuStreamSynchronize(stream.as_inner()))?;
            check(sys::cuMemPoolDestroy(pool))?;
            Ok(Samples(nanoseconds))
        }
    }
}
