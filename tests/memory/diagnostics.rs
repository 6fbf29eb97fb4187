//! An arena's diagnostics are correct: its report, its errors, its warnings, and its measurements
//! in advance.
//!
//! They answer a question that came up with ztensor on GB10: why does a tensor of 48 KB not fit an
//! arena of 64 GB? Each of the three answers is provoked here, and the error must give it.

#![forbid(unsafe_code)]

use crate::support::{Random, on_each_device};
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::{Arc, Mutex};
use stepscope::check::faults::{Call, FaultPlan};
use stepscope::memory::Overflow;
use stepscope::parameters::Initializer;
use stepscope::report::{ArenaReport, Cause, Phase};
use stepscope::tensor::ScratchStep;
use stepscope::{
    AdamW, Arena, Buffer, Capacity, Device, Error, Gradients, Optimizer, ParameterSpec, Parameters, Result, Step, Tape,
    ops,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const CAPACITY_BYTES: usize = 16 << 10;
/// An eighth of the arena, and more than all of it.
const EIGHTH: usize = 512;
const LARGE: usize = 8192;
/// The environment variable that makes a test play the child process.
const CHILD: &str = "STEPSCOPE_TEST_ENVIRONMENT";

/// A model with trivial weights, so that there is a tape.
struct Model {
    parameters: Parameters,
    gradients: Gradients,
    optimizer: Optimizer<AdamW>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let mut spec = ParameterSpec::builder();
        spec.add("w", [8], Initializer::Constant(1.0));
        let parameters = Parameters::new(device, &spec.build().unwrap(), 0).unwrap();
        let gradients = Gradients::zeros(&parameters).unwrap();
        let optimizer = Optimizer::new(&parameters, AdamW::default()).unwrap();
        Self { parameters, gradients, optimizer }
    }

    /// Runs a whole pass: three tensors, of 2048, 256 and, in the backward pass, 256 bytes.
    fn pass(&mut self, step: &Step<'_>) -> Result<()> {
        let tape = Tape::new(step, &self.parameters);
        make(step, EIGHTH)?;
        let loss = tape.op("one", [])?.record(ops::fill(step, [1], 1.0)?.save(), |_, _| Ok(()));
        tape.backward(&loss, &mut self.gradients)
    }
}

fn make(step: &Step<'_>, elements: usize) -> Result<()> {
    step.empty::<f32>([elements]).map(drop)
}

fn arena(device: &Device, overflow: Overflow) -> Arena {
    let builder = Arena::builder(device).capacity(Capacity::Bytes(CAPACITY_BYTES)).reserve_bytes(0);
    builder.overflow(overflow).build().unwrap()
}

/// Returns an error and the cause that it names, which its text must name, too.
#[track_caller]
fn full<T: Debug>(outcome: Result<T>) -> (Error, Cause) {
    let error = outcome.unwrap_err();
    let Error::ArenaFull { cause, .. } = error else { panic!("{error}") };
    assert!(error.to_string().contains(&format!("cause: {cause}")), "{error}");
    (error, cause)
}

