//! The tables of the bench: per size, one line per kernel with our figures next to PyTorch's.
//!
//! Invariant: a cell without samples is a dash, and the reasons follow the table.

use stepscope::Device;

use crate::{Case, Line, Plan};

/// The widths of a kernel's name and of one figure.
const NAME: usize = 28;
const FIGURE: usize = 10;

/// Prints the plan's part of the run's `lines`.
pub(crate) fn print(device: &Device, plan: &Plan, lines: &[Line]) {
    let peer = lines.iter().find_map(|line| match line {
        Line::Peer { peer, device } => Some(format!("{peer} on {device}")),
        _ => None,
    });
    let Plan { elements, tensors, sets, rounds, .. } = plan;
    let name = match tensors {
        1 if elements.is_power_of_two() => format!("2^{} elements", elements.ilog2()),
        _ => format!("{elements} elements, PyTorch's AdamW in {tensors} tensors"),
    };
    println!("\n{name}: stepscope on {}, {}", device.description().name, peer.as_deref().unwrap_or("no PyTorch"));
    let copy = ["stepscope", "PyTorch"].into_iter().filter_map(|who| Some((gb_per_s(lines, plan, copy()?, who)?, who)));
    let copy = copy.max_by(|(a, _), (b, _)| a.total_cmp(b));
    if let Some((rate, who)) = copy {
        println!("the faster copy: {rate:.0} GB/s, {who}; graphs of {sets} x {rounds} calls");
    }
    let titles = ["B/element", "us", "p10", "p90", "GB/s", "of copy", "PyTorch", "p10", "p90", "GB/s", "faster by"];
    println!("{:NAME$}{}", "", titles.map(|title| format!("{title:>FIGURE$}")).concat());
    for case in plan.cases() {
        let ours = spread(lines, plan, case, "stepscope");
        let theirs = spread(lines, plan, case, "PyTorch");
        let rate = gb_per_s(lines, plan, case, "stepscope");
        let time = |figure: Option<f64>| cell(figure.map(|nanoseconds| format!("{:.2}", nanoseconds * 1e-3)));
        let times = |spread: Option<[f64; 3]>| [0, 1, 2].map(|at| time(spread.map(|spread| spread[at]))).concat();
        let rates = |rate: Option<f64>| cell(rate.map(|rate| format!("{rate:.1}")));
        let share = rate.zip(copy).map(|(rate, (copy, _))| format!("{:.1} %", 100.0 * rate / copy));
        let faster = ours.zip(theirs).map(|([ours, ..], [theirs, ..])| format!("{:.2} x", theirs / ours));
        println!(
            "{:NAME$}{:>FIGURE$}{}{}{}{}{}{}",
            case.name,
            case.least_bytes,
            times(ours),
            rates(rate),
            cell(share),
            times(theirs),
            rates(gb_per_s(lines, plan, case, "PyTorch")),
            cell(faster),
        );
    }
    for line in lines {
        if let Line::Missing { elements, kernel, contender, reason } = line
            && elements == &plan.elements
        {
            println!("not measured: {contender}, {kernel}: {reason}");
        }
    }
}

fn cell(figure: Option<String>) -> String {
    format!("{:>FIGURE$}", figure.as_deref().unwrap_or("-"))
}

fn copy() -> Option<&'static Case> {
    crate::CASES.iter().find(|case| case.name == "copy")
}

/// Returns the fewest bytes of a call divided by its median time.
fn gb_per_s(lines: &[Line], plan: &Plan, case: &Case, who: &str) -> Option<f64> {
    spread(lines, plan, case, who).map(|[median, ..]| (case.least_bytes * plan.elements) as f64 / median)
}

/// Returns the median, the 10th and the 90th percentile of one call in nanoseconds.
fn spread(lines: &[Line], plan: &Plan, case: &Case, who: &str) -> Option<[f64; 3]> {
    lines.iter().find_map(|line| match line {
        Line::Measured { elements, kernel, contender, nanoseconds }
            if (*elements, kernel.as_str(), contender.as_str()) == (plan.elements, case.name, who) =>
        {
            Some([0.5, 0.1, 0.9].map(|share| nanoseconds.quantile(share)))
        }
        _ => None,
    })
}
