//! Carts with poles, for the ppo examples of the Rust peers: the carts of ../../examples/ppo.rs.

use rand::Rng;
use rand::rngs::StdRng;
use std::array;
use std::collections::VecDeque;

/// Carts that are driven at the same time, and steps of each between two updates of the policy.
const CARTS: usize = 16;
const STEPS: usize = 128;
/// The steps of an episode at most, the discount, and the decay of advantages.
const LONGEST: usize = 500;
const DISCOUNT: f32 = 0.99;
const DECAY: f32 = 0.95;
/// The most that can be gained, which is the unit of the policy's values.
pub(crate) const MOST: f32 = 1.0 / (1.0 - DISCOUNT);

/// A step of an episode.
#[derive(Clone, Copy, Default)]
pub(crate) struct Step {
    pub(crate) state: [f32; 4],
    pub(crate) action: u32,
    /// The policy's log-probability of the action when it was taken.
    pub(crate) log_probability: f32,
    pub(crate) advantage: f32,
    /// The discounted sum of rewards from here on.
    pub(crate) gain: f32,
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

/// The carts, and the steps of the episodes that ended.
pub(crate) struct Carts {
    carts: [Cart; CARTS],
    lengths: VecDeque<f32>,
}

impl Carts {
    pub(crate) fn new(random: &mut StdRng) -> Self {
        Self { carts: array::from_fn(|_| Cart::new(random)), lengths: VecDeque::new() }
    }

    /// Drives all carts, and returns their steps. `policy` computes from the states three outputs
    /// for each: the logits of both actions, and the value.
    pub(crate) fn drive<E>(
        &mut self,
        random: &mut StdRng,
        policy: impl Fn([[f32; 4]; CARTS]) -> Result<Vec<f32>, E>,
    ) -> Result<Vec<Step>, E> {
        let (mut steps, mut values) = (Vec::new(), Vec::new());
        for number in 0..=STEPS {
            let outputs = policy(self.carts.map(|cart| cart.state))?;
            for (cart, output) in self.carts.iter_mut().zip(outputs.chunks(3)) {
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
                    self.lengths.push_back(cart.steps as f32);
                    *cart = Cart::new(random);
                }
                steps.push(step);
            }
        }
        judge(&mut steps, &values);
        Ok(steps)
    }

    /// The mean number of steps of the last 20 episodes.
    pub(crate) fn mean_length(&mut self) -> f32 {
        self.lengths.drain(..self.lengths.len().saturating_sub(20));
        self.lengths.iter().sum::<f32>() / self.lengths.len().max(1) as f32
    }
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
