//! Pointwise ops: functions of one, two or three numbers, applied to every element.
//!
//! An op is one declaration in `functions.rs`: the function of the kernel with the same name in
//! `device/src/kernels/pointwise.rs`, the formula that JAX evaluates, and the gradient of each
//! operand. The gradients are launches of declared functions:
//!
//! ```text
//! pointwise! {
//!     /// The quotient.
//!     div(a, b) {
//!         y: "a / b",
//!         gradients: |y, dy| [div(dy, b), div_backward(y, b, dy)],
//!     }
//!
//!     /// The gradient of [`div`] by its divisor.
//!     div_backward(y, b, dy) { y: "-dy * y / b" }
//! }
//! ```
//! A gradient is a launch, or `same` as dy, or `none`. The backward pass reads the names in it and
//! nothing else ([`PointwiseOp::reads`]). If an operand broadcasts, its gradient is the sum over
//! the extents that repeat. `domain: positive` limits the first operand that checks use.
//!
//! Invariant: the result has the shape to which the operands broadcast.

mod declared;
mod functions;
mod operators;

pub use declared::pointwise_op;
pub(super) use functions::terms;
pub use functions::*;

use super::broadcast::Operand;
use super::fold::sum_to;
use super::pieces::{part, part_mut, pieces};
use crate::elementary;
use crate::error::{Error, Result};
use crate::ops::declare::ChosenArguments;
use crate::step::Step;
use crate::tape::{AnyVar, Backward, Kept, Var};
use crate::tensor::{Saved, Shape, Source, Stored, Tensor};
use half::bf16;
use std::fmt;
use std::ops::Range;

/// An operand of an op that is called on a variable: another variable, or a number.
pub enum Term<'s, S: Stored> {
    /// A variable of the same tape.
    Var(Var<'s, S>),
    /// A number, which has every shape.
    Number(f32),
}

impl<S: Stored> Clone for Term<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Stored> Copy for Term<'_, S> {}

impl<S: Stored> fmt::Debug for Term<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Var(var) => var.fmt(f),
            Self::Number(number) => number.fmt(f),
        }
    }
}

impl<S: Stored> From<f32> for Term<'_, S> {
    fn from(number: f32) -> Self {
        Self::Number(number)
    }
}

impl<'s, S: Stored> From<Var<'s, S>> for Term<'s, S> {
    fn from(var: Var<'s, S>) -> Self {
        Self::Var(var)
    }
}

impl<'s, S: Stored> From<&Var<'s, S>> for Term<'s, S> {
    fn from(var: &Var<'s, S>) -> Self {
        Self::Var(*var)
    }
}

impl<'s, S: Stored> Term<'s, S> {
    fn var(&self) -> Option<&Var<'s, S>> {
        if let Self::Var(var) = self { Some(var) } else { None }
    }

    fn operand(&self) -> Operand<'_, 's, S> {
        match self {
            Self::Var(var) => Operand::from(var.value()),
            Self::Number(number) => Operand::from(*number),
        }
    }
}

