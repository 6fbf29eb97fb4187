//! Benchmarks attention over many tokens, compared with PyTorch's `scaled_dot_product_attention` in
//! the same run.
//!
//! Run `cargo bench --bench attention` (the emulator) or `cargo bench --features cuda --bench
//! attention -- --device cuda`. `--stored bf16` and `--precision tf32` apply to both sides. With
//! `--matrix-instruction mma-sync` and BF16, PyTorch runs its FlashAttention-2, which uses the same
//! instruction. One graph repeats forward, and another repeats forward with backward. A sample is
//! the time of a replay divided by the repetitions, and backward is the difference of the medians.
//! Both sides take turns, in three rounds.
//!
//! Rates count `4 width` operations for each visible pair of a query and a key, and 2.5 times as
//! many in backward, whatever a kernel actually does. Prints a table, and writes every sample to
//! `benches/runs/DATE-GPU-attention[-stored-bf16|-tf32].json`.

#![forbid(unsafe_code)]

#[allow(dead_code, reason = "other benches time the host's part")]
mod harness;

use clap::Parser;
use harness::stored::{StoredAs, group};
use harness::values::uniform;
use harness::{Common, Peer, Samples, record, repetitions};
use serde::{Deserialize, Serialize};
use std::fmt;
use stepscope::capture::CaptureInputs;
use stepscope::ops::{self, AttentionConfig, AttentionElement, Precision, QkNorm};
use stepscope::{Arena, Buffer, Capacity, Device, DeviceKind, HostInputs, Result, Step, Tensor, bf16};

/// The samples of a round.
const SAMPLES: usize = 5;

/// A case of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Case {
    batch: usize,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    width: usize,
    causal: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, tokens, heads, kv_heads, width, causal } = self;
        let sees = if *causal { "causal" } else { "all" };
        write!(f, "{batch} x {tokens}, {heads}/{kv_heads} heads of {width}, {sees}")
    }
}

impl Case {
    /// Returns cases of 16,384 tokens in samples of several lengths, with the heads of common
    /// models, or small cases for the emulator.
    fn all(emulated: bool) -> Vec<Self> {
        let case = |[batch, tokens, heads, kv_heads, width]: [usize; 5], causal| Self {
            batch,
            tokens,
            heads,
            kv_heads,
            width,
            causal,
        };
        if emulated {
            return vec![case([1, 128, 2, 2, 64], true)];
        }
        let mut cases = vec![case([16, 1024, 12, 12, 64], true)];
        for (heads, width) in [(32, 64), (16, 128), (8, 256)] {
            cases.push(case([4, 4096, heads, heads, width], true));
        }
        cases.push(case([4, 4096, 32, 8, 128], true));
        cases.push(case([4, 4096, 16, 16, 80], true));
        cases.push(case([4, 4096, 32, 32, 64], false));
        cases.push(case([4, 4096, 16, 16, 128], false));
        cases.push(case([1, 16_384, 16, 16, 128], true));
        cases
    }

    /// Returns the operations of the forward pass.
    fn operations(self) -> f64 {
        let Self { batch, tokens, heads, width, causal, .. } = self;
        let pairs = (tokens * if causal { tokens + 1 } else { 2 * tokens }) as f64 / 2.0;
        4.0 * pairs * (batch * heads * width) as f64
    }
}

/// Times attention, compared with PyTorch's
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Element type of q, k, v and the output, on both sides
    #[arg(long, value_enum, default_value = "f32")]
    stored: StoredAs,
    /// Precision of f32 products, on both sides
    #[arg(long, value_name = "f32|tf32", default_value = "f32")]
    precision: Precision,
    /// Run only cases whose name contains this, such as `of 128`
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
}

/// A question to the peer.
#[derive(Serialize)]
struct Question {
    #[serde(flatten)]
    case: Case,
    /// True if the backward pass follows.
    backward: bool,
    row: usize,
}

/// A line of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    /// A contender's times of forward, and of forward with backward.
    Measured {
        #[serde(flatten)]
        case: Case,
        contender: String,
        forward: Samples,
        both: Samples,
    },
    /// A description of the peer.
    Peer { peer: String, device: String },
}

/// The state of the graphs.
struct State<S: AttentionElement> {
    case: Case,
    precision: Precision,
    row: usize,
    qkv: Buffer<S>,
    dout: Buffer<S>,
}

fn main() -> harness::Result<()> {
    let Args { common, stored, precision, only } = Args::parse();
    let device = common.builder().open()?;
    let emulated = device.description().kind == DeviceKind::Emulated;
    let cases: Vec<Case> = Case::all(emulated).into_iter().filter(|case| case.to_string().contains(&only)).collect();
    let mut arguments = vec!["--device".to_owned(), if emulated { "cpu" } else { "cuda" }.into()];
    arguments.extend(["--samples".into(), SAMPLES.to_string(), "--stored".into(), stored.to_string()]);
    arguments.extend(["--precision".into(), precision.to_string()]);
    if stored == StoredAs::Bf16 && !emulated && !device.description().has_wgmma {
        arguments.extend(["--backend".into(), "flash-attention".into()]);
    }
    let mut pytorch = Peer::start("attention.py", &arguments);
    let mut lines: Vec<Line> = pytorch.line().into_iter().collect();
    if let Some(Line::Peer { peer, device }) = lines.first() {
        println!("{peer} on {device}");
    }
    let name = device.description().name.clone();
    println!(
        "{name:<48}{:<12}{:>10}{:>10}{:>10}{:>10}{:>8}{:>8}",
        "", "forward", "TFLOP/s", "backward", "TFLOP/s", "ratio", "ratio"
    );
    for case in cases {
        let row = repetitions(&device, case.operations());
        let peer = |backward: bool| {
            let question = serde_json::to_string(&Question { case, backward, row }).expect("integers and booleans");
            pytorch.ask(&question)
        };
        let (ours, theirs) = match stored {
            StoredAs::Bf16 => measure::<bf16>(&device, case, precision, peer)?,
            StoredAs::F32 => measure::<f32>(&device, case, precision, peer)?,
        };
        let unit = theirs.as_ref().map(medians);
        for line in theirs.iter().chain([&ours]) {
            print(line, unit);
        }
        lines.extend(theirs.into_iter().chain([ours]));
    }
    if let Some(reason) = pytorch.failed() {
        println!("PyTorch: not measured, or only in part ({reason})");
    }
    println!("samples in {}", record(&group("attention", precision, stored), &device, &lines)?);
    Ok(())
}

