//! Uploads: whatever the sizes, the sources and the faults, the device holds the given bytes, or
//! there is an error.
//!
//! Every device here has a ring of small slots, so that pieces end, slots fill up and fences are
//! waited for within a few kilobytes.

mod page_locked;

use crate::support::witness::Watch;
use crate::support::{Random, bits, like, on_each_device};
use std::ops::Range;
use std::time::Duration;
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::device::DeviceBuilder;
use stepscope::parameters::Initializer;
use stepscope::upload::{NonFinite, Progress, Transfer};
use stepscope::{
    AdamW, Arena, Buffer, Capacity, Checkpoint, Device, DeviceKind, Error, Optimizer, ParameterSpec, Parameters,
    Result, ops,
};

/// The bytes of a slot, unless a test sets others.
const SLOT: usize = 4096;
/// The default bytes of a slot on a GPU.
const GPU_SLOT: usize = 64 << 20;
/// The most that is copied at once, and the part of it that a thread writes.
const PIECE: usize = 8 << 20;
const PART: usize = 128 << 10;

fn builder(device: &Device, plan: &FaultPlan) -> DeviceBuilder {
    like(device).layer(plan.clone())
}

/// Opens a device of the same kind with a ring of two small slots and counted calls.
fn small(device: &Device) -> (Device, FaultPlan) {
    let plan = FaultPlan::new();
    (builder(device, &plan).staging(2, SLOT).open().unwrap(), plan)
}

/// Returns parameters of these numbers of elements.
fn spec(lengths: impl IntoIterator<Item = usize>) -> ParameterSpec {
    let mut spec = ParameterSpec::builder();
    for (number, length) in lengths.into_iter().enumerate() {
        spec.add(format!("p{number}"), [length], Initializer::Uniform { bound: 1.0 });
    }
    spec.build().unwrap()
}

/// Returns the words of a flat region whose parameters are consecutive slices of `bytes`.
fn flat(spec: &ParameterSpec, bytes: &[u8]) -> Vec<u32> {
    let mut words = vec![0; spec.elements()];
    for (entry, range) in spec.entries().iter().zip(ranges(spec)) {
        let values = bytes[range].chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
        words[entry.range()].iter_mut().zip(values).for_each(|(word, value)| *word = value);
    }
    words
}

/// Returns the range of each parameter's bytes.
fn ranges(spec: &ParameterSpec) -> impl Iterator<Item = Range<usize>> {
    spec.entries().iter().scan(0, |start, entry| {
        let range = *start..*start + 4 * entry.range().len();
        *start = range.end;
        Some(range)
    })
}

/// Loads parameters from consecutive slices of `bytes`.
fn load(parameters: &mut Parameters, bytes: &[u8], transfer: Transfer<'_>) -> Result<()> {
    let ranges: Vec<_> = ranges(parameters.spec()).collect();
    let mut ranges = ranges.into_iter();
    parameters.load(|_| bytes.get(ranges.next()?), transfer.non_finite(NonFinite::Allow))
}

fn random_bytes(random: &mut Random, length: usize) -> Vec<u8> {
    (0..length).map(|_| random.next_u64() as u8).collect()
}

fn held(parameters: &Parameters) -> Vec<u32> {
    bits(&parameters.read_flat().unwrap())
}

/// Returns a length in elements around every boundary: nothing, one, whole slots and next to them.
fn length(random: &mut Random, slot: usize) -> usize {
    let slot = slot / 4;
    let around = [0, 1, 63, 64, 65, slot - 1, slot, slot + 1, 2 * slot, 3 * slot + 7];
    match random.below(3) {
        0 => around[random.below(around.len() as u32) as usize],
        1 => random.extent(0, 200),
        _ => random.extent(0, 4 * slot),
    }
}

