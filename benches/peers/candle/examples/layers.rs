//! The cases of layers.py in candle: a training step of an LSTM, a convolutional net, a denoiser,
//! cross-attention and a mixture of experts, eager, as candle has no graphs.
//!
//! Prints the same lines, of fewer steps. `step_bytes` is 0, because candle does not count its
//! memory.

use std::error::Error;
use std::time::Instant;

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::rnn::{LSTMConfig, RNN, lstm};
use candle_nn::{
    AdamW, Conv2dConfig, Init, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap, conv2d, layer_norm, linear,
    linear_no_bias, ops,
};
use clap::Parser;
use serde_json::json;

const SAMPLES: usize = 20;
/// Steps of a sample.
const ROW: u32 = 3;
const EXPERTS: usize = 8;
const CHOSEN: usize = 2;
const HEADS: usize = 4;

/// Times a training step of layers, one JSON value per line
#[derive(Parser)]
struct Args {
    #[arg(long, default_value = "cpu")]
    device: String,
    #[arg(long, default_value = "f32")]
    precision: String,
    #[arg(long)]
    case: String,
    /// The shapes of the inputs, such as 32,48,64
    shapes: Vec<String>,
}

/// A net from the inputs to its output.
type Net = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

fn recurrent(width: usize, vb: &VarBuilder) -> Result<Net> {
    let lstm = lstm(width, width, LSTMConfig::default(), vb.pp("lstm"))?;
    Ok(Box::new(move |inputs| {
        let outputs: Vec<Tensor> = lstm.seq(&inputs[0])?.into_iter().map(|state| state.h).collect();
        Tensor::stack(&outputs, 1)
    }))
}

fn convolutional(channels: usize, vb: &VarBuilder) -> Result<Net> {
    let config = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
    let layers = [
        conv2d(channels, 2 * channels, 3, config, vb.pp("first"))?,
        conv2d(2 * channels, 2 * channels, 3, config, vb.pp("second"))?,
    ];
    Ok(Box::new(move |inputs| {
        layers.iter().try_fold(inputs[0].clone(), |x, layer| layer.forward(&x)?.relu()?.max_pool2d(2))
    }))
}

fn denoiser(width: usize, vb: &VarBuilder) -> Result<Net> {
    let block = |number: usize| {
        let vb = vb.pp(number);
        Ok((layer_norm(width, 1e-5, vb.pp("norm"))?, linear(width, width, vb.pp("linear"))?))
    };
    let blocks: Vec<_> = (0..3).map(block).collect::<Result<_>>()?;
    Ok(Box::new(move |inputs| {
        blocks.iter().try_fold(inputs[0].clone(), |x, (norm, linear)| {
            // `LayerNorm::forward` has no backward pass.
            let normed = ops::layer_norm_slow(&x, norm.weight(), norm.bias().expect("made with a bias"), 1e-5)?;
            linear.forward(&normed.silu()?)? + x
        })
    }))
}

fn cross_attention([width, other]: [usize; 2], vb: &VarBuilder) -> Result<Net> {
    let layer = |name: &str, inputs: usize| linear(inputs, width, vb.pp(name));
    let [q, k, v, output] = [layer("q", width)?, layer("k", other)?, layer("v", other)?, layer("output", width)?];
    let heads = move |linear: &Linear, x: &Tensor| {
        let (batch, tokens, _) = x.dims3()?;
        linear.forward(x)?.reshape((batch, tokens, HEADS, width / HEADS))?.transpose(1, 2)?.contiguous()
    };
    Ok(Box::new(move |inputs| {
        let (q, k, v) = (heads(&q, &inputs[0])?, heads(&k, &inputs[1])?, heads(&v, &inputs[1])?);
        let scores = (q.matmul(&k.t()?)? * ((width / HEADS) as f64).powf(-0.5))?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        output.forward(&mixed.transpose(1, 2)?.reshape(inputs[0].shape())?)
    }))
}

/// Each expert computes all tokens, as in layers.py.
fn mixture(width: usize, vb: &VarBuilder) -> Result<Net> {
    let router = linear_no_bias(width, EXPERTS, vb.pp("router"))?;
    let experts = |name, inputs, outputs| {
        let init = Init::Randn { mean: 0.0, stdev: (inputs as f64).powf(-0.5) };
        vb.get_with_hints((EXPERTS, inputs, outputs), name, init)
    };
    let (up, down) = (experts("up", width, 2 * width)?, experts("down", 2 * width, width)?);
    Ok(Box::new(move |inputs| {
        let rows = inputs[0].flatten_to(1)?;
        let probabilities = ops::softmax(&router.forward(&rows)?, D::Minus1)?;
        let ids = probabilities.detach().arg_sort_last_dim(false)?.narrow(1, 0, CHOSEN)?.contiguous()?;
        let best = probabilities.gather(&ids, 1)?;
        let best = best.broadcast_div(&best.sum_keepdim(1)?)?;
        let gates = probabilities.zeros_like()?.scatter_add(&ids, &best, 1)?;
        let all = rows.unsqueeze(0)?.repeat((EXPERTS, 1, 1))?;
        let outputs = all.matmul(&up)?.silu()?.matmul(&down)?;
        outputs.broadcast_mul(&gates.t()?.unsqueeze(2)?)?.sum(0)?.reshape(inputs[0].shape())
    }))
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let Args { device, precision, case, shapes } = Args::parse();
    candle_core::cuda::set_gemm_reduced_precision_f32(precision == "tf32");
    let device = if device == "cuda" { Device::new_cuda(0)? } else { Device::Cpu };
    println!("{}", json!({ "peer": "candle", "device": format!("{:?}", device.location()) }));
    let extents = |shape: &String| shape.split(',').map(str::parse).collect::<std::result::Result<Vec<usize>, _>>();
    let shapes: Vec<Vec<usize>> = shapes.iter().map(extents).collect::<std::result::Result<_, _>>()?;
    let input = |shape: &Vec<usize>| Tensor::rand(0f32, 1f32, shape.clone(), &device);
    let inputs: Vec<Tensor> = shapes.iter().map(input).collect::<Result<_>>()?;

    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
    let last = shapes[0][shapes[0].len() - 1];
    let net = match case.split(',').next() {
        Some("lstm") => recurrent(last, &vb)?,
        Some("convnet") => convolutional(shapes[0][1], &vb)?,
        Some("denoiser") => denoiser(last, &vb)?,
        Some("cross-attention") => cross_attention([last, shapes[1][2]], &vb)?,
        Some("mixture") => mixture(last, &vb)?,
        _ => return Err(format!("no case `{case}`").into()),
    };
    let mut optimizer = AdamW::new(variables.all_vars(), ParamsAdamW { lr: 1e-5, ..ParamsAdamW::default() })?;
    let mut nanoseconds = Vec::new();
    for _ in 0..2 + SAMPLES {
        let started = Instant::now();
        for _ in 0..ROW {
            optimizer.backward_step(&net(&inputs)?.sqr()?.mean_all()?)?;
        }
        device.synchronize()?;
        nanoseconds.push((started.elapsed() / ROW).as_nanos() as f64);
    }
    let line = json!({ "case": case, "contender": "candle", "nanoseconds": nanoseconds[2..], "step_bytes": 0 });
    println!("{line}");
    Ok(())
}
