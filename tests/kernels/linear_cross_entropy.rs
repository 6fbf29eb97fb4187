//! Tests of `ops::linear_cross_entropy` and `linear_cross_entropy_of_rows`: the bits of separate
//! ops for each chunk of rows, their gradients, and the memory that the first takes.

use crate::gradients::{Case, SEEDS, extents, leaf, longest, normal};
use crate::support::{Random, bits, on_each_device};
use crate::trial::{Trial, assert_refused, assert_same, trial};
use crate::{linear, softmax, transpose};
use stepscope::ops::{self, Activation, Gemm, LabelRules, LmHeadConfig, Precision};
use stepscope::parameters::Initializer;
use stepscope::tensor::{Element, Indices, Source};
use stepscope::{
    Arena, Capacity, Device, EagerStep, Error, Gradients, HostInputs, ParameterSpec, Parameters, Result, Tape, Tensor,
    bf16,
};

const WEIGHT: f32 = 1.0 / 3.0;
const RULES: LabelRules = LabelRules { smoothing: 0.1, ignore: true, weight: Some(WEIGHT) };

/// The inputs of the head: hidden `[rows, width]`, the matrix in the config's layout, and labels,
/// of which every seventh is ignored.
struct Given<S> {
    extents: [usize; 3],
    form: LmHeadConfig,
    hidden: Vec<S>,
    w: Vec<S>,
    labels: Vec<u32>,
}

impl<S: Activation> Given<S> {
    fn new(extents: [usize; 3], form: LmHeadConfig) -> Self {
        let [rows, width, vocabulary] = extents;
        let mut random = Random::new(vocabulary as u64);
        let mut normals = |count, size: f32| random.normals(count).into_iter().map(|x| S::narrow(x * size)).collect();
        let (hidden, w) = (normals(rows * width, 1.0), normals(width * vocabulary, (width as f32).sqrt().recip()));
        let mut labels = random.belows(rows, vocabulary as u32);
        labels.iter_mut().skip(2).step_by(7).for_each(|label| *label = ops::IGNORED);
        Self { extents, form: form.rules(RULES), hidden, w, labels }
    }

    /// Returns the matrix's extents.
    fn matrix(&self) -> [usize; 2] {
        let [_, width, vocabulary] = self.extents;
        if self.form.tied { [vocabulary, width] } else { [width, vocabulary] }
    }

    /// Computes the logits of these rows and their gradients by separate ops. Returns the loss and
    /// the gradients of hidden and of the matrix, to which it is added.
    fn by_ops<'s>(
        &self,
        step: &EagerStep<'s>,
        rows: std::ops::Range<usize>,
        dw: &mut Tensor<'s>,
    ) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
        let [_, width, vocabulary] = self.extents;
        let (count, none) = (rows.len(), None::<&Tensor<'_>>);
        let x = step.upload(&self.hidden[rows.start * width..rows.end * width], [count, width])?;
        let (w, labels) = (step.upload(&self.w, self.matrix())?, step.upload_indices(&self.labels[rows], [count])?);
        let (mut logits, mut dx) = (step.empty([count, vocabulary])?, step.empty([count, width])?);
        let product = Gemm::new(count, vocabulary, width);
        let product = if self.form.tied { product.transpose_b() } else { product };
        ops::gemm_into(step, &product, &x, &w, none, &mut logits)?;
        let (loss, dlogits) = ops::cross_entropy_by(step, &logits, &labels, RULES)?;
        let for_dx = Gemm::new(count, width, vocabulary);
        if self.form.tied {
            ops::gemm_into(step, &for_dx, &dlogits, &w, none, &mut dx)?;
            let for_dw = Gemm::new(vocabulary, width, count).transpose_a().accumulate();
            ops::gemm_into(step, &for_dw, &dlogits, &x, none, dw)?;
        } else {
            ops::gemm_into(step, &for_dx.transpose_b(), &dlogits, &w, none, &mut dx)?;
            let for_dw = Gemm::new(width, vocabulary, count).transpose_a().accumulate();
            ops::gemm_into(step, &for_dw, &x, &dlogits, none, dw)?;
        }
        Ok((loss, dx))
    }

    /// Returns the op's results. The trial learns which memory it used and freed: logits, their
    /// gradients, and partial sums of products.
    fn tried<'s>(
        &self,
        trial: &Trial<'_, 's>,
        [hidden, w]: [&Tensor<'s, S>; 2],
        labels: &Indices<'s>,
    ) -> Result<Results<'s, S>> {
        self.with_scratch(trial, || ops::linear_cross_entropy(trial, hidden, w, labels, &self.form))
    }

    /// Runs an op of the head, whose memory may reach beyond its results.
    fn with_scratch<R>(&self, trial: &Trial<'_, '_>, op: impl FnOnce() -> Result<R>) -> Result<R> {
        let [rows, _, vocabulary] = self.extents;
        trial.with_scratch(|| {
            let results = op()?;
            trial.empty::<u32>([2 * rows * vocabulary + (1 << 18)])?;
            Ok(results)
        })
    }
}

