//! The command line. A wrong value ends the program with exit code 2 and says what was wrong, before any work is done.

use std::path::PathBuf;
use std::sync::LazyLock;

use clap::builder::{PossibleValue, RangedU64ValueParser};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use stepscope::ops::Precision;

use crate::shared::log::Log;
use crate::shared::ranks::RankArgs;
use crate::shared::stored_as::StoredAs;

/// Samples that are kept when neither bars nor a limit are given: enough to see it learn within a minute or two.
pub(crate) const SYNTHETIC_LIMIT: usize = 2048;

/// The version, and for each architecture the SHA-256 of the kernels' PTX and who compiled it: two builds with the same digests
/// run the same kernels.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let builds = stepscope::ptx_builds();
    let lines: String = builds.iter().map(|build| format!("\nPTX {build}")).collect();
    let lines = if builds.is_empty() { "\nPTX none: built without feature `cuda`".into() } else { lines };
    format!("{}{lines}", env!("CARGO_PKG_VERSION"))
});

/// Trains CrossAsset, a transformer over 12 time scales that tells whether a price will fall, stay or rise, and writes
/// report.json, loss.svg and model.safetensors.
#[derive(Clone, Debug, Parser)]
#[command(name = "crossasset", version, long_version = VERSION.as_str())]
pub(crate) struct Args {
    /// One-minute bars of one asset: columns open_time or timestamp, open, high, low, close,
    /// volume; may be given for several assets. Times are 2023-03-01 00:00:00+00:00, in UTC where
    /// no offset is given, or numbers since 1970 in one unit, of the years 1980 to 2100 [default: a
    /// synthetic market]
    #[arg(long, value_name = "FILE.csv")]
    pub(crate) bars: Vec<PathBuf>,

    /// Where to train
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub(crate) device: DeviceChoice,

    /// Passes over the training part of each fold
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = up_to(u32::MAX))]
    pub(crate) epochs: usize,

    /// Walk-forward folds
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = up_to(u32::MAX))]
    pub(crate) folds: usize,

    /// Samples for each update of the weights
    #[arg(long, value_name = "SAMPLES", default_value_t = 256, value_parser = up_to(u32::MAX))]
    pub(crate) batch: usize,

    /// Samples in one step scope; the gradients of a batch's steps are added up [default: the whole batch]
    #[arg(long, value_name = "SAMPLES", value_parser = up_to(u32::MAX))]
    pub(crate) micro_batch: Option<usize>,

    #[command(flatten)]
    pub(crate) ranks: RankArgs,

    /// Keep only the latest samples [default: all of them; 2048 of a synthetic market]
    #[arg(long, value_name = "SAMPLES", value_parser = up_to(u32::MAX))]
    pub(crate) limit: Option<usize>,

    /// Names the initial weights, the order of the samples and the synthetic market
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,

    /// Memory of the step arena, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = up_to(u32::MAX))]
    pub(crate) arena_mib: usize,

    /// Memory, in MiB, of the pool that a step overflows into when the arena is full; 0: it fails and says why
    #[arg(long, value_name = "MIB", default_value_t = 0, value_parser = zero_up_to(u32::MAX))]
    pub(crate) overflow_mib: usize,

    /// End, with a checkpoint and exit code 75, before an update when the host has less memory available; 0: never [default: half of what
    /// admission leaves to others where CPU and GPU share one memory]
    #[arg(long, value_name = "MIB", value_parser = zero_up_to(u32::MAX))]
    pub(crate) memory_floor_mib: Option<usize>,

    /// Run each step as one graph that is recorded once; off: launch by launch, which can overflow
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(crate) capture: Switch,

    /// How matrix multiplies of training round their factors: tf32 and bf16 are faster on a GPU, and less exact
    #[arg(long, value_name = "ieee|tf32|bf16", default_value_t = Precision::Ieee)]
    pub(crate) precision: Precision,

    /// What memory holds of activations and of the matrices that products read: bf16 takes half the bytes; weights are f32
    #[arg(long, value_enum, default_value_t = StoredAs::F32)]
    pub(crate) stored: StoredAs,

    /// Learning rate of AdamW
    #[arg(long, value_name = "RATE", default_value_t = 3e-4, value_parser = above_zero)]
    pub(crate) learning_rate: f32,

    /// Decoupled weight decay of AdamW
    #[arg(long, value_name = "RATE", default_value_t = 0.01, value_parser = zero_or_above)]
    pub(crate) weight_decay: f32,

    /// Largest L2 norm of all gradients together; longer ones are scaled down to it
    #[arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = above_zero)]
    pub(crate) clip: f32,

    /// Bars ahead over which a sample's label is taken
    #[arg(long, value_name = "BARS", default_value_t = 15, value_parser = up_to(100_000))]
    pub(crate) horizon: usize,

    /// Folder for the results; made when missing
    #[arg(long, value_name = "DIR", default_value = "target/crossasset")]
    pub(crate) out: PathBuf,

    /// Write the first three updates' inputs, losses, gradients and weights to this safetensors file, for tests/oracle
    #[arg(long, value_name = "FILE", conflicts_with_all = ["resume", "ranks", "shards"])]
    pub(crate) trace: Option<PathBuf>,

    /// Write the first batch's memory, event by event, to this file (PyTorch's memory snapshot) and, as a picture, to the
    /// same name ending in .svg
    #[arg(long, value_name = "FILE", conflicts_with = "ranks")]
    pub(crate) memory: Option<PathBuf>,

    /// Write the checkpoint after so many updates of an epoch, too [default: at the end of each
    /// epoch, and at Ctrl-C, SIGTERM or SIGHUP]
    #[arg(long, value_name = "UPDATES", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) checkpoint_every: Option<u64>,

    /// What is written to standard error while it trains
    #[arg(long, value_enum, default_value_t = Log::Text)]
    pub(crate) log: Log,

    /// Go on from this checkpoint, with the same bars and settings
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,

    /// Replace the checkpoint of an earlier run that is in --out
    #[arg(long)]
    pub(crate) overwrite: bool,
}

