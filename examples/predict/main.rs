//! Predicts the time of a training step on a GPU that is not present, and the resource that bounds
//! it.
//!
//! ```text
//! cargo run --release --example predict -- --gpu gb10 --model gpt --precision bf16
//! cargo run --release --example predict -- --gpu h200 --model crossasset --batch 4096
//! # compared with every recorded line of an H200:
//! cargo run --release --example predict -- --against benches/runs
//! # compared with a run of the step bench:
//! cargo run --release --example predict -- --gpu gb10 --beside FILE
//!
//! step.rs       the launches of a step, from a dry run
//! bench.rs      the launches of the benches
//! model/        launches -> time
//! report.rs     tables
//! against.rs    comparison with measurements
//! recorded.rs   the files of those measurements
//! ```
//! `docs/predict.md` describes the model, its accuracy, and where it fails. Exit code 2: the
//! command line is wrong, or a file cannot be read or written.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod against;
mod arguments;
mod bench;
#[path = "../gpt/cli.rs"]
#[allow(dead_code, reason = "only the sizes are used")]
mod cli;
#[path = "../crossasset/model.rs"]
#[allow(dead_code, reason = "the monitored weight is unused")]
mod crossasset;
#[path = "../gpt/model.rs"]
#[allow(dead_code, reason = "nothing is written")]
mod gpt;
#[path = "../../benches/matmul/case.rs"]
#[allow(dead_code, reason = "its cases are those of the recorded lines")]
mod matmul_case;
mod model;
mod recorded;
mod report;
#[path = "../shared/mod.rs"]
mod shared;
#[path = "../crossasset/sizes.rs"]
mod sizes;
mod step;

use std::error::Error;
use std::io::{self, ErrorKind, Write as _};
use std::process::ExitCode;

use clap::Parser;

use arguments::Args;
use model::{Forecast, Kernels};

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(text) => match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => failed(&error),
            _ => ExitCode::SUCCESS,
        },
        Err(error) => failed(&*error),
    }
}

fn failed(error: &dyn Error) -> ExitCode {
    eprintln!("error: {error}");
    ExitCode::from(2)
}

/// Returns the text to print.
fn run(args: &Args) -> Result<String, Box<dyn Error>> {
    let gpu = args.gpu();
    let kernels = Kernels::of(gpu.arch);
    let compared = match (&args.against, &args.beside) {
        (Some(folder), _) => Some(against::compare(folder, &gpu, &kernels)?),
        (_, Some(file)) => Some(against::beside(file, &gpu, &kernels)?),
        _ => None,
    };
    let (text, json) = match compared {
        Some(compared) => (report::comparison(&compared), serde_json::to_value(&compared)?),
        None => {
            let launches = step::launches(gpu.processors, args.work(), args.precision, args.batch())?;
            let forecast = Forecast::of(&gpu, &kernels, &launches);
            let json = serde_json::json!({
                "gpu": gpu.name, "is_prediction": true, "step": args.title(), "forecast": forecast,
            });
            (report::forecast(&args.title(), &gpu, &forecast), json)
        }
    };
    if let Some(path) = &args.json {
        let written = stepscope::replace_file(path, format!("{json:#}\n").as_bytes());
        written.map_err(|error| format!("--json: {error}"))?;
    }
    Ok(text)
}
