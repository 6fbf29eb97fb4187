//! Everything that one GPU needs: devices, arenas, steps, tensors, the tape, parameters, ops and
//! captured steps.
//!
//! Programs depend on `stepscope`, which re-exports this crate. The modules are public for the
//! other crates of the workspace and hidden from the documentation. Invariant: nothing here depends
//! on training, on groups or on checks.

#![deny(unsafe_op_in_unsafe_fn)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[doc(hidden)]
pub mod arena;
#[cfg(feature = "ndarray")]
mod arrays;
#[doc(hidden)]
pub mod buffer;
#[doc(hidden)]
pub mod capture;
#[doc(hidden)]
pub mod copies;
#[doc(hidden)]
pub mod deadline;
#[doc(hidden)]
pub mod device;
#[doc(hidden)]
pub mod digest;
#[cfg(feature = "dlpack")]
mod dlpack;
mod elementary;
#[doc(hidden)]
pub mod error;
#[doc(hidden)]
pub mod files;
mod generator;
#[doc(hidden)]
pub mod host_matrix;
#[doc(hidden)]
pub mod host_memory;
#[doc(hidden)]
pub mod indices;
#[doc(hidden)]
pub mod initializer;
mod launch;
#[cfg(test)]
mod module_order;
#[doc(hidden)]
pub mod non_finite;
pub mod ops;
#[doc(hidden)]
pub mod params;
#[doc(hidden)]
pub mod precision;
mod preconditions;
#[doc(hidden)]
pub mod processors;
mod ptx;
#[doc(hidden)]
pub mod random;
mod report;
#[doc(hidden)]
pub mod step;
#[doc(hidden)]
pub mod tape;
#[doc(hidden)]
pub mod tensor;
#[doc(hidden)]
pub mod upload;

pub use buffer::Buffer;
pub use capture::{CaptureInputs, CaptureReport, Captured, DeviceBatch, HostInputs, Output, Record, Replay};
pub use cuda_std::launch as kernel;
pub use tape::{AnyVar, Backward, Op, RecomputeInput, Tape, Var};
/// Core macros under a fixed path, so that [`kernels!`] works whatever names its caller shadows.
#[doc(hidden)]
pub mod of_core {
    pub use core::{concat, env, include};
}
pub use arena::{Arena, ArenaBuilder, Capacity, Event, Growth, Kind, Measured, Origin, Overflow};
/// One kernel launch, as [`Arena::launches`] lists it.
#[doc(hidden)]
pub use device::Launch;
pub use device::{DEFAULT_DEADLINE, Description, Device, DeviceBuilder, DeviceKind, SelfTest};
pub use device::{Kernels, MatrixInstruction, PageLocked, ptx_builds};
pub use error::disagreement::{DifferentSetting, Disagreement, ValueOnRanks};
pub use error::rank_fault::{LastHeard, RankFault, RankFaultKind, RendezvousFault, RendezvousFaultKind};
pub use error::{Error, Quantity, Resource, Result, SystemError};
#[doc(hidden)]
pub use error::{disagreement, rank_fault};
pub use files::{FileKind, PlainFile, replace_file};
pub use half::bf16;
pub use host_memory::{AdmissionError, CgroupMemory, MemInfo, MemoryBudget};
pub use host_memory::{HostMemory, MemoryForecast, MemoryShortage, ProcessMemory};
pub use indices::{IndexSource, Indices, OnDevice};
pub use initializer::Initializer;
pub use non_finite::NonFinite;
pub use params::{
    FrozenType, Gradients, MatrixWeights, Nf4Matrix, Parameter, ParameterEntry, ParameterSpec, ParameterSpecBuilder,
    Parameters, StackedParameters,
};
pub use preconditions::IndexBound;
pub use ptx::{PtxBuild, PtxCompiler};
pub use random::SplitMix64;
pub use report::{ArenaReport, Cause, Count, Largest, OverflowReport, Phase, Site, SystemMemory};
pub use step::{EagerStep, ScratchStep, Step};
pub use tensor::{Element, Lent, LentMut, Saved, Shape, Source, Stored, Target, Tensor};
pub use upload::{Progress, Transfer};
