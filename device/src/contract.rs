//! `contract!`: a kernel's requirements on a launch. It is declared next to the kernel.
//!
//! ```text
//! // SAFETY: a thread accesses the element of its index in `x` and `y`, and only if it lies inside
//! // `x`; `y` is as long.
//! contract! { unsafe leaky_relu { block: 128, align: 4 } |k| {
//!     Violation::unless_length("y", k.x.len(), k.y.len())?;
//!     Grid::cover(k.x.len(), 128)
//! }}
//! ```
//! `block` may be followed by `shared: BYTES` (default 0) and `align: BYTES` (default [`ALIGN`]),
//! in this order. The closure gets the kernel's arguments. It checks every length on which the
//! kernel's index arithmetic relies, and returns the grid.
//!
//! Invariant: a launch whose closure returns `Ok` stays inside its arguments.
//!
//! The author guarantees this. Nothing else checks it, hence the word `unsafe`. The arguments may
//! be any numbers. A contract therefore adds and multiplies them as
//! [`Size`](cuda_std::launch::Size), which does not wrap, and clippy rejects `*`, `+` and `-` in a
//! contract. On the GPU the macro is empty, so the same file compiles with rust-cuda.

#[cfg(target_arch = "nvptx64")]
mod gpu;
#[cfg(not(target_arch = "nvptx64"))]
mod host;

#[cfg(not(target_arch = "nvptx64"))]
pub use host::*;
