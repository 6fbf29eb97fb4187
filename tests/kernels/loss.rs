//! Tests of `ops::{cross_entropy, squared_error, binary_cross_entropy}`: losses and their
//! gradients.

use crate::gradients::{Case, Roundings, SEEDS, extents, leaf_as, longest, normal, stored_as_each};
use crate::hostile::attack;
use crate::reference::{self, ulps};
use crate::shapes::{LENGTHS, ROWS};
use crate::softmax::{self, exps, softmax};
use crate::support::{Random, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trees;
use crate::trial::{assert_refused, assert_same, trial};
use kernels::reduce::argmax_columns;
use stepscope::ops::{self, LabelRules};
use stepscope::tensor::{OnDevice, Source, Target};
use stepscope::{Arena, Buffer, Capacity, Device, Error, HostInputs, Result, Step, Tensor};

const WEIGHT: f32 = 1.0 / 3.0;

/// Computes the loss of one row: `log(sum exp(x - max)) - (x[label] - max)`.
fn loss(x: &[f32], label: u32) -> Exact {
    let largest = Exact::given(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    Exact::sum(row_depth(x.len()), exps(x)).ln() - (Exact::given(x[label as usize]) - largest)
}

/// More classes than the lanes of a warp share: the block shares them.
const LONG: usize = 4097;

/// Returns the sequential additions of a term in a row's sum. The threads of a block have every
/// 1024th four columns, then come 2, 5 and 7 additions.
fn row_depth(classes: usize) -> usize {
    if classes < LONG { trees::row_depth(classes) } else { classes.div_ceil(1024) + 14 }
}

/// Returns the sequential additions of a row's loss. In a block's threads these are 5 and then 7,
/// where a row has one of `lanes`. Those of the blocks follow.
fn depth(rows: usize, classes: usize) -> usize {
    let block = if classes < LONG { 256 / trees::lanes(classes) } else { 1 };
    rows.min(12) + if rows <= block { 0 } else { trees::all_depth(rows.div_ceil(block)) }
}

fn cross_entropy(device: &Device, [rows, classes]: [usize; 2], logits: &[f32], labels: &[u32]) -> (f32, Vec<f32>) {
    trial(device, |trial| {
        let (logits, labels) = (trial.upload(logits, [rows, classes])?, trial.upload_indices(labels, [rows])?);
        let (loss, dlogits) = trial
            .with_scratch(|| ops::cross_entropy_by(trial, &logits, &labels, LabelRules::default().weighted(WEIGHT)))?;
        assert_eq!((loss.shape().extents(), dlogits.shape()), (&[1][..], logits.shape()));
        Ok((trial.output(&loss)?[0], trial.output(&dlogits)?))
    })
}

/// Returns, in float64, `weight` times the sum of `-log softmax(logits)[label]`.
pub(crate) fn in_float64(logits: &[f64], labels: &[u32], classes: usize, weight: f64) -> Vec<f64> {
    let rows = logits.chunks_exact(classes).zip(labels);
    vec![weight * rows.map(|(row, &label)| -softmax::in_float64(row)[label as usize].ln()).sum::<f64>()]
}

/// A loss of each element, with its gradient.
type Elementwise = for<'s> fn(&Step<'s>, &Tensor<'s>, &Tensor<'s>) -> Result<(Tensor<'s>, Tensor<'s>)>;

/// Computes max(x, 0) - x target + log(1 + e^-|x|).
fn cross_entropy_of(x: f32, target: f32) -> Exact {
    let exp = (-f64::from(x.abs())).exp();
    // The errors of the logarithm and of the exponential.
    let log = Exact { value: exp.ln_1p(), error: 2.0 * 1.7 * exp.ln_1p() + 2.0 * ulps::EXP * exp };
    Exact::given(x.max(0.0)) - Exact::given(x) * Exact::given(target) + log
}

on_each_device! {
    fn loss_and_gradient(device: &Device) {
        let (mut losses, mut gradients) = (Closeness::new("cross-entropy"), Closeness::new("cross-entropy gradient"));
        let weight = Exact::given(WEIGHT);
        for shape @ [rows, classes] in ROWS.into_iter().chain([[3, LONG + 3], [2, 50_304]]) {
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

    /// The first label outside the classes is an error if the host knows the labels, both in an
    /// uploaded tensor and in an input of a replay.
    fn invalid_host_labels_are_refused(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        for (rows, classes, sample) in [(1, 3, 0), (300, 3, 299), (300, 193, 7), (300, 193, 0)] {
            let (logits, mut labels) = (vec![0.5; rows * classes], Random::new(4).belows(rows, classes as u32));
            for wrong in [classes as u32, u32::MAX] {
                labels[sample] = wrong;
                labels[rows - 1] = wrong;
                let error = Error::Label { sample, label: wrong, classes };
                let uploaded = arena.step(|step| {
                    let logits = step.upload(&logits, [rows, classes])?;
                    let labels = step.upload_indices(&labels, [rows])?.reshape([rows])?;
                    ops::cross_entropy_by(step, &logits, &labels, LabelRules::default().weighted(WEIGHT)).map(drop)
                });
                assert_eq!(uploaded, Err(error.clone()));
                let inputs = || HostInputs::new().with(&logits, [rows, classes]).unwrap();
                let (zeros, right) = (vec![0; rows], inputs());
                let mut captured = arena
                    .capture((), &right.with(&zeros, [rows]).unwrap(), |step, (), slots| {
                        let (loss, _) = ops::cross_entropy_by(step, &slots.input::<f32>(0)?, &slots.indices(1)?, LabelRules::default().weighted(WEIGHT))?;
                        Ok(slots.output(&loss))
                    })
                    .unwrap();
                assert_eq!(captured.replay(&inputs().with(&labels, [rows]).unwrap()).err(), Some(error));
                assert_eq!(captured.report().replays, 0, "a refused replay must queue nothing");
                let replay = captured.replay(&inputs().with(&zeros, [rows]).unwrap()).unwrap();
                assert!(replay.read_scalar(*replay.outputs()).unwrap().is_finite());
            }
        }
    }

    /// Labels may be the output of a kernel.
    fn kernels_may_write_labels(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let loss = arena.step(|step| {
            let mut labels = step.upload(&[255u32, 255], [2])?;
            let logits = step.upload(&[0.0f32; 6], [2, 3])?;
            step.launch(argmax_columns { x: logits.slice(), cols: 3, out: labels.out() })?;
            let (loss, _) = ops::cross_entropy_by(step, &logits, &OnDevice(&labels), LabelRules::default().weighted(WEIGHT))?;
            step.read_scalar(&loss)
        });
        assert!(loss.unwrap().is_finite());
    }

    /// An invalid label that the host does not know makes the loss and its own row's gradients NaN,
    /// and nothing else.
    fn invalid_device_labels_give_nan(device: &Device) {
        for shape @ [rows, classes] in [[1, 3], [300, 3], [70, 193], [11, LONG]] {
            let logits = Random::new(3).normals(rows * classes);
            let mut labels = Random::new(4).belows(rows, classes as u32);
            let (_, mut want) = cross_entropy(device, shape, &logits, &labels);
            for (row, wrong) in (0..rows).step_by(9).zip([classes as u32, u32::MAX].into_iter().cycle()) {
                labels[row] = wrong;
                want[row * classes..][..classes].fill(f32::NAN);
            }
            let (loss, dlogits) = trial(device, |trial| {
                // The trial's own device may be the emulator, which runs in addition to the tested
                // device.
                let labels = Buffer::from_slice(trial.device(), &labels)?;
                let (logits, labels) = (trial.upload(&logits, shape)?, trial.lend(&labels, [rows])?);
                let (loss, dlogits) = trial.with_scratch(|| ops::cross_entropy_by(trial, &logits, &OnDevice(&labels), LabelRules::default().weighted(WEIGHT)))?;
                Ok((trial.output(&loss)?[0], trial.output(&dlogits)?))
            });
            assert!(loss.is_nan(), "{loss}");
            assert_same(format_args!("{rows} x {classes}"), &dlogits, &want);
        }
    }

    /// Tests label smoothing, with every seventh row ignored.
    fn smoothing_and_ignored_labels(device: &Device) {
        let (mut losses, mut gradients) = (Closeness::new("smoothed"), Closeness::new("smoothed gradient"));
        let (weight, smoothing) = (Exact::given(WEIGHT), 0.1f32);
        for shape @ [rows, classes] in ROWS.into_iter().chain([[3, LONG + 3]]) {
            let mut random = Random::new(classes as u64);
            let logits = random.normals(rows * classes);
            let mut labels = random.belows(rows, classes as u32);
            labels.iter_mut().step_by(7).for_each(|label| *label = ops::IGNORED);
            let rules = LabelRules { smoothing, ignore: true, weight: None };
            let (got, dlogits) = trial(device, |trial| {
                let (logits, labels) = (trial.upload(&logits, shape)?, trial.upload_indices(&labels, [rows])?);
                let (loss, dlogits) =
                    trial.with_scratch(|| ops::cross_entropy_by(trial, &logits, &labels, rules.weighted(WEIGHT)))?;
                Ok((trial.output(&loss)?[0], trial.output(&dlogits)?))
            });
            let of_label = Exact::given(1.0) - Exact::given(smoothing);
            let of_each = Exact::given(smoothing) / Exact::given(classes as f32);
            let each = || logits.chunks_exact(classes).zip(&labels);
            let row = |(x, &label): (&[f32], &u32)| {
                let largest = Exact::given(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                let all = Exact::sum(row_depth(classes), x.iter().map(|&x| Exact::given(x) - largest));
                let target = of_label * (Exact::given(x[label as usize]) - largest) + of_each * all;
                Exact::sum(row_depth(classes), exps(x)).ln() - target
            };
            let counted = each().filter(|(_, label)| **label != ops::IGNORED).map(row);
            let want = Exact::sum(depth(rows, classes), counted) * weight;
            losses.check(format_args!("{rows} x {classes}"), &[got], &[want]);
            let row = |(x, &label): (&[f32], &u32)| {
                let less = |(at, p): (usize, Exact)| {
                    if at == label as usize { p - of_each - of_label } else { p - of_each }
                };
                let of_row = softmax(x).into_iter().enumerate().map(less).map(|p| p * weight);
                if label == ops::IGNORED { vec![Exact::given(0.0); classes] } else { of_row.collect() }
            };
            gradients.check(format_args!("{rows} x {classes}"), &dlogits, &each().flat_map(row).collect::<Vec<_>>());
        }
        losses.finish();
        gradients.finish();
    }

    /// Ignored rows may hold anything. The other rows have the same bits as without them.
    fn ignored_rows_change_nothing(device: &Device) {
        let [rows, classes] = [9, 5];
        let mut random = Random::new(8);
        let (mut logits, mut labels) = (random.normals(rows * classes), random.belows(rows, classes as u32));
        let rules = LabelRules { smoothing: 0.0, ignore: true, weight: None };
        let (want_loss, mut want) = cross_entropy(device, [rows - 1, classes], &logits[..(rows - 1) * classes], &labels[..rows - 1]);
        logits[(rows - 1) * classes..].fill(f32::NAN);
        labels[rows - 1] = ops::IGNORED;
        want.extend([0.0; 5]);
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let (loss, dlogits) = arena
            .step(|step| {
                let (logits, labels) = (step.upload(&logits, [rows, classes])?, step.upload_indices(&labels, [rows])?);
                let (loss, dlogits) = ops::cross_entropy_by(step, &logits, &labels, rules.weighted(WEIGHT))?;
                Ok((step.read(&loss)?, step.read(&dlogits)?))
            })
            .unwrap();
        assert_same("loss", &loss, &[want_loss]);
        assert_same("gradient", &dlogits, &want);
        // Without the rule, the ignored label is a class like any other, and invalid labels are
        // still refused, also at a replay.
        let by = |labels: &[u32], rules: LabelRules| {
            let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
            let eager = arena.step(|step| {
                let (logits, labels) = (step.upload(&logits, [rows, classes])?, step.upload_indices(labels, [rows])?);
                ops::cross_entropy_by(step, &logits, &labels, rules.weighted(WEIGHT)).map(drop)
            });
            let inputs = HostInputs::new().with(&logits, [rows, classes]).unwrap().with(labels, [rows]).unwrap();
            let mut captured = arena
                .capture(rules, &inputs, |step, rules, slots| {
                    let (loss, _) = ops::cross_entropy_by(step, &slots.input::<f32>(0)?, &slots.indices(1)?, rules.weighted(WEIGHT))?;
                    Ok(slots.output(&loss))
                })
                .unwrap();
            assert_eq!(captured.replay(&inputs).err(), eager.clone().err());
            eager
        };
        assert_eq!(by(&labels, rules), Ok(()));
        let error = |sample, label| Err(Error::Label { sample, label, classes });
        assert_eq!(by(&labels, LabelRules::default()), error(rows - 1, ops::IGNORED));
        labels[3] = classes as u32;
        assert_eq!(by(&labels, rules), error(3, classes as u32));
    }

    fn elementwise_losses(device: &Device) {
        let names = ["squared error", "binary cross-entropy"];
        let [mut squared, mut binary] = names.map(Closeness::new);
        let [mut of_squared, mut of_binary] = ["squared error gradient", "binary cross-entropy gradient"].map(Closeness::new);
        let weight = Exact::given(WEIGHT);
        for length in LENGTHS {
            let mut random = Random::new(length as u64);
            let (x, target) = (random.uniforms(length, -30.0, 30.0), random.uniforms(length, 0.0, 1.0));
            let [(a, da), (b, db)] = trial(device, |trial| {
                let (x, target) = (trial.upload(&x, [length])?, trial.upload(&target, [length])?);
                let run = |op: Elementwise| -> Result<(f32, Vec<f32>)> {
                    let (loss, dx) = trial.with_scratch(|| op(trial, &x, &target))?;
                    assert_eq!((loss.shape().extents(), dx.shape()), (&[1][..], x.shape()));
                    Ok((trial.output(&loss)?[0], trial.output(&dx)?))
                };
                Ok([
                    run(|step, x, target| ops::squared_error(step, x, target, Some(WEIGHT)))?,
                    run(|step, x, target| ops::binary_cross_entropy(step, x, target, Some(WEIGHT)))?,
                ])
            });
            // The order is that of a sum of rounded terms.
            let terms: Vec<f32> = x.iter().zip(&target).map(|(x, target)| (x - target) * (x - target)).collect();
            let sum = trees::all(&terms, &|sum, term| sum + term);
            assert_same(length, &[a], &[sum * WEIGHT]);
            let each = |f: &dyn Fn(f32, f32) -> Exact| x.iter().zip(&target).map(|(&x, &target)| f(x, target)).collect::<Vec<_>>();
            let exact = |terms: Vec<Exact>| Exact::sum(trees::all_depth(length), terms) * weight;
            let difference = |x: f32, target: f32| Exact::given(x) - Exact::given(target);
            squared.check(length, &[a], &[exact(each(&|x, target| difference(x, target) * difference(x, target)))]);
            of_squared.check(length, &da, &each(&|x, target| difference(x, target) * Exact::given(2.0 * WEIGHT)));
            binary.check(length, &[b], &[exact(each(&cross_entropy_of))]);
            let sigmoid = |x: f32| {
                let value = reference::sigmoid(f64::from(x));
                Exact { value, error: 2.0 * ulps::SIGMOID * value }
            };
            of_binary.check(length, &db, &each(&|x, target| (sigmoid(x) - Exact::given(target)) * weight));
        }
        [squared, binary, of_squared, of_binary].into_iter().for_each(Closeness::finish);
    }

    /// Values for which the plain formula is infinite or 0.
    fn extreme_binary_cross_entropy(device: &Device) {
        for (x, target, want, gradient) in [
            (200.0, 1.0, 0.0, 0.0), (200.0, 0.0, 200.0, 1.0), (-200.0, 0.0, 0.0, 0.0), (-200.0, 1.0, 200.0, -1.0),
            (3e38, 0.0, 3e38, 1.0), (0.0, 0.5, std::f32::consts::LN_2, 0.0), (f32::NAN, 1.0, f32::NAN, f32::NAN),
        ] {
            let (loss, dx) = trial(device, |trial| {
                let (x, target) = (trial.upload(&[x], [1])?, trial.upload(&[target], [1])?);
                let (loss, dx) = ops::binary_cross_entropy(trial, &x, &target, Some(1.0))?;
                Ok((trial.output(&loss)?, trial.output(&dx)?))
            });
            assert_same(x, &loss, &[want]);
            assert_same(x, &dx, &[gradient]);
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (logits, labels) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload_indices(&[0; 3], [3])?);
            assert_refused(
                ops::cross_entropy_by(trial, &logits, &labels, LabelRules::default().weighted(1.0)),
                &["cross_entropy", "[.., classes]", "[2, 3] and [3]"],
            );
            let (labels, none) = (trial.upload_indices(&[0; 2], [2])?, trial.upload::<f32>(&[], [2, 0])?);
            assert_refused(ops::cross_entropy_by(trial, &none, &labels, LabelRules::default().weighted(1.0)), &["cross_entropy", "[2, 0] and [2]"]);
            for smoothing in [1.0, -0.1, f32::NAN] {
                let rules = LabelRules { smoothing, ignore: false, weight: None };
                let refused = ops::cross_entropy_by(trial, &logits, &labels, rules.weighted(1.0));
                assert_refused(refused, &["cross_entropy", "[0, 1)", &smoothing.to_string()]);
            }
            let target = trial.upload(&[1.0; 6], [6])?;
            assert_refused(ops::squared_error(trial, &logits, &target, Some(1.0)), &["squared_error", "[2, 3]", "[6]"]);
            let refused = ops::binary_cross_entropy(trial, &logits, &target, Some(1.0));
            assert_refused(refused, &["binary_cross_entropy", "[2, 3]", "[6]"]);
            Ok(())
        });
    }
}

/// A loss is f32. Its gradient is written with it, and again times its factor in another loss.
const SCALED: Roundings = Roundings { forward: 0.0, backward: 2.0, kept: 0.0 };

stored_as_each! {
    fn gradient<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, classes] = extents(&mut random, seed, [71, 11]);
            // A single class has no gradient.
            let classes = classes + 1;
            let labels = random.belows(rows, classes as u32);
            let weight = 1.0 / rows as f32;
            let values = vec![normal(&mut random, &[rows, classes])];
            Case::new("cross_entropy", seed, longest(&[rows, classes]), values).stored_as::<S>(SCALED).check(device, |step, tape, p| {
                let labels = step.upload_indices(&labels, [rows])?;
                tape.cross_entropy_by(&leaf_as::<S>(tape, p[0])?, labels, LabelRules::default().weighted(weight))
            }, |p| in_float64(&p[0], &labels, classes, f64::from(weight)));
        }
    }

    fn gradient_of_other_losses<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape @ [rows, classes] = extents(&mut random, seed, [71, 11]).map(|extent| extent + 1);
            let target = random.uniforms(rows * classes, 0.0, 1.0);
            let mut labels = random.belows(rows, classes as u32);
            labels[rows / 2] = ops::IGNORED;
            let weight = 1.0 / rows as f32;
            let values = vec![normal(&mut random, &shape)];
            let case = |name| Case::new(name, seed, longest(&shape) * 2, values.clone()).stored_as::<S>(SCALED);
            case("squared_error").check(device, |step, tape, p| {
                tape.squared_error_by(&leaf_as::<S>(tape, p[0])?, &step.upload(&target, shape)?.save(), weight)
            }, |p| vec![f64::from(weight) * p[0].iter().zip(&target).map(|(x, &t)| (x - f64::from(t)).powi(2)).sum::<f64>()]);
            case("binary_cross_entropy").check(device, |step, tape, p| {
                tape.binary_cross_entropy_by(&leaf_as::<S>(tape, p[0])?, &step.upload(&target, shape)?.save(), weight)
            }, |p| {
                let each = |(&x, &t): (&f64, &f32)| {
                    let p = reference::sigmoid(x);
                    -f64::from(t) * p.ln() - (1.0 - f64::from(t)) * (1.0 - p).ln()
                };
                vec![f64::from(weight) * p[0].iter().zip(&target).map(each).sum::<f64>()]
            });
            let rules = LabelRules { smoothing: 0.2, ignore: true, weight: None };
            case("cross_entropy_by").check(device, |step, tape, p| {
                let labels = step.upload_indices(&labels, [rows])?;
                tape.cross_entropy_by(&leaf_as::<S>(tape, p[0])?, labels, rules.weighted(weight))
            }, |p| {
                let counted = p[0].chunks_exact(classes).zip(&labels).filter(|(_, label)| **label != ops::IGNORED);
                let smoothing = f64::from(0.2f32);
                let row = |(x, &label): (&[f64], &u32)| {
                    let logs: Vec<f64> = softmax::in_float64(x).iter().map(|p| -p.ln()).collect();
                    (1.0 - smoothing) * logs[label as usize] + smoothing * logs.iter().sum::<f64>() / classes as f64
                };
                vec![f64::from(weight) * counted.map(row).sum::<f64>()]
            });
        }
    }
}

attack! {
    loss::cross_entropy<S> {
        logits: stored 24, labels: u32s 3, classes: number 8, weight: float 1.0, scale: float 1.0, smoothing: float 0.1,
        ignore: number 1, gradients: number 1, losses: out 1, dlogits: out_stored 24,
    }
    loss::cross_entropy_of_rows<S> {
        logits: stored 24, labels: u32s 3, classes: number 8, gradients: number 0, dlosses: f32s 0, losses: out 3,
        dlogits: out_stored 0,
    }
    loss::element_loss<S> {
        x: stored 9, target: f32s 9, function: number 1, weight: float 1.0, scale: float 1.0, losses: out 1,
        dx: out_stored 9,
    }
}
