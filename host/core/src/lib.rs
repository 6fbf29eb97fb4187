//! Everything that one GPU needs: devices, arenas, steps, tensors, the tape, parameters, ops and
//! captured steps.
//!
//! Programs depend on `stepscope`, which re-exports this crate. The modules are public for the
//! other crates of the workspace and hidden from the documentation. Invariant: nothing here depends
//! on training, on groups or on checks.

#![deny(unsafe_op_in_unsafe_fn)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod admission;
#[doc(hidden)]
pub mod arena;
#[cfg(feature = "ndarray")]
mod arrays;
#[doc(hidden)]
pub mod capture;
mod cgroup;
#[doc(hidden)]
pub mod copies;
#[doc(hidden)]
pub mod deadline;
#[doc(hidden)]
pub mod device;
#[doc(hidden)]
pub mod digest;
#[doc(hidden)]
pub mod disagreement;
#[cfg(feature = "dlpack")]
mod dlpack;
#[doc(hidden)]
pub mod error;
#[doc(hidden)]
pub mod file_kind;
#[doc(hidden)]
pub mod files;
#[doc(hidden)]
pub mod indices;
#[doc(hidden)]
pub mod initializer;
mod launch;
#[doc(hidden)]
pub mod non_finite;
pub mod ops;
#[doc(hidden)]
pub mod params;
#[doc(hidden)]
pub mod precision;
mod processors;
mod ptx;
#[doc(hidden)]
pub mod random;
#[doc(hidden)]
pub mod rank_fault;
#[doc(hidden)]
pub mod report;
#[doc(hidden)]
pub mod shortage;
#[doc(hidden)]
pub mod step;
#[doc(hidden)]
pub mod tape;
#[doc(hidden)]
pub mod tensor;
#[doc(hidden)]
pub mod upload;

pub use admission::{AdmissionError, MemInfo, MemoryBudget};
pub use capture::{CaptureInputs, CaptureReport, Captured, DeviceBatch, HostInputs, Output, Record, Replay};
pub use cgroup::CgroupMemory;
pub use cuda_std::launch as kernel;
pub use tape::{AnyVar, Backward, Op, RecomputeInput, Tape, Var};
/// Core macros under a fixed path, so that [`kernels!`] works whatever names its caller shadows.
#[doc(hidden)]
pub mod of_core {
    pub use core::{concat, env, include};
}
pub use arena::{Arena, ArenaBuilder, Buffer, Capacity, Event, Growth, Kind, Measured, Origin, Overflow, PageLocked};
/// One kernel launch, as [`Arena::launches`] lists it.
#[doc(hidden)]
pub use device::Launch;
pub use device::{DEFAULT_DEADLINE, Description, Device, DeviceBuilder, DeviceKind, Kernels, SelfTest, ptx_builds};
pub use disagreement::{DifferentSetting, Disagreement, ValueOnRanks};
pub use error::{Error, Quantity, Resource, Result, SystemError};
pub use file_kind::FileKind;
pub use files::{PlainFile, replace_file};
pub use half::bf16;
pub use indices::{IndexBound, IndexSource, Indices, OnDevice};
pub use initializer::Initializer;
pub use non_finite::NonFinite;
pub use params::{
    Gradients, Parameter, ParameterEntry, ParameterSpec, ParameterSpecBuilder, Parameters, StackedParameters,
};
pub use ptx::{PtxBuild, PtxCompiler};
pub use random::SplitMix64;
pub use rank_fault::{LastHeard, RankFault, RankFaultKind, RendezvousFault, RendezvousFaultKind};
pub use report::{ArenaReport, Cause, Count, Largest, OverflowReport, Phase, Site, SystemMemory};
pub use shortage::{HostMemory, MemoryForecast, MemoryShortage, ProcessMemory};
pub use step::{EagerStep, ScratchStep, Step};
pub use tensor::{Element, Lent, LentMut, Saved, Shape, Source, Stored, Target, Tensor};
pub use upload::{Progress, Transfer};
