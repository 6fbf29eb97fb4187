//! Checks a machine: one case for each kernel, seeded inputs, and committed digests of the bits that must come out.
//!
//! A case runs whole or in its smallest form. The whole form has many shapes and sizes; `examples/same_bits` runs it. The smallest has
//! the fewest that take each path of the kernel, and in which a wrong compilation shows: rows of every number of lanes, vectors
//! that lanes hold and that they read again, tails, and values that a multiply and an addition turn into other bits where somebody fuses
//! them. [`Device::self_test`](crate::Device::self_test) runs it, by itself when a GPU with these kernels is opened for the first time.
//!
//! ```
//! use stepscope::same_bits::{Form, cases, compare, line, run};
//! use stepscope::{Device, DeviceKind};
//!
//! let device = Device::open(DeviceKind::Emulated)?;
//! let (name, case) = &cases()[0];
//! let found = line(name, &run(&device, case, Form::Smallest)?);
//! assert!(compare(&found, Form::Smallest.golden())[0].equal());
//! # Ok::<(), stepscope::Error>(())
//! ```
//! Invariant: nothing below uses this module, and it uses kernels through steps, as programs do.

#![forbid(unsafe_code)]

mod attention;
mod attention_tensor;
mod cases;
mod form;
mod golden;
mod inputs;
mod on_opening;
mod products;
mod remembered;
mod seeded;
mod self_test;

pub use cases::{Case, cases, in_order};
pub use form::Form;
pub use golden::{Verdict, compare, line, of_all, to_commit};
pub use inputs::{Inputs, run};
pub use remembered::remembered;
#[doc(hidden)]
pub use seeded::{Random, SPECIAL, sample};
pub use self_test::Tested;
