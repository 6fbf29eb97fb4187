//! examples/ppo.rs in candle: proximal policy optimization that learns to balance a pole.

use std::array;
use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Module, Optimizer, ParamsAdamW, Sequential, VarBuilder, VarMap, linear, ops, seq};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use serde_json::json;

/// Carts that are driven at the same time, and steps of each between two updates of the policy.
const CARTS: usize = 16;
const STEPS: usize = 128;
const ROUNDS: usize = 60;
const BATCH: usize = 256;
/// Passes over the steps of a round.
const PASSES: usize = 6;
/// The steps of an episode at most, the discount, and the decay of advantages.
const LONGEST: usize = 500;
const DISCOUNT: f32 = 0.99;
const DECAY: f32 = 0.95;
/// The most that can be gained, which is the unit of the policy's values.
const MOST: f32 = 1.0 / (1.0 - DISCOUNT);
/// The largest norm of all gradients together.
const CLIP: f64 = 0.5;

/// A step of an episode.
#[derive(Clone, Copy, Default)]
struct Step {
    state: [f32; 4],
    action: u32,
    /// The policy's log-probability of the action when it was taken.
    log_probability: f32,
    advantage: f32,
    /// The discounted sum of rewards from here on.
    gain: f32,
    is_last: bool,
}

/// A cart with a pole: its place and speed, and the pole's angle and its speed.
#[derive(Clone, Copy)]
struct Cart {
    state: [f32; 4],
    steps: usize,
}

impl Cart {
    fn new(random: &mut StdRng) -> Self {
        Self { state: array::from_fn(|_| random.random_range(-0.05..0.05)), steps: 0 }
    }

    /// Pushes the cart for 20 ms. Returns true if the episode ends.
    fn push(&mut self, right: bool) -> bool {
        let [place, speed, angle, turn] = self.state;
        let push = (if right { 10.0 } else { -10.0 } + 0.05 * turn * turn * angle.sin()) / 1.1;
        let turning = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4.0 / 3.0 - 0.1 * angle.cos().powi(2) / 1.1));
        let moving = push - 0.05 * turning * angle.cos() / 1.1;
        self.state = [place + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning];
        self.steps += 1;
        self.state[0].abs() > 2.4 || self.state[2].abs() > 0.2095 || self.steps == LONGEST
    }
}

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
    let mut carts: [Cart; CARTS] = array::from_fn(|_| Cart::new(&mut random));
    let (mut lengths, mut mean) = (VecDeque::new(), 0.0);
    let started = Instant::now();
    for round in 0..ROUNDS {
        let (mut steps, mut values) = (Vec::new(), Vec::new());
        for number in 0..=STEPS {
            let states = carts.map(|cart| cart.state);
            let outputs = policy.forward(&Tensor::new(&states, &device)?)?.to_vec2::<f32>()?;
            for (cart, output) in carts.iter_mut().zip(outputs) {
                values.push(output[2] * MOST);
                if number == STEPS {
                    continue;
                }
                let share = 1.0 / (1.0 + (output[0] - output[1]).exp());
                let right = random.random::<f32>() < share;
                let log_probability = if right { share } else { 1.0 - share }.ln();
                let mut step = Step { state: cart.state, action: u32::from(right), log_probability, ..Step::default() };
                step.is_last = cart.push(right);
                if step.is_last {
                    lengths.push_back(cart.steps as f32);
                    *cart = Cart::new(&mut random);
                }
                steps.push(step);
            }
        }
        judge(&mut steps, &values);
        for _ in 0..PASSES {
            steps.shuffle(&mut random);
            for batch in steps.chunks(BATCH) {
                update(&mut optimizer, &weights, &loss(&policy, batch, &device)?)?;
            }
        }
        lengths.drain(..lengths.len().saturating_sub(20));
        mean = lengths.iter().sum::<f32>() / lengths.len().max(1) as f32;
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

/// Makes an update with clipped gradients. candle has no function that clips.
fn update(optimizer: &mut AdamW, weights: &[Var], loss: &Tensor) -> Result<()> {
    let mut gradients = loss.backward()?;
    let squares = weights.iter().filter_map(|weight| gradients.get(weight)).map(|gradient| gradient.sqr()?.sum_all());
    let norm = Tensor::stack(&squares.collect::<Result<Vec<_>>>()?, 0)?.sum_all()?.sqrt()?.to_scalar::<f32>()?;
    let scale = (CLIP / (f64::from(norm) + 1e-6)).min(1.0);
    for weight in weights {
        if let Some(gradient) = gradients.remove(weight) {
            gradients.insert(weight, (gradient * scale)?);
        }
    }
    optimizer.step(&gradients)
}

/// Computes gains, and advantages of mean 0 and deviation 1, from the values of the states.
fn judge(steps: &mut [Step], values: &[f32]) {
    let mut later = [0.0; CARTS];
    for (at, step) in steps.iter_mut().enumerate().rev() {
        let (later, goes_on) = (&mut later[at % CARTS], if step.is_last { 0.0 } else { DISCOUNT });
        *later = 1.0 + goes_on * values[at + CARTS] - values[at] + goes_on * DECAY * *later;
        (step.advantage, step.gain) = (*later, *later + values[at]);
    }
    let mean_of = |value: &dyn Fn(&Step) -> f32| steps.iter().map(value).sum::<f32>() / steps.len() as f32;
    let mean = mean_of(&|step| step.advantage);
    let deviation = mean_of(&|step| (step.advantage - mean).powi(2)).sqrt();
    steps.iter_mut().for_each(|step| step.advantage = (step.advantage - mean) / deviation);
}
