//! A fault in every driver call of a capture and of a replay, one at a time, on each device.
//!
//! Invariant: the caller gets a typed error within the deadline. After a failure that the driver
//! survives, steps and captures give the right numbers, and nothing is leaked. After any other
//! failure the device is lost, and every call returns that error.

use crate::support::on_each_device;
use crate::support::witness::Watch;
use std::time::Duration;
use stepscope::capture::{Captured, Output, Record};
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::memory::Overflow;
use stepscope::{Arena, Capacity, Device, DeviceKind, Error, HostInputs, Result, ops};

/// The driver calls from the begin to the end of a capture, and those around them.
const CAPTURE: [Call; 6] =
    [Call::Load, Call::BeginCapture, Call::Record, Call::EndCapture, Call::GraphNodes, Call::Instantiate];
/// The number of launches in the step.
const LAUNCHES: u64 = 4;
const X: [f32; 3] = [1.0, -2.0, 0.5];
/// A deadline far longer than any call takes.
const LONG: Duration = Duration::from_secs(20);

/// Computes 16 x by four launches of one kernel.
const STEP: Record<(), Output> = |step, (), slots| {
    let mut x = ops::scale(step, &slots.input(0)?, 2.0)?;
    for _ in 1..LAUNCHES {
        x = ops::scale(step, &x, 2.0)?;
    }
    Ok(slots.output(&x))
};

fn inputs() -> HostInputs<'static> {
    HostInputs::new().with(&X, [3]).unwrap()
}

fn open(kind: DeviceKind, deadline: Duration, plan: &FaultPlan) -> (Device, Arena) {
    let device = Device::builder(kind).deadline(deadline).layer(plan.clone()).open().unwrap();
    let pool = Overflow::Pool { cap_bytes: 1 << 20, prime_bytes: 1 << 12, deadline };
    let arena = Arena::builder(&device).capacity(Capacity::mib(1)).overflow(pool).build().unwrap();
    (device, arena)
}

/// Makes the call of this kind that follows `later` others meet the fault.
fn plant(plan: &FaultPlan, call: Call, later: u64, fault: Fault) {
    let _ = plan.clone().on(call, plan.count(call) + 1 + later, fault);
}

fn replays(captured: &mut Captured<(), Output>) -> Result<Vec<f32>> {
    let replay = captured.replay(&inputs())?;
    replay.read(*replay.outputs())
}

/// Checks that steps and captures work.
#[track_caller]
fn works(arena: &mut Arena) {
    let values = arena.step(|step| {
        let x = step.upload(&X, [3])?;
        step.read(&ops::scale(step, &x, 2.0)?)
    });
    assert_eq!(values.unwrap(), X.map(|x| 2.0 * x));
    let mut captured = arena.capture((), &inputs(), STEP).unwrap();
    assert_eq!(replays(&mut captured).unwrap(), X.map(|x| 16.0 * x));
}

/// Checks that everything allocated has been freed.
#[track_caller]
fn nothing_leaks(plan: &FaultPlan, graphs: u64) {
    assert_eq!(plan.count(Call::Free), plan.count(Call::Allocate));
    assert_eq!(plan.count(Call::DestroyGraph), graphs, "each graph that was made is destroyed");
}

/// Runs a capture that meets `fault`, and returns its error and a watch started before it.
fn meets(arena: &mut Arena, plan: &FaultPlan, call: Call, later: u64, fault: Fault) -> (Error, Watch) {
    plant(plan, call, later, fault);
    let watch = Watch::start();
    (arena.capture((), &inputs(), STEP).expect_err("the capture succeeded in spite of the planted fault"), watch)
}

/// Returns every place in a capture where a driver call can fail.
fn places() -> Vec<(Call, u64)> {
    let places = |call| (0..if call == Call::Record { LAUNCHES } else { 1 }).map(move |later| (call, later));
    CAPTURE.into_iter().flat_map(places).collect()
}

