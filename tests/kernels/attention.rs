//! Tests of `ops::attention` with normalised queries and keys, and of its backward pass.

use crate::gradients::{Case, SEEDS, extents, leaf, longest, normal, stack};
use crate::hostile::attack;
use crate::support::{Random, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trees;
use crate::trial::{Trial, assert_refused, assert_same, trial};
use crate::{norm, softmax};
use stepscope::ops::launch::AttentionKept;
use stepscope::ops::{self, Attention, AttentionConfig, QkNorm};
use stepscope::tensor::Saved;
use stepscope::{Result, Tensor};

const HEAD: usize = 64;
const SCALE: f32 = 0.125;
const EPSILON: f32 = 1e-6;

/// Batch, tokens and heads, with every count of tokens.
const SHAPES: [[usize; 3]; 18] = [
    [0, 12, 4],
    [1, 1, 1],
    [2, 12, 4],
    [3, 16, 2],
    [1, 7, 3],
    [5, 2, 1],
    [1, 3, 1],
    [1, 4, 1],
    [1, 5, 2],
    [1, 6, 1],
    [1, 8, 1],
    [1, 9, 3],
    [1, 10, 1],
    [1, 11, 1],
    [1, 13, 1],
    [1, 14, 1],
    [1, 15, 1],
    [64, 12, 4],
];

/// Queries, keys and values one after another, the gains of queries and keys, and the gradient of
/// the output.
struct Inputs {
    shape: [usize; 3],
    qkv: Vec<f32>,
    gains: Vec<f32>,
    dout: Vec<f32>,
}

/// One head of one sample.
#[derive(Clone, Copy)]
struct Head<'i> {
    inputs: &'i Inputs,
    sample: usize,
    head: usize,
}

/// Rows of numbers, by token.
type Rows = Vec<Vec<Exact>>;

impl Inputs {
    fn new(shape: [usize; 3]) -> Self {
        let mut random = Random::new(shape[0] as u64);
        let length = shape.iter().product::<usize>() * HEAD;
        let qkv = [random.uniforms(2 * length, -1.0, 2.0), random.normals(length)].concat();
        let dout = random.normals(length);
        Self { shape, qkv, gains: random.uniforms(2 * HEAD, 0.5, 1.5), dout }
    }

    fn extents(&self) -> [usize; 4] {
        [3, self.shape[0], self.shape[1], self.shape[2] * HEAD]
    }

    /// Returns the heads in the order of the probabilities.
    fn heads(&self) -> impl Iterator<Item = Head<'_>> {
        let [batch, _, heads] = self.shape;
        (0..batch).flat_map(move |sample| (0..heads).map(move |head| Head { inputs: self, sample, head }))
    }

    /// Returns the rounded values that forward keeps, in its layout.
    fn kept(&self) -> (Vec<f32>, Vec<f32>) {
        let rounded = |values: Vec<Exact>| values.into_iter().map(|value| value.value as f32).collect::<Vec<f32>>();
        let probabilities = self
            .heads()
            .flat_map(|head| rounded(head.probabilities(&[head.scales(0), head.scales(1)]).concat()))
            .collect();
        let mut inverse_rms = vec![0.0; 2 * self.dout.len() / HEAD];
        for head in self.heads() {
            for part in 0..2 {
                for (token, scale) in rounded(head.scales(part)).into_iter().enumerate() {
                    inverse_rms[(part * self.dout.len() + head.place(token, 0)) / HEAD] = scale;
                }
            }
        }
        (probabilities, inverse_rms)
    }
}

impl<'i> Head<'i> {
    fn tokens(self) -> usize {
        self.inputs.shape[1]
    }

    /// Returns the place of a token's element in q.
    fn place(self, token: usize, column: usize) -> usize {
        let [_, tokens, heads] = self.inputs.shape;
        ((self.sample * tokens + token) * heads + self.head) * HEAD + column
    }

    /// Returns the rows of an array shaped like q.
    fn rows(self, values: &'i [f32]) -> Rows {
        let row = |token| (0..HEAD).map(|column| Exact::given(values[self.place(token, column)])).collect();
        (0..self.tokens()).map(row).collect()
    }

