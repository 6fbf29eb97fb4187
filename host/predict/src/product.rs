//! Products: their work, from the kernel's tile, layout and loop.

use kernels::matmul::{
    EpilogueForm, GELU, GELU_DERIVATIVE, ProductExtents, SILU, SWIGLU, TILES, TRANSPOSE_A, TRANSPOSE_B, Tile,
};
use kernels::matmul_wgmma_tf32::SWAP;
use stepscope_core::internals::Launch;
use stepscope_core::kernel::{PackedMap, words_of};

use crate::code::{Activations, Code};
use crate::warpgroup;
use crate::work::{Work, adds};

/// The names of the products of groups of rows begin with this.
const GROUPED: &str = "matmul_grouped";
/// The names of the products in TF32 by `wgmma` begin with this.
const TF32_WGMMA: &str = "matmul_wgmma_tf32";

/// Cycles from a barrier to the first operands.
const LATENCY: f64 = 30.0;

/// Instructions per guarded chunk of eight elements. In `sm_90`'s code, a loop of eight such chunks
/// has 366 instructions.
const OF_CHUNK: f64 = 366.0 / 8.0;
/// Cycles of a lone warp per such instruction. Four chunks of a 64 x 64 tile are 93 instructions
/// and take 297 cycles, by the assembler's stall counts.
const OF_CHUNK_ALONE: f64 = 297.0 / 93.0;

/// The integer arguments of a launch.
struct Extents {
    m: f64,
    n: f64,
    k: f64,
    chunk: f64,
    batches: f64,
    /// The row strides of a and b; zero for fragments.
    strides: [f64; 2],
    flags: u32,
}

impl Extents {
    fn of(launch: &Launch) -> Self {
        let words = &launch.words;
        let flags = words.last::<EpilogueForm>().flags;
        if launch.entry.is_warpgroup {
            // After a and b, which take the words of a tensor map each, bias, c, out, pre and, of
            // BF16, sums.
            let is_tf32 = launch.entry.name.starts_with(TF32_WGMMA);
            let extents: ProductExtents = words.value(2 * PackedMap::WORDS + if is_tf32 { 5 } else { 6 });
            let own = Self::new(extents, [0.0; 2], flags);
            // The tile's rows are columns of the output if the operands are swapped.
            return if is_tf32 && flags & SWAP != 0 { Self { m: own.n, n: own.m, ..own } } else { own };
        }
        if launch.entry.name.starts_with(GROUPED) {
            // a, b and offsets take two words each; out takes one. Each group is assumed to have
            // its share of the rows.
            let row = |at: usize| words.as_slice()[7 + words_of::<ProductExtents>() + at] as f64;
            let own = Self::new(words.value(7), [row(0), row(1)], flags);
            let share = 1.0 / own.batches.max(1.0);
            return match flags & TRANSPOSE_A {
                0 => Self { m: own.m * share, ..own },
                _ => Self { k: own.k * share, chunk: own.chunk * share, ..own },
            };
        }
        // a, b and bias take two words each; c, out, pre and sums take one. Fragments have no row
        // strides.
        let fragments = launch.entry.name.starts_with("matmul_tf32");
        let first = 9 + usize::from(launch.entry.pointers.contains(&"sums"));
        let row = |at: usize| words.as_slice()[first + words_of::<ProductExtents>() + at] as f64;
        Self::new(words.value(first), if fragments { [0.0; 2] } else { [row(0), row(1)] }, flags)
    }

    fn new(extents: ProductExtents, strides: [f64; 2], flags: u32) -> Self {
        let ProductExtents { m, n, k, k_per_split, batches } = extents;
        let [m, n, k, chunk, batches] = [m, n, k, k_per_split.min(k), batches].map(f64::from);
        Self { m, n, k, chunk, batches, strides, flags }
    }
}

