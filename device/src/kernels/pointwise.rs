//! Functions of one, two or three numbers, applied to every element, with operands that broadcast.
//!
//! `pointwise!` declares a function: its name, the kernel of each stored type, the operands, and
//! the formula of one element. The derivatives are such functions too.
//!
//! ```text
//! /// Computes y = a / b.
//! div { div_f32: f32; div_bf16: bf16; } (a, b) = a / b;
//! ```
//! makes the family `div` with the arguments `a`, `b`, `layout`, `length` and `out`, and the
//! function [`functions::div`]. See [`broadcast`](crate::broadcast) for the layout. If all operands
//! are as long as the result, threads move 16 bytes of each.
//!
//! Invariant: an element of the result depends only on the operands' elements at its place.

use crate::{broadcast_family, family, map4, math, write_own_vectors};
use cuda_std::prelude::*;
use half::bf16;

/// Declares functions; see the module.
macro_rules! pointwise {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident { $f32:ident: f32; $bf16:ident: bf16; } ($($x:ident),+) = $formula:expr;
    )*) => {
        /// The functions of one element.
        pub mod functions {
            #[allow(unused_imports)]
            use super::*;

            $(
                $(#[doc = $doc])*
                #[inline(always)]
                pub fn $name($($x: f32),+) -> f32 {
                    $formula
                }
            )*
        }

        $(pointwise! { @family [$($doc)*] $name $f32 $bf16 $($x)+ })*
    };
    (@family [$($doc:literal)*] $name:ident $f32:ident $bf16:ident $x:ident) => {
        family! {
            $(#[doc = $doc])*
            ///
            /// Shapes: all `[n]`. Overwrites `out`.
            $name<S: Stored> { $f32: f32; $bf16: bf16; }
            unsafe fn($x: &[S], out: *mut S) {
                // SAFETY: the vector lies inside the operand, and `out` is as long.
                unsafe {
                    write_own_vectors!(S, $x.len(), out, [$x] |_index| map4!($x, functions::$name));
                }
            }
            // SAFETY: a thread accesses only its own vectors inside the operand; `out` is as long.
            contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
                Violation::unless_length("out", k.$x.len(), k.out.len())?;
                crate::block::own_grid::<S>(k.$x.len())
            }
        }
    };
    (@family $doc:tt $name:ident $f32:ident $bf16:ident $a:ident $b:ident) => {
        broadcast_family! { $doc $name { $f32, $bf16 } 20, functions::$name, $a $b }
    };
    (@family $doc:tt $name:ident $f32:ident $bf16:ident $a:ident $b:ident $c:ident) => {
        broadcast_family! { $doc $name { $f32, $bf16 } 27, functions::$name, $a $b $c }
    };
}

/// Returns 1 or 0.
#[inline(always)]
fn mask(condition: bool) -> f32 {
    if condition { 1.0 } else { 0.0 }
}

/// Returns `a` if either is NaN because `a` is, else the chosen one of two.
#[inline(always)]
fn nan_or(a: f32, b: f32, chosen: f32) -> f32 {
    let chosen = if b.is_nan() { b } else { chosen };
    if a.is_nan() { a } else { chosen }
}

