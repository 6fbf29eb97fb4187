//! examples/ppo.rs in candle: proximal policy optimization that learns to balance a pole.

#[path = "../src/clip.rs"]
mod clip;
#[path = "../../pole.rs"]
mod pole;

use std::process::ExitCode;
use std::time::Instant;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{AdamW, Module, Optimizer, ParamsAdamW, Sequential, VarBuilder, VarMap, linear, ops, seq};
use clip::clip;
use pole::{Carts, MOST, Step};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde_json::json;

const ROUNDS: usize = 60;
const BATCH: usize = 256;
/// Passes over the steps of a round.
const PASSES: usize = 6;
/// The largest norm of all gradients together.
const CLIP: f64 = 0.5;

fn main() -> Result<ExitCode> {
    let device = Device::Cpu;
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
    // The logits of both actions, and the value of the state.
    let policy = seq()
        .add(linear(4, 64, vb.pp("first"))?)
        .add_fn(Tensor::tanh)
        .add(linear(64, 64, vb.pp("second"))?)
        .add_fn(Tensor::tanh)
        .add(linear(64, 3, vb.pp("output"))?);
    let weights = variables.all_vars();
    let settings = ParamsAdamW { lr: 1e-3, weight_decay: 0.0, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(weights.clone(), settings)?;
    let mut random = StdRng::seed_from_u64(7);
    let mut carts = Carts::new(&mut random);
    let mut mean = 0.0;
    let started = Instant::now();
    for round in 0..ROUNDS {
        let mut steps = carts.drive(&mut random, |states| {
            policy.forward(&Tensor::new(&states, &device)?)?.flatten_all()?.to_vec1::<f32>()
        })?;
        for _ in 0..PASSES {
            steps.shuffle(&mut random);
            for batch in steps.chunks(BATCH) {
                let mut gradients = loss(&policy, batch, &device)?.backward()?;
                clip(&mut gradients, &weights, CLIP)?;
                optimizer.step(&gradients)?;
            }
        }
        mean = carts.mean_length();
        if round % 5 == 4 {
            println!("round {:2}: episodes of {mean:.0} steps", round + 1);
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", json!({ "example": "ppo", "framework": "candle", "seconds": seconds, "result": mean }));
    Ok(ExitCode::from(u8::from(mean < 400.0)))
}

fn loss(policy: &Sequential, steps: &[Step], device: &Device) -> Result<Tensor> {
    let column = |value: fn(&Step) -> f32| Tensor::from_iter(steps.iter().map(value), device);
    let states: Vec<f32> = steps.iter().flat_map(|step| step.state).collect();
    let actions = Tensor::from_iter(steps.iter().map(|step| step.action), device)?;
    let (before, advantage) = (column(|step| step.log_probability)?, column(|step| step.advantage)?);
    let gain = column(|step| step.gain / MOST)?;

    let output = policy.forward(&Tensor::from_vec(states, (steps.len(), 4), device)?)?;
    let log_probabilities = ops::log_softmax(&output.narrow(1, 0, 2)?, D::Minus1)?;
    let ratio = (log_probabilities.gather(&actions.unsqueeze(1)?, 1)?.squeeze(1)? - before)?.exp()?;
    let better = (&ratio * &advantage)?.minimum(&(ratio.clamp(0.8, 1.2)? * &advantage)?)?.mean_all()?;
    let entropy = (log_probabilities.exp()? * &log_probabilities)?.sum(1)?.mean_all()?.neg()?;
    let error = (output.narrow(1, 2, 1)?.squeeze(1)? - gain)?.sqr()?.mean_all()?;
    (error * 0.5)? - (better + (entropy * 0.01)?)?
}
