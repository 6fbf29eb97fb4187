//! `ops::attention` and its backward pass.

use crate::support::{Random, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trial::{assert_refused, assert_same, trial};
use stepscope::{Result, ops};

const HEAD: usize = 64;
const SCALE: f32 = 0.125;

/// Batch, tokens, heads.
const SHAPES: [[usize; 3]; 7] = [[0, 12, 4], [1, 1, 1], [2, 12, 4], [3, 16, 2], [1, 7, 3], [5, 2, 1], [64, 12, 4]];

/// Queries, keys, values and the gradient of the output, in float64, with their places.
struct Inputs {
    shape: [usize; 3],
    parts: [Vec<f32>; 4],
}

/// One head of one sample.
struct Head<'i> {
    inputs: &'i Inputs,
    sample: usize,
    head: usize,
}

impl Inputs {
    fn new(shape: [usize; 3]) -> Self {
        let mut random = Random::new(shape[0] as u64);
        let parts = [(); 4].map(|()| random.uniforms(shape.iter().product::<usize>() * HEAD, -1.0, 2.0));
        Self { shape, parts }
    }

    fn extents(&self) -> [usize; 3] {
        [self.shape[0], self.shape[1], self.shape[2] * HEAD]
    }

    /// In the order of the probabilities.
    fn heads(&self) -> impl Iterator<Item = Head<'_>> {
        let [batch, _, heads] = self.shape;
        (0..batch).flat_map(move |sample| (0..heads).map(move |head| Head { inputs: self, sample, head }))
    }
}

impl Head<'_> {
    fn tokens(&self) -> usize {
        self.inputs.shape[1]
    }

    /// Where a token's element stands.
    fn place(&self, token: usize, column: usize) -> usize {
        let [_, tokens, heads] = self.inputs.shape;
        ((self.sample * tokens + token) * heads + self.head) * HEAD + column
    }

    fn at(&self, part: usize, token: usize, column: usize) -> Exact {
        Exact::given(self.inputs.parts[part][self.place(token, column)])
    }

    fn dot(&self, [a, b]: [usize; 2], [i, j]: [usize; 2]) -> Exact {
        Exact::sum(HEAD, (0..HEAD).map(|column| self.at(a, i, column).times(self.at(b, j, column))))
    }

    /// `sum_j factors[j] part[j, column]`
    fn mix(&self, factors: impl Iterator<Item = Exact>, part: usize, column: usize) -> Exact {
        Exact::sum(self.tokens(), factors.enumerate().map(|(j, factor)| factor.times(self.at(part, j, column))))
    }

    /// Row i of the probabilities.
    fn probabilities(&self, i: usize) -> Vec<Exact> {
        let scores: Vec<Exact> = (0..self.tokens()).map(|j| self.dot([0, 1], [i, j]) * Exact::given(SCALE)).collect();
        // The kernel's maximum has an error too, but it is the same one for all: it cancels.
        let largest = Exact::given(scores.iter().fold(f64::NEG_INFINITY, |largest, score| largest.max(score.value)));
        let exps: Vec<Exact> = scores.into_iter().map(|score| (score - largest).exp()).collect();
        let inverse = Exact::given(1.0) / Exact::sum(self.tokens(), exps.iter().copied());
        exps.into_iter().map(|exp| exp * inverse).collect()
    }

    /// Row i of the scores' gradients from the probabilities that the kernel is given.
    fn score_gradients(&self, i: usize, p: &[f32]) -> Vec<Exact> {
        let dp: Vec<Exact> = (0..self.tokens()).map(|j| self.dot([3, 2], [i, j])).collect();
        let p = || p[i * self.tokens()..][..self.tokens()].iter().copied().map(Exact::given);
        let mean = Exact::sum(self.tokens(), p().zip(&dp).map(|(p, &dp)| p.times(dp)));
        p().zip(dp).map(|(p, dp)| p * (dp - mean) * Exact::given(SCALE)).collect()
    }
}

