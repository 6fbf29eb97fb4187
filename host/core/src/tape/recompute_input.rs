//! The inputs that a recomputed closure keeps, and lends to each of its runs.
//!
//! Invariant: what is lent has the brand of the closure's own step, which ends before what was
//! kept.

#![forbid(unsafe_code)]

use super::var::{Var, check};
use crate::arena::ArenaInner;
use crate::error::Result;
use crate::indices::Indices;
use crate::tensor::{Element, Saved, Source, Stored};

pub(super) const OP: &str = "recompute";

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// Inputs that [`Tape::recompute`](super::Tape::recompute) can keep: variables, saved tensors, an
/// [`AttentionConfig`](crate::ops::AttentionConfig) with its masks, and options, tuples, arrays and
/// vectors of them.
pub trait RecomputeInput<'s>: sealed::Sealed {
    /// The type that the closure receives: the same value, in its own step.
    type Lent<'i>;

    /// Returns what a run of the closure receives. [`Tape::recompute`](super::Tape::recompute) calls
    /// it.
    fn lend<'i>(&self, lender: &mut Lender<'i>) -> Result<Self::Lent<'i>>;
}

/// Assigns lent variables their numbers on the closure's tape.
#[derive(Debug)]
pub struct Lender<'i> {
    /// The memory of the closure's step.
    pub(super) region: &'i ArenaInner,
    /// The identities of the enclosing tape and of the closure's own.
    pub(super) tapes: [u64; 2],
    /// For each number, the output of the enclosing tape.
    pub(super) outputs: Vec<usize>,
}

impl<S: Stored> sealed::Sealed for Var<'_, S> {}

impl<'s, S: Stored> RecomputeInput<'s> for Var<'s, S> {
    type Lent<'i> = Var<'i, S>;

    fn lend<'i>(&self, lender: &mut Lender<'i>) -> Result<Var<'i, S>> {
        let [around, within] = lender.tapes;
        check(self, OP, around)?;
        // A variable has one number, however often it is lent.
        let output = self.output.map(|output| {
            lender.outputs.iter().position(|&lent| lent == output).unwrap_or_else(|| {
                lender.outputs.push(output);
                lender.outputs.len() - 1
            })
        });
        let (value, region) = (self.value.lend(lender)?, lender.region);
        Ok(Var { value, region, tape: within, output, constant: self.constant })
    }
}

impl<T: Element> sealed::Sealed for Saved<'_, T> {}

impl<'s, T: Element> RecomputeInput<'s> for Saved<'s, T> {
    type Lent<'i> = Saved<'i, T>;

    fn lend<'i>(&self, _: &mut Lender<'i>) -> Result<Saved<'i, T>> {
        Ok(Saved::new(self.memory(), self.shape()))
    }
}

impl sealed::Sealed for Indices<'_> {}

impl<'s> RecomputeInput<'s> for Indices<'s> {
    type Lent<'i> = Indices<'i>;

    fn lend<'i>(&self, _: &mut Lender<'i>) -> Result<Indices<'i>> {
        Ok(Indices::lend(self))
    }
}

impl<K: sealed::Sealed> sealed::Sealed for Option<K> {}

impl<'s, K: RecomputeInput<'s>> RecomputeInput<'s> for Option<K> {
    type Lent<'i> = Option<K::Lent<'i>>;

    fn lend<'i>(&self, lender: &mut Lender<'i>) -> Result<Self::Lent<'i>> {
        self.as_ref().map(|kept| kept.lend(lender)).transpose()
    }
}

impl<K: sealed::Sealed> sealed::Sealed for Vec<K> {}

impl<'s, K: RecomputeInput<'s>> RecomputeInput<'s> for Vec<K> {
    type Lent<'i> = Vec<K::Lent<'i>>;

    fn lend<'i>(&self, lender: &mut Lender<'i>) -> Result<Self::Lent<'i>> {
        self.iter().map(|kept| kept.lend(lender)).collect()
    }
}

impl<K: sealed::Sealed, const N: usize> sealed::Sealed for [K; N] {}

impl<'s, K: RecomputeInput<'s>, const N: usize> RecomputeInput<'s> for [K; N] {
    type Lent<'i> = [K::Lent<'i>; N];

    fn lend<'i>(&self, lender: &mut Lender<'i>) -> Result<Self::Lent<'i>> {
        let lent: Vec<_> = self.iter().map(|kept| kept.lend(lender)).collect::<Result<_>>()?;
        let Ok(lent) = lent.try_into() else { unreachable!("as many as are kept") };
        Ok(lent)
    }
}

impl sealed::Sealed for () {}

impl<'s> RecomputeInput<'s> for () {
    type Lent<'i> = ();

    fn lend<'i>(&self, _: &mut Lender<'i>) -> Result<Self::Lent<'i>> {
        Ok(())
    }
}

macro_rules! tuples {
    ($(($($kept:ident)*))*) => {$(
        impl<$($kept: sealed::Sealed),*> sealed::Sealed for ($($kept,)*) {}

        #[allow(non_snake_case, reason = "a value has the name of its type")]
        impl<'s, $($kept: RecomputeInput<'s>),*> RecomputeInput<'s> for ($($kept,)*) {
            type Lent<'i> = ($($kept::Lent<'i>,)*);

            fn lend<'i>(&self, lender: &mut Lender<'i>) -> Result<Self::Lent<'i>> {
                let ($($kept,)*) = self;
                Ok(($($kept.lend(lender)?,)*))
            }
        }
    )*};
}

tuples! { (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) }
