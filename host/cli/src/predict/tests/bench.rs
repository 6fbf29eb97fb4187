//! The launches of the benches: products, attention, and memory-bound kernels.

use kernels::adamw::slot;
use stepscope::ops::{self, AttentionConfig, AttentionElement, GemmElement, Generator, Precision, QkNorm};
use stepscope::tensor::{Indices, Saved, Stored};
use stepscope::{EagerStep, Result, Step, Tensor, bf16};
use stepscope_core::internals::Launch;

use super::matmul_case::Case as Product;
use stepscope_predict::{Gpu, dry_run};

/// Columns of each row.
const COLUMNS: usize = 1024;

/// Returns the launches of a product.
pub(crate) fn product<S: GemmElement<S>>(gpu: &Gpu, case: Product, precision: Precision) -> Result<Vec<Launch>> {
    dry_run(gpu, |step| {
        let [a, b, out] = case.elements();
        let (a, b, mut out) = (step.empty::<S>([a])?.save(), step.empty::<S>([b])?.save(), step.empty::<S>([out])?);
        let gemm = case.gemm().precision(precision);
        ops::gemm_into(step, &gemm, &a, &b, None::<&Tensor<'_>>, &mut out)
    })
}

/// Returns the launches of attention over `[batch, tokens, heads, key heads, width]`: forward, or
/// with its backward pass.
pub(crate) fn attention<S: AttentionElement>(
    gpu: &Gpu,
    [batch, tokens, heads, kv_heads, width]: [usize; 5],
    causal: bool,
    backward: bool,
) -> Result<Vec<Launch>> {
    dry_run(gpu, |step| {
        let form = AttentionConfig::new(heads).kv_heads(kv_heads);
        let form = if causal { form.causal() } else { form };
        let qkv = step.empty::<S>([batch, tokens, (heads + 2 * kv_heads) * width])?.save();
        let dout = step.empty::<S>([batch, tokens, heads * width])?.save();
        let made = ops::attention(step, &qkv, None, &form)?;
        if backward {
            let none = None::<(QkNorm<'_, '_>, &mut Tensor<'_>, bool)>;
            ops::launch::attention_backward(step, &qkv, none, &form, &made, &dout)?;
        }
        Ok(())
    })
}

/// Returns the launches of an op on sets of tensors as in `benches/kernels`, one call per set, and
/// the number of calls. None if the bench's name for the op is unknown here.
///
/// # Errors
/// Returns an error if an op fails.
pub(crate) fn kernel(gpu: &Gpu, name: &str, elements: usize) -> Result<Option<(Vec<Launch>, usize)>> {
    let sets = ((1 << 26) / elements).clamp(1, 64);
    let mut known = true;
    let launches = dry_run(gpu, |step| {
        let sets: Vec<Set<'_>> = (0..sets).map(|_| Set::new(step, elements)).collect::<Result<_>>()?;
        for set in &sets {
            known = match name.strip_suffix("_bf16") {
                Some(plain) => call(step, plain, set, [&set.x_bf16, &set.dy_bf16])?,
                None => call(step, name, set, [&set.x, &set.dy])?,
            };
        }
        Ok(())
    })?;
    Ok(known.then_some((launches, sets)))
}

/// The tensors of a call: `[n / 1024, 1024]`, and vectors for their rows and columns.
struct Set<'s> {
    x: Saved<'s>,
    dy: Saved<'s>,
    x_bf16: Saved<'s, bf16>,
    dy_bf16: Saved<'s, bf16>,
    rows: Saved<'s>,
    columns: Saved<'s>,
    labels: Indices<'s>,
    generator: Generator,
}

impl<'s> Set<'s> {
    fn new(step: &EagerStep<'s>, elements: usize) -> Result<Self> {
        let (rows, shape) = (elements / COLUMNS, [elements / COLUMNS, COLUMNS]);
        Ok(Self {
            x: step.empty(shape)?.save(),
            dy: step.empty(shape)?.save(),
            x_bf16: step.empty(shape)?.save(),
            dy_bf16: step.empty(shape)?.save(),
            rows: step.empty([rows])?.save(),
            columns: step.empty([COLUMNS])?.save(),
            labels: Indices::on_device(step.empty([rows])?.save()),
            generator: Generator::new(step.device(), 7)?,
        })
    }
}

/// Makes one call. Returns true if its name is known.
fn call<'s, S: Stored>(step: &Step<'s>, name: &str, set: &Set<'s>, [x, dy]: [&Saved<'s, S>; 2]) -> Result<bool> {
    let (rows, columns) = (&set.rows, &set.columns);
    let mut gains = [step.empty([COLUMNS])?, step.empty([COLUMNS])?];
    let [dgain, dbias] = &mut gains;
    let made = match name {
        "fill" => ops::fill(step, set.x.shape(), 1.0).map(drop),
        "copy" => ops::copy(step, x).map(drop),
        "tanh" => ops::tanh(step, x).map(drop),
        "tanh_backward" => ops::launch::tanh_backward(step, x, dy).map(drop),
        "gelu" => ops::gelu(step, x).map(drop),
        "gelu_backward" => ops::launch::gelu_backward(step, x, dy).map(drop),
        "silu" => ops::silu(step, x).map(drop),
        "silu_backward" => ops::launch::silu_backward(step, x, dy).map(drop),
        "swiglu" => ops::swiglu(step, x, dy).map(drop),
        "swiglu_backward" => ops::launch::swiglu_backward(step, x, dy, dy).map(drop),
        "softmax" => ops::softmax(step, x).map(drop),
        "rms_norm" => ops::rms_norm(step, x, columns, 1e-6).map(drop),
        "rms_norm_backward" => ops::launch::rms_norm_backward(step, x, columns, rows, dy, None, dgain, true).map(drop),
        "layer_norm" => ops::layer_norm(step, x, columns, columns, 1e-6).map(drop),
        "layer_norm_backward" => {
            let rows = [rows, rows];
            ops::launch::layer_norm_backward(step, x, columns, rows, dy, None, [dgain, dbias], [true; 2]).map(drop)
        }
        "cross_entropy_and_gradient" => ops::cross_entropy(step, x, &set.labels).map(drop),
        "sum" => ops::sum(step, x).map(drop),
        "sum_columns" => ops::sum_columns(step, x).map(drop),
        "sum_rows" => ops::sum_rows(step, x).map(drop),
        "squared_norm" => ops::squared_norm(step, x).map(drop),
        "dropout" => {
            let draws = set.generator.draws(step)?;
            ops::dropout(step, x, 0.1, &draws.next()).map(drop)
        }
        "embedding" => ops::embedding::<S>(step, &set.x, &set.labels).map(drop),
        "embedding_backward" => {
            ops::launch::embedding_backward(step, dy, &set.labels, &mut step.empty(set.x.shape())?, false)
        }
        "adamw" => {
            let shape = set.x.shape();
            let (mut weights, mut first, mut second) = (step.empty(shape)?, step.empty(shape)?, step.empty(shape)?);
            let (hyper, one) = (step.empty([slot::LEN])?, step.empty([1])?);
            let (copy, groups) = (None::<&mut Tensor<'_, bf16>>, None::<&Tensor<'_, u32>>);
            ops::adamw(step, &mut weights, copy, &set.dy, &mut first, &mut second, &hyper, groups, &one)
        }
        _ => return Ok(false),
    };
    made?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::super::matmul_case::OperandLayout::{NN, NT};
    use super::*;
    use stepscope_predict::{Forecast, Kernels};

    /// Microseconds of products by `wgmma`, on an H100 at its power limit next to cuBLAS: tiles of
    /// 128 x 256, copied by `cp.async`. They were measured before the library had such kernels.
    const MEASURED: [(Product, f64); 4] = [
        (Product { m: 8192, n: 8192, k: 8192, batches: 1, form: NT }, 1605.0),
        (Product { m: 4096, n: 4096, k: 4096, batches: 1, form: NT }, 205.4),
        (Product { m: 16_384, n: 3072, k: 768, batches: 1, form: NT }, 136.1),
        (Product { m: 16_384, n: 768, k: 3072, batches: 1, form: NN }, 124.1),
    ];

    #[test]
    fn wgmma_products_are_predicted() {
        let kernels = Kernels::of(Gpu::H200.arch);
        for (case, measured) in MEASURED {
            let launches = product::<bf16>(&Gpu::H200, case, Precision::F32).unwrap();
            assert!(launches.iter().any(|launch| launch.entry.is_warpgroup), "{case}");
            let predicted = Forecast::of(&Gpu::H200, &kernels, &launches).microseconds;
            assert!((predicted / measured - 1.0).abs() < 0.2, "{case}: {predicted:.1}, measured {measured}");
            let launches = product::<bf16>(&Gpu::GB10, case, Precision::F32).unwrap();
            assert!(!launches.iter().any(|launch| launch.entry.is_warpgroup), "{case}");
        }
    }
}
