//! examples/ppo.rs in burn: proximal policy optimization that learns to balance a pole.

use std::array;
use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::activation::log_softmax;
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

type B = Autodiff<Flex>;

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

/// Computes the logits of both actions, and the value of the state.
#[derive(Module, Debug)]
struct Policy<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Policy<B> {
    fn new(device: &B::Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        Self { first: linear(4, 64), second: linear(64, 64), output: linear(64, 3) }
    }

    fn forward(&self, states: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = self.first.forward(states).tanh();
        self.output.forward(self.second.forward(x).tanh())
    }
}

fn main() -> ExitCode {
    let device = Default::default();
    B::seed(&device, 7);
    let mut policy = Policy::<B>::new(&device);
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.0).init();
    let mut random = StdRng::seed_from_u64(7);
    let mut carts: [Cart; CARTS] = array::from_fn(|_| Cart::new(&mut random));
    let (mut lengths, mut mean) = (VecDeque::new(), 0.0);
    let started = Instant::now();
    for round in 0..ROUNDS {
        let (mut steps, mut values) = (Vec::new(), Vec::new());
        let player = policy.valid();
        for number in 0..=STEPS {
            let states = Tensor::from_data(carts.map(|cart| cart.state), &device);
            let outputs: Vec<f32> = player.forward(states).into_data().to_vec().expect("they are f32");
            for (cart, output) in carts.iter_mut().zip(outputs.chunks(3)) {
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
                let gradients = GradientsParams::from_grads(loss(&policy, batch).backward(), &policy);
                let gradients = clipped(gradients, &policy);
                policy = optimizer.step(1e-3, policy, gradients);
            }
        }
        lengths.drain(..lengths.len().saturating_sub(20));
        mean = lengths.iter().sum::<f32>() / lengths.len().max(1) as f32;
        if round % 5 == 4 {
            println!("round {:2}: episodes of {mean:.0} steps", round + 1);
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", json!({ "example": "ppo", "framework": "burn", "seconds": seconds, "result": mean }));
    ExitCode::from(u8::from(mean < 400.0))
}

fn loss(policy: &Policy<B>, steps: &[Step]) -> Tensor<B, 1> {
    let device = policy.first.weight.device();
    let column = |value: fn(&Step) -> f32| {
        let values = TensorData::new(steps.iter().map(value).collect(), [steps.len(), 1]);
        Tensor::<B, 2>::from_data(values, &device)
    };
    let states: Vec<f32> = steps.iter().flat_map(|step| step.state).collect();
    let actions: Vec<u32> = steps.iter().map(|step| step.action).collect();
    let actions = Tensor::from_data(TensorData::new(actions, [steps.len(), 1]), &device);
    let (before, advantage) = (column(|step| step.log_probability), column(|step| step.advantage));
    let gain = column(|step| step.gain / MOST);

    let output = policy.forward(Tensor::from_data(TensorData::new(states, [steps.len(), 4]), &device));
    let log_probabilities = log_softmax(output.clone().slice(s![.., 0..2]), 1);
    let ratio = (log_probabilities.clone().gather(1, actions) - before).exp();
    let clipped = ratio.clone().clamp(0.8, 1.2) * advantage.clone();
    let better = (ratio * advantage).min_pair(clipped).mean();
    let entropy = -(log_probabilities.clone().exp() * log_probabilities).sum_dim(1).mean();
    let error = (output.slice(s![.., 2..3]) - gain).square().mean();
    error * 0.5 - better - entropy * 0.01
}

/// Scales gradients down to a norm of `CLIP` of all together. burn clips each tensor by its own
/// norm only.
fn clipped(gradients: GradientsParams, policy: &Policy<B>) -> GradientsParams {
    let parameters = [&policy.first, &policy.second, &policy.output].map(|layer| {
        let (weight, bias) = (layer.weight.id, layer.bias.as_ref().expect("it was made with a bias").id);
        let of_weight = gradients.get::<Flex, 2>(weight).expect("a weight has a gradient");
        let of_bias = gradients.get::<Flex, 1>(bias).expect("a bias has a gradient");
        (weight, of_weight, bias, of_bias)
    });
    let squares =
        parameters.each_ref().map(|(_, weight, _, bias)| weight.clone().square().sum() + bias.clone().square().sum());
    let norm = Tensor::cat(squares.into(), 0).sum().sqrt().into_scalar();
    let scale = (CLIP / (f64::from(norm) + 1e-6)).min(1.0);
    let mut scaled = GradientsParams::new();
    for (weight, of_weight, bias, of_bias) in parameters {
        scaled.register(weight, of_weight * scale);
        scaled.register(bias, of_bias * scale);
    }
    scaled
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
