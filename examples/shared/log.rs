//! What a run says of itself on standard error: text for people, or JSON objects for programs.
//!
//! Invariant: with `--log json` each line there is one object, whoever says it; what cannot be written ends nothing.

use std::error::Error;
use std::io::{IsTerminal, Write, stderr};

use clap::ValueEnum;
use stepscope::ProgressBar;
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::prelude::*;

/// What is written to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Log {
    /// A bar with figures on a terminal, else a line now and then.
    Text,
    /// Objects, one a line, for programs.
    Json,
    /// Nothing: another rank says it.
    #[value(skip)]
    Quiet,
}

impl Log {
    /// The bar as this log has it.
    pub(crate) fn shows(self, bar: ProgressBar) -> ProgressBar {
        match self {
            Log::Text => bar,
            Log::Json => bar.as_events(),
            Log::Quiet => bar.silent(),
        }
    }
}

/// Listens to this program and the library. `RUST_LOG` says how closely: warnings, with JSON also progress, unless it is set; from
/// `debug` on each step as it ends, with its time. With the feature `nvtx` a profiler that is there hears all of it besides.
pub(crate) fn start(log: Log) {
    let default = match log {
        Log::Text | Log::Quiet => LevelFilter::WARN,
        Log::Json => LevelFilter::INFO,
    };
    let filter = EnvFilter::builder().with_default_directive(default.into()).from_env_lossy();
    let lines = tracing_subscriber::fmt::layer().with_writer(stderr).with_span_events(FmtSpan::CLOSE);
    let lines = match log {
        Log::Text | Log::Quiet => lines.with_ansi(stderr().is_terminal()).boxed(),
        Log::Json => lines.json().flatten_event(true).boxed(),
    };
    let listeners = tracing_subscriber::registry().with(lines.with_filter(filter));
    #[cfg(feature = "nvtx")]
    let listeners = listeners.with(profiler().then(|| stepscope::NvtxLayer.with_filter(LevelFilter::TRACE)));
    listeners.init();
}

/// Whether a profiler has started this program: it then names its library here.
#[cfg(feature = "nvtx")]
fn profiler() -> bool {
    std::env::var_os("NVTX_INJECTION64_PATH").is_some()
}

/// Says a sentence.
pub(crate) fn say(log: Log, text: &str) {
    match log {
        Log::Text => drop(writeln!(stderr(), "{text}")),
        Log::Json => tracing::info!("{text}"),
        Log::Quiet => (),
    }
}

/// Says why the run ends.
pub(crate) fn failed(log: Log, error: &dyn Error) {
    match log {
        Log::Text => drop(writeln!(stderr(), "error: {error}")),
        Log::Json => tracing::error!("{error}"),
        Log::Quiet => (),
    }
}
