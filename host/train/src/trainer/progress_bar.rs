//! A progress bar that shows the state of a running epoch on a terminal, in a log, or as events for
//! programs.
//!
//! Invariant: the bar requests the arena's report only when it shows something, so the cost of
//! showing does not depend on the step rate. A failed write ends nothing.

#![forbid(unsafe_code)]

use super::batch::{EpochProgress, Update};
use super::fit::Observer;
use cuda_std::float_mode;
use indicatif::{ProgressState, ProgressStyle};
use std::fmt;
use std::io::{Write, stderr};
use std::time::{Duration, Instant};
use stepscope_core::{Arena, Result};

/// The time between two redraws on a terminal.
const DRAW_EVERY: Duration = Duration::from_millis(100);
/// The time between two lines, or two events.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// An [`Observer`] that shows an epoch on standard error. On a terminal it draws a bar with the
/// remaining time, the step time, samples per second, loss, memory and overflows. Elsewhere it
/// writes a line with the same figures every ten seconds. Needs the feature `progress`.
///
/// ```
/// use stepscope::prelude::*;
/// use stepscope::train::ProgressBar;
///
/// # struct Line(nn::Linear);
/// # impl Model for Line {
/// #     fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
/// #         self.0.forward(tape, &tape.input(batch.input::<f32>(0)?))
/// #     }
/// # }
/// fn train<M: Model, B: HostBatch>(trainer: &mut Trainer<'_, M>, batches: Vec<B>, samples: usize) -> Result<()> {
///     let mut bar = ProgressBar::new("epoch 0", samples);
///     let mut progress = EpochProgress::default();
///     trainer.fit_with(batches, &mut progress, &mut bar)?;
///     let duration = bar.finish(&progress); // epoch 0  80 samples in 0.1 s  loss 0.0312  1482 samples/s
///     assert!(!duration.is_zero());
///     Ok(())
/// }
/// # fn main() -> Result<()> {
/// # let device = Device::open(DeviceKind::Emulated)?;
/// # let mut spec = ParameterSpec::builder();
/// # let model = Line(nn::Linear::new(spec.at("line"), 2, 2));
/// # let state = TrainState::new(&device, model, &spec.build()?, 7, AdamW::default())?;
/// # let batch = || (vec![[1.0f32, 0.0], [0.0, 1.0]], vec![0u32, 1]);
/// # let mut trainer = Trainer::captured(&device, state, &batch())?;
/// # train(&mut trainer, vec![batch(); 40], 80)
/// # }
/// ```
///
/// To show the bar from an observer of your own, store a `ProgressBar` in a field and call its
/// [`Observer::updated`].
#[derive(Debug)]
pub struct ProgressBar {
    name: String,
    /// The counted unit, and the number of units in a sample.
    unit: (&'static str, usize),
    /// The total number of samples.
    samples: usize,
    /// The number of samples so far.
    done: usize,
    shows: Shows,
    /// The drawn bar, which is hidden if there is no terminal.
    bar: indicatif::ProgressBar,
    start: Instant,
    /// The time of the last output.
    shown: Instant,
    /// The number of updates since the last output.
    updates: u32,
}

#[derive(Clone, Copy, Debug)]
enum Shows {
    Text,
    Events,
    Nothing,
}

/// The figures of a running epoch.
struct Standing {
    step_ms: f64,
    per_second: f64,
    loss: f64,
    memory_bytes: usize,
    overflows: u64,
}

impl ProgressBar {
    /// Starts the clock for an epoch with `samples` samples left. `name` names the epoch.
    pub fn new(name: impl Into<String>, samples: usize) -> Self {
        Self::on(indicatif::ProgressBar::new(0), name.into(), samples)
    }

    fn on(bar: indicatif::ProgressBar, name: String, samples: usize) -> Self {
        let now = Instant::now();
        let bar = bar.with_prefix(name.clone());
        let new = Self {
            name,
            unit: ("samples", 1),
            samples,
            done: 0,
            shows: Shows::Text,
            bar,
            start: now,
            shown: now,
            updates: 0,
        };
        new.counting("samples", 1)
    }