type Results<'s, S> = (Tensor<'s>, Tensor<'s, S>, Tensor<'s>);

/// Rows, width, vocabulary, and rows of a chunk: whole chunks and a short last one, one row, one
/// row more than a chunk, few classes, and a vocabulary that is not a multiple of four.
const SHAPES: [([usize; 3], usize); 6] = [
    ([300, 40, 301], 128),
    ([256, 33, 515], 1),
    ([1, 5, 7], 128),
    ([129, 8, 1030], 128),
    ([2100, 3, 6], 1024),
    ([130, 6, 50257], 128),
];

fn forms() -> [LmHeadConfig; 2] {
    [LmHeadConfig::default(), LmHeadConfig::default().tied()]
}

fn check<S: Activation>(device: &Device, precision: Precision) {
    let is_exact = <S as Element>::NAME == "f32" && precision == Precision::F32;
    // The emulator takes long for matrix instructions.
    let shapes = if is_exact { &SHAPES[..] } else { &SHAPES[..5] };
    for ((extents, chunk), form) in shapes.iter().copied().flat_map(|shape| forms().map(|form| (shape, form))) {
        let given = Given::<S>::new(extents, form.chunk(chunk));
        let [rows, width, _] = extents;
        let what = format!("{extents:?} in chunks of {chunk}, tied {}", form.tied);
        let case = |trial: &Trial<'_, '_>| {
            trial.set_precision(precision);
            let (x, w) = (trial.upload(&given.hidden, [rows, width])?, trial.upload(&given.w, given.matrix())?);
            let labels = trial.upload_indices(&given.labels, [rows])?;
            let (loss, dx, dw) = given.tried(trial, [&x, &w], &labels)?;
            assert_eq!((loss.shape().extents(), dx.shape(), dw.shape()), (&[1][..], x.shape(), w.shape()));
            let dx = trial.output(&dx)?.into_iter().map(S::widen).collect::<Vec<_>>();
            Ok((trial.output(&loss)?, dx, trial.output(&dw)?))
        };
        let (loss, dx, dw) = trial(device, case);
        let mut arena = Arena::builder(device).capacity(Capacity::mib(256)).build().unwrap();
        let mut by_ops = |rows: usize, chunk: usize| {
            let run = |step: &mut EagerStep<'_>| {
                step.set_precision(precision);
                let mut dw = ops::fill(step, given.matrix(), 0.0)?;
                let (mut losses, mut all) = (Vec::new(), Vec::new());
                for first in (0..rows).step_by(chunk) {
                    let (loss, dx) = given.by_ops(step, first..rows.min(first + chunk), &mut dw)?;
                    losses.push(step.read_scalar(&loss)?);
                    all.extend(step.read(&dx)?.into_iter().map(S::widen));
                }
                Ok((losses, all, step.read(&dw)?))
            };
            arena.step(run).unwrap()
        };
        let (_, want_dx, want_dw) = by_ops(rows, chunk.max(LmHeadConfig::UNIT));
        assert_same(format!("{what}, hidden"), &dx, &want_dx);
        assert_same(format!("{what}, matrix"), &dw, &want_dw);
        // No product of logits uses split-K, or those of all rows and of a chunk use it alike.
        let (want_loss, ..) = by_ops(rows, rows);
        assert_same(format!("{what}, loss"), &loss, &want_loss);
    }
}

