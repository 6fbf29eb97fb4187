//! A multiply with random operands, and its results: the documented chain in f32, bit for bit, and
//! the sums in float64.

use crate::support::Random;
use crate::tolerance::Exact;
use kernels::math;
use kernels::matmul::*;
use stepscope::ops::Gemm;

/// The variations of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Variant {
    /// The padding between rows, in elements, of A, B and the output.
    pub(crate) pads: [usize; 3],
    pub(crate) batches: usize,
    /// Alpha and beta.
    pub(crate) scales: [f32; 2],
    pub(crate) bias: bool,
    pub(crate) flags: u32,
}

pub(crate) const VARIANTS: [Variant; 9] = [
    Variant { pads: [0, 0, 0], batches: 1, scales: [1.0, 0.0], bias: false, flags: 0 },
    Variant { pads: [0, 0, 0], batches: 3, scales: [1.0, 1.0], bias: true, flags: 0 },
    Variant { pads: [3, 1, 2], batches: 1, scales: [0.3, 0.5], bias: true, flags: GELU },
    Variant { pads: [4, 8, 4], batches: 2, scales: [1.0, 0.0], bias: true, flags: GELU | STORE_PREACT },
    Variant { pads: [1, 0, 5], batches: 2, scales: [1.0, 1.0], bias: false, flags: STORE_PREACT },
    Variant { pads: [0, 2, 0], batches: 1, scales: [1.0, -0.5], bias: false, flags: GELU | STORE_PREACT },
    Variant { pads: [1, 0, 1], batches: 1, scales: [0.3, 0.5], bias: true, flags: SILU },
    Variant { pads: [0, 0, 4], batches: 2, scales: [0.3, 0.0], bias: true, flags: SWIGLU | STORE_PREACT },
    Variant { pads: [0, 0, 1], batches: 0, scales: [1.0, 0.0], bias: true, flags: 0 },
];

/// A multiply with its operands, each just long enough.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) form: Gemm,
    pub(crate) flags: u32,
    pub(crate) a: Vec<f32>,
    pub(crate) b: Vec<f32>,
    pub(crate) bias: Vec<f32>,
    pub(crate) old: Vec<f32>,
}

/// Returns the elements that `batches` matrices span.
fn span(batches: usize, stride: usize, rows: usize, cols: usize, ld: usize) -> usize {
    if batches == 0 || rows == 0 || cols == 0 { 0 } else { (batches - 1) * stride + (rows - 1) * ld + cols }
}

impl Case {
    pub(crate) fn new([m, n, k]: [usize; 3], transpose: u32, variant: Variant) -> Self {
        let Variant { pads, batches, scales: [alpha, beta], bias, flags } = variant;
        let mut form = Gemm { batches, alpha, beta, ..Gemm::new(m, n, k) };
        form = if transpose & TRANSPOSE_A != 0 { form.transpose_a() } else { form };
        form = if transpose & TRANSPOSE_B != 0 { form.transpose_b() } else { form };
        (form.lda, form.ldb, form.ldc) = (form.lda + pads[0], form.ldb + pads[1], form.ldc + pads[2]);
        let (a_rows, a_cols) = if form.transpose_a { (k, m) } else { (m, k) };
        let (b_rows, b_cols) = if form.transpose_b { (n, k) } else { (k, n) };
        // A's batches overlap by a row less one element. All batches share B if its rows are
        // padded.
        form.stride_a = (a_rows * form.lda).saturating_sub(1);
        form.stride_b = if pads[1] == 0 { b_rows * form.ldb } else { 0 };
        (form.stride_c, form.stride_bias) = (m * form.ldc + pads[2], n);
        let mut random = Random::new((m * 1_000_003 + n * 1009 + k) as u64);
        Self {
            a: random.uniforms(span(batches, form.stride_a, a_rows, a_cols, form.lda), -0.5, 1.0),
            b: random.uniforms(span(batches, form.stride_b, b_rows, b_cols, form.ldb), -0.5, 1.0),
            bias: random.normals(if bias { span(batches, n, 1, n, n) } else { 0 }),
            old: random.normals(span(batches, form.stride_c, m, n, form.ldc)),
            form,
            flags: flags | transpose,
        }
    }

