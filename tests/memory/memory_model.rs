//! Random programs of steps, scratches, overflows, growth, trims, errors, panics and faults against
//! a reference allocator.
//!
//! [`Rule`] lists what must hold. Live tensors are disjoint and saved ones unchanged: every tensor
//! holds its own pattern and is read back before its scope ends. All memory is freed. Every outcome
//! follows from the request, the state and the fault. No call lasts longer than its deadline plus
//! 50 ms, extended by the machine's own pauses (see [`witness`]).
//!
//! ```text
//! # 2,000 programs, in about 10 s on two cores
//! cargo test --test memory memory_model::
//! # the nightly run
//! STEPSCOPE_PROGRAMS=100000 cargo test --release --test memory memory_model::
//! # one program of a run, by its number
//! STEPSCOPE_PROGRAM=4711 cargo test --test memory memory_model::random
//! ```
//! On CUDA, where the test is ignored without a GPU, arenas and pools are as small. Faults are
//! rarer, because each needs a device of its own. No call stalls forever, and no launch fails,
//! because the call that reports it depends on timing: `step_hazards` tests those.
//!
//! [`Planted`] bugs show that the rules can fail. Each is put where the library could have it,
//! through handles that `unsafe` code copied or through a fault that the reference does not know:
//! see the tests named `finds_*`. A guard that checked mode fails to check is planted in the tests
//! of checked mode instead, because only a kernel can write there.

mod program;
mod reference;
mod rules;
mod world;

use crate::support::{Random, on_each_device};
use program::{CALLS, Kind, Planned, Program};
use rules::{Planted, Rule, Tally, Violation};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use stepscope::DeviceKind;
use stepscope::check::faults::{Call, Fault};
use world::{Execution, Rig};

/// The longest machine pause during a stalling program for which its deadlines can still be
/// checked.
const PAUSE: Duration = Duration::from_millis(10);
/// The number of programs per run in which a call stalls. Each leaves a thread that waits
/// forever.
const MOST_STALLS: u64 = 200;
/// The numbers of the programs in which bugs are planted.
const PLANTED: std::ops::Range<u64> = 1_000_000..1_000_500;

on_each_device! {
    fn random_programs_keep_every_rule(device: &Device) {
        let device = device.description().kind;
        let count = number_from("STEPSCOPE_PROGRAMS").unwrap_or(2_000);
        if let Some(number) = number_from("STEPSCOPE_PROGRAM") {
            let (kind, program) = program(device, number, count);
            println!("{program:#?}");
            let outcome = run(&mut None, device, kind, &program);
            return assert!(outcome.is_ok(), "program {number}: {outcome:?}");
        }
        let tally = run_all(device, count);
        println!("{}", summary(&tally));
        assert_eq!(tally.programs, count);
        enough(&tally, device);
    }
}

/// Returns the value of an environment variable.
fn number_from(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(value.parse().unwrap_or_else(|error| panic!("{variable}: `{value}`: {error}")))
}

/// Returns a program by its number in a run of `count`.
fn program(device: DeviceKind, number: u64, count: u64) -> (Kind, Program) {
    let kind = match device {
        // Each fault needs a device of its own, which takes long to open, and a stall would leak
        // memory.
        DeviceKind::Cuda if number % 8 == 7 => Kind::Faulty,
        DeviceKind::Cuda => Kind::Sound,
        _ if number % (count / MOST_STALLS).max(100) == 99 => Kind::Stalling,
        _ if number % 2 == 1 => Kind::Faulty,
        _ => Kind::Sound,
    };
    let mut program = Program::draw(&mut Random::new(number), kind);
    if device == DeviceKind::Cuda {
        program.fault = program.fault.filter(|fault| fault.call != Call::Launch);
    }
    (kind, program)
}

/// Runs a program, on the existing rig if both are clean.
fn run(rig: &mut Option<Rig>, device: DeviceKind, kind: Kind, program: &Program) -> Result<Tally, Violation> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let mut used = match rig.take() {
            Some(rig) if kind == Kind::Sound => rig,
            other => {
                *rig = other;
                Rig::open(device, kind)
            }
        };
        let outcome = Execution::run(&mut used, program, None);
        if used.is_clean(program) {
            *rig = Some(used);
        }
        match outcome {
            Err(Violation { pauses, .. }) if kind == Kind::Stalling && pauses > PAUSE && attempts < 50 => {}
            outcome => return outcome,
        }
    }
}

/// Runs programs on all cores of the machine, up to eight; on CUDA one after the other.
fn run_all(device: DeviceKind, count: u64) -> Tally {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(8));
    let workers = if device == DeviceKind::Cuda { 1 } else { cores };
    let next = AtomicU64::new(0);
    let all = Mutex::new(Tally::default());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let (mut rig, mut tally) = (None, Tally::default());
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        break;
                    }
                    let (kind, program) = program(device, number, count);
                    match run(&mut rig, device, kind, &program) {
                        Ok(done) => tally.add(done),
                        Err(violation) => {
                            // The other threads stop as well.
                            next.store(count, Ordering::Relaxed);
                            panic!("STEPSCOPE_PROGRAMS={count} STEPSCOPE_PROGRAM={number}: {violation:?}\n{program:?}");
                        }
                    }
                }
                all.lock().unwrap().add(tally);
            });
        }
    });
    all.into_inner().unwrap()
}

