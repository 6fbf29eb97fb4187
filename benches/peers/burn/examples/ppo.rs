//! examples/ppo.rs in burn: proximal policy optimization that learns to balance a pole.

#[path = "../../pole.rs"]
mod pole;

use std::convert::Infallible;
use std::process::ExitCode;
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::activation::log_softmax;
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

type B = Autodiff<Flex>;

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
    let mut carts = Carts::new(&mut random);
    let mut mean = 0.0;
    let started = Instant::now();
    for round in 0..ROUNDS {
        let player = policy.valid();
        let Ok(mut steps) = carts.drive::<Infallible>(&mut random, |states| {
            Ok(player.forward(Tensor::from_data(states, &device)).into_data().to_vec().expect("they are f32"))
        });
        for _ in 0..PASSES {
            steps.shuffle(&mut random);
            for batch in steps.chunks(BATCH) {
                let gradients = GradientsParams::from_grads(loss(&policy, batch).backward(), &policy);
                let gradients = clipped(gradients, &policy);
                policy = optimizer.step(1e-3, policy, gradients);
            }
        }
        mean = carts.mean_length();
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
