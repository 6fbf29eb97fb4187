//! Elementwise sums, differences and products of two tensors.

use super::declare::binary_op;
use super::scale;

binary_op! {
    /// The sum, elementwise. If a matrix multiply produces one operand,
    /// [`Tape::linear_residual`](crate::Tape::linear_residual) adds the other in the same launch.
    add {
        y: "a + b",
        kernel: elementwise::add,
        backward: |back, dy, a, b| back.add_to_both(&a, &b, dy),
    }

    /// The difference, elementwise.
    sub {
        y: "a - b",
        kernel: elementwise::sub,
        backward: |back, dy, a, b| {
            if b.wants_gradient() {
                let db = scale(back.step(), &dy, -1.0)?;
                back.add(&b, db)?;
            }
            back.add(&a, dy)
        },
    }

    /// The product, elementwise.
    mul {
        y: "a * b",
        kernel: elementwise::mul,
        backward: |back, dy, a, b| {
            for (of, by) in [(a, b), (b, a)] {
                if of.wants_gradient() {
                    let gradient = mul(back.step(), &dy, by.value())?;
                    back.add(&of, gradient)?;
                }
            }
            back.step().free(dy);
            Ok(())
        },
    }
}
