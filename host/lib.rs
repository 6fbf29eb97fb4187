#![doc = include_str!("../README.md")]
#![deny(unsafe_op_in_unsafe_fn)]
// Paths are opened through `PlainFile`; tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod admission;
#[cfg(feature = "ndarray")]
mod arrays;
mod autograd;
mod capture;
mod cgroup;
mod checkpoint;
mod copies;
mod deadline;
mod digest;
#[cfg(feature = "dlpack")]
mod dlpack;
mod driver;
mod error;
mod file_kind;
mod files;
mod finite;
mod gradcheck;
mod group;
mod initializer;
mod launch;
mod loader;
mod memory;
pub mod nn;
#[cfg(feature = "nvtx")]
mod nvtx;
pub mod ops;
mod optim;
mod params;
mod precision;
mod pretrained;
mod processors;
mod ptx;
mod random;
mod report;
mod run_lock;
pub mod same_bits;
mod shortage;
mod state_dict;
mod step;
mod tensor;
mod tensors;
mod token_sampler;
mod trainer;
mod upload;
mod windows;

/// The guide, whose programs are tests.
#[cfg(any(doc, doctest))]
#[doc = include_str!("../docs/guide.md")]
pub mod guide {}

pub use admission::{MemInfo, Refusal, Situation};
pub use autograd::{AnyVar, Backward, Kept, Op, Tape, Var};
pub use capture::{Batch, CaptureReport, Captured, Inputs, Output, Record, Replay, Slots};
pub use cgroup::CgroupMemory;
pub use checkpoint::Checkpoint;
pub use cuda_std::launch as kernel;
/// What [`kernels!`] names, whatever the module that uses it calls by these names.
#[doc(hidden)]
pub mod of_core {
    pub use core::{concat, env, include};
}
/// What [`Arena::launches`] tells.
#[doc(hidden)]
pub use driver::Launch;
pub use driver::{
    DEFAULT_DEADLINE, Description, Device, DeviceBuilder, DeviceKind, Driver, Kernels, Link, Piece, Pool, SelfTest,
    Wire, faults, ptx_builds,
};
pub use error::{Error, Quantity, Result};
pub use file_kind::FileKind;
pub use files::{PlainFile, replace_file};
pub use finite::Numbers;
pub use gradcheck::GradCheck;
pub use group::{
    DifferentSetting, Disagreement, Group, GroupConfig, LastHeard, MeetingFault, MeetingFaultKind, RankFault,
    RankFaultKind, ValueOnRanks,
};
pub use half::bf16;
pub use initializer::Initializer;
pub use loader::Loader;
pub use memory::{
    Arena, ArenaBuilder, Buffer, Capacity, Event, Growth, Kind, Measured, Origin, Overflow, PageLocked, Recording,
};
#[cfg(feature = "nvtx")]
pub use nvtx::NvtxLayer;
pub use optim::{
    AdamW, AdamWConfig, Optimizer, ParameterGroup, ParameterGroups, Schedule, Sgd, SgdConfig, UpdateArguments,
    UpdateRule,
};
pub use params::{Gradients, Layout, LayoutBuilder, LayoutEntry, Parameter, Parameters, Stack};
pub use pretrained::StateDict;
pub use ptx::{PtxBuild, PtxCompiler};
pub use random::SplitMix64;
pub use report::{ArenaReport, Cause, Count, Largest, OverflowReport, Phase, Site, SystemMemory};
pub use run_lock::RunLock;
pub use shortage::{HostMemory, MemoryForecast, MemoryShortage, ProcessMemory};
pub use step::{Eager, Scratch, Step};
pub use tensor::{Element, Lent, LentMut, Saved, Shape, Source, Stored, Target, Tensor};
pub use token_sampler::{TokenSampler, TokenSamplerConfig};
#[cfg(feature = "progress")]
pub use trainer::ProgressBar;
pub use trainer::{Ended, EpochProgress, Learner, Model, Observer, Samples, Shards, Trainer, Update};
pub use upload::{Progress, Transfer};
pub use windows::Windows;

/// What must and must not cross threads, and what must not be copied. A step's things are one thread's: their order is the
/// stream's, and their life the scope's.
mod threads {
    use super::*;
    use static_assertions::{assert_impl_all, assert_not_impl_any};

    // What outlives steps may be moved to another thread; what only looks may be shared too.
    assert_impl_all!(Device: Send, Sync, Clone);
    assert_impl_all!(Buffer<f32>: Send, Sync);
    assert_impl_all!(Parameters: Send, Sync);
    assert_impl_all!(Gradients: Send, Sync);
    assert_impl_all!(AdamW: Send, Sync);
    assert_impl_all!(Sgd: Send, Sync);
    assert_impl_all!(ParameterGroups: Send, Sync);
    assert_impl_all!(Layout: Send, Sync, Clone);
    assert_impl_all!(Checkpoint: Send, Sync);
    assert_impl_all!(Recording: Send, Sync);
    assert_impl_all!(ArenaReport: Send, Sync, Clone);
    assert_impl_all!(faults::FaultPlan: Send, Sync, Clone);
    assert_impl_all!(Error: Send, Sync);
    assert_impl_all!(Loader<Vec<f32>>: Send);
    assert_impl_all!(Windows: Send, Sync, Clone);
    // What owns memory has one owner.
    assert_not_impl_any!(Buffer<f32>: Clone);
    assert_not_impl_any!(Parameters: Clone);
    assert_not_impl_any!(Gradients: Clone);
    assert_not_impl_any!(AdamW: Clone);
    assert_not_impl_any!(Sgd: Clone);
    assert_impl_all!(Arena: Send);
    assert_not_impl_any!(Arena: Sync, Clone);

    // What belongs to a step stays on its thread.
    assert_not_impl_any!(Step<'static>: Send, Sync, Clone);
    assert_not_impl_any!(Eager<'static>: Send, Sync, Clone);
    assert_not_impl_any!(Scratch<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(Tensor<'static>: Send, Sync, Clone);
    assert_not_impl_any!(Saved<'static>: Send, Sync);
    assert_not_impl_any!(Lent<'static, 'static>: Send, Sync);
    assert_not_impl_any!(LentMut<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(UpdateArguments<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(Tape<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(Var<'static>: Send, Sync);

    // So does what a launch takes, and with it every kernel that names memory.
    assert_not_impl_any!(kernel::Slice<'static, f32>: Send, Sync);
    assert_not_impl_any!(kernel::Pointer<'static, f32>: Send, Sync);
    assert_not_impl_any!(kernel::PointerMut<'static, f32>: Send, Sync, Clone);
    assert_not_impl_any!(kernels::fill::fill<'static, f32>: Send, Sync, Clone);

    // A capture goes where its state may go; while it is being recorded or replayed it is one thread's. What goes in, and
    // the names of what comes out, are plain values.
    assert_impl_all!(Captured<(), ()>: Send);
    assert_not_impl_any!(Captured<(), ()>: Sync, Clone);
    assert_not_impl_any!(Captured<std::rc::Rc<()>, ()>: Send, Sync);
    assert_not_impl_any!(Slots<'static>: Send, Sync, Clone);
    assert_not_impl_any!(Replay<'static, ()>: Send, Sync, Clone);
    assert_impl_all!(Inputs<'static>: Send, Sync);
    assert_impl_all!(Output: Send, Sync, Copy);
    assert_not_impl_any!(Batch<'static>: Send, Sync);
}
