//! Proximal policy optimization (Schulman et al., 2017) that learns to balance a pole on a cart.
//!
//! `cargo run --release --example ppo`. Exit code 0: the last 20 finished episodes have a mean
//! length of at least 400 of 500 steps. 1: it is shorter.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use clap::Parser;
use std::{array, collections::VecDeque, process::ExitCode};
use stepscope::data::SplitMix64;
use stepscope::nn::{Linear, Sequential};
use stepscope::prelude::*;

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

/// Learns to balance a pole
#[derive(Parser)]
struct Args {
    /// Device to train on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,
}

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

/// Returns states, actions, and the log-probability, the advantage and the gain of each step.
fn batch(steps: &[Step]) -> impl HostBatch + use<> {
    let numbers = |step: &Step| [step.log_probability, step.advantage, step.gain];
    let (states, actions): (Vec<_>, Vec<_>) = steps.iter().map(|step| (step.state, [step.action])).unzip();
    (states, actions, steps.iter().map(numbers).collect::<Vec<_>>())
}

/// Computes the logits of both actions, and the value of the state.
struct Policy(Sequential);

impl Model for Policy {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.0.forward(tape, &tape.input(batch.input(0)?))
    }

    fn loss<'s>(&self, tape: &Tape<'_, 's>, output: &Var<'s>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let [before, advantage, gain] = tape.input(batch.input::<f32>(2)?).chunks::<3>(-1)?;
        let (log_probabilities, value) = (output.narrow(-1, 0..2)?.log_softmax()?, output.narrow(-1, 2..3)?);
        let ratio = (log_probabilities.gather(-1, &batch.indices(1)?)? - before)?.exp()?;
        let better = (ratio * advantage)?.minimum((ratio.clamp(0.8, 1.2)? * advantage)?)?.mean(..)?;
        let entropy = -(log_probabilities.exp()? * log_probabilities)?.sum(-1)?.mean(..)?;
        let error = (value - (gain / MOST)?)?.square()?.mean(..)?;
        (error * 0.5)? - (better + (entropy? * 0.01)?)?
    }
}

/// A cart with a pole: its place and speed, and the pole's angle and its speed (Barto, Sutton and
/// Anderson, 1983).
#[derive(Clone, Copy)]
struct Cart {
    state: [f32; 4],
    steps: usize,
}

impl Cart {
    fn new(random: &mut SplitMix64) -> Self {
        Self { state: array::from_fn(|_| 0.1 * (random.unit() - 0.5)), steps: 0 }
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
    let mut spec = ParameterSpec::builder();
    let layers = Sequential::default()
        .then(Linear::new(spec.at("first"), 4, 64))
        .then_fn(|_, x| x.tanh())
        .then(Linear::new(spec.at("second"), 64, 64))
        .then_fn(|_, x| x.tanh())
        .then(Linear::new(spec.at("output"), 64, 3));
    let device = Device::open(Args::parse().device)?;
    let config = AdamW { learning_rate: 1e-3, weight_decay: 0.0, clip: Some(0.5), ..AdamW::default() };
    let state = TrainState::new(&device, Policy(layers), &spec.build()?, 7, config)?;
    let mut trainer = Trainer::captured(&device, state, &batch(&[Step::default(); BATCH]))?;
    let mut random = SplitMix64::new(7);
    let mut carts: [Cart; CARTS] = array::from_fn(|_| Cart::new(&mut random));
    let (mut lengths, mut mean) = (VecDeque::new(), 0.0);
    for round in 0..ROUNDS {
        let (mut steps, mut values) = (Vec::new(), Vec::new());
        for number in 0..=STEPS {
            let now = carts.map(|cart| Step { state: cart.state, ..Step::default() });
            let (_, output) = trainer.evaluate_with(&batch(&now), |step, output| step.read(output.value()))?;
            for ((cart, mut step), [left, right, value]) in carts.iter_mut().zip(now).zip(output.as_chunks::<3>().0) {
                values.push(value * MOST);
                if number == STEPS {
                    continue;
                }
                let share = 1.0 / (1.0 + (left - right).exp());
                step.action = u32::from(random.unit() < share);
                step.log_probability = if step.action == 1 { share } else { 1.0 - share }.ln();
                step.is_last = cart.push(step.action == 1);
                if step.is_last {
                    lengths.push_back(cart.steps as f32);
                    *cart = Cart::new(&mut random);
                }
                steps.push(step);
            }
        }
        judge(&mut steps, &values);
        for _ in 0..PASSES {
            steps.sort_by_cached_key(|_| random.next_u64());
            trainer.fit(steps.chunks(BATCH).map(batch))?;
        }
        lengths.drain(..lengths.len().saturating_sub(20));
        mean = lengths.iter().sum::<f32>() / lengths.len().max(1) as f32;
        if round % 5 == 4 {
            println!("round {:2}: episodes of {mean:.0} steps", round + 1);
        }
    }
    Ok(ExitCode::from(u8::from(mean < 400.0)))
}

/// Computes gains, and advantages of mean 0 and deviation 1 (Schulman et al., 2016), from the
/// values of the states.
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