fn widened<S: Activation>(values: Vec<S>) -> Vec<f32> {
    values.into_iter().map(S::widen).collect()
}

fn rows_match<S: Activation>(device: &Device) {
    for ((extents, chunk), form) in SHAPES[..5].iter().copied().flat_map(|shape| forms().map(|form| (shape, form))) {
        let given = Given::<S>::new(extents, form.chunk(chunk));
        let ([rows, width, _], form) = (extents, form.chunk(chunk));
        let rules = LabelRules { ignore: true, ..LabelRules::default() };
        let case = |trial: &Trial<'_, '_>| {
            let (x, w) = (trial.upload(&given.hidden, [rows, width])?, trial.upload(&given.w, given.matrix())?);
            let (labels, dlosses) =
                (trial.upload_indices(&given.labels, [rows])?, trial.upload(&vec![WEIGHT; rows], [rows])?);
            let [whole, one] = [WEIGHT, 1.0].map(|weight| form.rules(rules.weighted(weight)));
            let head = |x: &_, labels: &_, form: &_| {
                given.with_scratch(trial, || ops::linear_cross_entropy(trial, x, &w, labels, form))
            };
            let (sum, want_dx, want_dw) = head(&x, &labels, &whole)?;
            let losses =
                given.with_scratch(trial, || ops::linear_cross_entropy_of_rows(trial, &x, &w, &labels, &form))?;
            let (dx, dw) = given.with_scratch(trial, || {
                let backward = ops::launch::linear_cross_entropy_of_rows_backward;
                backward(trial, &x, &w, &labels, (&dlosses, &form), [true; 2])
            })?;
            let what = format!("{extents:?} in chunks of {chunk}, tied {}", form.tied);
            let [dx, want_dx] = [trial.output(&dx.unwrap())?, trial.output(&want_dx)?].map(widened);
            assert_same(format!("{what}, hidden"), &dx, &want_dx);
            assert_same(format!("{what}, matrix"), &trial.output(&dw.unwrap())?, &trial.output(&want_dw)?);
            let (losses, sum) = (trial.output(&losses)?, trial.output(&sum)?[0]);
            let of_losses = losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() * f64::from(WEIGHT);
            assert!((f64::from(sum) / of_losses - 1.0).abs() < 1e-6, "{what}: {sum} and {of_losses}");
            for row in [0, 2, rows - 1].into_iter().filter(|&row| row < rows) {
                let x = trial.upload(&given.hidden[row * width..][..width], [1, width])?;
                let label = trial.upload_indices(&given.labels[row..=row], [1])?;
                let (want, ..) = head(&x, &label, &one)?;
                assert_same(format!("{what}, row {row}"), &losses[row..=row], &trial.output(&want)?);
            }
            Ok(losses)
        };
        let losses = trial(device, case);
        assert!(losses.iter().zip(&given.labels).all(|(&loss, &label)| (loss == 0.0) == (label == ops::IGNORED)));
    }
}

