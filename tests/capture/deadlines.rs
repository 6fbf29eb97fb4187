//! Every call of the library has a bounded wait, whatever the driver does.
//!
//! This guards against a bug of ztensor on GB10: an allocation of 48 KB stalled in the kernel, and
//! training hung without a message. Here each driver call in turn never returns. The caller must
//! get a typed error within the call's deadline plus [`SLACK`]. Every later call must fail at once,
//! and the process must be able to save its data and exit. Only the machine's own pauses extend
//! these limits, see [`witness`].

#![forbid(unsafe_code)]

use crate::support::on_each_device;
use crate::support::witness::{AT_ONCE, SLACK, Watch};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::files::replace_file;
use stepscope::memory::{ArenaBuilder, Overflow};
use stepscope::report::ArenaReport;
use stepscope::{Arena, Buffer, Capacity, Device, DeviceKind, Error, Result, ops};

/// A deadline longer than any test waits. A call that is answered by it has used the wrong
/// deadline.
const LONG: Duration = Duration::from_secs(20);
/// The elements of a tensor that fits a small arena, and of one that does not.
const FITS: usize = 64;
const OVERFLOWS: usize = 4096;
/// The environment variable that makes the exit test play the child process.
const CHILD: &str = "STEPSCOPE_TEST_HANG";

/// The elements of an upload that uses every slot of a device's ring, and the first slot again.
const GOES_ROUND: usize = 3 * SLOT_BYTES / 4;
const SLOT_BYTES: usize = 4096;

/// The driver calls of a capture, which `tests/capture/capture.rs` and `tests/training/trainer.rs`
/// make.
const CAPTURE: [Call; 9] = [
    Call::Load,
    Call::BeginCapture,
    Call::Record,
    Call::EndCapture,
    Call::GraphNodes,
    Call::Instantiate,
    Call::Replay,
    Call::DestroyGraph,
    Call::QueueDownload,
];

/// The driver calls of a group, which `tests/group/group.rs` makes.
const GROUP: [Call; 4] = [Call::JoinLink, Call::Exchange, Call::FollowExchanges, Call::LeaveLink];

/// Returns all other driver calls.
fn calls() -> impl Iterator<Item = Call> {
    Call::ALL.into_iter().filter(|call| !CAPTURE.contains(call) && !GROUP.contains(call))
}

/// True for calls made when the device is dropped, where no caller can receive an error.
fn ends_with_the_device(call: Call) -> bool {
    matches!(call, Call::FreePinned | Call::DestroyFence)
}

fn open(kind: DeviceKind, deadline: Duration, plan: &FaultPlan) -> Device {
    Device::builder(kind).deadline(deadline).staging(2, SLOT_BYTES).layer(plan.clone()).open().unwrap()
}

/// Makes the next call of this kind meet `fault`.
fn plant(plan: &FaultPlan, call: Call, fault: Fault) {
    let _ = plan.clone().on(call, plan.count(call) + 1, fault);
}

/// Builds an arena that holds [`FITS`] elements and not [`OVERFLOWS`].
fn small(device: &Device) -> ArenaBuilder {
    Arena::builder(device).capacity(Capacity::Bytes(1024)).reserve_bytes(0)
}

/// Returns a pool with room for a few times [`OVERFLOWS`] elements, none of it allocated in
/// advance.
fn pool(deadline: Duration) -> Overflow {
    Overflow::Pool { cap_bytes: 1 << 20, prime_bytes: 0, deadline }
}

/// Runs a step that makes one tensor of `elements` elements.
fn make(arena: &mut Arena, elements: usize) -> Result<()> {
    arena.step(|step| ops::fill(step, [elements], 1.0).map(drop))
}

/// Returns the report of a timeout of `call`, which must have lasted its deadline and not much
/// longer.
#[track_caller]
fn timed_out(error: &Error, call: &str, deadline: Duration, watch: Watch) -> Option<ArenaReport> {
    watch.within(deadline + SLACK, call);
    let Error::Timeout { call: name, waited, report } = error else { panic!("{call}: {error}") };
    assert_eq!(*name, call, "{error}");
    assert!(watch.elapsed() >= deadline, "{call}: the wait ended before its deadline, after {:?}", watch.elapsed());
    // The last call waits for the deadline less the time of the work before it.
    let before = AT_ONCE + watch.pauses();
    assert!(
        *waited <= watch.elapsed() && *waited + before >= deadline,
        "{call}: the error reports a wait of {waited:?}"
    );
    report.as_deref().cloned()
}

