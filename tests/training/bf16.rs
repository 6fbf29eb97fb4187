//! BF16, two to a word, in all code that holds or moves elements: any number of them, from any
//! offset.
//!
//! `tests/memory/dlpack.rs`, `tests/memory/arrays.rs` and `tests/training/state_dict.rs` test BF16
//! in arrays and files of other libraries. `tests/training/bf16/copy.rs` tests the BF16 copy of
//! weights.

mod copy;
#[allow(dead_code, reason = "not every part of the shared support is used here")]
mod training;

use crate::overrun::one_too_long;
use crate::support::{Random, on_each_device};
use kernels::fill::fill;
use stepscope::capture::{CaptureInputs, Output};
use stepscope::check::MemoryRecorder;
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::tensor::Target;
use stepscope::{Arena, Buffer, Capacity, Device, Error, HostInputs, Result, Step, bf16, ops};

/// Numbers of elements that end inside a word, at its end, and around multiples of 256 bytes and of
/// a checksum's chunk.
const COUNTS: [usize; 9] = [1, 2, 3, 127, 128, 255, 256, 257, 4097];

/// Returns values of any bits but a NaN's, which equality cannot compare.
fn values(random: &mut Random, count: usize) -> Vec<bf16> {
    let value = |bits: u32| bf16::from_bits(bits as u16);
    (0..count)
        .map(|_| value(random.next_u64() as u32))
        .map(|value| if value.is_nan() { bf16::ONE } else { value })
        .collect()
}

fn arena(device: &Device, checked: bool) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(4)).checked(checked).build().unwrap()
}

/// Returns the device, and another of its kind that verifies uploads and guards tensors.
fn both(device: &Device) -> [Device; 2] {
    [device.clone(), Device::builder(device.description().kind).checked(true).open().unwrap()]
}

/// Runs a fill on a view that is one element longer than the tensor.
fn one_too_far<'s>(step: &Step<'s>, out: &mut impl Target<'s, bf16>) -> Result<()> {
    let out = one_too_long(out.out());
    let length = out.len();
    step.launch(fill { out, length, value: 1.0 })
}

/// Negates its input through a tensor that is full of other numbers, and returns it twice.
fn negate<'s>(step: &mut Step<'s>, (): &mut (), slots: &CaptureInputs<'s>) -> Result<[Output<bf16>; 2]> {
    let x = slots.input::<bf16>(0)?;
    let mut y = ops::fill(step, x.shape(), 3.0).and_then(|y| ops::to_bf16(step, &y))?;
    if slots.variant() == 1 {
        one_too_far(step, &mut y)?;
    }
    let z = ops::scale(step, &x, -1.0)?;
    Ok([slots.output(&z), slots.output(&x)])
}

