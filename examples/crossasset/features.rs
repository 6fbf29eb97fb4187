//! The model's input at one bar: 12 time scales with 193 features each.
//!
//! Scale `s` aggregates `w = SCALES[s]` bars, where `SCALES` are the Fibonacci numbers 1, 2, 3, 5,
//! ... 233. At bar `t`, its latest 32 aggregates end at bars `t - 31 w, ... t - w, t`. Let `O`,
//! `H`, `L`, `C`, `V` be an aggregate's open, high, low, close and volume, `P` the close before it,
//! and `r` the log returns of its bars. The row of scale `s` is, oldest aggregate first:
//!
//! | index        | number              | formula                        |
//! |--------------|---------------------|--------------------------------|
//! | `6 k`        | return              | `ln(C / P) / sigma`            |
//! | `6 k + 1`    | body                | `ln(C / O) / sigma`            |
//! | `6 k + 2`    | upper wick          | `ln(H / max(O, C)) / sigma`    |
//! | `6 k + 3`    | lower wick          | `ln(min(O, C) / L) / sigma`    |
//! | `6 k + 4`    | relative volume     | `(V - mean V) / (V + mean V)`  |
//! | `6 k + 5`    | realized volatility | `sqrt(sum r^2) / sigma`        |
//! | `192`        | volatility          | `ln(sigma / (sqrt(w) sigma1))` |
//!
//! `mean V` is the mean volume, and `sigma` the root mean square return, of the row's 32
//! aggregates. `sigma1` is the root mean square one-bar return of the latest 32 x 233 bars. `sigma`
//! is at least a tenth of `sqrt(w) sigma1`, and `sigma1` at least 1e-8. Every feature is therefore
//! of order one for any asset, price and scale. All are clamped to [-8, 8].
//!
//! Invariant: the row of bar `t` depends on bars `t - 7456 ..= t` only, bit for bit. Window sums,
//! highs and lows of a scale come from the two previous scales (`sum over w1 + w2 bars = sum over
//! the last w1 + sum over the w2 before`), never from running totals. Everything is computed in
//! float64 with IEEE `+ - * /`, square roots and the portable `libm` crate, so it is the same on
//! every platform. Aggregates and features are then rounded to f32.

use crate::bars::Bar;
use crate::sizes::{AGGREGATES, FEATURES, FIELDS, SCALES};

/// Numbers per sample, `[SCALES.len(), FEATURES]` row-major.
pub(crate) const SAMPLE_LEN: usize = SCALES.len() * FEATURES;
/// Bars needed before the first bar that has features.
pub(crate) const HISTORY_BARS: usize = AGGREGATES * SCALES[SCALES.len() - 1];

/// Every feature lies in `[-LIMIT, LIMIT]`.
pub(crate) const LIMIT: f64 = 8.0;
const LEAST_VOLATILITY: f64 = 1e-8;
const LEAST_SHARE: f64 = 0.1;

/// An aggregate before division by the volatility.
#[derive(Clone, Copy, Default)]
struct Aggregate {
    change: f32,
    body: f32,
    upper: f32,
    lower: f32,
    volume: f32,
    /// The square root of the sum of squared one-bar log returns.
    realised: f32,
}

/// The aggregates of a series of bars, from which [`Features::write`] computes the row of any bar.
///
/// They take 288 bytes per bar.
pub(crate) struct Features {
    /// `scales[s][t]` ends at bar `t`; entries with `t < SCALES[s]` have no bar before them and
    /// stay zero.
    scales: Vec<Vec<Aggregate>>,
}

impl Features {
    /// Aggregates `bars` at every scale.
    pub(crate) fn new(bars: &[Bar]) -> Self {
        let open: Vec<f64> = bars.iter().map(|bar| libm::log(bar.open)).collect();
        let close: Vec<f64> = bars.iter().map(|bar| libm::log(bar.close)).collect();
        let mut windows = Windows::of_bars(bars, &close);
        let mut shorter = windows.clone(); // the Fibonacci numbers begin 1, 1, 2
        let mut scales = Vec::with_capacity(SCALES.len());
        for (scale, &width) in SCALES.iter().enumerate() {
            if scale > 0 {
                let longer = windows.followed_by(&shorter, SCALES[scale - 1]);
                shorter = std::mem::replace(&mut windows, longer);
            }
            scales.push(windows.aggregates(width, &open, &close));
        }
        Self { scales }
    }

