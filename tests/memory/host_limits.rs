//! Impossible sizes, and threads that end: a typed error with the numbers, and no abort.
//!
//! Invariant: it also holds in builds without overflow checks.

#![forbid(unsafe_code)]

use std::any::Any;
use std::cell::RefCell;
use std::time::Duration;
use stepscope::capture::{Captured, Output, Record};
use stepscope::memory::{Growth, Overflow, PageLocked};
use stepscope::nn::Linear;
use stepscope::ops;
use stepscope::parameters::Initializer;
use stepscope::prelude::*;

fn open() -> Device {
    crate::support::open(DeviceKind::Emulated)
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

/// Checks the error for a missing number of bytes, with the available memory.
#[track_caller]
fn no_memory<R>(result: Result<R>, requested: usize) {
    match result.err().expect("the request must fail: no machine has that much memory") {
        Error::DeviceMemory { requested_bytes, free_bytes, .. } => {
            assert_eq!(requested_bytes, requested);
            assert!(free_bytes > 0);
        }
        Error::Refused(refusal) => assert_eq!(refusal.requested_bytes, requested as u64),
        other => panic!("{other}"),
    }
}

#[test]
fn staging_of_any_size() {
    const MAX: usize = usize::MAX;
    let open = |slots, bytes| Device::builder(DeviceKind::Emulated).staging(slots, bytes).open();
    for (slots, bytes) in
        [(2, MAX), (1, MAX), (MAX, 1), (MAX, MAX), (1, MAX - 254), (1 << 40, 1 << 40), (1 << 32, 1 << 32)]
    {
        let error = open(slots, bytes).unwrap_err();
        let words = format!("staging needs {slots} slots of {bytes} bytes");
        assert!(matches!(&error, Error::DeviceMemory { reason, .. } if reason.contains(&words)), "{error}");
    }
    no_memory(open(1 << 20, 1 << 40), 1 << 60);
    for (slots, bytes) in [(0, 0), (1, 1), (3, 4097), (64, 1 << 12)] {
        let buffer = Buffer::from_slice(&open(slots, bytes).unwrap(), &[1.5f32; 5000]).unwrap();
        assert_eq!(buffer.read().unwrap(), [1.5; 5000], "{slots} of {bytes}");
    }
}

#[test]
fn capacities_of_any_size() {
    let device = open();
    let build = |capacity| Arena::builder(&device).capacity(capacity).build();
    // 2^44 MiB and 2^34 GiB are 2^64 bytes.
    for capacity in
        [Capacity::mib(1 << 44), Capacity::mib((1 << 44) + 1), Capacity::gib(1 << 34), Capacity::gib((1 << 34) + 1)]
    {
        no_memory(build(capacity), usize::MAX);
    }
    no_memory(build(Capacity::gib(1 << 30)), 1 << 60);
    let primed = |prime_bytes| Overflow::Pool { cap_bytes: usize::MAX, prime_bytes, deadline: Duration::MAX };
    no_memory(Arena::builder(&device).capacity(Capacity::mib(1)).overflow(primed(usize::MAX)).build(), usize::MAX);
    // A cap allocates nothing: a step takes the memory that it needs.
    let growth = Growth::AtBoundary { max_bytes: usize::MAX };
    let builder = Arena::builder(&device).capacity(Capacity::Bytes(256)).overflow(primed(0)).growth(growth);
    let mut arena = builder.step_deadline(Duration::MAX).build().unwrap();
    for _ in 0..2 {
        assert_eq!(arena.step(|step| step.read(&ops::fill(step, [1000], 1.0)?)).unwrap(), [1.0; 1000]);
        let huge = arena.step(|step| step.empty::<f32>([1 << 60]).map(drop)).unwrap_err();
        assert!(matches!(huge, Error::ArenaFull { requested_bytes: 0x4000_0000_0000_0000, .. }), "{huge}");
    }
    let patient = Device::builder(DeviceKind::Emulated).deadline(Duration::MAX).open().unwrap();
    assert_eq!(Buffer::<u32>::zeros(&patient, 3).unwrap().read().unwrap(), [0; 3]);
}

#[test]
fn buffers_of_any_size() {
    let device = open();
    for len in [0, usize::MAX, usize::MAX / 4 + 1, usize::MAX / 4] {
        let errors = [Buffer::<f32>::zeros(&device, len).err(), PageLocked::<f32>::zeros(&device, len).err()];
        for error in errors {
            let error = error.expect("the request must fail: no machine has that much memory");
            assert!(matches!(error, Error::Misuse { .. } | Error::Refused(_)), "{len}: {error}");
        }
    }
    no_memory(Buffer::<bf16>::zeros(&device, 1 << 55), 1 << 56);
    no_memory(PageLocked::<u32>::zeros(&device, 1 << 55), 1 << 57);
    let buffer = Buffer::<bf16>::zeros(&device, 5).unwrap();
    for (start, len) in [(0, 6), (5, 1), (6, 0), (1, usize::MAX), (usize::MAX, 1), (usize::MAX, usize::MAX)] {
        let error = buffer.read_range(start, len).unwrap_err().to_string();
        assert!(error.contains("a range inside 0..5") && error.contains(&len.to_string()), "{error}");
    }
    assert_eq!(buffer.read_range(5, 0).unwrap(), []);
}

/// Memory of a dry run costs nothing, so only a read takes memory of the host.
#[test]
fn oversized_reads_are_refused() {
    const LEN: usize = 1 << 40;
    let device = open();
    let arena = arena(&device);
    let measured = arena.measure(|step| {
        let buffer = Buffer::<f32>::zeros(step.device(), LEN)?;
        no_memory(buffer.read(), 4 * LEN);
        no_memory(buffer.read_range(1, LEN - 1), 4 * (LEN - 1));
        assert_eq!(buffer.read_range(LEN - 2, 2)?, [0.0; 2]);
        no_memory(step.read(&step.lend(&buffer, [LEN])?), 4 * LEN);
        no_memory(step.read(&step.empty::<bf16>([LEN])?), 2 * LEN);
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [LEN], Initializer::ZERO);
        let weights = Parameters::new(step.device(), &spec.build()?, 1)?;
        no_memory(weights.read(w), 4 * LEN);
        no_memory(Gradients::zeros(&weights)?.read(w), 4 * LEN);
        Ok(())
    });
    assert_eq!(measured.unwrap().high_water_bytes(), 2 * LEN);
    // Addresses do not wrap either: a buffer that no kernel fills takes some, too.
    let measured = arena.measure(|step| {
        let mut errors = (0..5).map(|_| Buffer::<u32>::zeros(step.device(), 1 << 60));
        assert!(matches!(errors.next(), Some(Err(Error::Contract { .. }))));
        errors.nth(3).expect("five results").map(drop)
    });
    no_memory(measured, 1 << 62);
}

