//! The one seam to hardware.
//!
//! A [`Driver`] knows bytes, addresses and kernels by name; nothing above it knows which device it is. [`Device`] calls it
//! and adds what no driver gives: deadlines, and the loss of a device that missed one. Invariant: all work of a driver is
//! ordered on one stream, so that a later call sees what an earlier one wrote; above this folder nothing can wait without
//! a deadline.

#[cfg(target_os = "linux")]
mod backing;
mod builder;
mod calls;
#[cfg(feature = "cuda")]
mod cuda;
mod description;
mod device;
mod emulated;
pub mod faults;
mod graphs;
mod kernels;
mod landing;
mod lane;
mod launches;
mod lends;
mod links;
mod page_copies;
mod pages;
pub(crate) mod patience;
mod pins;
mod rehearsal;
mod retired;
mod ring;
mod staging;

pub use builder::{DEFAULT_DEADLINE, DeviceBuilder, SelfTest};
pub use calls::{Driver, Link, Piece, Pool, Wire};
pub use description::{Description, DeviceKind};
pub use device::Device;
pub(crate) use graphs::SealedGraph;
pub use kernels::{Kernels, ptx_builds};
pub(crate) use landing::Landing;
pub(crate) use launches::Launches;
pub(crate) use lends::Lending;
pub(crate) use links::DeviceLink;
pub(crate) use pins::Pins;
pub use rehearsal::Launch;
pub(crate) use retired::Retired;
pub(crate) use ring::Fill;
