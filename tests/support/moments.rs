//! Faults at random moments: their seeds, and the time until the other ranks end.
//!
//! Invariant: a moment follows from its seed, which a failing test prints.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fmt::Display;
use std::ops::Range;
use std::time::Duration;

/// The time after the deadline in which a rank may still end.
pub(crate) const MARGIN: Duration = Duration::from_secs(1);

/// Returns the seeds of the moments: `STEPSCOPE_KILLS` of them, or `usual`; or only the one in
/// `STEPSCOPE_MOMENT`.
pub(crate) fn moments(usual: u64) -> Range<u64> {
    if let Some(seed) = number("STEPSCOPE_MOMENT") {
        return seed..seed + 1;
    }
    0..number("STEPSCOPE_KILLS").unwrap_or(usual)
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var_os(variable)?;
    Some(text.to_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{variable} is a number")))
}

/// Prints a line with the times from each moment until the last other rank had ended. [`MARGIN`] is
/// added to the deadline.
pub(crate) fn tell(fault: impl Display, ranks: usize, deadline: Duration, mut took: Vec<Duration>) {
    took.sort();
    let [Some(least), Some(median), Some(most)] =
        [0, took.len() / 2, took.len().wrapping_sub(1)].map(|at| took.get(at))
    else {
        return println!("FAULT {fault} of {ranks}: no moments");
    };
    println!(
        "FAULT {fault} of {ranks}: {} moments, the others ended after {:.2} / {:.2} / {:.2} s (least / median / most), limit {:.1} s",
        took.len(),
        least.as_secs_f64(),
        median.as_secs_f64(),
        most.as_secs_f64(),
        (deadline + MARGIN).as_secs_f64()
    );
}
