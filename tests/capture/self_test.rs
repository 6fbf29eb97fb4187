//! Kernels that compute wrong results are refused before any other work, by name and in bounded
//! time.
//!
//! The contents of the user's cache are tested inside the library, with separate folders. The
//! programs run here have a cache of their own.

#![forbid(unsafe_code)]

use crate::support::example::{command, text};
use crate::support::on_each_device;
use crate::support::witness::{AT_ONCE, SLACK, Watch};
use std::path::Path;
use std::process::Output;
use std::time::Duration;
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::check::same_bits::{self, CaseSize, cases, in_order, runs_on};
use stepscope::device::SelfTest;
use stepscope::{Buffer, Device, DeviceKind, Error};

/// The longest wait for a GPU, whatever its deadline. The emulator uses its deadline.
const SELF_TEST_TIMEOUT: Duration = Duration::from_secs(2);
const DEADLINE: Duration = Duration::from_secs(1);
/// Kernels launched first, in between and late.
const KERNELS: [&str; 3] = ["guard_write", "softmax_forward_f32", "mean_tokens_forward_f32"];

fn open(kind: DeviceKind, plan: &FaultPlan) -> Device {
    Device::builder(kind).deadline(DEADLINE).layer(plan.clone()).open().unwrap()
}

/// Returns how many calls of this kind the self-test makes before it reaches a kernel.
fn before(kind: DeviceKind, call: Call, kernel: &str) -> u64 {
    let plan = FaultPlan::new();
    let device = open(kind, &plan);
    device.synchronize(DEADLINE).unwrap();
    for (_, case) in in_order().into_iter().take_while(|(name, _)| *name != kernel) {
        same_bits::run(&device, &case, CaseSize::Smallest).unwrap();
    }
    plan.count(call)
}

#[track_caller]
fn names(error: &Error, kernel: &str, seen: &str, device: &Device) {
    let Error::Kernels { kernel: named, reason, device: name, ptx } = error else { panic!("{error}") };
    assert_eq!(*named, kernel, "{error}");
    assert!(reason.contains(seen), "{error}");
    assert_eq!((name, ptx), (&device.description().name, &device.description().ptx));
    let message = error.to_string();
    let build = ptx.as_ref().map_or("emulator".into(), ToString::to_string);
    assert!(
        message.contains(kernel) && message.contains(&build) && message.contains("STEPSCOPE_SELF_TEST=never"),
        "{message}"
    );
}

