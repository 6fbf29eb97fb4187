//! Training under real memory pressure, in separate memory cgroups.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::tools::{EVERY_FEATURE, Outcome, Tools, at, is_quick, read, scratch};

const RUN: &str = "--device emulated --limit 200 --horizon 2 --batch 32 --folds 1 --checkpoint-every 4 --arena-mib 30";
const MIB: u64 = 1 << 20;
/// The allowed error of the peak forecast after the first update.
const FORECAST_ERROR: f64 = 0.02;
/// The allowed time of a run, since the machine may have other work.
const LATE: Duration = Duration::from_secs(120);
/// A file of a cgroup: its name in version 1 and in version 2.
type Name = [&'static str; 2];
const LIMIT: Name = ["memory.limit_in_bytes", "memory.max"];
const SWAP: Name = ["memory.memsw.limit_in_bytes", "memory.swap.max"];
const PEAK: Name = ["memory.max_usage_in_bytes", "memory.peak"];

/// Trains in cgroups of too little memory, and next to processes that take it.
///
/// The emulator's device memory is the host's, like a GB10's. Each run must end with the known
/// weights, or be refused before it starts, with all figures, or end with exit code 75 and a
/// checkpoint that leads to the same weights. It must not end by a signal or late. A run without a
/// memory floor must violate this. `--quick` tries only one limit and one competing process.
///
/// Needs Linux, root and a memory cgroup (version 1 or 2) in which it may create others. Elsewhere
/// it reports that and does nothing.
pub(crate) fn pressure(arguments: &[String]) -> Outcome {
    let is_quick = is_quick(arguments);
    if let Err(error) = Cgroup::new("trial").and_then(|trial| trial.limit(64 * MIB)) {
        println!("skipped: this needs Linux and root to create memory cgroups: {error}");
        return Ok(());
    }
    let tools = Tools::install(&["library_tools"])?;
    // Built as the tests build it, so that it is built once.
    tools.run(format!("cargo build --quiet --workspace --features {EVERY_FEATURE} --example crossasset"))?;
    let work = scratch()?;
    let mut trial =
        Trial { tools: &tools, folder: work.path().to_owned(), runs: 0, expected: String::new(), failures: Vec::new() };

    let cgroup = Cgroup::new("alone")?;
    let (folder, ended) = (trial.next(), trial.start(&cgroup, "--epochs 5")?.end()?);
    let End::Weights(expected) = ended.0 else { return Err(format!("without a limit: {}", ended.1)) };
    let need = cgroup.read(PEAK)?;
    println!("without a limit: {} MiB, weights {expected}", need / MIB);
    trial.expected = expected;
    let memory = &report(&folder)?["memory"];
    let [peak, forecast] = ["peak_bytes", "predicted_peak_bytes"].map(|name| memory[name].as_f64().unwrap_or(f64::NAN));
    let error = forecast / peak - 1.0;
    println!(
        "the peak was {:.1} MiB; after the first update it was forecast with an error of {:+.1} %",
        peak / MIB as f64,
        100.0 * error
    );
    if error.is_nan() || error.abs() > FORECAST_ERROR {
        trial.failures.push("the predicted peak".to_owned());
    }

    for percent in if is_quick { &[60][..] } else { &[30, 60, 100, 150] } {
        trial.run(&format!("{percent} % of that"), need * percent / 100, None)?;
    }
    // Slowly until nothing is left, and so fast that the run has less than it needs.
    for (rate, percent) in if is_quick { &[(20, 200)][..] } else { &[(40, 200), (80, 200), (1000, 115)] } {
        let name = format!("200 %, and another process takes {percent} %, {rate} MiB a second");
        trial.run(&name, 2 * need, Some(hog(need * percent / 100, *rate)))?;
    }
    if !is_quick {
        let cache = format!(
            "while :; do head -c 200M /dev/zero > {0} && cat {0} > /dev/null; done",
            work.path().join("file").display()
        );
        trial.run("150 %, full of another process's page cache", 3 * need / 2, Some(cache))?;
        let cgroup = Cgroup::new("two")?;
        cgroup.limit(3 * need / 2)?;
        let two = [trial.start(&cgroup, "--epochs 5")?, trial.start(&cgroup, "--epochs 5")?];
        for run in two {
            trial.judge("150 %, one of two runs", run, true)?;
        }
    }
    // The planted failure: the same without a floor must end in a way that is not allowed.
    let cgroup = Cgroup::new("planted")?;
    cgroup.limit(2 * need)?;
    let run = trial.start(&cgroup, "--epochs 400 --memory-floor-mib 0")?;
    let _other = cgroup.start(Command::new("sh").args(["-c", &hog(4 * need, 400)]), 0)?;
    trial.judge("planted: no floor, another process takes all", run, false)?;
    if trial.failures.is_empty() { Ok(()) } else { Err(format!("not allowed: {}", trial.failures.join("; "))) }
}

/// Returns a command that allocates this much memory at this rate, and holds it.
fn hog(bytes: u64, mib_a_second: u64) -> String {
    let grow = "import sys, time; kept = [time.sleep(1 / int(sys.argv[2])) or bytearray(1 << 20) for _ in range(int(sys.argv[1]))]";
    format!("exec python3 -c '{grow}; time.sleep(600)' {} {mib_a_second} 2>/dev/null", bytes / MIB)
}

fn report(folder: &Path) -> Outcome<Value> {
    serde_json::from_str(&read(folder.join("report.json"))?).map_err(|error| format!("report.json: {error}"))
}

/// A memory cgroup next to this process's own; its processes end with this value.
struct Cgroup {
    path: PathBuf,
    version: usize,
}

impl Cgroup {
    fn new(name: &str) -> Outcome<Self> {
        let (first, second) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let (parent, version) = if first.join(LIMIT[0]).exists() {
            let own = read("/proc/self/cgroup")?;
            let own = own.lines().find_map(|line| line.split_once(":memory:/")).map_or("", |(_, path)| path);
            (Some(first.join(own)).filter(|path| path.exists()).unwrap_or(first.to_owned()), 0)
        } else {
            // In version 2 only leaves have processes, so the new ones are siblings of this
            // process's.
            at("cgroup.subtree_control", fs::write(second.join("cgroup.subtree_control"), "+memory"))?;
            (second.to_owned(), 1)
        };
        let path = parent.join(format!("stepscope-{}-{name}", std::process::id()));
        at(&path, fs::create_dir(&path))?;
        Ok(Self { path, version })
    }

    fn read(&self, name: Name) -> Outcome<u64> {
        let text = read(self.path.join(name[self.version]))?;
        text.trim().parse().map_err(|_| format!("{}: `{text}`", name[self.version]))
    }

    fn limit(&self, bytes: u64) -> Outcome {
        let file = self.path.join(LIMIT[self.version]);
        at(&file, fs::write(&file, bytes.to_string()))?;
        // No swap, because it would hide the shortage and stall. A system without swap has no such
        // file.
        let swap = if self.version == 0 { bytes } else { 0 };
        let _ = fs::write(self.path.join(SWAP[self.version]), swap.to_string());
        Ok(())
    }

    /// Starts a program inside, with this preference of the OOM killer.
    fn start(&self, command: &mut Command, preference: i32) -> Outcome<Child> {
        let join = "echo $$ > \"$0/cgroup.procs\"; echo \"$1\" > /proc/self/oom_score_adj; shift; exec \"$@\"";
        let mut shell = Command::new("sh");
        shell.args(["-c", join]).arg(&self.path).arg(preference.to_string());
        shell.arg(command.get_program()).args(command.get_args());
        shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        at("sh", shell.stdout(Stdio::null()).stderr(Stdio::piped()).spawn())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let processes = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        let _ = Command::new("kill").arg("-9").args(processes.lines()).stderr(Stdio::null()).status();
        for _ in 0..200 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            sleep(Duration::from_millis(20));
        }
        println!("{} cannot be removed", self.path.display());
    }
}

