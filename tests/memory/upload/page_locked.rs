//! Uploads from page-locked memory: the device makes one copy of the contents at the time of
//! queueing.
//!
//! Invariant of each test: whatever fails or stalls, memory that the device may still read is
//! neither written nor freed.

use crate::support::{like, on_each_device};
use std::thread;
use std::time::{Duration, Instant};
use stepscope::capture::{CaptureInputs, Output};
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::check::late::LateWork;
use stepscope::memory::PageLocked;
use stepscope::{Arena, Capacity, Device, Error, HostInputs, Result, Step, bf16, ops};

/// The elements of an upload that passes the ring in many pieces.
const LEN: usize = 10_000;
const SLOT_BYTES: usize = 4096;

/// Opens another device of the same kind, with a small ring, its plan and an arena.
fn open(same: &Device, deadline: Duration) -> (Device, FaultPlan, Arena) {
    let plan = FaultPlan::new();
    let device = like(same).deadline(deadline).staging(2, SLOT_BYTES).layer(plan.clone()).open().unwrap();
    let arena = Arena::builder(&device).capacity(Capacity::mib(1)).reserve_bytes(0).build().unwrap();
    (device, plan, arena)
}

/// Makes the next call of this kind meet `fault`.
fn plant(plan: &FaultPlan, call: Call, fault: Fault) {
    let _ = plan.clone().on(call, plan.count(call) + 1, fault);
}

fn counted(len: usize, first: f32) -> Vec<f32> {
    (0..len).map(|at| first + at as f32).collect()
}

/// Returns the device's contents after an upload of `values`.
fn there_and_back(arena: &mut Arena, values: &[f32]) -> Result<Vec<f32>> {
    arena.step(|step| step.read(&step.upload(values, [values.len()])?))
}

/// Returns the number that all values are.
fn uniform(values: &[f32]) -> f32 {
    assert!(values.iter().all(|value| *value == values[0]), "the values differ from the first, {}", values[0]);
    values[0]
}

/// Sums the input, as a captured step.
fn sum<'s>(step: &mut Step<'s>, _: &mut (), slots: &CaptureInputs<'s>) -> Result<Output> {
    Ok(slots.output(&ops::sum(step, &slots.input::<f32>(0)?)?))
}

/// Tries to allocate page-locked memory within a captured step.
fn takes_memory<'s>(_: &mut Step<'s>, device: &mut Device, _: &CaptureInputs<'s>) -> Result<()> {
    assert!(matches!(PageLocked::<f32>::zeros(device, 4).unwrap_err(), Error::Misuse { op: "capture", .. }));
    Ok(())
}

