//! Softmax over rows, and its logarithm.

use super::declare::unary_op;

unary_op! {
    /// Softmax over the last extent. The largest element of a row is subtracted first.
    softmax, softmax_backward {
        y: "exp(x - max(x)) / sum(exp(x - max(x)))",
        dx: "y * (dy - sum(y * dy))",
        saves: y,
        forward: softmax::softmax_forward,
        backward: softmax::softmax_backward { y },
        operands: Rows,
        with |x| { cols: x.as_rows()[1] },
    }

    /// The logarithm of [`softmax`] over the last extent.
    log_softmax, log_softmax_backward {
        y: "x - max(x) - log(sum(exp(x - max(x))))",
        dx: "dy - exp(y) * sum(dy)",
        saves: y,
        forward: softmax::log_softmax_forward,
        backward: softmax::log_softmax_backward { y },
        operands: RowsBelowZero,
        with |x| { cols: x.as_rows()[1] },
    }
}