    /// Returns the rows of q, k or v.
    fn part(self, part: usize) -> Rows {
        self.rows(&self.inputs.qkv[part * self.inputs.dout.len()..][..self.inputs.dout.len()])
    }

    fn gain(self, part: usize, column: usize) -> Exact {
        Exact::given(self.inputs.gains[part * HEAD + column])
    }

    /// Returns `1 / sqrt(mean x^2 + epsilon)` of the rows of q or k.
    fn scales(self, part: usize) -> Vec<Exact> {
        let scale = |row: Vec<Exact>| {
            let mean = dot(&row, &row) / Exact::given(HEAD as f32);
            Exact::given(1.0) / (mean + Exact::given(EPSILON)).sqrt()
        };
        self.part(part).into_iter().map(scale).collect()
    }

    /// Returns the rounded scales of q and k from those that forward keeps.
    fn given_scales(self, inverse_rms: &[f32]) -> [Vec<Exact>; 2] {
        let at = |part, token| (part * self.inputs.dout.len() + self.place(token, 0)) / HEAD;
        [0, 1].map(|part| (0..self.tokens()).map(|token| Exact::given(inverse_rms[at(part, token)])).collect())
    }

    /// Returns the softmax of the scores, with these scales.
    fn probabilities(self, scales: &[Vec<Exact>; 2]) -> Rows {
        let gained = |part: usize| -> Rows {
            let row =
                |row: Vec<Exact>| row.into_iter().enumerate().map(|(column, x)| x * self.gain(part, column)).collect();
            self.part(part).into_iter().map(row).collect()
        };
        let (q, k) = (gained(0), gained(1));
        let row = |(q, &scale): (&Vec<Exact>, &Exact)| {
            let score = |(k, &k_scale): (&Vec<Exact>, &Exact)| dot(q, k) * scale * k_scale * Exact::given(SCALE);
            let scores: Vec<Exact> = k.iter().zip(&scales[1]).map(score).collect();
            // The kernel's maximum has an error too, but the same error for all, so it cancels.
            let largest =
                Exact::given(scores.iter().fold(f64::NEG_INFINITY, |largest, score| largest.max(score.value)));
            let exps: Vec<Exact> = scores.into_iter().map(|score| (score - largest).exp()).collect();
            let inverse = Exact::given(1.0) / Exact::sum(self.tokens(), exps.iter().copied());
            exps.into_iter().map(|exp| exp * inverse).collect()
        };
        q.iter().zip(&scales[0]).map(row).collect()
    }

    /// Returns the gradients of q, k and v, and of the gains of q and k before the sum over heads,
    /// from the kernel's inputs.
    fn gradients(self, p: &[f32], scales: [Vec<Exact>; 2]) -> ([Rows; 3], [Vec<Exact>; 2]) {
        let (v, dout) = (self.part(2), self.rows(&self.inputs.dout));
        let n = [0, 1].map(|part| -> Rows {
            let row = |(row, &scale): (Vec<Exact>, &Exact)| row.into_iter().map(|x| x * scale).collect();
            self.part(part).into_iter().zip(&scales[part]).map(row).collect()
        });
        let p: Rows =
            p.chunks_exact(self.tokens()).map(|row| row.iter().copied().map(Exact::given).collect()).collect();
        let ds: Rows = (p.iter().zip(&dout))
            .map(|(p, dout)| {
                let dp: Vec<Exact> = v.iter().map(|v| dot(dout, v)).collect();
                let mean = Exact::sum(self.tokens(), p.iter().zip(&dp).map(|(&p, &dp)| p.times(dp)));
                p.iter().zip(dp).map(|(&p, dp)| p * (dp - mean) * Exact::given(SCALE)).collect()
            })
            .collect();
        let across = |factors: &Rows| -> Rows {
            (0..self.tokens()).map(|j| factors.iter().map(|row| row[j]).collect()).collect()
        };
        let gained = |rows: Rows, part: usize| -> Rows {
            let row =
                |row: Vec<Exact>| row.into_iter().enumerate().map(|(column, x)| x * self.gain(part, column)).collect();
            rows.into_iter().map(row).collect()
        };
        let d = [gained(mix(&ds, &n[1]), 1), gained(mix(&across(&ds), &n[0]), 0)];
        let before = |part: usize| -> Rows {
            let rows = gained(d[part].clone(), part).into_iter().zip(&n[part]).zip(&scales[part]);
            rows.map(|((d, n), &scale)| {
                let mean = dot(&d, n) / Exact::given(HEAD as f32);
                d.into_iter().zip(n).map(|(d, &n)| (d - mean.times(n)) * scale).collect()
            })
            .collect()
        };
        let gains = [0, 1].map(|part| {
            let term = |column: usize| d[part].iter().zip(&n[part]).map(move |(d, n)| d[column].times(n[column]));
            (0..HEAD).map(|column| Exact::sum(self.tokens(), term(column))).collect()
        });
        ([before(0), before(1), mix(&across(&p), &dout)], gains)
    }
}