pointwise! {
    /// Computes y = |x|.
    abs { abs_f32: f32; abs_bf16: bf16; } (x) = x.abs();

    /// Computes dx = dy sign(x), which is 0 at 0.
    abs_backward { abs_backward_f32: f32; abs_backward_bf16: bf16; }
        (x, dy) = dy * if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { nan_or(x, x, 0.0) };

    /// Computes y = e^x.
    exp { exp_f32: f32; exp_bf16: bf16; } (x) = math::exp(x);

    /// Computes y = log(x).
    log { log_f32: f32; log_bf16: bf16; } (x) = math::log(x);

    /// Computes y = log(1 + x).
    log1p { log1p_f32: f32; log1p_bf16: bf16; } (x) = math::log1p(x);

    /// Computes dx = dy / (1 + x).
    log1p_backward { log1p_backward_f32: f32; log1p_backward_bf16: bf16; } (x, dy) = dy / (1.0 + x);

    /// Computes y = sqrt(x).
    sqrt { sqrt_f32: f32; sqrt_bf16: bf16; } (x) = cuda_std::GpuFloat::sqrt(x);

    /// Computes dx = dy / (2 y), where y = sqrt(x).
    sqrt_backward { sqrt_backward_f32: f32; sqrt_backward_bf16: bf16; } (y, dy) = dy / (2.0 * y);

    /// Computes y = 1 / sqrt(x).
    rsqrt { rsqrt_f32: f32; rsqrt_bf16: bf16; } (x) = math::rsqrt(x);

    /// Computes dx = -dy y^3 / 2, where y = 1 / sqrt(x).
    rsqrt_backward { rsqrt_backward_f32: f32; rsqrt_backward_bf16: bf16; } (y, dy) = (-0.5 * dy) * (y * (y * y));

    /// Computes y = x^2.
    square { square_f32: f32; square_bf16: bf16; } (x) = x * x;

    /// Computes dx = 2 x dy.
    square_backward { square_backward_f32: f32; square_backward_bf16: bf16; } (x, dy) = (x + x) * dy;

    /// Computes y = sin(x).
    sin { sin_f32: f32; sin_bf16: bf16; } (x) = math::sin(x);

    /// Computes dx = dy cos(x).
    sin_backward { sin_backward_f32: f32; sin_backward_bf16: bf16; } (x, dy) = dy * math::cos(x);

    /// Computes y = cos(x).
    cos { cos_f32: f32; cos_bf16: bf16; } (x) = math::cos(x);

    /// Computes dx = -dy sin(x).
    cos_backward { cos_backward_f32: f32; cos_backward_bf16: bf16; } (x, dy) = -dy * math::sin(x);

    /// Computes y = erf(x).
    erf { erf_f32: f32; erf_bf16: bf16; } (x) = math::erf(x);

    /// Computes dx = dy 2 / sqrt(pi) e^-x^2.
    erf_backward { erf_backward_f32: f32; erf_backward_bf16: bf16; } (x, dy) = dy * math::erf_derivative(x);

    /// Computes y = a + b. [`elementwise`](crate::elementwise) has it for operands of one shape.
    add { add_broadcast_f32: f32; add_broadcast_bf16: bf16; } (a, b) = a + b;

    /// Computes y = a - b.
    sub { sub_broadcast_f32: f32; sub_broadcast_bf16: bf16; } (a, b) = a - b;

    /// Computes y = a b.
    mul { mul_broadcast_f32: f32; mul_broadcast_bf16: bf16; } (a, b) = a * b;

    /// Computes y = a / b.
    div { div_f32: f32; div_bf16: bf16; } (a, b) = a / b;

    /// Computes db = -dy y / b, where y = a / b.
    div_backward { div_backward_f32: f32; div_backward_bf16: bf16; } (y, b, dy) = -dy * y / b;

    /// Computes y = a^b.
    pow { pow_f32: f32; pow_bf16: bf16; } (a, b) = math::pow(a, b);

    /// Computes da = dy b a^(b - 1), which is 0 for an exponent of 0.
    pow_backward { pow_backward_f32: f32; pow_backward_bf16: bf16; }
        (a, b, dy) = if b == 0.0 { 0.0 } else { dy * (b * math::pow(a, b - 1.0)) };

    /// Computes db = dy y log(a), where y = a^b, which is 0 where a is 0 and b is not negative.
    pow_exponent_backward { pow_exponent_backward_f32: f32; pow_exponent_backward_bf16: bf16; }
        (a, y, dy) = if a == 0.0 && y.abs() <= 1.0 { 0.0 } else { dy * (y * math::log(a)) };

    /// Computes the smaller of two, or NaN if either is NaN.
    minimum { minimum_f32: f32; minimum_bf16: bf16; } (a, b) = nan_or(a, b, if b < a { b } else { a });

    /// Computes the larger of two, or NaN if either is NaN.
    maximum { maximum_f32: f32; maximum_bf16: bf16; } (a, b) = nan_or(a, b, if b > a { b } else { a });

    /// Computes da = dy where a > b, dy / 2 where they are equal, and 0 elsewhere.
    where_larger { where_larger_f32: f32; where_larger_bf16: bf16; }
        (a, b, dy) = if a > b { dy } else if a == b { 0.5 * dy } else { 0.0 };

    /// Computes y = 1 where a = b, and 0 elsewhere.
    equal { equal_f32: f32; equal_bf16: bf16; } (a, b) = mask(a == b);

    /// Computes y = 1 where a < b, and 0 elsewhere.
    less { less_f32: f32; less_bf16: bf16; } (a, b) = mask(a < b);

    /// Computes y = 1 where a <= b, and 0 elsewhere.
    less_or_equal { less_or_equal_f32: f32; less_or_equal_bf16: bf16; } (a, b) = mask(a <= b);

    /// Computes y = a where the mask is not 0, and b elsewhere.
    choose { choose_f32: f32; choose_bf16: bf16; } (mask, a, b) = if mask != 0.0 { a } else { b };

    /// Computes the x limited to low..=high. A NaN stays NaN.
    clamp { clamp_f32: f32; clamp_bf16: bf16; } (x, low, high) = {
        let above = if x < low { low } else { x };
        if above > high { high } else { above }
    };

    /// Computes dx = dy where x = y, and 0 elsewhere, where y is a value to which x was limited.
    where_equal { where_equal_f32: f32; where_equal_bf16: bf16; } (x, y, dy) = if x == y { dy } else { 0.0 };
}
