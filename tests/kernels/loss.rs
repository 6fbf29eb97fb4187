//! `ops::cross_entropy`: the loss and its gradient.

use crate::gradients::{Case, SEEDS, extents, leaf, longest, normal};
use crate::hostile::attack;
use crate::shapes::ROWS;
use crate::softmax::{self, exps, softmax};
use crate::support::{Random, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trees;
use crate::trial::{assert_refused, assert_same, trial};
use kernels::reduce::argmax_columns;
use stepscope::{Arena, Buffer, Capacity, Device, Error, Inputs, Source, Target, ops};

const WEIGHT: f32 = 1.0 / 3.0;

/// The loss of one row: `log(sum exp(x - max)) - (x[label] - max)`.
fn loss(x: &[f32], label: u32) -> Exact {
    let largest = Exact::given(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    Exact::sum(trees::row_depth(x.len()), exps(x)).ln() - (Exact::given(x[label as usize]) - largest)
}

/// The additions in a row of a row's loss: those of a block's threads, 5 and then 7, of which a row has one of `lanes`, and
/// those of the blocks.
fn depth(rows: usize, classes: usize) -> usize {
    let block = 256 / trees::lanes(classes);
    rows.min(12) + if rows <= block { 0 } else { trees::all_depth(rows.div_ceil(block)) }
}

fn cross_entropy(device: &Device, [rows, classes]: [usize; 2], logits: &[f32], labels: &[u32]) -> (f32, Vec<f32>) {
    trial(device, |trial| {
        let (logits, labels) = (trial.upload(logits, [rows, classes])?, trial.upload(labels, [rows])?);
        let (loss, dlogits) = trial.with_scratch(|| ops::cross_entropy(trial, &logits, &labels, WEIGHT))?;
        assert_eq!((loss.shape().extents(), dlogits.shape()), (&[1][..], logits.shape()));
        Ok((trial.output(&loss)?[0], trial.output(&dlogits)?))
    })
}

/// In float64, `weight` times the sum of `-log softmax(logits)[label]`.
pub(crate) fn in_float64(logits: &[f64], labels: &[u32], classes: usize, weight: f64) -> Vec<f64> {
    let rows = logits.chunks_exact(classes).zip(labels);
    vec![weight * rows.map(|(row, &label)| -softmax::in_float64(row)[label as usize].ln()).sum::<f64>()]
}

on_each_device! {
    fn loss_and_gradient(device: &Device) {
        let (mut losses, mut gradients) = (Closeness::new("cross-entropy"), Closeness::new("cross-entropy gradient"));
        let weight = Exact::given(WEIGHT);
        for shape @ [rows, classes] in ROWS {
            for spread in [1.0, 20.0] {
                let mut random = Random::new(classes as u64);
                let logits: Vec<f32> = random.normals(rows * classes).iter().map(|x| x * spread).collect();
                let labels = random.belows(rows, classes as u32);
                let (got, dlogits) = cross_entropy(device, shape, &logits, &labels);
                let each = || logits.chunks_exact(classes).zip(&labels);
                let shape = format!("{rows} x {classes}, spread {spread}");
                let want = Exact::sum(depth(rows, classes), each().map(|(x, &label)| loss(x, label))) * weight;
                losses.check(&shape, &[got], &[want]);
                let row = |(x, &label): (&[f32], &u32)| {
                    let less = |(at, p): (usize, Exact)| if at == label as usize { p - Exact::given(1.0) } else { p };
                    softmax(x).into_iter().enumerate().map(less).map(|p| p * weight).collect::<Vec<_>>()
                };
                gradients.check(&shape, &dlogits, &each().flat_map(row).collect::<Vec<_>>());
            }
        }
        losses.finish();
        gradients.finish();
    }

    /// Where the host knows the labels, the first that is no class is an error: as a tensor that was uploaded, and as an input of a replay.
    fn no_class_of_the_host(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        for (rows, classes, sample) in [(1, 3, 0), (300, 3, 299), (300, 193, 7), (300, 193, 0)] {
            let (logits, mut labels) = (vec![0.5; rows * classes], Random::new(4).belows(rows, classes as u32));
            for wrong in [classes as u32, u32::MAX] {
                labels[sample] = wrong;
                labels[rows - 1] = wrong;
                let error = Error::Label { sample, label: wrong, classes };
                let uploaded = arena.step(|step| {
                    let logits = step.upload(&logits, [rows, classes])?;
                    let labels = step.upload(&labels, [rows])?.reshape([rows])?;
                    ops::cross_entropy(step, &logits, &labels, WEIGHT).map(drop)
                });
                assert_eq!(uploaded, Err(error.clone()));
                let inputs = || Inputs::new().with(&logits, [rows, classes]).unwrap();
                let (zeros, right) = (vec![0; rows], inputs());
                let mut captured = arena
                    .capture((), &right.with(&zeros, [rows]).unwrap(), |step, (), slots| {
                        let (loss, _) = ops::cross_entropy(step, &slots.input::<f32>(0)?, &slots.input(1)?, WEIGHT)?;
                        Ok(slots.output(&loss))
                    })
                    .unwrap();
                assert_eq!(captured.replay(&inputs().with(&labels, [rows]).unwrap()).err(), Some(error));
                assert_eq!(captured.report().replays, 0, "nothing was queued");
                let replay = captured.replay(&inputs().with(&zeros, [rows]).unwrap()).unwrap();
                assert!(replay.read_scalar(*replay.outputs()).unwrap().is_finite());
            }
        }
    }

    /// What a kernel has made of the labels since their upload is what counts.
    fn labels_may_be_mapped_to_classes_after_their_upload(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let loss = arena.step(|step| {
            let mut labels = step.upload(&[255u32, 255], [2])?;
            let logits = step.upload(&[0.0f32; 6], [2, 3])?;
            step.launch(argmax_columns { x: logits.slice(), cols: 3, out: labels.out() })?;
            let (loss, _) = ops::cross_entropy(step, &logits, &labels, WEIGHT)?;
            step.read_scalar(&loss)
        });
        assert!(loss.unwrap().is_finite());
    }

    /// A label that is no class, of which the host knows nothing, makes the loss and its own row's gradients NaN, and nothing else.
    fn no_class(device: &Device) {
        for shape @ [rows, classes] in [[1, 3], [300, 3], [70, 193]] {
            let logits = Random::new(3).normals(rows * classes);
            let mut labels = Random::new(4).belows(rows, classes as u32);
            let (_, mut want) = cross_entropy(device, shape, &logits, &labels);
            for (row, wrong) in (0..rows).step_by(9).zip([classes as u32, u32::MAX].into_iter().cycle()) {
                labels[row] = wrong;
                want[row * classes..][..classes].fill(f32::NAN);
            }
            let (loss, dlogits) = trial(device, |trial| {
                // On the trial's own device, which may be the emulator beside the one that is tested.
                let labels = Buffer::from_slice(trial.device(), &labels)?;
                let (logits, labels) = (trial.upload(&logits, shape)?, trial.lend(&labels, [rows])?);
                let (loss, dlogits) = trial.with_scratch(|| ops::cross_entropy(trial, &logits, &labels, WEIGHT))?;
                Ok((trial.output(&loss)?[0], trial.output(&dlogits)?))
            });
            assert!(loss.is_nan(), "{loss}");
            assert_same(format_args!("{rows} x {classes}"), &dlogits, &want);
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (logits, labels) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[0u32; 3], [3])?);
            assert_refused(
                ops::cross_entropy(trial, &logits, &labels, 1.0),
                &["cross_entropy", "[rows, classes]", "[2, 3] and [3]"],
            );
            let (labels, none) = (trial.upload(&[0u32; 2], [2])?, trial.upload::<f32>(&[], [2, 0])?);
            assert_refused(ops::cross_entropy(trial, &none, &labels, 1.0), &["cross_entropy", "[2, 0] and [2]"]);
            Ok(())
        });
    }

    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, classes] = extents(&mut random, seed, [71, 11]);
            // One class alone has no gradient at all.
            let classes = classes + 1;
            let labels = random.belows(rows, classes as u32);
            let weight = 1.0 / rows as f32;
            let values = vec![normal(&mut random, &[rows, classes])];
            Case::new("cross_entropy", seed, longest(&[rows, classes]), values).check(device, |step, tape, p| {
                let labels = step.upload(&labels, [rows])?.save();
                tape.cross_entropy(&leaf(tape, p[0])?, labels, weight)
            }, |p| in_float64(&p[0], &labels, classes, f64::from(weight)));
        }
    }
}

attack! {
    loss::cross_entropy<S> {
        logits: stored 24, labels: u32s 3, classes: number 8, weight: float 1.0, scale: float 1.0, losses: out 1,
        dlogits: out_stored 24,
    }
}
