//! Attention: tiles of pairs of tokens.

use stepscope::Launch;

use crate::code::Code;
use crate::work::Work;

/// `window` of causal attention.
const CAUSAL: u64 = 0xffff_ffff;

/// What a launch of attention does.
pub(crate) fn work(launch: &Launch, code: &Code) -> Work {
    let (name, words) = (launch.entry.name, launch.words.as_slice());
    let first = if name.contains("forward") { 6 } else { 12 };
    let number = |at: usize| words[first + at] as f64;
    let (tokens, heads, kv_heads, width, causal) =
        (number(0), number(1), number(2), number(3), words[first + 5] == CAUSAL);
    let hot = code.hot.unwrap_or_default();
    let is_bf16 = name.contains("bf16");
    let mut work = Work::plain(launch, code);
    let (forward, keys) = (name.contains("forward"), name.contains("keys"));
    let products = if forward {
        2.0
    } else if keys {
        4.0
    } else {
        3.0
    };
    let held: f64 = name.rsplit('_').next().and_then(|text| text.parse().ok()).unwrap_or(64.0);
    let element = if is_bf16 { 2.0 } else { 4.0 };
    // Rows that a block owns, and of a tile.
    let (own, tile) = match (is_bf16, forward, keys, held as u32) {
        (false, true, _, 64 | 128) | (false, _, _, 64) => (64.0, 64.0),
        (false, ..) => (32.0, 64.0),
        (true, true, _, 256) | (true, _, false, 256) => (64.0, if forward { 32.0 } else { 16.0 }),
        (true, true, ..) => (128.0, 64.0),
        (true, _, false, 64) => (64.0, 64.0),
        (true, _, false, _) => (128.0, 32.0),
        (true, _, true, 64) => (128.0, 32.0),
        (true, _, true, 128) => (64.0, 32.0),
        (true, _, true, _) => (64.0, 16.0),
    };
    let group = if keys { heads / kv_heads } else { 1.0 };
    let seen = if causal { (tokens + own) / 2.0 } else { tokens };
    let tiles = seen / tile * group;
    let pairs = work.blocks as f64 * own * tiles * tile;
    let flops = 2.0 * products * pairs * width;
    if is_bf16 {
        work.mma_flops = 2.0 * 16.0 * 8.0 * 16.0;
        work.turns = tiles;
        work.turn = hot;
        work.turn_shared = 4.0 * (hot.shared + hot.copies);
        work.turn_waits = hot.alone - hot.all;
        work.flops = [0.0, flops];
    } else {
        // A turn of the hot loop: 128 multiply-adds of a thread. Sums of rows and columns alike.
        let multiplies = products * own * tile * held / 128.0;
        work.turns = tiles;
        let turns = multiplies / hot.fma.max(1.0);
        let exponentials = own * tile / 128.0;
        let chunks = products * held / 32.0;
        work.turn = hot;
        work.turn.all = turns * hot.all + 30.0 * exponentials + 60.0 * chunks;
        work.turn.conflicts = turns * hot.conflicts;
        work.turn_shared = turns * 2.0 * hot.shared;
        work.turn_waits = turns * (hot.alone - hot.all) + chunks * 60.0;
        work.flops = [flops, 0.0];
    }
    work.streamed = tiles * tile * width * 2.0 * element;
    work.moved = own * width * element * products;
    work.waits = 2.0;
    work.ends = code.way.all - hot.all;
    work.ends_alone = code.way.alone - hot.alone;
    work
}
