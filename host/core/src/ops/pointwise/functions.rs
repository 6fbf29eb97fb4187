//! The declarations of pointwise ops.

use super::pointwise;

pointwise! {
    /// The absolute value. Its gradient at 0 is 0.
    abs(x) {
        y: "abs(x)",
        gradients: |y, dy| [abs_backward(x, dy)],
    }

    /// The gradient of [`abs`].
    abs_backward(x, dy) { y: "dy * sign(x)" }

    /// The exponential. Within 1.01 ulp.
    exp(x) {
        y: "exp(x)",
        gradients: |y, dy| [mul(y, dy)],
    }

    /// The natural logarithm, which is NaN below 0. Within 0.94 ulp.
    log(x) {
        y: "log(x)",
        domain: positive,
        gradients: |y, dy| [div(dy, x)],
    }

    /// The natural logarithm of 1 + x, which is accurate near 0. Within 1.5 ulp.
    log1p(x) {
        y: "log1p(x)",
        domain: positive,
        gradients: |y, dy| [log1p_backward(x, dy)],
    }

    /// The gradient of [`log1p`].
    log1p_backward(x, dy) { y: "dy / (1 + x)" }

    /// The square root, which is NaN below 0.
    sqrt(x) {
        y: "sqrt(x)",
        domain: positive,
        gradients: |y, dy| [sqrt_backward(y, dy)],
    }

    /// The gradient of [`sqrt`].
    sqrt_backward(y, dy) { y: "dy / (2 * y)" }

    /// The reciprocal of the square root.
    rsqrt(x) {
        y: "1 / sqrt(x)",
        domain: positive,
        gradients: |y, dy| [rsqrt_backward(y, dy)],
    }

    /// The gradient of [`rsqrt`].
    rsqrt_backward(y, dy) { y: "-0.5 * dy * y**3" }

    /// The square.
    square(x) {
        y: "x * x",
        gradients: |y, dy| [square_backward(x, dy)],
    }

    /// The gradient of [`square`].
    square_backward(x, dy) { y: "2 * x * dy" }

    /// The sine, which is NaN for an infinite x. Within 0.83 ulp.
    sin(x) {
        y: "sin(x)",
        gradients: |y, dy| [sin_backward(x, dy)],
    }

    /// The gradient of [`sin`].
    sin_backward(x, dy) { y: "dy * cos(x)" }

    /// The cosine, which is NaN for an infinite x. Within 0.83 ulp.
    cos(x) {
        y: "cos(x)",
        gradients: |y, dy| [cos_backward(x, dy)],
    }

    /// The gradient of [`cos`].
    cos_backward(x, dy) { y: "-dy * sin(x)" }

    /// The error function. Within 1.04 ulp.
    erf(x) {
        y: "erf(x)",
        gradients: |y, dy| [erf_backward(x, dy)],
    }

    /// The gradient of [`erf`].
    erf_backward(x, dy) { y: "dy * 2 / sqrt(pi) * exp(-x * x)" }

    /// The sum.
    add(a, b) {
        y: "a + b",
        same_shape: elementwise::add,
        gradients: |y, dy| [same, same],
    }

    /// The difference.
    sub(a, b) {
        y: "a - b",
        same_shape: elementwise::sub,
        gradients: |y, dy| [same, mul(dy, -1.0)],
    }

    /// The product.
    mul(a, b) {
        y: "a * b",
        same_shape: elementwise::mul,
        gradients: |y, dy| [mul(dy, b), mul(dy, a)],
    }

    /// The quotient.
    div(a, b) {
        y: "a / b",
        gradients: |y, dy| [div(dy, b), div_backward(y, b, dy)],
    }

    /// The gradient of [`div`] by its divisor.
    div_backward(y, b, dy) { y: "-dy * y / b" }

    /// A power. A negative base has only powers with an integer exponent, otherwise NaN. Within 2
    /// ulp. As in PyTorch, the gradient by the base is 0 for an exponent of 0, and the gradient by
    /// the exponent is 0 where the base and the exponent's power of it are 0.
    pow(a, b) {
        y: "a**b",
        domain: positive,
        gradients: |y, dy| [pow_backward(a, b, dy), pow_exponent_backward(a, y, dy)],
    }

    /// The gradient of [`pow`] by its base.
    pow_backward(a, b, dy) { y: "where(b == 0, 0, dy * b * a**(b - 1))", domain: positive }

    /// The gradient of [`pow`] by its exponent.
    pow_exponent_backward(a, y, dy) { y: "where(a == 0, 0, dy * y * log(a))", domain: positive }

    /// The smaller of two, or NaN if either is NaN. Equal operands have half of the gradient each,
    /// as in PyTorch.
    minimum(a, b) {
        y: "minimum(a, b)",
        gradients: |y, dy| [where_larger(b, a, dy), where_larger(a, b, dy)],
    }

    /// The larger of two, or NaN if either is NaN. Equal operands have half of the gradient each,
    /// as in PyTorch.
    maximum(a, b) {
        y: "maximum(a, b)",
        gradients: |y, dy| [where_larger(a, b, dy), where_larger(b, a, dy)],
    }

    /// The gradient of [`maximum`] by its first operand.
    where_larger(a, b, dy) { y: "where(a > b, dy, where(a == b, 0.5 * dy, 0))" }

    /// A mask of 1 where the operands are equal, and of 0 elsewhere. It has no gradient.
    equal(a, b) {
        y: "where(a == b, 1, 0)",
        gradients: |y, dy| [none, none],
    }

    /// A mask of 1 where the first operand is smaller, and of 0 elsewhere. It has no gradient.
    less(a, b) {
        y: "where(a < b, 1, 0)",
        gradients: |y, dy| [none, none],
    }

    /// A mask of 1 where the first operand is smaller or equal, and of 0 elsewhere. It has no
    /// gradient.
    less_or_equal(a, b) {
        y: "where(a <= b, 1, 0)",
        gradients: |y, dy| [none, none],
    }

    /// The second operand where the first, a mask, is not 0, and the third elsewhere. This is
    /// `torch.where`.
    choose(mask, a, b) {
        y: "where(mask != 0, a, b)",
        gradients: |y, dy| [none, choose(mask, dy, 0.0), choose(mask, 0.0, dy)],
    }

    /// The operand limited to a range. A NaN stays NaN. Only x has a gradient, which is 0 where it
    /// was limited.
    clamp(x, low, high) {
        y: "minimum(maximum(x, low), high)",
        gradients: |y, dy| [where_equal(x, y, dy), none, none],
    }

    /// The gradient of [`clamp`].
    where_equal(x, y, dy) { y: "where(x == y, dy, 0)" }
}
