//! A brand is invariant: a tensor cannot get another step's lifetime, longer or shorter.

use stepscope::Tensor;

fn shorten<'long: 'short, 'short>(tensor: Tensor<'long>) -> Tensor<'short> {
    tensor
}

fn main() {}
