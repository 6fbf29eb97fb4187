//! A seeded synthetic market, for runs without a file of bars. Its bars keep every rule of
//! `bars.rs`.
//!
//! The log price is a random walk whose drift and volatility switch between a quiet, a rising and a
//! falling regime. A new regime is drawn every hour and a half on average. The recent past
//! therefore predicts the next minutes far better than in a real market, so that training can
//! succeed. Only integer arithmetic, IEEE `+ - * /`, square roots and the portable `libm` crate are
//! used, so a seed gives the same bits on every platform.

use crate::bars::Bar;
use crate::random::Random;

/// Bars that [`market`] makes, one per minute: almost 14 days.
pub(crate) const BARS: usize = 20_000;

/// 2024-01-01 00:00:00 UTC.
const START_MS: i64 = 1_704_067_200_000;
const MINUTE_MS: i64 = 60_000;
const START_PRICE: f64 = 20_000.0;
/// Price moves within a minute, which set its high and low.
const MOVES: usize = 8;
/// The probability that a regime ends after a minute.
const SWITCH: f64 = 1.0 / 90.0;
/// The probability that a minute has no trades.
const SILENCE: f64 = 1.0 / 400.0;

/// A market regime, per minute: drift and volatility of the log price, and usual volume.
struct Regime {
    drift: f64,
    volatility: f64,
    volume: f64,
}

const REGIMES: [Regime; 3] = [
    Regime { drift: 0.0, volatility: 3.0e-4, volume: 2.0 },
    Regime { drift: 2.0e-4, volatility: 5.0e-4, volume: 4.0 },
    Regime { drift: -2.5e-4, volatility: 7.0e-4, volume: 6.0 },
];

/// Returns the [`BARS`] bars of the market of this seed.
pub(crate) fn market(seed: u64) -> Vec<Bar> {
    let mut random = Random::stream(seed, &[0x6d61_726b_6574]);
    let mut regime = &REGIMES[0];
    let mut level = libm::log(START_PRICE);
    let mut close = START_PRICE;
    (0..BARS as i64)
        .map(|minute| {
            if random.uniform() < SWITCH {
                regime = &REGIMES[random.below(REGIMES.len() as u64) as usize];
            }
            let open = close;
            let (mut high, mut low, mut volume) = (open, open, 0.0);
            if random.uniform() >= SILENCE {
                let start = level;
                for _ in 0..MOVES {
                    level += regime.drift / MOVES as f64;
                    level += regime.volatility * random.normal() / (MOVES as f64).sqrt();
                    close = cents(libm::exp(level));
                    high = if close > high { close } else { high };
                    low = if close < low { close } else { low };
                }
                let surprise = (level - start).abs() / regime.volatility;
                volume = cents(100.0 * regime.volume * libm::exp(0.5 * random.normal()) * (0.5 + surprise)) / 100.0;
            }
            Bar { time_ms: START_MS + minute * MINUTE_MS, open, high, low, close, volume }
        })
        .collect()
}

/// Rounds to the nearest hundredth, at least one.
fn cents(price: f64) -> f64 {
    let cents = (price * 100.0 + 0.5) as u64;
    cents.max(1) as f64 / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bars_keep_every_rule() {
        let bars = market(7);
        assert_eq!(bars.len(), BARS);
        for pair in bars.windows(2) {
            assert_eq!(pair[1].time_ms - pair[0].time_ms, MINUTE_MS);
            assert_eq!(pair[1].open.to_bits(), pair[0].close.to_bits());
        }
        for bar in &bars {
            let (least, most) = (bar.open.min(bar.close), bar.open.max(bar.close));
            assert!(0.0 < bar.low && bar.low <= least && most <= bar.high, "{bar:?}");
            assert!(bar.volume >= 0.0 && bar.volume.is_finite() && bar.high.is_finite(), "{bar:?}");
        }
        assert!(bars.iter().any(|bar| bar.volume == 0.0), "some minutes are silent");
    }

    #[test]
    fn seeds_reproduce_the_market() {
        assert_eq!(market(7), market(7));
        assert_ne!(market(7)[1..], market(8)[1..]);
        // FNV-1a over the bits of every close. Fails if a platform or a version rounds differently.
        let digest = market(7).iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, bar| {
            (hash ^ bar.close.to_bits() ^ bar.volume.to_bits().rotate_left(17)).wrapping_mul(0x0100_0000_01b3)
        });
        assert_eq!(digest, 0x2aca_c3ea_4c8b_16fb, "{digest:#018x}");
    }

    #[test]
    fn markets_are_predictable() {
        let bars = market(7);
        let (past, future) = (34, 15);
        let (mut right, mut total) = (0, 0);
        for now in past..bars.len() - future {
            let before = bars[now].close - bars[now - past].close;
            let after = bars[now + future].close - bars[now].close;
            right += usize::from(before * after > 0.0);
            total += 1;
        }
        let share = right as f64 / total as f64;
        assert!((0.55..0.85).contains(&share), "the sign of the past return is right in {share} of minutes");
    }
}
