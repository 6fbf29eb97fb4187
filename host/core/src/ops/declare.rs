//! Ops of one tensor, each declared once, whose kernels have another form than those of
//! [`pointwise`](super::pointwise).
//!
//! `unary_op!` makes an op's function, its backward pass, its forms on a variable and on a tape,
//! their documentation, and a row of the table [`UnaryOp`]. The self-test's cases,
//! `examples/trace_ops` and the attacks on contracts (`tests/kernels/declared.rs`) run what is in
//! the table ([`UNARY`]) and in that of pointwise ops, and `tests/oracle` evaluates the formulas,
//! so no other file lists such an op.
//!
//! ```text
//! unary_op! {
//!     /// The hyperbolic tangent. The result is within 2 ulp.
//!     tanh, tanh_backward {
//!         y: "tanh(x)",                             the result, as JAX writes it
//!         dx: "dy * (1 - y**2)",                    the gradient, from what backward reads
//!         saves: y,                                 the result, or the operand x
//!         forward: activation::tanh_forward,
//!         backward: activation::tanh_backward { y },     the parameter for what backward reads
//!         operands: Elements,
//!     }
//! }
//! ```
//! Kernels that take more parameters get them from the operand's shape:
//! `with |x| { cols: x.as_rows()[1] }`.
//!
//! Invariant: the result and the gradient have the operand's shape.

use super::pointwise::{AnyFunction, ChosenPointwise, PointwiseOp};
use super::{activation, softmax};
use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Shape, Stored, Tensor};
use cuda_std::launch::{Contract, Pod};
use half::bf16;
use std::ops::Range;

/// The operands that show all bits of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operands {
    /// Elements of every magnitude.
    Elements,
    /// Rows of several lengths.
    Rows,
    /// Rows of several lengths. Backward reads numbers up to 0.
    RowsBelowZero,
}

/// A function of one tensor.
pub(crate) type Unary<S> = for<'s> fn(&Step<'s>, &Tensor<'s, S>) -> Result<Tensor<'s, S>>;

/// A function of two tensors of the same shape.
pub(crate) type Binary<S> = for<'s> fn(&Step<'s>, &Tensor<'s, S>, &Tensor<'s, S>) -> Result<Tensor<'s, S>>;

