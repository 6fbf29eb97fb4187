//! `ops::cross_entropy` and its backward pass.

use crate::shapes::ROWS;
use crate::softmax::{exps, softmax};
use crate::support::{Random, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trees;
use crate::trial::{assert_refused, assert_same, trial};
use stepscope::ops;

/// One label in nine is no class.
fn labels(rows: usize, classes: usize) -> Vec<u32> {
    let mut labels = Random::new(rows as u64).belows(rows, classes as u32);
    for (label, wrong) in labels.iter_mut().skip(2).step_by(9).zip([classes as u32, u32::MAX].into_iter().cycle()) {
        *label = wrong;
    }
    labels
}

/// The loss of one row: `log(sum exp(x - max)) - (x[label] - max)`, NaN without a class.
fn loss(x: &[f32], label: u32) -> Exact {
    let Some(&own) = x.get(label as usize) else { return Exact::given(f64::NAN) };
    let largest = Exact::given(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    Exact::sum(trees::row_depth(x.len()), exps(x)).ln() - (Exact::given(own) - largest)
}

on_each_device! {
    fn cross_entropy_forward(device: &Device) {
        let mut losses_seen = Closeness::new("cross-entropy");
        let mut probabilities_seen = Closeness::new("cross-entropy probabilities");
        for [rows, classes] in ROWS {
            for spread in [1.0, 20.0] {
                let logits: Vec<f32> =
                    Random::new(classes as u64).normals(rows * classes).iter().map(|x| x * spread).collect();
                let labels = labels(rows, classes);
                let (losses, probabilities) = trial(device, |trial| {
                    let (logits, labels) = (trial.upload(&logits, [rows, classes])?, trial.upload(&labels, [rows])?);
                    let (losses, probabilities) = ops::cross_entropy(trial, &logits, &labels)?;
                    Ok((trial.output(&losses)?, trial.output(&probabilities)?))
                });
                let shape = format!("{rows} x {classes}, spread {spread}");
                let want: Vec<Exact> = logits.chunks_exact(classes).flat_map(softmax).collect();
                probabilities_seen.check(&shape, &probabilities, &want);
                let want: Vec<Exact> =
                    logits.chunks_exact(classes).zip(&labels).map(|(x, &label)| loss(x, label)).collect();
                losses_seen.check(&shape, &losses, &want);
            }
        }
        losses_seen.finish();
        probabilities_seen.finish();
    }

    /// `(p - target) (scale upstream)`, three rounded operations: the bits of the same three here.
    fn cross_entropy_backward(device: &Device) {
        for [rows, classes] in ROWS {
            let (labels, scale, upstream) = (labels(rows, classes), 1.0 / 3.0, 1.7);
            let probabilities = Random::new(classes as u64).uniforms(rows * classes, 0.0, 1.0);
            let got = trial(device, |trial| {
                let shape = [rows, classes];
                let (probabilities, labels) = (trial.upload(&probabilities, shape)?, trial.upload(&labels, [rows])?);
                let upstream = trial.upload(&[upstream], [1])?;
                trial.output(&ops::cross_entropy_backward(trial, &probabilities, &labels, &upstream, scale)?)
            });
            let want = |at: usize| {
                let label = labels[at / classes] as usize;
                let target = if at % classes == label { 1.0 } else { 0.0 };
                if label < classes { (probabilities[at] - target) * (scale * upstream) } else { f32::NAN }
            };
            assert_same(format_args!("{rows} x {classes}"), &got, &(0..got.len()).map(want).collect::<Vec<_>>());
            for (at, &got) in got.iter().enumerate().filter(|(_, got)| !got.is_nan()) {
                let target = if at % classes == labels[at / classes] as usize { 1.0 } else { 0.0 };
                let want = (f64::from(probabilities[at]) - target) * f64::from(scale) * f64::from(upstream);
                assert!((f64::from(got) - want).abs() <= 3.0 * 2f64.powi(-24) * want.abs(), "{got} for {want}");
            }
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (logits, labels) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[0u32; 3], [3])?);
            assert_refused(
                ops::cross_entropy(trial, &logits, &labels),
                &["cross_entropy", "[rows, classes]", "[2, 3] and [3]"],
            );
            let upstream = trial.upload(&[1.0; 2], [2])?;
            let (labels, none) = (trial.upload(&[0u32; 2], [2])?, trial.upload::<f32>(&[], [2, 0])?);
            let refused = ops::cross_entropy_backward(trial, &logits, &labels, &upstream, 1.0);
            assert_refused(refused, &["cross_entropy_backward", "[1]", "[2]"]);
            assert_refused(ops::cross_entropy(trial, &none, &labels), &["cross_entropy", "[2, 0] and [2]"]);
            Ok(())
        });
    }
}
