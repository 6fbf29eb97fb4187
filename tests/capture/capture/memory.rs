//! The memory of captured steps: a graph owns its bytes, and no step, growth or drop takes them.

use super::*;

on_each_device! {
    also late;

    /// Fills all memory that a step can get between replays, and checks that the replays' results
    /// do not change.
    fn steps_preserve_graph_memory(device: &Device) {
        let mut memory = arena(device);
        let capacity = memory.report().capacity_bytes;
        let batches = batches();
        let mut captured = memory.capture(Model::new(device), &inputs(&batches[0]), train).unwrap();
        let owned = captured.report().bytes_owned;
        let report = memory.report();
        assert_eq!((report.capacity_bytes, report.captured_bytes), (capacity - owned, owned));
        let mut undisturbed = arena(device).capture(Model::new(device), &inputs(&batches[0]), train).unwrap();
        for batch in &batches {
            for captured in [&mut captured, &mut undisturbed] {
                captured.state_mut().adamw.advance().unwrap().leave_to_replay();
            }
            let want = loss(&mut undisturbed, batch);
            let replay = captured.replay(&inputs(batch)).unwrap();
            // Overwrites everything that a step can allocate, before the replay's results are read.
            memory.step(|step| ops::fill(step, [(capacity - owned) / 4], f32::NAN).map(drop)).unwrap();
            assert_eq!(replay.read_scalar(*replay.outputs()).unwrap().to_bits(), want.to_bits());
        }
        drop(captured);
        memory.step(|step| ops::fill(step, [capacity / 4], 1.0).map(drop)).expect("the step can use the whole arena again");
        assert_eq!(memory.report().captured_bytes, 0);
    }

    /// Checks that the error's `bytes` is exact: a capture succeeds with that much, and fails with
    /// less without a driver call.
    fn small_arena_fails_before_driver_calls(device: &Device) {
        let kind = device.description().kind;
        let plan = FaultPlan::new();
        let device = Device::builder(kind).layer(plan.clone()).open().unwrap();
        let batches = batches();
        let mut small = Arena::builder(&device).capacity(Capacity::Bytes(1024)).build().unwrap();
        let mut model = Model::new(&device);
        let before = Call::ALL.map(|call| plan.count(call));
        let error = small.capture(&mut model, &inputs(&batches[0]), train_borrowed).unwrap_err();
        assert_eq!(Call::ALL.map(|call| plan.count(call)), before, "the driver was called: {:?}", Call::ALL);
        let Error::CaptureNeeds { bytes, available, overflow_bytes } = error else { panic!("{error}") };
        assert_eq!((available, overflow_bytes), (1024, 0));
        assert!(error.to_string().contains(&bytes.to_string()), "{error}");
        works(&mut small, 100);
        let mut memory = Arena::builder(&device).capacity(Capacity::Bytes(bytes - 256)).build().unwrap();
        let error = memory.capture(&mut model, &inputs(&batches[0]), train_borrowed).unwrap_err();
        assert_eq!(error, Error::CaptureNeeds { bytes, available: bytes - 256, overflow_bytes: 0 });
        // Overflow does not help a capture, and the error states this.
        let overflow = Overflow::pool(1 << 20);
        let mut memory = Arena::builder(&device).capacity(Capacity::Bytes(1024)).overflow(overflow).build().unwrap();
        let error = memory.capture(&mut model, &inputs(&batches[0]), train_borrowed).unwrap_err();
        assert_eq!(error, Error::CaptureNeeds { bytes, available: 1024, overflow_bytes: 1 << 20 });
        assert!(error.to_string().contains("captured steps cannot use the overflow"), "{error}");
        let mut memory = Arena::builder(&device).capacity(Capacity::Bytes(bytes)).build().unwrap();
        memory.capture(&mut model, &inputs(&batches[0]), train_borrowed).unwrap();
        works(&mut memory, 100);
    }

    fn peak_bytes_include_captured_steps(device: &Device) {
        let mut memory = arena(device);
        let fills = |memory: &mut Arena, bytes: usize| {
            memory.step(|step| ops::fill(step, [bytes / 4], 1.0).map(drop)).unwrap();
            memory.report()
        };
        assert_eq!(fills(&mut memory, 4096).peak_bytes, 4096);
        let captured = memory.capture((), &HostInputs::new(), |step, (), slots| {
            Ok(slots.output(&ops::fill(step, [256], 1.0)?))
        }).unwrap();
        assert_eq!((memory.report().captured_bytes, memory.report().peak_bytes), (1024, 4096), "the peak must not add bytes that were never in use together");
        let filled = fills(&mut memory, 8192);
        assert_eq!((filled.high_water_bytes, filled.peak_bytes), (8192, 9216));
        drop(captured);
        let after = fills(&mut memory, 256);
        assert_eq!((after.captured_bytes, after.high_water_bytes, after.peak_bytes), (0, 8192, 9216));
    }

    /// A step that takes other memory in its second run must not leave its part of the arena.
    fn growing_step_is_refused(device: &Device) {
        let mut memory = arena(device);
        let mut runs = 0;
        let error = memory.capture(&mut runs, &HostInputs::new(), |step, runs, _| {
            **runs += 1;
            ops::fill(step, [64 * **runs], 1.0).map(drop)
        }).unwrap_err();
        let got = "another tensor 0, of 512 bytes";
        assert!(matches!(&error, Error::Misuse { op: "capture", got: found, .. } if found == got), "{error}");
        works(&mut memory, 100);
    }

    /// In checked mode a recording has a place for the guard of each tensor of the first run.
    fn more_checked_tensors_are_refused(device: &Device) {
        let mut memory = Arena::builder(device).capacity(Capacity::mib(1)).checked(true).build().unwrap();
        let mut runs = 0;
        let error = memory.capture(&mut runs, &HostInputs::new(), |step, runs, _| {
            **runs += 1;
            ops::fill(step, [4096], 1.0)?;
            (0..**runs).try_for_each(|_| step.scratch(|inner| ops::fill(inner, [4], 1.0).map(drop)))
        }).unwrap_err();
        let second = "3 in the second run";
        assert!(matches!(&error, Error::Misuse { op: "capture", got, .. } if got == second), "{error}");
        works(&mut memory, 100);
    }

    /// Checks that a new shape is recorded only if it fits the memory that the capture owns.
    fn new_shapes_fit_owned_memory(device: &Device) {
        let mut memory = arena(device);
        let batches = batches();
        let (long, short) = (&batches[0], &batches[2]);
        let mut captured = memory.capture(Model::new(device), &inputs(short), train).unwrap();
        let owned = captured.report().bytes_owned;
        let mut random = Random::new(5);
        let longer = (random.normals(64 * COLS), random.belows(64, CLASSES as u32));
        let error = captured.replay(&inputs(&longer)).unwrap_err();
        assert!(matches!(error, Error::CaptureNeeds { bytes, available, .. } if available == owned && bytes > owned), "{error}");
        captured.state_mut().adamw.advance().unwrap().leave_to_replay();
        loss(&mut captured, short);
        drop(captured);

        let mut captured = memory.capture(Model::new(device), &inputs(long), train).unwrap().keep(1);
        for (batch, recordings) in [(long, 1), (long, 1), (short, 2), (long, 3), (long, 3)] {
            captured.state_mut().adamw.advance().unwrap().leave_to_replay();
            loss(&mut captured, batch);
            assert_eq!(captured.report().recordings, recordings, "with `keep(1)`, a change of shape is recorded again");
        }
        assert_eq!(captured.report().replays, 5);
    }

    fn freed_output_keeps_its_values(device: &Device) {
        fn run<'s>(step: &mut Step<'s>, _: &mut (), slots: &CaptureInputs<'s>) -> Result<[Output; 2]> {
            let x: Saved<'s> = slots.input(0)?;
            let [doubled, lost] = [ops::scale(step, &x, 2.0)?, ops::scale(step, &x, 3.0)?];
            let output = slots.output(&doubled);
            step.free(doubled);
            step.free(lost);
            // The first result takes the place of `lost`; the second gets a place of its own.
            let four = ops::scale(step, &x, 4.0)?;
            ops::scale(step, &x, 5.0)?;
            Ok([output, slots.output(&four)])
        }
        let mut arena = arena(device);
        let inputs = [1.0f32; 100];
        let inputs = HostInputs::new().with(&inputs, [100]).unwrap();
        let mut captured = arena.capture((), &inputs, run).unwrap();
        assert_eq!(captured.report().bytes_owned, 4 * 512, "{:?}", captured.report());
        let replay = captured.replay(&inputs).unwrap();
        let [doubled, four] = replay.outputs().map(|output| replay.read(output).unwrap());
        assert_eq!([doubled, four], [vec![2.0; 100], vec![4.0; 100]]);
    }

    /// The addresses in a graph stay reserved even after their owner is dropped.
    fn graph_keeps_its_buffers_allocated(device: &Device) {
        let plan = FaultPlan::new();
        let device = like(device).layer(plan.clone()).open().unwrap();
        let mut memory = arena(&device);
        let buffer = Buffer::from_slice(&device, &[3.0f32; 1000]).unwrap();
        let mut captured = memory.capture(buffer, &HostInputs::new(), |step, buffer, slots| {
            Ok(slots.output(&ops::scale(step, &step.lend(buffer, [1000])?, 2.0)?))
        }).unwrap();
        let freed = plan.count(Call::Free);
        drop(std::mem::replace(captured.state_mut(), Buffer::from_slice(&device, &[0.0f32]).unwrap()));
        drop(memory);
        assert_eq!(plan.count(Call::Free), freed, "the buffer and the arena are freed before the graph");
        let replay = captured.replay(&HostInputs::new()).unwrap();
        assert_eq!(replay.read::<f32>(*replay.outputs()).unwrap(), [6.0; 1000]);
        drop(captured);
        assert_eq!(plan.count(Call::Free), plan.count(Call::Allocate), "every allocation is freed");
    }

    /// A buffer that the closure drops is freed after the recording has ended.
    fn closure_drops_are_freed_later(device: &Device) {
        let plan = FaultPlan::new();
        let device = like(device).layer(plan.clone()).open().unwrap();
        let mut memory = arena(&device);
        let buffer = Buffer::from_slice(&device, &[3.0f32; 10]).unwrap();
        let freed = plan.count(Call::Free);
        let captured = memory.capture(Some(buffer), &HostInputs::new(), |_, buffer, _| {
            drop(buffer.take());
            Ok(())
        }).unwrap();
        assert_eq!(plan.count(Call::Free), freed + 1);
        drop((captured, memory));
        assert_eq!(plan.count(Call::Free), plan.count(Call::Allocate));
    }

    fn arena_growth_preserves_graph_memory(device: &Device) {
        let mut memory = Arena::builder(device).capacity(Capacity::Bytes(64 << 10))
            .growth(Growth::AtBoundary { max_bytes: 8 << 20 }).build().unwrap();
        let batches = batches();
        let mut captured = memory.capture(Model::new(device), &inputs(&batches[0]), train).unwrap();
        let mut undisturbed = arena(device).capture(Model::new(device), &inputs(&batches[0]), train).unwrap();
        for batch in &batches {
            for captured in [&mut captured, &mut undisturbed] {
                captured.state_mut().adamw.advance().unwrap().leave_to_replay();
            }
            let want = loss(&mut undisturbed, batch);
            assert_eq!(loss(&mut captured, batch).to_bits(), want.to_bits());
            // The first of these does not fit, and the arena grows at the end of the step.
            let _ = memory.step(|step| ops::fill(step, [100_000], f32::NAN).map(drop));
        }
        let report = memory.report();
        assert_eq!((report.growths, report.captured_bytes), (1, 0), "captured steps own none of the new memory");
    }
}