/// Returns the loss in float64; w: `[width, vocabulary]`.
fn in_float64(hidden: &[f64], w: &[f64], labels: &[u32], width: usize, weight: f32) -> Vec<f64> {
    let (vocabulary, smoothing) = (w.len() / width, f64::from(RULES.smoothing));
    let logits = linear::in_float64(hidden, w, &[], width, vocabulary);
    let row = |(x, &label): (&[f64], &u32)| {
        let logs: Vec<f64> = softmax::in_float64(x).iter().map(|p| -p.ln()).collect();
        (1.0 - smoothing) * logs[label as usize] + smoothing * logs.iter().sum::<f64>() / vocabulary as f64
    };
    let counted = logits.chunks_exact(vocabulary).zip(labels).filter(|(_, label)| **label != ops::IGNORED);
    vec![f64::from(weight) * counted.map(row).sum::<f64>()]
}

/// Returns the memory that the op takes for this many rows, in a dry run.
fn measured<S: Activation>(device: &Device, rows: usize) -> usize {
    let [width, vocabulary] = [768, 50_304];
    let arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
    let run = |step: &mut EagerStep<'_>| {
        let hidden = step.empty::<S>([rows, width])?;
        let (w, labels) = (step.empty::<S>([width, vocabulary])?, Indices::on_device(step.empty([rows])?.save()));
        // The tensor that marks the place takes 256 bytes.
        let before = step.empty::<u32>([0])?.slice().address() + 256 - hidden.slice().address();
        let form = LmHeadConfig::default();
        ops::linear_cross_entropy(step, &hidden, &w, &labels, &form)?;
        Ok(before)
    };
    let mut given = 0;
    let measured = arena.measure(|step| run(step).map(|before| given = before as usize)).unwrap();
    measured.high_water_bytes() - given
}