/// The end of a run.
enum End {
    Weights(String),
    Refused,
    Short,
    Other,
}

/// A run of CrossAsset in a cgroup.
struct Training {
    folder: PathBuf,
    process: Child,
    started: Instant,
}

impl Training {
    /// Waits for the end, and describes it.
    fn end(mut self) -> Outcome<(End, String)> {
        let mut errors = self.process.stderr.take().ok_or("a run without standard error")?;
        let reader = std::thread::spawn(move || {
            let mut text = Vec::new();
            errors.read_to_end(&mut text).map(|_| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
        });
        let status = loop {
            if let Some(status) = at("crossasset", self.process.try_wait())? {
                break status;
            }
            if self.started.elapsed() > LATE {
                at("crossasset", self.process.kill())?;
                at("crossasset", self.process.wait())?;
                return Ok((End::Other, format!("not ended after {} s", LATE.as_secs())));
            }
            sleep(Duration::from_millis(10));
        };
        let text = reader.join().unwrap_or_default();
        let last = text.trim().lines().last().unwrap_or_default().to_owned();
        let seconds = self.started.elapsed().as_secs_f64();
        Ok(match status.code() {
            Some(0) => {
                let weights = report(&self.folder)?["weights_sha256"].as_str().unwrap_or_default().to_owned();
                (End::Weights(weights), format!("weights in {seconds:.1} s"))
            }
            Some(1) if text.contains("of device memory refused") && text.contains("memory cgroup") => {
                (End::Refused, "refused at the start".to_owned())
            }
            Some(75) => (End::Short, format!("short of memory after {seconds:.1} s")),
            _ => (End::Other, format!("ended with {status}: {last}")),
        })
    }
}

struct Trial<'a> {
    tools: &'a Tools,
    folder: PathBuf,
    runs: usize,
    /// The known weights.
    expected: String,
    failures: Vec<String>,
}

