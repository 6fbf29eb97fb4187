//! One training under every schedule that could disturb it: captured or eager, checked or not,
//! with overflow, growth and other work of the same arena between batches. All have the same bits.

use crate::step_hazards::training::{BATCHES, Trainer, arena, batches, captured, eagerly};
use crate::step_hazards::{assert_gradients_live, assert_same, poison};
use crate::support::{bits, on_each_device, relative_l2};
use stepscope::memory::{ArenaBuilder, Growth, Overflow};
use stepscope::{Arena, Capacity, Device, ops};

/// Less than a batch's step needs.
const SMALL: Capacity = Capacity::Bytes(64 << 10);

fn small(device: &Device) -> ArenaBuilder {
    Arena::builder(device).capacity(SMALL).overflow(Overflow::pool(8 << 20)).reserve_bytes(0)
}

/// Fills the arena with NaN, in a step, in nested scratches and in its pool, if it has one.
fn other_work(arena: &mut Arena) {
    arena
        .step(|step| {
            let held = ops::fill(step, [20_000], f32::NAN)?;
            step.scratch(|inner| {
                let _sum = ops::sum(inner, &inner.lend(&held))?;
                inner.scratch(|innermost| ops::fill(innermost, [20_000], f32::NAN).map(drop))
            })?;
            ops::fill(step, [20_000], f32::NAN).map(drop)
        })
        .unwrap();
}

on_each_device! {
    also late;

    fn capture_and_checks_keep_bits(device: &Device) {
        let plain = eagerly(arena(device), |_| {});
        assert_gradients_live(&plain);
        let make = |checked| Arena::builder(device).capacity(Capacity::mib(8)).checked(checked).build().unwrap();
        for checked in [false, true] {
            assert_same(&plain, &eagerly(make(checked), |_| {}));
            assert_same(&plain, &eagerly(make(checked), other_work));
            assert_same(&plain, &captured(make(checked), |_| {}));
            assert_same(&plain, &captured(make(checked), other_work));
        }
    }

    /// Eager steps between replays fill the memory outside the capture with NaN.
    fn captures_share_no_memory_with_steps(device: &Device) {
        let mut steps = 0;
        let disturbed = captured(arena(device), |arena| {
            arena.step(|step| {
                poison(step);
                Ok(())
            }).unwrap();
            steps += 1;
        });
        assert_eq!(steps, BATCHES);
        assert_same(&eagerly(arena(device), |_| {}), &disturbed);
    }

    /// The first batch overflows. With growth, the second batch uses a new arena.
    fn overflow_and_growth_change_no_bit(device: &Device) {
        let plain = eagerly(arena(device), |_| {});
        for checked in [false, true] {
            let mut reports = Vec::new();
            let overflowing = small(device).checked(checked).build().unwrap();
            assert_same(&plain, &eagerly(overflowing, |arena| reports.push(arena.report())));
            let last = reports.last().unwrap();
            assert!(last.overflow.allocations > 10 * (BATCHES as u64 - 1), "{last}");
            assert_eq!((last.growths, last.overflow.live_blocks), (0, 0), "{last}");

            let mut reports = Vec::new();
            let growing = small(device).growth(Growth::AtBoundary { max_bytes: 8 << 20 }).checked(checked).build().unwrap();
            assert_same(&plain, &eagerly(growing, |arena| reports.push(arena.report())));
            let [before, first, .., last] = &reports[..] else { unreachable!() };
            assert!(before.capacity_bytes < last.capacity_bytes && last.growths == 1, "{last}");
            assert_eq!(first.overflow.allocations, last.overflow.allocations, "only the first batch overflows");
            assert!(first.overflow.allocations > 10, "{first}");
        }
    }

    /// The arena grows through other work while a captured step owns a part of the old one.
    fn growth_during_capture_changes_no_bit(device: &Device) {
        let growth = Growth::AtBoundary { max_bytes: 16 << 20 };
        let growing = Arena::builder(device).capacity(Capacity::mib(4)).overflow(Overflow::pool(16 << 20)).growth(growth);
        let (mut work, mut growths) = (1 << 20, 0);
        let disturbed = captured(growing.reserve_bytes(0).build().unwrap(), |arena| {
            arena.step(|step| ops::fill(step, [work], f32::NAN).map(drop)).unwrap();
            growths = arena.report().growths;
            work += 1 << 20;
        });
        assert!(growths > 1, "{growths}");
        assert_same(&eagerly(arena(device), |_| {}), &disturbed);
    }

    /// 256 micro-batches of one sample: each adds to the gradients, so sums are taken in another
    /// order.
    fn micro_batches_match_the_whole_batch(device: &Device) {
        const SAMPLES: usize = 256;
        /// The limit of `tests/oracle/crossasset.py`, which checks CrossAsset in both ways.
        const LIMIT: f64 = 2e-6;
        let batch = &batches(SAMPLES)[0];
        let train = |rows| {
            let mut trainer = Trainer::new(device, SAMPLES);
            let mut arena = Arena::builder(device).capacity(Capacity::mib(256)).build().unwrap();
            arena.step(|step| trainer.train(step, batch, rows)).unwrap();
            trainer
        };
        let (whole, parts) = (train(SAMPLES), train(1));
        let mut different = 0;
        for parameter in whole.parameters.spec().entries() {
            let of = |trainer: &Trainer| trainer.run.gradients[0][parameter.range()].to_vec();
            let (whole, parts) = (of(&whole), of(&parts));
            let exact: Vec<f64> = whole.iter().map(|&gradient| f64::from(gradient)).collect();
            let error = relative_l2(&parts, &exact);
            println!("{:<12} {error:.2e} of {LIMIT:.0e}", parameter.name());
            assert!(error <= LIMIT, "{}: {error:e}", parameter.name());
            different += usize::from(bits(&whole) != bits(&parts));
        }
        assert!(different > 5, "a different order of sums must give different bits");
        let error = (f64::from(parts.run.losses[0]) / f64::from(whole.run.losses[0]) - 1.0).abs();
        assert!(error <= LIMIT, "{error:e}");
    }
}