on_each_device! {
    also late;

    fn page_locked_upload_is_one_copy(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut batch = PageLocked::zeros(&device, LEN).unwrap();
        for round in 0..3 {
            batch.write().unwrap().copy_from_slice(&counted(LEN, round as f32));
            let before = plan.count(Call::Upload);
            assert_eq!(there_and_back(&mut arena, &batch).unwrap(), counted(LEN, round as f32));
            assert_eq!(plan.count(Call::Upload), before + 1);
            // Parts of it, too.
            assert_eq!(there_and_back(&mut arena, &batch[7..LEN - 1]).unwrap(), batch[7..LEN - 1]);
            assert_eq!(plan.count(Call::Upload), before + 2);
        }
        let plain = batch.to_vec();
        let before = plan.count(Call::Upload);
        assert_eq!(there_and_back(&mut arena, &plain).unwrap(), plain);
        assert!(plan.count(Call::Upload) > before + 5);
    }

    fn each_element_type_arrives(device: &Device) {
        let (device, _, mut arena) = open(device, Duration::from_secs(60));
        let mut labels = PageLocked::<u32>::zeros(&device, 3).unwrap();
        labels.write().unwrap().copy_from_slice(&[1, u32::MAX, 7]);
        let mut halves = PageLocked::<bf16>::zeros(&device, 3).unwrap();
        halves.write().unwrap()[1] = bf16::from_f32(-1.5);
        let read = arena.step(|step| {
            let (labels, halves) = (step.upload(&labels, [3])?, step.upload(&halves, [3])?);
            Ok((step.read(&labels)?, step.read(&halves)?))
        });
        assert_eq!(read.unwrap(), (labels.to_vec(), halves.to_vec()));
    }

    /// The second replay's input is uploaded while the first replay runs.
    fn replays_read_their_own_batches(device: &Device) {
        const WIDE: usize = 1 << 18;
        let (device, plan, _) = open(device, Duration::from_secs(60));
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(16)).reserve_bytes(0).build().unwrap();
        let mut batches = [0, 1].map(|_| PageLocked::zeros(&device, WIDE).unwrap());
        let inputs = HostInputs::new().with(&batches[0], [WIDE]).unwrap();
        let mut captured = arena.capture((), &inputs, sum).unwrap();
        for round in 0..6 {
            let batch = &mut batches[round % 2];
            batch.write().unwrap().fill(round as f32);
            let before = plan.count(Call::Upload);
            let replay = captured.replay(&HostInputs::new().with(batch, [WIDE]).unwrap()).unwrap();
            assert_eq!(plan.count(Call::Upload), before + 1);
            if round % 3 == 2 {
                assert_eq!(replay.read_scalar(*replay.outputs()).unwrap(), round as f32 * WIDE as f32);
            }
        }
    }

    /// The mutable borrow outlives the upload, and changes its source before the device reads it.
    fn lent_memory_is_copied_at_once(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut captured_arena = Arena::builder(&device).capacity(Capacity::mib(1)).reserve_bytes(0).build().unwrap();
        let mut pages = PageLocked::zeros(&device, LEN).unwrap();
        let mut captured = {
            let inputs = HostInputs::new().with(&pages, [LEN]).unwrap();
            captured_arena.capture((), &inputs, sum).unwrap()
        };
        for round in 1..4 {
            let mine: &mut [f32] = pages.write().unwrap();
            mine.fill(round as f32);
            let read = arena.step(|step| {
                let whole = step.upload(&*mine, [LEN])?;
                let doubled = ops::scale(step, &whole, 2.0)?;
                mine.fill(-1.0);
                let (left, right) = mine.split_at_mut(LEN / 2);
                left.fill(7.0);
                let part = step.upload(&left[3..], [LEN / 2 - 3])?;
                left.fill(-2.0);
                right.fill(8.0);
                let inputs = HostInputs::new().with(&*right, [LEN / 2])?.with(&left[..2], [2])?;
                let inputs = step.upload_inputs(&inputs)?;
                mine.fill(-3.0);
                let [right, left] = [inputs.input::<f32>(0)?, inputs.input(1)?];
                Ok([step.read(&whole)?, step.read(&doubled)?, step.read(&part)?, step.read(&right)?, step.read(&left)?])
            });
            let [whole, doubled, part, right, left] = read.unwrap();
            let read = [&whole, &doubled, &part, &right, &left].map(|values| uniform(values));
            assert_eq!(read, [round as f32, 2.0 * round as f32, 7.0, 8.0, -2.0]);
            mine.fill(0.5);
            let replay = captured.replay(&HostInputs::new().with(&*mine, [LEN]).unwrap()).unwrap();
            mine.fill(-1.0);
            assert_eq!(replay.read_scalar(*replay.outputs()).unwrap(), 0.5 * LEN as f32);
            // A shared borrow ends the mutable one, and uploads from it are one copy again.
            for part in [&pages[..], &pages[1..5]] {
                let before = plan.count(Call::Upload);
                assert_eq!(uniform(&there_and_back(&mut arena, part).unwrap()), -1.0);
                assert_eq!(plan.count(Call::Upload), before + 1);
            }
        }
        // A borrow that never ends.
        let mine = Box::leak(Box::new(pages)).write().unwrap();
        mine.fill(9.0);
        let read = arena.step(|step| {
            let whole = step.upload(&*mine, [LEN])?;
            mine.fill(-1.0);
            step.read(&whole)
        });
        assert_eq!(uniform(&read.unwrap()), 9.0);
    }

    /// A lent array moves to another thread, and several threads end its lending at once.
    fn lent_memory_crosses_threads(device: &Device) {
        let (device, _, _) = open(device, Duration::from_secs(60));
        let mut pages = PageLocked::zeros(&device, LEN).unwrap();
        let new_arena = &|| Arena::builder(&device).capacity(Capacity::mib(1)).reserve_bytes(0).build().unwrap();
        for round in 0..20 {
            pages.write().unwrap().fill(round as f32);
            let upload = || assert_eq!(uniform(&there_and_back(&mut new_arena(), &pages).unwrap()), round as f32);
            thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(upload))));
            let write = move || {
                let mut pages = pages;
                let mine = pages.write().unwrap();
                let read = new_arena().step(|step| {
                    mine.fill(0.25);
                    let whole = step.upload(&*mine, [LEN])?;
                    mine.fill(-1.0);
                    step.read(&whole)
                });
                assert_eq!(uniform(&read.unwrap()), 0.25);
                pages
            };
            pages = thread::scope(|scope| scope.spawn(write).join().unwrap());
            assert_eq!(uniform(&there_and_back(&mut new_arena(), &pages).unwrap()), -1.0);
        }
    }

    fn dropped_memory_is_reused_and_zeroed(device: &Device) {
        let (device, plan, mut arena) = open(device, Duration::from_secs(60));
        for round in 0..4 {
            let mut batch = PageLocked::zeros(&device, LEN).unwrap();
            assert!(batch.iter().all(|&value: &f32| value == 0.0));
            batch.write().unwrap().fill(1.0 + round as f32);
            assert_eq!(there_and_back(&mut arena, &batch).unwrap(), vec![1.0 + round as f32; LEN]);
        }
        let made = plan.count(Call::AllocatePinned);
        let both = [0, 1].map(|_| PageLocked::<f32>::zeros(&device, LEN).unwrap());
        assert_eq!(plan.count(Call::AllocatePinned), made + 1, "one block was free");
        let other = PageLocked::<f32>::zeros(&device, LEN + 1).unwrap();
        assert_eq!(plan.count(Call::AllocatePinned), made + 2);
        drop((both, other));
    }

    /// The fence does not report that the device has made the copy.
    fn pending_copies_keep_their_memory(device: &Device) {
        let deadline = Duration::from_millis(200);
        let (device, plan, mut arena) = open(device, deadline);
        let [mut held, dropped] = [0, 1].map(|_| PageLocked::zeros(&device, LEN).unwrap());
        held.write().unwrap().fill(1.0);
        arena.step(|step| step.upload(&held, [LEN]).and(step.upload(&dropped, [LEN])).map(drop)).unwrap();
        plant(&plan, Call::PollFence, Fault::Stalls);
        drop(dropped);
        let made = plan.count(Call::AllocatePinned);
        drop(PageLocked::<f32>::zeros(&device, LEN).unwrap());
        assert_eq!(plan.count(Call::AllocatePinned), made + 1, "the dropped block must not be reused yet");
        let start = Instant::now();
        let error = held.write().unwrap_err();
        assert!(matches!(error, Error::Timeout { call: "upload", .. }), "{error}");
        assert!(start.elapsed() >= deadline && start.elapsed() < 50 * deadline, "{:?}", start.elapsed());
        assert!(matches!(held.write().unwrap_err(), Error::DeviceLost { .. }));
        assert_eq!(plan.count(Call::FreePinned), 0);
        assert!(held.iter().all(|&value| value == 1.0), "a held block must stay readable");
    }

    fn failed_uploads_leave_memory_writable(device: &Device) {
        for call in [Call::Upload, Call::RecordFence] {
            let (device, plan, mut arena) = open(device, Duration::from_secs(60));
            let mut batch = PageLocked::zeros(&device, LEN).unwrap();
            batch.write().unwrap().fill(1.0);
            plant(&plan, call, Fault::Fail);
            let error = there_and_back(&mut arena, &batch).unwrap_err();
            assert!(error.to_string().contains("planted"), "{error}");
            let polls = plan.count(Call::Poll);
            if call == Call::Upload {
                batch.write().unwrap().fill(2.0);
                assert!(plan.count(Call::Poll) > polls, "`write` must wait for everything queued");
                assert_eq!(there_and_back(&mut arena, &batch).unwrap(), vec![2.0; LEN]);
            } else {
                drop(batch);
                assert_eq!(plan.count(Call::FreePinned), 1);
            }
        }
    }

    fn other_devices_use_the_ring(device: &Device) {
        let (other, plan, mut arena) = open(device, Duration::from_secs(60));
        let mut batch = PageLocked::zeros(device, LEN).unwrap();
        batch.write().unwrap().copy_from_slice(&counted(LEN, 0.5));
        assert_eq!(there_and_back(&mut arena, &batch).unwrap(), counted(LEN, 0.5));
        assert!(plan.count(Call::Upload) > 5);
        drop((arena, other));
        assert_eq!(batch.write().unwrap(), counted(LEN, 0.5));
    }

    fn threads_may_share_an_array(device: &Device) {
        let (device, _, _) = open(device, Duration::from_secs(60));
        let mut shared = PageLocked::zeros(&device, LEN).unwrap();
        shared.write().unwrap().copy_from_slice(&counted(LEN, 0.0));
        let work = |number: usize| {
            let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).reserve_bytes(0).build().unwrap();
            for round in 0..20 {
                assert_eq!(there_and_back(&mut arena, &shared).unwrap(), counted(LEN, 0.0));
                let mut own = PageLocked::zeros(&device, 1000 + round).unwrap();
                own.write().unwrap().fill(number as f32);
                assert_eq!(there_and_back(&mut arena, &own).unwrap(), vec![number as f32; 1000 + round]);
            }
        };
        thread::scope(|scope| (0..4).for_each(|number| drop(scope.spawn(move || work(number)))));
        assert_eq!(shared.write().unwrap(), counted(LEN, 0.0));
    }

    fn impossible_sizes_are_refused(device: &Device) {
        for len in [0, usize::MAX, usize::MAX / 4, isize::MAX as usize / 4 + 1] {
            let error = PageLocked::<f32>::zeros(device, len).unwrap_err();
            assert!(matches!(error, Error::Misuse { op: "page-locked memory", .. }), "{len}: {error}");
        }
        // 4 PiB.
        let error = PageLocked::<f32>::zeros(device, 1 << 50).unwrap_err();
        assert!(matches!(error, Error::Refused(_) | Error::DeviceMemory { .. }), "{error}");
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).reserve_bytes(0).build().unwrap();
        let batch = PageLocked::zeros(device, 4).unwrap();
        let measured = arena.measure(|step| {
            assert!(matches!(PageLocked::<f32>::zeros(step.device(), 4).unwrap_err(), Error::Misuse { .. }));
            step.upload::<f32>(&batch, [4]).map(drop)
        });
        measured.unwrap();
        let inputs = HostInputs::new().with(&batch, [4]).unwrap();
        drop(arena.capture(device.clone(), &inputs, takes_memory).unwrap());
    }
}

