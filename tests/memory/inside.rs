//! Who may do what inside what.
//!
//! Invariant: whatever is done inside a step, a scratch, a recording or a rehearsal, from its own thread or another, is either
//! right, with the numbers to show it, or a typed error; what is dropped there goes back; and the outer one goes on. What the
//! compiler refuses stands in `tests/ui`.

#![forbid(unsafe_code)]

use crate::support::on_each_device;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use stepscope::faults::{Call, Fault, FaultPlan};
use stepscope::same_bits::cases;
use stepscope::{
    Arena, Buffer, Capacity, Captured, Device, DeviceKind, Error, Inputs, Output, Overflow, Record, Result, Source,
    Step, Target, ops,
};

const VALUES: [f32; 4] = [1.0, 2.0, 3.0, 4.0];
const DOUBLED: [f32; 4] = [2.0, 4.0, 6.0, 8.0];

/// What is done inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
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

const DEEDS: [Deed; 15] = [
    Deed::Step,
    Deed::Scratch,
    Deed::Measure,
    Deed::Capture,
    Deed::Replay,
    Deed::MakeBuffer,
    Deed::ReadBuffer,
    Deed::WriteBuffer,
    Deed::BuildArena,
    Deed::SelfTest,
    Deed::Trim,
    Deed::Synchronize,
    Deed::DropBuffer,
    Deed::DropArena,
    Deed::DropCapture,
];

/// Where it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Step,
    Scratch,
    Measure,
    /// A recording of the same device, and another thread meanwhile.
    Capture,
    ThreadOfCapture,
    ThreadOfStep,
    StepOfOtherDevice,
    CaptureOfOtherDevice,
}

const PLACES: [Place; 8] = [
    Place::Step,
    Place::Scratch,
    Place::Measure,
    Place::Capture,
    Place::ThreadOfCapture,
    Place::ThreadOfStep,
    Place::StepOfOtherDevice,
    Place::CaptureOfOtherDevice,
];

/// The only thing that is refused: a thread that records reaches the device through its step alone. To rehearse and to drop
/// need no device.
fn is_refused(place: Place, deed: Deed) -> bool {
    let needs_none = matches!(deed, Deed::Measure | Deed::DropBuffer | Deed::DropArena | Deed::DropCapture);
    place == Place::Capture && !needs_none
}

/// All that a deed may need, besides the arena in which it is done.
struct World {
    deed: Deed,
    device: Device,
    buffer: Option<Buffer<f32>>,
    arena: Option<Arena>,
    spare: Option<Arena>,
    captured: Option<Captured<(), Output>>,
    /// What became of each time that it was done: a recording does it twice.
    outcomes: Vec<Result<()>>,
}

const DOUBLE: Record<(), Output> = |step, (), slots| Ok(slots.output(&ops::scale(step, &slots.input(0)?, 2.0)?));

fn inputs() -> Inputs<'static> {
    Inputs::new().with(&VALUES, [4]).unwrap()
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).overflow(Overflow::pool(1 << 20)).build().unwrap()
}

