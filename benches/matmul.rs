//! Benchmarks matrix multiplies, compared with cuBLAS as called by PyTorch in the same run.
//!
//! Run `cargo bench --bench matmul` (the emulator) or `cargo bench --features cuda --bench matmul
//! -- --device cuda`. Options:
//!
//! - `--tiles` measures every tile instead of the op's choice.
//! - `--precision tf32` sets the precision on both sides. Ours includes the rounding of operands.
//! - `--stored bf16` multiplies BF16 tensors into BF16 on both sides.
//! - `--family` multiplies random shapes that nothing was tuned for, different in each run.
//!
//! On both sides one graph repeats the multiply, and a sample is the time of a replay divided by
//! the repetitions. Matrices that fit are therefore in the L2 cache. Both sides take turns, in
//! three rounds. Prints a table, and writes every sample to `benches/runs/DATE-GPU-matmul.json`.
//!
//! Invariant: the output has the same bits with every tile.

#![forbid(unsafe_code)]

#[allow(dead_code, reason = "other benches time the host's part")]
mod harness;

#[path = "matmul/case.rs"]
mod case;

use case::Case;
use clap::Parser;
use harness::stored::{StoredAs, group};
use harness::values::uniform;
use harness::{Common, Peer, Samples, record, repetitions};
use serde::{Deserialize, Serialize};
use std::time::SystemTime;
use stepscope::capture::CaptureInputs;
use stepscope::ops::{self, BF16_TILES, Gemm, GemmElement, MMA_TILES, Precision, TILES};
use stepscope::{Arena, Buffer, Capacity, Device, DeviceKind, HostInputs, Result, Step, Tensor, bf16};

/// The samples of a round.
const SAMPLES: usize = 9;
/// The number of outputs that are compared between tiles.
const COMPARED: usize = 1 << 16;
/// Tiles that need more blocks than this are skipped.
const MOST_BLOCKS: usize = 1 << 14;

/// Times matrix multiplies, compared with PyTorch's
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Measure every tile, not only the op's choice
    #[arg(long)]
    tiles: bool,
    /// Rounding of the operands, on both sides
    #[arg(long, value_name = "f32|tf32", default_value = "f32")]
    precision: Precision,
    /// Element type of operands and outputs; BF16 tensors need no rounding before a product
    #[arg(long, value_enum, default_value = "f32", conflicts_with = "precision")]
    stored: StoredAs,
    /// Draw 64 products from this seed, or from the clock, instead of those that the library was
    /// tuned for
    #[arg(long, value_name = "SEED", num_args = 0..=1)]
    family: Option<Option<u64>>,
    /// Run only cases whose name contains this, such as `3072x256` or `NT`
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
}

/// A line of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    /// The time of a contender for one multiply.
    Measured {
        #[serde(flatten)]
        case: Case,
        contender: String,
        nanoseconds: Samples,
    },
    /// A description of the peer.
    Peer { peer: String, device: String },
}

/// The state of the graph.
struct State<S: GemmElement<S>> {
    gemm: Gemm,
    row: usize,
    a: Buffer<S>,
    b: Buffer<S>,
    out: Buffer<S>,
}

impl<S: GemmElement<S>> State<S> {
    fn new(device: &Device, case: Case, gemm: Gemm) -> Result<Self> {
        let [a, b, out] = case.elements();
        let narrow = |length, seed| uniform(length, seed).into_iter().map(S::narrow).collect::<Vec<_>>();
        Ok(Self {
            gemm,
            row: repetitions(device, case.operations()),
            a: Buffer::from_slice(device, &narrow(a, 1))?,
            b: Buffer::from_slice(device, &narrow(b, 2))?,
            out: Buffer::zeros(device, out)?,
        })
    }

    /// Returns the capacity for the sums of split-K parts and for rounded operands.
    fn capacity(&self) -> Capacity {
        let Gemm { m, n, k, batches, .. } = self.gemm;
        Capacity::Bytes(batches * (m + n) * k.next_multiple_of(8) * size_of::<f32>() + (512 << 20))
    }
}

