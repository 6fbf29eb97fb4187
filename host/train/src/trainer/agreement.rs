//! Collects the settings that all ranks of a group must share, as names and values.
//!
//! Invariant: this file collects every property of a train state, trainer or batch that decides the
//! weights after an update. `Group::agree_on` compares the properties that only the program can
//! access. Properties that do not decide the weights, such as whether steps are captured, are left
//! out, so ranks may differ in them.

#![forbid(unsafe_code)]

use crate::optim::{Optimizer, UpdateRule};
use sha2::{Digest, Sha256};
use stepscope_core::internals::{KernelTest, hex};
use stepscope_core::{DeviceKind, Error, ParameterEntry, Parameters, Result, ptx_builds};

/// The names and values of one rank, of everything that decides the weights.
#[derive(Debug, Default)]
pub(super) struct WeightSettings(pub(super) Vec<(String, String)>);

impl WeightSettings {
    pub(super) fn add(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.push((name.into(), value.into()));
    }

    /// Adds an optional value.
    pub(super) fn add_option(&mut self, name: impl Into<String>, value: Option<impl ToString>) {
        self.add(name, value.map_or("none".into(), |value| value.to_string()));
    }
}

/// Returns the settings of the parameters and the optimizer of a group of several ranks, without
/// the weights themselves.
pub(super) fn of_optimizer<R: UpdateRule>(
    shards: usize,
    parameters: &Parameters,
    optimizer: &Optimizer<R>,
) -> Result<WeightSettings> {
    let mut settings = WeightSettings::default();
    settings.add("shards", shards.to_string());
    settings.add("kernels' results", sha256(KernelTest::registered()?.results));
    if parameters.device().description().kind == DeviceKind::Cuda {
        settings.add("PTX", format!("{:?}", ptx_builds()));
    }
    let spec = parameters.spec();
    let place = |entry: &ParameterEntry| format!("{} {}", entry.name(), entry.shape());
    let places: Vec<String> = spec.entries().iter().map(place).collect();
    settings.add("parameters", format!("{}: {}", places.len(), places.join(", ")));
    settings.add("master weights", format!("{:?}", spec.masters()));
    settings.add("type of the optimizer's state", format!("{:?}", spec.state()));
    settings.add("type of gradients", format!("{:?}", spec.gradients()));
    settings.add("BF16 copy of the weights", parameters.bf16_copy().is_some().to_string());
    settings.add("updates made", optimizer.updates().to_string());
    let Some(configuration) = optimizer.configuration() else {
        let expected = "a rule whose settings the ranks of a group can compare: implement \
                        `UpdateRule::configuration`";
        return Err(Error::misuse(optimizer.name(), expected, "none"));
    };
    configuration.into_iter().for_each(|(name, value)| settings.add(name, value));
    Ok(settings)
}

/// Returns the settings of an update: its number, the lengths of the batch's parts, and the rule's
/// settings for it.
#[cfg(feature = "group")]
pub(super) fn of_update<R: UpdateRule>(optimizer: &Optimizer<R>, lens: &[usize]) -> Result<WeightSettings> {
    let number = optimizer.updates().saturating_add(1);
    let mut settings = WeightSettings::default();
    settings.add("update", number.to_string());
    settings.add("samples in the parts of the batch", format!("{lens:?}"));
    settings.add("optimizer's settings for the update", format!("{:?}", optimizer.settings_of_update(number)?));
    Ok(settings)
}

fn sha256(text: &str) -> String {
    hex(&Sha256::digest(text))
}
