//! Closures that fail, panic, or differ in the second run, and variables of another tape.

use crate::support::{bits, on_each_device};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use stepscope::ops::Generator;
use stepscope::parameters::Initializer;
use stepscope::{Arena, Capacity, Device, Error, Gradients, Parameter, ParameterSpec, Parameters, Result, Tape, Var};

const ROWS: usize = 3;
const COLS: usize = 4;

/// The work of a run, by its number from 0 on.
type Work = for<'i> fn(u32, &Tape<'_, 'i>, Var<'i>, Parameter) -> Result<[Var<'i>; 2]>;

struct Fixture {
    arena: Arena,
    w: Parameter,
    weights: Parameters,
    gradients: Gradients,
    generator: Generator,
}

impl Fixture {
    fn new(device: &Device) -> Self {
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [COLS, COLS], Initializer::fan_in(COLS));
        let weights = Parameters::new(device, &spec.build().unwrap(), 5).unwrap();
        let gradients = Gradients::zeros(&weights).unwrap();
        let arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        Self { arena, w, weights, gradients, generator: Generator::new(device, 1).unwrap() }
    }

    /// Runs a pass that recomputes this work, and returns the gradient of w.
    fn pass(&mut self, work: Work) -> Result<Vec<u32>> {
        let Self { arena, w, weights, gradients, generator } = self;
        let (runs, w) = (Arc::new(AtomicU32::new(0)), *w);
        arena.step(|step| {
            let tape = Tape::new(step, weights).with_generator(generator);
            let x = tape.input(step.upload(&[0.5; ROWS * COLS], [ROWS, COLS])?);
            let x = tape.linear(&x, w, None)?;
            let [y, z] =
                tape.recompute_all(x, move |tape, x| work(runs.fetch_add(1, Ordering::Relaxed), tape, x, w))?;
            let loss = tape.sum(&y.add(z)?)?;
            tape.backward_overwrite(&loss, gradients)
        })?;
        Ok(bits(&gradients.read(w)?))
    }
}

fn error(outcome: Result<Vec<u32>>) -> String {
    outcome.expect_err("the step must fail").to_string()
}

