//! A parameter that several ops use: its gradient is the sum of theirs, starting with the op
//! recorded last.

use crate::gradients::{Case, SEEDS, extents, leaf, longest, normal};
use crate::support::{Random, bits, on_each_device};
use crate::{linear, softmax, transpose};
use stepscope::ops::{self, Gemm, Precision};
use stepscope::parameters::Initializer;
use stepscope::tensor::Saved;
use stepscope::{
    AdamW, Arena, Capacity, DeviceBatch, Gradients, HostBatch, HostInputs, Model, Parameter, ParameterSpec, Parameters,
    Result, Tape, TrainState, Trainer, Var,
};

/// Computes a head over the rows of an embedding: `y = h w^T`; `h`: `[rows, width]`, `w`: `[words,
/// width]`, `y`: `[rows, words]`.
fn head<'s>(tape: &Tape<'_, 's>, h: &Var<'s>, w: Parameter) -> Result<Var<'s>> {
    let (op, none) = (tape.op("head", [h])?, None::<&Saved<'s>>);
    let weights = op.weights(w)?;
    let [words, width] = stepscope::tensor::Source::shape(&weights).as_rows();
    let [rows, _] = h.shape().as_rows();
    let mut y = tape.step().empty([rows, words])?;
    ops::gemm_into(tape.step(), &Gemm::new(rows, words, width).transpose_b(), h.value(), &weights, none, &mut y)?;
    let h = *h;
    Ok(op.record(y.save(), move |back, dy| {
        let (step, weights) = (back.step(), back.weights(w)?);
        let mut dh = step.empty([rows, width])?;
        ops::gemm_into(step, &Gemm::new(rows, width, words), &dy, &weights, none, &mut dh)?;
        let (mut dw, accumulate) = back.gradient(w)?;
        let form = Gemm::new(words, width, rows).transpose_a();
        let form = if accumulate { form.accumulate() } else { form };
        ops::gemm_into(step, &form, &dy, h.value(), none, &mut dw)?;
        back.add(&h, dh)
    }))
}

/// Uses the same parameter as an embedding, a head, and an embedding again.
fn words_in_words_out<'s>(tape: &Tape<'_, 's>, words: &Var<'s>, w: [Parameter; 3]) -> Result<Var<'s>> {
    let h = tape.linear(words, w[0], None)?.tanh()?;
    let guess = head(tape, &h, w[1])?.softmax()?;
    tape.linear(&guess, w[2], None)
}

/// Returns one-hot rows.
fn one_hot(random: &mut Random, rows: usize, words: usize) -> Vec<f32> {
    let chosen = random.belows(rows, words as u32);
    chosen.iter().flat_map(|&word| (0..words as u32).map(move |at| f32::from(u8::from(at == word)))).collect()
}

fn add(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// A model that names its input word, one of eight.
struct Tied {
    w: Parameter,
}

impl Model for Tied {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let words = tape.input(batch.input::<f32>(0)?);
        head(tape, &tape.linear(&words, self.w, None)?.tanh()?, self.w)
    }
}

const WORDS: usize = 8;

struct Words {
    given: Vec<f32>,
    numbers: Vec<u32>,
}

impl Words {
    fn new(seed: u64) -> Self {
        let given = one_hot(&mut Random::new(seed), 20, WORDS);
        let numbers = given.chunks(WORDS).map(|word| word.iter().position(|&at| at == 1.0).unwrap() as u32);
        Self { numbers: numbers.collect(), given }
    }
}

impl HostBatch for Words {
    fn len(&self) -> usize {
        self.numbers.len()
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        HostInputs::new().with(&self.given, [self.len(), WORDS])?.with(&self.numbers, [self.len()])
    }
}

