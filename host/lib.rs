//! A training runtime for NVIDIA GPUs, with a CPU emulator that runs the same kernels.
//!
//! A [`Device`] computes everything in a [`Step`]. The tensors of a step live in an [`Arena`], and
//! the compiler rejects programs that use them after the step has ended:
//!
//! ```
//! use stepscope::prelude::*;
//!
//! # fn main() -> Result<()> {
//! let device = Device::open(DeviceKind::Emulated)?; // or Cuda, with feature `cuda`
//! let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
//! let shares = arena.step(|step| {
//!     let x = step.upload(&[1.0, 1.0, 3.0, 3.0], [2, 2])?;
//!     step.read(&stepscope::ops::softmax(step, &x)?)
//! })?;
//! assert_eq!(shares, [0.5; 4]);
//! # Ok(())
//! # }
//! ```
//!
//! To train, declare [`Parameters`] by a [`ParameterSpec`], build a [`Model`] of layers ([`nn`]) or
//! of ops on a [`Tape`], and give a [`TrainState`] to a [`Trainer`]. The repository's
//! `docs/guide.md` explains each part with complete programs.

#![forbid(unsafe_code)]

/// The programs of the README and the guide, which run as tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../docs/guide.md")]
    mod guide {}
}

/// The list of the root and of [`prelude`].
mod common {
    pub use stepscope_core::{
        Arena, Buffer, Capacity, Device, DeviceBatch, DeviceKind, EagerStep, Error, Gradients, HostInputs, Parameter,
        ParameterSpec, Parameters, Result, Step, Tape, Tensor, Var, bf16,
    };
    pub use stepscope_train::{AdamW, Checkpoint, EpochProgress, HostBatch, Model, Optimizer, TrainState, Trainer};
}
pub use common::*;

/// The names that nearly every program needs, and the modules of layers, ops, optimizers and data.
/// They are also at the root of the crate.
///
/// ```
/// use stepscope::prelude::*;
///
/// let config = ops::LmHeadConfig::default();
/// # let _ = config;
/// ```
pub mod prelude {
    #[doc(no_inline)]
    pub use super::common::*;
    #[doc(no_inline)]
    pub use super::{data, nn, ops, optim};
}

#[doc(inline)]
pub use stepscope_core::{kernels, ops};
#[doc(inline)]
pub use stepscope_models as models;
#[doc(inline)]
pub use stepscope_train::nn;

/// Own ops of the [`Tape`], with their backward, and the inputs of recompute.
pub mod autograd {
    pub use stepscope_core::{AnyVar, Backward, Op, RecomputeInput};
}

/// Steps that are recorded once and replayed, on a GPU as one CUDA graph.
pub mod capture {
    pub use stepscope_core::{CaptureInputs, CaptureReport, Captured, InputKey, Output, Record, Replay};
}

/// Checks: gradients against finite differences, kernels against committed digests, injected
/// faults, and recordings of an arena's memory.
#[cfg(feature = "check")]
pub mod check {
    #[cfg(feature = "nvtx")]
    pub use stepscope_check::NvtxLayer;
    pub use stepscope_check::{GradCheck, MemoryRecorder, Recording, faults, late, matrix_rule, same_bits};
}

/// Training data: windows of a text, background loading, sampled tokens and seeded random numbers.
pub mod data {
    pub use stepscope_core::SplitMix64;
    pub use stepscope_train::{Loader, TokenSampler, TokenSamplerConfig, Windows, penalize_repetition};
}

/// Settings and properties of a [`Device`], and the kernels that it loads.
pub mod device {
    pub use stepscope_core::{
        DEFAULT_DEADLINE, Description, DeviceBuilder, Kernels, MatrixInstruction, PtxBuild, PtxCompiler, SelfTest,
        ptx_builds,
    };
}

/// The parts of an [`Error`]. A group's faults are in [`group`].
pub mod error {
    pub use stepscope_core::{Quantity, Resource, SystemError};
}

/// Files of weights, the lock of a run's folder, and reads and writes of whole files.
pub mod files {
    pub use stepscope_core::{FileKind, PlainFile, replace_file};
    pub use stepscope_train::{
        FileType, NewTensor, RunLock, StateDict, TensorFiles, load_state_dict, save_state_dict, save_state_dict_as,
        save_tensors,
    };
}

/// Ranks that train one model together (feature `group`), and their faults.
pub mod group {
    pub use stepscope_core::{
        DifferentSetting, Disagreement, LastHeard, RankFault, RankFaultKind, RendezvousFault, RendezvousFaultKind,
        ValueOnRanks,
    };
    #[cfg(feature = "group")]
    pub use stepscope_group::{Group, GroupConfig};
}

/// The host's side of a launch: a kernel's typed arguments and its contract, which checks every
/// length and chooses the grid.
pub mod kernel {
    pub use stepscope_core::kernel::{
        Argument, Arguments, Contract, Entry, Extent, Grid, Kernel, PackedMap, Pod, Pointer, PointerMut, Size, Slice,
        TensorMap, Threads, Versions, Violation, Words, entries,
    };
}

/// Settings and events of an [`Arena`], pinned memory, and the memory of the machine.
pub mod memory {
    pub use stepscope_core::{
        AdmissionError, ArenaBuilder, CgroupMemory, Event, Growth, HostMemory, Kind, Measured, MemInfo, MemoryBudget,
        MemoryForecast, MemoryShortage, Origin, Overflow, PageLocked, ProcessMemory,
    };
}

/// Settings of optimizers, the optimizers SGD and Muon, and own update rules.
pub mod optim {
    pub use stepscope_train::{
        Decay, Muon, ParameterGroup, ParameterGroups, Schedule, Sgd, SmallUpdateArguments, UpdateArguments, UpdateRule,
        UpdateTicket, WholeParameter,
    };
}