/// Checks that every use of a lost device fails at once and names the first cause.
#[track_caller]
fn lost(device: &Device, arena: Option<&mut Arena>, buffer: Option<&mut Buffer<f32>>, cause: &str) {
    let reason = device.lost().unwrap_or_else(|| panic!("{cause}: the device is not lost")).to_owned();
    assert!(reason.contains(cause), "{reason}");
    let refused = |what: &str, error: Error, watch: Watch| {
        watch.within(AT_ONCE, what);
        assert_eq!(error, Error::DeviceLost { cause: reason.clone() }, "{what}");
    };
    let now = Watch::start;
    let watch = now();
    refused("synchronize", device.synchronize(LONG).unwrap_err(), watch);
    let watch = now();
    refused("a new buffer", Buffer::<f32>::zeros(device, 8).unwrap_err(), watch);
    let watch = now();
    refused("a new arena", small(device).build().unwrap_err(), watch);
    if let Some(buffer) = buffer {
        let watch = now();
        refused("a buffer's read", buffer.read().unwrap_err(), watch);
        let watch = now();
        refused("a buffer's write", buffer.write(0, &[1.0]).unwrap_err(), watch);
    }
    if let Some(arena) = arena {
        for elements in [FITS, OVERFLOWS] {
            let watch = now();
            refused("a step", make(arena, elements).unwrap_err(), watch);
        }
        let watch = now();
        refused("a step that does nothing", arena.step(|_| Ok(())).unwrap_err(), watch);
        let watch = now();
        let report = arena.report();
        watch.within(AT_ONCE, "a report");
        assert_eq!(report.memory.device_free_bytes, None, "the report of a lost device has no free bytes");
        assert_eq!(report.offset_bytes, 0);
    }
}

/// Checks that dropping `value` of a lost device leaks it instead of waiting.
#[track_caller]
fn drops_at_once<T>(value: T, what: &str) {
    let watch = Watch::start();
    drop(value);
    watch.within(AT_ONCE, what);
}

