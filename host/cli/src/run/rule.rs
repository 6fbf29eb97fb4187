//! The optimizer of a run, which the command line selects.

use clap::ValueEnum;
use stepscope::optim::{Muon, ParameterGroup, SmallUpdateArguments, UpdateArguments, UpdateRule};
use stepscope::{AdamW, Result, Step};

/// The name of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Optimizer {
    /// AdamW for all parameters.
    Adamw,
    /// Muon for the matrices of blocks, and AdamW for all other parameters.
    Muon,
}

impl Optimizer {
    /// Returns the rule with these settings of AdamW.
    pub(crate) fn rule(self, adamw: AdamW) -> Rule {
        match self {
            Self::Adamw => Rule::AdamW(adamw),
            Self::Muon => Rule::Muon(Muon { adamw, ..Muon::default() }),
        }
    }

    /// Returns the setting that decides the weights. Checkpoints from before this setting lack it.
    pub(crate) fn setting(self) -> Option<(&'static str, String)> {
        let name = self.to_possible_value().filter(|_| self != Self::Adamw)?.get_name().to_owned();
        Some(("optimizer", name))
    }
}

/// The rule of an optimizer.
#[derive(Clone, Debug)]
pub(crate) enum Rule {
    AdamW(AdamW),
    Muon(Muon),
}

/// Calls a function of the selected rule.
macro_rules! of {
    ($rule:expr, $function:ident($($argument:expr),*)) => {
        match $rule {
            Rule::AdamW(rule) => rule.$function($($argument),*),
            Rule::Muon(rule) => rule.$function($($argument),*),
        }
    };
}

impl UpdateRule for Rule {
    fn name(&self) -> &'static str {
        of!(self, name())
    }

    fn check(&self) -> Result<()> {
        of!(self, check())
    }

    fn state(&self) -> &'static [&'static str] {
        of!(self, state())
    }

    fn has_groups(&self) -> bool {
        of!(self, has_groups())
    }

    fn writes_copy(&self) -> bool {
        of!(self, writes_copy())
    }

    fn needs_whole_parameters(&self) -> bool {
        of!(self, needs_whole_parameters())
    }

    fn configuration(&self) -> Option<Vec<(&'static str, String)>> {
        of!(self, configuration())
    }

    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32> {
        of!(self, settings(number, group))
    }

    fn queue<'s>(&self, step: &Step<'s>, arguments: UpdateArguments<'_, 's>) -> Result<()> {
        of!(self, queue(step, arguments))
    }

    fn queue_small<'s>(&self, step: &Step<'s>, arguments: SmallUpdateArguments<'_, 's>) -> Result<()> {
        of!(self, queue_small(step, arguments))
    }
}
