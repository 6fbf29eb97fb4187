//! The table of the bench: per measure one line per contender, with median and spread per batch
//! size.
//!
//! Invariant: a cell without samples is a dash, and the reasons follow the table.

use stepscope::Device;

use crate::{Line, Measure, Plan};

/// The widths of a contender's name and of one figure.
const NAME: usize = 32;
const FIGURE: usize = 10;

impl Measure {
    const ALL: [Self; 8] = [
        Self::RoundTrip,
        Self::Host,
        Self::HostPinned,
        Self::HostResident,
        Self::Queued,
        Self::Pinned,
        Self::Resident,
        Self::Events,
    ];

    fn title(self, row: usize) -> String {
        match self {
            Self::RoundTrip => "one step: uploads included, loss read back".into(),
            Self::Host => "one step: the host's part, uploads included, until all is queued".into(),
            Self::HostPinned => "one step: the host's part, uploads from pinned memory".into(),
            Self::HostResident => "one step: the host's part, no uploads (only stepscope)".into(),
            Self::Queued => format!("{row} steps in a row: uploads included, nothing read back"),
            Self::Resident => format!("{row} steps in a row: no uploads, nothing read back"),
            Self::Pinned => format!("{row} steps in a row: uploads included, from pinned memory"),
            Self::Events => "one step between two CUDA events: no uploads (only PyTorch)".into(),
        }
    }
}

/// Prints the run's `lines`.
pub(crate) fn print(device: &Device, how: &str, plans: &[Plan], lines: &[Line]) {
    let peer = lines.iter().find_map(|line| match line {
        Line::Peer { peer, device, .. } => Some(format!("{peer} on {device}")),
        _ => None,
    });
    println!(
        "\nCrossAsset, a training step, {how}, ms: stepscope on {}, {}",
        device.description().name,
        peer.as_deref().unwrap_or("no PyTorch")
    );
    let columns = |text: &dyn Fn(&Plan) -> String| plans.iter().map(text).collect::<String>();
    let figures = |[median, low, high]: [&str; 3]| format!("{median:>FIGURE$}{low:>FIGURE$}{high:>FIGURE$}");
    let batch = |plan: &Plan| format!("{:>width$}", format!("batch {}", plan.batch), width = 3 * FIGURE);
    println!("{:NAME$}{}", "", columns(&batch));
    println!("{:NAME$}{}", "", columns(&|_| figures(["median", "p10", "p90"])));
    for measure in Measure::ALL {
        let contenders = contenders(lines, measure);
        let Some(plan) = plans.first().filter(|_| !contenders.is_empty()) else { continue };
        println!("{}", measure.title(plan.row));
        for contender in contenders {
            let cells = columns(&|plan| match milliseconds(lines, plan.batch, contender, measure) {
                Some(spread) => figures(spread.map(|figure| format!("{figure:.3}")).each_ref().map(String::as_str)),
                None => figures(["-", "", ""]),
            });
            println!("{:NAME$}{cells}", format!("  {contender}"));
        }
    }
    for line in lines {
        if let Line::Missing { batch, contender, reason } = line {
            println!("not measured: {contender}, batch {batch}: {reason}");
        }
    }
}

/// Returns the contenders with samples of a measure, in the order of the run.
fn contenders(lines: &[Line], wanted: Measure) -> Vec<&str> {
    let mut found: Vec<&str> = Vec::new();
    for line in lines {
        match line {
            Line::Measured { contender, measure, .. } if *measure == wanted && !found.contains(&contender.as_str()) => {
                found.push(contender);
            }
            _ => {}
        }
    }
    found
}

/// Returns the median, the 10th and the 90th percentile.
fn milliseconds(lines: &[Line], of_batch: usize, who: &str, what: Measure) -> Option<[f64; 3]> {
    lines.iter().find_map(|line| match line {
        Line::Measured { batch, contender, measure, nanoseconds }
            if (*batch, contender.as_str(), *measure) == (of_batch, who, what) =>
        {
            Some([0.5, 0.1, 0.9].map(|share| nanoseconds.quantile(share) * 1e-6))
        }
        _ => None,
    })
}
