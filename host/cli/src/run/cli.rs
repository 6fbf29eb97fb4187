//! The options that `train` and `finetune` share, and the state and trainer that follow from them.

use clap::Args;
use stepscope::device::MatrixInstruction;
use stepscope::ops::Activation;
use stepscope::{Arena, Device, DeviceKind, HostBatch, ParameterSpec, Result, TrainState, Trainer};

use crate::program::ranks::RankArgs;
use crate::run::rule::Rule;
use crate::train::bad_input::{Outcome, bad};
use crate::train::cli::{Precision, bytes, up_to};
use crate::train::model::{Gpt, TrainingMemory};

/// The options of a training run.
#[derive(Clone, Debug, Args)]
pub(crate) struct RunArgs {
    /// Device to train on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    pub(crate) device: DeviceKind,

    /// Instruction of matrix multiplies and attention on tensor cores [default: the fastest that
    /// the GPU has]
    #[arg(long, value_name = "mma-sync|wgmma")]
    pub(crate) matrix_instruction: Option<MatrixInstruction>,

    /// Numbers in matrix multiplies; tf32 rounds the operands, bf16 stores activations and a copy
    /// of the weights in BF16
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub(crate) precision: Precision,

    /// Memory of weights, moments and gradients, which round differently: small stores a weight as
    /// a BF16, which products read, and a correction of 8 bits, and each moment in 8 bits; smallest
    /// also stores gradients in BF16; released stores none, and clips each parameter by its own
    /// norm
    #[arg(long, value_enum, default_value_t = TrainingMemory::Full)]
    pub(crate) memory: TrainingMemory,

    /// Steps per update, over all ranks together; their gradients are summed [default: the number
    /// of shards]
    #[arg(long, value_name = "STEPS", value_parser = up_to(1 << 20))]
    pub(crate) accumulate: Option<usize>,

    #[command(flatten)]
    pub(crate) ranks: RankArgs,

    /// Keep only the inputs of the model's blocks and recompute the rest in the backward pass: less
    /// memory, the same bits
    #[arg(long)]
    pub(crate) recompute: bool,

    /// Launch each kernel separately instead of replaying one graph per step: the same bits
    #[arg(long)]
    pub(crate) eager: bool,

    /// Also write the checkpoint every this many updates [default: only at the end, and at Ctrl-C,
    /// SIGTERM or SIGHUP]
    #[arg(long, value_name = "UPDATES", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) checkpoint_every: Option<u64>,

    /// Replace the results of an earlier run in --out. Files that no run has written are never
    /// replaced
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Split the transformers weights into files of at most this size, such as 5GB, with an index,
    /// as save_pretrained does [default: one file]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) max_shard_size: Option<u64>,

    /// Seed of new weights, the order of the training samples, and the generated sample
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,

    /// Memory for the steps, in MiB [default: the measured need]
    #[arg(long, value_name = "MIB", value_parser = up_to(1 << 24))]
    pub(crate) arena_mib: Option<usize>,
}

impl RunArgs {
    /// Returns the steps per update, for batches cut into this many shards.
    pub(crate) fn accumulate(&self, shards: usize) -> Outcome<usize> {
        let accumulate = self.accumulate.unwrap_or(shards);
        if accumulate < shards {
            let reason = format!(
                "{accumulate} steps are fewer than {shards} shards: give --accumulate {shards} or more, or leave it out"
            );
            return Err(bad("--accumulate", reason));
        }
        if accumulate > 1 && self.memory == TrainingMemory::Released {
            let reason = "--memory released updates each parameter in the backward pass of the only step of an update: \
                          leave --accumulate and --shards out, or give --memory smallest";
            return Err(bad("--accumulate", reason));
        }
        Ok(accumulate)
    }

    /// Creates the state of a run: new weights, and the optimizer with the model's groups.
    pub(crate) fn state<S: Activation>(
        &self,
        device: &Device,
        model: Gpt<S>,
        spec: &ParameterSpec,
        rule: Rule,
    ) -> Result<TrainState<Gpt<S>, Rule>> {
        let groups = model.groups(spec);
        let state = TrainState::new(device, model, spec, self.seed, rule)?.with_parameter_groups(&groups)?;
        Ok(state.with_precision(self.precision.of_f32()))
    }

    /// Creates a trainer that replays each step as one graph, or launches each kernel with
    /// `--eager`. `largest` is the largest step; its values are not read.
    pub(crate) fn trainer<'a, S: Activation>(
        &self,
        arena: &'a mut Arena,
        state: TrainState<Gpt<S>, Rule>,
        largest: &impl HostBatch,
    ) -> Result<Trainer<'a, Gpt<S>, Rule>> {
        match self.eager {
            true => Ok(Trainer::eager(arena, state)),
            false => Trainer::captured(arena, state, largest),
        }
    }
}
