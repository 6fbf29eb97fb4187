//! Kernels that do not do what they must are refused before anything is computed, by name and in bounded time.
//!
//! What stands in the user's cache is tested inside the library, with folders of its own; here programs run with a cache of
//! their own.

#![forbid(unsafe_code)]

use crate::support::example::{command, text};
use crate::support::on_each_device;
use crate::support::witness::{AT_ONCE, SLACK, Watch};
use std::path::Path;
use std::process::Output;
use std::time::Duration;
use stepscope::faults::{Call, Fault, FaultPlan};
use stepscope::same_bits::{self, Form, cases, in_order};
use stepscope::{Buffer, Device, DeviceKind, Error, SelfTest};

/// How long a GPU is waited for, whatever its deadline; the emulator by its deadline.
const PATIENCE: Duration = Duration::from_secs(2);
const DEADLINE: Duration = Duration::from_secs(1);
/// Kernels whose launches are the first, in between and late.
const KERNELS: [&str; 3] = ["guard_write", "softmax_forward_f32", "mean_tokens_forward_f32"];

fn open(kind: DeviceKind, plan: &FaultPlan) -> Device {
    Device::builder(kind).deadline(DEADLINE).faults(plan.clone()).open().unwrap()
}

/// Calls of a kind that the self-test has made when it comes to a kernel.
fn before(kind: DeviceKind, call: Call, kernel: &str) -> u64 {
    let plan = FaultPlan::new();
    let device = open(kind, &plan);
    device.synchronize(DEADLINE).unwrap();
    for (_, case) in in_order().into_iter().take_while(|(name, _)| *name != kernel) {
        same_bits::run(&device, &case, Form::Smallest).unwrap();
    }
    plan.count(call)
}

#[track_caller]
fn names(error: &Error, kernel: &str, seen: &str, device: &Device) {
    let Error::Kernels { kernel: named, reason, device: name, ptx } = error else { panic!("{error}") };
    assert_eq!(*named, kernel, "{error}");
    assert!(reason.contains(seen), "{error}");
    assert_eq!((name, ptx), (&device.description().name, &device.description().ptx));
    let told = error.to_string();
    let build = ptx.as_ref().map_or("emulator".into(), ToString::to_string);
    assert!(told.contains(kernel) && told.contains(&build) && told.contains("STEPSCOPE_SELF_TEST=never"), "{told}");
}

