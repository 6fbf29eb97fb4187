//! The only interface to the hardware.
//!
//! A [`Driver`] handles bytes, addresses and kernels by name. No code above it depends on the kind
//! of device. [`Device`] calls the driver, and adds what no driver provides: deadlines, and the
//! loss of a device that missed one.
//!
//! Invariant: all work of a driver is ordered on one stream, so a later call sees the writes of an
//! earlier one. Code above this folder can wait only with a deadline.

#[cfg(target_os = "linux")]
mod backing;
mod borrow_table;
mod builder;
mod calls;
#[cfg(feature = "cuda")]
mod cuda;
mod deferred_free;
mod description;
mod driver_thread;
mod dry_run;
mod emulated;
pub mod faults;
mod graphs;
mod handle;
mod kernels;
mod launches;
mod links;
mod page_copies;
mod pages;
pub mod patience;
mod pinned_readback;
mod pins;
mod ring;
mod self_test;
mod staging;
mod tested_kernels;

pub(crate) use borrow_table::BufferBorrow;
pub use builder::{DEFAULT_DEADLINE, DeviceBuilder, SelfTest};
pub use calls::{Driver, Link, Piece, Pool, Wire};
pub(crate) use deferred_free::DeferredFree;
pub use description::{Description, DeviceKind};
pub use dry_run::Launch;
pub(crate) use graphs::SealedGraph;
pub use handle::Device;
pub use kernels::{Kernels, ptx_builds};
pub(crate) use launches::Launches;
pub use links::DeviceLink;
pub use pinned_readback::PinnedReadback;
pub(crate) use pins::Pins;
pub(crate) use ring::Fill;
pub use self_test::{KernelTest, Tested, remembered};
