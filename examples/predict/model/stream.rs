//! Kernels that go through their arguments once.

use stepscope::Launch;

use super::code::Code;
use super::work::Work;

/// What such a launch does.
pub(crate) fn work(launch: &Launch, code: &Code) -> Work {
    let name = launch.entry.name;
    let mut work = Work::plain(launch, code);
    let extents = launch.words.extents();
    let blocks = work.blocks as f64;
    let elements =
        extents.iter().map(|extent| extent.length).max().unwrap_or(0) as f64 / blocks / f64::from(work.threads);
    work.turns = 1.0;
    // The settings of an optimiser lie in the multiprocessor's own cache as soon as its first block has read them.
    let settings = if launch.entry.pointers.contains(&"hyper") { SETTINGS } else { 0.0 };
    work.waits = code.way.memory - settings;
    let (mut all, mut alone) = (code.way.all, code.way.alone);
    match (PER_ELEMENT.iter().find(|(known, _)| name.starts_with(known)), code.hot) {
        (Some(&(_, each)), _) => {
            (all, alone) = (elements * each, elements * each * alone / all);
            // A loop's way does not tell how rows are held: they are read for their statistics, and what is added to behind them.
            work.waits = 2.0;
        }
        // A loop of sums: each turn has so many vectors of four.
        (None, Some(hot)) if name.starts_with("sum_") || name.starts_with("mean_tokens_forward") => {
            let more = (elements / (4.0 * hot.loads) - 1.0).max(0.0);
            (all, alone) = (all + more * hot.all, alone + more * hot.alone);
            work.waits += more * hot.memory;
        }
        // A thread goes its way once.
        _ => {}
    }
    work.turn.all = all;
    work.turn.conflicts = code.way.conflicts / code.way.all * all;
    work.turn_waits = (alone - all).max(0.0);
    work.moved = work.moves() / blocks;
    work
}

/// Loads of an optimiser's settings that wait for each other: the norm, its limit, and the rates.
const SETTINGS: f64 = 3.0;

/// Instructions for each element of a thread, where what a thread does follows from the shape of a row. Softmax's loop has 284 for 16 exponentials, and ten
/// more are the maximum, the factor and the store; attention's are those of `docs/lab/step.md`, of a head of 12 tokens, and twice as many in the backward pass, as it
/// has twice the products; those of norms and of rounding are assumed.
const PER_ELEMENT: [(&str, f64); 9] = [
    ("round_to_", 10.0),
    ("attention_forward", 1375.0 * 32.0 / (12.0 * 64.0 * 3.0)),
    ("attention_backward", 2.0 * 1375.0 * 32.0 / (12.0 * 64.0 * 3.0)),
    ("cross_entropy", 28.0),
    ("softmax", 28.0),
    ("rms_norm_forward", 8.0),
    ("rms_norm_backward", 16.0),
    ("layer_norm_forward", 10.0),
    ("layer_norm_backward", 20.0),
];
