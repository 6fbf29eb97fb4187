//! The inputs of `flash_attention.rs` and its expected results: in the documented order, bit for
//! bit, and in float64.

use crate::support::Random;
use crate::trees;
use kernels::math;
use std::num::NonZeroU32;
use stepscope::ops::{AttentionConfig, AttentionMask};
use stepscope::tensor::Shape;
use stepscope::{Result, Tensor};

/// The keys of a tile, which are part of the documented order.
const TILE: usize = 64;

/// The shape and masks of an attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    /// The numbers of heads and of key heads.
    pub(crate) heads: [usize; 2],
    pub(crate) width: usize,
    pub(crate) stacked: bool,
    pub(crate) sees: AttentionMask,
    /// The presence of documents and of lengths.
    pub(crate) masks: [bool; 2],
}

pub(crate) const fn window(tokens: u32) -> AttentionMask {
    AttentionMask::SlidingWindow(NonZeroU32::new(tokens).unwrap())
}

/// One sample, packed, without masks.
pub(crate) const PLAIN: Setup = Setup {
    batch: 1,
    tokens: 1,
    heads: [1, 1],
    width: 64,
    stacked: false,
    sees: AttentionMask::Full,
    masks: [false; 2],
};

/// Every mask, separately and together; every width; both layouts; groups; tiles with tails, whole
/// tiles and single rows.
pub(crate) const SETUPS: [Setup; 16] = [
    PLAIN,
    Setup { batch: 0, tokens: 3, ..PLAIN },
    Setup { batch: 2, tokens: 17, heads: [2, 2], width: 32, stacked: true, ..PLAIN },
    Setup { tokens: 17, heads: [2, 1], width: 4, sees: AttentionMask::Causal, ..PLAIN },
    Setup { tokens: 64, sees: AttentionMask::Causal, ..PLAIN },
    Setup { tokens: 65, heads: [4, 2], width: 80, sees: AttentionMask::Causal, ..PLAIN },
    Setup { tokens: 200, heads: [2, 2], width: 96, stacked: true, sees: AttentionMask::Causal, ..PLAIN },
    Setup { tokens: 130, width: 128, ..PLAIN },
    Setup { tokens: 130, heads: [3, 1], width: 256, sees: AttentionMask::Causal, ..PLAIN },
    Setup { tokens: 40, width: 132, sees: window(1), ..PLAIN },
    Setup { tokens: 200, width: 64, sees: window(64), ..PLAIN },
    Setup { tokens: 200, heads: [2, 1], width: 32, sees: window(70), ..PLAIN },
    Setup { batch: 3, tokens: 100, width: 32, masks: [true, false], ..PLAIN },
    Setup { batch: 5, tokens: 70, width: 64, masks: [false, true], ..PLAIN },
    Setup {
        batch: 4,
        tokens: 150,
        heads: [4, 2],
        width: 64,
        sees: AttentionMask::Causal,
        masks: [true, true],
        ..PLAIN
    },
    Setup { batch: 3, tokens: 140, heads: [2, 2], width: 128, stacked: true, sees: window(90), masks: [true, true] },
];

/// The values of a setup.
pub(crate) struct Inputs {
    pub(crate) setup: Setup,
    pub(crate) qkv: Vec<f32>,
    pub(crate) dout: Vec<f32>,
    pub(crate) documents: Vec<u32>,
    pub(crate) lengths: Vec<u32>,
}

/// The output, the logarithms of the denominators, and the gradient of q, k and v.
pub(crate) type Results<T> = [Vec<T>; 3];

impl Setup {
    /// Returns the total number of heads of q, k and v.
    pub(crate) fn all_heads(self) -> usize {
        self.heads[0] + 2 * self.heads[1]
    }

