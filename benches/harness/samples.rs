//! The samples of one line of a table.

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Runs before the first sample.
const WARM_UP: usize = 5;
/// Time of the runs before a round's first sample where power may limit the clock; peers/graphs.py
/// has the same.
const SUSTAINED: Duration = Duration::from_millis(200);
/// The rounds in which contenders take turns, and those before, which do not count.
const ROUNDS: usize = 3;
const WARM_UP_ROUNDS: usize = 2;

/// Nanoseconds, one number per sample, in the order of measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Samples(pub(crate) Vec<f64>);

impl Samples {
    /// Collects `count` samples after a warm-up. Each times `each` consecutive runs of `work` and
    /// then `settle`, which waits for the queued work. The time is divided by `each`.
    ///
    /// # Errors
    /// When a closure fails.
    pub(crate) fn collect<E>(
        count: usize,
        each: usize,
        mut work: impl FnMut() -> Result<(), E>,
        mut settle: impl FnMut() -> Result<(), E>,
    ) -> Result<Self, E> {
        for _ in 0..WARM_UP {
            work()?;
        }
        settle()?;
        (0..count).map(|_| Ok(time(each, &mut work, &mut settle)? / each as f64)).collect()
    }

    /// Collects samples of `work` and, in turn, of `peer`. Returns ours, then the peer's. `peer`
    /// returns the samples of a round, or none if there is no peer. `work` consists of `each` equal
    /// parts. A sample times it and `settle`, and is divided by `each`.
    ///
    /// At its power limit, an H200 lowers its clock after 100 ms, and too far until a second has
    /// passed. The clock also depends on the work before. So both run for 200 ms before a round's
    /// first sample, and the first rounds do not count.
    ///
    /// # Errors
    /// When a closure fails.
    pub(crate) fn in_turn<E>(
        mut peer: impl FnMut() -> Option<Vec<f64>>,
        count: usize,
        each: usize,
        mut work: impl FnMut() -> Result<(), E>,
        mut settle: impl FnMut() -> Result<(), E>,
    ) -> Result<[Self; 2], E> {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..WARM_UP_ROUNDS + ROUNDS {
            let of_peer = peer();
            let start = Instant::now();
            while start.elapsed() < SUSTAINED {
                time(1, &mut work, &mut settle)?;
            }
            if round >= WARM_UP_ROUNDS {
                theirs.extend(of_peer.into_iter().flatten());
                for _ in 0..count {
                    ours.push(time(1, &mut work, &mut settle)? / each as f64);
                }
            }
        }
        Ok([Self(ours), Self(theirs)])
    }

    /// Collects `count` samples of only `work`, after a warm-up. `settle` waits for the queued work
    /// before the next one.
    ///
    /// # Errors
    /// When a closure fails.
    pub(crate) fn collect_queueing<E>(
        count: usize,
        mut work: impl FnMut() -> Result<(), E>,
        mut settle: impl FnMut() -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut sample = || {
            settle()?;
            let start = Instant::now();
            work()?;
            Ok(start.elapsed().as_nanos() as f64)
        };
        for _ in 0..WARM_UP {
            sample()?;
        }
        (0..count).map(|_| sample()).collect()
    }

    /// Returns the sample below which a share of all samples lies; 0.5 gives the median.
    ///
    /// # Panics
    /// When there are no samples.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[((sorted.len() - 1) as f64 * share).round() as usize]
    }
}

/// Returns the nanoseconds of `runs` consecutive runs of `work` and then `settle`.
fn time<E>(
    runs: usize,
    work: &mut impl FnMut() -> Result<(), E>,
    settle: &mut impl FnMut() -> Result<(), E>,
) -> Result<f64, E> {
    let start = Instant::now();
    for _ in 0..runs {
        work()?;
    }
    settle()?;
    Ok(start.elapsed().as_nanos() as f64)
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        Self(samples.into_iter().collect())
    }
}
