//! examples/mixture.rs in candle: a small GPT whose feed-forward layers are mixtures of experts.

use std::error::Error;
use std::iter;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_nn::sampling::gumbel_softmax;
use candle_nn::{
    AdamW, Embedding, Init, LayerNorm, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, layer_norm, linear,
    linear_no_bias, loss, ops,
};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde_json::json;

const CONTEXT: usize = 64;
const WIDTH: usize = 64;
const HEADS: usize = 4;
const LAYERS: usize = 2;
const EXPERTS: usize = 4;
/// Experts that a token uses.
const CHOSEN: usize = 2;
const BATCH: usize = 8;
const UPDATES: usize = 400;

/// Learns a text
#[derive(Parser)]
struct Args {
    /// The text
    text: PathBuf,
}

struct Attention {
    qkv: Linear,
    output: Linear,
}

impl Attention {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self { qkv: linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?, output: linear(WIDTH, WIDTH, vb.pp("output"))? })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (samples, tokens, _) = x.dims3()?;
        let qkv = self.qkv.forward(x)?.reshape((samples, tokens, 3, HEADS, WIDTH / HEADS))?;
        let heads = |part: usize| qkv.i((.., .., part))?.transpose(1, 2)?.contiguous();
        let (q, k, v) = (heads(0)?, heads(1)?, heads(2)?);
        let scores = (q.matmul(&k.t()?)? * ((WIDTH / HEADS) as f64).powf(-0.5))?.broadcast_add(mask)?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        self.output.forward(&mixed.transpose(1, 2)?.reshape((samples, tokens, WIDTH))?)
    }
}

struct Mixture {
    router: Linear,
    experts: Vec<[Linear; 2]>,
}

impl Mixture {
    fn new(vb: VarBuilder) -> Result<Self> {
        let expert = |number| {
            let vb = vb.pp(number);
            Ok([linear_no_bias(WIDTH, 2 * WIDTH, vb.pp("up"))?, linear_no_bias(2 * WIDTH, WIDTH, vb.pp("down"))?])
        };
        let router = linear_no_bias(WIDTH, EXPERTS, vb.pp("router"))?;
        Ok(Self { router, experts: (0..EXPERTS).map(expert).collect::<Result<_>>()? })
    }

    /// Computes the result, and a loss that is 1 if the tokens are spread evenly.
    fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let rows = x.flatten_to(1)?;
        let tokens = rows.dim(0)?;
        let probabilities = ops::softmax(&self.router.forward(&rows)?, D::Minus1)?;
        let ids = probabilities.arg_sort_last_dim(false)?.narrow(1, 0, CHOSEN)?.contiguous()?;
        let gates = probabilities.gather(&ids, 1)?;
        let gates = gates.broadcast_div(&gates.sum_keepdim(1)?)?.flatten_all()?;

        // The choices of each expert: a number for each pair of a token and one of its experts.
        let mut choices = vec![Vec::new(); EXPERTS];
        for (number, expert) in (0u32..).zip(ids.flatten_all()?.to_vec1::<u32>()?) {
            choices[expert as usize].push(number);
        }
        let shares: Vec<f32> = choices.iter().map(|numbers| numbers.len() as f32 / (tokens * CHOSEN) as f32).collect();
        let share = Tensor::new(shares, x.device())?;
        let loss = ((share * probabilities.mean(0)?)?.sum_all()? * EXPERTS as f64)?;

        let mut y = rows.zeros_like()?;
        for ([up, down], numbers) in self.experts.iter().zip(choices) {
            if numbers.is_empty() {
                continue;
            }
            let token = Tensor::from_iter(numbers.iter().map(|number| number / CHOSEN as u32), x.device())?;
            let gates = gates.index_select(&Tensor::new(numbers, x.device())?, 0)?.unsqueeze(1)?;
            let output = down.forward(&up.forward(&rows.index_select(&token, 0)?)?.silu()?)?;
            y = y.index_add(&token, &output.broadcast_mul(&gates)?, 0)?;
        }
        Ok((y.reshape(x.shape())?, loss))
    }
}

struct Block {
    norms: [LayerNorm; 2],
    attention: Attention,
    mixture: Mixture,
}

struct Gpt {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    /// The causal mask, added to scores: minus infinity for later tokens.
    mask: Tensor,
}