fn form<'s>(heads: usize) -> AttentionConfig<'s> {
    AttentionConfig::new(heads).scale(SCALE)
}

/// Returns the output, the probabilities and the scales.
fn attend<'s>(trial: &Trial<'_, 's>, qkv: &Tensor<'s>, gains: &Tensor<'s>) -> Result<(Saved<'s>, [Saved<'s>; 2])> {
    let heads = qkv.shape().as_rows()[1] / HEAD;
    let norm = QkNorm::new(gains, EPSILON);
    let Attention { out, kept } = ops::attention(trial, qkv, Some(norm), &form(heads))?;
    let AttentionKept::Short { probabilities, inverse_rms } = kept else {
        panic!("the kernel for few tokens was not chosen")
    };
    Ok((out, [probabilities, inverse_rms]))
}

/// Sums in four chains, by column mod 4, and adds the chains in pairs.
fn dot(a: &[Exact], b: &[Exact]) -> Exact {
    let chain = |first: usize| {
        let terms = a.iter().zip(b).skip(first).step_by(4).map(|(&a, &b)| a.times(b));
        Exact::sum(HEAD / 4, terms)
    };
    Exact::sum(2, (0..4).map(chain))
}

/// Returns `sum_j factors[i][j] rows[j]` for each i.
fn mix(factors: &Rows, rows: &Rows) -> Rows {
    let element = |factors: &[Exact], column: usize| {
        Exact::sum(rows.len(), factors.iter().zip(rows).map(|(&factor, row)| factor.times(row[column])))
    };
    factors.iter().map(|factors| (0..HEAD).map(|column| element(factors, column)).collect()).collect()
}

/// Computes attention in float64, for normalised queries and keys; `q`, `k`, `v`: `[batch, tokens,
/// heads 64]`.
pub(crate) fn in_float64(q: &[f64], k: &[f64], v: &[f64], tokens: usize, heads: usize, scale: f64) -> Vec<f64> {
    let width = heads * HEAD;
    let mut out = vec![0.0; q.len()];
    for sample in 0..q.len() / (tokens * width) {
        for head in 0..heads {
            let at = |token: usize| (sample * tokens + token) * width + head * HEAD;
            for query in 0..tokens {
                let dot = |key: usize| -> f64 { (0..HEAD).map(|i| q[at(query) + i] * k[at(key) + i]).sum() };
                let scores: Vec<f64> = (0..tokens).map(|key| scale * dot(key)).collect();
                for (key, probability) in softmax::in_float64(&scores).into_iter().enumerate() {
                    (0..HEAD).for_each(|i| out[at(query) + i] += probability * v[at(key) + i]);
                }
            }
        }
    }
    out
}