on_each_device! {
    fn by_hand_it_tells_how_many_kernels_and_how_long(device: &Device) {
        let watch = Watch::start();
        let tested = device.self_test().unwrap();
        assert_eq!(tested.kernels, cases().len());
        assert!(tested.elapsed > Duration::ZERO && tested.elapsed <= watch.elapsed());
        assert!(tested.to_string().starts_with(&format!("{} kernels give the right bits", cases().len())), "{tested}");
        // The device goes on as before, and so does the test.
        assert_eq!(Buffer::from_slice(device, &[1.0f32, 2.0]).unwrap().read().unwrap(), [1.0, 2.0]);
        device.self_test().unwrap();
    }

    fn a_launch_that_is_refused_names_its_kernel(device: &Device) {
        let kind = device.description().kind;
        for (kernel, fault) in KERNELS.into_iter().zip([Fault::Fail, Fault::Spoil, Fault::Fail]) {
            let launch = before(kind, Call::Launch, kernel) + 1;
            let planted = open(kind, &FaultPlan::new().on(Call::Launch, launch, fault));
            names(&planted.self_test().unwrap_err(), kernel, "planted on Launch", device);
            assert_eq!(planted.lost().is_some(), fault == Fault::Spoil);
            // The next launch is another.
            if kernel == KERNELS[0] {
                assert_eq!(planted.self_test().unwrap().kernels, cases().len());
            }
        }
    }

    fn a_kernel_that_does_not_end_is_named_in_time_and_nothing_waits_for_it(device: &Device) {
        let kind = device.description().kind;
        // How often a GPU is asked whether it is done depends on its speed: there, a poll is anyone's.
        let polled = if kind == DeviceKind::Cuda { (Call::Launch, Fault::Never) } else { (Call::Poll, Fault::Stalls) };
        for (kernel, (call, fault)) in [("guard_write", (Call::Launch, Fault::Never)), ("softmax_forward_f32", polled)] {
            let number = before(kind, call, kernel) + 1;
            let planted = open(kind, &FaultPlan::new().on(call, number, fault));
            let (watch, healthy) = (Watch::start(), device.self_test().unwrap().elapsed);
            let error = planted.self_test().unwrap_err();
            // What comes before it, the kernel, and no more.
            let patience = if kind == DeviceKind::Cuda { PATIENCE } else { DEADLINE };
            watch.within(3 * healthy + patience + SLACK, kernel);
            names(&error, kernel, "had not ended after ", device);
            let watch = Watch::start();
            assert!(matches!(planted.self_test().unwrap_err(), Error::DeviceLost { .. }));
            assert!(matches!(Buffer::<f32>::zeros(&planted, 8).unwrap_err(), Error::DeviceLost { .. }));
            drop(planted);
            watch.within(AT_ONCE, "what is asked of a lost device");
        }
    }

    /// A plan counts what the program does, unless the program asks for more.
    fn an_opening_is_refused_when_the_test_is_asked_for(device: &Device) {
        let kind = device.description().kind;
        let planted = |kind| {
            let launch = before(device.description().kind, Call::Launch, "softmax_forward_f32") + 1;
            Device::builder(kind).deadline(DEADLINE).faults(FaultPlan::new().on(Call::Launch, launch, Fault::Fail))
        };
        names(&planted(kind).self_test(SelfTest::Always).open().unwrap_err(), "softmax_forward_f32", "planted", device);
        if kind == DeviceKind::Cuda {
            // No other device takes its place.
            let error = planted(DeviceKind::Auto).self_test(SelfTest::Always).open().unwrap_err();
            names(&error, "softmax_forward_f32", "planted", device);
        }
        for when in [SelfTest::WhenNew, SelfTest::Never] {
            planted(kind).self_test(when).open().unwrap();
        }
        let plan = FaultPlan::new();
        drop(Device::builder(kind).faults(plan.clone()).open().unwrap());
        assert_eq!(plan.count(Call::Launch), 0);
    }

    fn a_rehearsal_has_no_kernels_to_test(device: &Device) {
        let arena = stepscope::Arena::builder(device).capacity(stepscope::Capacity::mib(1)).build().unwrap();
        let measured = arena.measure(|step| step.device().self_test().map(drop));
        assert!(matches!(measured.unwrap_err(), Error::Misuse { op: "self_test", .. }));
    }

    /// The first opening writes what later ones read, and only on a GPU.
    fn a_program_remembers_what_it_has_tested(device: &Device) {
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
            let told = std::fs::read_to_string(&files[0]).unwrap();
            let description = device.description();
            let ptx = description.ptx.as_ref().unwrap().to_string();
            for part in [&description.name, &ptx, description.driver.as_ref().unwrap()] {
                assert!(told.contains(part), "{told}");
            }
            // A cache that is none is no reason to fail.
            let output = run(device, Path::new("/dev/null"), &[]);
            assert_eq!(remembered(&output, "after"), "no");
        } else {
            assert_eq!(remembered(&first, "after"), "no");
            assert!(!folder.exists());
        }
    }

    fn the_environment_decides(device: &Device) {
        let cache = tempfile::tempdir().unwrap();
        let output = command("same_bits", device, &["--self-test"])
            .env("XDG_CACHE_HOME", cache.path())
            .env("STEPSCOPE_SELF_TEST", "sometimes")
            .output()
            .unwrap();
        let told = text(&output.stderr);
        assert!(!output.status.success(), "{told}");
        assert!(told.contains("new, always or never in STEPSCOPE_SELF_TEST, got `sometimes`"), "{told}");
        // Never, whatever the program says: nothing is written.
        run(device, cache.path(), &[("STEPSCOPE_SELF_TEST", "never")]);
        assert!(!cache.path().join("stepscope").exists());
    }
}

/// Runs the example that opens a device in each way, with a cache of its own.
fn run(device: &Device, cache: &Path, variables: &[(&str, &str)]) -> Output {
    let mut command = command("same_bits", device, &["--self-test"]);
    let output =
        command.env("XDG_CACHE_HOME", cache).envs(variables.iter().copied()).output().expect("the example starts");
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    output
}