impl Gpt {
    fn new(vb: VarBuilder) -> Result<Self> {
        let table =
            |name, rows| vb.pp(name).get_with_hints((rows, WIDTH), "weight", Init::Randn { mean: 0.0, stdev: 0.02 });
        let norm = |vb: VarBuilder| layer_norm(WIDTH, 1e-5, vb);
        let block = |number| {
            let vb = vb.pp(format!("blocks.{number}"));
            Ok(Block {
                norms: [norm(vb.pp("norm1"))?, norm(vb.pp("norm2"))?],
                attention: Attention::new(vb.pp("attention"))?,
                mixture: Mixture::new(vb.pp("mixture"))?,
            })
        };
        let later = |row| (0..CONTEXT).map(move |column| if column > row { f32::NEG_INFINITY } else { 0.0 });
        let mask: Vec<f32> = (0..CONTEXT).flat_map(later).collect();
        Ok(Self {
            tokens: Embedding::new(table("tokens", 256)?, WIDTH),
            positions: table("positions", CONTEXT)?,
            blocks: (0..LAYERS).map(block).collect::<Result<_>>()?,
            norm: norm(vb.pp("norm"))?,
            head: linear(WIDTH, 256, vb.pp("head"))?,
            mask: Tensor::from_vec(mask, (CONTEXT, CONTEXT), vb.device())?,
        })
    }

    /// Computes the logits of the next bytes, and the sum of the mixtures' losses.
    fn forward(&self, ids: &Tensor) -> Result<(Tensor, Tensor)> {
        let mut x = self.tokens.forward(ids)?.broadcast_add(&self.positions)?;
        let mut losses = Vec::new();
        for Block { norms: [first, second], attention, mixture } in &self.blocks {
            x = (attention.forward(&normed(first, &x)?, &self.mask)? + x)?;
            let (y, loss) = mixture.forward(&normed(second, &x)?)?;
            x = (y + x)?;
            losses.push(loss);
        }
        let logits = self.head.forward(&normed(&self.norm, &x)?)?;
        Ok((logits, Tensor::stack(&losses, 0)?.sum_all()?))
    }
}

/// Applies the norm in its differentiable form. `LayerNorm::forward` has no backward pass.
fn normed(norm: &LayerNorm, x: &Tensor) -> Result<Tensor> {
    ops::layer_norm_slow(x, norm.weight(), norm.bias().expect("it was made with a bias"), norm.eps() as f32)
}

/// Computes the logits and the losses of windows of a byte more than the context.
fn evaluate(model: &Gpt, windows: &Tensor) -> Result<(Tensor, Tensor)> {
    let (logits, balance) = model.forward(&windows.narrow(1, 0, CONTEXT)?.contiguous()?)?;
    let next = windows.narrow(1, 1, CONTEXT)?.flatten_all()?;
    Ok((loss::cross_entropy(&logits.flatten_to(1)?, &next)?, balance))
}

fn main() -> std::result::Result<ExitCode, Box<dyn Error>> {
    let device = Device::Cpu;
    let text: Vec<u32> = std::fs::read(Args::parse().text)?.into_iter().map(u32::from).collect();
    let (training, held_out) = text.split_at(text.len() / 10 * 9);
    let windows = |text: &[u32]| {
        let starts = (0..text.len() - CONTEXT).step_by(CONTEXT);
        Tensor::new(starts.map(|start| &text[start..=start + CONTEXT]).collect::<Vec<_>>(), &device)
    };
    let (training, test) = (windows(training)?, windows(held_out)?);
    let variables = VarMap::new();
    let model = Gpt::new(VarBuilder::from_varmap(&variables, DType::F32, &device))?;
    let settings = ParamsAdamW { lr: 3e-3, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(variables.all_vars(), settings)?;

    let mut random = StdRng::seed_from_u64(7);
    let mut order: Vec<u32> = (0..training.dim(0)? as u32).collect();
    let mut numbers = iter::repeat_with(|| {
        order.shuffle(&mut random);
        order.clone()
    })
    .flatten();
    let mut losses = 0.0;
    let started = Instant::now();
    for _ in 0..UPDATES {
        let ids = Tensor::from_iter(numbers.by_ref().take(BATCH), &device)?;
        let (loss, balance) = evaluate(&model, &training.index_select(&ids, 0)?)?;
        let loss = (loss + (balance * 0.01)?)?;
        optimizer.backward_step(&loss)?;
        losses += loss.to_scalar::<f32>()?;
    }
    let seconds = started.elapsed().as_secs_f64();
    let loss = evaluate(&model, &test)?.0.to_scalar::<f32>()?;
    println!("loss {:.3}, held out {loss:.3} nats a byte", losses / UPDATES as f32);

    let mut written = held_out[..CONTEXT].to_vec();
    for _ in 0..200 {
        let context = Tensor::new(&written[written.len() - CONTEXT..], &device)?.unsqueeze(0)?;
        let (logits, _) = model.forward(&context)?;
        written.push(gumbel_softmax(&logits.i((0, CONTEXT - 1))?, 0.8, D::Minus1)?.to_scalar()?);
    }
    println!("{}", String::from_utf8_lossy(&written.iter().map(|&byte| byte as u8).collect::<Vec<_>>()));
    println!("{}", json!({ "example": "mixture", "framework": "candle", "seconds": seconds, "result": loss }));
    Ok(ExitCode::from(u8::from(loss > 2.6)))
}
