//! examples/diffusion.rs in candle: a denoising diffusion model that draws handwritten digits.

#[path = "../../digits.rs"]
mod digits;
#[path = "../../schedule.rs"]
mod schedule;

use std::f64::consts::PI;
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{
    AdamW, Embedding, LayerNorm, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, embedding, layer_norm,
    linear, loss, ops,
};
use digits::{CLASSES, Images, PIXELS};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

/// Steps from noise to an image.
const STEPS: u32 = 60;
const WIDTH: usize = 256;
const BATCH: usize = 64;
const UPDATES: usize = 3000;
const WARM_UP: usize = 100;
const RATE: f64 = 1e-3;

/// Layers whose outputs are added to their inputs.
struct Denoiser {
    input: Linear,
    step: Embedding,
    layers: Vec<(LayerNorm, Linear)>,
    output: Linear,
}

impl Denoiser {
    fn new(vb: VarBuilder) -> Result<Self> {
        let layer = |name| {
            let vb = vb.pp(name);
            Ok((layer_norm(WIDTH, 1e-5, vb.pp("norm"))?, linear(WIDTH, WIDTH, vb)?))
        };
        Ok(Self {
            input: linear(PIXELS, WIDTH, vb.pp("input"))?,
            step: embedding(STEPS as usize, WIDTH, vb.pp("step"))?,
            layers: ["first", "second", "third"].into_iter().map(layer).collect::<Result<_>>()?,
            output: linear(WIDTH, PIXELS, vb.pp("output"))?,
        })
    }

    fn forward(&self, images: &Tensor, steps: &Tensor) -> Result<Tensor> {
        let mut x = self.input.forward(images)?;
        let step = self.step.forward(steps)?;
        for (norm, layer) in &self.layers {
            x = (layer.forward(&(normed(norm, &x)? + &step)?.silu()?)? + x)?;
        }
        self.output.forward(&x)
    }
}

/// Applies the norm in its differentiable form. `LayerNorm::forward` has no backward pass.
fn normed(norm: &LayerNorm, x: &Tensor) -> Result<Tensor> {
    ops::layer_norm_slow(x, norm.weight(), norm.bias().expect("it was made with a bias"), norm.eps() as f32)
}

fn main() -> Result<ExitCode> {
    let device = Device::Cpu;
    let mut random = StdRng::seed_from_u64(7);
    let center = |images: Images| Tensor::from_vec(images.pixels, ((), PIXELS), &device)?.affine(2.0, -1.0);
    let [training, others] = Images::load(&mut random).map(center);
    let (training, others) = (training?, others?);
    let variables = VarMap::new();
    let model = Denoiser::new(VarBuilder::from_varmap(&variables, DType::F32, &device))?;
    let mut optimizer = AdamW::new(variables.all_vars(), ParamsAdamW { lr: RATE, ..ParamsAdamW::default() })?;

    let count = training.dim(0)? as u32;
    let mut losses = 0.0;
    let started = Instant::now();
    for update in 1..=UPDATES {
        let mut below = |most: u32| (0..BATCH).map(|_| random.random_range(0..most)).collect::<Vec<_>>();
        let clean = training.index_select(&Tensor::new(below(count), &device)?, 0)?;
        let steps = Tensor::new(below(STEPS), &device)?;
        let [signal, spread] = shares(&steps.to_dtype(DType::F32)?.unsqueeze(1)?)?;
        let noise = Tensor::randn(0f32, 1.0, (BATCH, PIXELS), &device)?;
        let noisy = (clean.broadcast_mul(&signal)? + noise.broadcast_mul(&spread)?)?;
        let loss = loss::mse(&model.forward(&noisy, &steps)?, &clean)?;
        optimizer.set_learning_rate(RATE * schedule::cosine(update, [WARM_UP, UPDATES], 0.01));
        optimizer.backward_step(&loss)?;
        losses += loss.to_scalar::<f32>()?;
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("mean squared error of the images: {:.3}", losses / UPDATES as f32);

    let mut images = Tensor::randn(0f32, 1.0, (CLASSES, PIXELS), &device)?;
    for step in (0..STEPS).rev() {
        let clean = model.forward(&images, &Tensor::full(step, CLASSES, &device)?)?;
        let [signal, spread] = shares(&Tensor::new(step as f32, &device)?)?;
        let [next_signal, next_spread] = shares(&Tensor::new(step as f32 - 1.0, &device)?)?;
        let noise = (images - clean.broadcast_mul(&signal)?)?.broadcast_div(&spread)?;
        images = (clean.broadcast_mul(&next_signal)? + noise.broadcast_mul(&next_spread)?)?;
    }
    let shade =
        |x: &f32| [[' '; 2], ['░'; 2], ['▒'; 2], ['▓'; 2], ['█'; 2]][((x + 1.0) * 2.5).clamp(0.0, 4.0) as usize];
    for row in images.reshape((CLASSES, 8, 8))?.transpose(0, 1)?.to_vec3::<f32>()? {
        let lines = row.iter().map(|image| image.iter().flat_map(shade).collect::<String>());
        println!("{}", lines.collect::<Vec<_>>().join(" "));
    }
    let (drawn, real) = (distance(&images, &training)?, distance(&others, &training)?);
    println!("mean squared distance to the nearest image: {drawn:.3}, of other real images {real:.3}");
    let result = [drawn, real];
    println!("{}", json!({ "example": "diffusion", "framework": "candle", "seconds": seconds, "result": result }));
    Ok(ExitCode::from(u8::from(drawn > 1.5 * real)))
}

/// Returns the factors of image and noise in steps: 1 and 0 in the step before the first.
fn shares(steps: &Tensor) -> Result<[Tensor; 2]> {
    let unit = 0.98 * PI / 2.0 / f64::from(STEPS);
    let angle = steps.affine(unit, unit)?;
    Ok([angle.cos()?, angle.sin()?])
}

/// Returns the mean over images of the squared distance to the nearest of others.
fn distance(images: &Tensor, others: &Tensor) -> Result<f32> {
    let nearest = |image| others.broadcast_sub(&images.get(image)?)?.sqr()?.mean(1)?.min(0);
    let nearest = (0..images.dim(0)?).map(nearest).collect::<Result<Vec<_>>>()?;
    Tensor::stack(&nearest, 0)?.mean_all()?.to_scalar()
}
