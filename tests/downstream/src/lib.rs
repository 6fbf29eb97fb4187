//! A package outside stepscope with kernels of its own: the kernels on a device, and an op with its
//! backward on a tape.

#![forbid(unsafe_code)]

use downstream_kernels as kernels;
use stepscope::device::DeviceBuilder;
use stepscope::tensor::{Source, Target};
use stepscope::{Device, DeviceKind, Result, Tape, Var};

/// Returns the builder of a device that has this package's kernels.
pub fn builder(kind: DeviceKind) -> DeviceBuilder {
    let builder = Device::builder(kind);
    #[cfg(feature = "cuda")]
    let builder = builder.kernels(stepscope::kernels!());
    builder
}

/// Computes `y = x` above zero, and `slope x` elsewhere. Its backward kernel is
/// [`kernels::leaky_relu_backward`].
///
/// # Errors
/// The arena is full, or the variable belongs to another tape.
#[track_caller]
pub fn leaky_relu<'s>(tape: &Tape<'_, 's>, x: &Var<'s>, slope: f32) -> Result<Var<'s>> {
    let (op, step, x) = (tape.op("leaky_relu", [x])?, tape.step(), *x);
    let mut y = step.empty(x.shape())?;
    step.launch(kernels::leaky_relu { x: x.value().slice(), slope, y: y.out() })?;
    Ok(op.record(y.save(), move |back, dy| {
        let mut dx = back.step().empty(x.shape())?;
        let (x_slice, dy) = (x.value().slice(), dy.slice());
        back.step().launch(kernels::leaky_relu_backward { x: x_slice, dy, slope, dx: dx.out() })?;
        back.add(&x, dx)
    }))
}
