//! The forward passes in float64, each from its definition.

/// `x w + b`; `x`: `[rows, k]`, `w`: `[k, n]`, `b`: `[n]` or nothing.
pub(super) fn linear(x: &[f64], w: &[f64], b: &[f64], k: usize, n: usize) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.len() / k * n);
    for row in x.chunks_exact(k) {
        let mut sums = if b.is_empty() { vec![0.0; n] } else { b.to_vec() };
        for (x, w) in row.iter().zip(w.chunks_exact(n)) {
            sums.iter_mut().zip(w).for_each(|(sum, w)| *sum += x * w);
        }
        y.extend(sums);
    }
    y
}

pub(super) fn gelu(x: &[f64]) -> Vec<f64> {
    let inner = |x: f64| (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    x.iter().map(|&x| 0.5 * x * (1.0 + inner(x).tanh())).collect()
}

pub(super) fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// By rows of `gain`'s length.
pub(super) fn rms_norm(x: &[f64], gain: &[f64], epsilon: f64) -> Vec<f64> {
    let row = |x: &[f64]| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(gain).map(|(x, gain)| x * gain / (mean + epsilon).sqrt()).collect::<Vec<f64>>()
    };
    x.chunks_exact(gain.len()).flat_map(row).collect()
}

pub(super) fn softmax(x: &[f64]) -> Vec<f64> {
    let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<f64> = x.iter().map(|x| (x - largest).exp()).collect();
    let sum: f64 = exps.iter().sum();
    exps.iter().map(|exp| exp / sum).collect()
}

/// `q`, `k`, `v`: `[batch, tokens, heads 64]`.
pub(super) fn attention(q: &[f64], k: &[f64], v: &[f64], tokens: usize, heads: usize, scale: f64) -> Vec<f64> {
    const HEAD: usize = 64;
    let width = heads * HEAD;
    let mut out = vec![0.0; q.len()];
    for sample in 0..q.len() / (tokens * width) {
        for head in 0..heads {
            let at = |token: usize| (sample * tokens + token) * width + head * HEAD;
            for query in 0..tokens {
                let dot = |key: usize| -> f64 { (0..HEAD).map(|i| q[at(query) + i] * k[at(key) + i]).sum() };
                let scores: Vec<f64> = (0..tokens).map(|key| scale * dot(key)).collect();
                for (key, probability) in softmax(&scores).into_iter().enumerate() {
                    (0..HEAD).for_each(|i| out[at(query) + i] += probability * v[at(key) + i]);
                }
            }
        }
    }
    out
}

/// `x`: `[batch, tokens, cols]`.
pub(super) fn mean_tokens(x: &[f64], tokens: usize, cols: usize) -> Vec<f64> {
    let sample = |x: &[f64]| {
        (0..cols).map(|c| (0..tokens).map(|t| x[t * cols + c]).sum::<f64>() / tokens as f64).collect::<Vec<f64>>()
    };
    x.chunks_exact(tokens * cols).flat_map(sample).collect()
}

/// `weight` times the sum of `-log softmax(logits)[label]`.
pub(super) fn cross_entropy(logits: &[f64], labels: &[u32], classes: usize, weight: f64) -> Vec<f64> {
    let rows = logits.chunks_exact(classes).zip(labels);
    vec![weight * rows.map(|(row, &label)| -softmax(row)[label as usize].ln()).sum::<f64>()]
}

/// Each `[rows, cols]` of `x` as `[cols, rows]`.
pub(super) fn transpose(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    let matrix = |x: &[f64]| (0..rows * cols).map(|at| x[at % rows * cols + at / rows]).collect::<Vec<f64>>();
    x.chunks_exact(rows * cols).flat_map(matrix).collect()
}
