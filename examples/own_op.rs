//! An op of your own in one declaration: leaky ReLU, `y = x` above zero, else `slope x`, with its
//! gradient. The value and the gradient are one launch each, on the GPU and on the CPU.
//!
//! ```text
//! cargo run --example own_op
//! ```
//! A build script that compiles the package to PTX makes it run on a GPU. `tests/downstream/` is a
//! package that does so, and trains with this op. The guide has the long form: a kernel with its
//! contract, and an op with a closure for the backward pass.

use cuda_std::prelude::*;
use stepscope::ops::pointwise_op;
use stepscope::parameters::Initializer;
use stepscope::{Arena, Capacity, Device, DeviceKind, Gradients, ParameterSpec, Parameters, Result, Tape};

kernels::pointwise_op! {
    /// The leaky rectifier: x above zero, and slope x elsewhere.
    pub struct LeakyRelu(x, slope);
    value: leaky_relu { leaky_relu_f32, leaky_relu_bf16 } = if x > 0.0 { x } else { slope * x };
    gradient(x, dy): leaky_relu_dx { leaky_relu_dx_f32, leaky_relu_dx_bf16 } =
        if x > 0.0 { dy } else { slope * dy };
}

fn main() -> Result<()> {
    let mut spec = ParameterSpec::builder();
    let x = spec.add("x", [4], Initializer::ZERO);
    let device = Device::open(DeviceKind::Emulated)?;
    let mut parameters = Parameters::new(&device, &spec.build()?, 0)?;
    parameters.write(x, &[-8.0, -1.0, 0.0, 3.0])?;

    let mut gradients = Gradients::zeros(&parameters)?;
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    let y = arena.step(|step| {
        let tape = Tape::new(step, &parameters);
        let y = pointwise_op(LeakyRelu, [tape.parameter(x)?.into(), 0.25.into()])?;
        tape.backward(&y.sum(..)?, &mut gradients)?;
        step.read(y.value())
    })?;
    println!("y = {y:?}, dx = {:?}", gradients.read(x)?);
    assert_eq!(y, [-2.0, -0.25, 0.0, 3.0]);
    assert_eq!(gradients.read(x)?, [0.25, 0.25, 0.25, 1.0]);
    Ok(())
}