on_each_device! {
    /// Runs 100 times on the emulator, and 5 times on CUDA, where opening a device takes longer.
    fn first_pool_allocation_meets_its_deadline(device: &Device) {
        let kind = device.description().kind;
        let deadline = Duration::from_millis(20);
        for _ in 0..if kind == DeviceKind::Cuda { 5 } else { 100 } {
            let plan = FaultPlan::new();
            let device = open(kind, LONG, &plan);
            let mut weights = Buffer::from_slice(&device, &[1.0f32; FITS]).unwrap();
            let mut arena = small(&device).overflow(pool(deadline)).build().unwrap();
            make(&mut arena, FITS).unwrap();
            assert_eq!(plan.count(Call::PoolAllocate), 0);
            plant(&plan, Call::PoolAllocate, Fault::Never);
            let watch = Watch::start();
            let error = make(&mut arena, OVERFLOWS).unwrap_err();
            let report = timed_out(&error, "pool_allocate", deadline, watch).expect("a report");
            assert_eq!((report.overflow.timeouts, report.overflow.allocations), (1, 0));
            assert!(error.to_string().contains("pool_allocate") && error.to_string().contains("restart"), "{error}");
            lost(&device, Some(&mut arena), Some(&mut weights), "pool_allocate");
            drops_at_once(arena, "dropping the arena");
            drops_at_once(weights, "a buffer");
            drops_at_once(device, "dropping the device");
        }
    }

    fn each_hung_call_costs_its_deadline(device: &Device) {
        let kind = device.description().kind;
        for call in calls() {
            never_returns(kind, call, Fault::Never);
        }
        for call in [Call::Poll, Call::PollFence] {
            never_returns(kind, call, Fault::Stalls);
        }
    }

    /// A silent stall becomes an error with a report at the step's deadline, long before the
    /// device's.
    fn stalled_device_meets_step_deadline(device: &Device) {
        let deadline = Duration::from_millis(40);
        let plan = FaultPlan::new();
        let device = open(device.description().kind, LONG, &plan);
        let mut arena = small(&device).step_deadline(deadline).build().unwrap();
        // The kernels of a CUDA device are loaded at their first launch.
        let mut warm = small(&device).build().unwrap();
        make(&mut warm, FITS).unwrap();
        make(&mut arena, FITS).unwrap();
        plant(&plan, Call::Poll, Fault::Never);
        let watch = Watch::start();
        let error = make(&mut arena, FITS).unwrap_err();
        let report = timed_out(&error, "synchronize", deadline, watch).expect("a report");
        assert_eq!((report.allocations, report.resets), (2, 1), "the counts while the arena waited");
        lost(&device, Some(&mut arena), None, "synchronize");
    }

    /// A step's deadline also bounds waits inside the step.
    fn reads_respect_step_deadline(device: &Device) {
        let deadline = Duration::from_millis(40);
        for call in [Call::Poll, Call::Download] {
            let plan = FaultPlan::new();
            let device = open(device.description().kind, Duration::from_secs(1), &plan);
            let mut warm = small(&device).build().unwrap();
            make(&mut warm, FITS).unwrap();
            let mut arena = small(&device).step_deadline(deadline).build().unwrap();
            plant(&plan, call, Fault::Never);
            let watch = Watch::start();
            let error = arena.step(|step| step.read(&ops::fill(step, [FITS], 1.0)?)).unwrap_err();
            watch.within(deadline + SLACK, "a read");
            assert!(matches!(error, Error::Timeout { report: Some(_), .. }), "{error}");
        }
    }

    /// The deadline of an overflow also covers its admission check, which runs before it allocates.
    fn overflow_admission_respects_deadline(device: &Device) {
        let deadline = Duration::from_millis(40);
        let plan = FaultPlan::new();
        let device = open(device.description().kind, Duration::from_secs(1), &plan);
        let mut arena = small(&device).overflow(pool(deadline)).build().unwrap();
        plant(&plan, Call::FreeBytes, Fault::Never);
        let watch = Watch::start();
        let error = make(&mut arena, OVERFLOWS).unwrap_err();
        timed_out(&error, "free_bytes", deadline, watch).expect("a report");
    }

    /// A call that returns after its deadline loses the device, just like one that never returns.
    fn late_return_loses_the_device(device: &Device) {
        let deadline = Duration::from_millis(20);
        let plan = FaultPlan::new();
        let device = open(device.description().kind, LONG, &plan);
        let mut arena = small(&device).overflow(pool(deadline)).build().unwrap();
        plant(&plan, Call::PoolAllocate, Fault::Delay(3 * deadline));
        let watch = Watch::start();
        let error = make(&mut arena, OVERFLOWS).unwrap_err();
        timed_out(&error, "pool_allocate", deadline, watch).expect("a report");
        std::thread::sleep(3 * deadline);
        lost(&device, Some(&mut arena), None, "pool_allocate");
    }

    fn short_delays_are_tolerated(device: &Device) {
        let delay = Duration::from_millis(10);
        for call in calls() {
            let plan = FaultPlan::new();
            let device = open(device.description().kind, LONG, &plan);
            plant(&plan, call, Fault::Delay(delay));
            let start = Instant::now();
            everything(&device, &plan).unwrap_or_else(|error| panic!("{call:?}: {error}"));
            assert_eq!(device.lost(), None, "{call:?}");
            drop(device);
            assert!(start.elapsed() >= delay, "{call:?}");
        }
    }

    /// A failure that spoils the context is as final as a hang, and is reported without a wait.
    fn spoiled_device_is_lost_at_once(device: &Device) {
        calls().for_each(|call| loses_at_once(device.description().kind, call, Fault::Spoil));
    }

    /// A panic is reported as one, with its call and its message. Nothing of the device is
    /// destroyed afterwards.
    fn driver_panic_loses_the_device(device: &Device) {
        calls().for_each(|call| loses_at_once(device.description().kind, call, Fault::Panics));
    }

    /// Every call meets its deadline: nothing is lost, and nothing fails.
    fn met_deadlines_change_nothing(device: &Device) {
        let plan = FaultPlan::new();
        let device = open(device.description().kind, LONG, &plan);
        for _ in 0..3 {
            everything(&device, &plan).unwrap();
        }
        assert_eq!(device.lost(), None);
        drop(device);
        for call in calls() {
            assert!(plan.count(call) > 0, "`everything` never called {call:?}");
        }
    }

    /// The test program starts itself again. The child hangs in its first pool allocation, saves
    /// its host data, and returns from `main`.
    fn process_saves_and_exits(device: &Device) {
        let kind = device.description().kind;
        let values: Vec<f32> = (0..FITS).map(|at| at as f32).collect();
        if let Some(path) = std::env::var_os(CHILD) {
            return hang_and_save(kind, &values, Path::new(&path));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        let name = format!("deadlines::process_saves_and_exits::{kind}");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &name, "--include-ignored", "--nocapture", "--test-threads=1"]).env(CHILD, &path);
        let child = Process(command.spawn().unwrap());
        let (status, after) = child.ends_after(&path);
        assert!(status.success(), "{status}");
        assert!(after < Duration::from_secs(2), "the process ended {after:?} after its checkpoint");
        assert_eq!(std::fs::read(&path).unwrap(), bytemuck::cast_slice::<f32, u8>(&values));
    }
}

