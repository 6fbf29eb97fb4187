//! CrossAsset learns as well in BF16 as in f32, update by update. Its activations, their gradients
//! and the matrices of its products are in BF16.
//!
//! On a GPU the model is CrossAsset, and the test makes 2,000 updates. On the emulator the model
//! has CrossAsset's layers with a head of 64 columns. It makes a few updates, unless
//! `STEPSCOPE_UPDATES` gives their number: see `docs/numbers.md`.

use crate::dataset::{Asset, Dataset, Plan};
use crate::model::{Model, Sizes};
use crate::samples::MicroBatch;
use crate::support::on_each_device;
use crate::synthetic;
use stepscope::ops::Activation;
use stepscope::optim::Schedule;
use stepscope::tensor::Element;
use stepscope::{AdamW, Arena, Capacity, Device, DeviceKind, TrainState, Trainer, bf16};

const SEED: u64 = 7;
const BATCH: usize = 16;
const SMALL: Sizes = Sizes { width: 64, hidden: 256, layers: 2 };
const LEARNING_RATE: f32 = 1e-4;
/// The number of updates whose mean loss is compared.
const BLOCK: usize = 100;
/// The number of updates on the emulator.
const FEW: usize = 16;

/// Returns the losses of all updates, epoch after epoch.
fn losses<S: Activation>(device: &Device, dataset: &Dataset, updates: usize) -> Vec<f64> {
    let fold = &dataset.folds()[0];
    let order: Vec<usize> = (0..).flat_map(|epoch| fold.epoch_order(SEED, epoch)).take(updates * BATCH).collect();
    let schedule = Schedule::cosine(16.min(updates as u64 / 10), updates as u64, 0.1);
    let config = AdamW { learning_rate: LEARNING_RATE, clip: Some(1.0), schedule, ..AdamW::default() };
    let is_gpu = device.description().kind == DeviceKind::Cuda;
    let (model, spec) = Model::<S>::sized(if is_gpu { Sizes::CROSSASSET } else { SMALL }).unwrap();
    let state = TrainState::new(device, model, &spec, SEED, config).unwrap().with_bf16_copy().unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(64)).build().unwrap();
    let mut trainer = Trainer::captured(&mut arena, state, &MicroBatch::zeros(device, BATCH).unwrap()).unwrap();
    let mut losses = Vec::new();
    for samples in order.chunks_exact(BATCH) {
        losses.push(trainer.update(&[MicroBatch::of(device, dataset, fold, samples).unwrap()]).unwrap().loss);
        if losses.len().is_multiple_of(BLOCK) {
            println!(
                "{} updates in {}: {:.6}",
                losses.len(),
                <S as Element>::NAME,
                mean(&losses[losses.len() - BLOCK..])
            );
        }
    }
    losses
}

fn mean(losses: &[f64]) -> f64 {
    losses.iter().sum::<f64>() / losses.len() as f64
}

fn updates(device: &Device) -> usize {
    match std::env::var("STEPSCOPE_UPDATES") {
        Ok(updates) => updates.parse().expect("STEPSCOPE_UPDATES is a number"),
        Err(_) if device.description().kind == DeviceKind::Cuda => 2000,
        Err(_) => FEW,
    }
}

on_each_device! {
    /// The mean loss of every 100 updates agrees within 1 %. In shorter runs, each loss does.
    fn bf16_losses_match_f32(device: &Device) {
        let asset = Asset { name: "synthetic market".into(), bars: synthetic::market(SEED) };
        let dataset = Dataset::new(&[asset], Plan { horizon: 15, folds: 1, limit: None }).unwrap();
        let updates = updates(device);
        let (floats, halves) = (losses::<f32>(device, &dataset, updates), losses::<bf16>(device, &dataset, updates));
        assert_ne!(floats, halves, "BF16 storage must change the losses");
        let block = if updates < BLOCK { 1 } else { BLOCK };
        let mut worst: f64 = 0.0;
        for (at, (floats, halves)) in floats.chunks(block).zip(halves.chunks(block)).enumerate() {
            let (float, half) = (mean(floats), mean(halves));
            let difference = (half - float).abs() / float;
            worst = worst.max(difference);
            assert!(difference < 0.01, "from update {}: loss {half} in BF16, {float} in f32", at * block);
        }
        println!("{updates} updates: the largest difference of a mean of {block} is {:.3} %", 100.0 * worst);
        let [first, last] = [&floats[..block], &floats[updates - block..]].map(mean);
        assert!(updates < 2 * BLOCK || last < first, "the loss must fall: it is {last} after {first}");
    }
}
