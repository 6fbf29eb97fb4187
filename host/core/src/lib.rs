//! Everything that one GPU needs: devices, arenas, steps, tensors, the tape, parameters, ops and
//! captured steps.
//!
//! Programs depend on `stepscope`, which re-exports this crate. [`internals`] has what only the
//! other crates of the workspace use. Invariant: nothing here depends on training, on groups or on
//! checks.

#![deny(unsafe_op_in_unsafe_fn)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod arena;
#[cfg(feature = "ndarray")]
mod arrays;
mod buffer;
mod capture;
mod copies;
mod deadline;
mod device;
mod digest;
#[cfg(feature = "dlpack")]
mod dlpack;
mod elementary;
mod error;
mod files;
mod generator;
mod host_matrix;
mod host_memory;
mod indices;
mod initializer;
pub mod internals;
mod launch;
#[cfg(test)]
mod module_order;
mod non_finite;
pub mod ops;
mod params;
mod precision;
mod preconditions;
mod processors;
mod ptx;
mod random;
mod report;
mod step;
mod tape;
mod tensor;
mod upload;

pub use buffer::{AnyBuffer, Buffer};
pub use capture::{CaptureInputs, CaptureReport, Captured, DeviceBatch, HostInputs, InputKey, Output, Record, Replay};
pub use cuda_std::launch as kernel;
pub use tape::{AnyVar, Backward, Op, RecomputeInput, Tape, Var};
/// Core macros under a fixed path, so that [`kernels!`] works whatever names its caller shadows.
#[doc(hidden)]
pub mod of_core {
    pub use core::{concat, env, include};
}
pub use arena::{Arena, ArenaBuilder, Capacity, Event, Growth, Kind, Measured, Origin, Overflow};
pub use device::{DEFAULT_DEADLINE, Description, Device, DeviceBuilder, DeviceKind, SelfTest};
pub use device::{Kernels, MatrixInstruction, PageLocked, ptx_builds};
pub use error::disagreement::{DifferentSetting, Disagreement, ValueOnRanks};
pub use error::rank_fault::{LastHeard, RankFault, RankFaultKind, RendezvousFault, RendezvousFaultKind};
pub use error::{Error, Quantity, Resource, Result, SystemError};
pub use files::{FileKind, PlainFile, replace_file};
pub use half::bf16;
pub use host_memory::{AdmissionError, CgroupMemory, MemInfo, MemoryBudget};
pub use host_memory::{HostMemory, MemoryForecast, MemoryShortage, ProcessMemory};
pub use indices::{IndexSource, Indices, OnDevice};
pub use initializer::Initializer;
pub use non_finite::NonFinite;
pub use params::{
    FrozenType, GradientConsumer, GradientType, Gradients, LentMasters, LentState, MasterType, MatrixWeights,
    Nf4Matrix, Parameter, ParameterEntry, ParameterSpec, ParameterSpecBuilder, Parameters, RegionContents,
    StackedParameters, StateType, WriteRegion,
};
pub use preconditions::IndexBound;
pub use ptx::{PtxBuild, PtxCompiler};
pub use random::SplitMix64;
pub use report::{ArenaReport, Cause, Count, Largest, OverflowReport, Phase, Site, SystemMemory};
pub use step::{EagerStep, PhaseGuard, ScratchStep, Step};
pub use tensor::{Element, Lent, LentMut, Saved, Shape, Source, Stored, Target, Tensor};
pub use upload::{Progress, Transfer};