impl World {
    fn new(device: &Device, deed: Deed) -> Self {
        let mut other = arena(device);
        let captured = other.capture((), &inputs(), DOUBLE).unwrap();
        Self {
            deed,
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
        match self.deed {
            Deed::Step => assert_eq!(double(other.as_mut().unwrap())?, DOUBLED),
            Deed::Scratch => other.as_mut().unwrap().step(|step| {
                let x = step.upload(&VALUES, [4])?;
                let mut y = step.empty([4])?;
                step.scratch(|inner| {
                    let twice = ops::scale(inner, &inner.lend(&x), 2.0)?;
                    ops::copy_into(inner, &twice, &mut inner.lend_mut(&mut y))
                })?;
                assert_eq!(step.read(&y)?, DOUBLED);
                Ok(())
            })?,
            Deed::Measure => {
                let measured = other.as_ref().unwrap().measure(|step| step.empty::<f32>([1000]).map(drop))?;
                assert_eq!(measured.high_water_bytes(), 4096);
            }
            Deed::Capture => {
                let mut made = spare.as_mut().unwrap().capture((), &inputs(), DOUBLE)?;
                let replay = made.replay(&inputs())?;
                assert_eq!(replay.read(*replay.outputs())?, DOUBLED);
            }
            Deed::Replay => {
                let replay = captured.as_mut().unwrap().replay(&inputs())?;
                assert_eq!(replay.read(*replay.outputs())?, DOUBLED);
            }
            Deed::MakeBuffer => assert_eq!(Buffer::from_slice(device, &VALUES)?.read()?, VALUES),
            Deed::ReadBuffer => assert_eq!(buffer.as_ref().unwrap().read()?, VALUES),
            Deed::WriteBuffer => {
                let buffer = buffer.as_mut().unwrap();
                buffer.write(0, &DOUBLED)?;
                assert_eq!(buffer.read()?, DOUBLED);
                buffer.write(0, &VALUES)?;
            }
            Deed::BuildArena => {
                assert_eq!(double(&mut Arena::builder(device).capacity(Capacity::mib(1)).build()?)?, DOUBLED)
            }
            Deed::SelfTest => assert_eq!(device.self_test()?.kernels, cases().len()),
            Deed::Trim => other.as_mut().unwrap().trim()?,
            Deed::Synchronize => device.synchronize(device.deadline())?,
            Deed::DropBuffer => drop(buffer.take()),
            Deed::DropArena => drop((spare.take(), other.take())),
            Deed::DropCapture => drop(captured.take()),
        }
        Ok(())
    }
}

/// The tensor that stands when the deed is done is as it was.
fn stands<'s>(step: &stepscope::Eager<'s>, x: &impl Source<'s, f32>) {
    assert_eq!(step.read(x).unwrap(), VALUES);
}

/// A captured step that does the deed, on its own thread or on another.
fn recorded(step: &mut Step<'_>, world: &mut World, threaded: bool) -> Result<()> {
    let before = ops::fill(step, [4], 1.0)?;
    if threaded {
        std::thread::scope(|scope| scope.spawn(|| world.act()).join().unwrap());
    } else {
        world.act();
    }
    ops::scale(step, &before, 2.0).map(drop)
}

/// Does the deed there. Returns the world, in which what became of it is told.
fn inside(place: Place, device: &Device, world: World) -> World {
    let other_device;
    let mut outer = match place {
        Place::StepOfOtherDevice | Place::CaptureOfOtherDevice => {
            other_device = Device::open(DeviceKind::Emulated).unwrap();
            arena(&other_device)
        }
        _ => arena(device),
    };
    let mut world = world;
    match place {
        Place::Step | Place::StepOfOtherDevice => outer
            .step(|step| {
                let x = step.upload(&VALUES, [4])?;
                world.act();
                stands(step, &x);
                Ok(())
            })
            .unwrap(),
        Place::Scratch => outer
            .step(|step| {
                let x = step.upload(&VALUES, [4])?;
                step.scratch(|_| {
                    world.act();
                    Ok(())
                })?;
                stands(step, &x);
                Ok(())
            })
            .unwrap(),
        Place::ThreadOfStep => outer
            .step(|step| {
                let x = step.upload(&VALUES, [4])?;
                std::thread::scope(|scope| scope.spawn(|| world.act()).join().unwrap());
                stands(step, &x);
                Ok(())
            })
            .unwrap(),
        Place::Measure => {
            let measured = outer.measure(|step| {
                step.empty::<f32>([1000])?;
                world.act();
                Ok(())
            });
            assert_eq!(measured.unwrap().high_water_bytes(), 4096);
        }
        Place::Capture | Place::CaptureOfOtherDevice => {
            let mut captured =
                outer.capture(&mut world, &Inputs::new(), |step, world, _| recorded(step, world, false)).unwrap();
            captured.replay(&Inputs::new()).unwrap();
        }
        Place::ThreadOfCapture => {
            let mut captured =
                outer.capture(&mut world, &Inputs::new(), |step, world, _| recorded(step, world, true)).unwrap();
            captured.replay(&Inputs::new()).unwrap();
        }
    }
    world
}