fn main() -> harness::Result<()> {
    let Args { common, tiles, precision, stored, family, only } = Args::parse();
    let seed = family.map(|seed| seed.unwrap_or_else(by_the_clock));
    let of_peer = if stored == StoredAs::Bf16 { stored.to_string() } else { precision.to_string() };
    let device = common.builder().open()?;
    let emulated = device.description().kind == DeviceKind::Emulated;
    let all = seed.map_or_else(|| Case::all(emulated), Case::family);
    let cases: Vec<Case> = all.into_iter().filter(|case| case.to_string().contains(&only)).collect();
    let options =
        format!("--device {} --samples {SAMPLES} --precision {of_peer}", if emulated { "cpu" } else { "cuda" });
    let mut pytorch = Peer::start("matmul.py", &options.split(' ').map(str::to_owned).collect::<Vec<_>>());
    let mut lines: Vec<Line> = pytorch.line().into_iter().collect();
    if let Some(Line::Peer { peer, device }) = lines.first() {
        println!("{peer} on {device}");
    }
    println!(
        "{:<30}{:<20}{:>10}{:>10}{:>10}{:>10}{:>10}",
        device.description().name,
        "",
        "us",
        "p10",
        "p90",
        "TFLOP/s",
        "ratio"
    );
    let mut ratios = Vec::new();
    for case in cases {
        let Case { m, n, k, batches, form } = case;
        let row = repetitions(&device, case.operations());
        let question = format!("{m},{n},{k},{batches},{form:?},{row}");
        let peer = || pytorch.ask(&question);
        let (ours, theirs) = match stored {
            StoredAs::F32 => ours(&device, case, precision, tiles, peer)?,
            StoredAs::Bf16 => ours_of_bf16(&device, case, tiles, peer)?,
        };
        let measured = |nanoseconds| Line::Measured { case, contender: "PyTorch".into(), nanoseconds };
        let theirs = (!theirs.0.is_empty()).then(|| measured(theirs));
        let unit = theirs.as_ref().map(median);
        ratios.extend(unit.map(|unit| unit / median(&ours[0])));
        for line in theirs.iter().chain(&ours) {
            print(line, unit);
        }
        lines.extend(theirs.into_iter().chain(ours));
    }
    if let Some(reason) = pytorch.failed() {
        println!("PyTorch: not measured, or only in part ({reason})");
    }
    if let Some(seed) = seed {
        println!("--family {seed}: {}", spread_of(&mut ratios));
    }
    let group = group("matmul", precision, stored) + if seed.is_some() { "-family" } else { "" };
    println!("samples in {}", record(&group, &device, &lines)?);
    Ok(())
}

/// Returns a seed that no earlier run had.
fn by_the_clock() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_secs()
}

/// Describes the distribution of the peer's times divided by ours.
fn spread_of(ratios: &mut [f64]) -> String {
    ratios.sort_by(f64::total_cmp);
    let Some(least) = ratios.first() else { return "no peer".into() };
    let reached = ratios.iter().filter(|&&ratio| ratio >= 0.95).count();
    let (median, all) = (ratios[ratios.len() / 2], ratios.len());
    format!("PyTorch's time over ours: median {median:.2}, least {least:.2}; 0.95 or more in {reached} of {all}")
}

/// Measures the op's own choice in turn with `peer`, whose samples are returned, too, and every
/// tile if `tiles` is true.
fn ours(
    device: &Device,
    case: Case,
    precision: Precision,
    tiles: bool,
    peer: impl FnMut() -> Option<Vec<f64>>,
) -> Result<(Vec<Line>, Samples)> {
    let mut state = State::<f32>::new(device, case, case.gemm().precision(precision))?;
    let ([chosen, theirs], want) = measure(device, &mut state, peer)?;
    let measured = |contender: String, nanoseconds| Line::Measured { case, contender, nanoseconds };
    let mut lines = vec![measured("stepscope".into(), chosen)];
    let formed: Vec<([u32; 3], Gemm)> = if precision == Precision::F32 {
        let shape = |tile: &ops::Tile| [tile.rows(), tile.cols(), tile.threads()];
        TILES.iter().map(|tile| (shape(tile), state.gemm.tile(*tile))).collect()
    } else {
        let shape = |tile: &ops::MmaTile| [tile.rows(), tile.cols(), tile.threads()];
        let formed = |tile: &ops::MmaTile| Gemm { mma_tile: Some(*tile), ..state.gemm };
        MMA_TILES.iter().map(|tile| (shape(tile), formed(tile))).collect()
    };
    // Smaller matrices are multiplied in f32 unless a tile is named.
    let tiles = tiles && (precision == Precision::F32 || case.m.min(case.n).min(case.k) >= Precision::LEAST);
    for ([rows, cols, threads], gemm) in formed {
        if tiles && blocks(case, rows, cols) <= MOST_BLOCKS {
            state.gemm = gemm;
            let ([nanoseconds, _], got) = measure(device, &mut state, || None)?;
            let name = format!("  {rows}x{cols}, {threads} threads");
            assert!(got == want, "{case}: tile{name} gives different bits");
            lines.push(measured(name, nanoseconds));
        }
    }
    Ok((lines, theirs))
}