    /// Returns batches next to each other in one row, like the heads of attention. They share B.
    pub(crate) fn interleaved([m, n, k]: [usize; 3], batches: usize) -> Self {
        let plain = Gemm { batches, beta: 0.5, ..Gemm::new(m, n, k) };
        let form = Gemm { stride_a: k, stride_b: 0, stride_c: n, lda: batches * k, ldc: batches * n, ..plain };
        let mut random = Random::new(4);
        let [a, b, old] = [m * form.lda, k * n, m * form.ldc].map(|length| random.normals(length));
        Self { a, b, bias: vec![], old, form, flags: 0 }
    }

    /// Returns the outputs' places, batches, rows and columns.
    pub(crate) fn places(&self) -> impl Iterator<Item = (usize, [usize; 3])> {
        let Gemm { m, n, batches, stride_c, ldc, .. } = self.form;
        (0..batches * m * n).map(move |at| {
            let [z, i, j] = [at / (m * n), at / n % m, at % n];
            (z * stride_c + i * ldc + j, [z, i, j])
        })
    }

    /// Returns the factors of an output, in ascending k.
    pub(crate) fn factors(&self, [z, i, j]: [usize; 3]) -> impl Iterator<Item = (f32, f32)> {
        let Gemm { k, lda, ldb, stride_a, stride_b, transpose_a, transpose_b, .. } = self.form;
        let at = |transposed: bool, outer: usize, inner: usize, ld: usize| {
            if transposed { inner * ld + outer } else { outer * ld + inner }
        };
        (0..k).map(move |p| {
            (self.a[z * stride_a + at(transpose_a, i, p, lda)], self.b[z * stride_b + at(transpose_b, p, j, ldb)])
        })
    }

    fn bias(&self, [z, _, j]: [usize; 3]) -> Option<f32> {
        (!self.bias.is_empty()).then(|| self.bias[z * self.form.stride_bias + j])
    }

    /// Sums over k in one chain, or split by split, and each split chain by chain.
    fn in_parts<P, S>(&self, products: Vec<P>, chain: impl Fn(&[P]) -> S, add: impl Fn(Vec<S>) -> S) -> S {
        let Gemm { m, n, k, .. } = self.form;
        let k_per_split = k_per_split(m, n, k);
        if k_per_split >= k {
            return chain(&products);
        }
        add(products.chunks(k_per_split).map(|split| add(split.chunks(CHAIN as usize).map(&chain).collect())).collect())
    }

    /// Returns the expected `out` and `pre`, which both held `old`.
    pub(crate) fn chain(&self) -> [Vec<f32>; 2] {
        let [mut out, mut pre] = [self.old.clone(), self.old.clone()];
        for (place, at) in self.places() {
            let fused = |part: &[(f32, f32)]| part.iter().fold(0.0, |sum: f32, (a, b)| a.mul_add(*b, sum));
            let add = |parts: Vec<f32>| parts.into_iter().reduce(|sum, next| sum + next).expect("a part");
            let mut sum = self.in_parts(self.factors(at).collect(), fused, add);
            sum *= self.form.alpha;
            sum = self.bias(at).map_or(sum, |bias| sum + bias);
            if self.form.beta != 0.0 {
                sum = self.form.beta.mul_add(self.old[place], sum);
            }
            if self.flags & STORE_PREACT != 0 {
                pre[place] = sum;
            }
            out[place] = match self.flags & (GELU | SILU | SWIGLU) {
                GELU => math::gelu(sum),
                SILU => math::silu(sum),
                SWIGLU => math::silu(self.old[place]) * sum,
                _ => sum,
            };
        }
        [out, pre]
    }

    /// Returns the sums in float64, without an activation, in the order of [`Case::places`].
    pub(crate) fn exact(&self) -> Vec<Exact> {
        let exact = |(place, at): (usize, [usize; 3])| {
            let products = self.factors(at).map(|(a, b)| Exact::given(a).times(Exact::given(b)));
            let add = |parts: Vec<Exact>| if parts.len() == 1 { parts[0] } else { Exact::sum(parts.len(), parts) };
            let mut sum = self.in_parts(products.collect(), |part| Exact::sum(part.len(), part.iter().copied()), add);
            sum = sum.times(Exact::given(self.form.alpha));
            sum = self.bias(at).map_or(sum, |bias| sum + Exact::given(bias));
            if self.form.beta == 0.0 {
                return sum;
            }
            sum + Exact::given(self.form.beta).times(Exact::given(self.old[place]))
        };
        self.places().map(exact).collect()
    }
}