fn summary(tally: &Tally) -> String {
    let met = |call: Call| tally.met.iter().filter(|(met, _)| *met == call).count();
    let calls: Vec<String> = CALLS.into_iter().map(|call| format!("{call:?} {}", met(call))).collect();
    let Tally {
        programs, steps, scratches, tensors, looks, overflows, refusals, growths, failures, panics, lost, ..
    } = tally;
    format!(
        "{programs} programs: {steps} steps, {scratches} scratches, {tensors} tensors, {looks} looks, {overflows} overflows, \
         {refusals} refusals, {growths} growths, {failures} failures, {panics} panics, {lost} devices lost; faults met: {}",
        calls.join(", ")
    )
}

/// Checks that a run covered enough cases to be meaningful.
fn enough(tally: &Tally, device: DeviceKind) {
    let programs = tally.programs;
    let Tally {
        steps, scratches, tensors, looks, overflows, refusals, growths, failures, panics, lost, ref met, ..
    } = *tally;
    for (what, count, least) in [
        ("steps", steps, programs),
        ("scratches", scratches, programs),
        ("tensors", tensors, 5 * programs),
        ("looks", looks, 5 * programs),
        ("overflows", overflows, programs / 2),
        ("refusals", refusals, programs / 4),
        ("growths", growths, programs / 20),
        ("failures", failures, programs / 4),
        ("panics", panics, programs / 20),
        ("lost devices", lost, if device == DeviceKind::Cuda { 0 } else { programs / 50 }),
        ("faults", met.len() as u64, programs / 20),
    ] {
        assert!(count >= least, "too few {what}: {count} in {programs} programs; {}", summary(tally));
    }
    if programs < 10_000 {
        return;
    }
    for call in CALLS.into_iter().filter(|&call| device == DeviceKind::Emulated || call != Call::Launch) {
        assert!(met.iter().any(|(met, _)| *met == call), "no program met a fault on {call:?}");
    }
    if device == DeviceKind::Emulated {
        for (call, fault) in CALLS.into_iter().flat_map(|call| [(call, Fault::Fail), (call, Fault::Spoil)]) {
            assert!(met.contains(&(call, fault)), "no program met {fault:?} on {call:?}");
        }
        let stalls = met.iter().filter(|(_, fault)| *fault == Fault::Never).count();
        assert!(stalls >= 20, "too few calls that never return: {stalls}");
    }
}

/// Runs programs with a planted bug until one breaks a rule, which must be the bug's own. Programs
/// that the bug does not affect must pass.
fn finds(planted: Planted, rule: Rule) {
    for number in PLANTED {
        let mut program = Program::draw(&mut Random::new(number), Kind::Sound);
        let mut kind = Kind::Sound;
        match planted {
            Planted::LeakedBlock => {
                program.fault = Some(Planned { call: Call::PoolFree, number: 1, fault: Fault::Fail })
            }
            Planted::LateReturn => kind = Kind::Stalling,
            // The values that are read afterwards must still be the arena's.
            Planted::ResetUnderSaved => (program.pool, program.growth) = (None, None),
            _ => {}
        }
        if let Err(violation) = Execution::run(&mut Rig::open(DeviceKind::Emulated, kind), &program, Some(planted)) {
            assert_eq!(violation.rule, rule, "{violation:?}\nin {program:?}");
            return;
        }
    }
    panic!("{planted:?} was not found in {} programs", PLANTED.end - PLANTED.start);
}

#[test]
fn finds_a_double_hand_out() {
    finds(Planted::DoubleHandOut, Rule::Disjoint);
}

#[test]
fn finds_an_overwritten_saved_tensor() {
    finds(Planted::SavedOverwritten, Rule::Saved);
}

#[test]
fn finds_reset_under_saved_tensor() {
    finds(Planted::ResetUnderSaved, Rule::Saved);
}

#[test]
fn finds_an_overwritten_buffer() {
    finds(Planted::BufferOverwritten, Rule::Persistent);
}

#[test]
fn finds_a_leaked_overflow_block() {
    finds(Planted::LeakedBlock, Rule::Returned);
}

#[test]
fn finds_a_late_return() {
    finds(Planted::LateReturn, Rule::InTime);
}

#[test]
fn finds_a_wrong_outcome() {
    finds(Planted::WrongOutcome, Rule::Typed);
}

#[test]
fn finds_a_wrong_report() {
    finds(Planted::Miscounted, Rule::Reported);
}
