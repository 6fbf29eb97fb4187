//! The command line. A wrong value ends the program with exit code 2 and an explanation, before any
//! work is done.

use std::path::PathBuf;
use std::sync::LazyLock;

use clap::builder::{PossibleValue, RangedU64ValueParser};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use stepscope::ops::Precision;

use stepscope_cli::program::log::Log;
use stepscope_cli::program::ranks::RankArgs;
use stepscope_cli::program::stored_as::StoredAs;

/// The default limit of samples for the synthetic market: enough to see training progress within
/// one or two minutes.
pub(crate) const SYNTHETIC_LIMIT: usize = 2048;

/// The version, and per architecture the SHA-256 of the kernels' PTX and its compiler. Two builds
/// with the same digests run the same kernels.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let builds = stepscope::device::ptx_builds();
    let lines: String = builds.iter().map(|build| format!("\nPTX {build}")).collect();
    let lines = if builds.is_empty() { "\nPTX none: built without feature `cuda`".into() } else { lines };
    format!("{}{lines}", env!("CARGO_PKG_VERSION"))
});

/// Trains CrossAsset, a transformer over 12 time scales that predicts whether a price will fall,
/// stay or rise. Writes report.json and model.safetensors.
#[derive(Clone, Debug, Parser)]
#[command(name = "crossasset", version, long_version = VERSION.as_str())]
pub(crate) struct Args {
    /// One-minute bars of one asset, with columns open_time or timestamp, open, high, low, close,
    /// volume; repeat the option for several assets. Bars of another interval are accepted if all
    /// have the same. Times are written like 2023-03-01
    /// 00:00:00+00:00 (UTC without an offset), or as numbers since 1970 in one unit, in the years
    /// 1980 to 2100 [default: a synthetic market]
    #[arg(long, value_name = "FILE.csv")]
    pub(crate) bars: Vec<PathBuf>,

    /// Device to train on
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub(crate) device: DeviceChoice,

    /// Passes over the training part of each fold
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = up_to(u32::MAX))]
    pub(crate) epochs: usize,

    /// Walk-forward folds
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = up_to(u32::MAX))]
    pub(crate) folds: usize,

    /// Samples per update of the weights
    #[arg(long, value_name = "SAMPLES", default_value_t = 256, value_parser = up_to(u32::MAX))]
    pub(crate) batch: usize,

    /// Samples per step scope; the gradients of a batch's steps are summed [default: the whole
    /// batch]
    #[arg(long, value_name = "SAMPLES", value_parser = up_to(u32::MAX))]
    pub(crate) micro_batch: Option<usize>,

    #[command(flatten)]
    pub(crate) ranks: RankArgs,

    /// Keep only the latest samples [default: all; 2048 of a synthetic market]
    #[arg(long, value_name = "SAMPLES", value_parser = up_to(u32::MAX))]
    pub(crate) limit: Option<usize>,

    /// Seed of the initial weights, the order of the samples, and the synthetic market
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,

    /// Size of the step arena, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = up_to(u32::MAX))]
    pub(crate) arena_mib: usize,

    /// Size, in MiB, of the pool for allocations that do not fit the arena; 0: such a step fails
    /// with an explanation
    #[arg(long, value_name = "MIB", default_value_t = 0, value_parser = zero_up_to(u32::MAX))]
    pub(crate) overflow_mib: usize,

    /// Stop before an update, with a checkpoint and exit code 75, when the host has less available
    /// memory than this; 0: never [default: where CPU and GPU share memory, half of what admission
    /// control leaves to other processes]
    #[arg(long, value_name = "MIB", value_parser = zero_up_to(u32::MAX))]
    pub(crate) memory_floor_mib: Option<usize>,

    /// Replay each step as one recorded graph; off: launch each kernel separately, which allows
    /// overflow
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(crate) capture: Switch,

    /// Rounding of the operands of training's matrix multiplies of f32; tf32 is faster on a GPU,
    /// but less exact
    #[arg(long, value_name = "f32|tf32", default_value_t = Precision::F32)]
    pub(crate) precision: Precision,

    /// Element type in memory of activations and of the operands of matrix multiplies; bf16 halves
    /// the bytes; weights stay f32
    #[arg(long, value_enum, default_value_t = StoredAs::F32)]
    pub(crate) stored: StoredAs,

    /// Learning rate of AdamW
    #[arg(long, value_name = "RATE", default_value_t = 3e-4, value_parser = above_zero)]
    pub(crate) learning_rate: f32,

    /// Decoupled weight decay of AdamW
    #[arg(long, value_name = "RATE", default_value_t = 0.01, value_parser = zero_or_above)]
    pub(crate) weight_decay: f32,

    /// Largest L2 norm of all gradients together; larger gradients are scaled down to it
    #[arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = above_zero)]
    pub(crate) clip: f32,

    /// Number of bars ahead over which a sample's label is computed
    #[arg(long, value_name = "BARS", default_value_t = 15, value_parser = up_to(100_000))]
    pub(crate) horizon: usize,

    /// Folder for the results; created if missing
    #[arg(long, value_name = "DIR", default_value = "target/crossasset")]
    pub(crate) out: PathBuf,

    /// Write the inputs, losses, gradients and weights of the first three updates to this
    /// safetensors file; for tests/oracle
    #[arg(long, value_name = "FILE", conflicts_with_all = ["resume", "ranks", "shards"])]
    pub(crate) trace: Option<PathBuf>,

    /// Write the memory events of the first batch to this file, as a PyTorch memory snapshot
    #[arg(long, value_name = "FILE", conflicts_with = "ranks")]
    pub(crate) memory: Option<PathBuf>,

    /// Also write the checkpoint every this many updates of an epoch [default: only at the end of
    /// each epoch, and at Ctrl-C, SIGTERM or SIGHUP]
    #[arg(long, value_name = "UPDATES", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) checkpoint_every: Option<u64>,

    /// Log format on standard error during training
    #[arg(long, value_enum, default_value_t = Log::Text)]
    pub(crate) log: Log,

    /// Continue from this checkpoint, with the same bars and settings
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,

    /// Replace the results of an earlier run in --out. Files that no run has written are never
    /// replaced
    #[arg(long)]
    pub(crate) overwrite: bool,
}