    /// Writes the features of bar `t` to `out`: `[SCALES.len(), FEATURES]`, row-major.
    ///
    /// # Panics
    /// When bar `t` is unknown or has fewer than [`HISTORY_BARS`] bars before it, or `out` is not
    /// [`SAMPLE_LEN`] long.
    pub(crate) fn write(&self, t: usize, out: &mut [f32]) {
        assert!(t >= HISTORY_BARS, "bar {t} has fewer than {HISTORY_BARS} bars before it");
        assert_eq!(out.len(), SAMPLE_LEN, "a sample has {SAMPLE_LEN} features");
        let (longest, width) = (&self.scales[SCALES.len() - 1], SCALES[SCALES.len() - 1]);
        let energy: f64 = latest(longest, t, width).map(|a| square(a.realised)).sum();
        let minute = at_least((energy / HISTORY_BARS as f64).sqrt(), LEAST_VOLATILITY);

        for ((series, &width), row) in self.scales.iter().zip(&SCALES).zip(out.chunks_exact_mut(FEATURES)) {
            let (mut energy, mut volume) = (0.0, 0.0);
            for aggregate in latest(series, t, width) {
                energy += square(aggregate.change);
                volume += f64::from(aggregate.volume);
            }
            let typical = (width as f64).sqrt() * minute;
            let volatility = at_least((energy / AGGREGATES as f64).sqrt(), LEAST_SHARE * typical);
            let mean_volume = volume / AGGREGATES as f64;
            let scale = 1.0 / volatility;
            for (fields, a) in row.chunks_exact_mut(FIELDS).zip(latest(series, t, width)) {
                for (field, value) in fields.iter_mut().zip([a.change, a.body, a.upper, a.lower]) {
                    *field = cut(f64::from(value) * scale);
                }
                fields[4] = cut(contrast(f64::from(a.volume), mean_volume));
                fields[5] = cut(f64::from(a.realised) * scale);
            }
            row[FEATURES - 1] = cut(libm::log(volatility / typical));
        }
    }
}

/// Returns the latest aggregates of `width` bars that end at bar `t`, oldest first.
fn latest(series: &[Aggregate], t: usize, width: usize) -> impl Iterator<Item = &Aggregate> {
    series[t - (AGGREGATES - 1) * width..=t].iter().step_by(width)
}

/// Sums and extremes over the `w` bars that end at each bar. The first `w - 1` cover fewer bars.
#[derive(Clone)]
struct Windows {
    high: Vec<f64>,
    low: Vec<f64>,
    volume: Vec<f64>,
    /// The sums of squared one-bar log returns.
    energy: Vec<f64>,
}

impl Windows {
    /// Returns windows of one bar.
    fn of_bars(bars: &[Bar], close: &[f64]) -> Self {
        let change = |t: usize| if t == 0 { 0.0 } else { close[t] - close[t - 1] };
        Self {
            high: bars.iter().map(|bar| libm::log(bar.high)).collect(),
            low: bars.iter().map(|bar| libm::log(bar.low)).collect(),
            volume: bars.iter().map(|bar| bar.volume).collect(),
            energy: (0..bars.len()).map(|t| change(t) * change(t)).collect(),
        }
    }

