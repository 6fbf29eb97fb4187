//! Kernels that pass through their arguments once.

use kernels::loss::loss_rows;
use stepscope_core::internals::Launch;

use crate::code::Code;
use crate::work::Work;

/// Computes the work of such a launch.
pub(crate) fn work(launch: &Launch, code: &Code) -> Work {
    let name = launch.entry.name;
    let mut work = Work::plain(launch, code);
    let extents = launch.words.extents();
    let blocks = work.blocks as f64;
    let elements =
        extents.iter().map(|extent| extent.length).max().unwrap_or(0) as f64 / blocks / f64::from(work.threads);
    work.turns = 1.0;
    // An optimizer's settings stay in the L1 cache once the multiprocessor's first block has read
    // them.
    let settings = if launch.entry.pointers.contains(&"hyper") { SETTINGS } else { 0.0 };
    work.waits = code.way.memory - settings;
    let (mut all, mut alone) = (code.way.all, code.way.alone);
    match (PER_ELEMENT.iter().find(|(known, _)| name.starts_with(known)), code.hot) {
        (Some(&(_, each)), _) => {
            (all, alone) = (elements * each, elements * each * alone / all);
            // The path of a loop does not show how rows are held: they are read for their
            // statistics, then the values to add are read.
            work.waits = 2.0;
        }
        // A loop of sums: each iteration loads this many vectors of four.
        (None, Some(hot)) if name.starts_with("sum_") || name.starts_with("mean_tokens_forward") => {
            let more = (elements / (4.0 * hot.loads) - 1.0).max(0.0);
            (all, alone) = (all + more * hot.all, alone + more * hot.alone);
            work.waits += more * hot.memory;
        }
        // A thread follows its path once.
        _ => {}
    }
    if holds_rows_in_warps(launch) {
        work.parts = work.warps;
    }
    work.turn.all = all;
    work.turn.conflicts = code.way.conflicts / code.way.all * all;
    work.turn_waits = (alone - all).max(0.0);
    work.moved = work.moves() / blocks;
    work
}

/// Returns true if each warp of a loss has rows of its own, and meets the others only at the
/// block's end. Softmax and norms do this too, in blocks of half as many threads, of which five to
/// ten are resident: their blocks fill the memory's queue as well as their warps would.
fn holds_rows_in_warps(launch: &Launch) -> bool {
    // The classes follow two slices of two words each.
    let classes = launch.words.as_slice().get(4).copied().unwrap_or(0);
    launch.entry.name.starts_with("cross_entropy") && loss_rows(classes as usize) > 1
}

/// Dependent loads of an optimizer's settings: the norm, its limit, and the rates.
const SETTINGS: f64 = 3.0;

/// Instructions per element of a thread, for kernels whose work depends on the row length.
///
/// Softmax's loop has 284 instructions for 16 exponentials. Ten more instructions compute the
/// maximum and the factor, and store the result. The counts of attention are from
/// `docs/lab/steps.md`, for a head of 12 tokens. Its backward pass has twice the products, so twice
/// as many instructions. The counts of norms and rounding are assumed.
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