/// Measures BF16 tensors. See [`ours`].
fn ours_of_bf16(
    device: &Device,
    case: Case,
    tiles: bool,
    peer: impl FnMut() -> Option<Vec<f64>>,
) -> Result<(Vec<Line>, Samples)> {
    let mut state = State::<bf16>::new(device, case, case.gemm())?;
    let ([chosen, theirs], want) = measure(device, &mut state, peer)?;
    let mut lines = vec![Line::Measured { case, contender: "stepscope".into(), nanoseconds: chosen }];
    for tile in BF16_TILES.into_iter().filter(|_| tiles) {
        if blocks(case, tile.rows(), tile.cols()) <= MOST_BLOCKS {
            state.gemm.bf16_tile = Some(tile);
            let ([nanoseconds, _], got) = measure(device, &mut state, || None)?;
            let name = format!("  {}x{}, {} threads", tile.rows(), tile.cols(), tile.threads());
            assert!(got == want, "{case}: tile{name} gives different bits");
            lines.push(Line::Measured { case, contender: name, nanoseconds });
        }
    }
    Ok((lines, theirs))
}

fn blocks(case: Case, rows: u32, cols: u32) -> usize {
    case.batches * case.m.div_ceil(rows as usize) * case.n.div_ceil(cols as usize)
}

/// Returns our samples and the peer's of one multiply, and the bits of the first outputs.
fn measure<S: GemmElement<S>>(
    device: &Device,
    state: &mut State<S>,
    peer: impl FnMut() -> Option<Vec<f64>>,
) -> Result<([Samples; 2], Vec<u32>)> {
    let row = state.row;
    let mut arena = Arena::builder(device).capacity(state.capacity()).build()?;
    let mut captured = arena.capture(state, &HostInputs::new(), multiply)?;
    let settle = || device.synchronize(device.deadline());
    let samples = Samples::in_turn(peer, SAMPLES, row, || captured.repeat().map(drop), settle)?;
    let out = &captured.state().out;
    let first = out.read_range(0, out.len().min(COMPARED))?.into_iter().map(|value| value.widen().to_bits()).collect();
    Ok((samples, first))
}

/// Records the graph of repeated multiplies.
fn multiply<S: GemmElement<S>>(step: &mut Step<'_>, state: &mut &mut State<S>, _: &CaptureInputs<'_>) -> Result<()> {
    let State { gemm, row, a, b, out } = &mut **state;
    let [a_len, b_len, out_len] = [a.len(), b.len(), out.len()];
    let (a, b, mut out) = (step.lend(a, [a_len])?, step.lend(b, [b_len])?, step.lend_mut(out, [out_len])?);
    (0..*row).try_for_each(|_| ops::gemm_into(step, gemm, &a, &b, None::<&Tensor<'_>>, &mut out))
}

fn median(line: &Line) -> f64 {
    let Line::Measured { nanoseconds, .. } = line else { unreachable!("only what was measured is compared") };
    nanoseconds.quantile(0.5)
}

/// Prints a line of the table; `unit` is the peer's median.
fn print(line: &Line, unit: Option<f64>) {
    let Line::Measured { case, contender, nanoseconds } = line else { return };
    let [median, low, high] = [0.5, 0.1, 0.9].map(|share| nanoseconds.quantile(share) / 1e3);
    let rate = case.operations() / median / 1e6;
    let ratio = unit.map_or_else(|| "-".into(), |unit| format!("{:.2}", unit / 1e3 / median));
    println!("{:<30}{contender:<20}{median:>10.2}{low:>10.2}{high:>10.2}{rate:>10.2}{ratio:>10}", case.to_string());
}
