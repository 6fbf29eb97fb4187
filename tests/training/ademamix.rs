//! AdEMAMix: updates match float64 through the warm-up of its slow average, and settings and memory
//! that it does not support are refused.

#![forbid(unsafe_code)]

use crate::support::{Random, on_each_device, relative_l2};
use stepscope::ops;
use stepscope::optim::AdEmaMix;
use stepscope::parameters::{Initializer, MasterType, StateType};
use stepscope::prelude::*;

const LEN: usize = 70;
const RATE: f32 = 0.1;
const DECAY: f32 = 0.2;

fn rule() -> AdEmaMix {
    let adamw = AdamW { learning_rate: RATE, weight_decay: DECAY, ..AdamW::default() };
    AdEmaMix { adamw, beta3: 0.99, alpha: 4.0, warmup: 6 }
}

/// Returns one parameter of ones, and the spec with it.
fn parameter(change: impl FnOnce(ParameterSpec) -> ParameterSpec) -> (Parameter, ParameterSpec) {
    let mut spec = ParameterSpec::builder();
    let w = spec.add("w", [LEN], Initializer::ONE);
    (w, change(spec.build().unwrap()))
}

/// Returns the gradient of an update.
fn gradient(update: u64) -> Vec<f32> {
    Random::new(update).normals(LEN)
}

/// Returns the weights after this many updates in float64, as the paper states them.
fn reference(updates: u64) -> Vec<f64> {
    let AdEmaMix { adamw, beta3: last, alpha, warmup } = rule();
    let [beta1, beta2, last, epsilon] = [adamw.beta1, adamw.beta2, last, adamw.epsilon].map(f64::from);
    let (mut weights, mut moments) = (vec![1.0; LEN], vec![[0.0; 3]; LEN]);
    for update in 1..=updates {
        let done = (update as f64 / warmup as f64).min(1.0);
        let alpha = f64::from(alpha * done as f32);
        let beta3 = (beta1.ln() * last.ln() / ((1.0 - done) * last.ln() + done * beta1.ln())).exp();
        // Settings are f32.
        let beta3 = f64::from(beta3 as f32);
        let [correction1, correction2] = [beta1, beta2].map(|beta| 1.0 - beta.powi(update as i32));
        for ((weight, [first, slow, second]), g) in weights.iter_mut().zip(&mut moments).zip(gradient(update)) {
            let g = f64::from(g);
            *first = beta1 * *first + (1.0 - beta1) * g;
            *slow = beta3 * *slow + (1.0 - beta3) * g;
            *second = beta2 * *second + (1.0 - beta2) * g * g;
            let direction = (*first / correction1 + alpha * *slow) / ((*second / correction2).sqrt() + epsilon);
            *weight -= f64::from(RATE) * (direction + f64::from(DECAY) * *weight);
        }
    }
    weights
}

on_each_device! {
    /// Updates during the warm-up and after it.
    fn updates_match_float64(device: &Device) {
        let (w, spec) = parameter(|spec| spec);
        let mut weights = Parameters::new(device, &spec, 7).unwrap();
        let mut gradients = Gradients::zeros(&weights).unwrap();
        let mut optimizer = Optimizer::new(&weights, rule()).unwrap();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        for update in 1..=10 {
            let ticket = optimizer.advance().unwrap();
            let step = arena.step(|step| {
                let values = step.upload(&gradient(update), [LEN])?;
                ops::copy_into(step, &values, &mut gradients.lend_mut(step, w)?)?;
                optimizer.apply(ticket, step, &mut weights, &gradients)
            });
            step.unwrap();
            let error = relative_l2(&weights.read(w).unwrap(), &reference(update));
            assert!(error < 2e-6, "update {update}: {error}");
        }
    }
}

#[test]
fn invalid_ademamix_settings_are_refused() {
    let device = crate::support::open(DeviceKind::Emulated);
    let weights = Parameters::new(&device, &parameter(|spec| spec).1, 7).unwrap();
    let beta1 = |beta1| AdamW { beta1, ..rule().adamw };
    for (config, words) in [
        (AdEmaMix { beta3: 1.0, ..rule() }, "ademamix: expected `beta3` in [0, 1), got 1"),
        (AdEmaMix { beta3: f32::NAN, ..rule() }, "`beta3` in [0, 1)"),
        (AdEmaMix { beta3: 0.5, ..rule() }, "`beta3` at least `beta1`, which is above 0, with `warmup`, got 0.5"),
        (AdEmaMix { adamw: beta1(0.0), ..rule() }, "`beta3` at least `beta1`, which is above 0"),
        (AdEmaMix { alpha: -1.0, ..rule() }, "`alpha` finite and at least 0, got -1"),
        (AdEmaMix { adamw: beta1(2.0), ..rule() }, "adamw: expected `beta1` in [0, 1), got 2"),
    ] {
        let error = Optimizer::new(&weights, config).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
    Optimizer::new(&weights, AdEmaMix { beta3: 0.5, warmup: 0, ..rule() }).unwrap();
}

#[test]
fn small_memory_names_ademamix() {
    let device = crate::support::open(DeviceKind::Emulated);
    let refused = |change: fn(ParameterSpec) -> ParameterSpec| {
        let mut weights = Parameters::new(&device, &parameter(change).1, 7).unwrap();
        let gradients = Gradients::zeros(&weights).unwrap();
        let mut optimizer = Optimizer::new(&weights, rule()).unwrap();
        let ticket = optimizer.advance().unwrap();
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
        arena.step(|step| optimizer.apply(ticket, step, &mut weights, &gradients)).unwrap_err().to_string()
    };
    for error in
        [refused(|spec| spec.with_masters(MasterType::Split)), refused(|spec| spec.with_state(StateType::Bits8))]
    {
        assert!(error.contains("ademamix: expected weights and state in f32"), "{error}");
    }
}