on_each_device! {
    fn buffers_of_any_length_round_trip(device: &Device) {
        let mut random = Random::new(1);
        for device in both(device) {
            for count in COUNTS {
                let numbers = values(&mut random, count);
                let mut buffer = Buffer::from_slice(&device, &numbers).unwrap();
                assert_eq!((buffer.len(), buffer.read().unwrap()), (count, numbers));
                assert_eq!(Buffer::<bf16>::zeros(&device, count).unwrap().read().unwrap(), vec![bf16::ZERO; count]);
                let error = buffer.write(count, &[bf16::ONE]).unwrap_err().to_string();
                assert!(error.ends_with(&format!("inside 0..{count}, got 1 elements from {count} on")), "{error}");
            }
        }
    }

    /// Random writes and reads at any place, compared with the same on the host.
    fn partial_writes_change_nothing_else(device: &Device) {
        for (seed, device) in (2..).zip(both(device)) {
            let mut random = Random::new(seed);
            for length in [1, 2, 3, 257, 20_001] {
                let mut model = values(&mut random, length);
                let mut buffer = Buffer::from_slice(&device, &model).unwrap();
                for _ in 0..60 {
                    let start = random.below(length as u32) as usize;
                    // Zero elements, too.
                    let longest = [1, 5, 300, length][random.below(4) as usize].min(length - start);
                    let count = random.below(longest as u32 + 1) as usize;
                    let numbers = values(&mut random, count);
                    buffer.write(start, &numbers).unwrap();
                    model[start..start + count].copy_from_slice(&numbers);
                    let from = random.below(length as u32) as usize;
                    let read = random.below((length - from) as u32 + 1) as usize;
                    assert_eq!(buffer.read_range(from, read).unwrap(), model[from..from + read], "{read} from {from}");
                }
                assert_eq!(buffer.read().unwrap(), model);
            }
        }
    }

    /// Wherever an upload begins and ends, one wrong bit in it is found, and the error names its
    /// element.
    fn a_damaged_element_is_named(device: &Device) {
        let plan = FaultPlan::new();
        let kind = device.description().kind;
        let device = Device::builder(kind).checked(true).layer(plan.clone()).open().unwrap();
        let mut random = Random::new(4);
        let mut model = values(&mut random, 20_001);
        let mut buffer = Buffer::from_slice(&device, &model).unwrap();
        let parts = [(0, 1), (1, 1), (2, 1), (3, 2), (3, 3), (0, 257), (1, 256), (8191, 2), (8191, 8194), (20_000, 1), (1, 20_000)];
        for (start, count) in parts {
            let numbers = values(&mut random, count);
            let _ = plan.clone().on(Call::Upload, plan.count(Call::Upload) + 1, Fault::Flips);
            let error = buffer.write(start, &numbers).unwrap_err();
            model[start..start + count].copy_from_slice(&numbers);
            let there = buffer.read().unwrap();
            let wrong: Vec<usize> = (0..model.len()).filter(|&at| there[at].to_bits() != model[at].to_bits()).collect();
            let [at] = wrong[..] else { panic!("{count} from {start}: {wrong:?}") };
            let Error::Damaged { tensor, offset_bytes, .. } = &error else { panic!("{error}") };
            assert_eq!((tensor.as_str(), *offset_bytes), ("bf16[20001]", 2 * at), "{count} from {start}");
            buffer.write(start, &numbers).unwrap();
            assert_eq!(buffer.read().unwrap(), model);
        }
    }

    fn tensors_of_any_length_round_trip(device: &Device) {
        let mut random = Random::new(5);
        for (device, checked) in [(device, false), (device, true)] {
            for count in COUNTS {
                let numbers = values(&mut random, count);
                let buffer = Buffer::from_slice(device, &numbers).unwrap();
                arena(device, checked).step(|step| {
                    // A neighbour on either side.
                    let before = step.upload(&vec![bf16::ONE; count], [count])?;
                    let x = step.upload(&numbers, [count])?;
                    let after = step.upload(&vec![bf16::ONE; count], [count])?;
                    assert_eq!(step.read(&x)?, numbers);
                    let y = ops::scale(step, &step.lend(&buffer, [count])?, -1.0)?;
                    assert!(step.read(&y)?.iter().zip(&numbers).all(|(y, x)| *y == -*x));
                    for neighbour in [before, after] {
                        assert_eq!(step.read(&neighbour)?, vec![bf16::ONE; count]);
                    }
                    Ok(())
                }).unwrap();
            }
        }
    }

    fn unwritten_elements_are_nan(device: &Device) {
        let mut arena = arena(device, true);
        for count in COUNTS {
            arena.step(|step| {
                let unwritten = step.read(&step.empty::<bf16>([count])?)?;
                assert!(unwritten.iter().all(|value| value.is_nan()), "{count}: {unwritten:?}");
                let scaled = ops::scale(step, &step.empty::<bf16>([count])?, 2.0)?;
                assert!(step.read(&scaled)?.iter().all(|value| value.is_nan()), "a checked read returns NaN");
                Ok(())
            }).unwrap();
        }
    }

    /// One element past the end, in the same word as the last one if their number is odd.
    fn single_element_overrun_is_named(device: &Device) {
        let mut arena = arena(device, true);
        for count in COUNTS {
            let outcome = arena.step(|step| one_too_far(step, &mut step.empty([count])?));
            let error = outcome.unwrap_err();
            let Error::Overrun { tensor, site, bytes, offset_bytes } = &error else { panic!("{error}") };
            assert_eq!((tensor.as_str(), *bytes, *offset_bytes), (format!("bf16[{count}]").as_str(), 2 * count, 2 * count));
            assert!(site.contains("tests/training/bf16.rs"), "{site}");
            // A write inside the tensor is not an overrun.
            arena.step(|step| ops::fill_into(step, &mut step.empty::<bf16>([count])?, 1.0)).unwrap();
        }
    }

    fn captured_steps_support_any_length(device: &Device) {
        let mut random = Random::new(6);
        // The last is large enough to wait in a place of its own while a GPU works.
        for count in COUNTS.into_iter().chain([70_001]) {
            for checked in [false, true] {
                let mut memory = arena(device, checked);
                let batches: Vec<_> = (0..3).map(|_| values(&mut random, count)).collect();
                let inputs = |batch| HostInputs::new().with(batch, [count]).unwrap();
                let mut captured = memory.capture((), &inputs(&batches[0][..]), negate).unwrap();
                for batch in &batches {
                    let replay = captured.replay(&inputs(batch)).unwrap();
                    let [negative, same] = replay.outputs().map(|output| replay.read(output).unwrap());
                    assert!(negative.iter().zip(batch).all(|(got, x)| *got == -*x), "{count}");
                    assert_eq!(&same, batch);
                }
                if checked {
                    let too_far = inputs(&batches[0]).variant(1);
                    let error = captured.replay(&too_far).unwrap_err();
                    let Error::Overrun { tensor, offset_bytes, .. } = &error else { panic!("{error}") };
                    assert_eq!((tensor.as_str(), *offset_bytes), (format!("bf16[{count}]").as_str(), 2 * count));
                }
                assert_eq!(captured.report().recordings, 1 + u64::from(checked));
                drop(captured);
                // These values, in an eager step.
                let eager = memory.step(|step| {
                    let batch = step.upload_inputs(&inputs(&batches[0]))?;
                    step.read(&batch.input::<bf16>(0)?)
                });
                assert_eq!(eager.unwrap(), batches[0]);
            }
        }
    }

    fn inputs_of_other_types_are_refused(device: &Device) {
        let mut memory = arena(device, false);
        let (halves, words) = ([bf16::ONE; 4], [1.0f32; 4]);
        let mut captured = memory.capture((), &HostInputs::new().with(&halves, [4]).unwrap(), negate).unwrap();
        let error = captured.replay(&HostInputs::new().with(&words, [4]).unwrap()).unwrap_err().to_string();
        assert_eq!(error, "input: expected input 0 of bf16 elements, got f32 [4]");
        captured.replay(&HostInputs::new().with(&halves, [4]).unwrap()).unwrap();
    }

    fn recordings_count_bf16_bytes(device: &Device) {
        let mut memory = arena(device, false);
        let recorder = MemoryRecorder::start(&mut memory, 100);
        memory.step(|step| step.empty::<bf16>([3, 5]).map(drop)).unwrap();
        let recording = recorder.recording();
        let event = recording.events().find(|event| event.label.starts_with("bf16")).expect("the tensor's event");
        assert_eq!((event.label.as_ref(), event.bytes), ("bf16[3, 5]", 30));
        let pickle = recording.pickle();
        assert!(pickle.windows(10).any(|part| part == b"bf16[3, 5]"));
    }
}
