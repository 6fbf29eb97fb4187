//! A schedule of the learning rate for the examples of the Rust peers. Neither has one that starts
//! its cosine after the warm-up.

use std::f64::consts::PI;

/// Returns the factor of update `number`, counted from 1: a linear rise over `warmup` updates, then
/// half a cosine down to `floor` at update `total`.
pub(crate) fn cosine(number: usize, [warmup, total]: [usize; 2], floor: f64) -> f64 {
    if number <= warmup {
        return number as f64 / warmup as f64;
    }
    let done = (number - warmup) as f64 / (total - warmup) as f64;
    floor + (1.0 - floor) * 0.5 * (1.0 + (PI * done).cos())
}