    /// Counts parts of samples instead, such as `tokens`, of which each sample has `per_sample`.
    pub fn counting(mut self, unit: &'static str, per_sample: usize) -> Self {
        self.unit = (unit, per_sample);
        let style = ProgressStyle::with_template("{prefix}  {bar:30} {pos}/{len} {unit}  {eta} left\n{msg}");
        let style = style.expect("the template is well-formed");
        self.bar.set_style(style.with_key("unit", move |_: &ProgressState, text: &mut dyn fmt::Write| {
            text.write_str(unit).expect("a string takes all that is written")
        }));
        self.bar.set_length(self.counted(self.samples) as u64);
        self
    }

    /// Emits the same figures as `tracing` events and draws nothing. It emits `training` every ten
    /// seconds and `trained` at the end, both at level `INFO`, with the figures as fields.
    pub fn as_events(self) -> Self {
        Self { shows: Shows::Events, ..self }.without_bar()
    }

    /// Shows nothing, for example because another rank does.
    pub fn silent(self) -> Self {
        Self { shows: Shows::Nothing, ..self }.without_bar()
    }

    fn without_bar(self) -> Self {
        self.bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        self
    }

    /// Converts samples to the counted unit.
    fn counted(&self, samples: usize) -> usize {
        samples * self.unit.1
    }

    /// Excludes this much time from all rates, because it was not spent training, for example on an
    /// evaluation.
    pub fn leave_out(&mut self, time: Duration) {
        self.start += time.min(self.start.elapsed());
        self.shown += time.min(self.shown.elapsed());
    }

    /// Prints a line of text between the figures.
    pub fn say(&self, text: &str) {
        match self.shows {
            Shows::Text => self.bar.suspend(|| write_line(text)),
            Shows::Events => tracing::info!("{text}"),
            Shows::Nothing => (),
        }
    }

    /// Ends the display with a summary line, and returns the time since [`ProgressBar::new`]
    /// without the excluded time.
    pub fn finish(&self, progress: &EpochProgress) -> Duration {
        float_mode::in_default(|| self.finish_now(progress))
    }

    fn finish_now(&self, progress: &EpochProgress) -> Duration {
        let (duration, done, loss) = (self.start.elapsed(), self.counted(self.done), progress.mean_loss());
        let seconds = duration.as_secs_f64();
        let per_second = done as f64 / seconds;
        self.bar.finish_and_clear();
        let Self { name, unit: (unit, _), .. } = self;
        if done == 0 {
            match self.shows {
                Shows::Text => write_line(&format!("{name}  no {unit} were left")),
                Shows::Events => tracing::info!(epoch = name, unit, done, seconds, "trained"),
                Shows::Nothing => (),
            }
            return duration;
        }
        match self.shows {
            Shows::Text => write_line(&format!(
                "{name}  {done} {unit} in {seconds:.1} s  loss {loss:.4}  {per_second:.0} {unit}/s"
            )),
            Shows::Events => tracing::info!(epoch = name, unit, done, seconds, per_second, loss, "trained"),
            Shows::Nothing => (),
        }
        duration
    }

