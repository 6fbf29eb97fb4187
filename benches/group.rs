//! Benchmarks a group: an update of many weights by one rank and by two, compared with PyTorch's
//! `all_reduce` and AdamW on two GPUs in the same run.
//!
//! Run `cargo bench --bench group` (the emulator) or `cargo bench --features cuda --bench group --
//! --device cuda` (two GPUs). The model is one large embedding, and a batch reads a few of its
//! rows. So nearly all of an update is zeroing its gradient, the all-reduce, and AdamW. Ranks are
//! threads of this process. A sample is an update of rank 0 by the host's clock, including the read
//! of its loss. Prints a table, and writes every sample to `benches/runs/DATE-GPU-group.json`.

#![forbid(unsafe_code)]

#[allow(dead_code, reason = "other benches time the host's part")]
mod harness;

use clap::Parser;
use harness::{Common, Peer, Samples, record};
use serde::{Deserialize, Serialize};
use std::thread;
use std::time::Duration;
use stepscope::group::{Group, GroupConfig};
use stepscope::nn::{Embedding, Linear};
use stepscope::{
    AdamW, Arena, Capacity, DeviceBatch, DeviceKind, HostInputs, Model, ParameterSpec, Result, Tape, TrainState,
    Trainer, Var,
};

const SAMPLES: usize = 15;
/// Columns of the embedding.
const WIDTH: usize = 64;
const CLASSES: usize = 2;
/// The deadline also covers reading and writing the initial weights of two ranks.
const DEADLINE: Duration = Duration::from_secs(240);

/// Times an update by two ranks
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Weights, in millions (10^6) [default: 2, 124 and 512; on the emulator 1]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    millions: Vec<usize>,
}

/// A line of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    /// The time of `contender` for `work` on this many weights.
    Measured { elements: usize, contender: String, work: String, samples: Samples },
    /// A description of the peer.
    Peer { peer: String, device: String },
}

/// A model that reads a few rows of an embedding.
#[derive(Debug)]
struct Rows {
    rows: Embedding,
    head: Linear,
}

impl Model for Rows {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.head.forward(tape, &self.rows.forward(tape, batch.indices(0)?)?)
    }
}

struct Tokens {
    ids: Vec<u32>,
    labels: Vec<u32>,
}

impl stepscope::HostBatch for Tokens {
    fn len(&self) -> usize {
        self.ids.len()
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        HostInputs::new().with(&self.ids, [self.ids.len()])?.with(&self.labels, [self.ids.len()])
    }
}

fn main() -> harness::Result<()> {
    let Args { common, mut millions } = Args::parse();
    let device = common.builder().open()?;
    let kind = device.description().kind;
    if millions.is_empty() {
        millions = if kind == DeviceKind::Emulated { vec![1] } else { vec![2, 124, 512] };
    }
    let elements: Vec<usize> =
        millions.into_iter().map(|millions| (millions * 1_000_000).next_multiple_of(WIDTH)).collect();
    let mut arguments = vec!["--device".to_owned(), if kind == DeviceKind::Emulated { "cpu" } else { "cuda" }.into()];
    arguments.extend(["--samples".into(), SAMPLES.to_string()]);
    arguments.extend(elements.iter().map(usize::to_string));
    let (mut lines, failed) = Peer::start("group.py", &arguments).rest();
    if let Some(reason) = failed {
        println!("PyTorch: not measured, or only in part ({reason})");
    }
    for &elements in &elements {
        for ranks in [1, 2] {
            let samples = updates(&common, ranks, elements)?;
            let work = format!("update of {ranks}");
            lines.push(Line::Measured { elements, contender: "stepscope".into(), work, samples });
        }
    }
    println!("{:<14}{:<14}{:<34}{:>10}{:>10}{:>10}", "weights", "", "", "us", "p10", "p90");
    for line in &lines {
        match line {
            Line::Peer { peer, device } => println!("{peer} on {device}"),
            Line::Measured { elements, contender, work, samples } => {
                let [median, p10, p90] = [0.5, 0.1, 0.9].map(|share| samples.quantile(share) / 1e3);
                println!("{elements:<14}{contender:<14}{work:<34}{median:>10.1}{p10:>10.1}{p90:>10.1}");
            }
        }
    }
    println!("samples in {}", record("group", &device, &lines)?);
    Ok(())
}

/// Returns the samples of rank 0 in a group of this size.
fn updates(common: &Common, ranks: usize, elements: usize) -> Result<Samples> {
    let outcome = thread::scope(|scope| {
        let ranks = GroupConfig::on_this_host(ranks)?.into_iter();
        let ranks: Vec<_> = ranks.map(|config| scope.spawn(move || of_rank(common, &config, elements))).collect();
        let outcome = ranks.into_iter().map(|rank| rank.join().expect("a rank ends with a result"));
        outcome.collect::<Result<Vec<_>>>()
    });
    outcome.map(|samples| samples.into_iter().next().expect("rank 0's"))
}

fn of_rank(common: &Common, config: &GroupConfig, elements: usize) -> Result<Samples> {
    let device = common.builder().ordinal(config.local_rank()).deadline(DEADLINE).open()?;
    let group = Group::join(&device, &config.clone().deadline(DEADLINE))?;
    let mut spec = ParameterSpec::builder();
    let model = Rows {
        rows: Embedding::new(spec.at("rows"), elements / WIDTH, WIDTH, 0.02),
        head: Linear::new(spec.at("head"), WIDTH, CLASSES),
    };
    let config = AdamW { clip: None, ..AdamW::default() };
    let state = TrainState::new(&device, model, &spec.build()?, 7, config)?.in_group(&group, group.ranks())?;
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(64)).build()?;
    let tokens = || Tokens { ids: vec![3, 1, 4, 1], labels: vec![0, 1, 1, 0] };
    let batch: Vec<Tokens> = (0..group.ranks()).map(|_| tokens()).collect();
    let mut trainer = Trainer::captured(&mut arena, state, &tokens())?;
    Samples::collect(SAMPLES, 1, || trainer.update(&batch).map(drop), || Ok(()))
}
