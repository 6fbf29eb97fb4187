//! Samples, labels and walk-forward folds over the bars of one or several assets.
//!
//! A sample is one bar of one asset. The model's input comes from bars up to it (see
//! `features.rs`). Its target is the log return over the next `horizon` bars: down (0), flat (1) or
//! up (2). Samples are ordered by time, then by asset.
//!
//! Invariant: training in a fold uses only what was known before the validation's first bar.
//! Training samples whose horizon reaches that bar are therefore left out. The two class thresholds
//! are the 1/3 and 2/3 quantiles of only the training part's returns.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use sha2::{Digest, Sha256};

use crate::bars::{Bar, BarsError};
use crate::features::{Features, HISTORY_BARS, SAMPLE_LEN};
use crate::random::Random;
use crate::sizes::CLASSES;

const FLAT: usize = 1;
/// Training samples that the shortest fold keeps per asset: one per class.
const LEAST_TRAINED: usize = CLASSES;
/// Equal times in a row between bars, by which another interval is recognized.
const SAME_GAPS: usize = 10;

/// A series of bars in order of time.
pub(crate) struct Asset {
    /// The file of the bars, or a description of them.
    pub(crate) name: PathBuf,
    /// The bars, as returned by [`crate::bars::read_bars`].
    pub(crate) bars: Vec<Bar>,
}

/// The rules by which bars become samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Bars over which a sample's return is computed, at least 1.
    pub(crate) horizon: usize,
    /// Walk-forward folds, at least 1.
    pub(crate) folds: usize,
    /// The number of latest samples to keep, over all assets.
    pub(crate) limit: Option<usize>,
}

/// The reason why bars cannot make a data set.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DatasetError {
    /// A series has bars of two intervals.
    #[error(
        "{}: bar {from} and those after it are {} s apart, but most bars are {} s apart: give bars of one interval",
        file.display(), other / 1000.0, interval / 1000.0
    )]
    MixedIntervals {
        /// The file, or the name of the series.
        file: PathBuf,
        /// The usual time between two bars, in milliseconds.
        interval: f64,
        /// The time between bars of another interval.
        other: f64,
        /// The first of these bars, counted from 1.
        from: usize,
    },
    /// Two series have bars of different intervals.
    #[error(
        "{} has a bar every {} s, and {} every {} s: give bars of one interval",
        files[0].display(), intervals[0] / 1000.0, files[1].display(), intervals[1] / 1000.0
    )]
    OtherInterval {
        /// The files, or the names of the series.
        files: [PathBuf; 2],
        /// Their intervals, in milliseconds.
        intervals: [f64; 2],
    },
    /// A series is too short.
    #[error(transparent)]
    Bars(#[from] BarsError),
    /// The limit keeps too few samples.
    #[error("too few samples: the limit keeps {kept}, at least {needed} needed: {why}")]
    TooFew {
        /// Samples kept.
        kept: usize,
        /// Samples needed.
        needed: usize,
        /// The reason why that many are needed.
        why: String,
    },
}

/// A bar of an asset, with its outcome.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sample {
    /// Index of the asset.
    pub(crate) asset: usize,
    /// Index of the bar within its asset.
    pub(crate) bar: usize,
    /// The opening time of the bar, in milliseconds since 1970-01-01 UTC.
    pub(crate) time_ms: i64,
    /// The opening time of the bar that ends the horizon.
    pub(crate) known_ms: i64,
    /// `ln(close[bar + horizon] / close[bar])`.
    pub(crate) log_return: f64,
}

/// A walk-forward fold: samples before a point in time train, and the part after it validates.
#[derive(Clone, Debug)]
pub(crate) struct Fold {
    /// The number of the fold, from 0.
    pub(crate) index: usize,
    /// Indices of the training samples, in order of time.
    pub(crate) train: Vec<usize>,
    /// Indices of the validation samples.
    pub(crate) valid: Range<usize>,
    /// The class limits: a return below the first is down, and one above the second is up.
    pub(crate) thresholds: [f64; 2],
    /// The share of validation samples with the training part's most frequent label (flat, if
    /// labels tie).
    pub(crate) baseline_accuracy: f64,
}