on_each_device! {
    fn chunks_match_separate_ops(device: &Device) {
        check::<f32>(device, Precision::F32);
    }

    fn bf16_chunks_match_separate_ops(device: &Device) {
        check::<bf16>(device, Precision::F32);
    }

    /// The losses of rows have the bits of a sum over one row, and equal gradients of losses give
    /// the bits of the gradients of a sum.
    fn rows_match_sums(device: &Device) {
        rows_match::<f32>(device);
        rows_match::<bf16>(device);
    }

    fn gradient_of_rows(device: &Device) {
        for (seed, form) in SEEDS.flat_map(|seed| forms().map(|form| (seed, form))) {
            let mut random = Random::new(seed);
            let [batch, tokens, vocabulary] = extents(&mut random, seed, [9, 11, 200]);
            let (rows, width, vocabulary) = (batch * tokens, 7, vocabulary + 20);
            let mut labels = random.belows(rows, vocabulary as u32);
            labels.iter_mut().skip(1).step_by(3).for_each(|label| *label = ops::IGNORED);
            let given = Given::<f32>::new([1, width, vocabulary], form);
            let values = vec![normal(&mut random, &[batch, tokens, width]), normal(&mut random, &given.matrix())];
            Case { sample: 60, ..Case::new("linear_cross_entropy_of_rows", seed, longest(&[rows, width, vocabulary]), values) }
                .check(
                    device,
                    |step, tape, p| {
                        let labels = step.upload_indices(&labels, [batch, tokens])?;
                        tape.linear_cross_entropy_of_rows(&leaf(tape, p[0])?, p[1], labels, form.chunk(1))
                    },
                    |p| {
                        let across = transpose::in_float64(&p[1], vocabulary, width);
                        let w = if form.tied { &across } else { &p[1] };
                        let logits = linear::in_float64(&p[0], w, &[], width, vocabulary);
                        let loss = |(x, &label): (&[f64], &u32)| match label {
                            ops::IGNORED => 0.0,
                            label => -softmax::in_float64(x)[label as usize].ln(),
                        };
                        logits.chunks_exact(vocabulary).zip(&labels).map(loss).collect()
                    },
                );
        }
    }

    fn rows_refuse_label_rules(device: &Device) {
        trial(device, |trial| {
            let (x, w) = (trial.upload(&[1.0f32; 6], [2, 3])?, trial.upload(&[1.0f32; 12], [3, 4])?);
            let (labels, form) = (trial.upload_indices(&[0, 1], [2])?, LmHeadConfig::default());
            let refused = ops::linear_cross_entropy_of_rows(trial, &x, &w, &labels, &form.rules(RULES));
            assert_refused(refused, &["linear_cross_entropy_of_rows", "the default label rules", "smoothing: 0.1"]);
            let labels = trial.upload_indices(&[0; 3], [3])?;
            let refused = ops::linear_cross_entropy_of_rows(trial, &x, &w, &labels, &form);
            assert_refused(refused, &["linear_cross_entropy_of_rows", "[2, 3], [3, 4] and [3]"]);
            Ok(())
        });
    }

    /// The step's precision applies within chunks.
    fn low_precision_chunks_match_separate_ops(device: &Device) {
        check::<f32>(device, Precision::Tf32);
    }

    /// Tests the op also before another op, where the loss's gradient is not one, and for hidden
    /// with more extents.
    fn gradient(device: &Device) {
        for (seed, form) in SEEDS.flat_map(|seed| forms().map(|form| (seed, form))) {
            let mut random = Random::new(seed);
            let [batch, tokens, vocabulary] = extents(&mut random, seed, [14, 11, 300]);
            let (rows, width, vocabulary) = (batch * tokens, 7, vocabulary + 1);
            let mut labels = random.belows(rows, vocabulary as u32);
            labels.iter_mut().skip(1).step_by(3).for_each(|label| *label = ops::IGNORED);
            let weight = 1.0 / rows as f32;
            let given = Given::<f32>::new([1, width, vocabulary], form);
            let values = vec![normal(&mut random, &[batch, tokens, width]), normal(&mut random, &given.matrix())];
            let form = given.form.rules(RULES.weighted(weight)).chunk(1);
            Case { sample: 60, ..Case::new("linear_cross_entropy", seed, longest(&[rows, width, vocabulary]), values) }
                .check(
                    device,
                    |step, tape, p| {
                        let labels = step.upload_indices(&labels, [batch, tokens])?;
                        tape.linear_cross_entropy(&leaf(tape, p[0])?, p[1], labels, form)
                    },
                    |p| {
                        let across = transpose::in_float64(&p[1], vocabulary, width);
                        in_float64(&p[0], if form.tied { &across } else { &p[1] }, &labels, width, weight)
                    },
                );
        }
    }

    /// The gradients are not scaled if the op gives the tape's loss. A table that is also the
    /// head's matrix gets the sum of both gradients, captured and eager.
    fn tied_with_an_embedding(device: &Device) {
        let [rows, width, vocabulary] = [150, 12, 40];
        let mut spec = ParameterSpec::builder();
        let [table, head] = ["table", "head"].map(|name| spec.add(name, [vocabulary, width], Initializer::fan_in(width)));
        let mut parameters = Parameters::new(device, &spec.build().unwrap(), 3).unwrap();
        let values = parameters.read(table).unwrap();
        parameters.write(head, &values).unwrap();
        let mut random = Random::new(9);
        let [ids, labels] = [(); 2].map(|()| random.belows(rows, vocabulary as u32));
        let form = LmHeadConfig::default().tied().rules(LabelRules::default().weighted(WEIGHT)).chunk(128);
        let pass = |head, gradients: &mut Gradients| {
            let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
            arena
                .step(|step| {
                    let tape = Tape::new(step, &parameters);
                    let (ids, labels) = (step.upload_indices(&ids, [rows])?, step.upload_indices(&labels, [rows])?);
                    let loss =
                        tape.linear_cross_entropy(&tape.embedding::<f32>(table, ids)?, head, labels, form)?;
                    tape.backward_overwrite(&loss, gradients)
                })
                .unwrap();
        };
        let [mut tied, mut alone] = [(); 2].map(|()| Gradients::zeros(&parameters).unwrap());
        pass(table, &mut tied);
        pass(head, &mut alone);
        // The embedding's rows are added to the head's gradient.
        let [of_head, of_table] = [head, table].map(|w| alone.read(w).unwrap());
        let sum: Vec<f64> = of_head.iter().zip(&of_table).map(|(a, b)| f64::from(*a) + f64::from(*b)).collect();
        let error = crate::support::relative_l2(&tied.read(table).unwrap(), &sum);
        assert!(error < 1e-6 && of_head.iter().any(|&x| x != 0.0), "{error:e}");
        // The op's own gradient, bit for bit.
        let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
        let dw = arena.step(|step| {
            let (w, ids) = (step.upload(&values, [vocabulary, width])?, step.upload_indices(&ids, [rows])?);
            let hidden: Tensor<'_> = ops::embedding(step, &w, &ids)?;
            let labels = step.upload_indices(&labels, [rows])?;
            step.read(&ops::linear_cross_entropy(step, &hidden, &w, &labels, &form)?.2)
        });
        assert_eq!(bits(&of_head), bits(&dw.unwrap()));
        let inputs = HostInputs::new().with(&ids, [rows]).unwrap().with(&labels, [rows]).unwrap();
        let gradients = Gradients::zeros(&parameters).unwrap();
        let mut captured = arena
            .capture((parameters, gradients, (table, form)), &inputs, |step, (parameters, gradients, (table, form)), slots| {
                let tape = Tape::new(step, parameters);
                let hidden = tape.embedding::<f32>(*table, slots.indices(0)?)?;
                let loss = tape.linear_cross_entropy(&hidden, *table, slots.indices(1)?, *form)?;
                tape.backward_overwrite(&loss, gradients)
            })
            .unwrap();
        captured.replay(&inputs).unwrap();
        assert_eq!(bits(&captured.state().1.read(table).unwrap()), bits(&tied.read(table).unwrap()));
        let mut wrong = labels.clone();
        wrong[140] = vocabulary as u32;
        let inputs = HostInputs::new().with(&ids, [rows]).unwrap().with(&wrong, [rows]).unwrap();
        let error = Error::Label { sample: 140, label: vocabulary as u32, classes: vocabulary };
        assert_eq!(captured.replay(&inputs).err(), Some(error));
    }

    /// An evaluation has the same loss, and does not take the memory of the gradients of logits and
    /// of the matrix.
    fn evaluation_computes_no_gradients(device: &Device) {
        let [rows, width, vocabulary] = [150, 64, 400];
        let mut spec = ParameterSpec::builder();
        let head = spec.add("head", [vocabulary, width], Initializer::fan_in(width));
        let parameters = Parameters::new(device, &spec.build().unwrap(), 3).unwrap();
        let mut random = Random::new(4);
        let (hidden, labels) = (random.normals(rows * width), random.belows(rows, vocabulary as u32));
        let pass = |step: &mut EagerStep<'_>, evaluates: bool, backward: bool| {
            let tape = Tape::new(step, &parameters);
            let tape = if evaluates { tape.evaluating() } else { tape };
            let hidden = tape.input(step.upload(&hidden, [rows, width])?);
            let labels = step.upload_indices(&labels, [rows])?;
            let loss = tape.linear_cross_entropy(&hidden, head, labels, LmHeadConfig::default().tied().chunk(128))?;
            let value = step.read_scalar(loss.value())?;
            if backward {
                tape.backward_overwrite(&loss, &mut Gradients::zeros(&parameters)?)?;
            }
            Ok(value)
        };
        let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
        let [trained, evaluated] = [false, true].map(|evaluates| arena.step(|step| pass(step, evaluates, false)).unwrap());
        assert_eq!(trained.to_bits(), evaluated.to_bits());
        let [trained, evaluated] = [false, true]
            .map(|evaluates| arena.measure(|step| pass(step, evaluates, false)).unwrap().high_water_bytes());
        let gradients = vocabulary * (128 + width) * size_of::<f32>();
        // A tensor without elements takes 256 bytes.
        assert!(trained + 256 >= evaluated + gradients, "{trained} and {evaluated} bytes");
        let refused = arena.step(|step| pass(step, true, true).map(drop));
        assert_refused(refused, &["linear_cross_entropy", "evaluation tape", "Tape::with_generator"]);
    }

    /// The loss and all gradients are 0 if all labels are ignored, as in `cross_entropy_by`. The
    /// same holds without rows.
    fn all_labels_ignored(device: &Device) {
        for rows in [0, 1, 200] {
            let mut given = Given::<f32>::new([rows, 9, 20], LmHeadConfig::default().chunk(128));
            given.labels.fill(ops::IGNORED);
            let outputs = trial(device, |trial| {
                let (x, w) = (trial.upload(&given.hidden, [rows, 9])?, trial.upload(&given.w, [9, 20])?);
                let labels = trial.upload_indices(&given.labels, [rows])?;
                let (loss, dx, dw) = given.tried(trial, [&x, &w], &labels)?;
                Ok([trial.output(&loss)?, trial.output(&dx)?, trial.output(&dw)?])
            });
            assert!(outputs.iter().flatten().all(|&x| x == 0.0), "{rows} rows: {outputs:?}");
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (w, form) = ((vec![1.0; 12], [3, 4]), LmHeadConfig::default());
            let run = |(w, shape): (Vec<f32>, [usize; 2]), labels: &[u32], form: LmHeadConfig| {
                let (x, w) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&w, shape)?);
                let labels = trial.upload_indices(labels, [labels.len()])?;
                ops::linear_cross_entropy(trial, &x, &w, &labels, &form).map(drop)
            };
            let refused = run(w.clone(), &[0; 2], form.tied());
            assert_refused(refused, &["linear_cross_entropy", "[vocabulary, width]", "[3, 4]"]);
            let refused = run((Vec::new(), [3, 0]), &[0; 2], form);
            assert_refused(refused, &["linear_cross_entropy", "[width, vocabulary]", "[3, 0]"]);
            let refused = run(w.clone(), &[0; 3], form);
            assert_refused(refused, &["labels of hidden's extents", "[2, 3], [3, 4] and [3]"]);
            let refused = run(w.clone(), &[0; 2], form.rules(LabelRules { smoothing: 1.0, ignore: false, weight: None }));
            assert_refused(refused, &["linear_cross_entropy", "[0, 1)"]);
            assert_eq!(run(w, &[0, 4], form), Err(Error::Label { sample: 1, label: 4, classes: 4 }));
            Ok(())
        });
    }
}