/// Makes every kind of driver call at least once.
fn everything(device: &Device, plan: &FaultPlan) -> Result<()> {
    let overflow = Overflow::Pool { cap_bytes: 1 << 20, prime_bytes: 64 << 10, deadline: LONG };
    let mut arena = small(device).overflow(overflow).step_deadline(LONG).build()?;
    let buffer = Buffer::from_slice(device, &[1.0f32; FITS])?;
    let staged = Buffer::from_slice(device, &[3.0f32; GOES_ROUND])?;
    let read = arena.step(|step| {
        ops::fill(step, [OVERFLOWS], 2.0)?;
        step.read(&ops::copy(step, &step.lend(&buffer, [FITS])?)?)
    })?;
    assert_eq!(read, [1.0; FITS]);
    arena.trim()?;
    let frees = plan.count(Call::Free);
    drop((arena, buffer, staged));
    assert_eq!(plan.count(Call::Free), if device.lost().is_some() { plan.count(Call::Free) } else { frees + 3 });
    Ok(())
}

/// Makes every kind of driver call, of which one of this kind meets a fault that loses the device.
fn loses_at_once(kind: DeviceKind, call: Call, fault: Fault) {
    let plan = FaultPlan::new();
    let device = open(kind, LONG, &plan);
    let mut buffer = Buffer::from_slice(&device, &[0.0f32; FITS]).unwrap();
    plant(&plan, call, fault);
    let watch = Watch::start();
    let outcome = everything(&device, &plan);
    watch.within(Duration::from_secs(2), "the call that loses the device");
    // Calls that only free memory have no caller to report to.
    let fails = !matches!(call, Call::Free | Call::DestroyPool) && !ends_with_the_device(call);
    assert_eq!(outcome.is_err(), fails, "{call:?}: {outcome:?}");
    if let (Err(error), Fault::Panics) = (&outcome, fault) {
        let Error::Panic { call: name, message } = error else { panic!("{call:?}: {error}") };
        assert_eq!(*message, format!("planted on {call:?}"));
        assert!(error.to_string().starts_with(&format!("`{name}` panicked: planted on")), "{error}");
    }
    if ends_with_the_device(call) {
        drop(buffer);
        drops_at_once(device, "dropping the device");
        assert!(plan.count(call) > 0, "{call:?}");
        return;
    }
    lost(&device, None, Some(&mut buffer), "planted");
    let destroyed =
        || [Call::Free, Call::DestroyPool, Call::FreePinned, Call::DestroyFence].map(|call| plan.count(call));
    let before = destroyed();
    drops_at_once(buffer, "a buffer");
    drops_at_once(device, "dropping the device");
    assert_eq!(destroyed(), before, "{call:?}: something of a lost device was destroyed");
}