    pub(crate) fn scale(self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    pub(crate) fn shape(self) -> Shape {
        let Self { batch, tokens, heads, width, .. } = self;
        if self.stacked {
            [3, batch, tokens, heads[0] * width].into()
        } else {
            [batch, tokens, self.all_heads() * width].into()
        }
    }

    pub(crate) fn outputs(self) -> usize {
        self.batch * self.tokens * self.heads[0] * self.width
    }

    /// Returns the first element of a head of q (part 0), k or v.
    pub(crate) fn place(self, part: usize, sample: usize, token: usize, head: usize) -> usize {
        let token = sample * self.tokens + token;
        let row = if self.stacked {
            (part * self.batch * self.tokens + token) * self.heads[0] + head
        } else {
            token * self.all_heads() + [0, self.heads[0], self.heads[0] + self.heads[1]][part] + head
        };
        row * self.width
    }

    /// Returns the first element of a head of the output.
    pub(crate) fn output(self, sample: usize, token: usize, head: usize) -> usize {
        ((sample * self.tokens + token) * self.heads[0] + head) * self.width
    }

    /// Returns the place in `lse` of a token and a head.
    pub(crate) fn statistic(self, sample: usize, token: usize, head: usize) -> usize {
        (sample * self.heads[0] + head) * self.tokens + token
    }

    /// Returns the heads of q, with their samples and the heads of k and v to which they attend.
    pub(crate) fn each_head(self) -> impl Iterator<Item = [usize; 3]> {
        let [heads, kv_heads] = self.heads;
        (0..self.batch).flat_map(move |sample| (0..heads).map(move |head| [sample, head, head / (heads / kv_heads)]))
    }
}

impl Inputs {
    pub(crate) fn new(setup: Setup) -> Self {
        let mut random = Random::new((setup.tokens * 1000 + setup.width) as u64);
        let Setup { batch, tokens, masks, .. } = setup;
        let qkv = random.normals(setup.shape().elements());
        // Documents of a few tokens, one after another, with recurring numbers.
        let mut document = 0;
        let mut next = |_| {
            document = if random.below(20) == 0 { random.below(3) } else { document };
            document
        };
        let documents = if masks[0] { (0..batch * tokens).map(&mut next).collect() } else { vec![] };
        // Lengths of zero, one, all, more than all, and between.
        let length = |sample: usize| [tokens - tokens / 3, 0, tokens + 9, 1, tokens][sample % 5] as u32;
        let lengths = if masks[1] { (0..batch).map(length).collect() } else { vec![] };
        let dout = random.normals(setup.outputs());
        Self { setup, qkv, dout, documents, lengths }
    }

    pub(crate) fn length(&self, sample: usize) -> usize {
        self.lengths.get(sample).map_or(self.setup.tokens, |&length| self.setup.tokens.min(length as usize))
    }

    /// True if query `i` attends to key `j`.
    pub(crate) fn sees(&self, sample: usize, i: usize, j: usize) -> bool {
        let in_window = match self.setup.sees {
            AttentionMask::Full => true,
            AttentionMask::Causal => j <= i,
            AttentionMask::SlidingWindow(tokens) => j <= i && i < j + tokens.get() as usize,
        };
        let document = |token: usize| self.documents.get(sample * self.setup.tokens + token);
        i.max(j) < self.length(sample) && in_window && document(i) == document(j)
    }

