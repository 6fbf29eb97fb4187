//! Parameter groups: parameters with their own rate or weight decay.
//!
//! Invariant: each parameter is entirely in one group, and no run of [`RUN`] elements contains two
//! parameters. Therefore no vector that a kernel moves spans two groups.

#![forbid(unsafe_code)]

use super::range::at_least_zero;
use kernels::update::RUN;
use std::fmt;
use stepscope_core::internals::ALIGN_BYTES;
use stepscope_core::{Error, ParameterEntry, ParameterSpec, Result};

// A parameter starts at the start of a run.
const _: () = assert!((ALIGN_BYTES / size_of::<f32>()).is_multiple_of(RUN));

/// The settings of a parameter group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParameterGroup {
    /// The factor of the learning rate.
    pub rate: f32,
    /// The weight decay. `None` means the optimizer's.
    pub weight_decay: Option<f32>,
}

impl Default for ParameterGroup {
    /// Makes a group with the optimizer's own rate and decay.
    fn default() -> Self {
        Self { rate: 1.0, weight_decay: None }
    }
}

type Belongs = Box<dyn Fn(&ParameterEntry) -> bool + Send + Sync>;

/// Parameter groups, defined by rules on names and shapes. The first matching rule wins. Parameters
/// that match no rule use the optimizer's own rate and decay.
///
/// ```
/// use stepscope::optim::{ParameterGroup, ParameterGroups};
///
/// let groups = ParameterGroups::new()
///     .with(ParameterGroup { rate: 0.1, weight_decay: None }, |entry| entry.name().starts_with("backbone."))
///     .no_decay(ParameterGroups::is_gain_bias_or_embedding);
/// ```
#[derive(Default)]
pub struct ParameterGroups {
    rules: Vec<(ParameterGroup, Belongs)>,
}

impl fmt::Debug for ParameterGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.rules.iter().map(|(group, _)| group)).finish()
    }
}

impl ParameterGroups {
    /// Makes one group, with the optimizer's own rate and decay.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a group of the parameters for which `belongs` is true and which no earlier group has
    /// taken.
    #[must_use]
    pub fn with(
        mut self,
        group: ParameterGroup,
        belongs: impl Fn(&ParameterEntry) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.rules.push((group, Box::new(belongs)));
        self
    }

    /// Adds a group whose weights do not decay.
    #[must_use]
    pub fn no_decay(self, belongs: impl Fn(&ParameterEntry) -> bool + Send + Sync + 'static) -> Self {
        self.with(ParameterGroup { weight_decay: Some(0.0), ..ParameterGroup::default() }, belongs)
    }

    /// True for parameters that are usually excluded from weight decay. They have one extent, as
    /// gains and biases do, or a part of their name between dots is `bias` or `gain`, or begins or
    /// ends with `embedding`.
    pub fn is_gain_bias_or_embedding(entry: &ParameterEntry) -> bool {
        let says_so = |part: &str| {
            ["bias", "gain"].contains(&part) || part.starts_with("embedding") || part.ends_with("embedding")
        };
        entry.shape().extents().len() == 1 || entry.name().split('.').any(says_so)
    }