/// Whether something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// It is.
    On,
    /// It is not.
    Off,
}

/// Where to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The GPU when there is one, else the emulator.
    Auto,
    /// The kernels on the CPU.
    Emulated,
    /// The NVIDIA GPU.
    Cuda,
}

impl ValueEnum for DeviceChoice {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Auto, Self::Emulated, Self::Cuda]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::Auto => PossibleValue::new("auto").help("The GPU when there is one, else the emulator"),
            Self::Emulated => PossibleValue::new("emulated").help("The same kernels on the CPU"),
            Self::Cuda => PossibleValue::new("cuda").help("The NVIDIA GPU"),
        })
    }
}

impl Args {
    /// The program's arguments; ends the program when they are wrong (exit code 2) or ask for help (exit code 0).
    pub(crate) fn from_command_line() -> Self {
        Self::try_parse().and_then(Self::checked).unwrap_or_else(|error| error.exit())
    }

    /// Samples in one step scope.
    pub(crate) fn micro_batch(&self) -> usize {
        self.micro_batch.unwrap_or(self.batch)
    }

    /// How many of the latest samples to keep, or `None` for all.
    pub(crate) fn sample_limit(&self) -> Option<usize> {
        self.limit.or(self.bars.is_empty().then_some(SYNTHETIC_LIMIT))
    }

    /// What depends on more than one argument.
    fn checked(self) -> Result<Self, clap::Error> {
        if self.micro_batch() > self.batch {
            let message = format!(
                "--micro-batch {} is more than --batch {}: give at most the batch",
                self.micro_batch(),
                self.batch
            );
            return Err(Self::command().error(ErrorKind::ValueValidation, message));
        }
        Ok(self)
    }
}

/// Whole numbers from 1 to `most`, such that products of two fit a machine word.
fn up_to(most: u32) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(most))
}

/// [`up_to`], or 0 for none.
fn zero_up_to(most: u32) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(0..=u64::from(most))
}

fn above_zero(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("give a finite number above zero".to_owned()),
    }
}

