//! examples/lstm.rs in burn: an LSTM that forecasts how far a price will move.

#[path = "../../ranges.rs"]
mod ranges;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
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

type B = Autodiff<Flex>;

/// Learns to forecast ranges
#[derive(Parser)]
struct Args {
    /// File of one-minute bars
    bars: PathBuf,
}

#[derive(Module, Debug)]
struct Forecaster<B: Backend> {
    lstm: Lstm<B>,
    head: Linear<B>,
}

impl<B: Backend> Forecaster<B> {
    fn new(device: &B::Device) -> Self {
        let lstm = LstmConfig::new(1, WIDTH, true).init(device);
        Self { lstm, head: LinearConfig::new(WIDTH, 1).init(device) }
    }

    fn forward(&self, values: Tensor<B, 2>) -> Tensor<B, 2> {
        let (outputs, _) = self.lstm.forward(values.unsqueeze_dim(2), None);
        self.head.forward(outputs).squeeze_dim(2)
    }
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let values = ranges::read(&Args::parse().bars)?;
    let (training, held_out) = values.split_at(values.len() / 5 * 4);
    let device = Default::default();
    B::seed(&device, 7);
    let mut model = Forecaster::<B>::new(&device);
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init();
    let mut random = StdRng::seed_from_u64(7);
    let started = Instant::now();
    for _ in 0..UPDATES {
        let starts: Vec<usize> = (0..BATCH).map(|_| random.random_range(0..training.len() - WINDOW)).collect();
        let [x, y] = windows(training, &starts, &device);
        let loss = MseLoss::new().forward(model.forward(x), y, Reduction::Mean);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-3, model, gradients);
    }
    let seconds = started.elapsed().as_secs_f64();

    let starts: Vec<usize> = (0..held_out.len() - WINDOW).step_by(WINDOW).collect();
    let [x, y] = windows::<Flex>(held_out, &starts, &device);
    let forecast = model.valid().forward(x.clone());
    let mse = |guess: &Tensor<Flex, 2>| MseLoss::new().forward(guess.clone(), y.clone(), Reduction::Mean).into_scalar();
    let (error, last, constant) = (mse(&forecast), mse(&x), mse(&y.zeros_like()));
    println!("held out, mean squared error: LSTM {error:.3}, the last value {last:.3}, the mean {constant:.3}");
    let first = |values: Tensor<Flex, 2>| values.slice(0..1).into_data().to_vec::<f32>();
    println!("ranges   {}\nforecast {}", plot(&first(y)?), plot(&first(forecast)?));
    let result = [error, last, constant];
    println!("{}", json!({ "example": "lstm", "framework": "burn", "seconds": seconds, "result": result }));
    Ok(ExitCode::from(u8::from(error >= last.min(constant))))
}

/// Returns the windows that begin at these values, and the value after each of theirs.
fn windows<B: Backend>(values: &[f32], starts: &[usize], device: &B::Device) -> [Tensor<B, 2>; 2] {
    [0, 1].map(|place| {
        let rows: Vec<f32> = starts.iter().flat_map(|start| &values[start + place..][..WINDOW]).copied().collect();
        Tensor::from_data(TensorData::new(rows, [starts.len(), WINDOW]), device)
    })
}
