//! A kernel of another package that never ends, and the calls that meet it. Each process gets the
//! typed error, and exits by itself within its deadline plus two seconds. The next process trains.
//!
//! The test program starts itself again for each process. `STEPSCOPE_STUCK_RUNS` is the number of
//! runs per case (default 1).

#![forbid(unsafe_code)]

use downstream::builder;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use stepscope::capture::Record;
use stepscope::tensor::Target;
use stepscope::{Arena, Buffer, Capacity, DeviceKind, Error, HostInputs, Optimizer, Result, ops};

/// The environment variable that makes the test play a child process, and names its case.
const WAY: &str = "STEPSCOPE_TEST_STUCK";
const DEADLINE: Duration = Duration::from_secs(2);
const SLACK: Duration = Duration::from_secs(2);
/// More launches than any driver queue holds.
const LAUNCHES: usize = 5000;

/// The calls that meet the kernel.
const WAYS: [&str; 7] = ["download", "replay", "launches", "upload", "drop", "end", "exit"];

/// Queues the kernel. On the emulator the launch itself never returns; on a GPU the next call meets
/// it.
fn stuck(arena: &mut Arena, flag: &mut Buffer<u32>) -> Result<()> {
    arena.step(|step| {
        let mut flag = step.lend_mut(flag, [1])?;
        step.launch(downstream_kernels::endless { flag: flag.out() })
    })
}

/// Runs one case, and returns the error, if there is a caller to receive it.
fn meet(kind: DeviceKind, way: &str) -> Result<()> {
    let device = builder(kind).deadline(DEADLINE).open()?;
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(16)).build()?;
    let mut flag = Buffer::<u32>::zeros(&device, 1)?;
    let mut values = Buffer::<f32>::zeros(&device, 1 << 20)?;
    let double: Record<(), _> = |step, (), slots| Ok(slots.output(&ops::scale(step, &slots.input::<f32>(0)?, 2.0)?));
    let x = [1.0f32; 8];
    let inputs = HostInputs::new().with(&x, [8])?;
    let mut captured = arena.capture((), &inputs, double)?;
    // All first-use work is done by now.
    let replay = captured.replay(&inputs)?;
    replay.read(*replay.outputs())?;
    eprintln!("begins");
    stuck(&mut arena, &mut flag)?;
    match way {
        "download" => values.read().map(drop),
        "replay" => {
            (0..LAUNCHES).try_for_each(|_| captured.replay(&inputs).map(drop)).and_then(|()| values.read().map(drop))
        }
        "launches" => {
            (0..LAUNCHES).try_for_each(|_| arena.step(|step| ops::fill(step, [8], 1.0).map(drop)))?;
            values.read().map(drop)
        }
        // Larger than the upload ring, so that one upload must wait for another.
        "upload" => (0..LAUNCHES).try_for_each(|_| values.write(0, &vec![1.0; 1 << 20])),
        "drop" => {
            drop((captured, values, flag, arena));
            // A drop has no caller to report to; the next call does.
            device.synchronize(DEADLINE)
        }
        "end" => Ok(()),
        "exit" => {
            let error = values.read().unwrap_err();
            eprintln!("error: {error}");
            std::process::exit(3)
        }
        other => panic!("unknown way to end: {other}"),
    }
}

/// Runs as the child process, if this is one.
fn ran_as_child(kind: DeviceKind) -> bool {
    let Ok(way) = std::env::var(WAY) else { return false };
    if way == "train" {
        println!("weights {}", trained(kind).unwrap());
        return true;
    }
    if let Err(error) = meet(kind, &way) {
        assert!(matches!(error, Error::Timeout { .. } | Error::DeviceLost { .. }), "{error}");
        eprintln!("error: {error}");
    }
    true
}