fn zero_or_above(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("give a finite number, at least zero".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(std::iter::once("crossasset").chain(line.split_whitespace())).and_then(Args::checked)
    }

    #[test]
    fn the_command_is_well_formed_and_its_help_tells_the_limit() {
        Args::command().debug_assert();
        let help = Args::command().render_long_help().to_string();
        assert!(help.contains(&format!("{SYNTHETIC_LIMIT} of a synthetic market")), "{help}");
    }

    #[test]
    fn the_version_names_the_kernels_that_are_built_in() {
        let version = Args::command().render_long_version();
        let kernels: Vec<&str> = version.lines().filter_map(|line| line.strip_prefix("PTX ")).collect();
        if cfg!(feature = "cuda") {
            let is_whole = |line: &&&str| {
                let build = line.strip_prefix("sm_").and_then(|build| build.split_once(" by "));
                build.is_some_and(|(ptx, by)| {
                    by == "rustc" && ptx.split_once(' ').is_some_and(|(_, sha)| sha.len() == 64)
                })
            };
            assert!(kernels.iter().filter(is_whole).count() == kernels.len() && !kernels.is_empty(), "{version}");
        } else {
            assert_eq!(kernels, ["none: built without feature `cuda`"]);
        }
    }

    #[test]
    fn nothing_given_means_the_documented_defaults() {
        let args = parse("").unwrap();
        assert!(args.bars.is_empty() && args.trace.is_none() && args.resume.is_none());
        assert_eq!(args.device, DeviceChoice::Auto);
        assert_eq!((args.epochs, args.folds, args.batch, args.micro_batch()), (1, 2, 256, 256));
        assert_eq!((args.seed, args.arena_mib, args.overflow_mib, args.horizon), (7, 1024, 0, 15));
        assert_eq!((args.learning_rate, args.weight_decay, args.clip), (3e-4, 0.01, 1.0));
        assert_eq!((args.capture, args.log, args.precision), (Switch::On, Log::Text, Precision::Ieee));
        assert_eq!(args.stored, StoredAs::F32);
        assert_eq!(args.out, PathBuf::from("target/crossasset"));
        assert_eq!(args.sample_limit(), Some(SYNTHETIC_LIMIT));
    }

    #[test]
    fn reads_every_argument() {
        let args = parse(
            "--bars a.csv --bars b.csv --device cuda --epochs 3 --folds 4 --batch 32 --micro-batch 1 --limit 99 \
             --seed 0 --arena-mib 64 --overflow-mib 4096 --learning-rate 1e-3 --weight-decay 0 --clip 0.5 --horizon 5 --out o \
             --memory m --checkpoint-every 3 --log json --resume r",
        )
        .unwrap();
        assert_eq!(args.bars, [PathBuf::from("a.csv"), PathBuf::from("b.csv")]);
        assert_eq!((args.device, args.micro_batch(), args.sample_limit()), (DeviceChoice::Cuda, 1, Some(99)));
        assert_eq!((args.arena_mib, args.overflow_mib, args.checkpoint_every), (64, 4096, Some(3)));
        assert_eq!(args.log, Log::Json);
        assert_eq!(parse("--precision tf32").unwrap().precision, Precision::Tf32);
        assert_eq!(parse("--stored bf16").unwrap().stored, StoredAs::Bf16);
        assert_eq!(parse("--bars a.csv").unwrap().sample_limit(), None);
    }

    #[test]
    fn wrong_values_end_with_code_2_and_name_the_argument() {
        for (line, told) in [
            ("--batch 0", "--batch"),
            ("--batch -1", "-1"),
            ("--epochs 0", "--epochs"),
            ("--folds none", "--folds"),
            ("--micro-batch 0", "--micro-batch"),
            ("--micro-batch 257", "--micro-batch 257 is more than --batch 256"),
            ("--batch 8 --micro-batch 9", "--micro-batch 9 is more than --batch 8"),
            ("--limit 0", "--limit"),
            ("--seed -1", "-1"),
            ("--arena-mib 0", "--arena-mib"),
            ("--overflow-mib -1", "-1"),
            ("--overflow-mib 4294967296", "--overflow-mib"),
            ("--learning-rate NaN", "give a finite number above zero"),
            ("--learning-rate 0", "--learning-rate"),
            ("--learning-rate inf", "--learning-rate"),
            ("--weight-decay NaN", "give a finite number, at least zero"),
            ("--weight-decay=-0.1", "--weight-decay"),
            ("--precision fp8", "ieee, tf32 or bf16"),
            ("--stored fp8", "f32, bf16"),
            ("--clip 0", "--clip"),
            ("--clip nan", "--clip"),
            ("--horizon 0", "--horizon"),
            ("--checkpoint-every 0", "--checkpoint-every"),
            ("--trace t --resume r", "--resume"),
            ("--device gpu", "emulated"),
            ("extra.csv", "extra.csv"),
        ] {
            let error = parse(line).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}");
            assert!(error.to_string().contains(told), "{line}: {error}");
        }
    }
}