    /// Returns the config, with its masks uploaded by the function.
    pub(crate) fn form<'s>(
        &self,
        upload: impl Fn(&[u32], Shape) -> Result<Tensor<'s, u32>>,
    ) -> Result<AttentionConfig<'s>> {
        let Setup { batch, tokens, heads, sees, masks, .. } = self.setup;
        let mut form = AttentionConfig::new(heads[0]).kv_heads(heads[1]).sees(sees);
        if masks[0] {
            form = form.documents(upload(&self.documents, [batch, tokens].into())?);
        }
        if masks[1] {
            form = form.lengths(upload(&self.lengths, [batch].into())?);
        }
        Ok(form)
    }

    /// Computes the results in f32, in the documented order.
    pub(crate) fn in_order(&self) -> Results<f32> {
        let setup = self.setup;
        let Setup { width, tokens, .. } = setup;
        let chain = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0.0, |sum: f32, (a, b)| a.mul_add(*b, sum));
        let add = |sums: &mut [f32], factor: f32, row: &[f32]| {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum = factor.mul_add(*x, *sum));
        };
        let mut out = vec![0.0; setup.outputs()];
        let mut lse = vec![f32::NEG_INFINITY; setup.outputs() / width];
        let mut dqkv = vec![0.0; self.qkv.len()];
        for [sample, head, kv_head] in setup.each_head() {
            let row =
                |part, token| &self.qkv[setup.place(part, sample, token, [head, kv_head, kv_head][part])..][..width];
            let dout = |token| &self.dout[setup.output(sample, token, head)..][..width];
            let score = |i, j| chain(row(0, i), row(1, j)) * setup.scale();
            for i in 0..self.length(sample) {
                let (mut largest, mut total, mut sums) = (f32::NEG_INFINITY, 0.0f32, vec![0.0; width]);
                for first in (0..tokens).step_by(TILE) {
                    let keys: Vec<usize> =
                        (first..tokens.min(first + TILE)).filter(|&j| self.sees(sample, i, j)).collect();
                    if keys.is_empty() {
                        continue;
                    }
                    let scores: Vec<f32> = keys.iter().map(|&j| score(i, j)).collect();
                    let before = largest;
                    largest = scores.iter().fold(largest, |largest, &score| largest.max(score));
                    let factor = math::exp(before - largest);
                    sums.iter_mut().for_each(|sum| *sum *= factor);
                    let mut chains = [0.0; 8];
                    for (&j, score) in keys.iter().zip(scores) {
                        let p = math::exp(score - largest);
                        chains[j % 8] += p;
                        add(&mut sums, p, row(2, j));
                    }
                    let [a, b, c, d, e, f, g, h] = chains;
                    total = total.mul_add(factor, ((a + e) + (c + g)) + ((b + f) + (d + h)));
                }
                let inverse = 1.0 / total;
                let place = setup.output(sample, i, head);
                out[place..][..width].iter_mut().zip(sums).for_each(|(out, sum)| *out = sum * inverse);
                lse[setup.statistic(sample, i, head)] = largest + math::log(total);
            }
            let [mut dk, mut dv] = [(); 2].map(|()| vec![vec![0.0; width]; tokens]);
            if head % (setup.heads[0] / setup.heads[1]) > 0 {
                // The chain continues from the head before.
                for j in 0..tokens {
                    dk[j].copy_from_slice(&dqkv[setup.place(1, sample, j, kv_head)..][..width]);
                    dv[j].copy_from_slice(&dqkv[setup.place(2, sample, j, kv_head)..][..width]);
                }
            }
            for i in 0..self.length(sample) {
                let out = &out[setup.output(sample, i, head)..][..width];
                let delta = trees::row(width, |sum, column| out[column].mul_add(dout(i)[column], sum));
                let mut dq = vec![0.0; width];
                for j in (0..tokens).filter(|&j| self.sees(sample, i, j)) {
                    let p = math::exp(score(i, j) - lse[setup.statistic(sample, i, head)]);
                    let ds = p * (chain(dout(i), row(2, j)) - delta);
                    add(&mut dq, ds, row(1, j));
                    add(&mut dk[j], ds, row(0, i));
                    add(&mut dv[j], p, dout(i));
                }
                let place = setup.place(0, sample, i, head);
                dqkv[place..][..width].iter_mut().zip(dq).for_each(|(to, dq)| *to = dq * setup.scale());
            }
            for (part, rows) in [(1, dk), (2, dv)] {
                for (j, row) in rows.into_iter().enumerate() {
                    dqkv[setup.place(part, sample, j, kv_head)..][..width].copy_from_slice(&row);
                }
            }
        }
        // dk is multiplied by the scale at the end of its chain.
        for sample in 0..setup.batch {
            for (token, head) in (0..tokens).flat_map(|token| (0..setup.heads[1]).map(move |head| (token, head))) {
                let place = setup.place(1, sample, token, head);
                dqkv[place..][..width].iter_mut().for_each(|dk| *dk *= setup.scale());
            }
        }
        [out, lse, dqkv]
    }

    pub(crate) fn in_float64(&self) -> Results<f64> {
        let exact = |values: &[f32]| values.iter().map(|&value| f64::from(value)).collect::<Vec<f64>>();
        self.float64(&exact(&self.qkv), &exact(&self.dout))
    }

    /// Computes the results in float64, from these values.
    pub(crate) fn float64(&self, qkv: &[f64], dout: &[f64]) -> Results<f64> {
        let setup = self.setup;
        let Setup { width, tokens, .. } = setup;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let add = |sums: &mut [f64], factor: f64, row: &[f64]| {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += factor * x);
        };
        let mut out = vec![0.0; setup.outputs()];
        let mut lse = vec![f64::NEG_INFINITY; setup.outputs() / width];
        let mut dqkv = vec![0.0; qkv.len()];
        let scale = f64::from(setup.scale());
        for [sample, head, kv_head] in setup.each_head() {
            let place = |part, token| setup.place(part, sample, token, [head, kv_head, kv_head][part]);
            let row = |part, token| &qkv[place(part, token)..][..width];
            for i in 0..self.length(sample) {
                let keys: Vec<usize> = (0..tokens).filter(|&j| self.sees(sample, i, j)).collect();
                let scores: Vec<f64> = keys.iter().map(|&j| scale * dot(row(0, i), row(1, j))).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
                let at = setup.output(sample, i, head);
                lse[setup.statistic(sample, i, head)] = largest + total.ln();
                let p: Vec<f64> = scores.iter().map(|score| (score - largest).exp() / total).collect();
                for (&j, p) in keys.iter().zip(&p) {
                    add(&mut out[at..], *p, row(2, j));
                }
                let dout = &dout[at..][..width];
                let delta = dot(&out[at..][..width], dout);
                for (&j, p) in keys.iter().zip(&p) {
                    let ds = p * (dot(dout, row(2, j)) - delta) * scale;
                    add(&mut dqkv[place(0, i)..], ds, row(1, j));
                    add(&mut dqkv[place(1, j)..], ds, row(0, i));
                    add(&mut dqkv[place(2, j)..], *p, dout);
                }
            }
        }
        [out, lse, dqkv]
    }
}

/// Computes causal attention in float64.
pub(crate) fn causal_in_float64(
    qkv: &[f64],
    heads: [usize; 2],
    width: usize,
    [batch, tokens]: [usize; 2],
    stacked: bool,
) -> Vec<f64> {
    let setup = Setup { batch, tokens, heads, width, stacked, sees: AttentionMask::Causal, masks: [false; 2] };
    let [out, ..] = Inputs::new(setup).float64(qkv, &vec![0.0; setup.outputs()]);
    out
}