/// Runs one random program: uploads to parts of two buffers and to a step, kernels that write
/// between them, and reads. Each is compared with a model on the host.
fn program(device: &Device, seed: u64) {
    let mut random = Random::new(seed);
    let (slots, slot) = (random.extent(1, 3), SLOT * random.extent(1, 3));
    let device = builder(device, &FaultPlan::new()).staging(slots, slot).open().unwrap();
    let elements = 5 * slot / 4;
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let mut buffers = [(); 2].map(|()| Buffer::<f32>::zeros(&device, elements).unwrap());
    let mut models = [(); 2].map(|()| vec![0.0f32; elements]);
    for _ in 0..40 {
        let which = random.below(2) as usize;
        let (buffer, model) = (&mut buffers[which], &mut models[which]);
        let length = length(&mut random, slot).min(elements);
        let start = random.extent(0, elements - length);
        let values = random.normals(length);
        match random.below(6) {
            0..3 => {
                buffer.write(start, &values).unwrap();
                model[start..][..length].copy_from_slice(&values);
            }
            3 => {
                let value = random.normal();
                arena.step(|step| ops::fill_into(step, &mut step.lend_mut(buffer, [elements])?, value)).unwrap();
                model.fill(value);
            }
            4 => {
                let read = arena.step(|step| step.read(&step.upload(&values, [length])?)).unwrap();
                assert_eq!(bits(&read), bits(&values), "seed {seed}");
            }
            _ => {
                let read = buffer.read_range(start, length).unwrap();
                assert_eq!(bits(&read), bits(&model[start..][..length]), "seed {seed}");
            }
        }
    }
    for (buffer, model) in buffers.iter().zip(&models) {
        assert_eq!(bits(&buffer.read().unwrap()), bits(model), "seed {seed}");
    }
}