thread_local! {
    /// Values that a thread keeps until it ends, and drops last.
    static KEPT: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

struct Classifier(Linear);

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.0.forward(tape, &tape.input(batch.input::<f32>(0)?))
    }
}

/// Runs `make` on a thread that keeps the results in its local storage, created before the
/// library's own.
fn keep_until_the_thread_ends(make: impl FnOnce(&Device) -> Result<Vec<Box<dyn Any>>> + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| KEPT.with_borrow_mut(|kept| kept.extend(make(&open()).unwrap())));
        thread.join().unwrap();
    });
}

#[test]
fn thread_ends_with_live_objects() {
    keep_until_the_thread_ends(|device| {
        let mut arena = arena(device);
        arena.step(|step| step.read(&ops::fill(step, [2], 1.0)?))?;
        let captured =
            arena.capture((), &HostInputs::new(), |step, (), slots| Ok(slots.output(&ops::fill(step, [2], 1.0)?)))?;
        let mut spec = ParameterSpec::builder();
        let model = Classifier(Linear::new(spec.at("head"), 2, 2));
        let state = TrainState::new(device, model, &spec.build()?, 7, AdamW::default())?;
        let adamw = Optimizer::new(&state.parameters, AdamW::default())?;
        let buffer = Buffer::<f32>::zeros(device, 3)?;
        Ok(vec![
            Box::new(captured),
            Box::new(arena),
            Box::new(state),
            Box::new(adamw),
            Box::new(buffer),
            Box::new(PageLocked::<f32>::zeros(device, 3)?),
            Box::new(device.clone()),
        ])
    });
}

#[test]
fn thread_ends_with_a_trainer() {
    struct Points;
    impl HostBatch for Points {
        fn len(&self) -> usize {
            2
        }

        fn inputs(&self) -> Result<HostInputs<'_>> {
            HostInputs::new().with(&[1.0f32, 0.0, 0.0, 1.0], [2, 2])?.with(&[0u32, 1], [2])
        }
    }
    keep_until_the_thread_ends(|device| {
        // Safe code gets a `Trainer<'static>` from a leaked arena.
        let arena = Box::leak(Box::new(arena(device)));
        let mut spec = ParameterSpec::builder();
        let model = Classifier(Linear::new(spec.at("head"), 2, 2));
        let state = TrainState::new(device, model, &spec.build()?, 7, AdamW::default())?;
        let mut trainer = Trainer::captured(arena, state, &Points)?;
        trainer.update(&[Points])?;
        Ok(vec![Box::new(trainer)])
    });
}

/// Objects that are being dropped may continue to work, except for a capture.
#[test]
fn thread_trains_while_it_ends() {
    static OUTCOMES: std::sync::Mutex<Vec<String>> = std::sync::Mutex::new(Vec::new());
    struct Works(Arena, Captured<Buffer<f32>, Output>);
    impl Drop for Works {
        fn drop(&mut self) {
            let Self(arena, captured) = self;
            let replayed = captured.repeat().and_then(|replay| replay.read(*replay.outputs()));
            let buffer = Buffer::from_slice(arena.device(), &[3.0f32]).unwrap();
            let stepped = arena.step(|step| step.read(&ops::scale(step, &step.lend(&buffer, [1])?, 2.0)?));
            let recorded = arena.capture((), &HostInputs::new(), |_, (), _| Ok(())).map(drop);
            OUTCOMES.lock().unwrap().extend([format!("{replayed:?}"), format!("{stepped:?}"), format!("{recorded:?}")]);
        }
    }
    keep_until_the_thread_ends(|device| {
        let mut arena = arena(device);
        // Creates the library's own local storage, which is therefore dropped first.
        let record: Record<Buffer<f32>, Output> =
            |step, buffer, slots| Ok(slots.output(&ops::scale(step, &step.lend(buffer, [2])?, 2.0)?));
        let captured = arena.capture(Buffer::from_slice(device, &[1.0, 2.0])?, &HostInputs::new(), record)?;
        Ok(vec![Box::new(Works(arena, captured))])
    });
    let outcomes = OUTCOMES.lock().unwrap();
    assert_eq!(outcomes[..2], ["Ok([2.0, 4.0])", "Ok([6.0])"]);
    assert!(outcomes[2] == "Ok(())" || outcomes[2].contains("a thread that keeps running"), "{}", outcomes[2]);
}
