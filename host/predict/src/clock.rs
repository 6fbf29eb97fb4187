//! The time of a launch, from its work.
//!
//! The model has two nested closed queueing networks, solved by mean value analysis (Reiser and
//! Lavenberg, "Mean-Value Analysis of Closed Multichain Queuing Networks", 1980). The inner network
//! is a multiprocessor. Its customers are the resident warps, which issue, multiply, read shared
//! memory, and wait. The customers of the outer network are the resident blocks, which compute and
//! move bytes, or their warps where these do so independently.

use crate::gpu::Gpu;
use crate::work::Work;

/// The time of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Time {
    pub(crate) nanoseconds: f64,
    pub(crate) bound: &'static str,
}

/// Returns the time of one customer's round, where `count` customers circulate through stations
/// with these demands and a delay.
fn round(count: f64, demands: &[f64], delay: f64) -> f64 {
    if delay + demands.iter().sum::<f64>() <= 0.0 {
        return 0.0;
    }
    let count = count.max(1.0).round() as u32;
    let mut queues = vec![0.0; demands.len()];
    let mut per_customer = 0.0;
    for customers in 1..=count {
        let residence: Vec<f64> = demands.iter().zip(&queues).map(|(demand, queue)| demand * (1.0 + queue)).collect();
        let whole = delay + residence.iter().sum::<f64>();
        queues = residence.iter().map(|time| f64::from(customers) * time / whole).collect();
        per_customer = whole / f64::from(customers);
    }
    per_customer
}

/// Returns the number of resident blocks per multiprocessor.
pub(crate) fn resident(gpu: &Gpu, work: &Work) -> u64 {
    // A warp's registers are allocated in units of 256; a block reserves 1 KiB of shared memory.
    let registers = work.registers.next_multiple_of(8) * work.threads.next_multiple_of(32);
    let by_registers = 65_536 / registers.max(1);
    let by_shared = gpu.shared_bytes / (work.shared_bytes + 1024);
    by_registers.min(by_shared).min(gpu.threads / work.threads).min(gpu.blocks).max(1).into()
}

/// Returns the time of a launch that moves this many bytes to and from memory.
pub(crate) fn time(gpu: &Gpu, work: &Work, memory_bytes: f64) -> Time {
    let blocks = work.blocks as f64;
    let processors = f64::from(gpu.processors);
    let per_processor = (blocks / processors).ceil();
    let resident = (resident(gpu, work) as f64).min(per_processor);
    let most = |at_once: f64| {
        let warps = work.warps * at_once;
        let turn = work.turn;
        let mma = turn.mma * work.mma_flops / gpu.matrix_rate(work.mma_flops);
        // There are four schedulers, so a warp uses a quarter of the issue slots.
        let stations = [(turn.all + turn.conflicts) / 4.0, mma, work.turn_shared, turn.special / 0.5];
        let waits = work.turn_waits + work.turn_memory_waits * gpu.cache_latency * gpu.clock;
        let turns = round(warps, &stations, waits) * work.warps * work.turns;
        let ends = round(warps, &[work.ends / 4.0], (work.ends_alone - work.ends / 4.0).max(0.0)) * work.warps;
        let cycles = turns + ends;
        let bound = ["issue", "matrix", "shared memory", "special"];
        let at = (0..4).max_by(|&a, &b| stations[a].total_cmp(&stations[b])).unwrap_or(0);
        let clock = match gpu.wgmma {
            Some(wgmma) if work.is_hot && work.mma_flops > 4096.0 => wgmma.loaded_clock,
            _ if work.is_hot => gpu.loaded_clock,
            _ => gpu.clock,
        };
        (cycles / clock, bound[at])
    };
    // A block's share of the GPU.
    let share = processors.min(blocks);
    let asked = work.streamed + work.moved;
    let by_cache = |bytes: f64| bytes * share / gpu.cache_rate;
    let by_memory =
        |bytes: f64| if asked > 0.0 { memory_bytes / blocks * bytes / asked * share / gpu.copy } else { 0.0 };
    let is_cold = memory_bytes > 0.25 * asked * blocks;
    let latency = if is_cold { gpu.memory_latency } else { gpu.cache_latency };
    let batch = |at_once: f64| {
        let (compute, bound) = most(at_once);
        let streamed = by_cache(work.streamed).max(by_memory(work.streamed));
        let moved = by_cache(work.moved).max(by_memory(work.moved));
        let (loops, waits) = (compute.max(streamed), work.waits * latency);
        // Blocks with barriers in a loop start and end together, so none hides another's prologue
        // and epilogue.
        let time = match work.turns > 1.0 {
            true => loops + moved + waits / at_once,
            false => round(at_once * work.parts, &[loops / work.parts, moved / work.parts], waits) * work.parts,
        };
        let ends = waits + at_once * loops.max(moved) + loops.min(moved);
        let bound = if compute >= streamed.max(moved) {
            bound
        } else if by_memory(asked) >= by_cache(asked) {
            "memory"
        } else {
            "cache"
        };
        (time * at_once, bound, ends)
    };
    let (one, mut bound, ends) = batch(resident);
    let mut body = if work.turns > 1.0 {
        let rest = per_processor % resident;
        (per_processor / resident).floor() * one + if rest > 0.0 { batch(rest).0 } else { 0.0 }
    } else {
        // As many blocks as are resident start together; the others follow one by one.
        (blocks / processors - resident).max(0.0) / resident * one + ends
    };
    let least = memory_bytes / gpu.copy;
    if least > body {
        (body, bound) = (least, "memory");
    }
    if body < gpu.launch {
        bound = "launch";
    }
    Time { nanoseconds: gpu.launch + body, bound }
}