on_each_device! {
    fn attention_forward(device: &Device) {
        let mut seen = ["attention", "attention probabilities"].map(Closeness::new);
        for shape in SHAPES {
            let inputs = Inputs::new(shape);
            let [batch, tokens, heads] = shape;
            let (out, probabilities) = trial(device, |trial| {
                let upload = |part: usize| trial.upload(&inputs.parts[part], inputs.extents());
                let (q, k, v) = (upload(0)?, upload(1)?, upload(2)?);
                let (out, probabilities) = ops::attention(trial, &q, &k, &v, SCALE)?;
                assert_eq!((out.shape(), probabilities.shape()), (q.shape(), [batch, heads, tokens, tokens].into()));
                Ok((trial.output(&out)?, trial.output(&probabilities)?))
            });
            let mut want = vec![Exact::given(0.0); out.len()];
            let mut want_probabilities = vec![];
            for head in inputs.heads() {
                for i in 0..tokens {
                    let p = head.probabilities(i);
                    for column in 0..HEAD {
                        want[head.place(i, column)] = head.mix(p.iter().copied(), 2, column);
                    }
                    want_probabilities.extend(p);
                }
            }
            seen[0].check(format_args!("{shape:?}"), &out, &want);
            seen[1].check(format_args!("{shape:?}"), &probabilities, &want_probabilities);
        }
        seen.into_iter().for_each(Closeness::finish);
    }

    fn attention_backward(device: &Device) {
        let mut seen = ["attention dq", "attention dk", "attention dv"].map(Closeness::new);
        for shape in SHAPES {
            let inputs = Inputs::new(shape);
            let [batch, tokens, heads] = shape;
            let probabilities: Vec<f32> = inputs
                .heads()
                .flat_map(|head| {
                    (0..tokens).flat_map(|i| head.probabilities(i)).map(|p| p.value as f32).collect::<Vec<_>>()
                })
                .collect();
            let got = trial(device, |trial| {
                let upload = |part: usize| trial.upload(&inputs.parts[part], inputs.extents());
                let (q, k, v, dout) = (upload(0)?, upload(1)?, upload(2)?, upload(3)?);
                let probabilities = trial.upload(&probabilities, [batch, heads, tokens, tokens])?;
                let gradients = ops::attention_backward(trial, &q, &k, &v, &probabilities, &dout, SCALE)?;
                gradients.iter().map(|gradient| trial.output(gradient)).collect::<Result<Vec<_>>>()
            });
            let mut want = [(); 3].map(|()| vec![Exact::given(0.0); got[0].len()]);
            for (head, p) in inputs.heads().zip(probabilities.chunks_exact(tokens * tokens)) {
                let ds: Vec<Vec<Exact>> = (0..tokens).map(|i| head.score_gradients(i, p)).collect();
                for token in 0..tokens {
                    for column in 0..HEAD {
                        let at = head.place(token, column);
                        let p = (0..tokens).map(|i| Exact::given(p[i * tokens + token]));
                        want[0][at] = head.mix(ds[token].iter().copied(), 1, column);
                        want[1][at] = head.mix(ds.iter().map(|ds| ds[token]), 0, column);
                        want[2][at] = head.mix(p, 3, column);
                    }
                }
            }
            for ((seen, got), want) in seen.iter_mut().zip(&got).zip(&want) {
                seen.check(format_args!("{shape:?}"), got, want);
            }
        }
        seen.into_iter().for_each(Closeness::finish);
    }

    /// A sample and a head have the same bits wherever they stand.
    fn heads_do_not_see_each_other(device: &Device) {
        let inputs = Inputs::new([3, 12, 4]);
        let run = |parts: [Vec<f32>; 3], extents: [usize; 3]| {
            trial(device, |trial| {
                let upload = |part: usize| trial.upload(&parts[part], extents);
                let (q, k, v) = (upload(0)?, upload(1)?, upload(2)?);
                let (out, probabilities) = ops::attention(trial, &q, &k, &v, SCALE)?;
                trial.output(&probabilities)?;
                trial.output(&out)
            })
        };
        let whole = run([0, 1, 2].map(|part| inputs.parts[part].clone()), inputs.extents());
        for head in inputs.heads() {
            let own = |values: &[f32]| -> Vec<f32> {
                (0..12 * HEAD).map(|at| values[head.place(at / HEAD, at % HEAD)]).collect()
            };
            let alone = run([0, 1, 2].map(|part| own(&inputs.parts[part])), [1, 12, HEAD]);
            assert_same(format_args!("sample {}, head {}", head.sample, head.head), &alone, &own(&whole));
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let many = trial.upload(&[1.0; 17 * HEAD], [1, 17, HEAD])?;
            assert_refused(
                ops::attention(trial, &many, &many, &many, SCALE),
                &["attention", "tokens up to 16", "[1, 17, 64]"],
            );
            let narrow = trial.upload(&[1.0; 2 * 65], [1, 2, 65])?;
            assert_refused(ops::attention(trial, &narrow, &narrow, &narrow, SCALE), &["multiple of 64", "[1, 2, 65]"]);
            let (a, b) = (trial.upload(&[1.0; 128], [1, 2, 64])?, trial.upload(&[1.0; 128], [2, 1, 64])?);
            assert_refused(ops::attention(trial, &a, &b, &a, SCALE), &["attention", "[1, 2, 64]", "[2, 1, 64]"]);
            assert_refused(ops::attention(trial, &a, &a, &b, SCALE), &["attention", "[1, 2, 64]", "[2, 1, 64]"]);
            let p = trial.upload(&[1.0; 4], [1, 1, 2, 2])?;
            let refused = ops::attention_backward(trial, &a, &a, &a, &p, &b, SCALE);
            assert_refused(refused, &["attention_backward", "[1, 2, 64]", "[2, 1, 64]"]);
            let refused = ops::attention_backward(trial, &a, &a, &a, &a, &a, SCALE);
            assert_refused(refused, &["attention_backward", "[1, 1, 2, 2]", "[1, 2, 64]"]);
            Ok(())
        });
    }
}
