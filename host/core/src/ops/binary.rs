//! Elementwise sums, differences and products of two tensors.

use super::declare::binary_op;

binary_op! {
    /// The sum, elementwise.
    add { y: "a + b", kernel: elementwise::add }

    /// The difference, elementwise.
    sub { y: "a - b", kernel: elementwise::sub }

    /// The product, elementwise.
    mul { y: "a * b", kernel: elementwise::mul }
}
