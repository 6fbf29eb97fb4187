//! What all ranks of a group must have alike, as names and values.
//!
//! Invariant: whatever a learner, a trainer or a batch has that decides the weights after an update
//! is here, or is compared by [`Group::agree_on`](crate::Group::agree_on) because only the program
//! knows it. What does not decide them, such as whether steps are captured, is not here: ranks may
//! differ in it.

#![forbid(unsafe_code)]

use crate::digest::hex;
use crate::driver::{DeviceKind, ptx_builds};
use crate::error::{Error, Result};
use crate::group::agreement::Settings;
use crate::optim::{Optimizer, UpdateRule};
use crate::params::{LayoutEntry, Parameters};
use sha2::{Digest, Sha256};

/// The committed digests of what all kernels compute: two builds that have the same compute the
/// same.
const RESULTS: &str = include_str!("../same_bits/golden.txt");

/// The settings of weights and an optimiser in a group of several ranks. Waits.
pub(super) fn of_weights<R: UpdateRule>(
    shards: usize,
    parameters: &Parameters,
    optimizer: &Optimizer<R>,
) -> Result<Settings> {
    let mut settings = Settings::default();
    settings.add("shards", shards.to_string());
    settings.add("kernels' results", sha256(RESULTS));
    if parameters.flat().device().description().kind == DeviceKind::Cuda {
        settings.add("PTX", format!("{:?}", ptx_builds()));
    }
    let layout = parameters.layout();
    let place = |entry: &LayoutEntry| format!("{} {}", entry.name(), entry.shape());
    let places: Vec<String> = layout.entries().iter().map(place).collect();
    settings.add("parameters", format!("{}: {}", places.len(), places.join(", ")));
    settings.add("weights", parameters.sha256()?);
    settings.add("BF16 copy of the weights", parameters.bf16_copy().is_some().to_string());
    settings.add("updates made", optimizer.updates().to_string());
    let Some(configuration) = optimizer.configuration()? else {
        let expected = "a rule that gives its settings, by which the ranks of a group compare it: implement \
                        `UpdateRule::configuration`";
        return Err(Error::misuse(optimizer.name(), expected, "none"));
    };
    configuration.into_iter().for_each(|(name, value)| settings.add(name, value));
    Ok(settings)
}

/// The settings of an update: its number, the lengths of the batch's parts, and what the rule says
/// of it.
pub(super) fn of_update<R: UpdateRule>(optimizer: &Optimizer<R>, lens: &[usize]) -> Result<Settings> {
    let number = optimizer.updates().saturating_add(1);
    let mut settings = Settings::default();
    settings.add("update", number.to_string());
    settings.add("samples in the parts of the batch", format!("{lens:?}"));
    settings.add("optimizer's settings for the update", format!("{:?}", optimizer.settings_of_update(number)?));
    Ok(settings)
}

fn sha256(text: &str) -> String {
    hex(&Sha256::digest(text))
}