/// Provokes one call of a kind that never returns, or after which the device never becomes idle.
fn never_returns(kind: DeviceKind, call: Call, fault: Fault) {
    let deadline = Duration::from_millis(100);
    let plan = FaultPlan::new();
    let device = open(kind, deadline, &plan);
    let mut weights = Buffer::from_slice(&device, &[1.0f32; FITS]).unwrap();
    let mut arena = small(&device).overflow(pool(deadline)).build().unwrap();
    make(&mut arena, OVERFLOWS).unwrap();
    let other = Buffer::from_slice(&device, &[1.0f32; FITS]).unwrap();
    let read = |arena: &mut Arena| arena.step(|step| step.read(&ops::fill(step, [FITS], 1.0)?)).map(drop);
    let mut staged = Buffer::<f32>::zeros(&device, GOES_ROUND).unwrap();

    plant(&plan, call, fault);
    if ends_with_the_device(call) {
        drop((arena, weights, other, staged));
        let watch = Watch::start();
        drop(device);
        watch.within(deadline + SLACK, "dropping the device");
        assert!(watch.elapsed() >= deadline, "{call:?}: {:?}", watch.elapsed());
        return;
    }
    let watch = Watch::start();
    // The call that fails, by its name in the error, and whether an arena was waiting.
    let (name, outcome, of_arena) = match call {
        Call::FreeBytes => ("free_bytes", small(&device).build().map(drop), false),
        Call::Allocate => ("allocate", Buffer::<f32>::zeros(&device, 8).map(drop), false),
        Call::Free => {
            drop(other);
            ("free", Ok(()), false)
        }
        Call::CreatePool => ("create_pool", small(&device).overflow(pool(deadline)).build().map(drop), false),
        Call::PoolAllocate => ("pool_allocate", make(&mut arena, OVERFLOWS), true),
        Call::PoolFree => ("pool_free", make(&mut arena, OVERFLOWS), true),
        Call::TrimPool => ("trim_pool", arena.trim(), true),
        Call::DestroyPool => {
            let old = std::mem::replace(&mut arena, small(&device).build().unwrap());
            drop(old);
            ("destroy_pool", Ok(()), false)
        }
        Call::AllocatePinned | Call::CreateFence => ("allocate_pinned", staged.write(0, &[1.0; GOES_ROUND]), false),
        Call::Upload | Call::PollFence => ("upload", staged.write(0, &[1.0; GOES_ROUND]), false),
        Call::RecordFence => ("record_fence", staged.write(0, &[1.0; GOES_ROUND]), false),
        Call::Launch => ("launch", make(&mut arena, FITS), true),
        Call::Download => ("download", read(&mut arena), true),
        Call::Poll => ("synchronize", read(&mut arena), true),
        other => panic!("no test provokes {other:?}"),
    };
    match outcome {
        Err(error) => {
            let report = timed_out(&error, name, deadline, watch);
            assert_eq!(report.is_some(), of_arena, "{name}: the error has a report only if an arena waited");
        }
        // A drop has no caller to report to. It waits for its deadline once.
        Ok(()) => {
            watch.within(deadline + SLACK, name);
            assert!(matches!(call, Call::Free | Call::DestroyPool), "{name} returned");
            assert!(watch.elapsed() >= deadline, "{name}: {:?}", watch.elapsed());
        }
    }
    lost(&device, Some(&mut arena), Some(&mut weights), name);
    drops_at_once(arena, "dropping the arena");
    drops_at_once(weights, "a buffer");
}

/// Runs the child process, which meets a hang.
fn hang_and_save(kind: DeviceKind, values: &[f32], path: &Path) {
    let plan = FaultPlan::new();
    let device = open(kind, LONG, &plan);
    let weights = Buffer::from_slice(&device, values).unwrap();
    let held = weights.read().unwrap();
    let mut arena = small(&device).overflow(pool(Duration::from_millis(20))).build().unwrap();
    plant(&plan, Call::PoolAllocate, Fault::Never);
    let error = make(&mut arena, OVERFLOWS).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    replace_file(path, bytemuck::cast_slice(&held)).unwrap();
    // The arena and the buffer of the lost device are dropped here, and the test program's `main`
    // returns.
}

/// A child process, killed when its handle is dropped.
struct Process(Child);

impl Process {
    /// Returns the exit status, and the time from the child's file write to its exit.
    fn ends_after(mut self, path: &Path) -> (ExitStatus, Duration) {
        let start = Instant::now();
        let mut written = None;
        while start.elapsed() < Duration::from_secs(60) {
            if let Some(status) = self.0.try_wait().unwrap() {
                assert!(path.exists(), "the process ended ({status}) and wrote nothing");
                return (status, written.map_or(Duration::ZERO, |written: Instant| written.elapsed()));
            }
            if written.is_none() && path.exists() {
                written = Some(Instant::now());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("the process still runs after {:?}, its checkpoint written: {}", start.elapsed(), path.exists());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
