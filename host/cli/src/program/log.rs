//! Logging on standard error: text for people, or JSON objects for programs.
//!
//! Invariant: with `--log json` every line there is one object, including the library's own
//! messages. A failed write is ignored.

use std::error::Error;
use std::io::{IsTerminal, Write, stderr};

use clap::ValueEnum;
use stepscope::train::ProgressBar;
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::prelude::*;

/// The format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Log {
    /// A progress bar with figures on a terminal, else a line now and then.
    Text,
    /// JSON objects, one per line, for programs
    Json,
    /// Nothing, because another rank logs.
    #[value(skip)]
    Quiet,
}

impl Log {
    /// Configures a progress bar for this log format.
    pub fn shows(self, bar: ProgressBar) -> ProgressBar {
        match self {
            Log::Text => bar,
            Log::Json => bar.as_events(),
            Log::Quiet => bar.silent(),
        }
    }
}

/// Subscribes to the events of this program and the library. `RUST_LOG` sets the level. The default
/// is warnings, and also progress if the log is JSON. `debug` adds each step with its time. If the
/// feature `nvtx` is on and a profiler started the program, it receives the events, too.
pub fn start(log: Log) {
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
    let listeners = listeners.with(profiler().then(|| stepscope::check::NvtxLayer.with_filter(LevelFilter::TRACE)));
    listeners.init();
}

/// Returns true if a profiler started this program. Profilers set this variable to their library.
#[cfg(feature = "nvtx")]
fn profiler() -> bool {
    std::env::var_os("NVTX_INJECTION64_PATH").is_some()
}

/// Logs a sentence.
pub fn say(log: Log, text: &str) {
    match log {
        Log::Text => drop(writeln!(stderr(), "{text}")),
        Log::Json => tracing::info!("{text}"),
        Log::Quiet => (),
    }
}

/// Logs the error that ends the run.
pub fn failed(log: Log, error: &dyn Error) {
    match log {
        Log::Text => drop(writeln!(stderr(), "error: {error}")),
        Log::Json => tracing::error!("{error}"),
        Log::Quiet => (),
    }
}
