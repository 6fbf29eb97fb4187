//! The cases: shapes of CrossAsset's training at batch 1, 256 and 4096, of GPT-2's with 16,384
//! tokens, of Llama 8B's with 4,096, and large matrices.

use serde::{Deserialize, Serialize};
use std::fmt;
use stepscope::data::SplitMix64;
use stepscope::ops::Gemm;

/// The sizes of CrossAsset: tokens, features per token, width of the model, and width of its hidden
/// layer.
const SCALES: usize = 12;
const FEATURES: usize = 193;
const WIDTH: usize = 256;
const HIDDEN: usize = 1024;
/// The tokens of a GPT-2 step, and the width of the model.
const TOKENS: usize = 16_384;
const GPT: usize = 768;
/// The tokens of a step of Llama 8B, and the inputs and outputs of its layers: queries with keys
/// and values, gate with up, and down.
const LLAMA_TOKENS: usize = 4096;
const LLAMA: [[usize; 2]; 3] = [[4096, 6144], [4096, 28_672], [14_336, 4096]];

/// The layout of A and B; `T` means transposed. With more than one batch, activations (A of `NN`,
/// both of `TN`) store their batches side by side in each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::upper_case_acronyms, reason = "BLAS calls them so")]
pub(crate) enum OperandLayout {
    NN,
    NT,
    TN,
    TT,
}

/// A multiply `[m, k] [k, n]`, repeated for `batches` matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) batches: usize,
    pub(crate) form: OperandLayout,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { m, n, k, batches, form } = self;
        let times = if *batches > 1 { format!("{batches} x ") } else { String::new() };
        write!(f, "{times}{m}x{n}, k {k}, {form:?}")
    }
}

impl Case {
    fn new(form: OperandLayout, [m, n, k]: [usize; 3]) -> Self {
        Self { m, n, k, batches: 1, form }
    }

    /// Returns every case, or a few small ones for the emulator.
    pub(crate) fn all(emulated: bool) -> Vec<Self> {
        if emulated {
            return [OperandLayout::NN, OperandLayout::NT, OperandLayout::TN, OperandLayout::TT]
                .map(|form| Self::new(form, [384, 256, 256]))
                .to_vec();
        }
        let large = [1024, 2048, 4096, 8192].map(|n| [n; 3]);
        let forms = |form| large.map(|extents| Self::new(form, extents));
        [
            Self::training(1),
            Self::training(256),
            Self::training(4096),
            Self::layers(TOKENS, [[GPT, GPT], [GPT, 3 * GPT], [GPT, 4 * GPT], [4 * GPT, GPT]]),
            Self::layers(LLAMA_TOKENS, LLAMA),
            [OperandLayout::NN, OperandLayout::NT, OperandLayout::TN, OperandLayout::TT].map(forms).concat(),
            vec![Self::new(OperandLayout::NN, [2049, 1023, 511])],
        ]
        .concat()
    }

    /// Returns 64 random products that nothing was tuned for: three for each of 14 layers, 12 with
    /// rows not aligned to 16 bytes, and 10 with few outputs and a long k.
    pub(crate) fn family(seed: u64) -> Vec<Self> {
        let mut random = SplitMix64::new(seed);
        // Draws log-uniformly, rounded to a multiple of `unit`.
        let mut between = |least: f32, most: f32, unit: usize| {
            let extent = least * (most / least).powf(random.unit());
            (extent / unit as f32).round() as usize * unit
        };
        let mut cases = Vec::new();
        for _ in 0..14 {
            let [rows, inner, outer] =
                [between(256.0, 32_768.0, 64), between(128.0, 4096.0, 64), between(128.0, 4096.0, 64)];
            cases.extend(Self::layers(rows, [[inner, outer]]));
        }
        for form in [OperandLayout::NN, OperandLayout::NT, OperandLayout::TN, OperandLayout::TT].repeat(3) {
            cases.push(Self::new(form, [(); 3].map(|()| between(200.0, 4000.0, 2) + 1)));
        }
        for _ in 0..10 {
            cases.push(Self::new(
                OperandLayout::TN,
                [between(16.0, 256.0, 1), between(16.0, 256.0, 1), between(4096.0, 65_536.0, 1)],
            ));
        }
        cases
    }

    /// Returns the forward product and both gradient products of each kind of layer.
    fn training(batch: usize) -> Vec<Self> {
        let mut cases = Self::layers(batch * SCALES, [[WIDTH, WIDTH], [WIDTH, HIDDEN], [HIDDEN, WIDTH]]);
        cases.push(Self { batches: SCALES, ..Self::new(OperandLayout::NN, [batch, WIDTH, FEATURES]) });
        cases.push(Self { batches: SCALES, ..Self::new(OperandLayout::TN, [FEATURES, WIDTH, batch]) });
        cases
    }

    /// Returns the three products of each layer, given its inputs and outputs.
    fn layers<const N: usize>(rows: usize, layers: [[usize; 2]; N]) -> Vec<Self> {
        let products = |[inner, outer]: [usize; 2]| {
            [
                Self::new(OperandLayout::NN, [rows, outer, inner]),
                Self::new(OperandLayout::NT, [rows, inner, outer]),
                Self::new(OperandLayout::TN, [inner, outer, rows]),
            ]
        };
        layers.map(products).concat()
    }

    /// Returns the elements of A, B and the output.
    pub(crate) fn elements(self) -> [usize; 3] {
        let Self { m, n, k, batches, .. } = self;
        [m * k, k * n, m * n].map(|matrix| matrix * batches)
    }

    /// Returns the floating-point operations.
    pub(crate) fn operations(self) -> f64 {
        2.0 * (self.batches * self.m * self.n) as f64 * self.k as f64
    }

    pub(crate) fn gemm(self) -> Gemm {
        let Self { m, n, k, batches, form } = self;
        let mut gemm = Gemm { batches, ..Gemm::new(m, n, k) };
        gemm = if matches!(form, OperandLayout::TN | OperandLayout::TT) { gemm.transpose_a() } else { gemm };
        gemm = if matches!(form, OperandLayout::NT | OperandLayout::TT) { gemm.transpose_b() } else { gemm };
        let side_by_side = batches > 1;
        (gemm.stride_a, gemm.stride_b, gemm.stride_c) = (m * k, k * n, m * n);
        if side_by_side {
            (gemm.stride_a, gemm.lda) = (gemm.lda, gemm.lda * batches);
        }
        match form {
            // The gradient of weights, from two activations to packed weights.
            OperandLayout::TN if side_by_side => (gemm.stride_b, gemm.ldb) = (gemm.ldb, gemm.ldb * batches),
            _ if side_by_side => (gemm.stride_c, gemm.ldc) = (gemm.ldc, gemm.ldc * batches),
            _ => {}
        }
        gemm
    }
}