    /// Joins each of these windows, `width` bars long, with the window of `earlier` that ends just
    /// before it.
    fn followed_by(&self, earlier: &Self, width: usize) -> Self {
        let join = |late: &[f64], early: &[f64], both: fn(f64, f64) -> f64| {
            let start = late.iter().take(width).copied();
            let rest = late.iter().skip(width).zip(early).map(|(&late, &early)| both(late, early));
            start.chain(rest).collect()
        };
        Self {
            high: join(&self.high, &earlier.high, |a, b| if a < b { b } else { a }),
            low: join(&self.low, &earlier.low, |a, b| if a > b { b } else { a }),
            volume: join(&self.volume, &earlier.volume, |a, b| a + b),
            energy: join(&self.energy, &earlier.energy, |a, b| a + b),
        }
    }

    fn aggregates(&self, width: usize, open: &[f64], close: &[f64]) -> Vec<Aggregate> {
        let aggregate = |t: usize| {
            if t < width {
                return Aggregate::default();
            }
            let (first, last) = (open[t + 1 - width], close[t]);
            let (most, least) = if first < last { (last, first) } else { (first, last) };
            Aggregate {
                change: (last - close[t - width]) as f32,
                body: (last - first) as f32,
                upper: (self.high[t] - most) as f32,
                lower: (least - self.low[t]) as f32,
                volume: self.volume[t] as f32,
                realised: self.energy[t].sqrt() as f32,
            }
        };
        (0..close.len()).map(aggregate).collect()
    }
}

fn square(value: f32) -> f64 {
    f64::from(value) * f64::from(value)
}

fn at_least(value: f64, least: f64) -> f64 {
    if value > least { value } else { least }
}

/// Returns `(a - b) / (a + b)`, which is `tanh(ln(a / b) / 2)`: in [-1, 1] for nonnegative numbers,
/// and 0 for two zeros.
fn contrast(a: f64, b: f64) -> f64 {
    if a + b > 0.0 { (a - b) / (a + b) } else { 0.0 }
}

