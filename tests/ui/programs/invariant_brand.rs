//! A brand is invariant: a tensor cannot be given another step's, neither a longer nor a shorter one.

use stepscope::Tensor;

fn shorten<'long: 'short, 'short>(tensor: Tensor<'long>) -> Tensor<'short> {
    tensor
}

fn main() {}
