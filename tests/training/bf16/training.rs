//! A network whose activations, gradients and products are BF16 trains like its f32 counterpart,
//! captured and eager.

#![forbid(unsafe_code)]

use crate::support::{Random, bits, on_each_device};
use stepscope::nn::{Mlp, RmsNorm};
use stepscope::ops::Activation;
use stepscope::optim::UpdateTicket;
use stepscope::prelude::*;
use stepscope::tensor::{Indices, Saved};

const ROWS: usize = 48;
const WIDTH: usize = 40;
const CLASSES: usize = 10;

/// Two residual blocks and a head: every kind of layer that supports BF16.
struct Model {
    norms: [RmsNorm; 2],
    blocks: [Mlp; 2],
    head: Mlp,
    weights: Parameters,
    gradients: Gradients,
    optimizer: Optimizer<AdamW>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let mut spec = ParameterSpec::builder();
        let norms = [0, 1].map(|at| RmsNorm::new(spec.at(format!("norm.{at}")), WIDTH));
        let blocks = [0, 1].map(|at| Mlp::new(spec.at(format!("block.{at}")), WIDTH, 4 * WIDTH, WIDTH));
        let head = Mlp::new(spec.at("head"), WIDTH, WIDTH, CLASSES);
        let weights = Parameters::new(device, &spec.build().unwrap(), 11).unwrap().with_bf16_copy().unwrap();
        let config = AdamW { learning_rate: 3e-3, ..AdamW::default() };
        let optimizer = Optimizer::new(&weights, config).unwrap();
        Self { norms, blocks, head, gradients: Gradients::zeros(&weights).unwrap(), weights, optimizer }
    }

    fn loss<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: Var<'s, S>, labels: Indices<'s>) -> Result<Var<'s>> {
        let mut h = x;
        for (norm, block) in self.norms.iter().zip(&self.blocks) {
            h = h.add(block.forward(tape, &norm.forward(tape, &h)?)?)?;
        }
        tape.cross_entropy(&self.head.forward(tape, &h)?, labels)
    }

    /// Returns the loss before an update, and makes the update.
    fn update<'s>(
        &mut self,
        ticket: UpdateTicket,
        step: &Step<'s>,
        x: Saved<'s>,
        labels: Indices<'s>,
        halves: bool,
    ) -> Result<Saved<'s>> {
        let tape = Tape::new(step, &self.weights);
        let x = tape.input(x);
        let loss = if halves { self.loss(&tape, tape.to_bf16(&x)?, labels)? } else { self.loss(&tape, x, labels)? };
        let value = *loss.value();
        tape.backward_overwrite(&loss, &mut self.gradients)?;
        self.optimizer.apply(ticket, step, &mut self.weights, &self.gradients)?;
        Ok(value)
    }
}

fn batch(number: u64) -> (Vec<f32>, Vec<u32>) {
    let x = Random::new(number).normals(ROWS * WIDTH);
    // A class that can be learned: the place of the largest of the first features.
    let class = |row: &[f32]| (0..CLASSES).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32;
    let labels = x.chunks(WIDTH).map(class).collect();
    (x, labels)
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap()
}

/// Returns the losses and weights of eager updates.
fn trained(device: &Device, updates: u64, halves: bool) -> (Vec<f32>, Vec<f32>) {
    let (mut arena, mut model) = (arena(device), Model::new(device));
    let mut losses = Vec::new();
    for number in 0..updates {
        let (x, labels) = batch(number);
        let ticket = model.optimizer.advance().unwrap();
        let loss = arena.step(|step| {
            let (x, labels) = (step.upload(&x, [ROWS, WIDTH])?.save(), step.upload_indices(&labels, [ROWS])?);
            let loss = model.update(ticket, step, x, labels, halves)?;
            step.read_scalar(&loss)
        });
        losses.push(loss.unwrap());
    }
    (losses, model.weights.read_flat().unwrap())
}

fn mean(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value)).sum::<f64>() / values.len() as f64
}

on_each_device! {
    /// Each loss of the first updates is within 2^-7 of that in f32, and the mean of the last
    /// within 5 %.
    fn losses_match_f32(device: &Device) {
        let ((floats, _), (halves, _)) = (trained(device, 150, false), trained(device, 150, true));
        for (at, (float, half)) in floats.iter().zip(&halves).take(5).enumerate() {
            assert!((float - half).abs() < float / 128.0, "update {at}: {half}, in f32 {float}");
        }
        let [float, half] = [&floats, &halves].map(|losses| mean(&losses[120..]));
        assert!(float < 0.8 * f64::from(floats[0]), "the loss must fall: it is {float}");
        assert!((float - half).abs() < 0.05 * float, "{half}, in f32 {float}");
        assert_ne!(bits(&floats), bits(&halves));
    }

    fn captured_and_eager_match(device: &Device) {
        let (eager_losses, eager_weights) = trained(device, 4, true);
        let (x, labels) = batch(0);
        let inputs = HostInputs::new().with(&x, [ROWS, WIDTH]).unwrap().with(&labels, [ROWS]).unwrap();
        let model = Model::new(device);
        let mut captured = arena(device)
            .capture(model, &inputs, |step, model, slots| {
                Ok(slots.output(&model.update(UpdateTicket::each_replay(slots), step, slots.input(0)?, slots.indices(1)?, true)?))
            })
            .unwrap();
        for (number, eager) in (0..4).zip(&eager_losses) {
            let (x, labels) = batch(number);
            let inputs = HostInputs::new().with(&x, [ROWS, WIDTH]).unwrap().with(&labels, [ROWS]).unwrap();
            captured.state_mut().optimizer.advance().unwrap().leave_to_replay();
            let replay = captured.replay(&inputs).unwrap();
            let loss = *replay.outputs();
            assert_eq!(replay.read(loss).unwrap(), [*eager]);
        }
        assert_eq!(bits(&captured.state().weights.read_flat().unwrap()), bits(&eager_weights));
    }
}