/// Entries of a [`ParameterSpec`] and their initial values.
pub mod parameters {
    pub use stepscope_core::{
        AnyBuffer, FrozenType, GradientConsumer, GradientType, Initializer, LentMasters, LentState, MasterType,
        MatrixWeights, Nf4Matrix, ParameterEntry, ParameterSpecBuilder, RegionContents, StackedParameters, StateType,
        WriteRegion,
    };
}

/// The report of an [`Arena`]: its memory by phase and by source line.
pub mod report {
    pub use stepscope_core::{ArenaReport, Cause, Count, Largest, OverflowReport, Phase, Site, SystemMemory};
}

/// Elements, shapes and indices of a [`Tensor`], the sources and targets of a kernel, and tensors
/// that a step lends or keeps.
pub mod tensor {
    pub use stepscope_core::{
        Element, IndexBound, IndexSource, Indices, Lent, LentMut, OnDevice, Saved, ScratchStep, Shape, Source, Stored,
        Target,
    };
}

/// Events and results of a [`Trainer`].
pub mod train {
    #[cfg(feature = "progress")]
    pub use stepscope_train::ProgressBar;
    pub use stepscope_train::{Ended, HostArray, IntoBatch, MOST_FIGURES, Observer, Sample, StepMemory, Update};
}

/// Options of an upload: deadline, progress, and non-finite values.
pub mod upload {
    pub use stepscope_core::{NonFinite, Progress, Transfer};
}

/// Compile-time checks of which types cross threads and which are cloneable. Everything that
/// belongs to a step stays on one thread: the stream gives its order, and the scope its lifetime.
#[cfg(test)]
mod threads {
    use super::capture::{CaptureInputs, Captured, Output, Replay};
    use super::check::{Recording, faults};
    use super::data::{Loader, Windows};
    use super::optim::{ParameterGroups, Sgd, UpdateArguments, UpdateTicket};
    use super::report::ArenaReport;
    use super::tensor::{Lent, LentMut, Saved, ScratchStep};
    use super::*;
    use static_assertions::{assert_impl_all, assert_not_impl_any};

    // Types that outlive steps may move to another thread. Types that only read may also be shared.
    assert_impl_all!(Device: Send, Sync, Clone);
    assert_impl_all!(Buffer<f32>: Send, Sync);
    assert_impl_all!(Parameters: Send, Sync);
    assert_impl_all!(Gradients: Send, Sync);
    assert_impl_all!(Optimizer<AdamW>: Send, Sync);
    assert_impl_all!(Optimizer<Sgd>: Send, Sync);
    assert_impl_all!(ParameterGroups: Send, Sync);
    assert_impl_all!(ParameterSpec: Send, Sync, Clone);
    assert_impl_all!(Checkpoint: Send, Sync);
    assert_impl_all!(Recording: Send, Sync);
    assert_impl_all!(ArenaReport: Send, Sync, Clone);
    assert_impl_all!(faults::FaultPlan: Send, Sync, Clone);
    assert_impl_all!(Error: Send, Sync);
    assert_impl_all!(Loader<Vec<f32>>: Send);
    assert_impl_all!(Windows: Send, Sync, Clone);
    // Types that own memory have one owner.
    assert_not_impl_any!(Buffer<f32>: Clone);
    assert_not_impl_any!(Parameters: Clone);
    assert_not_impl_any!(Gradients: Clone);
    assert_not_impl_any!(Optimizer<AdamW>: Clone);
    assert_not_impl_any!(Optimizer<Sgd>: Clone);
    // An update is applied once.
    assert_not_impl_any!(UpdateTicket: Clone);
    assert_impl_all!(Arena: Send);
    assert_not_impl_any!(Arena: Sync, Clone);

    // Types that belong to a step stay on its thread.
    assert_not_impl_any!(Step<'static>: Send, Sync, Clone);
    assert_not_impl_any!(EagerStep<'static>: Send, Sync, Clone);
    assert_not_impl_any!(ScratchStep<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(Tensor<'static>: Send, Sync, Clone);
    assert_not_impl_any!(Saved<'static>: Send, Sync);
    assert_not_impl_any!(Lent<'static, 'static>: Send, Sync);
    assert_not_impl_any!(LentMut<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(UpdateArguments<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(Tape<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(Var<'static>: Send, Sync);

    // Launch arguments stay on that thread too, and so does every kernel that names memory.
    assert_not_impl_any!(kernel::Slice<'static, f32>: Send, Sync);
    assert_not_impl_any!(kernel::Pointer<'static, f32>: Send, Sync);
    assert_not_impl_any!(kernel::PointerMut<'static, f32>: Send, Sync, Clone);
    assert_not_impl_any!(kernels::fill::fill<'static, f32>: Send, Sync, Clone);

    // A capture may move wherever its state may. While it is recorded or replayed it stays on one
    // thread. Its inputs and the handles of its outputs are plain values.
    assert_impl_all!(Captured<(), ()>: Send);
    assert_not_impl_any!(Captured<(), ()>: Sync, Clone);
    assert_not_impl_any!(Captured<std::rc::Rc<()>, ()>: Send, Sync);
    assert_not_impl_any!(CaptureInputs<'static>: Send, Sync, Clone);
    assert_not_impl_any!(Replay<'static, ()>: Send, Sync, Clone);
    assert_impl_all!(HostInputs<'static>: Send, Sync);
    assert_impl_all!(Output: Send, Sync, Copy);
    assert_not_impl_any!(DeviceBatch<'static>: Send, Sync);
}
