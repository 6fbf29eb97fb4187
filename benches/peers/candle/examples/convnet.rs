//! examples/convnet.rs in candle: a convolutional net that classifies handwritten digits.

#[path = "../../digits.rs"]
mod digits;
#[path = "../../schedule.rs"]
mod schedule;

use std::process::ExitCode;
use std::time::Instant;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{
    AdamW, Conv2d, Conv2dConfig, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, conv2d, linear, loss,
};
use digits::{CLASSES, Images};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde_json::json;

/// Rows and columns of an image.
const SIDE: usize = 8;
/// Channels after each convolution.
const CHANNELS: [usize; 2] = [16, 32];
const BATCH: usize = 32;
const EPOCHS: usize = 8;
const RATE: f64 = 3e-3;
const WANTED: f64 = 0.95;

struct ConvNet {
    first: Conv2d,
    second: Conv2d,
    head: Linear,
}

impl ConvNet {
    fn new(vb: VarBuilder) -> Result<Self> {
        let [first, second] = CHANNELS;
        let config = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
        Ok(Self {
            first: conv2d(1, first, 3, config, vb.pp("first"))?,
            second: conv2d(first, second, 3, config, vb.pp("second"))?,
            head: linear(second * (SIDE / 4) * (SIDE / 4), CLASSES, vb.pp("head"))?,
        })
    }
}

impl Module for ConvNet {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.first.forward(x)?.relu()?.max_pool2d(2)?;
        let x = self.second.forward(&x)?.relu()?.max_pool2d(2)?;
        self.head.forward(&x.flatten_from(1)?)
    }
}

fn main() -> Result<ExitCode> {
    let device = Device::Cpu;
    let mut random = StdRng::seed_from_u64(7);
    let [training, validation] = Images::load(&mut random);
    let upload = |Images { pixels, digits }: Images| {
        let count = digits.len();
        Ok::<_, candle_core::Error>((
            Tensor::from_vec(pixels, (count, 1, SIDE, SIDE), &device)?,
            Tensor::from_vec(digits, count, &device)?,
        ))
    };
    let (pixels, labels) = upload(training)?;
    let (test_pixels, test_labels) = upload(validation)?;

    let variables = VarMap::new();
    let model = ConvNet::new(VarBuilder::from_varmap(&variables, DType::F32, &device))?;
    let mut optimizer = AdamW::new(variables.all_vars(), ParamsAdamW { lr: RATE, ..ParamsAdamW::default() })?;
    let mut order: Vec<u32> = (0..labels.dim(0)? as u32).collect();
    let (total, mut update, mut accuracy) = (EPOCHS * order.len().div_ceil(BATCH), 0, 0.0);
    let started = Instant::now();
    for epoch in 0..EPOCHS {
        order.shuffle(&mut random);
        let mut losses = 0.0;
        for numbers in order.chunks(BATCH) {
            let ids = Tensor::new(numbers, &device)?;
            let logits = model.forward(&pixels.index_select(&ids, 0)?)?;
            let loss = loss::cross_entropy(&logits, &labels.index_select(&ids, 0)?)?;
            update += 1;
            optimizer.set_learning_rate(RATE * schedule::cosine(update, [total / 20, total], 0.05));
            optimizer.backward_step(&loss)?;
            losses += loss.to_scalar::<f32>()? * numbers.len() as f32;
        }
        let right = model.forward(&test_pixels)?.argmax(D::Minus1)?.eq(&test_labels)?;
        accuracy = f64::from(right.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?);
        println!("epoch {epoch}: loss {:.4}, accuracy {:.1} %", losses / order.len() as f32, 100.0 * accuracy);
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", json!({ "example": "convnet", "framework": "candle", "seconds": seconds, "result": accuracy }));
    Ok(ExitCode::from(u8::from(accuracy < WANTED)))
}
