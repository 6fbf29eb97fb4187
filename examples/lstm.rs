//! An LSTM that forecasts how far a price will move, from a file of one-minute bars.
//!
//! `cargo run --release --example lstm -- bars.csv`. The file has the columns `high` and `low`. A
//! sample is the logarithm of the range of each quarter of an hour, and the forecast is that of the
//! next. The last fifth of the file is held out. Exit code 0: the held-out error is below those of
//! two simple forecasts, the last value and the mean. 1: it is not, or the file or the device
//! failed. 2: the command line is wrong.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use clap::Parser;
use std::{error::Error, path::PathBuf, process::ExitCode};
use stepscope::data::SplitMix64;
use stepscope::nn::{Linear, Lstm};
use stepscope::{
    AdamW, Device, DeviceBatch, DeviceKind, HostBatch, Model, ParameterSpec, Result, Tape, TrainState, Trainer, Var,
};

/// Minutes of a value.
const MINUTES: usize = 15;
/// Values of a sample: half a day.
const WINDOW: usize = 48;
const WIDTH: usize = 32;
const BATCH: usize = 32;
const UPDATES: usize = 300;

/// Learns to forecast ranges
#[derive(Parser)]
struct Args {
    /// File of one-minute bars
    bars: PathBuf,
    /// Device to train on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,
}

#[derive(serde::Deserialize)]
struct Bar {
    high: f64,
    low: f64,
}

#[derive(HostBatch)]
struct Windows {
    values: Vec<[f32; WINDOW]>,
    /// The value after each.
    next: Vec<[f32; WINDOW]>,
}

impl Windows {
    /// Returns the windows that begin at these values.
    fn of(values: &[f32], starts: impl Iterator<Item = usize> + Clone) -> Self {
        let from = |at: usize| std::array::from_fn(|place| values[at + place]);
        Self { values: starts.clone().map(from).collect(), next: starts.map(|start| from(start + 1)).collect() }
    }
}

struct Forecaster {
    lstm: Lstm,
    head: Linear,
}

impl Model for Forecaster {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let values = tape.input(batch.input::<f32>("values")?);
        self.head.forward(tape, &self.lstm.forward(tape, &values.unsqueeze(-1)?)?)?.squeeze(-1)
    }

    fn loss<'s>(&self, tape: &Tape<'_, 's>, forecast: &Var<'s>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        (forecast - tape.input(batch.input("next")?))?.square()?.mean(..)
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(is_better) => ExitCode::from(u8::from(!is_better)),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> std::result::Result<bool, Box<dyn Error>> {
    let values = ranges(args)?;
    let (training, held_out) = values.split_at(values.len() / 5 * 4);
    if held_out.len() <= WINDOW {
        return Err(
            format!("{}: too few bars: give at least {}", args.bars.display(), 5 * (WINDOW + 1) * MINUTES).into()
        );
    }
    let mut spec = ParameterSpec::builder();
    let lstm = Lstm::new(spec.at("lstm"), 1, WIDTH);
    let model = Forecaster { lstm, head: Linear::new(spec.at("head"), WIDTH, 1) };
    let device = Device::open(args.device)?;
    let state = TrainState::new(&device, model, &spec.build()?, 7, AdamW { learning_rate: 3e-3, ..AdamW::default() })?;
    let mut trainer = Trainer::captured(&device, state, &Windows::of(training, [0; BATCH].into_iter()))?;
    let mut random = SplitMix64::new(7);
    let mut start = || (random.next_u64() % (training.len() - WINDOW) as u64) as usize;
    trainer.fit((0..UPDATES).map(|_| Windows::of(training, [0; BATCH].map(|_| start()).into_iter())))?;

    let test = Windows::of(held_out, (0..held_out.len() - WINDOW).step_by(WINDOW));
    let (error, forecast) = trainer.evaluate_with(&test, |step, forecast| step.read(forecast.value()))?;
    let pairs = || test.values.as_flattened().iter().zip(test.next.as_flattened());
    let mean = |errors: &mut dyn Iterator<Item = f32>| errors.map(|error| f64::from(error * error)).sum::<f64>();
    let count = pairs().count() as f64;
    let last = mean(&mut pairs().map(|(last, next)| next - last)) / count;
    let constant = mean(&mut pairs().map(|(_, next)| *next)) / count;
    println!("held out, mean squared error: LSTM {error:.3}, the last value {last:.3}, the mean {constant:.3}");
    println!("ranges   {}\nforecast {}", plot(&test.next[0]), plot(&forecast[..WINDOW]));
    Ok(error < last.min(constant))
}

/// Reads the logarithms of the ranges. Those before the held-out ones have mean 0 and deviation 1.
fn ranges(args: &Args) -> std::result::Result<Vec<f32>, Box<dyn Error>> {
    let bars = csv::Reader::from_path(&args.bars)?.deserialize().collect::<std::result::Result<Vec<Bar>, _>>()?;
    let range = |bars: &[Bar]| {
        let (high, low) = bars.iter().fold((0.0, f64::MAX), |(high, low), bar| (bar.high.max(high), bar.low.min(low)));
        (high / low - 1.0).max(1e-5).ln()
    };
    let values: Vec<f64> = bars.chunks_exact(MINUTES).map(range).collect();
    let known = &values[..values.len() / 5 * 4];
    let mean = known.iter().sum::<f64>() / known.len() as f64;
    let deviation = (known.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / known.len() as f64).sqrt();
    Ok(values.iter().map(|value| ((value - mean) / deviation) as f32).collect())
}

/// Draws values from -2 to 2 as bars.
fn plot(values: &[f32]) -> String {
    values
        .iter()
        .map(|value| ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][((value + 2.0) * 2.0).clamp(0.0, 7.0) as usize])
        .collect()
}