    /// Shows the current figures.
    fn show(&mut self, loss: f64, arena: &Arena) {
        let report = arena.report();
        let [done, of] = [self.done, self.samples].map(|samples| self.counted(samples));
        let standing = Standing {
            step_ms: self.shown.elapsed().as_secs_f64() * 1e3 / f64::from(self.updates),
            per_second: done as f64 / self.start.elapsed().as_secs_f64(),
            loss,
            memory_bytes: report.peak_bytes,
            overflows: report.overflow.allocations,
        };
        (self.shown, self.updates) = (Instant::now(), 0);
        let Self { name, unit: (unit, _), .. } = self;
        let Standing { step_ms, per_second, memory_bytes, overflows, .. } = standing;
        match self.shows {
            Shows::Text if self.bar.is_hidden() => {
                write_line(&format!("{name}  {done}/{of} {unit}  {}", standing.line(unit)));
            }
            Shows::Text => self.bar.set_message(standing.line(unit)),
            Shows::Events => tracing::info!(
                epoch = name,
                unit,
                done,
                of,
                step_ms,
                per_second,
                loss,
                memory_bytes,
                overflows,
                "training"
            ),
            Shows::Nothing => (),
        }
    }
}

impl Observer for ProgressBar {
    fn updated(&mut self, update: &Update, _: &EpochProgress, arena: &Arena) -> Result<()> {
        self.done += update.samples;
        self.updates += 1;
        float_mode::in_default(|| {
            self.bar.set_position(self.counted(self.done) as u64);
            let every = if self.bar.is_hidden() { LINE_EVERY } else { DRAW_EVERY };
            if self.shown.elapsed() >= every {
                self.show(update.loss, arena);
            }
        });
        Ok(())
    }
}

impl Standing {
    fn line(&self, unit: &str) -> String {
        let Self { step_ms, per_second, loss, memory_bytes, overflows } = self;
        let mib = *memory_bytes as f64 / f64::from(1 << 20);
        format!(
            "step {step_ms:.1} ms  {unit}/s {per_second:.0}  loss {loss:.4}  memory {mib:.1} MiB  overflows {overflows}"
        )
    }
}

/// Writes a line to standard error and ignores a failure.
fn write_line(text: &str) {
    drop(writeln!(stderr(), "{text}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::{InMemoryTerm, ProgressDrawTarget};
    use stepscope_core::{Capacity, Device, DeviceKind};

    fn arena() -> Arena {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap()
    }

    /// Passes an update of `samples` samples to the bar and the progress.
    fn update(bar: &mut ProgressBar, progress: &mut EpochProgress, samples: usize, loss: f64, arena: &Arena) {
        let update = Update { number: progress.updates + 1, samples, loss, ..Update::default() };
        progress.add(&update);
        bar.updated(&update, progress, arena).unwrap();
    }

    #[test]
    fn finished_bar_leaves_the_terminal() {
        let terminal = InMemoryTerm::new(10, 90);
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        let bar = indicatif::ProgressBar::with_draw_target(None, target);
        let mut bar = ProgressBar::on(bar, "fold 0, epoch 0".into(), 8);
        let (mut arena, mut progress) = (arena(), EpochProgress::default());
        arena.step(|step| step.empty::<f32>([1 << 17]).map(drop)).unwrap();
        update(&mut bar, &mut progress, 3, 1.5, &arena);
        assert!(!terminal.contents().contains("1.5000"), "the bar must not be drawn more often than its rate");
        bar.show(1.25, &arena);
        bar.bar.tick();
        let shown = terminal.contents();
        assert!(shown.starts_with("fold 0, epoch 0") && shown.contains("3/8 samples"), "{shown}");
        for text in [" left\nstep ", "samples/s", "loss 1.2500", "memory 0.5 MiB", "overflows 0"] {
            assert!(shown.contains(text), "no {text}: {shown}");
        }
        bar.finish(&progress);
        assert_eq!(terminal.contents(), "");
    }

    #[test]
    fn bar_counts_samples_or_tokens() {
        let (samples, tokens) = (ProgressBar::new("a", 4), ProgressBar::new("a", 4).counting("tokens", 10));
        for (mut bar, all) in [(samples.as_events(), 4), (tokens.silent(), 40)] {
            let (arena, mut progress) = (arena(), EpochProgress::default());
            assert!(bar.bar.is_hidden() && bar.bar.length() == Some(all));
            update(&mut bar, &mut progress, 3, 1.0, &arena);
            update(&mut bar, &mut progress, 1, 2.0, &arena);
            assert_eq!(bar.bar.position(), all);
            assert!(!bar.finish(&progress).is_zero());
        }
    }

    #[test]
    fn excluded_time_is_not_counted() {
        let mut bar = ProgressBar::new("a", 4).silent();
        std::thread::sleep(Duration::from_millis(200));
        bar.leave_out(Duration::from_millis(150));
        assert!(bar.start.elapsed() >= Duration::from_millis(50));
        let begun = bar.start;
        bar.leave_out(Duration::MAX);
        assert!(bar.start > begun && bar.start <= Instant::now() && bar.shown <= Instant::now());
    }

    #[test]
    fn a_line_has_all_figures() {
        let standing = Standing { step_ms: 12.34, per_second: 81.4, loss: 0.9, memory_bytes: 3 << 19, overflows: 7 };
        assert_eq!(standing.line("samples"), "step 12.3 ms  samples/s 81  loss 0.9000  memory 1.5 MiB  overflows 7");
    }
}