impl Trial<'_> {
    /// Returns the folder of the next run.
    fn next(&self) -> PathBuf {
        self.folder.join(self.runs.to_string())
    }

    fn start(&mut self, cgroup: &Cgroup, options: &str) -> Outcome<Training> {
        let folder = self.next();
        self.runs += 1;
        self.train(cgroup, folder, options)
    }

    fn train(&self, cgroup: &Cgroup, folder: PathBuf, options: &str) -> Outcome<Training> {
        let program = self.tools.target().join("debug/examples/crossasset");
        let mut command = self.tools.command(format!("{} {RUN} {options} --out", program.display()));
        let process = cgroup.start(command.arg(&folder), 1000)?;
        Ok(Training { folder, process, started: Instant::now() })
    }

    /// Trains with a limit, possibly next to a shell command.
    fn run(&mut self, name: &str, limit: u64, other: Option<String>) -> Outcome {
        let cgroup = Cgroup::new("limited")?;
        cgroup.limit(limit)?;
        let run = self.start(&cgroup, "--epochs 5")?;
        let _other = other.map(|other| cgroup.start(Command::new("sh").args(["-c", &other]), 0)).transpose()?;
        self.judge(name, run, true)
    }

    /// Prints the end of a run; it is a failure unless the end is allowed as expected.
    fn judge(&mut self, name: &str, run: Training, is_wanted: bool) -> Outcome {
        let folder = run.folder.clone();
        let (end, mut text) = run.end()?;
        let is_allowed = match end {
            End::Weights(weights) => weights == self.expected,
            End::Refused => true,
            End::Other => false,
            End::Short => {
                let unlimited = Cgroup::new("resumed")?;
                let resume = format!("--epochs 5 --resume {}", folder.join("model.safetensors").display());
                let again = self.train(&unlimited, folder, &resume)?.end()?;
                text += &format!("; its checkpoint: {}", again.1);
                matches!(again.0, End::Weights(weights) if weights == self.expected)
            }
        };
        println!("{name:<58} {text}");
        if is_allowed != is_wanted {
            self.failures.push(name.to_owned());
        }
        Ok(())
    }
}
