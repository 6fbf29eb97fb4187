//! Full arenas with a pool: the limits, the time at which memory is freed, and growth.
//!
//! Every driver call is counted, so the tests check by numbers that a step makes no system call, or
//! that all memory was freed.

use crate::support::{like, on_each_device};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::memory::{ArenaBuilder, Growth, Overflow};
use stepscope::report::Cause;
use stepscope::tensor::ScratchStep;
use stepscope::{Arena, Capacity, Device, EagerStep, Error, Result, Step, ops};

const MIB: usize = 1 << 20;
/// The arena of most tests, and the elements of tensors: one that it holds, one that it does not,
/// and a large one.
const CAPACITY_BYTES: usize = 1024;
const SMALL: usize = 64;
const LARGE: usize = 1024;
const HUGE: usize = MIB;

/// Opens a device of this kind that counts its calls.
fn counted(device: &Device) -> (Device, FaultPlan) {
    let plan = FaultPlan::new();
    let counted = like(device).layer(plan.clone()).open().unwrap();
    (counted, plan)
}

fn pool(cap_bytes: usize, prime_bytes: usize) -> Overflow {
    Overflow::Pool { cap_bytes, prime_bytes, deadline: Duration::from_secs(10) }
}

fn arena(device: &Device, overflow: Overflow) -> ArenaBuilder {
    Arena::builder(device).capacity(Capacity::Bytes(CAPACITY_BYTES)).overflow(overflow).reserve_bytes(0)
}

fn make(step: &Step<'_>, elements: usize) -> Result<()> {
    step.empty::<f32>([elements]).map(drop)
}

/// Runs a step that makes tensors of these sizes.
fn step(arena: &mut Arena, elements: &[usize]) -> Result<()> {
    arena.step(|step| elements.iter().try_for_each(|&elements| make(step, elements)))
}

/// Returns the numbers of calls that allocated from the pool and that freed to it.
fn pool_calls(plan: &FaultPlan) -> (u64, u64) {
    (plan.count(Call::PoolAllocate), plan.count(Call::PoolFree))
}

