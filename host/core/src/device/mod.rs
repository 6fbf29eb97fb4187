//! The only interface to the hardware.
//!
//! A [`Driver`] handles bytes, addresses and kernels by name. No code above it depends on the kind
//! of device. [`Device`] calls the driver, and adds what no driver provides: deadlines, and the
//! loss of a device that missed one.
//!
//! Invariant: all work of a driver is ordered on one stream, so a later call sees the writes of an
//! earlier one. Code above this folder can wait only with a deadline.

mod builder;
#[cfg(feature = "cuda")]
mod cuda;
mod driver;
mod driver_thread;
mod dry_run;
mod emulated;
mod graph;
mod handle;
mod kernels;
mod memory;
mod readback;
mod self_test;
mod staging;
mod stream;

pub use builder::{DEFAULT_DEADLINE, DeviceBuilder, SelfTest};
pub use driver::{Description, DeviceKind, Driver, DriverLayer, Fence, Graph, Link, Nodes, Piece, Pool, Wire};
pub use driver_thread::panic_message;
pub use dry_run::Launch;
pub(crate) use graph::{BufferBorrow, Pins, SealedGraph};
pub use handle::Device;
pub use kernels::{Kernels, ptx_builds};
pub(crate) use memory::DeferredFree;
pub use readback::PinnedReadback;
pub use self_test::{KernelTest, Tested, remembered};
pub(crate) use staging::Fill;
pub use stream::DeviceLink;
pub(crate) use stream::Launches;
