//! `+`, `-`, `*`, `/` and comparisons of variables and numbers, which broadcast.
//!
//! An operator returns a `Result`: `(&a + &b)?`, `(&x * 0.5)?`, `(1.0 - &x)?`.
//!
//! Invariant: an operator is the op of the same name.

use super::{Term, terms};
use crate::error::Result;
use crate::tape::Var;
use crate::tensor::Stored;
use std::ops::{Add, Div, Mul, Neg, Sub};

macro_rules! operators {
    ($($trait:ident $method:ident;)*) => {$(
        impl<'s, S: Stored, R: Into<Term<'s, S>>> $trait<R> for &Var<'s, S> {
            type Output = Result<Var<'s, S>>;

            #[track_caller]
            fn $method(self, other: R) -> Self::Output {
                terms::$method([self.into(), other.into()])
            }
        }

        impl<'s, S: Stored, R: Into<Term<'s, S>>> $trait<R> for Var<'s, S> {
            type Output = Result<Var<'s, S>>;

            #[track_caller]
            fn $method(self, other: R) -> Self::Output {
                terms::$method([self.into(), other.into()])
            }
        }

        impl<'s, S: Stored> $trait<&Var<'s, S>> for f32 {
            type Output = Result<Var<'s, S>>;

            #[track_caller]
            fn $method(self, other: &Var<'s, S>) -> Self::Output {
                terms::$method([self.into(), other.into()])
            }
        }

        impl<'s, S: Stored> $trait<Var<'s, S>> for f32 {
            type Output = Result<Var<'s, S>>;

            #[track_caller]
            fn $method(self, other: Var<'s, S>) -> Self::Output {
                terms::$method([self.into(), other.into()])
            }
        }
    )*};
}

operators! {
    Add add;
    Sub sub;
    Mul mul;
    Div div;
}

impl<'s, S: Stored> Neg for &Var<'s, S> {
    type Output = Result<Var<'s, S>>;

    #[track_caller]
    fn neg(self) -> Self::Output {
        self.neg()
    }
}

impl<'s, S: Stored> Neg for Var<'s, S> {
    type Output = Result<Var<'s, S>>;

    #[track_caller]
    fn neg(self) -> Self::Output {
        -&self
    }
}

impl<'s, S: Stored> Var<'s, S> {
    /// The negative: `-&x`.
    ///
    /// # Errors
    /// [`Error::ArenaFull`](crate::Error::ArenaFull).
    #[track_caller]
    pub fn neg(&self) -> Result<Self> {
        terms::mul([self.into(), Term::Number(-1.0)])
    }

    /// A mask of 1 where this variable is larger, and of 0 elsewhere. It has no gradient.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) unless the shapes broadcast;
    /// [`Error::ArenaFull`](crate::Error::ArenaFull).
    #[track_caller]
    pub fn greater(&self, other: impl Into<Term<'s, S>>) -> Result<Self> {
        terms::less([other.into(), self.into()])
    }

    /// A mask of 1 where this variable is larger or equal, and of 0 elsewhere; see
    /// [`Var::greater`].
    #[track_caller]
    pub fn greater_or_equal(&self, other: impl Into<Term<'s, S>>) -> Result<Self> {
        terms::less_or_equal([other.into(), self.into()])
    }

    /// A mask of 1 where this variable differs, and of 0 elsewhere. A NaN differs from everything.
    /// See [`Var::greater`].
    #[track_caller]
    pub fn not_equal(&self, other: impl Into<Term<'s, S>>) -> Result<Self> {
        terms::sub([Term::Number(1.0), terms::equal([self.into(), other.into()])?.into()])
    }
}
