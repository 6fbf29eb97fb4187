//! A step continues while the driver processes its launches, and learns of a failed one before it
//! can rely on it.
//!
//! The emulator's launches behave like a GPU's here: their results arrive later.
//!
//! Invariant of each test: launches after a failed one in the same step do not run, and the step
//! returns that failure.

use crate::support::{Random, on_each_device};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::parameters::Initializer;
use stepscope::{
    AdamW, Arena, Buffer, Capacity, Device, Error, Gradients, Optimizer, ParameterSpec, Parameters, Result, Step, ops,
};

/// More launches than may wait on the driver thread before it reports.
const MANY: usize = 50;

/// Opens another device of the same kind, with its plan and an arena.
fn open(same: &Device, deadline: Duration) -> (Device, FaultPlan, Arena) {
    let kind = same.description().kind;
    let plan = FaultPlan::new().queued_launches();
    let device = Device::builder(kind).deadline(deadline).layer(plan.clone()).open().unwrap();
    let arena = Arena::builder(&device).capacity(Capacity::mib(1)).reserve_bytes(0).build().unwrap();
    (device, plan, arena)
}

/// Makes the launch of this number, counted from 1 and from now on, meet `fault`.
fn plant(plan: &FaultPlan, number: u64, fault: Fault) {
    let _ = plan.clone().on(Call::Launch, plan.count(Call::Launch) + number, fault);
}

/// Adds one to a number this many times, by a launch each.
fn count_up(step: &Step<'_>, number: &mut Buffer<f32>, times: usize) -> Result<()> {
    let one = ops::fill(step, [1], 1.0)?;
    let mut number = step.lend_mut(number, [1])?;
    (0..times).try_for_each(|_| ops::add_assign(step, &mut number, &one))
}

fn is_planted(error: &Error) -> bool {
    let text = error.to_string();
    matches!(error, Error::Driver { .. }) && text.contains("planted on Launch") && text.contains("at kernel `")
}