/// The arguments that a test of a contract chooses. Each method returns the honest argument for an
/// honest launch.
pub trait ChosenArguments {
    /// Returns the range of a buffer that the kernel gets; `honest` elements fit the others.
    fn range(&mut self, argument: &'static str, honest: usize) -> Range<usize>;

    /// Returns a number, in the low bytes of a word. `largest` is the largest value of its type.
    fn word(&mut self, argument: &'static str, honest: u64, largest: u64) -> u64;

    /// True to launch the kernel, false to check only its contract.
    fn launches(&self) -> bool;
}

/// Launches a kernel with chosen arguments, for honest operands of a shape. The tensors are the
/// operands and the result; each has more elements than the shape.
pub type ChosenLaunch<S> =
    for<'s> fn(&Step<'s>, Shape, [&Tensor<'s, S>; 2], &mut Tensor<'s, S>, &mut dyn ChosenArguments) -> Result<()>;

/// Returns a number that the test chooses.
pub(super) fn chosen<N: Pod>(arguments: &mut dyn ChosenArguments, name: &'static str, honest: N) -> N {
    choose_number(honest, |honest, largest| arguments.word(name, honest, largest))
}

/// Returns the number that `choose` returns in the low bytes of a word, from an honest number and
/// the largest one of its type.
pub fn choose_number<N: Pod>(honest: N, choose: impl FnOnce(u64, u64) -> u64) -> N {
    let mut bytes = [0; size_of::<u64>()];
    bytes[..size_of::<N>()].copy_from_slice(bytemuck::bytes_of(&honest));
    let word = choose(u64::from_le_bytes(bytes), u64::MAX >> (u64::BITS - 8 * size_of::<N>() as u32));
    bytemuck::pod_read_unaligned(&word.to_le_bytes()[..size_of::<N>()])
}

/// Launches the kernel, or only checks its contract.
pub(super) fn launch_chosen(step: &Step<'_>, kernel: impl Contract, arguments: &dyn ChosenArguments) -> Result<()> {
    match kernel.grid() {
        Ok(_) if !arguments.launches() => Ok(()),
        _ => step.launch(kernel),
    }
}

/// A declared op of one tensor, for code that runs all of them.
#[derive(Clone, Copy, Debug)]
pub struct UnaryOp {
    /// The op's name in [`ops`](crate::ops).
    pub name: &'static str,
    /// The result of operand `x`, as JAX writes it. `sum` and `max` are over the last extent.
    pub y: &'static str,
    /// The gradient, in `dy` and what backward reads: `x` or `y`.
    pub dx: &'static str,
    /// The tensor that backward reads: `x` or `y`.
    pub saves: &'static str,
    /// The families of the kernels, forward and backward.
    pub kernels: [&'static str; 2],
    /// The module of the kernels.
    pub module: &'static str,
    /// The operands to try.
    pub operands: Operands,
    /// The op and its backward pass in f32.
    pub in_f32: (Unary<f32>, Binary<f32>),
    /// The op and its backward pass in BF16.
    pub in_bf16: (Unary<bf16>, Binary<bf16>),
    /// Launches of the kernels, forward and backward, in f32. The operands are x, and what backward
    /// reads and dy.
    pub chosen_f32: [ChosenLaunch<f32>; 2],
    /// The launches in BF16.
    pub chosen_bf16: [ChosenLaunch<bf16>; 2],
}

/// An element type of the declared ops.
pub trait Declared: Stored {
    /// Returns the op and its backward pass.
    fn unary(op: &UnaryOp) -> (Unary<Self>, Binary<Self>);

    /// Returns the launches of the kernels, forward and backward.
    fn chosen_unary(op: &UnaryOp) -> [ChosenLaunch<Self>; 2];

    /// Returns a pointwise function.
    fn pointwise(op: &PointwiseOp) -> AnyFunction<Self>;

    /// Returns the launch of its kernel.
    fn chosen_pointwise(op: &PointwiseOp) -> ChosenPointwise<Self>;
}

impl Declared for f32 {
    fn unary(op: &UnaryOp) -> (Unary<f32>, Binary<f32>) {
        op.in_f32
    }

    fn chosen_unary(op: &UnaryOp) -> [ChosenLaunch<f32>; 2] {
        op.chosen_f32
    }

    fn pointwise(op: &PointwiseOp) -> AnyFunction<f32> {
        op.in_f32
    }

    fn chosen_pointwise(op: &PointwiseOp) -> ChosenPointwise<f32> {
        op.chosen_f32
    }
}

impl Declared for bf16 {
    fn unary(op: &UnaryOp) -> (Unary<bf16>, Binary<bf16>) {
        op.in_bf16
    }

    fn chosen_unary(op: &UnaryOp) -> [ChosenLaunch<bf16>; 2] {
        op.chosen_bf16
    }

    fn pointwise(op: &PointwiseOp) -> AnyFunction<bf16> {
        op.in_bf16
    }

    fn chosen_pointwise(op: &PointwiseOp) -> ChosenPointwise<bf16> {
        op.chosen_bf16
    }
}

/// The declared ops of one tensor.
pub static UNARY: [&[UnaryOp]; 2] = [activation::UNARY_OPS, softmax::UNARY_OPS];

/// Declares ops of one tensor; see the module.
macro_rules! unary_op {
    ($(
        $(#[doc = $doc:literal])*
        $op:ident, $backward:ident {
            y: $y:literal,
            dx: $dx:literal,
            saves: $saves:ident,
            forward: $module:ident::$forward_kernel:ident,
            backward: $backward_module:ident::$backward_kernel:ident { $saved:ident },
            operands: $operands:ident,
            $(with |$x:ident| { $($parameter:ident: $value:expr),* },)?
        }
    )*) => {
        $(
            $(#[doc = $doc])*
            ///
            #[doc = concat!("`y = ", $y, "`; `x`, `y`: the same shape.")]
            ///
            /// Queued on the step's stream; no scratch. The result has equal bits on all devices.
            ///
            /// # Errors
            /// [`Error::ArenaFull`](crate::Error::ArenaFull).
            #[track_caller]
            pub fn $op<'s, S: $crate::tensor::Stored>(
                step: &$crate::step::Step<'s>,
                x: &impl $crate::tensor::Source<'s, S>,
            ) -> $crate::error::Result<$crate::tensor::Tensor<'s, S>> {
                use $crate::tensor::Target as _;
                let mut y = step.empty(x.shape())?;
                $(let $x = x.shape();)?
                step.launch(kernels::$module::$forward_kernel { x: x.slice(), y: y.out(), $($($parameter: $value),*)? })?;
                Ok(y)
            }

            #[doc = concat!("The gradient of [`", stringify!($op), "`]: `dx = ", $dx, "`.")]
            ///
            #[doc = concat!("`", stringify!($saves), "`, `dy`, `dx`: the same shape. Queued; no scratch.")]
            ///
            /// # Errors
            /// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
            /// [`Error::ArenaFull`](crate::Error::ArenaFull).
            #[track_caller]
            pub fn $backward<'s, S: $crate::tensor::Stored>(
                step: &$crate::step::Step<'s>,
                $saves: &impl $crate::tensor::Source<'s, S>,
                dy: &impl $crate::tensor::Source<'s, S>,
            ) -> $crate::error::Result<$crate::tensor::Tensor<'s, S>> {
                use $crate::tensor::Target as _;
                $crate::ops::same_shape(stringify!($backward), $saves.shape(), dy.shape())?;
                let (mut dx, saved) = (step.empty($saves.shape())?, $saves.slice());
                $(let $x = $saves.shape();)?
                step.launch(kernels::$backward_module::$backward_kernel {
                    $saved: saved,
                    dy: dy.slice(),
                    dx: dx.out(),
                    $($($parameter: $value),*)?
                })?;
                Ok(dx)
            }
        )*

        impl<'s, S: $crate::tensor::Stored> $crate::tape::Var<'s, S> {
            $(
                $(#[doc = $doc])*
                ///
                #[doc = concat!("`", $y, "`, where `x` is this variable. Backward is [`ops::launch::", stringify!($backward), "`](crate::ops::launch::", stringify!($backward), ").")]
                #[track_caller]
                pub fn $op(&self) -> $crate::error::Result<Self> {
                    let op = self.op(stringify!($op), &[self])?;
                    let (y, x) = ($op(op.step(), self.value())?.save(), self.keep());
                    let saved = $crate::tape::Kept::of($crate::ops::declare::unary_op!(@saved $saves, self.value(), &y));
                    Ok(op.record(y, move |back, dy| {
                        let dx = $backward(back.step(), &saved.value(back), &dy)?;
                        back.step().free(dy);
                        let x = x.var(back)?;
                        back.add(&x, dx)
                    }))
                }
            )*
        }

        /// The rows of the ops declared here.
        pub(super) const UNARY_OPS: &[$crate::ops::declare::UnaryOp] = &[$(
            $crate::ops::declare::UnaryOp {
                name: stringify!($op),
                y: $y,
                dx: $dx,
                saves: stringify!($saves),
                kernels: [stringify!($forward_kernel), stringify!($backward_kernel)],
                module: stringify!($module),
                operands: $crate::ops::declare::Operands::$operands,
                in_f32: (|step, x| $op(step, x), |step, saved, dy| $backward(step, saved, dy)),
                in_bf16: (|step, x| $op(step, x), |step, saved, dy| $backward(step, saved, dy)),
                chosen_f32: $crate::ops::declare::unary_op!(
                    @chosen $module::$forward_kernel, $backward_module::$backward_kernel { $saved }
                    $(|$x| { $($parameter: $value),* })?
                ),
                chosen_bf16: $crate::ops::declare::unary_op!(
                    @chosen $module::$forward_kernel, $backward_module::$backward_kernel { $saved }
                    $(|$x| { $($parameter: $value),* })?
                ),
            }
        ),*];
    };
    (
        @chosen $module:ident::$forward_kernel:ident, $backward_module:ident::$backward_kernel:ident { $saved:ident }
        $(|$x:ident| { $($parameter:ident: $value:expr),* })?
    ) => {
        [
            |step, shape, [x, _], y, arguments| {
                use $crate::tensor::{Source as _, Target as _};
                $(let $x = shape;)?
                let kernel = kernels::$module::$forward_kernel {
                    x: x.slice().part(arguments.range("x", shape.elements())),
                    $($($parameter: $crate::ops::declare::chosen(arguments, stringify!($parameter), $value),)*)?
                    y: y.out().part(arguments.range("y", shape.elements())),
                };
                $crate::ops::declare::launch_chosen(step, kernel, arguments)
            },
            |step, shape, [saved, dy], dx, arguments| {
                use $crate::tensor::{Source as _, Target as _};
                $(let $x = shape;)?
                let kernel = kernels::$backward_module::$backward_kernel {
                    $saved: saved.slice().part(arguments.range(stringify!($saved), shape.elements())),
                    dy: dy.slice().part(arguments.range("dy", shape.elements())),
                    $($($parameter: $crate::ops::declare::chosen(arguments, stringify!($parameter), $value),)*)?
                    dx: dx.out().part(arguments.range("dx", shape.elements())),
                };
                $crate::ops::declare::launch_chosen(step, kernel, arguments)
            },
        ]
    };
    (@saved x, $x:expr, $y:expr) => { $x };
    (@saved y, $x:expr, $y:expr) => { $y };
}
pub(super) use unary_op;