on_each_device! {
    fn each_cause_gets_its_advice(device: &Device) {
        let mut model = Model::new(device);
        let mut arena = arena(device, Overflow::Refuse);
        let mut run = |passes: usize, then: &[usize]| {
            full(arena.step(|step| {
                (0..passes).try_for_each(|_| model.pass(step))?;
                then.iter().try_for_each(|&elements| make(step, elements))
            }))
        };
        let (error, cause) = run(0, &[LARGE]);
        assert_eq!(cause, Cause::RequestLargerThanArena);
        assert!(error.to_string().contains("raise the capacity above 32.0 KiB (now 16.0 KiB), or split the tensor"), "{error}");

        let (error, cause) = run(0, &[EIGHTH; 9]);
        assert_eq!(cause, Cause::WorkingSetLargerThanArena);
        for advice in ["Arena::measure", "Growth::AtBoundary", "step.scratch"] {
            assert!(error.to_string().contains(advice), "{error}");
        }

        for passes in 1..=6 {
            let (error, cause) = run(passes, &[EIGHTH; 8]);
            assert_eq!(cause, Cause::NeverReset { passes: passes as u64 });
            assert!(error.to_string().contains("end the step after each backward pass"), "{error}");
            assert!(error.to_string().contains(&format!("{passes} backward passes since the last reset")), "{error}");
        }
        let (_, cause) = run(3, &[LARGE]);
        assert_eq!(cause, Cause::RequestLargerThanArena, "the tensor is larger than the arena, so resets cannot help");
        let (_, cause) = run(0, &[EIGHTH; 9]);
        assert_eq!(cause, Cause::WorkingSetLargerThanArena, "backward passes of the step before do not count");
    }

    fn a_panic_ends_the_passes_too(device: &Device) {
        let mut model = Model::new(device);
        let mut arena = arena(device, Overflow::Refuse);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            arena.step(|step| -> Result<()> {
                model.pass(step)?;
                model.pass(step)?;
                resume_unwind(Box::new(()))
            })
        }));
        assert!(panicked.is_err());
        let report = arena.report();
        assert_eq!((report.passes_since_reset, report.resets, report.offset_bytes), (0, 1, 0));
        let (_, cause) = full(arena.step(|step| [EIGHTH; 9].iter().try_for_each(|&elements| make(step, elements))));
        assert_eq!(cause, Cause::WorkingSetLargerThanArena);
    }

    fn sites_and_phases_add_up(device: &Device) {
        let mut model = Model::new(device);
        let mut arena = arena(device, Overflow::pool(1 << 20));
        for _ in 0..3 {
            let ticket = model.optimizer.advance().unwrap();
            arena
                .step(|step| {
                    model.pass(step)?;
                    make(step, LARGE)?;
                    model.optimizer.apply(ticket, step, &mut model.parameters, &model.gradients)
                })
                .unwrap();
        }
        let report = arena.report();
        let count = |phase: Phase| report.phases.iter().find(|(at, _)| *at == phase).unwrap().1;
        let (forward, backward, optimizer) = (count(Phase::Forward), count(Phase::Backward), count(Phase::Optimizer));
        assert_eq!((forward.allocations, forward.bytes), (9, 3 * (2048 + 256 + 32768)));
        assert_eq!((backward.allocations, backward.bytes), (3, 3 * 256));
        assert!(optimizer.allocations > 0);
        let phases = report.phases.iter().fold((0, 0), |sum, (_, count)| (sum.0 + count.allocations, sum.1 + count.bytes));
        let sites = report.sites.iter().fold((0, 0), |sum, site| (sum.0 + site.count.allocations, sum.1 + site.count.bytes));
        assert_eq!(phases, sites);
        assert_eq!(report.allocations, sites.0);
        assert!(report.sites.is_sorted_by(|a, b| a.count.bytes >= b.count.bytes), "{:?}", report.sites);
        let largest = report.largest.unwrap();
        assert_eq!(largest.bytes, 32768);
        assert!(largest.location.starts_with("tests/memory/diagnostics.rs:"), "{}", largest.location);
        assert_eq!(report.sites[0].location, largest.location);
        assert_eq!((report.overflow.allocations, report.overflow.bytes), (3, 3 * 32768));
        assert!(report.sites.iter().all(|site| site.location.starts_with("tests/memory/diagnostics.rs:")), "{:?}", report.sites);
    }

    fn report_lists_top_ten_lines(device: &Device) {
        let mut arena = arena(device, Overflow::Refuse);
        let first = line!() + 3;
        let error = arena.step(|step| {
            // Thirteen lines, from 1 to 13 times 256 bytes, and one that does not fit.
            make_here(step.empty::<f32>([64]))?;
            make_here(step.empty::<f32>([64 * 2]))?;
            make_here(step.empty::<f32>([64 * 3]))?;
            make_here(step.empty::<f32>([64 * 4]))?;
            make_here(step.empty::<f32>([64 * 5]))?;
            make_here(step.empty::<f32>([64 * 6]))?;
            make_here(step.empty::<f32>([64 * 7]))?;
            make_here(step.empty::<f32>([64]))?;
            make_here(step.empty::<f32>([64]))?;
            make_here(step.empty::<f32>([64]))?;
            make_here(step.empty::<f32>([64]))?;
            make_here(step.empty::<f32>([64]))?;
            make_here(step.empty::<f32>([64 * 8]))?;
            make_here(step.empty::<f32>([LARGE]))
        });
        let (error, _) = full(error);
        let Error::ArenaFull { ref site, ref report, .. } = error else { unreachable!() };
        let place = |line: u32| format!("tests/memory/diagnostics.rs:{line}");
        assert!(site.starts_with(&place(first + 13)), "{site}");
        assert_eq!(report.sites.len(), 13);
        for text in [error.to_string(), arena.report().to_string()] {
            let shown: Vec<&str> = text.lines().filter(|line| line.contains(" tensors at ")).collect();
            assert_eq!(shown.len(), 10, "{text}");
            for (line, of_report) in shown.iter().zip(&report.sites) {
                assert!(line.ends_with(&of_report.location), "{line} instead of {of_report:?}");
            }
            let largest = [12, 6, 5, 4, 3, 2, 1].map(|at| place(first + at));
            for (line, want) in shown.iter().zip(&largest) {
                assert!(line.ends_with(want), "{line}: not {want}");
            }
            assert!(text.contains("and 3 more call sites"), "{text}");
        }
    }

    /// The JSON contains every number of the report under its name.
    fn json_report_matches(device: &Device) {
        let mut model = Model::new(device);
        let mut arena = arena(device, Overflow::Pool { cap_bytes: 40960, prime_bytes: 0, deadline: device.deadline() });
        arena.step(|step| {
            model.pass(step)?;
            make(step, LARGE)?;
            assert!(make(step, LARGE).is_err());
            Ok(())
        }).unwrap();
        let report = arena.report();
        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        let ArenaReport { capacity_bytes, high_water_bytes, resets, allocations, .. } = report;
        assert_eq!((json["capacity_bytes"].as_u64(), json["offset_bytes"].as_u64()), (Some(capacity_bytes as u64), Some(0)));
        assert_eq!(json["high_water_bytes"].as_u64(), Some(high_water_bytes as u64));
        assert_eq!((json["resets"].as_u64(), json["passes_since_reset"].as_u64()), (Some(resets), Some(0)));
        assert_eq!((json["allocations"].as_u64(), json["growths"].as_u64()), (Some(allocations), Some(0)));
        assert_eq!(json["largest"]["bytes"], 32768);
        assert_eq!(json["largest"]["location"], report.largest.unwrap().location);
        for (json, (phase, count)) in json["phases"].as_array().unwrap().iter().zip(report.phases) {
            assert_eq!((&json[0], &json[1]["bytes"]), (&phase.name().into(), &count.bytes.into()));
        }
        let sites = json["sites"].as_array().unwrap();
        assert_eq!(sites.len(), report.sites.len());
        for (json, site) in sites.iter().zip(&report.sites) {
            assert_eq!((json["location"].as_str(), json["bytes"].as_u64()), (Some(&*site.location), Some(site.count.bytes)));
            assert_eq!(json["allocations"].as_u64(), Some(site.count.allocations));
        }
        let overflow = &json["overflow"];
        assert_eq!((&overflow["allocations"], &overflow["bytes"], &overflow["peak_bytes"]), (&1.into(), &32768.into(), &32768.into()));
        assert_eq!((&overflow["live_blocks"], &overflow["refusals"], &overflow["timeouts"]), (&0.into(), &1.into(), &0.into()));
        assert_eq!(overflow["waited_ms"].as_f64(), Some(report.overflow.waited_ms));
        assert_eq!(json["memory"]["device_free_bytes"].as_u64(), report.memory.device_free_bytes);
    }

    fn report_contains_device_and_host_memory(device: &Device) {
        let memory = arena(device, Overflow::Refuse).report().memory;
        assert_eq!(memory.device_total_bytes, device.description().memory_bytes);
        assert!(memory.device_free_bytes.unwrap() > 0);
        if cfg!(target_os = "linux") {
            assert!(memory.host_free_bytes.unwrap() > 0 && memory.host_available_bytes.unwrap() > 0);
        }
    }

    /// One line is logged at the start. Then there is one warning per overflowing step, however
    /// often it overflows, and none for a step that fits.
    fn overflowing_step_warns_once(device: &Device) {
        let log = Log::default();
        tracing::subscriber::with_default(log.clone(), || {
            let mut arena = arena(device, Overflow::pool(1 << 20));
            let started = log.take(Level::INFO);
            assert_eq!(started.len(), 1, "{started:?}");
            assert!(started[0].contains("arena ready") && started[0].contains("capacity_bytes=16384"), "{started:?}");
            let mut warnings = |run: &mut dyn FnMut(&Step<'_>) -> Result<()>| {
                arena.step(|step| run(step)).unwrap();
                log.take(Level::WARN)
            };
            assert_eq!(warnings(&mut |step| make(step, EIGHTH)), [""; 0]);
            for _ in 0..2 {
                let logged = warnings(&mut |step| (0..5).try_for_each(|_| make(step, LARGE)));
                assert_eq!(logged.len(), 1, "{logged:?}");
                for part in ["the arena is full", "RequestLargerThanArena", "requested_bytes=32768", "capacity_bytes=16384", "tests/memory/diagnostics.rs:", "split the tensor"] {
                    assert!(logged[0].contains(part), "`{part}` is missing: {}", logged[0]);
                }
            }
            let logged = warnings(&mut |step| (0..9).try_for_each(|_| make(step, EIGHTH)));
            assert!(logged.len() == 1 && logged[0].contains("WorkingSetLargerThanArena"), "{logged:?}");
            assert_eq!(warnings(&mut |step| make(step, EIGHTH)), [""; 0]);
        });
    }

    /// A scratch frees its blocks. The next overflow of the step must not warn again.
    fn overflowing_scratches_warn_once(device: &Device) {
        let log = Log::default();
        tracing::subscriber::with_default(log.clone(), || {
            let mut arena = arena(device, Overflow::pool(1 << 20));
            for _ in 0..2 {
                log.take(Level::WARN);
                arena.step(|step| (0..4).try_for_each(|_| step.scratch(|inner| make(inner, LARGE)))).unwrap();
                let logged = log.take(Level::WARN);
                assert_eq!(logged.len(), 1, "{logged:?}");
            }
        });
    }

    fn missing_reset_is_warned_about(device: &Device) {
        let log = Log::default();
        let mut model = Model::new(device);
        tracing::subscriber::with_default(log.clone(), || {
            let mut arena = arena(device, Overflow::pool(1 << 20));
            arena.step(|step| (0..20).try_for_each(|_| model.pass(step))).unwrap();
        });
        let logged = log.take(Level::WARN);
        assert!(logged.len() == 1 && logged[0].contains("NeverReset") && logged[0].contains("6 backward passes"), "{logged:?}");
    }

    /// The measure of a step equals its use, on an arena of any size, with scratches and overflows
    /// in any order.
    fn measured_memory_equals_used_memory(device: &Device) {
        let mut random = Random::new(31);
        for round in 0..60 {
            let program = Scope::new(&mut random, 3);
            let arena = |capacity: Capacity| {
                Arena::builder(device).capacity(capacity).checked(round % 4 == 3).reserve_bytes(0)
            };
            let mut roomy = arena(Capacity::mib(64)).build().unwrap();
            let measured = roomy.measure(|step| program.run(step)).unwrap();
            assert_eq!(roomy.report().allocations, 0, "a measurement must not count as use");
            roomy.step(|step| program.run(step)).unwrap();
            assert_eq!(roomy.report().high_water_bytes, measured.high_water_bytes(), "round {round}: {program:?}");
            if measured.high_water_bytes() == 0 {
                continue;
            }
            // A small arena with a pool uses the same total, and its pool does not change the
            // measure.
            let small = arena(Capacity::Bytes(1 + random.extent(0, 8192)));
            let mut small = small.overflow(Overflow::pool(64 << 20)).build().unwrap();
            assert_eq!(small.measure(|step| program.run(step)).unwrap(), measured);
            small.step(|step| program.run(step)).unwrap();
            assert_eq!(small.report().high_water_bytes, measured.high_water_bytes(), "round {round}: {program:?}");
            // An arena of exactly that size suffices, and a smaller one does not.
            arena(Capacity::Measured(measured)).build().unwrap().step(|step| program.run(step)).unwrap();
            let less = arena(Capacity::Bytes(measured.high_water_bytes() - 1));
            full(less.build().unwrap().step(|step| program.run(step)));
        }
    }

    fn measuring_has_no_side_effects(device: &Device) {
        let plan = FaultPlan::new();
        let device = Device::builder(device.description().kind).layer(plan.clone()).open().unwrap();
        let mut buffer = Buffer::from_slice(&device, &[3.0f32; 8]).unwrap();
        let mut model = Model::new(&device);
        let ticket = model.optimizer.advance().unwrap();
        let weights = model.parameters.sha256().unwrap();
        let arena = arena(&device, Overflow::pool(1 << 20));
        let before = arena.report();
        let counts = Call::ALL.map(|call| plan.count(call));
        let measured = arena
            .measure(|step| {
                let x = step.upload(&[1.0f32; 1 << 20], [1 << 20])?;
                ops::fill_into(step, &mut step.lend_mut(&mut buffer, [8])?, -1.0)?;
                model.pass(step)?;
                model.optimizer.apply(ticket, step, &mut model.parameters, &model.gradients)?;
                assert_eq!(step.read(&ops::tanh(step, &x)?)?, vec![0.0; 1 << 20], "a dry run reads zeros");
                Ok(())
            })
            .unwrap();
        assert!(measured.high_water_bytes() > 8 << 20);
        assert_eq!(Call::ALL.map(|call| plan.count(call)), counts, "a dry run called the driver: {:?}", Call::ALL);
        let mut after = arena.report();
        after.memory = before.memory;
        assert_eq!(after, before);
        assert_eq!(buffer.read().unwrap(), [3.0; 8]);
        assert_eq!(model.parameters.sha256().unwrap(), weights);
        let failed = arena.measure(|_| Err::<(), _>(Error::Misuse { op: "test", expected: "".into(), got: "".into() }));
        assert!(failed.is_err());
    }

    fn capacity_as_share_of_available(device: &Device) {
        let build = |share: f64| Arena::builder(device).capacity(Capacity::FractionOfAvailable(share)).reserve_bytes(0).build();
        let mut last = 0;
        for share in [0.001, 0.002, 0.004] {
            let report = build(share).unwrap().report();
            let SharedMemory { least, most } = SharedMemory::of(&report);
            // Other processes take and free memory meanwhile: the test allows a tenth either way.
            assert!(report.capacity_bytes as f64 >= 0.9 * share * least as f64, "{share}: {report:?}");
            assert!(report.capacity_bytes as f64 <= 1.1 * share * most as f64, "{share}: {report:?}");
            assert!(report.capacity_bytes > last);
            last = report.capacity_bytes;
        }
        for share in [0.0, -0.5, 1.000_1, f64::NAN, f64::INFINITY] {
            let error = build(share).unwrap_err();
            assert!(matches!(error, Error::Misuse { .. }), "{error}");
            assert!(error.to_string().contains(&share.to_string()), "{error}");
        }
        let error = Arena::builder(device).capacity(Capacity::Bytes(0)).build().unwrap_err();
        assert!(matches!(error, Error::Misuse { .. }), "{error}");
    }

    /// Environment variables belong to the process, so each value gets a process of its own.
    fn environment_sets_capacity(device: &Device) {
        if std::env::var_os(CHILD).is_some() {
            let built = Arena::builder(device).capacity(Capacity::Bytes(4096)).reserve_bytes(0).build();
            return println!("{CHILD} {}", built.map_or_else(|error| error.to_string(), |arena| arena.report().capacity_bytes.to_string()));
        }
        let kind = device.description().kind;
        for (value, want) in [
            (None, "4096"),
            (Some("0.001"), "1073741"),
            (Some("0.0625"), "67108864"),
            (Some("4GB"), "`4GB`"),
            (Some(""), "``"),
            (Some("-1"), "`-1`"),
            (Some("1e-3"), "`1e-3`"),
            (Some("0"), "`0`"),
            (Some("nan"), "`nan`"),
            (Some("99999999999"), "`99999999999`"),
        ] {
            let name = format!("diagnostics::environment_sets_capacity::{kind}");
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", &name, "--include-ignored", "--nocapture", "--test-threads=1"]).env(CHILD, "1");
            match value {
                Some(value) => command.env("STEPSCOPE_ARENA_GB", value),
                None => command.env_remove("STEPSCOPE_ARENA_GB"),
            };
            let output = command.output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{value:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
            let line = text.lines().find_map(|line| line.split_once(CHILD)).unwrap_or_else(|| panic!("{value:?}: {text}")).1.trim();
            match want.parse::<usize>() {
                Ok(_) => assert_eq!(line, want, "{value:?}"),
                Err(_) => assert!(line.contains(want) && line.contains("STEPSCOPE_ARENA_GB"), "{value:?}: {line}"),
            }
        }
    }
}