on_each_device! {
    also late;

    fn pool_cap_is_enforced(device: &Device) {
        let mut arena = arena(device, pool(2 * 4 * LARGE, 0)).build().unwrap();
        step(&mut arena, &[LARGE, LARGE]).unwrap();
        let error = arena
            .step(|step| {
                [LARGE, SMALL, LARGE].iter().try_for_each(|&elements| make(step, elements))?;
                let error = make(step, 320).unwrap_err();
                // A tensor that fits the arena does not use the pool.
                make(step, SMALL)?;
                Err::<(), _>(error)
            })
            .unwrap_err();
        let text = error.to_string();
        let Error::ArenaFull { requested_bytes, used_bytes, capacity_bytes, allocations, cause, report, .. } = error else {
            panic!("{text}");
        };
        assert_eq!((requested_bytes, used_bytes, capacity_bytes, allocations), (1280, 256, 1024, 3));
        assert_eq!(cause, Cause::RequestLargerThanArena);
        assert_eq!((report.overflow.live_blocks, report.overflow.refusals), (2, 1));
        for number in ["1280 bytes", "256 of 1024 bytes", "3 tensors", "cap is 8192 bytes, 8192 of them in use"] {
            assert!(text.contains(number), "`{number}` is missing: {text}");
        }
        let overflow = arena.report().overflow;
        assert_eq!((overflow.allocations, overflow.bytes, overflow.peak_bytes), (4, 16384, 8192));
        assert_eq!((overflow.live_blocks, overflow.refusals, overflow.timeouts), (0, 1, 0));
        assert!(overflow.waited_ms > 0.0);
        step(&mut arena, &[LARGE, LARGE]).unwrap();
    }

    fn full_arena_without_pool_refuses(device: &Device) {
        let mut arena = arena(device, Overflow::Refuse).build().unwrap();
        let error = step(&mut arena, &[SMALL, LARGE]).unwrap_err();
        assert!(error.to_string().contains("4096 bytes at "), "{error}");
        assert!(matches!(error, Error::ArenaFull { cause: Cause::RequestLargerThanArena, .. }), "{error}");
        let overflow = arena.report().overflow;
        assert_eq!((overflow.allocations, overflow.live_blocks), (0, 0));
        arena.trim().unwrap();
    }

    fn prime_above_cap_is_refused(device: &Device) {
        let (device, plan) = counted(device);
        let error = arena(&device, pool(4096, 4097)).build().unwrap_err();
        assert!(matches!(error, Error::Misuse { op: "overflow", .. }), "{error}");
        assert!(error.to_string().contains("4097 bytes of 4096"), "{error}");
        assert_eq!((plan.count(Call::CreatePool), plan.count(Call::PoolAllocate)), (0, 0));
        assert_eq!(plan.count(Call::Allocate), plan.count(Call::Free));
    }

    /// The pool has the memory already, so neither the system nor the admission check is called.
    fn primed_overflow_makes_no_system_calls(device: &Device) {
        let (device, plan) = counted(device);
        let mut arena = arena(&device, pool(MIB, 2 * 4 * LARGE)).build().unwrap();
        assert_eq!(pool_calls(&plan), (1, 1), "building the arena allocates the prime and frees it");
        let asked = plan.count(Call::FreeBytes);
        for _ in 0..3 {
            step(&mut arena, &[LARGE, LARGE]).unwrap();
        }
        assert_eq!(plan.count(Call::FreeBytes), asked);
        step(&mut arena, &[LARGE, LARGE, LARGE]).unwrap();
        assert_eq!(plan.count(Call::FreeBytes), asked + 1, "growing beyond the prime asks for free memory");
        step(&mut arena, &[LARGE, LARGE, LARGE]).unwrap();
        assert_eq!(plan.count(Call::FreeBytes), asked + 1, "a step like the one before does not ask again");
        assert_eq!(pool_calls(&plan), (13, 13));
    }

    fn trim_frees_pool_memory(device: &Device) {
        let (device, plan) = counted(device);
        let mut arena = arena(&device, pool(MIB, 4 * LARGE)).build().unwrap();
        let asked = plan.count(Call::FreeBytes);
        step(&mut arena, &[LARGE]).unwrap();
        arena.trim().unwrap();
        assert_eq!((plan.count(Call::TrimPool), plan.count(Call::FreeBytes)), (1, asked));
        step(&mut arena, &[LARGE]).unwrap();
        assert_eq!(plan.count(Call::FreeBytes), asked + 1, "an empty pool does not ask again");
        assert_eq!(arena.report().overflow.live_blocks, 0);
    }

    fn blocks_are_freed_with_their_scope(device: &Device) {
        let (device, plan) = counted(device);
        let mut arena = arena(&device, pool(MIB, 0)).build().unwrap();
        arena
            .step(|step| {
                make(step, LARGE)?;
                step.scratch(|inner: &mut ScratchStep<'_, '_>| {
                    make(inner, LARGE)?;
                    inner.scratch(|innermost| make(innermost, LARGE))?;
                    assert_eq!(pool_calls(&plan), (3, 1));
                    Ok(())
                })?;
                assert_eq!(pool_calls(&plan), (3, 2));
                Ok(())
            })
            .unwrap();
        assert_eq!(pool_calls(&plan), (3, 3));
        assert_eq!(arena.report().overflow.peak_bytes, 3 * 4 * LARGE as u64);
    }

    fn errors_and_panics_free_blocks(device: &Device) {
        let (device, plan) = counted(device);
        let mut arena = arena(&device, pool(MIB, 0)).build().unwrap();
        let run = |step: &mut EagerStep<'_>, inner_fails: bool, panics: bool| -> Result<()> {
            make(step, LARGE)?;
            let scratch = step.scratch(|inner| {
                make(inner, LARGE)?;
                if inner_fails { make(inner, HUGE) } else { Ok(()) }
            });
            assert_eq!(scratch.is_err(), inner_fails);
            if panics {
                resume_unwind(Box::new("planted"));
            }
            scratch
        };
        for (round, (inner_fails, panics)) in [(false, false), (true, false), (false, true), (true, true)].into_iter().enumerate() {
            let outcome = catch_unwind(AssertUnwindSafe(|| arena.step(|step| run(step, inner_fails, panics))));
            match outcome {
                Ok(outcome) => assert_eq!(outcome.is_err(), inner_fails),
                Err(panic) => assert!(panics && panic.is::<&str>()),
            }
            let taken = 2 * (round as u64 + 1);
            assert_eq!(pool_calls(&plan), (taken, taken), "round {round}");
            let report = arena.report();
            assert_eq!((report.overflow.live_blocks, report.offset_bytes), (0, 0), "round {round}");
            assert_eq!(report.resets, round as u64 + 1);
        }
    }

    /// Tensors of arena and pool are equivalent and do not overlap.
    fn overflowed_tensors_hold_their_values(device: &Device) {
        let mut arena = arena(device, pool(MIB, 4096)).build().unwrap();
        for round in 0..3 {
            let read = arena
                .step(|step| {
                    let mut tensors = Vec::new();
                    for at in 0..24 {
                        let elements = [SMALL, 300, LARGE][at % 3];
                        tensors.push((ops::fill(step, [elements], at as f32 + 100.0 * round as f32)?, elements));
                    }
                    tensors.iter().map(|(tensor, elements)| Ok((step.read(tensor)?, *elements))).collect::<Result<Vec<_>>>()
                })
                .unwrap();
            for (at, (read, elements)) in read.into_iter().enumerate() {
                assert_eq!(read, vec![at as f32 + 100.0 * round as f32; elements]);
            }
        }
    }

    fn all_memory_is_freed(device: &Device) {
        let (device, plan) = counted(device);
        let growth = Growth::AtBoundary { max_bytes: 4 * MIB };
        let mut arena = arena(&device, pool(8 * MIB, 0)).growth(growth).build().unwrap();
        step(&mut arena, &[SMALL, LARGE, HUGE]).unwrap();
        step(&mut arena, &[SMALL, LARGE, HUGE]).unwrap();
        assert_eq!(arena.report().growths, 1);
        drop(arena);
        assert_eq!((plan.count(Call::Allocate), plan.count(Call::Free)), (2, 2));
        assert_eq!((plan.count(Call::CreatePool), plan.count(Call::DestroyPool)), (1, 1));
        let (taken, returned) = pool_calls(&plan);
        assert_eq!(taken, returned);
    }

    fn failed_priming_frees_everything(device: &Device) {
        let (device, plan) = counted(device);
        let plan = plan.on(Call::PoolAllocate, 1, Fault::Fail);
        let error = arena(&device, pool(MIB, 4096)).build().unwrap_err();
        assert!(matches!(error, Error::Driver { fatal: false, .. }), "{error}");
        assert_eq!((plan.count(Call::Allocate), plan.count(Call::Free)), (1, 1));
        assert_eq!((plan.count(Call::CreatePool), plan.count(Call::DestroyPool)), (1, 1));
        arena(&device, pool(MIB, 4096)).build().unwrap();
    }

    /// A block that the driver fails to free is counted, and the others are still freed.
    fn leaked_blocks_are_counted(device: &Device) {
        let (device, plan) = counted(device);
        let plan = plan.on(Call::PoolFree, 1, Fault::Fail);
        let mut arena = arena(&device, pool(MIB, 0)).build().unwrap();
        let error = step(&mut arena, &[LARGE, LARGE, LARGE]).unwrap_err();
        assert!(matches!(error, Error::Driver { fatal: false, .. }), "{error}");
        assert_eq!(pool_calls(&plan), (3, 3));
        assert_eq!(arena.report().overflow.live_blocks, 1);
        step(&mut arena, &[LARGE]).unwrap();
        assert_eq!(arena.report().overflow.live_blocks, 1, "a leaked block still counts as live");
    }

    /// An impossible size is refused with every number, and nothing is allocated.
    fn impossible_sizes_are_refused_with_numbers(device: &Device) {
        let (device, plan) = counted(device);
        let absurd = 1usize << 50;
        let reports = |text: &str, bytes: usize| {
            assert!(text.contains(&format!("({bytes} bytes) of device memory refused")), "{text}");
            assert!(text.contains(" available: the driver reports ") && text.contains("the reserve is"), "{text}");
        };
        let builder = || Arena::builder(&device).overflow(pool(absurd, 0));
        let error = builder().capacity(Capacity::Bytes(absurd)).build().unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error}");
        reports(&error.to_string(), absurd);
        assert_eq!(plan.count(Call::Allocate), 0);

        let error = builder().capacity(Capacity::mib(1)).overflow(pool(absurd, absurd)).build().unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error}");
        reports(&error.to_string(), absurd);
        assert_eq!(plan.count(Call::CreatePool), plan.count(Call::DestroyPool));

        let mut arena = builder().capacity(Capacity::mib(1)).build().unwrap();
        let error = step(&mut arena, &[absurd / 4]).unwrap_err();
        assert!(matches!(error, Error::ArenaFull { .. }), "{error}");
        reports(&error.to_string(), absurd);
        assert_eq!((plan.count(Call::PoolAllocate), arena.report().overflow.refusals), (0, 1));

        // All memory is reserved for other processes.
        let error = Arena::builder(&device).capacity(Capacity::mib(1)).reserve_bytes(u64::MAX).build().unwrap_err();
        reports(&error.to_string(), MIB);
    }

    fn arena_grows_after_first_step(device: &Device) {
        let growth = Growth::AtBoundary { max_bytes: 64 * MIB };
        let mut arena = arena(device, pool(64 * MIB, 0)).growth(growth).build().unwrap();
        let sizes = [SMALL, HUGE, LARGE];
        step(&mut arena, &sizes).unwrap();
        let first = arena.report();
        assert_eq!((first.growths, first.capacity_bytes), (1, 6 * MIB), "the arena grows to just over 4 MiB, rounded up to units of 2 MiB");
        assert_eq!(first.overflow.allocations, 2);
        for _ in 0..3 {
            step(&mut arena, &sizes).unwrap();
        }
        let report = arena.report();
        assert_eq!(report.overflow.allocations, 2, "only the first step overflows");
        assert_eq!((report.growths, report.capacity_bytes), (1, 6 * MIB));
        assert_eq!(report.high_water_bytes, 256 + 4 * MIB + 4096);
    }

    /// A refused request counts as needed: the same step fits next time.
    fn arena_grows_after_refusal(device: &Device) {
        let growth = Growth::AtBoundary { max_bytes: 64 * MIB };
        let mut arena = arena(device, Overflow::Refuse).growth(growth).build().unwrap();
        let error = step(&mut arena, &[SMALL, HUGE]).unwrap_err();
        assert!(matches!(error, Error::ArenaFull { .. }), "{error}");
        step(&mut arena, &[SMALL, HUGE]).unwrap();
        let report = arena.report();
        assert_eq!((report.growths, report.capacity_bytes), (1, 6 * MIB));
        assert_eq!((report.overflow.allocations, report.high_water_bytes), (0, 256 + 4 * MIB));
    }

    /// The order of requests does not matter: the use of pool and arena is added.
    fn high_water_includes_the_pool(device: &Device) {
        let need = 4 * MIB + 4 * MIB / 2;
        let growth = Growth::AtBoundary { max_bytes: need };
        let sizes = [[HUGE, HUGE / 2], [HUGE / 2, HUGE]];
        for sizes in sizes {
            let builder = Arena::builder(device).capacity(Capacity::mib(3)).reserve_bytes(0);
            let mut arena = builder.overflow(pool(64 * MIB, 0)).growth(growth).build().unwrap();
            step(&mut arena, &sizes).unwrap();
            let first = arena.report();
            assert_eq!((first.high_water_bytes, first.capacity_bytes), (need, need), "{sizes:?}");
            assert_eq!(first.overflow.peak_bytes, 4 * MIB as u64);
            step(&mut arena, &sizes).unwrap();
            assert_eq!(arena.report().overflow.allocations, 1, "only the first step overflows: {sizes:?}");
        }
    }

    fn growth_stops_at_its_maximum(device: &Device) {
        let growth = Growth::AtBoundary { max_bytes: 5 * MIB };
        let mut arena = arena(device, pool(64 * MIB, 0)).growth(growth).build().unwrap();
        for round in 1..=3 {
            step(&mut arena, &[HUGE, HUGE]).unwrap();
            let report = arena.report();
            assert_eq!((report.capacity_bytes, report.growths), (5 * MIB, 1));
            assert_eq!(report.overflow.allocations, round + 1, "from the second step on, one of two tensors fits");
        }
    }

    fn sufficient_arena_does_not_grow(device: &Device) {
        let (device, plan) = counted(device);
        let growth = Growth::AtBoundary { max_bytes: 64 * MIB };
        let builder = Arena::builder(&device).capacity(Capacity::mib(3)).overflow(pool(MIB, 0)).growth(growth);
        let mut arena = builder.build().unwrap();
        for sizes in [&[HUGE / 2 + HUGE / 8][..], &[HUGE / 4, HUGE / 2], &[]] {
            step(&mut arena, sizes).unwrap();
            let report = arena.report();
            assert_eq!((report.capacity_bytes, report.growths), (3 * MIB, 0), "{} bytes needed", report.high_water_bytes);
        }
        assert_eq!(plan.count(Call::Allocate), 1);
    }

    /// A step's own error takes precedence over the failed growth after it.
    fn failed_growth_hides_no_error(device: &Device) {
        for (call, number) in [(Call::Allocate, 2), (Call::FreeBytes, 3), (Call::TrimPool, 1)] {
            let (device, plan) = counted(device);
            let growth = Growth::AtBoundary { max_bytes: 64 * MIB };
            let mut arena = arena(&device, pool(64 * MIB, 0)).growth(growth).build().unwrap();
            let plan = plan.on(call, number, Fault::Fail);
            let failure = Error::Misuse { op: "test", expected: "this".into(), got: "it".into() };
            let outcome: Result<()> = arena.step(|step| {
                make(step, HUGE)?;
                Err(failure.clone())
            });
            assert_eq!(outcome, Err(failure), "{call:?}");
            assert!(plan.count(call) >= number, "{call:?}: {} calls", plan.count(call));
            // The next step grows the arena, unless only the trim was missing.
            step(&mut arena, &[HUGE]).unwrap();
            step(&mut arena, &[HUGE]).unwrap();
            let report = arena.report();
            assert_eq!((report.growths, report.overflow.live_blocks), (1, 0), "{call:?}");
        }
    }
}