on_each_device! {
    fn closure_must_repeat_its_work(device: &Device) {
        let deeds: [(Work, &[&str]); 7] = [
            (|run, _, x, _| {
                let y = if run == 0 { x.mul(2.0)? } else { x.gelu()? };
                Ok([y, y])
            }, &["`mul` [3, 4] as op 0", "`gelu` [3, 4]"]),
            (|run, _, x, _| {
                let y = x.mul(2.0)?;
                Ok([y, if run == 0 { y } else { x.mul(2.0)? }])
            }, &["none as op 1", "`mul` [3, 4]"]),
            (|run, _, x, _| {
                let (y, z) = (x.mul(2.0)?, x.mul(3.0)?);
                Ok([y, if run == 0 { z } else { y }])
            }, &["the results", "[(Some(1), [3, 4]), (Some(2), [3, 4])]", "(Some(1), [3, 4])]"]),
            (|run, _, x, _| {
                let shape = if run == 0 { [ROWS, COLS] } else { [COLS, ROWS] };
                let y = x.reshape(shape)?.reshape([ROWS, COLS])?;
                Ok([y, y])
            }, &["`reshape` [3, 4] as op 0", "`reshape` [4, 3]"]),
            (|run, tape, x, _| {
                if run == 1 {
                    tape.draws()?.map(|draws| draws.next());
                }
                let y = tape.dropout(&x, 0.5)?;
                Ok([y, y])
            }, &["1 draws of random numbers", "got 2"]),
            (|run, tape, x, w| {
                let y = tape.linear(&x, w, None)?;
                Ok([y, if run == 0 { y } else { x }])
            }, &["the results"]),
            // An input in place of an op's result.
            (|run, tape, x, _| {
                let y = x.mul(2.0)?;
                Ok([y, if run == 0 { x } else { tape.input(*x.value()) }])
            }, &["the results", "(Some(0), [3, 4])]", "(None, [3, 4])]"]),
        ];
        for (work, tells) in deeds {
            let mut world = Fixture::new(device);
            let error = error(world.pass(work));
            let all = ["recompute", "does the same in both runs"];
            assert!(all.iter().chain(tells).all(|tell| error.contains(tell)), "{error}, not {tells:?}");
        }
    }

    /// The error is the closure's own, and the next step has the bits of an undisturbed one.
    fn closure_failures_leave_no_trace(device: &Device) {
        fn sound<'i>(tape: &Tape<'_, 'i>, x: Var<'i>, w: Parameter) -> Result<[Var<'i>; 2]> {
            let y = tape.dropout(&tape.linear(&x, w, None)?, 0.5)?;
            Ok([y, y.gelu()?])
        }
        let deeds: [Work; 4] = [
            |run, tape, x, w| if run == 0 { tape.sum(&x).and_then(|x| Ok([tape.linear(&x, w, None)?; 2])) } else { sound(tape, x, w) },
            |run, tape, x, w| if run == 1 { tape.sum(&x).and_then(|x| Ok([tape.linear(&x, w, None)?; 2])) } else { sound(tape, x, w) },
            |run, tape, x, w| if run == 0 { panic!("run {run}") } else { sound(tape, x, w) },
            |run, tape, x, w| if run == 1 { panic!("run {run}") } else { sound(tape, x, w) },
        ];
        for (number, work) in deeds.into_iter().enumerate() {
            let mut world = Fixture::new(device);
            match catch_unwind(AssertUnwindSafe(|| world.pass(work))) {
                Ok(outcome) => {
                    assert!(number < 2);
                    assert!(matches!(outcome, Err(Error::Misuse { op: "linear", .. })), "{outcome:?}");
                }
                Err(panic) => assert_eq!(*panic.downcast::<String>().unwrap(), format!("run {}", number - 2)),
            }
            let (seed, drawn) = world.generator.read().unwrap();
            assert_eq!(drawn, 1, "the step drew once before the error");
            world.generator.set(seed, 0).unwrap();
            let again = world.pass(|_, tape, x, w| sound(tape, x, w)).unwrap();
            assert_eq!(again, Fixture::new(device).pass(|_, tape, x, w| sound(tape, x, w)).unwrap());
        }
    }

    /// A tape continues after a closure that failed in its first run as if it had not run.
    fn failed_closure_leaves_tape_unchanged(device: &Device) {
        let run = |failures: usize| {
            let Fixture { mut arena, w, weights, mut gradients, generator } = Fixture::new(device);
            let loss = arena.step(|step| {
                let tape = Tape::new(step, &weights).with_generator(&generator);
                let x = tape.linear(&tape.input(step.upload(&[0.5; ROWS * COLS], [ROWS, COLS])?), w, None)?;
                let x = tape.dropout(&x, 0.5)?;
                for _ in 0..failures {
                    let failed = tape.recompute(x, move |tape, x| {
                        tape.step().set_precision(stepscope::ops::Precision::Tf32);
                        let y = tape.dropout(&tape.linear(&x, w, None)?, 0.5)?;
                        y.reshape([7])
                    });
                    assert!(matches!(failed, Err(Error::Misuse { op: "reshape", .. })), "{failed:?}");
                }
                let y = tape.recompute(x, move |tape, x| tape.dropout(&tape.linear(&x, w, None)?, 0.5))?;
                let loss = tape.sum(&tape.dropout(&y, 0.5)?)?;
                tape.backward_overwrite(&loss, &mut gradients)?;
                step.read(loss.value())
            });
            (bits(&loss.unwrap()), bits(&gradients.read(w).unwrap()))
        };
        assert_eq!(run(3), run(0));
    }

    fn variables_of_another_tape(device: &Device) {
        let Fixture { mut arena, weights, .. } = Fixture::new(device);
        let outcomes = arena.step(|step| {
            let [tape, other] = [(); 2].map(|()| Tape::new(step, &weights));
            let [x, foreign] = [&tape, &other].map(|tape| Ok::<_, Error>(tape.input(step.upload(&[1.0], [1])?)));
            let (x, foreign) = (x?, foreign?);
            let kept = tape.recompute(foreign, |_, x| Ok(x)).map(drop);
            let deep = tape.recompute(vec![(x, Some([x, foreign]))], |_, kept| Ok(kept[0].0)).map(drop);
            // A closure may use the outer tape in a nested closure, but not return a result made
            // there.
            let within = tape.recompute(x, |tape, x| {
                let within = tape.recompute((), |tape, ()| Ok(tape.input(tape.step().empty([1])?)))?;
                x.add(within)
            });
            within?;
            Ok([kept, deep])
        }).unwrap();
        for outcome in outcomes {
            let error = outcome.expect_err("a variable of another tape must fail").to_string();
            assert!(["recompute", "another tape"].iter().all(|tell| error.contains(tell)), "{error}");
        }
    }

    /// A generator made inside the closure would draw other numbers in the second run.
    fn closure_with_its_own_generator(device: &Device) {
        let Fixture { mut arena, weights, generator, .. } = Fixture::new(device);
        let outcome = arena.step(|step| {
            let tape = Tape::new(step, &weights);
            let x = tape.input(step.upload(&[1.0], [1])?);
            tape.recompute(x, move |tape, x| generator.draws(tape.step()).map(|_| x)).map(drop)
        });
        let error = outcome.expect_err("drawing outside the tape must fail").to_string();
        assert!(["draws", "recomputed", "Tape::with_generator"].iter().all(|tell| error.contains(tell)), "{error}");
    }

    /// Dropout without a generator is refused in training and changes nothing in evaluation, inside
    /// a closure and outside.
    fn dropout_needs_a_generator(device: &Device) {
        let Fixture { mut arena, weights, generator, .. } = Fixture::new(device);
        arena.step(|step| {
            let x = step.upload(&[1.0; 8], [8])?.save();
            let tape = Tape::new(step, &weights);
            for outcome in [tape.dropout(&tape.input(x), 0.5), tape.recompute(tape.input(x), |tape, x| tape.dropout(&x, 0.5))] {
                let error = outcome.expect_err("a tape without a generator must fail").to_string();
                let tells = ["dropout", "Tape::with_generator", "TrainState::with_dropout", "Tape::evaluating"];
                assert!(tells.iter().all(|tell| error.contains(tell)), "{error}");
            }
            let tape = Tape::new(step, &weights).with_generator(&generator).evaluating();
            let y = tape.recompute(tape.input(x), |tape, x| {
                assert!(tape.is_evaluating());
                tape.dropout(&x, 0.5)
            })?;
            assert_eq!(step.read(y.value())?, [1.0; 8]);
            assert!(tape.dropout(&y, 1.0).is_err(), "an evaluation checks the probability too");
            Ok(())
        }).unwrap();
        assert_eq!(generator.read().unwrap(), (1, 0), "an evaluation draws no random numbers");
    }
}