on_each_device! {
    fn step_end_reports_failed_launch(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut number = Buffer::<f32>::zeros(&device, 1).unwrap();
        // The first launch fills; the fourth would make three.
        for (failing, reached) in [(4, 2.0), (1, 2.0), (MANY as u64, 2.0 + MANY as f32 - 2.0)] {
            plant(&plan, failing, Fault::Fail);
            let error = arena.step(|step| count_up(step, &mut number, MANY)).unwrap_err();
            assert!(is_planted(&error), "{error}");
            assert_eq!(number.read().unwrap(), [reached]);
        }
        // The next step is not affected.
        arena.step(|step| count_up(step, &mut number, 1)).unwrap();
        assert_eq!(number.read().unwrap(), [MANY as f32 + 1.0]);
    }

    /// The step's end reports the panic, and no launch after it reaches the driver.
    fn panicking_launch_loses_the_device(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut number = Buffer::<f32>::zeros(&device, 1).unwrap();
        plant(&plan, 4, Fault::Panics);
        let reached = plan.count(Call::Launch) + 4;
        let start = Instant::now();
        let error = arena.step(|step| count_up(step, &mut number, MANY)).unwrap_err();
        assert_eq!(error, Error::Panic { call: "launch", message: "planted on Launch".into() });
        assert_eq!(plan.count(Call::Launch), reached);
        let error = arena.step(|step| count_up(step, &mut number, 1)).unwrap_err();
        assert!(matches!(&error, Error::DeviceLost { cause } if cause.contains("planted on Launch")), "{error}");
        drop((number, arena, device));
        assert_eq!((plan.count(Call::Launch), plan.count(Call::Free)), (reached, 0));
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    /// Exactly the launches before the failed one have run, whichever fails, and whatever is read
    /// meanwhile.
    fn only_launches_before_failure_run(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut number = Buffer::<f32>::zeros(&device, 1).unwrap();
        let mut expected = 0.0;
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let (times, failing) = (1 + random.below(60), 1 + random.below(80));
            let looks = 1 + random.below(30) as usize;
            plant(&plan, u64::from(failing), Fault::Fail);
            let outcome = arena.step(|step| {
                let one = ops::fill(step, [1], 1.0)?;
                let mut number = step.lend_mut(&mut number, [1])?;
                for made in 0..times as usize {
                    ops::add_assign(step, &mut number, &one)?;
                    if made % looks == 0 {
                        assert_eq!(step.read_scalar(&one)?, 1.0);
                    }
                }
                Ok(())
            });
            // The first launch fills.
            let fails = failing <= times + 1;
            assert_eq!(outcome.is_err(), fails, "{seed}: {outcome:?}");
            assert!(outcome.err().is_none_or(|error| is_planted(&error)), "{seed}");
            expected += if fails { failing.saturating_sub(2) } else { times } as f32;
            assert_eq!(number.read().unwrap(), [expected], "{seed}");
            if !fails {
                // The fault is left over, and met here.
                let left = failing - times - 1;
                let outcome = arena.step(|step| count_up(step, &mut Buffer::zeros(&device, 1)?, left as usize));
                assert!(is_planted(&outcome.unwrap_err()), "{seed}");
            }
        }
    }

    fn reads_fail_after_failed_launch(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut number = Buffer::<f32>::zeros(&device, 1).unwrap();
        plant(&plan, 3, Fault::Fail);
        let outcome = arena.step(|step| {
            count_up(step, &mut number, 5)?;
            let copy = ops::scale(step, &step.lend(&number, [1])?, 1.0)?;
            let read = step.read_scalar(&copy);
            assert!(is_planted(read.as_ref().unwrap_err()), "{read:?}");
            // The step's end reports the failure even if the closure ignores it.
            Ok(())
        });
        assert!(is_planted(&outcome.unwrap_err()));
        assert_eq!(number.read().unwrap(), [1.0]);
    }

    fn failed_update_can_be_repeated(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut spec = ParameterSpec::builder();
        spec.add("weight", [64], Initializer::Constant(1.0));
        let spec = spec.build().unwrap();
        let mut parameters = Parameters::new(&device, &spec, 0).unwrap();
        let gradients = Gradients::zeros(&parameters).unwrap();
        let mut optimizer = Optimizer::new(&parameters, AdamW { weight_decay: 0.1, ..AdamW::default() }).unwrap();
        let before = parameters.read_flat().unwrap();
        let ticket = optimizer.advance().unwrap();
        plant(&plan, 1, Fault::Fail);
        let outcome = arena.step(|step| {
            let applied = optimizer.apply(ticket, step, &mut parameters, &gradients);
            assert!(is_planted(&applied.clone().unwrap_err()));
            applied
        });
        assert!(is_planted(&outcome.unwrap_err()));
        assert_eq!((optimizer.updates(), parameters.read_flat().unwrap()), (0, before.clone()));
        // The same update is prepared again.
        let ticket = optimizer.advance().unwrap();
        assert_eq!(ticket.number(), Some(1));
        arena.step(|step| optimizer.apply(ticket, step, &mut parameters, &gradients)).unwrap();
        assert_eq!(optimizer.updates(), 1);
        assert_ne!(parameters.read_flat().unwrap(), before);
    }

    fn hung_launch_costs_one_deadline(device: &Device) {
        let deadline = Duration::from_millis(500);
        let (device, plan, mut arena) = open(device, deadline);
        let mut number = Buffer::<f32>::zeros(&device, 1).unwrap();
        let launched = plan.count(Call::Launch);
        plant(&plan, 3, Fault::Never);
        let start = Instant::now();
        let error = arena.step(|step| count_up(step, &mut number, 1_000_000)).unwrap_err();
        let waited = start.elapsed();
        assert!(matches!(error, Error::Timeout { call: "launch", .. }), "{error}");
        assert!(waited >= deadline && waited < 20 * deadline, "{waited:?}");
        assert_eq!(plan.count(Call::Launch), launched + 3, "no launch may follow the failed one");
        assert!(matches!(number.read().unwrap_err(), Error::DeviceLost { .. }));
    }

    fn spoiling_launch_loses_device(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut number = Buffer::<f32>::zeros(&device, 1).unwrap();
        plant(&plan, 2, Fault::Spoil);
        let error = arena.step(|step| count_up(step, &mut number, 5)).unwrap_err();
        assert!(is_planted(&error), "{error}");
        assert!(device.lost().is_some_and(|cause| cause.contains("planted on Launch")));
        assert!(matches!(arena.step(|_| Ok(())).unwrap_err(), Error::DeviceLost { .. }));
    }

    fn panicked_step_does_not_affect_next(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut number = Buffer::<f32>::zeros(&device, 1).unwrap();
        plant(&plan, 1, Fault::Delay(Duration::from_millis(50)));
        plant(&plan, 2, Fault::Fail);
        let panicking = || {
            arena.step(|step| -> Result<()> {
                count_up(step, &mut number, 3)?;
                panic!("planted")
            })
        };
        catch_unwind(AssertUnwindSafe(panicking)).unwrap_err();
        arena.step(|step| count_up(step, &mut number, 2)).unwrap();
        assert_eq!(number.read().unwrap(), [2.0]);
    }

    /// Two arenas of one device, on two threads.
    fn failure_reaches_only_its_step(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut failing = Buffer::<f32>::zeros(&device, 1).unwrap();
        plant(&plan, 1, Fault::Fail);
        std::thread::scope(|scope| {
            let error = arena.step(|step| {
                // The failing launch belongs to this step; the other thread's step runs within it.
                let filled = count_up(step, &mut failing, 3);
                let other = || {
                    let mut number = Buffer::<f32>::zeros(&device, 1).unwrap();
                    let mut arena =
                        Arena::builder(&device).capacity(Capacity::mib(1)).reserve_bytes(0).build().unwrap();
                    arena.step(|step| count_up(step, &mut number, MANY)).unwrap();
                    number.read().unwrap()
                };
                assert_eq!(scope.spawn(other).join().unwrap(), [MANY as f32]);
                filled
            });
            assert!(is_planted(&error.unwrap_err()));
        });
        assert_eq!(failing.read().unwrap(), [0.0]);
    }

    /// Misuse is reported before the driver is called.
    fn misuse_is_reported_at_once(device: &Device) {
        let (device, _, mut arena) = open(device, Duration::from_secs(60));
        let mut number = Buffer::<f32>::zeros(&device, 1).unwrap();
        arena
            .step(|step| {
                let mut number = step.lend_mut(&mut number, [1])?;
                let two = step.upload(&[1.0f32; 2], [2])?;
                assert!(matches!(ops::add_assign(step, &mut number, &two), Err(Error::Misuse { .. })));
                let one = step.upload(&[1.0f32], [1])?;
                ops::add_assign(step, &mut number, &one)
            })
            .unwrap();
        assert_eq!(number.read().unwrap(), [1.0]);
    }
}