impl Fold {
    /// Returns the label of a sample with this return: 0 down, 1 flat, 2 up.
    pub(crate) fn label(&self, log_return: f64) -> u32 {
        let [down, up] = self.thresholds;
        if log_return < down {
            0
        } else if log_return > up {
            2
        } else {
            1
        }
    }

    /// Returns the training samples in one epoch's random order, which depends only on seed, fold
    /// and epoch.
    pub(crate) fn epoch_order(&self, seed: u64, epoch: usize) -> Vec<usize> {
        let mut order = self.train.clone();
        Random::stream(seed, &[self.index as u64, epoch as u64]).shuffle(&mut order);
        order
    }
}

/// All samples with their folds. Features are computed on demand.
pub(crate) struct Dataset {
    /// The threads that compute features: half of the processors, because the others copy earlier
    /// batches to GPUs. None if the system refuses to start threads.
    makers: Option<ThreadPool>,
    bars: usize,
    sha256: String,
    features: Vec<Features>,
    samples: Vec<Sample>,
    folds: Vec<Fold>,
}

impl Dataset {
    /// Makes the samples and folds of `assets`. If several assets have errors, it returns that of
    /// the first.
    ///
    /// # Errors
    /// [`DatasetError`] when a series is too short for its history, horizon and folds, or when the
    /// limit keeps too few samples for the folds. Both state how many are needed and why.
    ///
    /// # Panics
    /// When `plan` has no fold or no horizon, or `assets` is empty.
    pub(crate) fn new(assets: &[Asset], plan: Plan) -> Result<Self, DatasetError> {
        assert!(plan.folds > 0 && plan.horizon > 0 && !assets.is_empty(), "{plan:?} of {} assets", assets.len());
        for asset in assets {
            check_length(asset, plan)?;
        }
        check_intervals(assets)?;
        let mut samples: Vec<Sample> =
            assets.iter().enumerate().flat_map(|(index, asset)| samples_of(index, &asset.bars, plan.horizon)).collect();
        samples.sort_by_key(|sample| (sample.time_ms, sample.asset));
        if let Some(limit) = plan.limit {
            samples.drain(..samples.len().saturating_sub(limit));
        }
        check_samples(samples.len(), assets.len(), plan)?;
        let folds = (0..plan.folds).map(|index| fold(&samples, index, plan.folds)).collect();
        let processors = std::thread::available_parallelism().map_or(1, |number| number.get());
        Ok(Self {
            makers: ThreadPoolBuilder::new().num_threads(processors.div_ceil(2)).build().ok(),
            bars: assets.iter().map(|asset| asset.bars.len()).sum(),
            sha256: sha256(assets),
            features: assets.iter().map(|asset| Features::new(&asset.bars)).collect(),
            samples,
            folds,
        })
    }

    /// Returns the number of bars of all assets.
    pub(crate) fn bars(&self) -> usize {
        self.bars
    }

    /// Returns the SHA-256, in hexadecimal, of all bars in the given order. Two data sets with the
    /// same digest and plan are equal. File names do not count.
    pub(crate) fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Returns the kept samples, ordered by time, then by asset.
    pub(crate) fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// Returns the folds, earliest validation first.
    pub(crate) fn folds(&self) -> &[Fold] {
        &self.folds
    }

    /// Writes the features of `samples`: `out: [samples.len(), 12, 193]`, row-major.
    ///
    /// # Panics
    /// When `out` has another length or a sample is unknown.
    pub(crate) fn batch_features(&self, samples: &[usize], out: &mut [f32]) {
        assert_eq!(out.len(), samples.len() * SAMPLE_LEN, "features of {} samples", samples.len());
        let write = |(&index, row): (&usize, &mut [f32])| {
            let sample = &self.samples[index];
            self.features[sample.asset].write(sample.bar, row);
        };
        match &self.makers {
            Some(makers) => {
                let rows = || samples.par_iter().zip(out.par_chunks_exact_mut(SAMPLE_LEN)).for_each(write);
                makers.install(rows);
            }
            None => samples.iter().zip(out.chunks_exact_mut(SAMPLE_LEN)).for_each(write),
        }
    }