/// The bound is the kept gradients (the matrix's in f32, and hidden's), one chunk of gradients of
/// logits, and a quarter of its logits. A chunk has 2,560 rows of 50,304 in f32, and 5,248 in BF16,
/// however many rows there are. The logits of 16,384 rows would take 3.3 GB, and their gradients as
/// much again.
#[test]
fn logits_never_exist_whole() {
    let device = Device::open(stepscope::DeviceKind::Emulated).unwrap();
    let [width, vocabulary] = [768, 50_304];
    for rows in [16_384, 65_536] {
        for (bytes, got) in [(4, measured::<f32>(&device, rows)), (2, measured::<bf16>(&device, rows))] {
            let kept = 4 * width * vocabulary + bytes * rows * width;
            let chunk = LmHeadConfig::BYTES / 4 * 5;
            let whole = 2 * bytes * rows * vocabulary;
            println!(
                "{rows} rows of {bytes} bytes: {got} bytes, {kept} of them kept; all logits and their gradients take {whole}"
            );
            // Split-K products take some memory, and so does a loss for every eight rows.
            let bound = kept + chunk + (64 << 20) + rows;
            assert!(got <= bound && got < whole / 2, "{rows} rows of {bytes} bytes: {got} bytes, at most {bound}");
            assert!(got > kept + chunk * 9 / 10, "the bound is loose: {got} bytes of {bound}");
        }
    }
}
