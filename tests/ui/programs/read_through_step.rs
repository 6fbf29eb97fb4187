//! A bare step cannot read, because reading waits.

use stepscope::{Result, Step, Tensor};

fn op<'s>(step: &Step<'s>, x: &Tensor<'s>) -> Result<Vec<f32>> {
    step.read(x)
}

fn main() {}