on_each_device! {
    fn attention_forward(device: &Device) {
        let mut seen = ["attention", "attention probabilities", "attention inverse rms"].map(Closeness::new);
        for shape in SHAPES {
            let inputs = Inputs::new(shape);
            let [batch, tokens, heads] = shape;
            let got = trial(device, |trial| {
                let (qkv, gains) = (trial.upload(&inputs.qkv, inputs.extents())?, trial.upload(&inputs.gains, [2, HEAD])?);
                let (out, [probabilities, inverse_rms]) = attend(trial, &qkv, &gains)?;
                assert_eq!(out.shape().extents(), [batch, tokens, heads * HEAD]);
                assert_eq!(probabilities.shape().extents(), [batch, heads, tokens, tokens]);
                assert_eq!(inverse_rms.shape().extents(), [2, batch, tokens, heads]);
                Ok([trial.output(&out)?, trial.output(&probabilities)?, trial.output(&inverse_rms)?])
            });
            let mut want = got.each_ref().map(|got| vec![Exact::given(0.0); got.len()]);
            let mut probabilities = vec![];
            for head in inputs.heads() {
                // The kernel's own scales, which are checked separately.
                let p = head.probabilities(&head.given_scales(&got[2]));
                for (token, row) in mix(&p, &head.part(2)).into_iter().enumerate() {
                    want[0][head.place(token, 0)..][..HEAD].copy_from_slice(&row);
                }
                for part in 0..2 {
                    for (token, scale) in head.scales(part).into_iter().enumerate() {
                        want[2][(part * inputs.dout.len() + head.place(token, 0)) / HEAD] = scale;
                    }
                }
                probabilities.extend(p.concat());
            }
            want[1] = probabilities;
            for ((seen, got), want) in seen.iter_mut().zip(&got).zip(&want) {
                seen.check(format_args!("{shape:?}"), got, want);
            }
        }
        seen.into_iter().for_each(Closeness::finish);
    }

    fn attention_backward(device: &Device) {
        let mut seen = ["attention dq", "attention dk", "attention dv", "attention gains"].map(Closeness::new);
        for shape in SHAPES {
            let inputs = Inputs::new(shape);
            let [batch, tokens, heads] = shape;
            let (probabilities, inverse_rms) = inputs.kept();
            let (dqkv, dgains) = trial(device, |trial| {
                let (qkv, gains) = (trial.upload(&inputs.qkv, inputs.extents())?, trial.upload(&inputs.gains, [2, HEAD])?);
                let kept = AttentionKept::Short {
                    probabilities: trial.upload(&probabilities, [batch, heads, tokens, tokens])?.save(),
                    inverse_rms: trial.upload(&inverse_rms, [2, batch, tokens, heads])?.save(),
                };
                let dout = trial.upload(&inputs.dout, [batch, tokens, heads * HEAD])?.save();
                let mut dgains = trial.upload(&[f32::NAN; 2 * HEAD], [2 * HEAD])?;
                // The output is not read.
                let (made, norm) = (Attention { out: dout, kept }, QkNorm::new(&gains, EPSILON));
                let dqkv = trial.with_scratch(|| {
                    ops::launch::attention_backward(trial, &qkv, Some((norm, &mut dgains, false)), &form(heads), &made, &dout)
                })?;
                Ok((trial.output(&dqkv)?, trial.output(&dgains)?))
            });
            let length = inputs.dout.len();
            let mut want = [(); 3].map(|()| vec![Exact::given(0.0); length]);
            let mut gains = vec![vec![]; 2 * HEAD];
            for (head, p) in inputs.heads().zip(probabilities.chunks_exact(tokens * tokens)) {
                let (parts, own) = head.gradients(p, head.given_scales(&inverse_rms));
                for (want, rows) in want.iter_mut().zip(parts) {
                    for (token, row) in rows.into_iter().enumerate() {
                        want[head.place(token, 0)..][..HEAD].copy_from_slice(&row);
                    }
                }
                gains.iter_mut().zip(own.concat()).for_each(|(gains, own)| gains.push(own));
            }
            for ((part, seen), want) in seen[..3].iter_mut().enumerate().zip(&want) {
                seen.check(format_args!("{shape:?}"), &dqkv[part * length..][..length], want);
            }
            let depth = trees::rows_depth(batch * heads);
            let want: Vec<Exact> = gains.into_iter().map(|terms| Exact::sum(depth, terms)).collect();
            seen[3].check(format_args!("{shape:?}"), &dgains, &want);
        }
        // The gains are few sums of many errors, far from their bound. `gradient` checks them as
        // strictly as all others.
        seen.into_iter().take(3).for_each(Closeness::finish);
    }

    /// A sample and a head have the same bits at every place.
    fn heads_are_independent(device: &Device) {
        let inputs = Inputs::new([3, 12, 4]);
        let run = |qkv: &[f32], extents: [usize; 4]| {
            trial(device, |trial| {
                let (qkv, gains) = (trial.upload(qkv, extents)?, trial.upload(&inputs.gains, [2, HEAD])?);
                let (out, kept) = attend(trial, &qkv, &gains)?;
                kept.iter().try_for_each(|kept| trial.output(kept).map(drop))?;
                trial.output(&out)
            })
        };
        let whole = run(&inputs.qkv, inputs.extents());
        for head in inputs.heads() {
            let own = |values: &[f32]| -> Vec<f32> {
                (0..12 * HEAD).map(|at| values[head.place(at / HEAD, at % HEAD)]).collect()
            };
            let qkv: Vec<f32> = inputs.qkv.chunks_exact(inputs.dout.len()).flat_map(own).collect();
            let alone = run(&qkv, [3, 1, 12, HEAD]);
            assert_same(format_args!("sample {}, head {}", head.sample, head.head), &alone, &own(&whole));
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let gains = trial.upload(&[1.0; 2 * HEAD], [2, HEAD])?;
            let qkv = trial.upload(&[1.0; 6 * HEAD], [3, 1, 2, HEAD])?;
            assert_refused(attend(trial, &qkv, &qkv), &["128 gains", "[3, 1, 2, 64]"]);
            let (p, few) = (trial.upload(&[1.0; 4], [1, 1, 2, 2])?.save(), trial.upload(&[1.0; 4], [2, 2])?.save());
            let inverse_rms = trial.upload(&[1.0; 4], [2, 1, 2, 1])?.save();
            let (dout, other) = (trial.upload(&[1.0; 128], [1, 2, 64])?, trial.upload(&[1.0; 128], [2, 1, 64])?);
            let mut dgains = trial.upload(&[1.0; 2 * HEAD], [2 * HEAD])?;
            let out = dout.save();
            for (probabilities, dout, words) in [
                (p, other.save(), ["attention_backward", "[1, 2, 64]", "[2, 1, 64]"]),
                (few, out, ["attention_backward", "[1, 1, 2, 2]", "[2, 2]"]),
            ] {
                let made = Attention { out, kept: AttentionKept::Short { probabilities, inverse_rms } };
                let norm = QkNorm::new(&gains, EPSILON);
                let refused =
                    ops::launch::attention_backward(trial, &qkv, Some((norm, &mut dgains, false)), &form(1), &made, &dout);
                assert_refused(refused, &words);
            }
            Ok(())
        });
    }

    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [batch, tokens, heads] = extents(&mut random, seed, [2, 5, 2]);
            let width = heads * 64;
            let operands =
                vec![normal(&mut random, &[3 * batch, tokens, width]), stack(&mut random, 2, &[64])];
            let case = Case::new("attention", seed, longest(&[64, batch * heads * tokens]), operands);
            case.check(device, |_, tape, p| {
                let qkv = leaf(tape, p[0])?.reshape([3, batch, tokens, width])?;
                tape.attention(&qkv, Some((&p.stacks[1], 1e-3)), &form(heads))
            }, |p| {
                let part = |part: usize| &p[0][part * p[0].len() / 3..][..p[0].len() / 3];
                let normed = |at: usize| norm::in_float64(part(at), &p[1][at * 64..][..64], f64::from(1e-3f32));
                in_float64(&normed(0), &normed(1), part(2), tokens, heads, 0.125)
            });
        }
    }
}

attack! {
    attention::attention_forward<S> {
        qkv: stored 3072, gains: f32s 128, tokens: number 4, heads: number 2, epsilon: float 1e-6, scale: float 0.125,
        out: out_stored 1024, probabilities: out 64, inverse_rms: out 32,
    }
    attention::attention_backward<S> {
        qkv: stored 3072, gains: f32s 128, inverse_rms: f32s 32, probabilities: f32s 64, dout: stored 1024, tokens: number 4,
        heads: number 2, scale: float 0.125, dqkv: out_stored 3072, dgains: out 512,
    }
}
