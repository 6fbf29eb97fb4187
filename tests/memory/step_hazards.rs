//! Events in memory between forward and backward, or between steps, change no bit.
//!
//! This guards against a bug of ztensor on GB10: with a pool reset between batches, the first
//! batch's gradients and all losses were right. But the head's gradient fell from 3.74 to 2.5e-6,
//! 2e-18 and 0 over the next three batches, because later allocations overwrote saved activations.
//! [`pool_that_drops_pins_is_found`] rebuilds that pool on the same kernels, and shows that
//! the comparison used here finds the bug. [`queued_launches`] tests launches that the driver
//! refuses.

#![forbid(unsafe_code)]

#[path = "../../examples/gradients_after_reset/perceptron.rs"]
mod perceptron;
#[path = "../../examples/gradients_after_reset/pool.rs"]
mod pool;
mod queued_launches;
#[path = "../../examples/gradients_after_reset/run.rs"]
mod run;
mod schedules;
mod training;

use crate::support::{bits, on_each_device, relative_l2, tolerance};
use perceptron::Perceptron;
use run::{Run, l2, print_table};
use stepscope::{Arena, Capacity, Error, Gradients, Result, Step, Tape, ops};
use training::{BATCHES, ROWS, TOKENS, Trainer, arena, batches, eagerly};

#[track_caller]
fn assert_same(a: &Run, b: &Run) {
    let differences = a.differences(b);
    assert!(differences.is_empty(), "batches {differences:?} differ");
}

/// Checks that the head's gradient does not vanish in any batch.
fn assert_gradients_live(run: &Run) {
    assert_eq!(run.head_l2.len(), BATCHES);
    for (batch, l2) in run.head_l2.iter().enumerate() {
        assert!(*l2 > 0.05 * run.head_l2[0] && *l2 > 1e-2, "batch {batch}: {l2:e} of {:e}", run.head_l2[0]);
    }
    assert!(run.gradients.iter().flatten().all(|gradient| gradient.is_finite()));
}

/// Fills the rest of a step's memory with NaN.
fn poison(step: &Step<'_>) {
    let mut len = 1 << 24;
    while len > 0 {
        match ops::fill(step, [len], f32::NAN) {
            Ok(_) => {}
            Err(Error::ArenaFull { .. }) => len /= 2,
            Err(error) => panic!("{error}"),
        }
    }
}

