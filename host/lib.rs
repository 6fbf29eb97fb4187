#![doc = include_str!("../README.md")]
#![deny(unsafe_op_in_unsafe_fn)]

mod autograd;
mod capture;
mod checkpoint;
mod driver;
mod error;
mod launch;
mod memory;
pub mod ops;
mod optim;
mod params;
mod random;
mod step;
mod tensor;
mod upload;

pub use autograd::{Backward, Tape, Var};
pub use capture::{CaptureReport, Captured, Inputs, Output, Record, Replay, Slots};
pub use checkpoint::{Checkpoint, replace_file};
pub use cuda_std::launch as kernel;
pub use driver::{DEFAULT_DEADLINE, Description, Device, DeviceBuilder, DeviceKind, Driver, Pool, faults};
pub use error::{Error, Result};
pub use launch::{Lent, LentMut, Source, Target};
pub use memory::{
    Arena, ArenaBuilder, ArenaReport, Buffer, Capacity, Cause, Count, Event, Growth, Kind, Largest, Measured, MemInfo,
    Origin, Overflow, OverflowReport, Phase, Recording, Refusal, Site, Situation, SystemMemory,
};
pub use optim::{AdamW, AdamWConfig, Schedule};
pub use params::{Entry, Gradients, Initializer, Layout, LayoutBuilder, Parameter, Parameters, Stack};
pub use random::SplitMix64;
pub use step::{Eager, Scratch, Step};
pub use tensor::{Element, Saved, Shape, Tensor};
pub use upload::{Progress, Transfer};

// What must and must not cross threads. A step's things are one thread's: their order is the stream's.
static_assertions::assert_impl_all!(Device: Send, Sync);
static_assertions::assert_impl_all!(Arena: Send);
static_assertions::assert_impl_all!(Parameters: Send, Sync);
static_assertions::assert_impl_all!(Error: Send, Sync);
static_assertions::assert_not_impl_any!(Tensor<'static>: Send, Sync, Clone);
static_assertions::assert_not_impl_any!(Saved<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Step<'static>: Send, Sync, Clone);
static_assertions::assert_not_impl_any!(Eager<'static>: Send, Sync, Clone);