/// Passes on a result; the call's line is the line that made the tensor.
fn make_here<T>(made: Result<T>) -> Result<()> {
    made.map(drop)
}

/// The bounds of the available memory, by the report's figures.
struct SharedMemory {
    least: u64,
    most: u64,
}

impl SharedMemory {
    fn of(report: &ArenaReport) -> Self {
        let memory = report.memory;
        let free = memory.device_free_bytes.unwrap();
        // A device with its own memory counts only that. With shared memory, the host's reclaimable
        // caches count as well.
        let shared =
            memory.device_total_bytes.is_none().then_some(memory.host_available_bytes).flatten().unwrap_or(free);
        Self { least: free.min(shared), most: free.max(shared) }
    }
}

/// A random step: tensors and nested scratches.
#[derive(Debug)]
struct Scope(Vec<Entry>);

#[derive(Debug)]
enum Entry {
    Tensor(usize),
    ScratchStep(Scope),
}

impl Scope {
    fn new(random: &mut Random, depth: usize) -> Self {
        let part = |random: &mut Random| match random.below(4) {
            0 if depth > 0 => Entry::ScratchStep(Self::new(random, depth - 1)),
            _ => Entry::Tensor(random.extent(0, 3000)),
        };
        Self((0..random.extent(0, 8)).map(|_| part(random)).collect())
    }

    fn run(&self, step: &mut stepscope::EagerStep<'_>) -> Result<()> {
        self.0.iter().try_for_each(|part| match part {
            Entry::Tensor(elements) => make(step, *elements),
            Entry::ScratchStep(scope) => step.scratch(|inner| scope.run_inside(inner)),
        })
    }

    fn run_inside(&self, scratch: &mut ScratchStep<'_, '_>) -> Result<()> {
        self.0.iter().try_for_each(|part| match part {
            Entry::Tensor(elements) => make(scratch, *elements),
            Entry::ScratchStep(scope) => scratch.scratch(|inner| scope.run_inside(inner)),
        })
    }
}

/// Keeps the events of the library, by level.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(Level, String)>>>);

impl Log {
    /// Returns the events of a level since the last call.
    fn take(&self, level: Level) -> Vec<String> {
        let events = std::mem::take(&mut *self.0.lock().unwrap());
        events.into_iter().filter(|(at, _)| *at == level).map(|(_, text)| text).collect()
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("stepscope")
    }

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
                self.0 += &format!("{}={value:?} ", field.name());
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push((*event.metadata().level(), text.0));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
