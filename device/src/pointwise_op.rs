//! `pointwise_op!`: a pointwise op of a package of your own, in one declaration.
//!
//! ```text
//! use cuda_std::prelude::*;
//!
//! kernels::pointwise_op! {
//!     /// The leaky rectifier: x above zero, and slope x elsewhere.
//!     pub struct LeakyRelu(x, slope);
//!     value: leaky_relu { leaky_relu_f32, leaky_relu_bf16 } = if x > 0.0 { x } else { slope * x };
//!     gradient(x, dy): leaky_relu_dx { leaky_relu_dx_f32, leaky_relu_dx_bf16 } =
//!         if x > 0.0 { dy } else { slope * dy };
//! }
//! ```
//! The op has one to three operands. Its value is a formula of one element of each. A gradient is
//! that of the named operand, from the operands and the gradient of the result. An operand without
//! one has none. Each formula is a family of two kernels, for f32 and BF16, whose names stand in
//! braces. The CPU runs the same formulas. On the host, `stepscope::ops::pointwise_op` applies the
//! op to variables and numbers, which broadcast.
//!
//! Formulas call [`math`](crate::math), not the methods of f32 that call a CPU's library.
//!
//! Invariant: an element of the result depends only on the operands' elements at its place.

/// The words of a layout: those of three operands, and of the gradient of the result.
pub const WORDS: usize = 34;

/// An op that [`pointwise_op!`](crate::pointwise_op!) has declared, of `N` operands.
#[cfg(not(target_arch = "nvptx64"))]
pub trait PointwiseOp<const N: usize> {
    /// The name of the family that computes the value.
    const NAME: &'static str;

    /// True if the operand of this number has a gradient.
    fn has_gradient(number: usize) -> bool;

    /// Launches the kernel of the value, or that of the gradient of an operand. `dy` is not read
    /// for the value. Returns `None` for an operand without a gradient.
    fn launch<S: crate::stored::Stored, L: Launch>(
        gradient_of: Option<usize>,
        operands: [cuda_std::launch::Slice<'_, S>; N],
        dy: cuda_std::launch::Slice<'_, S>,
        layout: ([usize; WORDS], usize),
        out: cuda_std::launch::PointerMut<'_, S>,
        launch: L,
    ) -> Option<L::Result>;
}

/// A place where a kernel is launched.
#[cfg(not(target_arch = "nvptx64"))]
pub trait Launch {
    /// The result of a launch.
    type Result;

    /// Launches a kernel.
    fn launch<K: cuda_std::launch::Contract>(self, kernel: K) -> Self::Result;
}

/// Declares a pointwise op; see the module.
#[macro_export]
macro_rules! pointwise_op {
    (
        $(#[doc = $doc:literal])*
        pub struct $Op:ident($($x:ident),+);
        value: $value:ident { $value_f32:ident, $value_bf16:ident } = $formula:expr;
        $(
            gradient($of:ident, $dy:ident): $gradient:ident { $gradient_f32:ident, $gradient_bf16:ident } =
                $derivative:expr;
        )*
    ) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $Op;

        impl $Op {
            #[doc = "Computes the value of one element."]
            #[inline(always)]
            #[allow(unused_variables)]
            pub fn $value($($x: f32),+) -> f32 {
                $formula
            }
        }

        $crate::broadcast_family! {
            ["The value of a pointwise op."] $value { $value_f32, $value_bf16 } 34, $Op::$value, $($x)+
        }

        $crate::pointwise_op! {
            @gradients $Op [$($x)+] $($dy $gradient { $gradient_f32, $gradient_bf16 } { $derivative })*
        }

        $crate::only_on_host! {
            impl $crate::pointwise_op::PointwiseOp<{ [$(stringify!($x)),+].len() }> for $Op {
                const NAME: &'static str = stringify!($value);

                fn has_gradient(number: usize) -> bool {
                    let name = [$(stringify!($x)),+][number];
                    false $(|| name == stringify!($of))*
                }

                fn launch<S: $crate::stored::Stored, L: $crate::pointwise_op::Launch>(
                    gradient_of: Option<usize>,
                    [$($x),+]: [::cuda_std::launch::Slice<'_, S>; [$(stringify!($x)),+].len()],
                    dy: ::cuda_std::launch::Slice<'_, S>,
                    (layout, length): ([usize; $crate::pointwise_op::WORDS], usize),
                    out: ::cuda_std::launch::PointerMut<'_, S>,
                    launch: L,
                ) -> Option<L::Result> {
                    let Some(number) = gradient_of else {
                        return Some(launch.launch($value { $($x,)+ layout, length, out }));
                    };
                    let name = [$(stringify!($x)),+][number];
                    $crate::pointwise_op! {
                        @launch name, dy, layout, length, out, launch, [$($x)+] $($of $dy $gradient)*
                    }
                    None
                }
            }
        }
    };
    (@gradients $Op:ident $x:tt) => {};
    (
        @gradients $Op:ident [$($x:ident)+]
        $dy:ident $gradient:ident { $f32:ident, $bf16:ident } { $derivative:expr } $($others:tt)*
    ) => {
        impl $Op {
            #[doc = "Computes the gradient of an operand of one element."]
            #[inline(always)]
            #[allow(unused_variables)]
            pub fn $gradient($($x: f32,)+ $dy: f32) -> f32 {
                $derivative
            }
        }

        $crate::broadcast_family! {
            ["The gradient of an operand of a pointwise op."]
            $gradient { $f32, $bf16 } 34, $Op::$gradient, $($x)+ $dy
        }

        $crate::pointwise_op! { @gradients $Op [$($x)+] $($others)* }
    };
    (@launch $name:ident, $given:ident, $layout:ident, $length:ident, $out:ident, $launch:ident, $x:tt) => {};
    (
        @launch $name:ident, $given:ident, $layout:ident, $length:ident, $out:ident, $launch:ident, [$($x:ident)+]
        $of:ident $dy:ident $gradient:ident $($others:ident)*
    ) => {
        if $name == stringify!($of) {
            let kernel = $gradient { $($x,)+ $dy: $given, layout: $layout, length: $length, out: $out };
            return Some($launch.launch(kernel));
        }
        $crate::pointwise_op! {
            @launch $name, $given, $layout, $length, $out, $launch, [$($x)+] $($others)*
        }
    };
}
