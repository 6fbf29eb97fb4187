//! examples/lstm.rs in candle: an LSTM that forecasts how far a price will move.

#[path = "../../ranges.rs"]
mod ranges;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::rnn::{LSTM, LSTMConfig, RNN, lstm};
use candle_nn::{AdamW, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear, loss};
use clap::Parser;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use ranges::plot;
use serde_json::json;

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
}

struct Forecaster {
    lstm: LSTM,
    head: Linear,
}

impl Forecaster {
    fn new(vb: VarBuilder) -> Result<Self> {
        let lstm = lstm(1, WIDTH, LSTMConfig::default(), vb.pp("lstm"))?;
        Ok(Self { lstm, head: linear(WIDTH, 1, vb.pp("head"))? })
    }
}

impl Module for Forecaster {
    fn forward(&self, values: &Tensor) -> Result<Tensor> {
        let states = self.lstm.seq(&values.unsqueeze(2)?)?;
        let outputs: Vec<Tensor> = states.into_iter().map(|state| state.h).collect();
        self.head.forward(&Tensor::stack(&outputs, 1)?)?.squeeze(2)
    }
}

fn main() -> std::result::Result<ExitCode, Box<dyn Error>> {
    let values = ranges::read(&Args::parse().bars)?;
    let (training, held_out) = values.split_at(values.len() / 5 * 4);
    let device = Device::Cpu;
    let variables = VarMap::new();
    let model = Forecaster::new(VarBuilder::from_varmap(&variables, DType::F32, &device))?;
    let settings = ParamsAdamW { lr: 3e-3, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(variables.all_vars(), settings)?;
    let mut random = StdRng::seed_from_u64(7);
    let started = Instant::now();
    for _ in 0..UPDATES {
        let starts: Vec<usize> = (0..BATCH).map(|_| random.random_range(0..training.len() - WINDOW)).collect();
        let [x, y] = windows(training, &starts, &device)?;
        optimizer.backward_step(&loss::mse(&model.forward(&x)?, &y)?)?;
    }
    let seconds = started.elapsed().as_secs_f64();

    let starts: Vec<usize> = (0..held_out.len() - WINDOW).step_by(WINDOW).collect();
    let [x, y] = windows(held_out, &starts, &device)?;
    let forecast = model.forward(&x)?;
    let error = loss::mse(&forecast, &y)?.to_scalar::<f32>()?;
    let last = loss::mse(&x, &y)?.to_scalar::<f32>()?;
    let constant = y.sqr()?.mean_all()?.to_scalar::<f32>()?;
    println!("held out, mean squared error: LSTM {error:.3}, the last value {last:.3}, the mean {constant:.3}");
    println!("ranges   {}\nforecast {}", plot(&y.get(0)?.to_vec1()?), plot(&forecast.get(0)?.to_vec1()?));
    let result = [error, last, constant];
    println!("{}", json!({ "example": "lstm", "framework": "candle", "seconds": seconds, "result": result }));
    Ok(ExitCode::from(u8::from(error >= last.min(constant))))
}

/// Returns the windows that begin at these values, and the value after each of theirs.
fn windows(values: &[f32], starts: &[usize], device: &Device) -> Result<[Tensor; 2]> {
    let from =
        |place| Tensor::new(starts.iter().map(|start| &values[start + place..][..WINDOW]).collect::<Vec<_>>(), device);
    Ok([from(0)?, from(1)?])
}
