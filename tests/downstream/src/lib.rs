//! A package outside stepscope with kernels of its own: the kernels on a device, and an op of
//! variables.

#![forbid(unsafe_code)]

use downstream_kernels::LeakyRelu;
use stepscope::device::DeviceBuilder;
use stepscope::ops::pointwise_op;
use stepscope::{Device, DeviceKind, Result, Var};

/// Returns the builder of a device that has this package's kernels.
pub fn builder(kind: DeviceKind) -> DeviceBuilder {
    let builder = Device::builder(kind);
    #[cfg(feature = "cuda")]
    let builder = builder.kernels(stepscope::kernels!());
    builder
}

/// Computes `y = x` above zero, and `slope x` elsewhere.
///
/// # Errors
/// The arena is full.
#[track_caller]
pub fn leaky_relu<'s>(x: &Var<'s>, slope: f32) -> Result<Var<'s>> {
    pointwise_op(LeakyRelu, [x.into(), slope.into()])
}
