//! Tests of the weights of losses: a plain loss is a mean, and means of parts add up.

use crate::support::{Random, bits, on_each_device, relative_l2};
use stepscope::ops::{self, LabelRules, LmHeadConfig};
use stepscope::parameters::Initializer;
use stepscope::tensor::OnDevice;
use stepscope::{
    Arena, Capacity, Device, EagerStep, Error, Gradients, HostInputs, ParameterSpec, Parameters, Result, Tape, Tensor,
    Var,
};

const ROWS: usize = 7;
const CLASSES: usize = 5;
/// A rule that skips ignored labels.
const SKIP: LabelRules = LabelRules { smoothing: 0.0, ignore: true, weight: None };

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

/// Returns the bits of a loss and of its gradient.
fn read<'s>(step: &EagerStep<'s>, (loss, gradient): (Tensor<'s>, Tensor<'s>)) -> Result<[Vec<u32>; 2]> {
    Ok([bits(&step.read(&loss)?), bits(&step.read(&gradient)?)])
}

/// A loss of a part of a batch, as a model computes it: its mean.
type PartLoss = for<'t, 's> fn(&'t EagerStep<'s>, &Tape<'t, 's>, &Var<'s>, &Given<'_>) -> Result<Var<'s>>;

/// The labels and targets of a part.
struct Given<'a> {
    labels: &'a [u32],
    target: &'a [f32],
    w: stepscope::Parameter,
}

fn target<'s>(step: &EagerStep<'s>, given: &Given<'_>) -> Result<stepscope::tensor::Saved<'s>> {
    Ok(step.upload(given.target, [given.labels.len(), CLASSES])?.save())
}

fn logits<'t, 's>(tape: &Tape<'t, 's>, x: &Var<'s>, given: &Given<'_>) -> Result<Var<'s>> {
    tape.linear(x, given.w, None)
}

/// Losses that are the tape's loss, that are scaled or added up, of a chunked head, and made of
/// other ops.
const LOSSES: [(&str, PartLoss); 6] = [
    ("cross_entropy", |step, tape, x, given| {
        tape.cross_entropy(&logits(tape, x, given)?, step.upload_indices(given.labels, [given.labels.len()])?)
    }),
    ("squared_error", |step, tape, x, given| tape.squared_error(&logits(tape, x, given)?, &target(step, given)?)),
    ("binary_cross_entropy", |step, tape, x, given| {
        tape.binary_cross_entropy(&logits(tape, x, given)?, &target(step, given)?)
    }),
    ("sum of two losses", |step, tape, x, given| {
        let y = logits(tape, x, given)?;
        let labels = step.upload_indices(given.labels, [given.labels.len()])?;
        let penalty = tape.squared_error(&y, &target(step, given)?)?.mul(0.5)?;
        tape.cross_entropy(&y, labels)?.add(penalty)
    }),
    ("linear_cross_entropy", |step, tape, x, given| {
        let labels = step.upload_indices(given.labels, [given.labels.len()])?;
        tape.linear_cross_entropy(x, given.w, labels, LmHeadConfig::default())
    }),
    ("mean", |_, tape, x, given| tape.mean(&logits(tape, x, given)?.tanh()?)),
];

