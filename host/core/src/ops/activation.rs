//! Activations: tanh, GELU, ReLU and its square, softplus, sigmoid and SiLU.

use super::declare::unary_op;
use kernels::gate;

unary_op! {
    /// The hyperbolic tangent, elementwise. The result is within 2 ulp.
    tanh, tanh_backward {
        y: "tanh(x)",
        dx: "dy * (1 - y**2)",
        saves: y,
        forward: activation::tanh_forward,
        backward: activation::tanh_backward { y },
        operands: Elements,
    }

    /// The tanh form of GELU (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016),
    /// elementwise.
    gelu, gelu_backward {
        y: "0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))",
        dx: "dy * gelu'(x)",
        saves: x,
        forward: activation::gelu_forward,
        backward: activation::gelu_backward { x },
        operands: Elements,
    }

    /// The square of ReLU (So et al., "Primer", 2021), elementwise. A NaN stays NaN.
    relu_squared, relu_squared_backward {
        y: "maximum(x, 0)**2",
        dx: "2 * maximum(x, 0) * dy",
        saves: x,
        forward: activation::relu_squared_forward,
        backward: activation::relu_squared_backward { x },
        operands: Elements,
    }

    /// The softplus log(1 + e^x), elementwise. A NaN stays NaN.
    softplus, softplus_backward {
        y: "log(1 + exp(x))",
        dx: "dy / (1 + exp(-x))",
        saves: x,
        forward: activation::softplus_forward,
        backward: activation::softplus_backward { x },
        operands: Elements,
    }

    /// ReLU, elementwise. A NaN stays NaN.
    relu, relu_backward {
        y: "maximum(x, 0)",
        dx: "where(y <= 0, 0, dy)",
        saves: y,
        forward: gate::activation_forward,
        backward: gate::activation_backward { kept },
        operands: Elements,
        with |_x| { function: gate::RELU },
    }

    /// The logistic function, elementwise.
    sigmoid, sigmoid_backward {
        y: "1 / (1 + exp(-x))",
        dx: "dy * y * (1 - y)",
        saves: y,
        forward: gate::activation_forward,
        backward: gate::activation_backward { kept },
        operands: Elements,
        with |_x| { function: gate::SIGMOID },
    }

    /// SiLU (Elfwing, Uchibe and Doya, 2017), elementwise.
    silu, silu_backward {
        y: "x / (1 + exp(-x))",
        dx: "dy * silu'(x)",
        saves: x,
        forward: gate::activation_forward,
        backward: gate::activation_backward { kept },
        operands: Elements,
        with |_x| { function: gate::SILU },
    }

    /// The exact form of [`gelu`], elementwise.
    gelu_exact, gelu_exact_backward {
        y: "0.5 * x * (1 + erf(x / sqrt(2)))",
        dx: "dy * gelu_exact'(x)",
        saves: x,
        forward: gate::activation_forward,
        backward: gate::activation_backward { kept },
        operands: Elements,
        with |_x| { function: gate::GELU_EXACT },
    }
}
