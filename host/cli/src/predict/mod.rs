//! Predicts the time of a training step on a GPU that is not present, and the resource that bounds
//! it.
//!
//! ```text
//! stepscope predict --gpu gb10 --model gpt --precision bf16
//! stepscope predict --gpu h200 --model crossasset --batch 4096
//! stepscope predict --gpu gb10 --config Llama-3.2-1B/config.json --precision bf16 --recompute
//! stepscope predict --gpu gb10 --compare FILE  # compared with a run of the step bench
//!
//! step.rs       the launches of a step, from a dry run
//! report.rs     tables
//! compare.rs    comparison with a run of the step bench
//! tests.rs      comparison with the recorded runs
//! ```
//! `docs/predict.md` describes the model, its accuracy, and where it fails. Exit code 2: the
//! command line is wrong, or a file cannot be read or written.

mod arguments;
mod compare;
mod report;
pub(crate) mod step;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::io::{self, ErrorKind, Write as _};
use std::process::ExitCode;

use crate::run::memory::check_batch;
pub(crate) use arguments::Args;
use step::Work;
use stepscope_predict::{Forecast, Kernels};

/// Prints the prediction, and returns the exit code.
pub(crate) fn main(args: &Args) -> ExitCode {
    match run(args) {
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
    let (text, json) = match &args.compare {
        Some(file) => {
            let compared = compare::compare(file, &gpu, &kernels)?;
            (report::comparison(&compared), serde_json::to_value(&compared)?)
        }
        None => {
            if let Work::Gpt { config, mode, lora } = args.work() {
                check_batch(args.batch(), config.context).map_err(|error| error.to_string())?;
                step::check_size(&config, mode, lora)?;
            }
            let launches = step::launches(&gpu, &args.work(), args.precision, args.batch())?;
            let forecast = Forecast::of(&gpu, &kernels, &launches);
            let json = serde_json::json!({
                "gpu": gpu.name, "is_prediction": true, "step": args.title(), "forecast": forecast,
            });
            let mut text = report::forecast(&args.title(), &gpu, &forecast);
            if let Work::Gpt { config, mode, lora } = args.work() {
                let needs = step::memory(&config, mode, lora, args.precision, args.batch())?;
                text.push_str(&format!("a training run: {needs}\n"));
            }
            (text, json)
        }
    };
    if let Some(path) = &args.json {
        let written = stepscope::files::replace_file(path, format!("{json:#}\n").as_bytes());
        written.map_err(|error| format!("--json: {error}"))?;
    }
    Ok(text)
}
