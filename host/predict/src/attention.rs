//! Attention, as tiles of token pairs.

use kernels::qkv_layout::QkvLayout;
use kernels::{flash_attention as ieee, flash_attention_mma as tensor};
use stepscope_core::internals::Launch;
use stepscope_core::kernel::words_of;

use crate::code::Code;
use crate::warpgroup;
use crate::work::Work;

/// The value of `window` for causal attention.
const CAUSAL: u64 = 0xffff_ffff;

/// Assumed instructions of an exponential, and of a chunk of 32 columns without its products.
const OF_EXPONENTIAL: f64 = 30.0;
const OF_CHUNK: f64 = 60.0;

/// Returns the rows that a block owns, and the rows of a tile, for f32 heads of up to `held`
/// columns.
fn of_ieee(forward: bool, held: usize) -> [f64; 2] {
    let shapes = if forward { ieee::FORWARD } else { ieee::QUERIES };
    [f64::from(ieee::Shape::suiting(held, &shapes).rows()), f64::from(ieee::TILE)]
}

/// Returns the same pair for tensor-core kernels.
fn of_tensor(is_bf16: bool, forward: bool, keys: bool, held: usize) -> [f64; 2] {
    let shapes: &[tensor::Shape] = match (is_bf16, forward, keys) {
        (true, true, _) => &tensor::FORWARD_BF16,
        (true, _, true) => &tensor::KEYS_BF16,
        (true, ..) => &tensor::QUERIES_BF16,
        (false, true, _) => &tensor::FORWARD_TF32,
        (false, _, true) => &tensor::KEYS_TF32,
        (false, ..) => &tensor::QUERIES_TF32,
    };
    let shape = tensor::Shape::suiting(held, shapes);
    rows_of(shape)
}

/// Returns the rows that a block owns, and the rows of a tile.
fn rows_of(shape: tensor::Shape) -> [f64; 2] {
    [f64::from(shape.rows()), f64::from(shape.tile)]
}

/// Computes the work of an attention launch.
pub(crate) fn work(launch: &Launch, code: &Code) -> Work {
    let (name, words) = (launch.entry.name, launch.words.as_slice());
    // The kernels that store scores, and those that compute gradients from them.
    let (stores, from_scores) = (name.contains("bwd_scores"), name.contains("from_scores"));
    let stores_ds = name.contains("dkv_ds");
    let first = if name.contains("forward") {
        6
    } else if from_scores {
        10
    } else {
        12
    };
    let QkvLayout { tokens, heads, kv_heads, width, .. } = launch.words.value(first);
    let [tokens, heads, kv_heads, width] = [tokens, heads, kv_heads, width].map(f64::from);
    let hot = code.hot.unwrap_or_default();
    let is_warpgroup = launch.entry.is_warpgroup;
    let (is_bf16, is_tf32) = (name.contains("bf16") || is_warpgroup, name.contains("tf32"));
    let mut work = Work::plain(launch, code);
    let forward = name.contains("forward");
    let keys = stores || ["dkv", "dk_from", "dv_from"].iter().any(|part| name.contains(part));
    let products = if from_scores {
        1.0
    } else if forward || stores {
        2.0
    } else if keys {
        4.0
    } else {
        3.0
    };
    let held: usize = name.rsplit('_').next().and_then(|text| text.parse().ok()).unwrap_or(64);
    let element = if is_bf16 { 2.0 } else { 4.0 };
    let by_tensor_cores = is_bf16 || is_tf32;
    let [own, tile] = match by_tensor_cores {
        true if is_warpgroup => warpgroup::attention_tile(launch),
        true if stores => rows_of(tensor::SCORES_BF16),
        true if from_scores => rows_of(tensor::Shape::suiting(held, &tensor::FROM_SCORES_BF16)),
        true => of_tensor(is_bf16, forward, keys, held),
        false => of_ieee(forward, held),
    };
    let group = if keys { heads / kv_heads } else { 1.0 };
    // With a causal mask, a block's tokens see half of all on average, and their own tile.
    let causal = (tokens + own) / 2.0;
    let seen = match words[first + words_of::<QkvLayout>()] {
        0 => tokens,
        CAUSAL => causal,
        window => causal.min(window as f64 + own),
    };
    let tiles = seen / tile * group;
    // Blocks along y split the columns.
    let pairs = f64::from(launch.grid.x) * own * tiles * tile;
    let flops = 2.0 * products * pairs * width;
    if by_tensor_cores {
        work.mma_flops = 2.0 * 16.0 * 8.0 * if is_bf16 { 16.0 } else { 8.0 };
        work.turns = tiles;
        work.turn = hot;
        work.turn_shared = 4.0 * (hot.shared + hot.copies);
        work.turn_waits = hot.alone - hot.all;
        work.flops = [0.0, flops];
    } else {
        // An iteration of the hot loop has 128 multiply-adds per thread, for sums over rows or
        // columns.
        let multiplies = products * own * tile * held as f64 / 128.0;
        work.turns = tiles;
        let turns = multiplies / hot.fma.max(1.0);
        let exponentials = own * tile / 128.0;
        let chunks = products * held as f64 / 32.0;
        work.turn = hot;
        work.turn.all = turns * hot.all + OF_EXPONENTIAL * exponentials + OF_CHUNK * chunks;
        work.turn.conflicts = turns * hot.conflicts;
        work.turn_shared = turns * 2.0 * hot.shared;
        work.turn_waits = turns * (hot.alone - hot.all) + chunks * OF_CHUNK;
        work.flops = [flops, 0.0];
    }
    if is_warpgroup {
        warpgroup::attention(&mut work, products, [own, tile], held as f64);
    }
    let stored = tiles * tile * own * element;
    work.streamed = tiles * tile * width * if from_scores { 1.0 } else { 2.0 } * element;
    work.moved = own * width * element * products;
    if stores {
        work.moved += 2.0 * stored;
    } else if stores_ds {
        work.moved += stored;
    } else if from_scores {
        work.streamed += stored;
    }
    work.waits = 2.0;
    if !is_warpgroup {
        work.ends = code.way.all - hot.all;
        work.ends_alone = code.way.alone - hot.alone;
    }
    work
}
