//! Checks a machine: one case for each kernel, seeded inputs, and committed digests of the expected
//! bits.
//!
//! A case runs whole or in its smallest size. The whole size has many shapes, and
//! `stepscope check` runs it. The smallest has the fewest shapes that take each path of the
//! kernel and expose a wrong compilation. It has rows for every number of lanes, vectors that lanes
//! hold or reread, and tails. It also has values whose bits change if a multiply and an addition
//! are fused. [`Device::self_test`](stepscope_core::Device::self_test) runs the smallest size. This happens
//! automatically when a GPU with new kernels is opened.
//!
//! ```
//! use stepscope::check::same_bits::{CaseSize, cases, compare, line, run};
//! use stepscope::{Device, DeviceKind};
//!
//! let device = Device::open(DeviceKind::Emulated)?;
//! let (name, case) = &cases()[0];
//! let found = line(name, &run(&device, case, CaseSize::Smallest)?);
//! assert!(compare(&found, CaseSize::Smallest.golden())[0].equal());
//! # Ok::<(), stepscope::Error>(())
//! ```
//! Invariant: no lower layer uses this module, and it uses kernels through steps, as programs do.

#![forbid(unsafe_code)]

mod aligned;
mod attention;
mod attention_mma;
mod case;
mod case_size;
mod cases;
mod declared;
mod golden;
mod grouped;
mod inputs;
mod products;
mod products_tf32;
mod seeded;
mod self_test;

pub use case::Case;
pub use case_size::CaseSize;
pub use cases::{cases, in_order, runs_on};
pub use golden::{Verdict, compare, line, of_all, to_commit};
pub use inputs::{Inputs, run};
#[doc(hidden)]
pub use seeded::{Random, SPECIAL, sample};
pub use stepscope_core::internals::{Tested, remembered};