/// Returns our line and, if it answers, that of `peer`, which returns the samples of a round, with
/// backward or without.
fn measure<S: AttentionElement>(
    device: &Device,
    case: Case,
    precision: Precision,
    mut peer: impl FnMut(bool) -> Option<Vec<f64>>,
) -> Result<(Line, Option<Line>)> {
    let Case { batch, tokens, heads, kv_heads, width, .. } = case;
    let narrow = |length, seed| uniform(length, seed).into_iter().map(S::narrow).collect::<Vec<_>>();
    let tokens = batch * tokens;
    let row = repetitions(device, case.operations());
    let mut state = State {
        case,
        precision,
        row,
        qkv: Buffer::from_slice(device, &narrow(tokens * (heads + 2 * kv_heads) * width, 1))?,
        dout: Buffer::from_slice(device, &narrow(tokens * heads * width, 2))?,
    };
    // Every repetition allocates the output, its gradient's sums and the gradient, at most in f32.
    // Stored scores take up to 2 GiB while they are used.
    let bytes = row * tokens * (2 * heads + 2 * kv_heads) * (width + 4) * 4 + (3 << 30);
    type Record<S> = fn(&mut Step<'_>, &mut &mut State<S>, &CaptureInputs<'_>) -> Result<()>;
    let mut collect = |backward: bool, record: Record<S>| -> Result<[Samples; 2]> {
        let mut arena = Arena::builder(device).capacity(Capacity::Bytes(bytes)).build()?;
        let mut captured = arena.capture(&mut state, &HostInputs::new(), record)?;
        let settle = || device.synchronize(device.deadline());
        Samples::in_turn(|| peer(backward), SAMPLES, row, || captured.repeat().map(drop), settle)
    };
    let [[forward, their_forward], [both, their_both]] =
        [collect(false, attend::<S, false>)?, collect(true, attend::<S, true>)?];
    let line = |contender: &str, forward, both| Line::Measured { case, contender: contender.into(), forward, both };
    let has_answered = !their_forward.0.is_empty() && !their_both.0.is_empty();
    let theirs = has_answered.then(|| line("PyTorch", their_forward, their_both));
    Ok((line("stepscope", forward, both), theirs))
}

/// Records the graph of repeated attention.
fn attend<S: AttentionElement, const BACK: bool>(
    step: &mut Step<'_>,
    state: &mut &mut State<S>,
    _: &CaptureInputs<'_>,
) -> Result<()> {
    let State { case: Case { batch, tokens, heads, kv_heads, width, causal }, precision, row, qkv, dout } =
        &mut **state;
    step.set_precision(*precision);
    let form = AttentionConfig::new(*heads).kv_heads(*kv_heads);
    let form = if *causal { form.causal() } else { form };
    let qkv = step.lend(qkv, [*batch, *tokens, (*heads + 2 * *kv_heads) * *width])?;
    let dout = step.lend(dout, [*batch, *tokens, *heads * *width])?;
    for _ in 0..*row {
        let made = ops::attention(step, &qkv, None, &form)?;
        if BACK {
            ops::launch::attention_backward(
                step,
                &qkv,
                None::<(QkNorm<'_, '_>, &mut Tensor<'_>, bool)>,
                &form,
                &made,
                &dout,
            )?;
        }
    }
    Ok(())
}

/// Returns the median nanoseconds of forward and of backward.
fn medians(line: &Line) -> [f64; 2] {
    let Line::Measured { forward, both, .. } = line else { unreachable!("only what was measured is compared") };
    let [forward, both] = [forward, both].map(|samples| samples.quantile(0.5));
    [forward, both - forward]
}

/// Prints a line of the table; `unit` has the peer's medians.
fn print(line: &Line, unit: Option<[f64; 2]>) {
    let Line::Measured { case, contender, .. } = line else { return };
    let [forward, backward] = medians(line);
    let rate = |operations: f64, nanoseconds: f64| operations / nanoseconds / 1e3;
    let ratio = |at: usize, own: f64| unit.map_or_else(|| "-".into(), |unit| format!("{:.2}", unit[at] / own));
    println!(
        "{:<48}{contender:<12}{:>10.1}{:>10.1}{:>10.1}{:>10.1}{:>8}{:>8}",
        case.to_string(),
        forward / 1e3,
        rate(case.operations(), forward),
        backward / 1e3,
        rate(2.5 * case.operations(), backward),
        ratio(0, forward),
        ratio(1, backward)
    );
}