/// The launch of a function on its operands.
pub(super) type Function<S, const N: usize> =
    for<'x, 's> fn(&Step<'s>, [Operand<'x, 's, S>; N]) -> Result<Tensor<'s, S>>;

/// The gradient of the operand of a number, from the operands, the result y and its gradient dy.
pub(super) type Slope<S, const N: usize> =
    for<'x, 's> fn(&Step<'s>, usize, [Operand<'x, 's, S>; N], [Operand<'x, 's, S>; 2]) -> Result<Tensor<'s, S>>;

/// The gradient of an operand.
#[derive(Clone, Copy, Debug)]
pub(super) enum Gradient<S: Stored, const N: usize> {
    /// There is none.
    None,
    /// The gradient of the result.
    Same,
    /// It is launched.
    Of(Slope<S, N>),
}

/// Applies a declared op to variables and numbers.
#[track_caller]
pub(super) fn apply<'s, S: Stored, const N: usize>(
    name: &'static str,
    terms: [Term<'s, S>; N],
    function: Function<S, N>,
    gradients: [Gradient<S, N>; N],
) -> Result<Var<'s, S>> {
    let vars: Vec<&dyn AnyVar> = terms.iter().filter_map(Term::var).map(|var| var as &dyn AnyVar).collect();
    let Some(first) = terms.iter().find_map(Term::var) else {
        return Err(Error::misuse(name, "at least one variable", "numbers"));
    };
    let op = first.op(name, &vars)?;
    let y = function(op.step(), terms.each_ref().map(Term::operand))?.save();
    if gradients.iter().all(|gradient| matches!(gradient, Gradient::None)) {
        return Ok(op.unrecorded(y));
    }
    let kept = terms.map(|term| match term {
        Term::Var(var) => Ok(var.keep()),
        Term::Number(number) => Err(number),
    });
    let of_y = Kept::of(&y);
    Ok(op.record(y, move |back, dy| backward(back, dy, kept, of_y, gradients)))
}

/// Adds the gradients of the operands to theirs.
fn backward<'s, S: Stored, const N: usize>(
    back: &mut Backward<'_, '_, 's>,
    dy: Tensor<'s, S>,
    kept: [Result<Kept<S>, f32>; N],
    y: Kept<S>,
    gradients: [Gradient<S, N>; N],
) -> Result<()> {
    let mut terms = [Term::Number(0.0); N];
    for (term, kept) in terms.iter_mut().zip(kept) {
        *term = match kept {
            Ok(kept) => Term::Var(kept.var(back)?),
            Err(number) => Term::Number(number),
        };
    }
    let (y, step) = (y.value(back), back.step());
    let mut wanted: Vec<(usize, Var<'s, S>)> = (terms.iter().enumerate())
        .filter_map(|(number, term)| term.var().filter(|var| var.wants_gradient()).map(|var| (number, *var)))
        .collect();
    // An operand that repeats reads most and writes least, so it is first.
    wanted.sort_by_key(|(_, var)| var.shape() == dy.shape());
    // One operand may take dy itself, after the others.
    let takes_dy =
        |(number, var): &(usize, Var<'s, S>)| matches!(gradients[*number], Gradient::Same) && var.shape() == dy.shape();
    let last = wanted.iter().copied().rfind(takes_dy);
    for (number, var) in wanted.into_iter().filter(|(number, _)| last.is_none_or(|(last, _)| last != *number)) {
        let gradient = match gradients[number] {
            Gradient::None => continue,
            Gradient::Same if var.shape() == dy.shape() => match back.take(&var)? {
                Some(mut sum) => elementary::add_assign(step, &mut sum, &dy).map(|()| sum)?,
                None => elementary::copy(step, &dy)?,
            },
            Gradient::Same => sum_to(step, &dy, var.shape())?,
            Gradient::Of(slope) if var.shape() == dy.shape() => {
                let of_result = [Operand::from(&y), Operand::from(&dy)];
                slope(step, number, terms.each_ref().map(Term::operand), of_result)?
            }
            Gradient::Of(slope) => {
                let dy = Saved::new(dy.memory(), dy.shape());
                summed_slope(step, slope, number, terms, [&y, &dy], var.shape())?
            }
        };
        back.add(&var, gradient)?;
    }
    match last {
        Some((_, var)) => back.add(&var, dy),
        None => {
            step.free(dy);
            Ok(())
        }
    }
}

/// Returns the gradient of an operand of `shape` that repeats: the sum of the slope over the
/// extents along which it does, for a piece of the result's first extent at a time.
fn summed_slope<'s, S: Stored, const N: usize>(
    step: &Step<'s>,
    slope: Slope<S, N>,
    number: usize,
    terms: [Term<'s, S>; N],
    [y, dy]: [&Saved<'s, S>; 2],
    shape: Shape,
) -> Result<Tensor<'s, S>> {
    let whole = dy.shape();
    let rows = whole.extents()[0];
    // The elements of a row of a tensor, `None` if it is the same for all rows of the result.
    let row = |of: Shape| {
        let is_own = of.extents().len() == whole.extents().len() && of.extents()[0] == rows;
        is_own.then(|| of.elements() / rows.max(1))
    };
    let some = |x: &Saved<'s, S>, piece: &Range<usize>| if row(x.shape()).is_some() { part(x, piece) } else { *x };
    let sum = |piece: &Range<usize>| {
        let terms = terms.map(|term| term.var().map(|var| some(var.value(), piece)).ok_or(term));
        let operands = terms.each_ref().map(|term| term.as_ref().map_or_else(Term::operand, Operand::from));
        let of_result = [some(y, piece), some(dy, piece)];
        let full = slope(step, number, operands, of_result.each_ref().map(Operand::from))?;
        let sum = sum_to(step, &full, if row(shape).is_some() { shape.with(0, piece.len()) } else { shape })?;
        step.free(full);
        Ok::<_, Error>(sum)
    };
    let vars = terms.iter().filter_map(|term| term.var().and_then(|var| row(var.shape())));
    let lengths: Vec<usize> = vars.chain(row(whole)).collect();
    let bytes = lengths.last().map_or(0, |row| row * size_of::<S>());
    let mut pieces = pieces(rows, bytes, &lengths).peekable();
    match pieces.next() {
        Some(first) if pieces.peek().is_some() && row(shape).is_some() => {
            let mut sums = step.empty(shape)?;
            for piece in std::iter::once(first).chain(pieces) {
                let sum = sum(&piece)?;
                elementary::copy_into(step, &sum, &mut part_mut(&mut sums, &piece))?;
                step.free(sum);
            }
            Ok(sums)
        }
        _ => sum(&(0..rows)),
    }
}

/// A declared function, for code that runs all of them.
#[derive(Clone, Copy, Debug)]
pub struct PointwiseOp {
    /// The function's name in [`ops::pointwise`](crate::ops::pointwise).
    pub name: &'static str,
    /// The name of its kernels, without the stored type.
    pub kernel: &'static str,
    /// The names of its operands.
    pub operands: &'static [&'static str],
    /// The result, as JAX writes it.
    pub y: &'static str,
    /// True if the first operand is positive wherever the result is a number.
    pub positive: bool,
    /// For each operand with a gradient, the names that its launch reads.
    pub reads: &'static [&'static [&'static str]],
    /// The launch in f32.
    pub in_f32: AnyFunction<f32>,
    /// The launch in BF16.
    pub in_bf16: AnyFunction<bf16>,
    /// The launch of the kernel in f32, with chosen arguments.
    pub chosen_f32: ChosenPointwise<f32>,
    /// The launch in BF16.
    pub chosen_bf16: ChosenPointwise<bf16>,
}

/// A function of as many operands as it declares.
pub type AnyFunction<S> = for<'x, 's> fn(&Step<'s>, &[Operand<'x, 's, S>]) -> Result<Tensor<'s, S>>;

/// Launches a kernel with chosen arguments, for honest operands and a result of a shape. Each
/// tensor has more elements than its shape.
pub type ChosenPointwise<S> = for<'s> fn(
    &Step<'s>,
    [(&Tensor<'s, S>, Shape); 3],
    (&mut Tensor<'s, S>, Shape),
    &mut dyn ChosenArguments,
) -> Result<()>;

/// Declares pointwise ops; see the module.
macro_rules! pointwise {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident($($x:ident),+) {
            y: $y:literal
            $(, domain: $domain:ident)?
            $(, same_shape: $module:ident::$kernel:ident)?
            $(, gradients: |$of_y:ident, $dy:ident| [$($gradient:ident $(($($of:expr),+))?),+])?
            $(,)?
        }
    )*) => {
        $(
            $(#[doc = $doc])*
            ///
            #[doc = concat!("`out = ", $y, "`; the operands broadcast. Queued; no scratch.")]
            ///
            /// # Errors
            /// [`Error::Misuse`](crate::Error::Misuse) unless the shapes broadcast;
            /// [`Error::ArenaFull`](crate::Error::ArenaFull).
            #[track_caller]
            pub fn $name<'x, 's, S: $crate::tensor::Stored>(
                step: &$crate::step::Step<'s>,
                $($x: impl Into<$crate::ops::broadcast::Operand<'x, 's, S>>),+
            ) -> $crate::error::Result<$crate::tensor::Tensor<'s, S>> {
                let operands = [$($x.into()),+];
                let shape = $crate::ops::broadcast::broadcast(stringify!($name), &operands.map(|of| of.shape()))?;
                let mut out = step.empty(shape)?;
                pointwise!(@launch step $name operands shape out [$($x)+] $($module::$kernel)?);
                Ok(out)
            }
        )*

        impl<'s, S: $crate::tensor::Stored> $crate::tape::Var<'s, S> {
            $(pointwise! { @method [$($doc)*] $name [$($x)+] $y $([$of_y $dy $($gradient $(($($of),+))?),+])? })*
        }

        /// The ops on variables and numbers.
        pub(in crate::ops) mod terms {
            use super::*;

            $(pointwise! { @on_terms $name [$($x)+] $([$of_y $dy $($gradient $(($($of),+))?),+])? })*
        }

        /// The rows of the functions declared here.
        pub const POINTWISE: &[$crate::ops::pointwise::PointwiseOp] = &[$(
            $crate::ops::pointwise::PointwiseOp {
                name: stringify!($name),
                kernel: concat!(stringify!($name) $(, pointwise!(@suffix $kernel))?),
                operands: &[$(stringify!($x)),+],
                y: $y,
                positive: matches!(concat!("" $(, stringify!($domain))?).as_bytes(), b"positive"),
                reads: &[$($(pointwise!(@reads $gradient $(($($of),+))?)),+)?],
                in_f32: |step, operands| pointwise!(@call $name step operands [$($x)+]),
                in_bf16: |step, operands| pointwise!(@call $name step operands [$($x)+]),
                chosen_f32: |step, operands, out, arguments| {
                    pointwise!(@chosen $name step operands out arguments [$($x)+])
                },
                chosen_bf16: |step, operands, out, arguments| {
                    pointwise!(@chosen $name step operands out arguments [$($x)+])
                },
            }
        ),*];
    };

    (@launch $step:ident $name:ident $operands:ident $shape:ident $out:ident [$x:ident]) => {{
        use $crate::tensor::Target as _;
        let [$x] = $operands;
        $step.launch(kernels::pointwise::$name { $x: $x.slice(), out: $out.out() })?;
    }};
    (@launch $step:ident $name:ident $operands:ident $shape:ident $out:ident [$a:ident $b:ident] $module:ident::$kernel:ident) => {
        if let [Some(of_a), Some(of_b)] = $operands.map(|of| of.shape()) && of_a == of_b {
            use $crate::tensor::Target as _;
            let [$a, $b] = $operands;
            $step.launch(kernels::$module::$kernel { $a: $a.slice(), $b: $b.slice(), out: $out.out() })?;
        } else {
            pointwise!(@launch $step $name $operands $shape $out [$a $b]);
        }
    };
    (@launch $step:ident $name:ident $operands:ident $shape:ident $out:ident [$($x:ident)+]) => {
        if $shape.elements() > 0 {
            use $crate::tensor::Target as _;
            let (layout, length) = ($crate::ops::broadcast::layout($shape, &$operands), $shape.elements());
            let [$($x),+] = $operands;
            $step.launch(kernels::pointwise::$name { $($x: $x.slice(),)+ layout, length, out: $out.out() })?;
        }
    };

    // Without gradients it is a launch of the backward pass, and no op of a variable.
    (@method [$($doc:literal)*] $name:ident [$($x:ident)+] $y:literal) => {};
    (@method [$($doc:literal)*] $name:ident [$x:ident $($others:ident)*] $y:literal [$($gradients:tt)+]) => {
        $(#[doc = $doc])*
        ///
        #[doc = concat!("`", $y, "`, where `", stringify!($x), "` is this variable. The operands are variables or numbers, and broadcast.")]
        ///
        /// # Errors
        /// [`Error::Misuse`](crate::Error::Misuse) unless the shapes broadcast;
        /// [`Error::ArenaFull`](crate::Error::ArenaFull).
        #[track_caller]
        pub fn $name(
            &self,
            $($others: impl Into<$crate::ops::pointwise::Term<'s, S>>),*
        ) -> $crate::error::Result<Self> {
            terms::$name([$crate::ops::pointwise::Term::Var(*self), $($others.into()),*])
        }
    };

    (@on_terms $name:ident [$($x:ident)+]) => {};
    (@on_terms $name:ident [$($x:ident)+] [$($gradients:tt)+]) => {
        #[track_caller]
        pub(in crate::ops) fn $name<S: $crate::tensor::Stored>(
            terms: [$crate::ops::pointwise::Term<'_, S>; [$(stringify!($x)),+].len()],
        ) -> $crate::error::Result<$crate::tape::Var<'_, S>> {
            $crate::ops::pointwise::apply(
                stringify!($name),
                terms,
                |step, [$($x),+]| super::$name(step, $($x),+),
                pointwise!(@gradients [$($x)+] $($gradients)+),
            )
        }
    };

    (@gradients $x:tt $y:ident $dy:ident $($gradient:ident $(($($of:expr),+))?),+) => {
        [$(pointwise!(@gradient $x $y $dy $gradient $(($($of),+))?)),+]
    };
    (@gradient $x:tt $y:ident $dy:ident none) => { $crate::ops::pointwise::Gradient::None };
    (@gradient $x:tt $y:ident $dy:ident same) => { $crate::ops::pointwise::Gradient::Same };
    (@gradient [$($x:ident)+] $y:ident $dy:ident $function:ident ($($of:expr),+)) => {
        $crate::ops::pointwise::Gradient::Of(|step, _number, [$($x),+], [$y, $dy]| {
            let _ = [$($x,)+ $y, $dy];
            super::$function(step, $($of),+)
        })
    };

    // An op whose operands of one shape have kernels of their own.
    (@suffix $kernel:ident) => { "_broadcast" };

    (@reads none) => { &[] };
    (@reads same) => { &["dy"] };
    (@reads $function:ident ($($of:expr),+)) => { &[$(stringify!($of)),+] };

    (@call $name:ident $step:ident $operands:ident [$($x:ident)+]) => {{
        let Ok([$($x),+]) = <[_; [$(stringify!($x)),+].len()]>::try_from($operands) else {
            return Err($crate::error::Error::misuse(stringify!($name), "its operands", $operands.len().to_string()));
        };
        $name($step, $($x),+)
    }};

    (@chosen $name:ident $step:ident $operands:ident $out:ident $arguments:ident [$x:ident]) => {{
        use $crate::tensor::{Source as _, Target as _};
        let ([(x, shape), ..], (out, to)) = ($operands, $out);
        let kernel = kernels::pointwise::$name {
            $x: x.slice().part($arguments.range(stringify!($x), shape.elements())),
            out: out.out().part($arguments.range("out", to.elements())),
        };
        $crate::ops::declare::launch_chosen($step, kernel, $arguments)
    }};
    (@chosen $name:ident $step:ident $operands:ident $out:ident $arguments:ident [$($x:ident)+]) => {{
        use $crate::tensor::{Source as _, Target as _};
        let (out, to) = $out;
        let mut operands = $operands.into_iter();
        let named = [$((stringify!($x), operands.next().expect("at most three"))),+];
        let honest = named.map(|(_, (tensor, shape))| $crate::ops::broadcast::Operand::shaped(tensor, shape));
        let layout = $crate::ops::broadcast::layout(to, &honest);
        let mut slices =
            named.map(|(name, (x, shape))| x.slice().part($arguments.range(name, shape.elements()))).into_iter();
        let kernel = kernels::pointwise::$name {
            $($x: slices.next().expect("a slice for each"),)+
            layout: layout.map(|word| $crate::ops::declare::chosen($arguments, "layout", word)),
            length: $crate::ops::declare::chosen($arguments, "length", to.elements()),
            out: out.out().part($arguments.range("out", to.elements())),
        };
        $crate::ops::declare::launch_chosen($step, kernel, $arguments)
    }};
}
pub(super) use pointwise;