on_each_device! {
    fn the_whole_table(device: &Device) {
        for place in PLACES {
            for deed in DEEDS {
                let plan = FaultPlan::new();
                let device = Device::builder(device.description().kind).faults(plan.clone()).open().unwrap();
                let world = inside(place, &device, World::new(&device, deed));
                assert!(!world.outcomes.is_empty(), "{deed:?} in {place:?} was never done");
                for outcome in &world.outcomes {
                    match outcome {
                        Ok(()) => assert!(!is_refused(place, deed), "{deed:?} in {place:?} was not refused"),
                        Err(Error::Misuse { op: "capture", .. }) => assert!(is_refused(place, deed), "{deed:?} in {place:?}: {outcome:?}"),
                        Err(error) => panic!("{deed:?} in {place:?}: {error}"),
                    }
                }
                assert_eq!(device.lost(), None);
                drop((world, device));
                let ended = [(Call::Allocate, Call::Free), (Call::CreatePool, Call::DestroyPool), (Call::Instantiate, Call::DestroyGraph)];
                for (made, ended) in ended {
                    assert_eq!(plan.count(made), plan.count(ended), "{deed:?} in {place:?}: {made:?} without {ended:?}");
                }
            }
        }
    }

    /// A recording of another device within one of this does not end this one's.
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
        drop(arena(device).capture(&mut state, &Inputs::new(), record).unwrap());
        assert_eq!(state.seen.len(), 4);
        assert!(state.seen.iter().all(|seen| matches!(seen, Err(Error::Misuse { op: "capture", .. }))), "{:?}", state.seen);
        assert_eq!(state.buffer.read().unwrap(), VALUES);
    }

    /// What is made on a rehearsal's device is of the rehearsal, and of no use to anything else, then or later.
    fn what_a_rehearsal_makes_stays_there(device: &Device) {
        let mut real = arena(device);
        let outer = arena(device);
        let mut kept = None;
        outer
            .measure(|step| {
                let rehearsal = step.device().clone();
                let buffer = Buffer::<f32>::zeros(&rehearsal, 4)?;
                // Within the rehearsal it serves.
                assert_eq!(step.read(&ops::copy(step, &step.lend(&buffer, [4])?)?)?, [0.0; 4]);
                let error = real.step(|real| real.lend(&buffer, [4]).map(drop)).unwrap_err();
                assert!(matches!(error, Error::Misuse { op: "lend", .. }), "{error}");
                // Its tensors are refused by a real launch, and by another rehearsal's.
                let mut made = step.empty::<f32>([4])?;
                for refused in [real.step(|real| real.launch(filled(&mut made))), outer_refuses(&outer, &mut made)] {
                    assert!(matches!(refused, Err(Error::Contract { .. })), "{refused:?}");
                }
                // An arena there runs steps that compute nothing, and its captures are refused.
                let mut there = Arena::builder(&rehearsal).capacity(Capacity::mib(1)).build()?;
                assert_eq!(there.step(|step| step.read(&ops::fill(step, [4], 1.0)?))?, [0.0; 4]);
                let error = there.capture((), &inputs(), DOUBLE).map(drop).unwrap_err();
                assert!(matches!(error, Error::Driver { .. }), "{error}");
                kept = Some((rehearsal, buffer, there));
                Ok(())
            })
            .unwrap();
        let (rehearsal, mut buffer, mut there) = kept.unwrap();
        let over = |what: &str, outcome: Result<()>| {
            assert!(matches!(outcome, Err(Error::Misuse { op: "measure", .. })), "{what}: {outcome:?}");
        };
        over("a new buffer", Buffer::<f32>::zeros(&rehearsal, 4).map(drop));
        over("a read", buffer.read().map(drop));
        over("a write", buffer.write(0, &VALUES));
        over("a new arena", Arena::builder(&rehearsal).capacity(Capacity::mib(1)).build().map(drop));
        over("a step", there.step(|_| Ok(())));
        over("a capture", there.capture((), &inputs(), DOUBLE).map(drop));
        over("a wait", rehearsal.synchronize(rehearsal.deadline()));
        drop((buffer, there, rehearsal));
        assert_eq!(real.step(|step| step.read(&step.upload(&VALUES, [4])?)).unwrap(), VALUES);
    }

    /// A rehearsal takes its parents' memory: buffers, and tensors of a step that runs around it.
    fn a_rehearsal_takes_what_is_its_parents(device: &Device) {
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
                stands(step, &x);
                Ok(())
            })
            .unwrap();
    }

    /// A buffer that has left a capture's state is still written by the graph: each replay as a whole, and never under a step that
    /// was lent it.
    fn a_buffer_that_left_the_state_is_not_written_under_a_step(device: &Device) {
        const LEN: usize = if cfg!(miri) { 1 << 6 } else { 1 << 16 };
        let record: Record<Option<Buffer<f32>>, ()> = |step, state, slots| {
            let Some(buffer) = state else { return Ok(()) };
            let x = ops::scale_by(step, &ops::fill(step, [LEN], 1.0)?, &slots.input::<f32>(0)?)?;
            ops::copy_into(step, &x, &mut step.lend_mut(buffer, [LEN])?)
        };
        let (one, two) = (Inputs::new().with(&[1.0f32], [1]).unwrap(), Inputs::new().with(&[2.0f32], [1]).unwrap());
        let mut captured = arena(device).capture(Some(Buffer::zeros(device, LEN).unwrap()), &one, record).unwrap();
        captured.replay(&one).unwrap();
        let buffer = Arc::new(Mutex::new(captured.state_mut().take().unwrap()));
        let mut reader = arena(device);

        // On the step's own thread it would wait for itself.
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

        // Another thread's replay waits: what a step is lent stays as it is.
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
                        assert!(first.iter().all(|x| *x == first[0]), "a read saw half of a replay");
                        std::thread::yield_now();
                        assert!(step.read(&lent)? == first, "a replay came under a step");
                        Ok(())
                    })
                    .unwrap();
                let read = buffer.lock().unwrap().read().unwrap();
                assert!(read.iter().all(|x| *x == read[0]), "a read saw half of a replay");
            }
            stop.store(true, Ordering::Relaxed);
            assert!(replays.join().unwrap() > 0);
        });
    }

    /// A look at the device that fails when something is dropped keeps it, and the next drop ends it.
    fn what_could_not_be_ended_is_ended_later(device: &Device) {
        let plan = FaultPlan::new();
        let device = Device::builder(device.description().kind).faults(plan.clone()).open().unwrap();
        let mut first = arena(&device);
        let captured = first.capture((), &inputs(), DOUBLE).unwrap();
        let _ = plan.clone().on(Call::Poll, plan.count(Call::Poll) + 1, Fault::Fail);
        drop(captured);
        assert_eq!((plan.count(Call::DestroyGraph), device.lost()), (0, None));
        drop(first);
        assert_eq!((plan.count(Call::DestroyGraph), plan.count(Call::Free)), (1, plan.count(Call::Allocate)));
    }
}

/// A kernel that fills a tensor, for a launch in any step.
fn filled<'a, 's: 'a>(tensor: &'a mut impl Target<'s, f32>) -> kernels::fill::fill<'a, f32> {
    let length = tensor.shape().elements();
    kernels::fill::fill { out: tensor.out(), length, value: 1.0 }
}

fn outer_refuses<'s>(outer: &Arena, made: &mut impl Target<'s, f32>) -> Result<()> {
    outer.measure(|step| step.launch(filled(made))).map(drop)
}