    /// Returns the groups of a spec's parameters, and the group number of each run.
    pub(super) fn of(&self, spec: &ParameterSpec) -> Result<(Vec<ParameterGroup>, Vec<u32>)> {
        let op = "groups";
        for (group, _) in &self.rules {
            at_least_zero(op, "rate", group.rate)?;
            at_least_zero(op, "weight_decay", group.weight_decay.unwrap_or(0.0))?;
        }
        let mut runs = vec![0; spec.elements().div_ceil(RUN)];
        let mut sizes = vec![0usize; self.rules.len()];
        for entry in spec.entries() {
            let Some(number) = self.rules.iter().position(|(_, belongs)| belongs(entry)) else { continue };
            sizes[number] += 1;
            let range = entry.range();
            runs[range.start / RUN..range.end.div_ceil(RUN)].fill(number as u32 + 1);
        }
        if let Some(empty) = sizes.iter().position(|&size| size == 0) {
            let got = format!(
                "none for group {empty}, counted from 0: no parameter matches its rule, or earlier groups took them all"
            );
            return Err(Error::misuse(op, "a parameter for each group", got));
        }
        let groups =
            [ParameterGroup::default()].into_iter().chain(self.rules.iter().map(|(group, _)| *group)).collect();
        Ok((groups, runs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stepscope_core::Initializer;

    /// Makes parameters with these numbers of elements, `p0` and so on.
    fn spec(sizes: &[usize]) -> ParameterSpec {
        let mut spec = ParameterSpec::builder();
        for (number, &size) in sizes.iter().enumerate() {
            spec.add(format!("p{number}"), [size], Initializer::ZERO);
        }
        spec.build().unwrap()
    }

    proptest! {
        /// Checks that, for any sizes, every element has its parameter's group and no kernel vector
        /// spans two groups.
        #[test]
        fn every_vector_has_one_group(sizes in prop::collection::vec(1usize..300, 1..24), chosen in any::<u64>()) {
            let spec = spec(&sizes);
            let number = |entry: &ParameterEntry| entry.name()[1..].parse::<u32>().unwrap();
            let of = move |entry: &ParameterEntry| (chosen >> (2 * number(entry))) & 3;
            let members = |group| spec.entries().iter().filter(|entry| of(entry) == group).count();
            let mut groups = ParameterGroups::new();
            let mut numbers = [0; 4];
            for group in 1..4 {
                if members(group) > 0 {
                    groups = groups.with(ParameterGroup { rate: group as f32, ..ParameterGroup::default() }, move |entry| of(entry) == group);
                    numbers[group as usize] = groups.rules.len() as u32;
                }
            }
            let (found, runs) = groups.of(&spec).unwrap();
            prop_assert_eq!(found.len(), groups.rules.len() + 1);
            prop_assert_eq!(runs.len() * RUN, spec.elements());
            for entry in spec.entries() {
                prop_assert_eq!(entry.start() % RUN, 0);
                for at in entry.range() {
                    let vector = at / 4 * 4;
                    for element in vector..vector + 4 {
                        prop_assert_eq!(runs[element / RUN], numbers[of(entry) as usize]);
                    }
                }
            }
        }
    }

    #[test]
    fn first_matching_rule_wins() {
        let spec = spec(&[3, 4, 5]);
        let (quick, slow) =
            (ParameterGroup { rate: 2.0, weight_decay: None }, ParameterGroup { rate: 0.5, weight_decay: Some(0.1) });
        let groups =
            ParameterGroups::new().with(quick, |entry| entry.name() == "p1").with(slow, |entry| entry.name() != "p2");
        assert_eq!(groups.of(&spec).unwrap(), (vec![ParameterGroup::default(), quick, slow], vec![2, 1, 0]));
        let refused = |groups: ParameterGroups, words: &str| {
            let error = groups.of(&spec).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(ParameterGroups::new().no_decay(|_| true).no_decay(|_| true), "none for group 1");
        refused(ParameterGroups::new().no_decay(|entry| entry.name() == "p3"), "none for group 0");
        refused(
            ParameterGroups::new().with(ParameterGroup { rate: -1.0, ..slow }, |_| true),
            "`rate` finite and at least 0, got -1",
        );
        refused(ParameterGroups::new().with(ParameterGroup { rate: f32::INFINITY, ..slow }, |_| true), "`rate`");
        refused(
            ParameterGroups::new().with(ParameterGroup { weight_decay: Some(f32::NAN), ..slow }, |_| true),
            "`weight_decay`",
        );
    }

    #[test]
    fn gains_biases_and_embeddings_are_recognized() {
        let mut spec = ParameterSpec::builder();
        let not = ["head.weight", "gained.weight", "biased.weight", "again", "embed"];
        let known = ["head.bias", "gain.0", "token_embedding.weight", "embeddings", "embedding"];
        for name in not.iter().chain(&known) {
            spec.add(*name, [2, 2], Initializer::ZERO);
        }
        spec.add("scale", [7], Initializer::ZERO);
        let spec = spec.build().unwrap();
        let found = spec
            .entries()
            .iter()
            .filter(|entry| ParameterGroups::is_gain_bias_or_embedding(entry))
            .map(ParameterEntry::name);
        assert_eq!(found.collect::<Vec<_>>(), [known.as_slice(), &["scale"]].concat());
    }
}
