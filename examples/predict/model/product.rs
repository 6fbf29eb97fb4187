//! Products: what follows from the tile, the form and the loop of a kernel.

use kernels::matmul::{GATE, GELU, GELU_DERIVATIVE, SILU, TILES, TRANSPOSE_A, TRANSPOSE_B, Tile};
use stepscope::Launch;

use super::code::{Activations, Code};
use super::work::{Work, adds};

/// Cycles from a barrier to the first factors.
const LATENCY: f64 = 30.0;

/// Instructions of a chunk of eight elements that may not all be there: such a loop of eight chunks has 366 in `sm_90`'s code.
const OF_CHUNK: f64 = 366.0 / 8.0;
/// Cycles of a lone warp for one of them: 297 for the 93 that four chunks of a tile of 64 x 64 take, by the assembler's stalls.
const OF_CHUNK_ALONE: f64 = 297.0 / 93.0;

/// The numbers of a launch.
struct Extents {
    m: f64,
    n: f64,
    k: f64,
    chunk: f64,
    batches: f64,
    /// Of a and b; none of fragments.
    strides: [f64; 2],
    flags: u32,
}

impl Extents {
    fn of(launch: &Launch) -> Self {
        let words = launch.words.as_slice();
        // a, b and bias have two words, c, out, pre and sums one. Fragments have no strides of rows.
        let fragments = launch.entry.name.starts_with("matmul_tf32") || launch.entry.name.starts_with("matmul_bf16");
        let pointers = usize::from(launch.entry.pointers.contains(&"sums"));
        let number = |at: usize| words[at + pointers] as f64;
        let chunk = if fragments { 13 } else { 15 };
        Self {
            m: number(9),
            n: number(10),
            k: number(11),
            chunk: number(chunk).min(number(11)),
            batches: number(chunk + 1),
            strides: if fragments { [0.0; 2] } else { [number(12), number(13)] },
            flags: words[words.len() - 1] as u32,
        }
    }
}

/// What a product does.
pub(crate) fn work(launch: &Launch, code: &Code, activations: Activations) -> Work {
    let Extents { m, n, k, chunk, batches, strides, flags } = Extents::of(launch);
    let name = launch.entry.name;
    let hot = code.hot.unwrap_or_default();
    let threads = f64::from(launch.entry.block);
    let [rows, cols] = name.split('_').find_map(tile).expect("a product's kernel has its tile in its name");
    let warps = threads / 32.0;
    let (is_tf32, is_tensor) = (name.starts_with("matmul_tf32"), name.starts_with("matmul_of_bf16"));
    let is_f32 = hot.mma == 0.0;
    let mut work = Work::plain(launch, code);
    work.turn = hot;
    let (turn_k, depth) = if is_f32 {
        // A multiply-add of a thread is one output and one k.
        let turn_k = hot.fma / (rows * cols / threads);
        let of_these = |tile: &&Tile| [f64::from(tile.rows()), f64::from(tile.cols())] == [rows, cols];
        let depth = TILES.iter().find(of_these).map_or(16.0, |tile| f64::from(tile.depth));
        // Copies of a stage: of one element where it lies along k or where rows are no vectors, else of four.
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
        // An instruction has 16 x 8 outputs of a warp; its k are 8 of TF32 and 16 of BF16.
        let deep = if is_tf32 { 8.0 } else { 16.0 };
        work.mma_flops = 2.0 * 16.0 * 8.0 * deep;
        work.turn_shared = 4.0 * (hot.shared + hot.copies);
        // A barrier, and the first half of what is read behind it, for which all warps of a block ask at once.
        work.turn_waits = LATENCY + (warps + 1.0) / 2.0 * (2.0 * hot.shared + 4.0 * hot.copies);
        // A turn is a stage.
        let turn_k = hot.mma / (rows * cols / warps / 128.0) * deep;
        (turn_k, turn_k)
    };
    let element = if is_f32 || is_tf32 { 4.0 } else { 2.0 };
    work.turns = (chunk / turn_k).ceil();
    // All stages lie in shared memory. Without k there is one, and nothing in it.
    let most_stages = work.turns.max(1.0);
    let stages = (f64::from(launch.entry.shared_bytes) / ((rows + cols) * depth * element)).min(most_stages);
    if let Some(last) = code.last {
        // In the last turns nothing is left to be copied.
        let (turns, share) = (hot.mma / last.mma, stages / most_stages);
        let waits = LATENCY + (warps + 1.0) * last.shared * turns;
        work.turn.all += share * (last.all * turns - hot.all);
        work.turn_shared += share * (4.0 * last.shared * turns - work.turn_shared);
        work.turn_waits += share * (waits - work.turn_waits);
    }
    // What a thread copies of a stage that may not all be there, one chunk of 16 bytes after another; where rows begin on no 16 bytes
    // element by element, and it waits for each chunk.
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
    let outputs = launch.entry.pointers.iter().zip(launch.words.extents()).filter(|(name, _)| **name != "sums");
    let out_bytes = outputs.filter(|(_, extent)| extent.written && extent.length > 0);
    let out_bytes: f64 = out_bytes.map(|(_, extent)| extent.element_bytes as f64).sum();
    work.moved = rows.min(m) * cols.min(n) * out_bytes;
    // The first stage, and a bias or the store.
    work.waits = 2.0;
    // Two rows of a thread at once, or 16 of a warp, or a block of 32 x 32.
    let outputs = rows * cols / threads;
    let tail = code.tail.unwrap_or_default();
    // Without a loop all are stored on the way.
    let tails = code.tail.map_or(1.0, |_| outputs / if is_f32 { 16.0 } else { 32.0 });
    // Of the turns that copy the first stages, one is on the way.
    let first = code.first.unwrap_or_default();
    work.ends = code.way.all - hot.all + (stages - 1.0) * first.all + tails * tail.all;
    work.ends_alone = code.way.alone - hot.alone + (stages - 1.0) * first.alone + tails * tail.alone;
    if is_tensor && !is_whole {
        // All stages are copied so.
        work.ends += stages * OF_CHUNK * chunks;
        work.ends_alone += stages * OF_CHUNK * OF_CHUNK_ALONE * chunks;
    }
    if is_tensor && is_whole && chunk % turn_k != 0.0 {
        // So is the last stage.
        work.ends += OF_CHUNK * chunks;
        work.ends_alone += OF_CHUNK * chunks;
    }
    // Some rows of tiles share what lies along the columns.
    let groups = (m / rows / if is_f32 { 8.0 } else { 16.0 }).ceil().max(1.0);
    for touch in &mut work.touches {
        touch.passes = if touch.name == "b" { groups as u64 } else { 1 };
    }
    // Where it adds, each turn reads what was there before it stores.
    if adds(launch) {
        work.waits += tails.max(1.0);
        work.moved *= 2.0;
    }
    work.moved += stage;
    let activation = if flags & GELU != 0 {
        activations.gelu
    } else if flags & (SILU | GATE) != 0 {
        activations.silu
    } else if flags & GELU_DERIVATIVE != 0 {
        activations.gelu_derivative
    } else {
        0.0
    };
    work.ends += outputs * activation;
    work.ends_alone += outputs * activation;
    let flops = 2.0 * m * n * k * batches;
    work.flops = if is_f32 { [flops, 0.0] } else { [0.0, flops] };
    work
}

/// `128x256`.
fn tile(part: &str) -> Option<[f64; 2]> {
    let (rows, cols) = part.split_once('x')?;
    Some([rows.parse().ok()?, cols.parse().ok()?])
}