/// Rounds to f32 within the limits. A volume beyond f32 gives NaN, which becomes 0.
fn cut(value: f64) -> f32 {
    match value {
        _ if value > LIMIT => LIMIT as f32,
        _ if value < -LIMIT => -LIMIT as f32,
        _ if value.is_nan() => 0.0,
        _ => value as f32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::synthetic;

    fn row(bars: &[Bar], t: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; SAMPLE_LEN];
        Features::new(bars).write(t, &mut out);
        out
    }

    fn bits(row: &[f32]) -> Vec<u32> {
        row.iter().map(|value| value.to_bits()).collect()
    }

    /// Computes the module's table directly, bar by bar, with the platform's logarithm.
    fn straight(bars: &[Bar], t: usize) -> Vec<f64> {
        let change = |t: usize| (bars[t].close / bars[t - 1].close).ln();
        let energy = |range: std::ops::RangeInclusive<usize>| range.map(|t| change(t).powi(2)).sum::<f64>();
        let minute = (energy(t - HISTORY_BARS + 1..=t) / HISTORY_BARS as f64).sqrt().max(1e-8);
        let mut row = Vec::new();
        for width in SCALES {
            let ends: Vec<usize> = (0..AGGREGATES).rev().map(|k| t - k * width).collect();
            let volume = |end: usize| bars[end + 1 - width..=end].iter().map(|bar| bar.volume).sum::<f64>();
            let step = |end: usize| (bars[end].close / bars[end - width].close).ln();
            let mean_volume = ends.iter().map(|&end| volume(end)).sum::<f64>() / AGGREGATES as f64;
            let mean_square = ends.iter().map(|&end| step(end).powi(2)).sum::<f64>() / AGGREGATES as f64;
            let typical = (width as f64).sqrt() * minute;
            let sigma = mean_square.sqrt().max(0.1 * typical);
            for end in ends {
                let span = &bars[end + 1 - width..=end];
                let (open, close) = (span[0].open, bars[end].close);
                let high = span.iter().map(|bar| bar.high).fold(f64::MIN, f64::max);
                let low = span.iter().map(|bar| bar.low).fold(f64::MAX, f64::min);
                let total = volume(end) + mean_volume;
                row.push(step(end) / sigma);
                row.push((close / open).ln() / sigma);
                row.push((high / open.max(close)).ln() / sigma);
                row.push((open.min(close) / low).ln() / sigma);
                row.push(if total > 0.0 { (volume(end) - mean_volume) / total } else { 0.0 });
                row.push(energy(end + 1 - width..=end).sqrt() / sigma);
            }
            row.push((sigma / typical).ln());
        }
        row.iter().map(|value| value.clamp(-LIMIT, LIMIT)).collect()
    }

    #[test]
    fn there_are_193_numbers_a_scale() {
        assert_eq!((FEATURES, SAMPLE_LEN, HISTORY_BARS), (193, 2316, 7456));
        for scale in 2..SCALES.len() {
            assert_eq!(SCALES[scale], SCALES[scale - 1] + SCALES[scale - 2]);
        }
    }

    #[test]
    fn equals_the_documented_formulas() {
        let bars = synthetic::market(3);
        for t in [HISTORY_BARS, 9_999, bars.len() - 1] {
            for (at, (got, want)) in row(&bars, t).iter().zip(straight(&bars, t)).enumerate() {
                let difference = (f64::from(*got) - want).abs();
                assert!(difference < 1e-5, "bar {t}, scale {}, {}: {got} {want}", at / FEATURES, at % FEATURES);
            }
        }
    }

    #[test]
    fn features_use_only_their_window() {
        let bars = synthetic::market(4);
        let t = HISTORY_BARS + 3_000;
        let whole = bits(&row(&bars, t));
        assert_eq!(whole, bits(&row(&bars[..=t], t)), "without the future");
        assert_eq!(whole, bits(&row(&bars[t - HISTORY_BARS..], HISTORY_BARS)), "without the older past");

        let mut random = Random::new(5);
        let mut changed = bars.clone();
        for (at, bar) in changed.iter_mut().enumerate() {
            let factor = 1.0 + random.uniform();
            if at > t || at < t - HISTORY_BARS {
                bar.open *= factor;
                bar.high *= factor;
                bar.low *= factor;
                bar.close *= factor;
                bar.volume *= factor;
            }
        }
        assert_eq!(whole, bits(&row(&changed, t)), "with another future and another older past");
        changed[t].close *= 1.01;
        assert_ne!(whole, bits(&row(&changed, t)), "with another present");
    }

    #[test]
    fn features_are_of_order_one() {
        let bars = synthetic::market(6);
        let features = Features::new(&bars);
        let mut out = vec![0.0; SAMPLE_LEN];
        let mut squares = vec![0.0; SAMPLE_LEN];
        let samples: Vec<usize> = (HISTORY_BARS..bars.len()).step_by(97).collect();
        for &t in &samples {
            features.write(t, &mut out);
            assert!(out.iter().all(|value| value.abs() <= LIMIT as f32));
            for (sum, value) in squares.iter_mut().zip(&out) {
                *sum += f64::from(value * value) / samples.len() as f64;
            }
        }
        for (at, square) in squares.iter().enumerate() {
            assert!((0.01..4.0).contains(square), "scale {}, {}: {square}", at / FEATURES, at % FEATURES);
        }
    }

    #[test]
    fn extreme_markets_give_finite_features() {
        let still = Bar { time_ms: 0, open: 5.0, high: 5.0, low: 5.0, close: 5.0, volume: 0.0 };
        let wild = |t: usize| {
            let price = if t.is_multiple_of(2) { f64::MIN_POSITIVE } else { f64::MAX };
            Bar { open: price, high: f64::MAX, low: f64::MIN_POSITIVE, close: price, volume: f64::MAX, ..still }
        };
        let len = HISTORY_BARS + 1;
        let jump = |t: usize| Bar { close: if t + 1 == len { 6.0 } else { 5.0 }, high: 6.0, ..still };
        for bars in [vec![still; len], (0..len).map(wild).collect::<Vec<_>>(), (0..len).map(jump).collect()] {
            let row = row(&bars, HISTORY_BARS);
            assert!(row.iter().all(|value| value.is_finite() && value.abs() <= LIMIT as f32));
        }
    }
}
