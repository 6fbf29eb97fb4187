//! Muon in a group: each rank updates whole parameters, and any number of ranks gives the same
//! bits, captured, eager and resumed with another number of ranks.

#![forbid(unsafe_code)]

use crate::support::Random;
use crate::support::rank_threads::{DEADLINE, on_ranks};
use std::path::Path;
use stepscope::nn::{Linear, Mlp};
use stepscope::optim::{Muon, ParameterGroups, UpdateRule};
use stepscope::prelude::*;

const INPUTS: usize = 64;
const CLASSES: usize = 64;
const SHARDS: usize = 4;

type Points = crate::support::points::Points<INPUTS>;

/// 70,336 weights. The slices of sums of 2 and 4 ranks have boundaries inside matrices.
struct Classifier {
    blocks: [Mlp; 2],
    head: Linear,
}

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let mut x = tape.input(batch.input::<f32>(0)?);
        for block in &self.blocks {
            x = block.forward(tape, &x)?;
        }
        self.head.forward(tape, &x)
    }
}

fn muon() -> Muon {
    let adamw = AdamW { learning_rate: 0.01, clip: Some(0.5), ..AdamW::default() };
    Muon { adamw, except: vec!["head.".into()], ..Muon::default() }
}

fn state<R: UpdateRule>(device: &Device, rule: R, copy: bool) -> Result<TrainState<Classifier, R>> {
    let mut spec = ParameterSpec::builder();
    let blocks = ["a", "b"].map(|name| Mlp::new(spec.at(name), INPUTS, 256, INPUTS));
    let model = Classifier { blocks, head: Linear::new(spec.at("head"), INPUTS, CLASSES) };
    let head = model.head.weight;
    let groups = ParameterGroups::new().no_decay(ParameterGroups::is_gain_bias_or_embedding);
    let state = TrainState::new(device, model, &spec.build()?, 7, rule)?.with_parameter_groups(&groups)?;
    let state = state.with_monitored(head);
    if copy { state.with_bf16_copy() } else { Ok(state) }
}

fn batches() -> Vec<Vec<Points>> {
    let mut random = Random::new(5);
    let mut part = || Points { x: random.normals(3 * INPUTS), labels: random.belows(3, CLASSES as u32) };
    (0..4).map(|_| (0..SHARDS).map(|_| part()).collect()).collect()
}

/// Trains on these batches, from the checkpoint if there is one. Returns the digest of the weights
/// and the norm of each update, which must be the same on all ranks.
fn train(ranks: usize, captured: bool, batches: &[Vec<Points>], path: Option<&Path>) -> (String, Vec<Option<f64>>) {
    let outcomes = on_ranks((DeviceKind::Emulated, ranks), DEADLINE, |device, group| {
        let state = state(device, muon(), captured)?.in_group(&group, SHARDS)?;
        let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build()?;
        let mut trainer = match captured {
            true => Trainer::captured(&mut arena, state, &batches[0][0])?,
            false => Trainer::eager(&mut arena, state),
        };
        let mut progress = EpochProgress::default();
        if let Some(path) = path {
            trainer = trainer.checkpoint(path, Some(1));
            if path.exists() {
                progress = trainer.restore(&Checkpoint::load(path)?)?;
            }
        }
        let mut recorder = crate::support::rank_threads::Recorder::default();
        let left = batches.iter().skip(progress.updates as usize).cloned().map(Ok);
        trainer.fit_with(left, &mut progress, &mut recorder)?;
        let norms = recorder.0.iter().map(|update| update.gradient_l2).collect();
        Ok((trainer.state().parameters.sha256()?, norms))
    });
    let mut outcomes = outcomes.into_iter().map(|outcome| outcome.unwrap());
    let first = outcomes.next().unwrap();
    assert!(outcomes.all(|other| other == first), "the ranks have different results");
    first
}

#[test]
fn muon_keeps_bits_in_groups() {
    let batches = batches();
    for captured in [false, true] {
        let one = train(1, captured, &batches, None);
        for ranks in [2, 4] {
            assert_eq!(train(ranks, captured, &batches, None), one, "{ranks} ranks, captured: {captured}");
        }
    }
}

#[test]
fn muon_resumes_with_other_ranks() {
    let (batches, folder) = (batches(), tempfile::tempdir().unwrap());
    let path = folder.path().join("checkpoint.safetensors");
    let (whole, _) = train(1, true, &batches, None);
    for (made, ranks) in [2, 1, 4, 2].into_iter().enumerate() {
        let (sha, norms) = train(ranks, true, &batches[..=made], Some(&path));
        assert_eq!((norms.len(), sha == whole), (1, made == 3), "{ranks} ranks");
    }
}

/// Checks that gradients from `accumulate`, which all ranks have, give the same update.
#[test]
fn accumulated_gradients_keep_muons_bits() {
    let batches = batches();
    let (whole, _) = train(1, false, &batches[..1], None);
    let outcomes = on_ranks((DeviceKind::Emulated, 2), DEADLINE, |device, group| {
        let state = state(device, muon(), false)?.in_group(&group, SHARDS)?;
        let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build()?;
        let mut trainer = Trainer::eager(&mut arena, state);
        trainer.accumulate(&batches[0])?;
        trainer.apply()?;
        trainer.state().parameters.sha256()
    });
    outcomes.into_iter().for_each(|sha| assert_eq!(sha.unwrap(), whole));
}

/// Checks that ranks with other settings of Muon are refused by name.
#[test]
fn muons_settings_are_compared() {
    let outcomes = on_ranks((DeviceKind::Emulated, 2), DEADLINE, |device, group| {
        let except = vec![["head.", "b."][group.rank()].to_owned()];
        state(device, Muon { except, ..muon() }, false)?.in_group(&group, SHARDS).map(drop)
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("optimizer.except") && error.contains("[\"b.\"]"), "{error}");
    }
}