    /// Writes the labels of `samples` in `fold`: `out: [samples.len()]`.
    ///
    /// # Panics
    /// When `out` has another length or a sample is unknown.
    pub(crate) fn batch_labels(&self, fold: &Fold, samples: &[usize], out: &mut [u32]) {
        assert_eq!(out.len(), samples.len(), "labels of {} samples", samples.len());
        for (&index, label) in samples.iter().zip(out) {
            *label = fold.label(self.samples[index].log_return);
        }
    }
}

/// Computes [`Dataset::sha256`]: for each asset the number of its bars, then the bars, all as
/// little-endian 64-bit words.
fn sha256(assets: &[Asset]) -> String {
    let mut hash = Sha256::new();
    for asset in assets {
        hash.update((asset.bars.len() as u64).to_le_bytes());
        for Bar { time_ms, open, high, low, close, volume } in &asset.bars {
            hash.update(time_ms.to_le_bytes());
            [open, high, low, close, volume].iter().for_each(|number| hash.update(number.to_le_bytes()));
        }
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Checks that all bars have the same interval. Single bars may be missing.
fn check_intervals(assets: &[Asset]) -> Result<(), DatasetError> {
    let intervals = assets.iter().map(interval).collect::<Result<Vec<f64>, _>>()?;
    let Some(other) = intervals.iter().position(|&other| other != intervals[0]) else { return Ok(()) };
    let files = [0, other].map(|at| assets[at].name.clone());
    Err(DatasetError::OtherInterval { files, intervals: [0, other].map(|at| intervals[at]) })
}

/// Returns the most frequent time between two bars, in milliseconds. [`SAME_GAPS`] bars in a row at
/// another distance are bars of another interval, and fewer are bars around a missing one.
fn interval(asset: &Asset) -> Result<f64, DatasetError> {
    let gaps: Vec<i64> = asset.bars.windows(2).map(|pair| pair[1].time_ms - pair[0].time_ms).collect();
    let mut counts = BTreeMap::new();
    gaps.iter().for_each(|&gap| *counts.entry(gap).or_insert(0) += 1);
    // Among equally frequent gaps, the shortest counts.
    let usual = counts.iter().max_by_key(|&(&gap, &count)| (count, -gap)).map_or(0, |(&gap, _)| gap);
    let is_other = |run: &&[i64]| run[0] != usual && run.iter().all(|&gap| gap == run[0]);
    let found = gaps.windows(SAME_GAPS).enumerate().find(|(_, run)| is_other(run));
    match found {
        None => Ok(usual as f64),
        Some((at, run)) => Err(DatasetError::MixedIntervals {
            file: asset.name.clone(),
            interval: usual as f64,
            other: run[0] as f64,
            from: at + 1,
        }),
    }
}

/// Returns every bar of an asset that has enough bars before and after it.
fn samples_of(asset: usize, bars: &[Bar], horizon: usize) -> impl Iterator<Item = Sample> {
    (HISTORY_BARS..bars.len() - horizon).map(move |bar| {
        let (now, then) = (&bars[bar], &bars[bar + horizon]);
        let log_return = libm::log(then.close) - libm::log(now.close);
        Sample { asset, bar, time_ms: now.time_ms, known_ms: then.time_ms, log_return }
    })
}

/// Returns the fewest samples that one asset must have: per part, `horizon` that may be left out,
/// and one per class.
fn least_samples(plan: Plan) -> usize {
    (plan.folds + 1) * (plan.horizon + LEAST_TRAINED)
}

fn check_length(asset: &Asset, plan: Plan) -> Result<(), BarsError> {
    let needed = HISTORY_BARS + plan.horizon + least_samples(plan);
    if asset.bars.len() >= needed {
        return Ok(());
    }
    let why = format!(
        "{HISTORY_BARS} before the first sample, the horizon of {} after the last one, and {} samples: for each part \
         in time (of {}, one more than folds) the horizon and {LEAST_TRAINED} to train on",
        plan.horizon,
        least_samples(plan),
        plan.folds + 1,
    );
    Err(BarsError::TooFew { file: asset.name.clone(), found: asset.bars.len(), needed, why })
}

fn check_samples(kept: usize, assets: usize, plan: Plan) -> Result<(), DatasetError> {
    let needed = least_samples(plan) * assets;
    if kept >= needed {
        return Ok(());
    }
    let why = format!(
        "for each asset (of {assets}) and each part in time (of {}, one more than folds) the horizon of {} and \
         {LEAST_TRAINED} to train on",
        plan.folds + 1,
        plan.horizon,
    );
    Err(DatasetError::TooFew { kept, needed, why })
}

/// Makes fold `index` of `folds`: trains on parts `0..=index` of `folds + 1`, and validates on the
/// next part.
fn fold(samples: &[Sample], index: usize, folds: usize) -> Fold {
    let start = part_start(samples, index + 1, folds + 1);
    let valid = start..part_start(samples, index + 2, folds + 1);
    let first_ms = samples[start].time_ms;
    let train: Vec<usize> = (0..start).filter(|&at| samples[at].known_ms < first_ms).collect();
    let thresholds = terciles(train.iter().map(|&at| samples[at].log_return).collect());

    let mut fold = Fold { index, train, valid, thresholds, baseline_accuracy: 0.0 };
    let count = |of: &mut dyn Iterator<Item = usize>| {
        of.fold([0_usize; CLASSES], |mut count, at| {
            count[fold.label(samples[at].log_return) as usize] += 1;
            count
        })
    };
    let (trained, validated) = (count(&mut fold.train.iter().copied()), count(&mut fold.valid.clone()));
    let frequent = (0..CLASSES).max_by_key(|&class| (trained[class], class == FLAT)).unwrap_or(FLAT);
    fold.baseline_accuracy = validated[frequent] as f64 / fold.valid.len() as f64;
    fold
}

/// Returns the start of one of `parts` equal parts, moved back so that samples of the same time
/// stay together.
fn part_start(samples: &[Sample], part: usize, parts: usize) -> usize {
    let start = samples.len() * part / parts;
    match samples.get(start) {
        Some(first) => samples[..start].partition_point(|sample| sample.time_ms < first.time_ms),
        None => start,
    }
}

/// Returns the 1/3 and 2/3 quantiles by nearest rank: a third of distinct returns is below the
/// first, and a third above the second.
fn terciles(mut returns: Vec<f64>) -> [f64; 2] {
    returns.sort_by(f64::total_cmp);
    let third = returns.len() / 3;
    [returns[third], returns[returns.len() - 1 - third]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    const MINUTE_MS: i64 = 60_000;

    fn assets(count: usize, bars: usize) -> Vec<Asset> {
        let asset =
            |seed| Asset { name: format!("market {seed}").into(), bars: synthetic::market(seed)[..bars].to_vec() };
        (0..count as u64).map(asset).collect()
    }

    fn dataset(count: usize, bars: usize, plan: Plan) -> Dataset {
        Dataset::new(&assets(count, bars), plan).unwrap()
    }

    const PLAN: Plan = Plan { horizon: 15, folds: 3, limit: None };

    /// Samples of the same time are ordered by asset.
    #[test]
    fn samples_are_ordered_by_time() {
        let data = dataset(2, 9_000, PLAN);
        assert_eq!(data.bars(), 18_000);
        assert_eq!(data.samples().len(), 2 * (9_000 - HISTORY_BARS - 15));
        let keys: Vec<_> = data.samples().iter().map(|sample| (sample.time_ms, sample.asset)).collect();
        assert!(keys.is_sorted() && keys[0].1 == 0 && keys[1].1 == 1 && keys[0].0 == keys[1].0);
        let bars = &assets(1, 9_000)[0].bars;
        let sample = data.samples()[0];
        assert_eq!((sample.bar, sample.time_ms), (HISTORY_BARS, bars[HISTORY_BARS].time_ms));
        assert_eq!(sample.known_ms, sample.time_ms + 15 * MINUTE_MS);
        let expected = (bars[HISTORY_BARS + 15].close / bars[HISTORY_BARS].close).ln();
        assert!((sample.log_return - expected).abs() < 1e-12);
    }

    /// Moves the bars of an asset to these minutes.
    fn at_minutes(name: &str, minutes: impl Iterator<Item = i64>) -> Asset {
        let mut bars = assets(1, 9_000).remove(0).bars;
        bars.iter_mut().zip(minutes).for_each(|(bar, minute)| bar.time_ms = minute * MINUTE_MS);
        Asset { name: name.into(), bars }
    }

    #[test]
    fn bars_have_one_interval() {
        let refusal = |assets: &[Asset]| Dataset::new(assets, PLAN).err().map(|error| error.to_string());
        let every = |name: &str, minutes: i64| at_minutes(name, (0..).step_by(minutes as usize));
        let one = || every("one", 1);
        for (minutes, seconds) in [(5, "300"), (60, "3600")] {
            assert_eq!(refusal(&[every("a", minutes), every("b", minutes)]), None, "all the same");
            let expected = format!("one has a bar every 60 s, and other every {seconds} s: give bars of one interval");
            assert_eq!(refusal(&[one(), one(), every("other", minutes)]), Some(expected));
        }
        // Bars that turn from one interval to another, in both directions, and for an hour only.
        let turns = |at: i64, [before, after]: [i64; 2]| {
            at_minutes("a", (0..).map(move |bar: i64| bar.min(at) * before + (bar - at).max(0) * after))
        };
        for (at, minutes, expected) in [
            (7_000, [1, 5], "bar 7001 and those after it are 300 s apart, but most bars are 60 s apart"),
            (2_000, [1, 5], "bar 1 and those after it are 60 s apart, but most bars are 300 s apart"),
            (7_000, [5, 1], "bar 7001 and those after it are 60 s apart, but most bars are 300 s apart"),
        ] {
            assert_eq!(refusal(&[turns(at, minutes)]), Some(format!("a: {expected}: give bars of one interval")));
        }
        let hour = (0..).map(|bar: i64| bar + 4 * (bar - 7_000).clamp(0, 12));
        assert!(refusal(&[one(), at_minutes("a", hour)]).is_some_and(|refusal| refusal.starts_with("a: bar 7001 ")));
        // Missing minutes, single ones, some in a row and whole nights, change nothing.
        let gaps = (0..).map(|bar: i64| bar + bar / 390 * 1_050 + bar / 7 + i64::from(bar > 5_000) * 9);
        assert_eq!(refusal(&[one(), at_minutes("a", gaps)]), None);
    }

    #[test]
    fn the_limit_keeps_the_latest_samples() {
        let whole = dataset(2, 9_000, PLAN);
        let latest = dataset(2, 9_000, Plan { limit: Some(501), ..PLAN });
        assert_eq!(latest.samples(), &whole.samples()[whole.samples().len() - 501..]);
        let ample = dataset(2, 9_000, Plan { limit: Some(1_000_000), ..PLAN });
        assert_eq!(ample.samples(), whole.samples());
    }

    #[test]
    fn folds_never_see_the_validation() {
        for (count, bars) in [(1, 8_001), (2, 8_500), (3, 9_003)] {
            let data = dataset(count, bars, PLAN);
            let samples = data.samples();
            assert_eq!(data.folds().len(), 3);
            let mut end = data.folds()[0].valid.start;
            for (index, fold) in data.folds().iter().enumerate() {
                assert_eq!(fold.index, index);
                assert_eq!(fold.valid.start, end, "validation parts touch");
                end = fold.valid.end;
                let (first, last) = (samples[fold.valid.start], samples[fold.valid.start - 1]);
                assert!(last.time_ms < first.time_ms, "no time is on both sides");
                assert!(fold.train.iter().all(|&at| samples[at].known_ms < first.time_ms), "the future is unseen");
                assert_eq!(fold.train.len(), fold.valid.start - 15 * count, "only the gap is left out");
                let equal = samples.len() * (index + 1) / 4;
                assert!(equal - fold.valid.start < count);
            }
            assert_eq!(end, samples.len(), "the last fold validates to the end");
        }
    }

    #[test]
    fn thresholds_come_from_training_samples() {
        let data = dataset(1, 12_000, PLAN);
        for fold in data.folds() {
            let mut labels = vec![9; fold.train.len()];
            data.batch_labels(fold, &fold.train, &mut labels);
            let third = fold.train.len() / 3;
            for class in [0, 2] {
                let count = labels.iter().filter(|&&label| label == class).count();
                assert!(count <= third && count + 20 > third, "class {class}: {count} of {}", labels.len());
            }
            let validated: Vec<usize> = fold.valid.clone().collect();
            let mut labels = vec![9; validated.len()];
            data.batch_labels(fold, &validated, &mut labels);
            let flat = labels.iter().filter(|&&label| label == 1).count();
            assert_eq!(fold.baseline_accuracy, flat as f64 / labels.len() as f64, "flat is the most frequent label");
        }

        // Different future bars change the label of no training sample.
        let mut changed = assets(1, 12_000);
        let first = data.samples()[data.folds()[0].valid.start].bar;
        for bar in &mut changed[0].bars[first..] {
            *bar = Bar { open: 1.0, high: 9.0, low: 1.0, close: 1.0 + (bar.time_ms % 7) as f64, ..*bar };
        }
        let other = Dataset::new(&changed, PLAN).unwrap();
        let (one, two) = (&data.folds()[0], &other.folds()[0]);
        assert_eq!(one.train, two.train);
        assert_eq!(one.thresholds.map(f64::to_bits), two.thresholds.map(f64::to_bits));
        let (mut labels, mut others) = (vec![0; one.train.len()], vec![0; two.train.len()]);
        data.batch_labels(one, &one.train, &mut labels);
        other.batch_labels(two, &two.train, &mut others);
        assert_eq!(labels, others);
    }

    /// Ties fall into the middle class.
    #[test]
    fn terciles_are_symmetric() {
        assert_eq!(terciles((1..=9).map(f64::from).collect()), [4.0, 6.0]);
        assert_eq!(terciles((1..=10).rev().map(f64::from).collect()), [4.0, 7.0]);
        assert_eq!(terciles(vec![1.0]), [1.0, 1.0]);
        let fold = Fold { index: 0, train: vec![], valid: 0..0, thresholds: [0.0, 0.0], baseline_accuracy: 0.0 };
        assert_eq!([-1e-9, -0.0, 0.0, 1e-9].map(|value| fold.label(value)), [0, 1, 1, 2]);
    }

    #[test]
    fn epochs_permute_the_training_samples() {
        let data = dataset(1, 9_000, PLAN);
        let fold = &data.folds()[1];
        let order = fold.epoch_order(7, 0);
        assert_eq!(order, fold.epoch_order(7, 0));
        for other in [fold.epoch_order(7, 1), fold.epoch_order(8, 0)] {
            assert_ne!(order, other);
        }
        let mut sorted = order;
        sorted.sort_unstable();
        assert_eq!(sorted, fold.train);
    }

    #[test]
    fn batches_hold_each_samples_features() {
        let data = dataset(2, 9_000, PLAN);
        let mut out = vec![f32::NAN; 2 * SAMPLE_LEN];
        data.batch_features(&[11, 4], &mut out);
        let assets = assets(2, 9_000);
        for (row, (asset, bar)) in out.chunks(SAMPLE_LEN).zip([(1, HISTORY_BARS + 5), (0, HISTORY_BARS + 2)]) {
            let mut expected = vec![0.0; SAMPLE_LEN];
            Features::new(&assets[asset].bars).write(bar, &mut expected);
            assert_eq!(row, expected);
        }
    }

    /// The least number of bars is enough, and one bar less is an error that states the number.
    #[test]
    fn least_number_of_bars_is_exact() {
        for horizon in [1, 15, 100] {
            for folds in [1, 2, 7] {
                let plan = Plan { horizon, folds, limit: None };
                let needed = HISTORY_BARS + horizon + (folds + 1) * (horizon + 3);
                let data = dataset(1, needed, plan);
                assert!(data.folds().iter().all(|fold| fold.train.len() >= 3 && !fold.valid.is_empty()));
                let error = Dataset::new(&assets(1, needed - 1), plan).err().expect("one bar is missing").to_string();
                let start = format!("market 0: too few bars: {} found, at least {needed} needed: ", needed - 1);
                assert!(error.starts_with(&start), "{error}");

                let least = (folds + 1) * (horizon + 3) * 2;
                let plan = Plan { limit: Some(least), ..plan };
                let data = dataset(2, 12_000, plan);
                assert!(data.folds().iter().all(|fold| fold.train.len() >= 3 && !fold.valid.is_empty()));
                let plan = Plan { limit: Some(least - 1), ..plan };
                let error = Dataset::new(&assets(2, 12_000), plan).err().expect("one sample is missing").to_string();
                let start = format!("too few samples: the limit keeps {}, at least {least} needed: ", least - 1);
                assert!(error.starts_with(&start), "{error}");
            }
        }
    }
}
