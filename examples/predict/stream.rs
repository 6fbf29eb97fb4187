//! Kernels that go through their arguments once.

use stepscope::Launch;

use crate::code::Code;
use crate::work::Work;

/// What such a launch does.
pub(crate) fn work(launch: &Launch, code: &Code) -> Work {
    let name = launch.entry.name;
    let mut work = Work::plain(launch, code);
    let extents = launch.words.extents();
    let bytes: f64 = extents.iter().map(|extent| extent.bytes() as f64).sum();
    let blocks = work.blocks as f64;
    let elements = extents.iter().map(|extent| extent.length).max().unwrap_or(0) as f64 / blocks / f64::from(work.threads);
    work.turns = 1.0;
    match PER_ELEMENT.iter().find(|(known, _)| name.starts_with(known)) {
        Some(&(_, each)) => work.turn.all = elements * each,
        // A thread goes its way once.
        None => work.turn.all = code.way.all,
    }
    work.turn.conflicts = if work.turn.all == code.way.all { code.way.conflicts } else { 0.0 };
    work.turn_waits = (code.way.alone - code.way.all).max(0.0);
    work.moved = bytes / blocks;
    // A loop's way does not tell how rows are held: statistics and then the rest.
    work.waits = if name.contains("norm_") { 2.0 } else { code.way.memory };
    work
}

/// Instructions of a warp for each element of a thread, where a thread goes through a loop.
const PER_ELEMENT: [(&str, f64); 13] = [
    ("round_to_", 10.0),
    ("attention_forward", 2.0 * 1375.0 / (2.0 * 12.0 * 64.0 * 3.0 / 32.0)),
    ("attention_backward", 4.0 * 1375.0 / (2.0 * 12.0 * 64.0 * 3.0 / 32.0)),
    ("cross_entropy", 40.0),
    ("softmax", 40.0),
    ("rms_norm_forward", 8.0),
    ("rms_norm_backward", 16.0),
    ("layer_norm_forward", 10.0),
    ("layer_norm_backward", 20.0),
    ("sum_", 4.0),
    ("squared_norm", 5.0),
    ("mean_tokens", 4.0),
    ("rows_", 6.0),
];
