//! Every operation inside every kind of scope.
//!
//! Invariant: an operation inside a step, a scratch, a recording or a dry run gives the right
//! numbers or a typed error, on its own thread or another. Objects dropped there are freed, and the
//! outer scope continues. `tests/ui` has the programs that the compiler refuses.

#![forbid(unsafe_code)]

use crate::support::on_each_device;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use stepscope::capture::{Captured, Output, Record};
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::memory::Overflow;
use stepscope::tensor::{Source, Target};
use stepscope::{Arena, Buffer, Capacity, Device, DeviceKind, Error, HostInputs, Result, Step, ops};

const VALUES: [f32; 4] = [1.0, 2.0, 3.0, 4.0];
const DOUBLED: [f32; 4] = [2.0, 4.0, 6.0, 8.0];

/// The operation to run inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Step,
    Scratch,
    Measure,
    Capture,
    Replay,
    MakeBuffer,
    ReadBuffer,
    WriteBuffer,
    BuildArena,
    SelfTest,
    Trim,
    Synchronize,
    DropBuffer,
    DropArena,
    DropCapture,
}

const OPERATIONS: [Operation; 15] = [
    Operation::Step,
    Operation::Scratch,
    Operation::Measure,
    Operation::Capture,
    Operation::Replay,
    Operation::MakeBuffer,
    Operation::ReadBuffer,
    Operation::WriteBuffer,
    Operation::BuildArena,
    Operation::SelfTest,
    Operation::Trim,
    Operation::Synchronize,
    Operation::DropBuffer,
    Operation::DropArena,
    Operation::DropCapture,
];

/// The scope in which it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Context {
    Step,
    Scratch,
    Measure,
    /// A recording of the same device, and another thread during it.
    Capture,
    ThreadOfCapture,
    ThreadOfStep,
    StepOfOtherDevice,
    CaptureOfOtherDevice,
}

const CONTEXTS: [Context; 8] = [
    Context::Step,
    Context::Scratch,
    Context::Measure,
    Context::Capture,
    Context::ThreadOfCapture,
    Context::ThreadOfStep,
    Context::StepOfOtherDevice,
    Context::CaptureOfOtherDevice,
];

/// True if the operation is refused: a recording thread may reach the device only through its step.
/// Dry runs and drops need no device.
fn is_refused(context: Context, operation: Operation) -> bool {
    let needs_none =
        matches!(operation, Operation::Measure | Operation::DropBuffer | Operation::DropArena | Operation::DropCapture);
    context == Context::Capture && !needs_none
}

/// All that an operation may need, apart from the arena in which it runs.
struct Objects {
    operation: Operation,
    device: Device,
    buffer: Option<Buffer<f32>>,
    arena: Option<Arena>,
    spare: Option<Arena>,
    captured: Option<Captured<(), Output>>,
    /// The result of each run: a recording runs it twice.
    outcomes: Vec<Result<()>>,
}

const DOUBLE: Record<(), Output> = |step, (), slots| Ok(slots.output(&ops::scale(step, &slots.input(0)?, 2.0)?));

fn inputs() -> HostInputs<'static> {
    HostInputs::new().with(&VALUES, [4]).unwrap()
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).overflow(Overflow::pool(1 << 20)).build().unwrap()
}

impl Objects {
    fn new(device: &Device, operation: Operation) -> Self {
        let mut other = arena(device);
        let captured = other.capture((), &inputs(), DOUBLE).unwrap();
        Self {
            operation,
            device: device.clone(),
            buffer: Some(Buffer::from_slice(device, &VALUES).unwrap()),
            arena: Some(other),
            spare: Some(arena(device)),
            captured: Some(captured),
            outcomes: Vec::new(),
        }
    }

    fn act(&mut self) {
        let outcome = self.attempt();
        self.outcomes.push(outcome);
    }