on_each_device! {
    also late;

    /// The table of the bug: a reset between batches compared with no reset.
    fn resets_between_batches_change_no_bit(device: &Device) {
        let with_resets = eagerly(arena(device), |_| {});
        // Memory that is never reused: a fresh arena for each batch, all of them alive to the end.
        let (mut arenas, mut trainer) = (Vec::new(), Trainer::new(device, ROWS));
        for batch in batches(ROWS) {
            let mut fresh = arena(device);
            fresh.step(|step| trainer.train(step, &batch, ROWS)).unwrap();
            arenas.push(fresh);
        }
        let fresh_arenas = trainer.run;
        // All batches in one step.
        let mut trainer = Trainer::new(device, ROWS);
        Arena::builder(device).capacity(Capacity::mib(32)).build().unwrap().step(|step| {
            batches(ROWS).iter().try_for_each(|batch| trainer.train(step, batch, ROWS))
        }).unwrap();
        let one_step = trainer.run;
        print_table(&[("resets", &with_resets), ("a fresh arena each", &fresh_arenas), ("one step", &one_step)]);
        assert_gradients_live(&with_resets);
        assert!(with_resets.losses[BATCHES - 1].is_finite());
        assert_same(&with_resets, &fresh_arenas);
        assert_same(&with_resets, &one_step);
        assert_ne!(bits(&with_resets.weights[0]), bits(&with_resets.weights[1]));
    }

    /// Runs these kernels on a pool with the bug, which must fail the comparison.
    fn pool_that_drops_pins_is_found(device: &Device) {
        let tape = Perceptron::by_tape(device).unwrap();
        let keeps = Perceptron::by_pool(device, false).unwrap();
        let loses = Perceptron::by_pool(device, true).unwrap();
        print_table(&[("tape", &tape), ("pool that keeps pins", &keeps), ("pool that loses pins", &loses)]);
        assert_gradients_live(&tape);
        assert_same(&tape, &keeps);
        // As in the bug: the first batch and every loss are right, and then the gradient almost
        // vanishes.
        assert_eq!(tape.differences(&loses), [1, 2, 3]);
        assert_eq!(bits(&tape.losses), bits(&loses.losses));
        assert!((1..BATCHES).all(|batch| loses.head_l2[batch] < 0.1 * tape.head_l2[batch]), "{:?}", loses.head_l2);
    }

    /// Kernels read only memory that they or other kernels have written.
    fn stale_memory_changes_no_bit(device: &Device) {
        let clean = eagerly(arena(device), |_| {});
        let poisoned = eagerly(arena(device), |arena| arena.step(|step| {
            poison(step);
            Ok(())
        }).unwrap());
        assert_same(&clean, &poisoned);
    }

    fn scratch_before_backward_changes_no_bit(device: &Device) {
        let plain = Perceptron::by_hand(device, |_| Ok(())).unwrap();
        let with_scratch = Perceptron::by_hand(device, |step| {
            step.scratch(|inner| {
                let _held = ops::fill(inner, [1000], 7.0)?;
                inner.scratch(|innermost| {
                    poison(innermost);
                    Ok(())
                })?;
                poison(inner);
                Ok(())
            })
        }).unwrap();
        assert_gradients_live(&plain);
        assert_same(&plain, &with_scratch);
        assert_same(&plain, &Perceptron::by_tape(device).unwrap());
    }

    fn allocations_before_backward_change_no_bit(device: &Device) {
        let mut elsewhere = arena(device);
        let mut runs = [false, true].map(|disturbed| {
            let (mut arena, mut trainer) = (arena(device), Trainer::new(device, ROWS));
            for batch in batches(ROWS) {
                let Trainer { model, parameters, gradients, weight, .. } = &mut trainer;
                let loss = arena.step(|step| {
                    gradients.zero(step)?;
                    let tape = Tape::new(step, parameters);
                    let loss = model.loss(&tape, batch.upload(step, 0..ROWS)?, *weight)?;
                    if disturbed {
                        let _held = ops::fill(step, [100_000], f32::NAN)?;
                        elsewhere.step(|step| {
                            poison(step);
                            Ok(())
                        })?;
                    }
                    tape.backward(&loss, gradients)?;
                    step.read_scalar(loss.value())
                }).unwrap();
                trainer.note(loss);
            }
            trainer.run
        }).into_iter();
        let (plain, disturbed) = (runs.next().unwrap(), runs.next().unwrap());
        assert_gradients_live(&plain);
        assert_same(&plain, &disturbed);
    }

    fn two_forwards_first_change_no_bit(device: &Device) {
        let (mut arena, trainer) = (arena(device), Trainer::new(device, ROWS));
        let [first, second, ..] = &batches(ROWS)[..] else { unreachable!() };
        let parameters = &trainer.parameters;
        let gradients = || Gradients::zeros(parameters).unwrap();
        let alone = [first, second].map(|batch| {
            let mut gradients = gradients();
            arena.step(|step| {
                let tape = Tape::new(step, parameters);
                let loss = trainer.model.loss(&tape, batch.upload(step, 0..ROWS)?, trainer.weight)?;
                tape.backward(&loss, &mut gradients)
            }).unwrap();
            gradients.read_flat().unwrap()
        });
        let mut together = [gradients(), gradients()];
        arena.step(|step| {
            let tapes = (Tape::new(step, parameters), Tape::new(step, parameters));
            let first = trainer.model.loss(&tapes.0, first.upload(step, 0..ROWS)?, trainer.weight)?;
            let second = trainer.model.loss(&tapes.1, second.upload(step, 0..ROWS)?, trainer.weight)?;
            tapes.0.backward(&first, &mut together[0])?;
            tapes.1.backward(&second, &mut together[1])
        }).unwrap();
        for (alone, together) in alone.iter().zip(&together) {
            assert!(l2(alone) > 0.1);
            assert_eq!(bits(alone), bits(&together.read_flat().unwrap()));
        }
    }

    /// Single samples have the same bits in one step as in a step each, and add up to the whole
    /// batch's gradient.
    fn micro_batches_add_up(device: &Device) {
        let batch = &batches(ROWS)[0];
        let whole = eagerly(arena(device), |_| {});
        let (mut arena, mut trainer) = (arena(device), Trainer::new(device, ROWS));
        arena.step(|step| trainer.train(step, batch, 1)).unwrap();
        let in_one_step = trainer.run;
        let mut trainer = Trainer::new(device, ROWS);
        arena.step(|step| trainer.gradients.zero(step)).unwrap();
        let mut loss = 0.0;
        for row in 0..ROWS {
            loss += arena.step(|step| trainer.accumulate(step, batch, row..row + 1)).unwrap();
        }
        arena.step(|step| trainer.update(step, loss)).unwrap();
        assert_same(&in_one_step, &trainer.run);
        // Sums in another order, the longest over all rows.
        let exact: Vec<f64> = whole.gradients[0].iter().map(|&gradient| f64::from(gradient)).collect();
        let error = relative_l2(&in_one_step.gradients[0], &exact);
        assert!(error < tolerance(ROWS * TOKENS), "{error:e}");
        assert!((in_one_step.losses[0] / whole.losses[0] - 1.0).abs() < 1e-6);
    }

    /// A step that fails halfway frees its memory, and a repeated one has the same bits.
    fn a_failed_step_can_be_repeated(device: &Device) {
        let undisturbed = eagerly(arena(device), |_| {});
        let mut small = Arena::builder(device).capacity(Capacity::Bytes(64 << 10)).build().unwrap();
        let (mut arena, mut trainer) = (arena(device), Trainer::new(device, ROWS));
        let mut failures = 0;
        for batch in batches(ROWS) {
            // The arena is too small for forward and backward. Then one step panics after backward,
            // and then one succeeds.
            let full = small.step(|step| trainer.train(step, &batch, ROWS));
            failures += u32::from(matches!(full, Err(Error::ArenaFull { capacity_bytes: 65_536, .. })));
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| arena.step(|step| {
                trainer.accumulate(step, &batch, 0..ROWS)?;
                poison(step);
                std::panic::resume_unwind(Box::new("planned")) as Result<()>
            })));
            failures += u32::from(panicked.is_err());
            arena.step(|step| trainer.train(step, &batch, ROWS)).unwrap();
        }
        assert_eq!(failures, 2 * BATCHES as u32);
        assert_same(&undisturbed, &trainer.run);
    }
}
