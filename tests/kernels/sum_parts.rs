//! Tests of `ops::launch::sum_parts_into`: the documented tree bit for bit, subtrees in place of
//! their parts, and refusals.

use crate::hostile::attack;
use crate::support::{Random, SPECIAL, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trial::{assert_refused, assert_same, trial};
use stepscope::{Device, ops};

/// Computes the tree plainly: halves of the parts, each summed separately.
fn tree(parts: &[&[f32]], at: usize) -> f32 {
    match parts {
        [part] => part[at],
        _ => {
            let (left, right) = parts.split_at(parts.len() / 2);
            tree(left, at) + tree(right, at)
        }
    }
}

/// Returns the first `length` elements of the sum of `count` parts.
fn sum(device: &Device, parts: &[f32], count: usize, length: usize) -> Vec<f32> {
    trial(device, |trial| {
        let parts = trial.upload(parts, [count, parts.len() / count])?;
        let mut out = trial.upload(&vec![0.5; length], [length])?;
        ops::launch::sum_parts_into(trial, &parts, &mut out)?;
        trial.output(&out)
    })
}

on_each_device! {
    fn every_count_has_its_tree(device: &Device) {
        let mut closeness = Closeness::new("sum of parts");
        for levels in 0..=6 {
            let count = 1 << levels;
            for (pitch, length) in [(4, 1), (4, 4), (8, 7), (1028, 1025), (4096, 4096)] {
                let mut values = Random::new(count as u64).uniforms(count * pitch, -0.7, 1.0);
                let special = SPECIAL.len().min(length);
                values[..special].copy_from_slice(&SPECIAL[..special]);
                let parts: Vec<&[f32]> = values.chunks(pitch).collect();
                let want: Vec<f32> = (0..length).map(|at| tree(&parts, at)).collect();
                let got = sum(device, &values, count, length);
                assert_same(format_args!("{count} parts of {pitch}, {length} of each"), &got, &want);
                let of = |at: usize| Exact::sum(levels, parts.iter().map(|part| Exact::given(part[at])));
                let plain = special..length;
                closeness.check(count, &got[plain.clone()], &plain.map(of).collect::<Vec<_>>());
            }
        }
        closeness.finish();
    }

    fn subtree_replaces_its_parts(device: &Device) {
        let values = Random::new(7).uniforms(16 * 12, -1.0, 1.0);
        let whole = sum(device, &values, 16, 12);
        for share in [2, 4, 8] {
            let sums: Vec<f32> = values.chunks(12 * share).flat_map(|parts| sum(device, parts, share, 12)).collect();
            assert_same(format_args!("subtrees of {share}"), &sum(device, &sums, 16 / share, 12), &whole);
        }
    }

    fn other_shapes_are_refused(device: &Device) {
        trial(device, |trial| {
            let eight = trial.upload(&[1.0; 24], [3, 8])?;
            let mut out = trial.upload(&[0.0; 8], [8])?;
            let mut refused = Vec::new();
            trial.with_scratch(|| {
                refused.push(ops::launch::sum_parts_into(trial, &eight, &mut out));
                refused.push(ops::launch::sum_parts_into(trial, &eight.reshape([4, 6])?, &mut out));
                Ok(())
            })?;
            let flat = trial.upload(&[1.0; 8], [8])?;
            refused.push(ops::launch::sum_parts_into(trial, &flat, &mut out));
            let words = [&["`count`", "power of two up to 64", "3"][..], &["`pitch`", "multiple of 4", "6"], &["parts `[count, pitch]`", "[8]"]];
            refused.into_iter().zip(words).for_each(|(outcome, words)| assert_refused(outcome, words));
            let short = trial.upload(&[1.0; 8], [2, 4])?;
            assert_refused(ops::launch::sum_parts_into(trial, &short, &mut out), &["`length`", "at most `pitch`", "8"]);
            Ok(())
        });
    }
}

attack! {
    sum_parts::sum_parts { parts: f32s 32, count: number 4, pitch: number 8, length: number 7, out: out 7 }
}