    fn attempt(&mut self) -> Result<()> {
        let Self { device, buffer, arena: other, spare, captured, .. } = self;
        let double =
            |other: &mut Arena| other.step(|step| step.read(&ops::scale(step, &step.upload(&VALUES, [4])?, 2.0)?));
        match self.operation {
            Operation::Step => assert_eq!(double(other.as_mut().unwrap())?, DOUBLED),
            Operation::Scratch => other.as_mut().unwrap().step(|step| {
                let x = step.upload(&VALUES, [4])?;
                let mut y = step.empty([4])?;
                step.scratch(|inner| {
                    let twice = ops::scale(inner, &inner.lend(&x), 2.0)?;
                    ops::copy_into(inner, &twice, &mut inner.lend_mut(&mut y))
                })?;
                assert_eq!(step.read(&y)?, DOUBLED);
                Ok(())
            })?,
            Operation::Measure => {
                let measured = other.as_ref().unwrap().measure(|step| step.empty::<f32>([1000]).map(drop))?;
                assert_eq!(measured.high_water_bytes(), 4096);
            }
            Operation::Capture => {
                let mut made = spare.as_mut().unwrap().capture((), &inputs(), DOUBLE)?;
                let replay = made.replay(&inputs())?;
                assert_eq!(replay.read(*replay.outputs())?, DOUBLED);
            }
            Operation::Replay => {
                let replay = captured.as_mut().unwrap().replay(&inputs())?;
                assert_eq!(replay.read(*replay.outputs())?, DOUBLED);
            }
            Operation::MakeBuffer => assert_eq!(Buffer::from_slice(device, &VALUES)?.read()?, VALUES),
            Operation::ReadBuffer => assert_eq!(buffer.as_ref().unwrap().read()?, VALUES),
            Operation::WriteBuffer => {
                let buffer = buffer.as_mut().unwrap();
                buffer.write(0, &DOUBLED)?;
                assert_eq!(buffer.read()?, DOUBLED);
                buffer.write(0, &VALUES)?;
            }
            Operation::BuildArena => {
                assert_eq!(double(&mut Arena::builder(device).capacity(Capacity::mib(1)).build()?)?, DOUBLED)
            }
            Operation::SelfTest => assert!(device.self_test()?.kernels > 0),
            Operation::Trim => other.as_mut().unwrap().trim()?,
            Operation::Synchronize => device.synchronize(device.deadline())?,
            Operation::DropBuffer => drop(buffer.take()),
            Operation::DropArena => drop((spare.take(), other.take())),
            Operation::DropCapture => drop(captured.take()),
        }
        Ok(())
    }
}

/// Checks that the tensor that existed before is unchanged.
fn is_unchanged<'s>(step: &stepscope::EagerStep<'s>, x: &impl Source<'s, f32>) {
    assert_eq!(step.read(x).unwrap(), VALUES);
}

/// Runs a captured step that performs the operation, on its own thread or on another.
fn recorded(step: &mut Step<'_>, objects: &mut Objects, threaded: bool) -> Result<()> {
    let before = ops::fill(step, [4], 1.0)?;
    if threaded {
        std::thread::scope(|scope| scope.spawn(|| objects.act()).join().unwrap());
    } else {
        objects.act();
    }
    ops::scale(step, &before, 2.0).map(drop)
}

/// Performs the operation in that scope. Returns the world with its results.
fn inside(context: Context, device: &Device, objects: Objects) -> Objects {
    let other_device;
    let mut outer = match context {
        Context::StepOfOtherDevice | Context::CaptureOfOtherDevice => {
            other_device = Device::open(DeviceKind::Emulated).unwrap();
            arena(&other_device)
        }
        _ => arena(device),
    };
    let mut objects = objects;
    match context {
        Context::Step | Context::StepOfOtherDevice => outer
            .step(|step| {
                let x = step.upload(&VALUES, [4])?;
                objects.act();
                is_unchanged(step, &x);
                Ok(())
            })
            .unwrap(),
        Context::Scratch => outer
            .step(|step| {
                let x = step.upload(&VALUES, [4])?;
                step.scratch(|_| {
                    objects.act();
                    Ok(())
                })?;
                is_unchanged(step, &x);
                Ok(())
            })
            .unwrap(),
        Context::ThreadOfStep => outer
            .step(|step| {
                let x = step.upload(&VALUES, [4])?;
                std::thread::scope(|scope| scope.spawn(|| objects.act()).join().unwrap());
                is_unchanged(step, &x);
                Ok(())
            })
            .unwrap(),
        Context::Measure => {
            let measured = outer.measure(|step| {
                step.empty::<f32>([1000])?;
                objects.act();
                Ok(())
            });
            assert_eq!(measured.unwrap().high_water_bytes(), 4096);
        }
        Context::Capture | Context::CaptureOfOtherDevice => {
            let mut captured = outer
                .capture(&mut objects, &HostInputs::new(), |step, objects, _| recorded(step, objects, false))
                .unwrap();
            captured.replay(&HostInputs::new()).unwrap();
        }
        Context::ThreadOfCapture => {
            let mut captured = outer
                .capture(&mut objects, &HostInputs::new(), |step, objects, _| recorded(step, objects, true))
                .unwrap();
            captured.replay(&HostInputs::new()).unwrap();
        }
    }
    objects
}

