//! A case, and the ways in which the list of cases names the kernels of one.

#![forbid(unsafe_code)]

use super::inputs::Inputs;
use std::fmt;
use std::sync::Arc;
use stepscope_core::Result;

/// A function that runs a kernel and keeps its results.
pub(super) type Run = for<'s> fn(&Inputs<'_, 's>) -> Result<()>;

/// A function that runs a variant of a kernel and keeps its results.
type RunVariant = dyn for<'s> Fn(&Inputs<'_, 's>) -> Result<()>;

/// A case, which runs a kernel and keeps its results.
#[derive(Clone)]
pub struct Case(Arc<RunVariant>);

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case").finish_non_exhaustive()
    }
}

impl Case {
    pub(super) fn new(run: impl for<'s> Fn(&Inputs<'_, 's>) -> Result<()> + 'static) -> Self {
        Self(Arc::new(run))
    }

    /// Runs the case.
    pub(super) fn run(&self, i: &Inputs<'_, '_>) -> Result<()> {
        (self.0)(i)
    }
}

/// An entry of the list: one kernel, or those of a family.
pub(super) enum Listed {
    One(&'static str, Run),
    /// A kernel for each storage type: f32, then BF16.
    Both([(&'static str, Run); 2]),
    /// A kernel for each variant. All have the same case.
    Each(fn() -> Vec<(&'static str, Case)>),
}

impl Listed {
    pub(super) fn cases(&self) -> Vec<(&'static str, Case)> {
        match self {
            &Self::One(name, run) => vec![(name, Case::new(run))],
            Self::Both(each) => each.iter().map(|&(name, run)| (name, Case::new(run))).collect(),
            Self::Each(cases) => cases(),
        }
    }
}

/// Makes a [`Both`] of the kernels of a family. `|i| ..` is generic in the storage type.
macro_rules! both {
    ($family:literal, <$S:ident>, |$i:ident| $body:expr) => {{
        fn run<$S: ops::AttentionElement>($i: &Inputs<'_, '_>) -> Result<()> {
            $body
        }
        Both([(concat!($family, "_f32"), run::<f32>), (concat!($family, "_bf16"), run::<bf16>)])
    }};
}

/// Makes an [`Each`] of the variants of a family that satisfy `if`. The pattern matches what
/// follows the name in their table.
macro_rules! each {
    ($variants:expr, |$i:ident, $($value:pat_param),+| $body:expr $(, if $wanted:expr)?) => {
        Each(|| {
            let variants = $variants.iter().copied()$(.filter($wanted))?;
            variants.map(|(name, $($value),+)| (name, Case::new(move |$i| $body))).collect()
        })
    };
}

pub(super) use {both, each};