/// A switch of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// Enabled
    On,
    /// Disabled
    Off,
}

/// The device to train on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The GPU if there is one, else the emulator.
    Auto,
    /// The emulator, which runs the same kernels on the CPU.
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
            Self::Auto => PossibleValue::new("auto").help("The GPU if there is one, else the emulator"),
            Self::Emulated => PossibleValue::new("emulated").help("The same kernels on the CPU"),
            Self::Cuda => PossibleValue::new("cuda").help("The NVIDIA GPU"),
        })
    }
}

impl Args {
    /// Parses the program's arguments. Ends the program if they are wrong (exit code 2) or ask for
    /// help (exit code 0).
    pub(crate) fn from_command_line() -> Self {
        Self::try_parse().and_then(Self::checked).unwrap_or_else(|error| error.exit())
    }

    /// Returns the samples per step scope.
    pub(crate) fn micro_batch(&self) -> usize {
        self.micro_batch.unwrap_or(self.batch)
    }

    /// Returns the number of latest samples to keep, or `None` for all.
    pub(crate) fn sample_limit(&self) -> Option<usize> {
        self.limit.or(self.bars.is_empty().then_some(SYNTHETIC_LIMIT))
    }

    /// Checks rules that concern more than one argument.
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

/// Parses a whole number from 1 to `most`. Products of two such numbers fit a machine word.
fn up_to(most: u32) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(most))
}

/// Parses a whole number like [`up_to`], or 0.
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
    fn help_states_the_limit() {
        Args::command().debug_assert();
        let help = Args::command().render_long_help().to_string();
        assert!(help.contains(&format!("{SYNTHETIC_LIMIT} of a synthetic market")), "{help}");
    }

    #[test]
    fn version_names_the_kernels() {
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
        assert_eq!((args.capture, args.log, args.precision), (Switch::On, Log::Text, Precision::F32));
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
    fn wrong_values_name_the_argument() {
        for (line, expected) in [
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
            ("--precision fp8", "f32 or tf32"),
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
            assert!(error.to_string().contains(expected), "{line}: {error}");
        }
    }
}
