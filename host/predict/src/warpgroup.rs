//! Kernels of warpgroups: their work follows from tiles and shapes. `code.json` does not count
//! their instructions, so the figures here are assumed from the SASS of such loops.

use stepscope_core::internals::Launch;

use crate::code::Count;
use crate::work::Work;

/// The k of a stage of a product, and of one instruction.
const STAGE: f64 = 64.0;
const STEP: f64 = 16.0;
/// The instructions of a warp in a stage, next to multiplies: waits, arrivals and addresses.
const OF_STAGE: f64 = 40.0;
/// The cycles from a stage's arrival to its first multiply.
const LATENCY: f64 = 60.0;
/// The instructions per output of an epilogue, which stores through shared memory.
const OF_OUTPUT: f64 = 4.0;
/// The instructions per score of attention: scale, mask, maximum, exponential, sum and rounding.
const OF_SCORE: f64 = 12.0;
/// The keys of a tile of attention.
const KEYS: f64 = 128.0;
/// The warps that copy in a block of attention.
const COPYING_WARPS: f64 = 4.0;

/// The floating-point operations of one warp in an instruction with this many columns. Four warps
/// share its 64 rows.
fn of_one(columns: f64) -> f64 {
    2.0 * 64.0 / 4.0 * columns * STEP
}

/// Sets the loop and the ends of a product of BF16 tensors with tiles of `[rows, cols]`: `k` of its
/// elements for each output, and `epilogue` instructions per output.
pub(crate) fn product(work: &mut Work, [rows, cols]: [f64; 2], k: f64, epilogue: f64) {
    // Four warps multiply 64 rows. The model spreads the work over all warps.
    let multiplies = 4.0 * STAGE / STEP * rows / 64.0 / work.warps;
    work.mma_flops = of_one(cols);
    work.turns = (k / STAGE).ceil();
    work.turn = Count { all: OF_STAGE + multiplies, mma: multiplies, ..Count::default() };
    // The copy engine writes 128 bytes a cycle.
    work.turn_shared = (rows + cols) * STAGE * 2.0 / 128.0 / work.warps;
    work.turn_waits = LATENCY;
    work.ends = rows * cols / f64::from(work.threads) * (OF_OUTPUT + epilogue);
    work.ends_alone = 2.0 * work.ends;
    let stage = (rows + cols) * STAGE.min(k) * 2.0;
    work.streamed = (rows + cols) * k * 2.0 - stage;
    work.waits = 2.0;
}

/// Returns the rows that a block of attention owns, and the keys of a tile.
pub(crate) fn attention_tile(launch: &Launch) -> [f64; 2] {
    let warps = f64::from(launch.entry.block / 32);
    [(warps - COPYING_WARPS).max(4.0) / 4.0 * 64.0, KEYS]
}

/// Sets the work of one turn of attention: `products` multiplies of `[own, tile]` scores, with
/// heads of `held` columns.
pub(crate) fn attention(work: &mut Work, products: f64, [own, tile]: [f64; 2], held: f64) {
    let computing = (work.warps - COPYING_WARPS).max(4.0);
    work.mma_flops = of_one(tile);
    // The model spreads the work over all warps.
    let multiplies = 2.0 * products * own * tile * held / work.mma_flops / work.warps;
    let scores = own * tile / 32.0 / computing;
    work.turn = Count { all: OF_SCORE * scores + multiplies, mma: multiplies, special: scores, ..Count::default() };
    work.turn_waits = LATENCY;
    work.ends = own * held / 32.0 / computing * OF_OUTPUT;
    work.ends_alone = 2.0 * work.ends;
}