/// Computes the work of a product.
pub(crate) fn work(launch: &Launch, code: &Code, activations: Activations) -> Work {
    let Extents { m, n, k, chunk, batches, strides, flags } = Extents::of(launch);
    let name = launch.entry.name;
    let hot = code.hot.unwrap_or_default();
    let threads = f64::from(launch.entry.block);
    let [rows, cols] = name.split('_').find_map(tile).expect("a product's kernel has its tile in its name");
    let warps = threads / 32.0;
    let (is_tf32, is_tensor) = (name.starts_with("matmul_tf32"), name.contains("of_bf16"));
    let is_f32 = hot.mma == 0.0;
    let mut work = Work::plain(launch, code);
    let outputs = launch.entry.pointers.iter().zip(launch.words.extents()).filter(|(name, _)| **name != "sums");
    let out_bytes = outputs.filter(|(_, extent)| extent.written && extent.length > 0);
    let out_bytes: f64 = out_bytes.map(|(_, extent)| extent.element_bytes as f64).sum();
    let flops = 2.0 * m * n * k * batches;
    if launch.entry.is_warpgroup {
        // A persistent block computes several tiles, each as a block of its own would.
        work.blocks = ((m / rows).ceil() * (n / cols).ceil() * batches * (k / chunk).ceil().max(1.0)) as u64;
        // TF32 has half of BF16's rate and twice its bytes, as if k were twice as long.
        let chunk = if name.starts_with(TF32_WGMMA) { 2.0 * chunk } else { chunk };
        warpgroup::product(&mut work, [rows, cols], chunk, activation(flags, activations));
        work.moved = rows.min(m) * cols.min(n) * out_bytes * if adds(launch) { 2.0 } else { 1.0 };
        share_b(&mut work, m / rows / 16.0);
        work.flops = [0.0, flops];
        return work;
    }
    work.turn = hot;
    let (turn_k, depth) = if is_f32 {
        // A multiply-add of a thread is one output at one k.
        let turn_k = hot.fma / (rows * cols / threads);
        let of_these = |tile: &&Tile| [f64::from(tile.rows()), f64::from(tile.cols())] == [rows, cols];
        let depth = TILES.iter().find(of_these).map_or(16.0, |tile| f64::from(tile.depth));
        // Copies per stage: single elements along k or if rows cannot be read as vectors, else
        // vectors of four.
        let copies = |extent: f64, of: f64, along: bool, stride: f64| {
            let vectors = !along && of % 4.0 == 0.0 && stride % 4.0 == 0.0;
            extent * depth / threads / if vectors { 4.0 } else { 1.0 }
        };
        let copies = copies(rows, m, flags & TRANSPOSE_A == 0, strides[0])
            + copies(cols, n, flags & TRANSPOSE_B != 0, strides[1]);
        work.turn.all += code.copy * copies * turn_k / depth;
        work.turn_shared = 2.0 * hot.shared + copies * turn_k / depth;
        // A stage ends with a barrier, and the next begins with a read.
        work.turn_waits = (hot.alone - hot.all).max(0.0) + 2.0 * LATENCY * turn_k / depth;
        (turn_k, depth)
    } else {
        // An mma instruction has 16 x 8 outputs per warp, over 8 values of k in TF32 and 16 in
        // BF16.
        let deep = if is_tf32 { 8.0 } else { 16.0 };
        work.mma_flops = 2.0 * 16.0 * 8.0 * deep;
        work.turn_shared = 4.0 * (hot.shared + hot.copies);
        // A barrier, then the first half of the reads after it, which all warps of a block issue at
        // once.
        work.turn_waits = LATENCY + (warps + 1.0) / 2.0 * (2.0 * hot.shared + 4.0 * hot.copies);
        // One iteration is one stage.
        let turn_k = hot.mma / (rows * cols / warps / 128.0) * deep;
        (turn_k, turn_k)
    };
    let element = if is_f32 || is_tf32 { 4.0 } else { 2.0 };
    work.turns = (chunk / turn_k).ceil();
    // All stages are in shared memory. For k = 0 there is one empty stage.
    let most_stages = work.turns.max(1.0);
    let stages = (f64::from(launch.entry.shared_bytes) / ((rows + cols) * depth * element)).min(most_stages);
    if let Some(last) = code.last {
        // The last iterations have nothing left to copy.
        let (turns, share) = (hot.mma / last.mma, stages / most_stages);
        let waits = LATENCY + (warps + 1.0) * last.shared * turns;
        work.turn.all += share * (last.all * turns - hot.all);
        work.turn_shared += share * (4.0 * last.shared * turns - work.turn_shared);
        work.turn_waits += share * (waits - work.turn_waits);
    }
    // Guarded copies: a thread copies its part of a stage in chunks of 16 bytes. If rows are not
    // aligned to 16 bytes, it copies each element separately and waits for each chunk.
    let chunks = (rows + cols) * turn_k / 8.0 / threads;
    let is_aligned = strides.iter().all(|stride| stride % 8.0 == 0.0);
    let is_whole = [m % rows, n % cols] == [0.0; 2] && is_aligned;
    if is_tensor && !is_whole {
        work.turn.all += OF_CHUNK * chunks;
        work.turn_memory_waits = if is_aligned { 0.0 } else { chunks };
    }
    // A block waits for its first stage before it computes.
    let stage = (rows + cols) * depth.min(chunk) * element;
    work.streamed = (rows + cols) * chunk * element - stage;
    work.moved = rows.min(m) * cols.min(n) * out_bytes;
    // The first stage, and a bias or the store.
    work.waits = 2.0;
    // A store covers two rows per thread, 16 rows per warp, or a block of 32 x 32.
    let outputs = rows * cols / threads;
    let tail = code.tail.unwrap_or_default();
    // Without a loop, all stores are on the straight path.
    let tails = code.tail.map_or(1.0, |_| outputs / if is_f32 { 16.0 } else { 32.0 });
    // One of the iterations that copy the first stages is already on the straight path.
    let first = code.first.unwrap_or_default();
    work.ends = code.way.all - hot.all + (stages - 1.0) * first.all + tails * tail.all;
    work.ends_alone = code.way.alone - hot.alone + (stages - 1.0) * first.alone + tails * tail.alone;
    if is_tensor && !is_whole {
        // All stages are guarded copies.
        work.ends += stages * OF_CHUNK * chunks;
        work.ends_alone += stages * OF_CHUNK * OF_CHUNK_ALONE * chunks;
    }
    if is_tensor && is_whole && chunk % turn_k != 0.0 {
        // The last stage is a guarded copy too.
        work.ends += OF_CHUNK * chunks;
        work.ends_alone += OF_CHUNK * chunks;
    }
    // Groups of tile rows share the operand along the columns.
    share_b(&mut work, m / rows / if is_f32 { 8.0 } else { 16.0 });
    // With accumulation, each iteration reads the old values before it stores.
    if adds(launch) {
        work.waits += tails.max(1.0);
        work.moved *= 2.0;
    }
    work.moved += stage;
    let activation = activation(flags, activations);
    work.ends += outputs * activation;
    work.ends_alone += outputs * activation;
    work.flops = if is_f32 { [flops, 0.0] } else { [0.0, flops] };
    work
}

/// Counts B once for each group of rows of tiles, which share it.
fn share_b(work: &mut Work, groups: f64) {
    for touch in &mut work.touches {
        touch.passes = if touch.name == "b" { groups.ceil().max(1.0) as u64 } else { 1 };
    }
}

/// Returns the instructions per output of the activation that a product ends with.
fn activation(flags: u32, activations: Activations) -> f64 {
    if flags & GELU != 0 {
        activations.gelu
    } else if flags & (SILU | SWIGLU) != 0 {
        activations.silu
    } else if flags & GELU_DERIVATIVE != 0 {
        activations.gelu_derivative
    } else {
        0.0
    }
}

/// Parses a tile such as `128x256`.
fn tile(part: &str) -> Option<[f64; 2]> {
    let (rows, cols) = part.split_once('x')?;
    Some([rows.parse().ok()?, cols.parse().ok()?])
}