on_each_device! {
    fn every_operation_in_every_scope(device: &Device) {
        for context in CONTEXTS {
            for operation in OPERATIONS {
                let plan = FaultPlan::new();
                let device = Device::builder(device.description().kind).layer(plan.clone()).open().unwrap();
                let objects = inside(context, &device, Objects::new(&device, operation));
                assert!(!objects.outcomes.is_empty(), "{operation:?} in {context:?} never ran");
                for outcome in &objects.outcomes {
                    match outcome {
                        Ok(()) => assert!(!is_refused(context, operation), "{operation:?} in {context:?} was not refused"),
                        Err(Error::Misuse { op: "capture", .. }) => assert!(is_refused(context, operation), "{operation:?} in {context:?}: {outcome:?}"),
                        Err(error) => panic!("{operation:?} in {context:?}: {error}"),
                    }
                }
                assert_eq!(device.lost(), None);
                drop((objects, device));
                let ended = [(Call::Allocate, Call::Free), (Call::CreatePool, Call::DestroyPool), (Call::Instantiate, Call::DestroyGraph)];
                for (made, ended) in ended {
                    assert_eq!(plan.count(made), plan.count(ended), "{operation:?} in {context:?}: {made:?} and {ended:?} are not paired");
                }
            }
        }
    }

    /// A recording of another device inside one of this device does not end this one.
    fn recordings_nest_and_are_restored(device: &Device) {
        struct Nested {
            buffer: Buffer<f32>,
            inner: Arena,
            seen: Vec<Result<Vec<f32>>>,
        }
        let other = Device::open(DeviceKind::Emulated).unwrap();
        let mut state = Nested { buffer: Buffer::from_slice(device, &VALUES).unwrap(), inner: arena(&other), seen: Vec::new() };
        let record: Record<&mut Nested, ()> = |step, state, _| {
            state.seen.push(state.buffer.read());
            state.inner.capture((), &inputs(), DOUBLE)?;
            state.seen.push(state.buffer.read());
            ops::fill(step, [4], 1.0).map(drop)
        };
        drop(arena(device).capture(&mut state, &HostInputs::new(), record).unwrap());
        assert_eq!(state.seen.len(), 4);
        assert!(state.seen.iter().all(|seen| matches!(seen, Err(Error::Misuse { op: "capture", .. }))), "{:?}", state.seen);
        assert_eq!(state.buffer.read().unwrap(), VALUES);
    }

    /// Objects made on a dry run's device belong to the dry run, and cannot be used elsewhere, then
    /// or later.
    fn dry_run_objects_stay_inside(device: &Device) {
        let mut real = arena(device);
        let outer = arena(device);
        let mut kept = None;
        outer
            .measure(|step| {
                let dry_run = step.device().clone();
                let buffer = Buffer::<f32>::zeros(&dry_run, 4)?;
                // Within the dry run it can be used.
                assert_eq!(step.read(&ops::copy(step, &step.lend(&buffer, [4])?)?)?, [0.0; 4]);
                let error = real.step(|real| real.lend(&buffer, [4]).map(drop)).unwrap_err();
                assert!(matches!(error, Error::Misuse { op: "lend", .. }), "{error}");
                // Its tensors are refused by a real launch, and by that of another dry run.
                let mut made = step.empty::<f32>([4])?;
                for refused in [real.step(|real| real.launch(filled(&mut made))), outer_refuses(&outer, &mut made)] {
                    assert!(matches!(refused, Err(Error::Contract { .. })), "{refused:?}");
                }
                // An arena there runs steps that compute nothing, and its captures are refused.
                let mut there = Arena::builder(&dry_run).capacity(Capacity::mib(1)).build()?;
                assert_eq!(there.step(|step| step.read(&ops::fill(step, [4], 1.0)?))?, [0.0; 4]);
                let error = there.capture((), &inputs(), DOUBLE).map(drop).unwrap_err();
                assert!(matches!(error, Error::Driver { .. }), "{error}");
                kept = Some((dry_run, buffer, there));
                Ok(())
            })
            .unwrap();
        let (dry_run, mut buffer, mut there) = kept.unwrap();
        let over = |what: &str, outcome: Result<()>| {
            assert!(matches!(outcome, Err(Error::Misuse { op: "measure", .. })), "{what}: {outcome:?}");
        };
        over("a new buffer", Buffer::<f32>::zeros(&dry_run, 4).map(drop));
        over("a read", buffer.read().map(drop));
        over("a write", buffer.write(0, &VALUES));
        over("a new arena", Arena::builder(&dry_run).capacity(Capacity::mib(1)).build().map(drop));
        over("a step", there.step(|_| Ok(())));
        over("a capture", there.capture((), &inputs(), DOUBLE).map(drop));
        over("a wait", dry_run.synchronize(dry_run.deadline()));
        drop((buffer, there, dry_run));
        assert_eq!(real.step(|step| step.read(&step.upload(&VALUES, [4])?)).unwrap(), VALUES);
    }

    /// A dry run accepts its parents' memory: buffers, and tensors of the step around it.
    fn dry_run_accepts_outer_memory(device: &Device) {
        let mut outer = arena(device);
        let inner = arena(device);
        let buffer = Buffer::from_slice(device, &VALUES).unwrap();
        outer
            .step(|step| {
                let mut x = step.upload(&VALUES, [4])?;
                inner.measure(|rehearsed| {
                    ops::scale(rehearsed, &rehearsed.lend(&buffer, [4])?, 2.0)?;
                    rehearsed.launch(filled(&mut x))
                })?;
                is_unchanged(step, &x);
                Ok(())
            })
            .unwrap();
    }

    /// The graph still writes a buffer that has left a capture's state: each replay writes all of
    /// it, and never while it is lent to a step.
    fn lent_buffers_block_replays(device: &Device) {
        const LEN: usize = if cfg!(miri) { 1 << 6 } else { 1 << 16 };
        let record: Record<Option<Buffer<f32>>, ()> = |step, state, slots| {
            let Some(buffer) = state else { return Ok(()) };
            let x = ops::scale_by(step, &ops::fill(step, [LEN], 1.0)?, &slots.input::<f32>(0)?)?;
            ops::copy_into(step, &x, &mut step.lend_mut(buffer, [LEN])?)
        };
        let (one, two) = (HostInputs::new().with(&[1.0f32], [1]).unwrap(), HostInputs::new().with(&[2.0f32], [1]).unwrap());
        let mut captured = arena(device).capture(Some(Buffer::zeros(device, LEN).unwrap()), &one, record).unwrap();
        captured.replay(&one).unwrap();
        let buffer = Arc::new(Mutex::new(captured.state_mut().take().unwrap()));
        let mut reader = arena(device);

        // On the step's own thread, the replay would wait for itself.
        reader
            .step(|step| {
                let buffer = buffer.lock().unwrap();
                let lent = step.lend(&buffer, [LEN])?;
                let error = captured.replay(&two).map(drop).unwrap_err();
                assert!(matches!(error, Error::Misuse { op: "replay", .. }), "{error}");
                assert_eq!(step.read(&lent)?, [1.0; LEN]);
                Ok(())
            })
            .unwrap();

        // A replay on another thread waits: memory lent to a step does not change.
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let replays = scope.spawn(|| {
                let mut count = 0;
                while !stop.load(Ordering::Relaxed) {
                    captured.replay(&one).unwrap();
                    captured.replay(&two).unwrap();
                    count += 2;
                }
                count
            });
            for _ in 0..if cfg!(miri) { 2 } else { 20 } {
                reader
                    .step(|step| {
                        let buffer = buffer.lock().unwrap();
                        let lent = step.lend(&buffer, [LEN])?;
                        let first = step.read(&lent)?;
                        assert!(first.iter().all(|x| *x == first[0]), "a read returned half of a replay's result");
                        std::thread::yield_now();
                        assert!(step.read(&lent)? == first, "a replay ran during a step");
                        Ok(())
                    })
                    .unwrap();
                let read = buffer.lock().unwrap().read().unwrap();
                assert!(read.iter().all(|x| *x == read[0]), "a read returned half of a replay's result");
            }
            stop.store(true, Ordering::Relaxed);
            assert!(replays.join().unwrap() > 0);
        });
    }

    /// An object is kept if the poll of the device fails during its drop, and the next drop frees
    /// it.
    fn failed_drops_are_retried(device: &Device) {
        let plan = FaultPlan::new();
        let device = Device::builder(device.description().kind).layer(plan.clone()).open().unwrap();
        let mut first = arena(&device);
        let captured = first.capture((), &inputs(), DOUBLE).unwrap();
        let _ = plan.clone().on(Call::Poll, plan.count(Call::Poll) + 1, Fault::Fail);
        drop(captured);
        assert_eq!((plan.count(Call::DestroyGraph), device.lost()), (0, None));
        drop(first);
        assert_eq!((plan.count(Call::DestroyGraph), plan.count(Call::Free)), (1, plan.count(Call::Allocate)));
    }
}

/// Returns a kernel that fills a tensor, for a launch in any step.
fn filled<'a, 's: 'a>(tensor: &'a mut impl Target<'s, f32>) -> kernels::fill::fill<'a, f32> {
    let length = tensor.shape().elements();
    kernels::fill::fill { out: tensor.out(), length, value: 1.0 }
}

fn outer_refuses<'s>(outer: &Arena, made: &mut impl Target<'s, f32>) -> Result<()> {
    outer.measure(|step| step.launch(filled(made))).map(drop)
}
