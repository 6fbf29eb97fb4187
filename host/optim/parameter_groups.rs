//! Parameter groups: which parameters have a rate or a weight decay of their own.
//!
//! Invariant: each parameter is in one group, all of it, and no run of [`RUN`] elements has two parameters: so no vector that a kernel
//! moves has two groups.

#![forbid(unsafe_code)]

use super::range::at_least_zero;
use crate::error::{Error, Result};
use crate::memory::ALIGN_BYTES;
use crate::params::{Layout, LayoutEntry};
use kernels::update::RUN;
use std::fmt;

// A parameter starts where a run does.
const _: () = assert!((ALIGN_BYTES / size_of::<f32>()).is_multiple_of(RUN));

/// What parameters of a group have of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParameterGroup {
    /// Times the learning rate.
    pub rate: f32,
    /// The weight decay; none: the optimiser's.
    pub weight_decay: Option<f32>,
}

impl Default for ParameterGroup {
    /// The optimiser's own rate and decay.
    fn default() -> Self {
        Self { rate: 1.0, weight_decay: None }
    }
}

type Belongs = Box<dyn Fn(&LayoutEntry) -> bool + Send + Sync>;

/// ParameterGroups of parameters, by rules on their names and shapes. A parameter is in the first group whose rule it meets, or else has the
/// optimiser's own rate and decay.
///
/// ```
/// use stepscope::{ParameterGroup, ParameterGroups};
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
    /// One group: that of the optimiser's own rate and decay.
    pub fn new() -> Self {
        Self::default()
    }

    /// One more group, of the parameters that `belongs` holds for and no group before has taken.
    #[must_use]
    pub fn with(
        mut self,
        group: ParameterGroup,
        belongs: impl Fn(&LayoutEntry) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.rules.push((group, Box::new(belongs)));
        self
    }

    /// One more group, whose weights do not decay.
    #[must_use]
    pub fn no_decay(self, belongs: impl Fn(&LayoutEntry) -> bool + Send + Sync + 'static) -> Self {
        self.with(ParameterGroup { weight_decay: Some(0.0), ..ParameterGroup::default() }, belongs)
    }

    /// Whether a parameter is one that most do not let decay: it has one extent, as gains and biases have, or its name says it by a part
    /// between dots that is `bias` or `gain`, or begins or ends with `embedding`.
    pub fn is_gain_bias_or_embedding(entry: &LayoutEntry) -> bool {
        let says_so = |part: &str| {
            ["bias", "gain"].contains(&part) || part.starts_with("embedding") || part.ends_with("embedding")
        };
        entry.shape().extents().len() == 1 || entry.name().split('.').any(says_so)
    }

    /// The groups of a layout's parameters, and the number of each run's.
    pub(super) fn of(&self, layout: &Layout) -> Result<(Vec<ParameterGroup>, Vec<u32>)> {
        let op = "groups";
        for (group, _) in &self.rules {
            at_least_zero(op, "rate", group.rate)?;
            at_least_zero(op, "weight_decay", group.weight_decay.unwrap_or(0.0))?;
        }
        let mut runs = vec![0; layout.elements().div_ceil(RUN)];
        let mut sizes = vec![0usize; self.rules.len()];
        for entry in layout.entries() {
            let Some(number) = self.rules.iter().position(|(_, belongs)| belongs(entry)) else { continue };
            sizes[number] += 1;
            let range = entry.range();
            runs[range.start / RUN..range.end.div_ceil(RUN)].fill(number as u32 + 1);
        }
        if let Some(empty) = sizes.iter().position(|&size| size == 0) {
            let got = format!(
                "none for group {empty}, counted from 0: no name or shape meets its rule, or groups before took them"
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
    use crate::initializer::Initializer;
    use proptest::prelude::*;

    /// Parameters of so many elements, `p0` and on.
    fn layout(sizes: &[usize]) -> Layout {
        let mut layout = Layout::builder();
        for (number, &size) in sizes.iter().enumerate() {
            layout.add(format!("p{number}"), [size], Initializer::ZERO);
        }
        layout.build().unwrap()
    }

    proptest! {
        /// Whatever their sizes, every element has its parameter's group, and no vector of a kernel has two.
        #[test]
        fn every_vector_has_one_group(sizes in prop::collection::vec(1usize..300, 1..24), chosen in any::<u64>()) {
            let layout = layout(&sizes);
            let number = |entry: &LayoutEntry| entry.name()[1..].parse::<u32>().unwrap();
            let of = move |entry: &LayoutEntry| (chosen >> (2 * number(entry))) & 3;
            let members = |group| layout.entries().iter().filter(|entry| of(entry) == group).count();
            let mut groups = ParameterGroups::new();
            let mut numbers = [0; 4];
            for group in 1..4 {
                if members(group) > 0 {
                    groups = groups.with(ParameterGroup { rate: group as f32, ..ParameterGroup::default() }, move |entry| of(entry) == group);
                    numbers[group as usize] = groups.rules.len() as u32;
                }
            }
            let (found, runs) = groups.of(&layout).unwrap();
            prop_assert_eq!(found.len(), groups.rules.len() + 1);
            prop_assert_eq!(runs.len() * RUN, layout.elements());
            for entry in layout.entries() {
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
    fn the_first_rule_that_is_met_counts() {
        let layout = layout(&[3, 4, 5]);
        let (quick, slow) =
            (ParameterGroup { rate: 2.0, weight_decay: None }, ParameterGroup { rate: 0.5, weight_decay: Some(0.1) });
        let groups =
            ParameterGroups::new().with(quick, |entry| entry.name() == "p1").with(slow, |entry| entry.name() != "p2");
        assert_eq!(groups.of(&layout).unwrap(), (vec![ParameterGroup::default(), quick, slow], vec![2, 1, 0]));
        let refused = |groups: ParameterGroups, words: &str| {
            let error = groups.of(&layout).unwrap_err().to_string();
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
    fn gains_biases_and_embeddings_are_known_by_shape_and_name() {
        let mut layout = Layout::builder();
        let not = ["head.weight", "gained.weight", "biased.weight", "again", "embed"];
        let known = ["head.bias", "gain.0", "token_embedding.weight", "embeddings", "embedding"];
        for name in not.iter().chain(&known) {
            layout.add(*name, [2, 2], Initializer::ZERO);
        }
        layout.add("scale", [7], Initializer::ZERO);
        let layout = layout.build().unwrap();
        let found = layout
            .entries()
            .iter()
            .filter(|entry| ParameterGroups::is_gain_bias_or_embedding(entry))
            .map(LayoutEntry::name);
        assert_eq!(found.collect::<Vec<_>>(), [known.as_slice(), &["scale"]].concat());
    }
}
