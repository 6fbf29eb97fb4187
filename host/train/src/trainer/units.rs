//! Divides a model into units, which ranks that keep slices gather one at a time.
//!
//! Invariant: the units are adjacent, cover the flat region, and have whole parameters. They depend
//! only on the spec, so all ranks have the same.

#![forbid(unsafe_code)]

use std::ops::Range;
use stepscope_core::{ParameterEntry, ParameterSpec};

/// Returns the elements of each unit, ascending. Neighboring parameters of one block are a unit,
/// and so are neighboring parameters of no block.
pub(super) fn of(spec: &ParameterSpec) -> Vec<Range<usize>> {
    let entries = spec.entries();
    let is_first = |at: usize| at == 0 || block(entries[at].name()) != block(entries[at - 1].name());
    let starts: Vec<usize> =
        (0..entries.len()).filter(|&at| is_first(at)).map(|at| ParameterEntry::start(&entries[at])).collect();
    let ends = starts.iter().copied().skip(1).chain([spec.elements()]);
    starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()
}

/// Returns the block of a parameter: its name up to the first number, such as `blocks.3`.
fn block(name: &str) -> Option<&str> {
    let mut end = 0;
    for component in name.split('.') {
        end += component.len();
        if !component.is_empty() && component.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(&name[..end]);
        }
        end += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use stepscope_core::Initializer;

    #[test]
    fn neighbours_of_a_block_share() {
        let mut spec = ParameterSpec::builder();
        let names = ["table", "positions", "blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.10.a", "norm.gain"];
        names.iter().for_each(|name| drop(spec.add(*name, [64], Initializer::ONE)));
        let units = of(&spec.build().unwrap());
        assert_eq!(units, [0..128, 128..256, 256..320, 320..384, 384..448]);
    }

    #[test]
    fn a_block_ends_with_its_number() {
        assert_eq!(block("model.layers.12.norm.1.gain"), Some("model.layers.12"));
        assert_eq!((block("table"), block("layer3.gain"), block("3.gain")), (None, None, Some("3")));
    }
}