on_each_device! {
    fn embedding_and_head_share_weights(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, words, width] = extents(&mut random, seed, [37, 12, 19]);
            let words = words + 1;
            let mut w = linear::operands(&mut random, [1, words, width]).swap_remove(1);
            w.values.iter_mut().for_each(|w| *w *= (words as f32).sqrt());
            let operands = vec![normal(&mut random, &[rows, words]), w];
            let length = longest(&[rows, words, width]);
            Case::new("tied", seed, length, operands).check(device, |_, tape, p| {
                words_in_words_out(tape, &leaf(tape, p[0])?, [p[1]; 3])
            }, |p| {
                let back = transpose::in_float64(&p[1], words, width);
                let h: Vec<f64> = linear::in_float64(&p[0], &p[1], &[], words, width).iter().map(|h| h.tanh()).collect();
                let logits = linear::in_float64(&h, &back, &[], width, words);
                let guess: Vec<f64> = logits.chunks_exact(words).flat_map(softmax::in_float64).collect();
                linear::in_float64(&guess, &p[1], &[], words, width)
            });
        }
    }

    /// The gradient has the bits of the manual sum over separate parameters, also over
    /// micro-batches.
    fn gradient_sums_over_uses(device: &Device) {
        // The second needs products in chunks.
        for (rows, words, width) in [(33, 20, 24), (1030, 16, 16)] {
            let mut spec = ParameterSpec::builder();
            let [tied, first, second, third] =
                ["tied", "first", "second", "third"].map(|name| spec.add(name, [words, width], Initializer::ZERO));
            let mut parameters = Parameters::new(device, &spec.build().unwrap(), 0).unwrap();
            let mut random = Random::new(words as u64);
            let values = random.normals(words * width);
            for parameter in [tied, first, second, third] {
                parameters.write(parameter, &values).unwrap();
            }
            let parts: Vec<Vec<f32>> = (0..3).map(|_| random.normals(rows * words)).collect();
            for precision in [Precision::F32, Precision::Tf32] {
                let pass = |gradients: &mut Gradients, w: [Parameter; 3], part: &[f32], afresh: bool| {
                    let mut arena = Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap();
                    arena.step(|step| {
                        step.set_precision(precision);
                        let tape = Tape::new(step, &parameters);
                        let y = words_in_words_out(&tape, &tape.input(step.upload(part, [rows, words])?), w)?;
                        let loss = tape.mean(&y.tanh()?)?;
                        if afresh { tape.backward_overwrite(&loss, gradients) } else { tape.backward(&loss, gradients) }
                    }).unwrap();
                };
                let [mut got, mut alone] = [(); 2].map(|()| Gradients::zeros(&parameters).unwrap());
                let (mut want, mut otherwise) = (Vec::new(), Vec::new());
                for (number, part) in parts.iter().enumerate() {
                    pass(&mut got, [tied; 3], part, number == 0);
                    pass(&mut alone, [first, second, third], part, true);
                    let each = [first, second, third].map(|parameter| alone.read(parameter).unwrap());
                    assert!(each.iter().all(|gradient| gradient.iter().any(|&value| value != 0.0)));
                    for (sum, order) in [(&mut want, [2, 1, 0]), (&mut otherwise, [0, 1, 2])] {
                        for place in order {
                            *sum = if sum.is_empty() { each[place].clone() } else { add(sum, &each[place]) };
                        }
                    }
                    let got = bits(&got.read(tied).unwrap());
                    assert!(got == bits(&want), "{rows} rows, {precision:?}, part {number}");
                    assert!(got != bits(&otherwise), "a different order of sums must give different bits");
                }
                assert!(got.read(first).unwrap().iter().all(|&value| value == 0.0));
            }
        }
    }

    /// Eager and captured training, with whole batches and micro-batches, ends with the same
    /// weights, and the model learns.
    fn training_modes_give_same_bits(device: &Device) {
        let train = |captured: bool, parts: usize| {
            let mut spec = ParameterSpec::builder();
            let model = Tied { w: spec.add("w", [WORDS, 16], Initializer::fan_in(16)) };
            let config = AdamW { learning_rate: 0.05, ..AdamW::default() };
            let state = TrainState::new(device, model, &spec.build().unwrap(), 7, config).unwrap();
            let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
            let mut trainer = match captured {
                true => Trainer::captured(&mut arena, state, &Words::new(0)).unwrap(),
                false => Trainer::eager(&mut arena, state),
            };
            let batch = |number: u64| Vec::from_iter((0..parts as u64).map(|part| Words::new(2 * number + part)));
            trainer.fit((0..30).map(batch)).unwrap();
            let loss = trainer.evaluate(&Words::new(99)).unwrap();
            assert!(loss < 0.5, "the loss must fall to a quarter of guessing: {loss}");
            trainer.state().parameters.sha256().unwrap()
        };
        for parts in [1, 2] {
            assert_eq!(train(false, parts), train(true, parts), "{parts} parts");
        }
    }
}