/// Dropping a device frees its spare memory, and an array keeps its device open.
#[test]
fn memory_outlives_device_handles() {
    let plan = FaultPlan::new();
    let device = Device::builder(stepscope::DeviceKind::Emulated).layer(plan.clone()).open().unwrap();
    let (mut kept, spare) = (PageLocked::zeros(&device, LEN).unwrap(), PageLocked::<f32>::zeros(&device, LEN).unwrap());
    drop((device, spare));
    assert_eq!(plan.count(Call::FreePinned), 0);
    kept.write().unwrap().fill(3.0);
    assert_eq!(*kept, [3.0; LEN]);
    drop(kept);
    assert_eq!(plan.count(Call::FreePinned), 2);
}

/// The layer below counts the calls that the driver has received. Nothing waits for the first ones.
#[test]
fn late_work_waits_for_its_reader() {
    let plan = FaultPlan::new();
    let device = Device::builder(stepscope::DeviceKind::Emulated).layer(plan.clone()).layer(LateWork).open().unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let made = || [Call::Upload, Call::Launch, Call::RecordFence].map(|call| plan.count(call));
    let batch = PageLocked::<f32>::zeros(&device, LEN).unwrap();
    let before = made();
    arena
        .step(|step| {
            let sum = ops::sum(step, &step.upload(&batch, [LEN])?)?;
            assert_eq!(made(), before);
            assert_eq!(step.read_scalar(&sum)?, 0.0);
            assert!(made()[1] > before[1]);
            Ok(())
        })
        .unwrap();
    // The driver receives nothing after the fence.
    let [mut held, other] = [0, 1].map(|_| PageLocked::<f32>::zeros(&device, LEN).unwrap());
    let before = made();
    arena.step(|step| step.upload(&held, [LEN]).and(step.upload(&other, [LEN])).map(drop)).unwrap();
    assert_eq!(made(), before);
    held.write().unwrap();
    assert_eq!(made(), [before[0] + 1, before[1], before[2] + 1]);
    device.synchronize(device.deadline()).unwrap();
    assert_eq!(made(), [before[0] + 2, before[1], before[2] + 2]);
}