on_each_device! {
    fn plain_losses_are_means(device: &Device) {
        let mut random = Random::new(3);
        let (x, target) = (random.normals(ROWS * CLASSES), random.uniforms(ROWS * CLASSES, 0.0, 1.0));
        let labels = random.belows(ROWS, CLASSES as u32);
        let mut some = labels.clone();
        [1, 4].into_iter().for_each(|row| some[row] = ops::IGNORED);
        arena(device).step(|step| {
            let (x, target) = (step.upload(&x, [ROWS, CLASSES])?, step.upload(&target, [ROWS, CLASSES])?);
            let upload = |labels: &[u32]| step.upload_indices(labels, [ROWS]);
            let by = |labels: &[u32], rules| read(step, ops::cross_entropy_by(step, &x, &upload(labels)?, rules)?);
            let all = LabelRules::default();
            let plain = read(step, ops::cross_entropy(step, &x, &upload(&labels)?)?)?;
            assert_eq!(plain, by(&labels, all.weighted(1.0 / ROWS as f32))?);
            assert_eq!(plain, by(&labels, SKIP)?, "without ignored labels both means agree");
            assert_eq!(by(&some, SKIP)?, by(&some, SKIP.weighted(1.0 / 5.0))?, "the mean divides by the five counted rows");
            let [loss, gradient] = by(&[ops::IGNORED; ROWS], SKIP)?;
            assert!(loss.iter().chain(&gradient).all(|&bits| f32::from_bits(bits) == 0.0), "without counted rows, loss and gradient are 0");
            let mean = Some(1.0 / (ROWS * CLASSES) as f32);
            let squared = |weight| read(step, ops::squared_error(step, &x, &target, weight)?);
            let binary = |weight| read(step, ops::binary_cross_entropy(step, &x, &target, weight)?);
            assert_eq!([squared(None)?, binary(None)?], [squared(mean)?, binary(mean)?]);
            Ok(())
        }).unwrap();
    }

    /// The host cannot count labels that only the device has, or that a replay brings.
    fn unknown_labels_need_a_weight(device: &Device) {
        let refused = |error: Option<Error>| {
            let error = error.expect("a mean over unknown labels must fail").to_string();
            assert!(error.contains("cross_entropy") && error.contains("`LabelRules::weight`"), "{error}");
        };
        let (x, labels) = (vec![0.5; ROWS * CLASSES], vec![0u32; ROWS]);
        let mut arena = arena(device);
        arena.step(|step| {
            let (x, labels) = (step.upload(&x, [ROWS, CLASSES])?, step.upload(&labels, [ROWS])?);
            refused(ops::cross_entropy_by(step, &x, &OnDevice(&labels), SKIP).err());
            ops::cross_entropy_by(step, &x, &OnDevice(&labels), SKIP.weighted(1.0)).map(drop)
        }).unwrap();
        let inputs = HostInputs::new().with(&x, [ROWS, CLASSES]).unwrap().with(&labels, [ROWS]).unwrap();
        refused(arena.capture((), &inputs, |step, (), slots| {
            ops::cross_entropy_by(step, &slots.input::<f32>(0)?, &slots.indices(1)?, SKIP).map(drop)
        }).err());
    }

    /// The gradients of parts of unequal sizes add up to those of the whole batch. A loss that is a
    /// sum of losses, or made of other ops, is weighted too.
    fn parts_add_up(device: &Device) {
        const WIDTH: usize = 3;
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [WIDTH, CLASSES], Initializer::fan_in(WIDTH));
        let weights = Parameters::new(device, &spec.build().unwrap(), 7).unwrap();
        let mut random = Random::new(4);
        let (x, targets) = (random.normals(ROWS * WIDTH), random.uniforms(ROWS * CLASSES, 0.0, 1.0));
        let labels = random.belows(ROWS, CLASSES as u32);
        let mut arena = arena(device);
        for (name, loss) in LOSSES {
            let mut pass = |parts: &[std::ops::Range<usize>]| {
                let mut gradients = Gradients::zeros(&weights).unwrap();
                let mut mean = 0.0;
                for part in parts {
                    let value = arena.step(|step| {
                        let tape = Tape::new(step, &weights).of_part(part.len(), ROWS);
                        let rows = &x[part.start * WIDTH..part.end * WIDTH];
                        let target = &targets[part.start * CLASSES..part.end * CLASSES];
                        let given = Given { labels: &labels[part.clone()], target, w };
                        let loss = loss(step, &tape, &tape.input(step.upload(rows, [part.len(), WIDTH])?), &given)?;
                        let value = step.read_scalar(loss.value())?;
                        tape.backward(&loss, &mut gradients)?;
                        Ok(value)
                    });
                    mean += f64::from(value.unwrap()) * part.len() as f64 / ROWS as f64;
                }
                (mean, gradients.read(w).unwrap())
            };
            let (mean, whole) = pass(std::slice::from_ref(&(0..ROWS)));
            let (of_parts, sum) = pass(&[0..4, 4..6, 6..ROWS]);
            let whole: Vec<f64> = whole.into_iter().map(f64::from).collect();
            let error = relative_l2(&sum, &whole);
            assert!(error < 1e-6 && whole.iter().any(|&x| x != 0.0), "{name}: {error:e}");
            assert!((mean - of_parts).abs() < 1e-6 * mean.abs(), "{name}: {mean} and {of_parts}");
        }
    }
}