on_each_device! {
    fn self_test_reports_count_and_time(device: &Device) {
        let watch = Watch::start();
        let tested = device.self_test().unwrap();
        let kernels = cases().iter().filter(|(name, _)| runs_on(device, name)).count();
        assert_eq!(tested.kernels, kernels);
        assert!(tested.elapsed > Duration::ZERO && tested.elapsed <= watch.elapsed());
        assert!(tested.to_string().starts_with(&format!("{kernels} kernels give the right bits")), "{tested}");
        // The device works as before, and so does a second self-test.
        assert_eq!(Buffer::from_slice(device, &[1.0f32, 2.0]).unwrap().read().unwrap(), [1.0, 2.0]);
        device.self_test().unwrap();
    }

    fn refused_launch_names_kernel(device: &Device) {
        let kind = device.description().kind;
        for (kernel, fault) in KERNELS.into_iter().zip([Fault::Fail, Fault::Spoil, Fault::Fail]) {
            let launch = before(kind, Call::Launch, kernel) + 1;
            let planted = open(kind, &FaultPlan::new().on(Call::Launch, launch, fault));
            names(&planted.self_test().unwrap_err(), kernel, "planted on Launch", device);
            assert_eq!(planted.lost().is_some(), fault == Fault::Spoil);
            // The next launch does not meet the fault.
            if kernel == KERNELS[0] {
                planted.self_test().unwrap();
            }
        }
    }

    fn hung_kernel_is_named_in_time(device: &Device) {
        let kind = device.description().kind;
        // The number of polls of a GPU depends on its speed, so polls cannot be assigned to kernels
        // there.
        let polled = if kind == DeviceKind::Cuda { (Call::Launch, Fault::Never) } else { (Call::Poll, Fault::Stalls) };
        let healthy = device.self_test().unwrap().elapsed;
        for (kernel, (call, fault)) in [("guard_write", (Call::Launch, Fault::Never)), ("softmax_forward_f32", polled)] {
            let number = before(kind, call, kernel) + 1;
            let planted = open(kind, &FaultPlan::new().on(call, number, fault));
            let watch = Watch::start();
            let error = planted.self_test().unwrap_err();
            // The time of the kernels before it, plus the wait for this kernel.
            let patience = if kind == DeviceKind::Cuda { SELF_TEST_TIMEOUT } else { DEADLINE };
            watch.within(3 * healthy + patience + SLACK, kernel);
            names(&error, kernel, "had not ended after ", device);
            let watch = Watch::start();
            assert!(matches!(planted.self_test().unwrap_err(), Error::DeviceLost { .. }));
            assert!(matches!(Buffer::<f32>::zeros(&planted, 8).unwrap_err(), Error::DeviceLost { .. }));
            drop(planted);
            watch.within(AT_ONCE, "calls on a lost device");
        }
    }

    /// A fault plan counts the program's calls. Calls of the opening self-test count only if the
    /// program asks for that test.
    fn failed_self_test_refuses_opening(device: &Device) {
        let kind = device.description().kind;
        let planted = |kind| {
            let launch = before(device.description().kind, Call::Launch, "softmax_forward_f32") + 1;
            Device::builder(kind).deadline(DEADLINE).layer(FaultPlan::new().on(Call::Launch, launch, Fault::Fail))
        };
        names(&planted(kind).self_test(SelfTest::Always).open().unwrap_err(), "softmax_forward_f32", "planted", device);
        if kind == DeviceKind::Cuda {
            // No other device is opened instead.
            let error = planted(DeviceKind::Auto).self_test(SelfTest::Always).open().unwrap_err();
            names(&error, "softmax_forward_f32", "planted", device);
        }
        for when in [SelfTest::WhenNew, SelfTest::Never] {
            planted(kind).self_test(when).open().unwrap();
        }
        let plan = FaultPlan::new();
        drop(Device::builder(kind).layer(plan.clone()).open().unwrap());
        assert_eq!(plan.count(Call::Launch), 0);
    }

    fn dry_run_refuses_self_test(device: &Device) {
        let arena = stepscope::Arena::builder(device).capacity(stepscope::Capacity::mib(1)).build().unwrap();
        let measured = arena.measure(|step| step.device().self_test().map(drop));
        assert!(matches!(measured.unwrap_err(), Error::Misuse { op: "self_test", .. }));
    }

    /// The first opening on a GPU writes the cache that later openings read.
    fn self_test_results_are_cached(device: &Device) {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("stepscope/kernels");
        let first = run(device, cache.path(), &[]);
        let again = run(device, cache.path(), &[]);
        let remembered = |output: &Output, when: &str| -> String {
            let printed = text(&output.stdout);
            let line = printed.lines().find_map(|line| line.split_once(&format!("remembered {when}: ")));
            line.unwrap_or_else(|| panic!("{printed}{}", text(&output.stderr))).1.to_owned()
        };
        assert_eq!(remembered(&first, "before"), "no");
        if device.description().kind == DeviceKind::Cuda {
            let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
            assert_eq!(files.len(), 1, "{files:?}");
            let path = files[0].display().to_string();
            assert_eq!([remembered(&first, "after"), remembered(&again, "before")], [path.clone(), path]);
            let record = std::fs::read_to_string(&files[0]).unwrap();
            let description = device.description();
            let ptx = description.ptx.as_ref().unwrap().to_string();
            for part in [&description.name, &ptx, description.driver.as_ref().unwrap()] {
                assert!(record.contains(part), "{record}");
            }
            // An unusable cache does not make the program fail.
            let output = run(device, Path::new("/dev/null"), &[]);
            assert_eq!(remembered(&output, "after"), "no");
        } else {
            assert_eq!(remembered(&first, "after"), "no");
            assert!(!folder.exists());
        }
    }

    fn the_environment_decides(device: &Device) {
        let cache = tempfile::tempdir().unwrap();
        let output = command("check", device, &["--self-test"])
            .env("XDG_CACHE_HOME", cache.path())
            .env("STEPSCOPE_SELF_TEST", "sometimes")
            .output()
            .unwrap();
        let errors = text(&output.stderr);
        assert!(!output.status.success(), "{errors}");
        assert!(errors.contains("new, always or never in STEPSCOPE_SELF_TEST, got `sometimes`"), "{errors}");
        // `never` overrides the program, and nothing is written.
        run(device, cache.path(), &[("STEPSCOPE_SELF_TEST", "never")]);
        assert!(!cache.path().join("stepscope").exists());
    }
}

/// Runs the example that opens a device in each way, with its own cache.
fn run(device: &Device, cache: &Path, variables: &[(&str, &str)]) -> Output {
    let mut command = command("check", device, &["--self-test"]);
    let output =
        command.env("XDG_CACHE_HOME", cache).envs(variables.iter().copied()).output().expect("the example starts");
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    output
}