/// Starts the test program again for one case. Returns its output, and its duration from the start
/// of the kernel.
fn process(kind: DeviceKind, way: &str) -> (Output, Duration) {
    let name = format!("{}::endless_kernel_meets_deadlines", kind);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &name, "--include-ignored", "--nocapture", "--test-threads=1"]).env(WAY, way);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut began, mut errors) = (Instant::now(), String::new());
    let stderr = std::io::BufReader::new(child.stderr.take().unwrap());
    for line in std::io::BufRead::lines(stderr).map_while(std::io::Result::ok) {
        if line == "begins" {
            began = Instant::now();
        }
        errors += &(line + "\n");
    }
    let mut output = child.wait_with_output().unwrap();
    output.stderr = errors.into_bytes();
    (output, began.elapsed())
}

/// Returns the digest of a small model's weights after a few captured updates.
fn trained(kind: DeviceKind) -> Result<String> {
    use stepscope::optim::UpdateTicket;
    use stepscope::parameters::Initializer;
    use stepscope::{AdamW, Gradients, ParameterSpec, Parameters, Tape};
    let device = builder(kind).open()?;
    let mut spec = ParameterSpec::builder();
    let w = spec.add("w", [8, 3], Initializer::fan_in(8));
    let mut weights = Parameters::new(&device, &spec.build()?, 7)?;
    let mut gradients = Gradients::zeros(&weights)?;
    let mut adamw = Optimizer::new(&weights, AdamW::default())?;
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    let x: Vec<f32> = (0..32).map(|at| (at as f32).sin()).collect();
    let inputs = HostInputs::new().with(&x, [4, 8])?.with(&[0u32, 2, 1, 0], [4])?;
    let state = (w, &mut weights, &mut gradients, &mut adamw);
    let mut captured = arena.capture(state, &inputs, |step, (w, weights, gradients, adamw), slots| {
        gradients.zero(step)?;
        let tape = Tape::new(step, weights);
        let loss =
            tape.cross_entropy(&tape.linear(&tape.input(slots.input::<f32>(0)?), *w, None)?, slots.indices(1)?)?;
        tape.backward(&loss, gradients)?;
        adamw.apply(UpdateTicket::each_replay(slots), step, weights, gradients)?;
        Ok(slots.output(loss.value()))
    })?;
    for _ in 0..20 {
        captured.state_mut().3.advance()?.leave_to_replay();
        captured.replay(&inputs)?;
    }
    drop(captured);
    weights.sha256()
}

/// Runs every case as often as requested, and trains in between.
fn all(kind: DeviceKind) {
    if ran_as_child(kind) {
        return;
    }
    let known = trained(DeviceKind::Emulated).unwrap();
    let runs = std::env::var("STEPSCOPE_STUCK_RUNS").map_or(1, |runs| runs.parse().unwrap());
    let mut longest = Duration::ZERO;
    // On the emulator the launch itself fails, so the other cases are never reached.
    let ways = if kind == DeviceKind::Emulated { &WAYS[..1] } else { &WAYS };
    for way in ways.repeat(runs) {
        let (Output { status, stderr, .. }, took) = process(kind, way);
        let errors = String::from_utf8_lossy(&stderr);
        println!(
            "{way}: {status} after {took:?}: {}",
            errors.lines().find(|line| line.starts_with("error:")).unwrap_or("-")
        );
        let code = if way == "exit" && kind == DeviceKind::Cuda { 3 } else { 0 };
        assert_eq!(status.code(), Some(code), "{way}: {errors}");
        let fails = way != "end" || kind == DeviceKind::Emulated;
        assert_eq!(errors.contains("error: ") && errors.contains("had not ended"), fails, "{way}: {errors}");
        assert!(took < DEADLINE + SLACK, "{way}: {took:?}");
        longest = longest.max(took);
        let (Output { stdout, stderr, .. }, _) = process(kind, "train");
        let (printed, errors) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(printed.contains(&format!("weights {known}")), "after {way}: {printed}\n{errors}");
    }
    println!(
        "{} of {} processes ended by themselves, the last after {longest:?}",
        ways.len() * runs,
        ways.len() * runs
    );
}

mod emulated {
    use super::*;

    #[test]
    fn endless_kernel_meets_deadlines() {
        all(DeviceKind::Emulated);
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn endless_kernel_meets_deadlines() {
        all(DeviceKind::Cuda);
    }
}
