//! What a run shows of an epoch while it works: a table on a terminal, lines elsewhere, events for programs.
//!
//! Invariant: the arena is asked for its report only when something is shown, so showing costs the same however fast steps are.

use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use stepscope::Arena;

use super::log::{self, Log};

/// Time between two pictures of the table.
const DRAW_EVERY: Duration = Duration::from_millis(100);
/// Time between two lines, or two events.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// The progress of one epoch, on standard error.
pub(crate) struct Progress {
    name: String,
    /// What is counted: samples, or tokens.
    unit: &'static str,
    total: usize,
    done: usize,
    log: Log,
    /// The table's; hidden where there is no terminal.
    bar: ProgressBar,
    start: Instant,
    /// When something was last shown.
    shown: Instant,
    /// Updates since then.
    updates: u32,
}

/// How an epoch stands.
struct Standing {
    step_ms: f64,
    unit: &'static str,
    per_second: f64,
    loss: f64,
    memory_bytes: usize,
    overflows: u64,
}

impl Progress {
    /// Starts the clock for an epoch of so much; `name` says which, such as `fold 0, epoch 1`, `unit` of what, such as `samples`.
    pub(crate) fn new(name: String, (total, unit): (usize, &'static str), log: Log) -> Self {
        let bar = match log {
            Log::Text => ProgressBar::new(total as u64),
            Log::Json | Log::Quiet => ProgressBar::hidden(),
        };
        Self::on(bar, name, (total, unit), log)
    }

    fn on(bar: ProgressBar, name: String, (total, unit): (usize, &'static str), log: Log) -> Self {
        let style = ProgressStyle::with_template(&format!(
            "{{prefix}}  {{bar:30}} {{pos}}/{{len}} {unit}  {{eta}} left\n{{msg}}"
        ))
        .expect("the template is well-formed");
        let bar = bar.with_style(style).with_prefix(name.clone());
        let now = Instant::now();
        Self { name, unit, total, done: 0, log, bar, start: now, shown: now, updates: 0 }
    }

    /// A batch of so much was trained on; `loss` is its mean.
    pub(crate) fn advance(&mut self, count: usize, loss: f64, arena: &Arena) {
        self.done += count;
        self.updates += 1;
        self.bar.inc(count as u64);
        let every = if self.bar.is_hidden() { LINE_EVERY } else { DRAW_EVERY };
        if self.shown.elapsed() >= every {
            self.show(loss, arena);
        }
    }

    /// Shows how the epoch stands.
    fn show(&mut self, loss: f64, arena: &Arena) {
        let report = arena.report();
        let standing = Standing {
            step_ms: self.shown.elapsed().as_secs_f64() * 1e3 / f64::from(self.updates),
            unit: self.unit,
            per_second: self.done as f64 / self.start.elapsed().as_secs_f64(),
            loss,
            memory_bytes: report.peak_bytes,
            overflows: report.overflow.allocations,
        };
        (self.shown, self.updates) = (Instant::now(), 0);
        let Self { name, unit, done, total, .. } = self;
        let Standing { step_ms, per_second, loss, memory_bytes, overflows, .. } = standing;
        match self.log {
            Log::Json => tracing::info!(
                epoch = name,
                unit,
                done,
                of = total,
                step_ms,
                per_second,
                loss,
                memory_bytes,
                overflows,
                "training"
            ),
            Log::Text if self.bar.is_hidden() => {
                log::say(self.log, &format!("{name}  {done}/{total} {unit}  {}", standing.line()));
            }
            Log::Text => self.bar.set_message(standing.table().to_string()),
            Log::Quiet => (),
        }
    }

    /// Says a sentence between what is shown.
    pub(crate) fn say(&self, text: &str) {
        self.bar.suspend(|| log::say(self.log, text));
    }

    /// Ends the epoch, whose mean loss is this: its seconds, and how much per second.
    pub(crate) fn finish(&self, loss: f64) -> (f64, f64) {
        let seconds = self.start.elapsed().as_secs_f64();
        let per_second = self.done as f64 / seconds;
        self.bar.finish_and_clear();
        let Self { name, unit, done, .. } = self;
        match self.log {
            Log::Json => tracing::info!(epoch = name, unit, done, seconds, per_second, loss, "trained"),
            Log::Text => log::say(
                self.log,
                &format!("{name}  {done} {unit} in {seconds:.1} s  loss {loss:.4}  {per_second:.0} {unit}/s"),
            ),
            Log::Quiet => (),
        }
        (seconds, per_second)
    }
}

impl Standing {
    fn cells(&self) -> [(String, String); 5] {
        [
            ("step", format!("{:.1} ms", self.step_ms)),
            (&format!("{}/s", self.unit), format!("{:.0}", self.per_second)),
            ("loss", format!("{:.4}", self.loss)),
            ("memory", format!("{:.1} MiB", self.memory_bytes as f64 / f64::from(1 << 20))),
            ("overflows", self.overflows.to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
    }

    fn line(&self) -> String {
        self.cells().map(|(name, value)| format!("{name} {value}")).join("  ")
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_HORIZONTAL_ONLY);
        table.set_header(self.cells().map(|(name, _)| name)).add_row(self.cells().map(|(_, value)| value));
        table.column_iter_mut().for_each(|column| {
            column.set_cell_alignment(CellAlignment::Right);
        });
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::{InMemoryTerm, ProgressDrawTarget};
    use stepscope::{Capacity, Device, DeviceKind};

    fn arena() -> Arena {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap()
    }

    #[test]
    fn a_terminal_has_a_table_that_goes_away() {
        let terminal = InMemoryTerm::new(10, 90);
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        let bar = ProgressBar::with_draw_target(Some(8), target);
        let mut progress = Progress::on(bar, "fold 0, epoch 0".into(), (8, "samples"), Log::Text);
        let mut arena = arena();
        arena.step(|step| step.empty::<f32>([1 << 17]).map(drop)).unwrap();
        progress.advance(3, 1.5, &arena);
        assert!(!terminal.contents().contains("1.5000"), "it is drawn at its own pace");
        progress.show(1.25, &arena);
        progress.bar.tick();
        let shown = terminal.contents();
        assert!(shown.starts_with("fold 0, epoch 0") && shown.contains("3/8 samples"), "{shown}");
        for text in ["step", "samples/s", "loss", "1.2500", "memory", "0.5 MiB", "overflows"] {
            assert!(shown.contains(text), "no {text}: {shown}");
        }
        assert!(shown.lines().count() >= 4, "{shown}");
        progress.finish(1.25);
        assert_eq!(terminal.contents(), "");
    }

    #[test]
    fn progress_counts_samples() {
        let (mut progress, arena) = (Progress::new("fold 0, epoch 0".into(), (4, "samples"), Log::Json), arena());
        assert!(progress.bar.is_hidden());
        progress.advance(3, 1.0, &arena);
        progress.advance(1, 2.0, &arena);
        let (seconds, rate) = progress.finish(1.25);
        assert!(seconds > 0.0 && (rate * seconds - 4.0).abs() < 1e-9);
    }

    #[test]
    fn a_line_has_all_figures() {
        let standing = Standing {
            step_ms: 12.34,
            unit: "samples",
            per_second: 81.4,
            loss: 0.9,
            memory_bytes: 3 << 19,
            overflows: 7,
        };
        assert_eq!(standing.line(), "step 12.3 ms  samples/s 81  loss 0.9000  memory 1.5 MiB  overflows 7");
    }
}