on_each_device! {
    also late;

    fn device_holds_uploaded_bytes(device: &Device) {
        let programs = if device.description().kind == DeviceKind::Cuda { 8 } else { 60 };
        (0..programs).for_each(|seed| program(device, seed));
    }

    fn parameters_load_from_any_bytes(device: &Device) {
        for seed in 0..12 {
            let mut random = Random::new(seed);
            let (device, _) = small(device);
            let count = random.extent(1, 40);
            let lengths: Vec<usize> = (0..count).map(|_| length(&mut random, SLOT).max(1)).collect();
            let spec = spec(lengths);
            let mut parameters = Parameters::new(&device, &spec, seed).unwrap();
            // At every alignment.
            for shift in 0..5 {
                let bytes = random_bytes(&mut random, shift + 4 * spec.weights());
                load(&mut parameters, &bytes[shift..], Transfer::new()).unwrap();
                assert_eq!(held(&parameters), flat(&spec, &bytes[shift..]), "seed {seed}, shift {shift}");
            }
        }
    }

    /// Several threads write the pieces, each starting from its own place.
    fn initial_weights_form_one_stream(device: &Device) {
        let mut random = Random::new(42);
        let mut builder = ParameterSpec::builder();
        for (number, length) in [1, 100, PART / 4 + 3, 64, 3 * PART / 4].into_iter().enumerate() {
            builder.add(format!("u{number}"), [length], Initializer::Uniform { bound: 0.5 });
            builder.add(format!("c{number}"), [length], Initializer::Constant(3.25));
        }
        let spec = builder.build().unwrap();
        let parameters = Parameters::new(device, &spec, 42).unwrap();
        let mut expected = vec![0u32; spec.elements()];
        for entry in spec.entries() {
            let drawn = entry.name().starts_with('u');
            let value = |_| if drawn { 0.5 * (2.0 * random.unit() - 1.0) } else { 3.25f32 };
            expected[entry.range()].iter_mut().zip(entry.range().map(value)).for_each(|(to, value)| *to = value.to_bits());
        }
        assert_eq!(held(&parameters), expected);
    }

    fn copies_follow_parameter_sizes(device: &Device) {
        let plan = FaultPlan::new();
        let device = builder(device, &plan).staging(2, GPU_SLOT).open().unwrap();
        let copies = |lengths: Vec<usize>| {
            let spec = spec(lengths);
            let mut parameters = Parameters::new(&device, &spec, 1).unwrap();
            let bytes = random_bytes(&mut Random::new(7), 4 * spec.weights());
            let before = plan.count(Call::Upload);
            load(&mut parameters, &bytes, Transfer::new()).unwrap();
            let copies = plan.count(Call::Upload) - before;
            assert_eq!(held(&parameters), flat(&spec, &bytes));
            copies
        };
        // 300 times 256 bytes, including the gaps between them.
        assert_eq!(copies(vec![3; 300]), 1);
        assert_eq!(copies(vec![64; 5000]), 1);
        let copied = copies(vec![1, PIECE / 2, 1]);
        assert!((3..=4).contains(&copied), "{copied} copies of two pieces and 8 bytes");
    }

    fn slots_rotate_and_are_freed(device: &Device) {
        let (device, plan) = small(device);
        let buffer = Buffer::from_slice(&device, &vec![1.0f32; 10 * SLOT / 4]).unwrap();
        let count = |call| plan.count(call);
        assert_eq!([Call::AllocatePinned, Call::CreateFence, Call::Upload].map(count), [2, 2, 10]);
        // Each full slot but the last is fenced, and each reused one is waited for.
        assert_eq!(count(Call::RecordFence), 9);
        assert!(count(Call::PollFence) >= 8);
        drop((buffer, device));
        assert_eq!([Call::FreePinned, Call::DestroyFence].map(count), [2, 2]);
    }

    fn memory_mapped_files_are_sources(device: &Device) {
        let (device, _) = small(device);
        let spec = spec([1, 5, 3000, 64]);
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes = random_bytes(&mut Random::new(9), 3 + 4 * spec.weights());
        std::fs::write(file.path(), &bytes).unwrap();
        // SAFETY: the file has no other user.
        let mapped = unsafe { memmap2::Mmap::map(file.as_file()) }.unwrap();
        let mut parameters = Parameters::new(&device, &spec, 1).unwrap();
        load(&mut parameters, &mapped[3..], Transfer::new()).unwrap();
        drop(mapped);
        assert_eq!(held(&parameters), flat(&spec, &bytes[3..]));
    }

    fn checkpoint_is_one_upload(device: &Device) {
        let (device, _) = small(device);
        let spec = spec([3000, 64, 5]);
        let mut parameters = Parameters::new(&device, &spec, 1).unwrap();
        let mut optimizer = Optimizer::new(&parameters, AdamW::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        Checkpoint::save(&path, &parameters, Some(&optimizer), &[]).unwrap();
        let saved = held(&parameters);
        let checkpoint = Checkpoint::load(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        load(&mut parameters, &vec![1; 4 * spec.weights()], Transfer::new()).unwrap();
        let mut last = None;
        let mut tell = |progress| {
            last = Some(progress);
            Ok(())
        };
        checkpoint.restore_with(&mut parameters, Some(&mut optimizer), Transfer::new().progress(&mut tell)).unwrap();
        assert_eq!(held(&parameters), saved);
        let Progress { done_bytes, total_bytes, .. } = last.expect("progress was reported");
        assert_eq!((done_bytes, total_bytes), (total_bytes, 3 * 4 * spec.elements() as u64));
    }

    fn mismatched_sources_are_refused(device: &Device) {
        let (device, plan) = small(device);
        let spec = spec([4, 7, 2]);
        let mut parameters = Parameters::new(&device, &spec, 1).unwrap();
        let (before, copies) = (held(&parameters), plan.count(Call::Upload));
        let bytes = [0u8; 100];
        for (number, entry) in spec.entries().iter().enumerate() {
            let right = 4 * entry.range().len();
            for wrong in [None, Some(0), Some(right - 1), Some(right + 1), Some(right + 4)] {
                let source = |asked: &stepscope::parameters::ParameterEntry| {
                    let own = asked.name() == entry.name();
                    Some(&bytes[..if own { wrong? } else { 4 * asked.range().len() }])
                };
                let error = parameters.load(source, Transfer::new()).unwrap_err();
                let Error::Misuse { op: "load", expected, got } = error else { panic!("{error}") };
                assert!(expected.contains(&format!("{right} bytes for `p{number}`")), "{expected}");
                assert!(got == wrong.map_or("none".into(), |wrong| format!("{wrong} bytes")), "{got}");
            }
        }
        assert_eq!((held(&parameters), plan.count(Call::Upload)), (before, copies));
    }

    fn progress_is_monotone_and_complete(device: &Device) {
        let (device, _) = small(device);
        let spec = spec([1, 3000, 5, 64]);
        let mut parameters = Parameters::new(&device, &spec, 1).unwrap();
        let bytes = random_bytes(&mut Random::new(3), 4 * spec.weights());
        let mut reports = Vec::new();
        let mut tell = |progress| {
            reports.push(progress);
            Ok(())
        };
        load(&mut parameters, &bytes, Transfer::new().progress(&mut tell)).unwrap();
        let total = 4 * spec.elements() as u64;
        assert!(reports.iter().all(|progress: &Progress| progress.total_bytes == total));
        assert!(reports.is_sorted_by(|a, b| a.done_bytes < b.done_bytes && a.elapsed <= b.elapsed), "{reports:?}");
        assert!(reports.len() as u64 >= total / SLOT as u64 && reports.last().unwrap().done_bytes == total, "{reports:?}");
    }

    fn progress_can_stop_an_upload(device: &Device) {
        let (device, plan) = small(device);
        let spec = spec([5 * SLOT / 4]);
        let mut parameters = Parameters::new(&device, &spec, 1).unwrap();
        let bytes = random_bytes(&mut Random::new(3), 4 * spec.weights());
        let stopped = Error::File { path: "stop".into(), reason: "the test stopped it".into() };
        let before = plan.count(Call::Upload);
        let mut tell = |progress: Progress| if progress.done_bytes < 8000 { Ok(()) } else { Err(stopped.clone()) };
        assert_eq!(load(&mut parameters, &bytes, Transfer::new().progress(&mut tell)), Err(stopped.clone()));
        assert!(plan.count(Call::Upload) - before <= 3, "the upload went on after the error");
        load(&mut parameters, &bytes, Transfer::new()).unwrap();
        assert_eq!(held(&parameters), flat(&spec, &bytes));
    }

    /// Each wait is short, and the whole upload is too long. The upload itself misses the deadline,
    /// or the driver call that is in progress then. On a busy machine it may be either, so the
    /// first of five attempts in which it is the upload counts.
    fn deadline_covers_the_whole_upload(device: &Device) {
        let deadline = Duration::from_millis(60);
        let missed = (0..5).any(|_| {
            let (device, _) = small(device);
            let spec = spec([50 * SLOT / 4]);
            let mut parameters = Parameters::new(&device, &spec, 1).unwrap();
            let bytes = vec![0; 4 * spec.weights()];
            let mut slow = |_| {
                std::thread::sleep(Duration::from_millis(10));
                Ok(())
            };
            let watch = Watch::start();
            let transfer = Transfer::new().deadline(deadline).progress(&mut slow);
            let error = load(&mut parameters, &bytes, transfer).unwrap_err();
            watch.within(Duration::from_millis(400), "the upload");
            let Error::Timeout { call, waited, .. } = error else { panic!("{error}") };
            assert!(deadline <= watch.elapsed() && waited <= watch.elapsed(), "{waited:?}");
            assert!(device.lost().unwrap().contains(call));
            call == "upload" && deadline <= waited
        });
        assert!(missed, "no attempt missed the deadline of the upload itself");
    }

    /// One call of the ring fails at a time: its upload returns the error, the next one is right,
    /// and all memory is freed.
    fn failed_call_fails_one_upload(device: &Device) {
        let calls = [Call::AllocatePinned, Call::CreateFence, Call::Upload, Call::RecordFence, Call::PollFence];
        for (call, number) in calls.into_iter().flat_map(|call| [(call, 1), (call, 2), (call, 3)]) {
            let (device, plan) = small(device);
            let _ = plan.clone().on(call, number, Fault::Fail);
            let mut buffer = Buffer::<f32>::zeros(&device, 3 * SLOT / 4).unwrap();
            let mut failures = 0;
            for round in 0..6 {
                let values = Random::new(round).normals(buffer.len());
                match buffer.write(0, &values) {
                    Ok(()) => assert_eq!(bits(&buffer.read().unwrap()), bits(&values), "{call:?} {number}, round {round}"),
                    Err(Error::Driver { call: "fault injection", fatal: false, .. }) => failures += 1,
                    Err(error) => panic!("{call:?} {number}: {error}"),
                }
            }
            // There are two slots, so a third is never allocated.
            let met = number < 3 || !matches!(call, Call::AllocatePinned | Call::CreateFence);
            assert_eq!(failures, usize::from(met), "{call:?} {number}");
            assert_eq!(device.lost(), None);
            drop((buffer, device));
            let made = |made, failed| plan.count(made) - u64::from(met && call == failed);
            assert_eq!(plan.count(Call::FreePinned), made(Call::AllocatePinned, Call::AllocatePinned), "{call:?} {number}");
            assert_eq!(plan.count(Call::DestroyFence), made(Call::CreateFence, Call::CreateFence), "{call:?} {number}");
        }
    }

    fn failed_frees_keep_nothing_else(device: &Device) {
        for call in [Call::DestroyFence, Call::FreePinned] {
            let (device, plan) = small(device);
            let _ = plan.clone().on(call, 1, Fault::Fail);
            drop((Buffer::from_slice(&device, &[1.0f32; 2 * SLOT]).unwrap(), device));
            assert_eq!([Call::DestroyFence, Call::FreePinned].map(|call| plan.count(call)), [2, 2], "{call:?}");
        }
    }

    /// Threads share the ring piece by piece.
    fn threads_upload_at_the_same_time(device: &Device) {
        let (device, _) = small(device);
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let device = &device;
                scope.spawn(move || {
                    let values = Random::new(seed).normals(7 * SLOT / 4 + 13);
                    for _ in 0..10 {
                        let buffer = Buffer::from_slice(device, &values).unwrap();
                        assert_eq!(bits(&buffer.read().unwrap()), bits(&values), "{seed}");
                    }
                });
            }
        });
    }

    /// A waiting thread of a pool gets other work. If that is an upload too, the two must not wait
    /// for each other.
    fn pooled_uploads_do_not_deadlock(device: &Device) {
        let uploads = (0..32).collect::<Vec<u64>>();
        let check = |&seed: &u64| {
            let values = vec![seed as f32; 3 * PART / 4 + 5];
            let buffer = Buffer::from_slice(device, &values).unwrap();
            assert_eq!(buffer.read().unwrap(), values);
        };
        rayon::join(|| uploads.iter().for_each(check), || rayon::join(|| uploads.iter().for_each(check), || uploads.iter().for_each(check)));
    }

    fn checked_devices_name_damaged_uploads(device: &Device) {
        let spec = spec([5, 6000, 64, 1]);
        let bytes = random_bytes(&mut Random::new(3), 4 * spec.weights());
        for (number, checked) in (1..=7).flat_map(|number| [(number, true), (number, false)]) {
            let plan = FaultPlan::new();
            let device = builder(device, &plan).staging(2, SLOT).checked(checked).open().unwrap();
            let mut parameters = Parameters::new(&device, &spec, 1).unwrap();
            let before = plan.count(Call::Upload);
            let _ = plan.clone().on(Call::Upload, before + number, Fault::Flips);
            let loaded = load(&mut parameters, &bytes, Transfer::new());
            // The place of the single wrong bit.
            let (got, sound) = (held(&parameters), flat(&spec, &bytes));
            let wrong: Vec<usize> = (0..got.len()).filter(|&at| got[at] != sound[at]).collect();
            let ([at], true) = (wrong.as_slice(), plan.count(Call::Upload) > before) else { panic!("{number}: {wrong:?}") };
            assert_eq!((got[*at] ^ sound[*at]).count_ones(), 1);
            if !checked {
                assert_eq!(loaded, Ok(()), "`NonFinite::Allow` must not scan the values");
                continue;
            }
            let error = loaded.unwrap_err();
            let Error::Damaged { tensor, offset_bytes, expected, got } = &error else { panic!("{error}") };
            let owner = spec.entries().iter().rev().find(|entry| entry.start() <= *at).unwrap();
            assert_eq!((tensor.as_str(), *offset_bytes), (owner.name(), 4 * (at - owner.start())), "{error}");
            assert_ne!(expected, got);
            assert!(error.to_string().contains(&format!("`{}`", owner.name())), "{error}");
            // The device works, and the next upload is right.
            load(&mut parameters, &bytes, Transfer::new()).unwrap();
            assert_eq!(held(&parameters), sound);
        }
    }

    fn damaged_buffer_is_named(device: &Device) {
        let plan = FaultPlan::new();
        let device = builder(device, &plan).checked(true).open().unwrap();
        let mut buffer = Buffer::from_slice(&device, &[1u32, 2, 3, 4]).unwrap();
        let _ = plan.clone().on(Call::Upload, plan.count(Call::Upload) + 1, Fault::Flips);
        let error = buffer.write(1, &[7, 8, 9]).unwrap_err();
        let Error::Damaged { tensor, offset_bytes: 8, .. } = &error else { panic!("{error}") };
        assert_eq!(tensor, "u32[4]");
        buffer.write(1, &[7, 8, 9]).unwrap();
        assert_eq!(buffer.read().unwrap(), [1, 7, 8, 9]);
    }

    fn arenas_inherit_checked_mode(device: &Device) {
        let poisoned = |device_checked: Option<bool>, arena_checked: Option<bool>| {
            let mut builder = builder(device, &FaultPlan::new());
            if let Some(checked) = device_checked {
                builder = builder.checked(checked);
            }
            let device = builder.open().unwrap();
            let mut builder = Arena::builder(&device).capacity(Capacity::mib(1));
            if let Some(checked) = arena_checked {
                builder = builder.checked(checked);
            }
            let mut arena = builder.build().unwrap();
            assert_eq!(device.checked(), device_checked == Some(true));
            arena.step(|step| Ok(step.read(&step.empty::<u32>([4])?)? == [0xdead_beef; 4])).unwrap()
        };
        for (device, arena, expected) in [
            (None, None, false),
            (Some(true), None, true),
            (Some(true), Some(false), false),
            (Some(false), Some(true), true),
            (None, Some(true), true),
        ] {
            assert_eq!(poisoned(device, arena), expected, "{device:?} {arena:?}");
        }
    }

    /// Uploads as many tensors as a large model's checkpoint has, on a checked device: one copy for
    /// each 8 MiB, not for each tensor.
    fn many_small_tensors_are_few_copies(device: &Device) {
        const TENSORS: usize = 213_304;
        let plan = FaultPlan::new();
        let device = builder(device, &plan).staging(2, GPU_SLOT).checked(true).open().unwrap();
        let spec = spec(vec![256; TENSORS]);
        let mut parameters = Parameters::new(&device, &spec, 1).unwrap();
        let bytes = random_bytes(&mut Random::new(11), 1 << 20);
        let place = |number: usize| (number * 7919) % (bytes.len() - 1024);
        let before = plan.count(Call::Upload);
        let mut numbers = 0..TENSORS;
        parameters.load(|_| Some(&bytes[place(numbers.next()?)..][..1024]), Transfer::new().non_finite(NonFinite::Allow)).unwrap();
        // A piece also ends at the end of its slot.
        let (copies, pieces) = (plan.count(Call::Upload) - before, (1024 * TENSORS).div_ceil(PIECE) as u64);
        assert!((pieces..=pieces + 4).contains(&copies), "{copies} copies of {pieces} pieces");
        for number in (0..TENSORS).step_by(1009).chain([TENSORS - 1]) {
            let mut held = Vec::new();
            let region = parameters.regions()[0];
            region.for_each_piece(1024 * number..1024 * (number + 1), &mut |piece| {
                held.extend_from_slice(piece);
                Ok(())
            }).unwrap();
            assert_eq!(held, &bytes[place(number)..][..1024], "{number}");
        }
    }
}
