//! examples/distillation.rs in candle: distillation of a small GPT into a smaller one.

use std::error::Error;
use std::iter;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_nn::{
    AdamW, Embedding, Init, LayerNorm, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, layer_norm, linear,
    loss, ops,
};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde_json::json;

const CONTEXT: usize = 32;
const HEADS: usize = 4;
const BATCH: usize = 16;
const UPDATES: usize = 500;
/// The bytes that the model tells apart. All others are the last.
const CLASSES: usize = 128;

/// Distills a model of a text
#[derive(Parser)]
struct Args {
    /// The text
    text: PathBuf,
}

struct Block {
    norms: [LayerNorm; 2],
    qkv: Linear,
    output: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(width: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            norms: [layer_norm(width, 1e-5, vb.pp("norm1"))?, layer_norm(width, 1e-5, vb.pp("norm2"))?],
            qkv: linear(width, 3 * width, vb.pp("qkv"))?,
            output: linear(width, width, vb.pp("output"))?,
            up: linear(width, 4 * width, vb.pp("up"))?,
            down: linear(4 * width, width, vb.pp("down"))?,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (samples, tokens, width) = x.dims3()?;
        let qkv = self.qkv.forward(&normed(&self.norms[0], x)?)?.reshape((samples, tokens, 3, HEADS, width / HEADS))?;
        let heads = |part: usize| qkv.i((.., .., part))?.transpose(1, 2)?.contiguous();
        let (q, k, v) = (heads(0)?, heads(1)?, heads(2)?);
        let scores = (q.matmul(&k.t()?)? * ((width / HEADS) as f64).powf(-0.5))?.broadcast_add(mask)?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        let x = (x + self.output.forward(&mixed.transpose(1, 2)?.reshape((samples, tokens, width))?)?)?;
        let hidden = self.up.forward(&normed(&self.norms[1], &x)?)?.gelu()?;
        x + self.down.forward(&hidden)?
    }
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
    fn new(width: usize, layers: usize, vb: VarBuilder) -> Result<Self> {
        let table =
            |name, rows| vb.pp(name).get_with_hints((rows, width), "weight", Init::Randn { mean: 0.0, stdev: 0.02 });
        let later = |row| (0..CONTEXT).map(move |column| if column > row { f32::NEG_INFINITY } else { 0.0 });
        let mask: Vec<f32> = (0..CONTEXT).flat_map(later).collect();
        Ok(Self {
            tokens: Embedding::new(table("tokens", CLASSES)?, width),
            positions: table("positions", CONTEXT)?,
            blocks: (0..layers).map(|n| Block::new(width, vb.pp(format!("blocks.{n}")))).collect::<Result<_>>()?,
            norm: layer_norm(width, 1e-5, vb.pp("norm"))?,
            head: linear(width, CLASSES, vb.pp("head"))?,
            mask: Tensor::from_vec(mask, (CONTEXT, CONTEXT), vb.device())?,
        })
    }

    /// Computes the logits of the bytes after those of windows, `[samples * CONTEXT, CLASSES]`.
    fn forward(&self, windows: &Tensor) -> Result<Tensor> {
        let ids = windows.narrow(1, 0, CONTEXT)?.contiguous()?;
        let mut x = self.tokens.forward(&ids)?.broadcast_add(&self.positions)?;
        for block in &self.blocks {
            x = block.forward(&x, &self.mask)?;
        }
        self.head.forward(&normed(&self.norm, &x)?)?.flatten_to(1)
    }
}

/// Applies the norm in its differentiable form. `LayerNorm::forward` has no backward pass.
fn normed(norm: &LayerNorm, x: &Tensor) -> Result<Tensor> {
    ops::layer_norm_slow(x, norm.weight(), norm.bias().expect("it was made with a bias"), norm.eps() as f32)
}

fn cross_entropy(logits: &Tensor, windows: &Tensor) -> Result<Tensor> {
    loss::cross_entropy(logits, &windows.narrow(1, 1, CONTEXT)?.flatten_all()?)
}

/// Trains a model of this width and number of layers, and returns it with its held-out loss.
fn fit([training, test]: &[Tensor; 2], width: usize, layers: usize, teacher: Option<&Gpt>) -> Result<(Gpt, f32)> {
    let device = training.device();
    let variables = VarMap::new();
    let model = Gpt::new(width, layers, VarBuilder::from_varmap(&variables, DType::F32, device))?;
    let settings = ParamsAdamW { lr: 3e-3, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(variables.all_vars(), settings)?;
    let mut random = StdRng::seed_from_u64(7);
    let mut order: Vec<u32> = (0..training.dim(0)? as u32).collect();
    let mut numbers = iter::repeat_with(|| {
        order.shuffle(&mut random);
        order.clone()
    })
    .flatten();
    for _ in 0..UPDATES {
        let windows = training.index_select(&Tensor::from_iter(numbers.by_ref().take(BATCH), device)?, 0)?;
        let logits = model.forward(&windows)?;
        let mut loss = cross_entropy(&logits, &windows)?;
        if let Some(teacher) = teacher {
            let ours = ops::log_softmax(&logits, D::Minus1)?;
            let theirs = ops::log_softmax(&teacher.forward(&windows)?.detach(), D::Minus1)?;
            let divergence = (theirs.exp()? * (theirs - ours)?)?.sum(1)?.mean_all()?;
            loss = ((loss * 0.3)? + (divergence * 0.7)?)?;
        }
        optimizer.backward_step(&loss)?;
    }
    let loss = cross_entropy(&model.forward(test)?, test)?.to_scalar()?;
    Ok((model, loss))
}

fn main() -> std::result::Result<ExitCode, Box<dyn Error>> {
    let text = std::fs::read(Args::parse().text)?;
    let text: Vec<u32> = text.iter().map(|&byte| u32::from(byte).min(CLASSES as u32 - 1)).collect();
    let (training, held_out) = text.split_at(text.len() / 10 * 9);
    let windows = |text: &[u32]| {
        let starts = (0..text.len() - CONTEXT).step_by(CONTEXT);
        Tensor::new(starts.map(|start| &text[start..=start + CONTEXT]).collect::<Vec<_>>(), &Device::Cpu)
    };
    let data = [windows(training)?, windows(held_out)?];

    let started = Instant::now();
    let (teacher, of_teacher) = fit(&data, 96, 2, None)?;
    let (_, of_student) = fit(&data, 32, 1, None)?;
    let (_, of_distilled) = fit(&data, 32, 1, Some(&teacher))?;
    let seconds = started.elapsed().as_secs_f64();
    for (name, loss) in [("teacher", of_teacher), ("student", of_student), ("student, distilled", of_distilled)] {
        println!("{name:<18} held out {loss:.3} nats a byte");
    }
    let result = json!({ "teacher": of_teacher, "student": of_student, "student, distilled": of_distilled });
    println!("{}", json!({ "example": "distillation", "framework": "candle", "seconds": seconds, "result": result }));
    Ok(ExitCode::from(u8::from(of_distilled >= of_student)))
}