on_each_device! {
    fn failed_call_leaves_everything_usable(device: &Device) {
        for (call, later) in places() {
            let plan = FaultPlan::new();
            let (device, mut arena) = open(device.description().kind, LONG, &plan);
            let (error, _) = meets(&mut arena, &plan, call, later, Fault::Fail);
            let Error::Driver { reason, fatal: false, .. } = &error else { panic!("{call:?} {later}: {error}") };
            assert!(reason.contains(&format!("{call:?}")), "{error}");
            assert_eq!((device.lost(), arena.report().captured_bytes), (None, 0), "{call:?} {later}");
            works(&mut arena);
            drop(arena);
            // One graph is from `works`, and one more if a graph was captured before the call
            // failed.
            let captured = matches!(call, Call::Record | Call::EndCapture | Call::GraphNodes | Call::Instantiate);
            nothing_leaks(&plan, 1 + u64::from(captured));
        }
    }

    fn spoiling_call_loses_device(device: &Device) {
        for (call, later) in places() {
            let plan = FaultPlan::new();
            let (device, mut arena) = open(device.description().kind, LONG, &plan);
            let (error, _) = meets(&mut arena, &plan, call, later, Fault::Spoil);
            assert!(matches!(error, Error::Driver { fatal: true, .. }), "{call:?} {later}: {error}");
            assert!(device.lost().is_some());
            let error = arena.capture((), &inputs(), STEP).unwrap_err();
            assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
            let error = arena.step(|step| ops::fill(step, [1], 1.0).map(drop)).unwrap_err();
            assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
        }
    }

    /// A capture that hangs in the driver returns within its deadline.
    fn hung_call_costs_one_deadline(device: &Device) {
        let kind = device.description().kind;
        for (call, later) in places() {
            let plan = FaultPlan::new();
            let (_, mut arena) = open(kind, LONG, &plan);
            // A CUDA device loads a kernel at its first use.
            works(&mut arena);
            drop(arena);
            let deadline = Duration::from_millis(100);
            let (device, mut arena) = open(kind, deadline, &plan);
            let (error, watch) = meets(&mut arena, &plan, call, later, Fault::Never);
            watch.within(deadline + Duration::from_millis(500), "a capture");
            let Error::Timeout { call: named, waited, .. } = error else { panic!("{call:?} {later}: {error}") };
            assert!(named == "capture" && waited >= deadline, "{named} {waited:?}");
            assert!(device.lost().is_some());
            let watch = Watch::start();
            let error = arena.step(|step| ops::fill(step, [1], 1.0).map(drop)).unwrap_err();
            assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
            drop((arena, device));
            watch.within(Duration::from_millis(500), "drops on a lost device");
        }
    }

    /// Bug C: code in the captured region makes a synchronous allocation. It must fail at once with
    /// its own error.
    fn allocation_during_capture_is_an_error(device: &Device) {
        for later in 0..LAUNCHES {
            let plan = FaultPlan::new();
            let (device, mut arena) = open(device.description().kind, LONG, &plan);
            let (error, watch) = meets(&mut arena, &plan, Call::Record, later, Fault::Allocates);
            let Error::Driver { call: "cuMemAlloc", reason, fatal: false } = &error else { panic!("{error}") };
            assert!(reason.contains("CUDA_ERROR_STREAM_CAPTURE"), "{reason}");
            assert!(watch.elapsed() < LONG / 2, "{:?}", watch.elapsed());
            assert_eq!(device.lost(), None);
            works(&mut arena);
        }
    }

    fn graph_memory_nodes_are_refused(device: &Device) {
        let plan = FaultPlan::new();
        let (device, mut arena) = open(device.description().kind, LONG, &plan);
        let (error, _) = meets(&mut arena, &plan, Call::Record, 1, Fault::AllocatesInStream);
        assert!(matches!(error, Error::Driver { call: "capture", fatal: false, .. }), "{error}");
        assert!(error.to_string().contains("4 kernels, 1 memory nodes, 0 others"), "{error}");
        assert_eq!(device.lost(), None);
        works(&mut arena);
    }

    fn failed_replay_can_be_retried(device: &Device) {
        for call in [Call::Upload, Call::Replay, Call::Download] {
            let plan = FaultPlan::new();
            let (device, mut arena) = open(device.description().kind, LONG, &plan);
            let mut captured = arena.capture((), &inputs(), STEP).unwrap();
            replays(&mut captured).unwrap();
            plant(&plan, call, 0, Fault::Fail);
            let error = replays(&mut captured).unwrap_err();
            assert!(matches!(error, Error::Driver { fatal: false, .. }), "{call:?}: {error}");
            assert_eq!(replays(&mut captured).unwrap(), X.map(|x| 16.0 * x), "{call:?}");
            assert_eq!(device.lost(), None);
            drop(captured);
            works(&mut arena);
        }
    }

    fn result_wait_ends_at_deadline(device: &Device) {
        let kind = device.description().kind;
        for call in [Call::Poll, Call::Download] {
            let plan = FaultPlan::new();
            let deadline = Duration::from_millis(100);
            let device = Device::builder(kind).layer(plan.clone()).open().unwrap();
            let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).step_deadline(deadline).build().unwrap();
            let mut captured = arena.capture((), &inputs(), STEP).unwrap();
            replays(&mut captured).unwrap();
            plant(&plan, call, 0, Fault::Never);
            let watch = Watch::start();
            let error = replays(&mut captured).unwrap_err();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            watch.within(deadline + Duration::from_millis(500), "a replay");
            let error = replays(&mut captured).unwrap_err();
            assert!(matches!(error, Error::DeviceLost { .. } | Error::Misuse { .. }), "{error}");
            assert!(error.to_string().to_lowercase().contains("lost"), "{error}");
            let watch = Watch::start();
            drop((captured, arena, device));
            watch.within(Duration::from_millis(500), "drops on a lost device");
        }
    }

    /// Everything dropped after a kernel that never ends costs one deadline in total.
    fn drops_after_hang_share_one_deadline(device: &Device) {
        let deadline = Duration::from_millis(200);
        let plan = FaultPlan::new();
        let (device, mut arena) = open(device.description().kind, deadline, &plan);
        let captured = [(); 3].map(|()| arena.capture((), &inputs(), STEP).unwrap());
        plant(&plan, Call::Poll, 0, Fault::Stalls);
        let watch = Watch::start();
        drop((captured, arena));
        let cause = device.lost().expect("the drops must lose the device").to_owned();
        drop(device);
        assert!(cause.contains("destroy_graph") && cause.contains("had not ended"), "{cause}");
        watch.within(2 * deadline, "dropping the objects of a lost device");
    }

    fn undestroyed_graph_keeps_its_memory(device: &Device) {
        let plan = FaultPlan::new();
        let (_, mut arena) = open(device.description().kind, LONG, &plan);
        let captured = arena.capture((), &inputs(), STEP).unwrap();
        plant(&plan, Call::DestroyGraph, 0, Fault::Fail);
        drop(captured);
        works(&mut arena);
        let (freed, allocated) = (plan.count(Call::Free), plan.count(Call::Allocate));
        drop(arena);
        assert_eq!((plan.count(Call::Free), plan.count(Call::Allocate)), (freed, allocated), "memory of a graph that was not destroyed stays allocated");
    }
}
