//! CrossAsset's own layers, written with the public API as any package can write them: a linear
//! layer for each token, and attention over a few tokens with heads of 64 columns.
//!
//! Both keep several weights of one shape as [`StackedParameters`] and compute with all of them in
//! one strided-batched multiply.

use stepscope::nn::{Linear, RmsNorm, Scope};
use stepscope::ops::launch::{BiasGradient, Gradient};
use stepscope::ops::{self, Activation, AttentionConfig, Gemm};
use stepscope::parameters::{Initializer, ParameterSpecBuilder, StackedParameters};
use stepscope::tensor::Saved;
use stepscope::{Error, Result, Tape, Tensor, Var};

/// The columns of a head.
const HEAD: usize = 64;

/// A separate linear layer for each token; `x`: `[batch, tokens, in]`, an input of the tape; `y`:
/// `[batch, tokens, out]`. See [`linear_per_token`].
pub(crate) struct TokenLinear {
    weights: StackedParameters,
    biases: StackedParameters,
}

impl TokenLinear {
    /// Adds parameters under `name` followed by the token's number. First come all `weight`s,
    /// initialized with [`Initializer::fan_in`], then all `bias`es, initialized to zero.
    pub(crate) fn new(
        names: &mut ParameterSpecBuilder,
        name: &str,
        tokens: usize,
        inputs: usize,
        outputs: usize,
    ) -> Self {
        let weight = |token| format!("{name}{token}.weight");
        let bias = |token| format!("{name}{token}.bias");
        Self {
            weights: names.add_stack(tokens, weight, [inputs, outputs], Initializer::fan_in(inputs)),
            biases: names.add_stack(tokens, bias, [outputs], Initializer::ZERO),
        }
    }

    /// Computes y.
    pub(crate) fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        linear_per_token(tape, x, &self.weights, &self.biases)
    }
}

/// `h + softmax(Q K^T / 8) V Wo`, where `z = norm(h)`, `Q` and `K` are RMSNorm of each head of
/// `z Wq` and `z Wk`, and `V = z Wv`; `h`: `[batch, tokens, width]`, `width` a multiple of 64.
pub(crate) struct Attention {
    /// The norm of h.
    pub(crate) norm: RmsNorm,
    /// Wq, Wk, Wv: `[width, width]`.
    pub(crate) projections: StackedParameters,
    /// The gains of the queries' and the keys' norms: `[64]`.
    pub(crate) qk_norm: StackedParameters,
    /// Wo: `[width, width]`, without a bias.
    pub(crate) output: Linear,
}

impl Attention {
    /// Adds `wq.weight`, `wk.weight` and `wv.weight`, initialized with [`Initializer::fan_in`].
    pub(crate) fn projections(names: &mut Scope<'_>, width: usize) -> StackedParameters {
        let name = |part: usize| ["wq.weight", "wk.weight", "wv.weight"][part].to_owned();
        names.add_stack(3, name, [width, width], Initializer::fan_in(width))
    }

    /// Adds `q_norm.gain` and `k_norm.gain`, initialized to one.
    pub(crate) fn qk_norm(names: &mut Scope<'_>) -> StackedParameters {
        names.add_stack(2, |part: usize| ["q_norm.gain", "k_norm.gain"][part].to_owned(), [HEAD], Initializer::ONE)
    }

    /// Computes the sum of h and its attention.
    pub(crate) fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, h: &Var<'s, S>) -> Result<Var<'s, S>> {
        let qkv = norm_project(tape, h, self.norm, &self.projections)?;
        let heads = AttentionConfig::new(h.shape().as_rows()[1] / HEAD);
        let mixed = tape.attention(&qkv, Some((&self.qk_norm, self.norm.epsilon)), &heads)?;
        self.output.forward_residual(tape, &mixed, h)
    }
}

/// `y[., s, .] = x[., s, .] w_s + b_s`, a separate layer for each token; `x`:
/// `[batch, tokens, in]`, `w_s`: `[in, out]`, `b_s`: `[out]`, `y`: `[batch, tokens, out]`. `x` must
/// be an input of the tape.
///
/// # Errors
/// [`Error::Misuse`] when extents differ, or `x` wants a gradient.
pub(crate) fn linear_per_token<'s, S: Activation>(
    tape: &Tape<'_, 's>,
    x: &Var<'s, S>,
    w: &StackedParameters,
    b: &StackedParameters,
) -> Result<Var<'s, S>> {
    const OP: &str = "linear_per_token";
    let op = tape.op(OP, [x])?;
    let ((w_shape, w_stride), (b_shape, b_stride)) = (op.stack(w)?, op.stack(b)?);
    let (&[batch, tokens, inner], &[k, n]) = (x.shape().extents(), w_shape.extents()) else {
        let got = format!("{} and {w_shape}", x.shape());
        return Err(Error::misuse(OP, "x [batch, tokens, in] and w [in, out]", got));
    };
    if inner != k || tokens != w.members().len() || tokens != b.members().len() || b_shape.extents() != [n] {
        let expected = format!("x [batch, {}, {k}] and as many biases [{n}]", w.members().len());
        return Err(Error::misuse(OP, expected, format!("{} and {} of {b_shape}", x.shape(), b.members().len())));
    }
    if tokens > 1 && b_stride != n {
        let expected = "biases without padding between them (a multiple of 64 outputs)";
        return Err(Error::misuse(OP, expected, format!("{n} outputs")));
    }
    if x.wants_gradient() {
        return Err(Error::misuse(OP, "an input, which needs no gradient", "an op's output"));
    }
    let form = Gemm {
        lda: tokens * k,
        ldc: tokens * n,
        batches: tokens,
        stride_a: k,
        stride_b: w_stride,
        stride_c: n,
        stride_bias: b_stride,
        ..Gemm::new(batch, n, k)
    };
    let (weights, biases) = (op.stack_weights_as::<S>(w)?, op.stack_weights(b)?);
    let mut y = tape.step().empty([batch, tokens, n])?;
    ops::gemm_into(tape.step(), &form, x.value(), &weights, Some(&biases), &mut y)?;
    let (x, w, b) = (*x.value(), w.clone(), b.clone());
    Ok(op.record(y.save(), move |back, dy| {
        // dw_s += x_s^T dy_s
        let form = Gemm {
            lda: tokens * k,
            ldb: tokens * n,
            batches: tokens,
            stride_a: k,
            stride_b: n,
            stride_c: w_stride,
            ..Gemm::new(k, n, batch).transpose_a()
        };
        let step = back.step();
        let (mut dw, accumulate) = back.stack_gradient_uninit(&w)?;
        let form = if accumulate { form.accumulate() } else { form };
        ops::gemm_into(step, &form, &x, &dy, None::<&Saved<'s>>, &mut dw)?;
        let dy = dy.reshape([batch, tokens * n])?;
        let (mut db, accumulate) = back.stack_gradient_uninit(&b)?;
        ops::launch::sum_rows_into(step, &dy, &mut db, accumulate)?;
        step.free(dy);
        Ok(())
    }))
}

/// `y[i] = rms_norm(x) w_i`, one norm and one multiply for a whole stack; `x`:
/// `[batch, tokens, in]`, `w_i`: `[in, out]`, `y`: `[members, batch, tokens, out]`.
///
/// # Errors
/// [`Error::Misuse`] when extents differ.
pub(crate) fn norm_project<'s, S: Activation>(
    tape: &Tape<'_, 's>,
    x: &Var<'s, S>,
    RmsNorm { gain, epsilon }: RmsNorm,
    w: &StackedParameters,
) -> Result<Var<'s, S>> {
    const OP: &str = "norm_project";
    let op = tape.op(OP, [x])?;
    let (w_shape, distance) = op.stack(w)?;
    let (&[batch, tokens, inner], &[k, n]) = (x.shape().extents(), w_shape.extents()) else {
        let got = format!("{} and {w_shape}", x.shape());
        return Err(Error::misuse(OP, "x [batch, tokens, in] and w [in, out]", got));
    };
    if inner != k {
        let expected = format!("an input of shape [.., {k}] for weights {w_shape}");
        return Err(Error::misuse(OP, expected, x.shape().to_string()));
    }
    let (members, rows) = (w.members().len(), batch * tokens);
    let (z, inverse_rms) = ops::rms_norm(tape.step(), x.value(), &op.weights(gain)?, epsilon)?;
    let mut y = tape.step().empty([members, batch, tokens, n])?;
    let form = Gemm { batches: members, stride_b: distance, stride_c: rows * n, ..Gemm::new(rows, n, k) };
    ops::gemm_into(tape.step(), &form, &z, &op.stack_weights_as::<S>(w)?, None::<&Saved<'s>>, &mut y)?;
    let (x, z, inverse_rms, w) = (*x, z.save(), inverse_rms.save(), w.clone());
    Ok(op.record(y.save(), move |back, dy| {
        let (step, weights) = (back.step(), back.stack_weights_as::<S>(&w)?);
        // dw_i += z^T dy_i
        let (mut dw, accumulate) = back.stack_gradient_uninit(&w)?;
        let form = Gemm { batches: members, stride_b: rows * n, stride_c: distance, ..Gemm::new(k, n, rows) };
        let form = if accumulate { form.accumulate() } else { form }.transpose_a();
        let dw = Gradient { form, of: &z, into: &mut dw };
        // The gradient of z is the sum of dy_i w_i^T, which the norm's backward pass computes.
        let mut dz = step.empty([members, batch, tokens, k])?;
        let form = Gemm {
            batches: members,
            stride_a: rows * n,
            stride_b: distance,
            stride_c: rows * k,
            ..Gemm::new(rows, k, n).transpose_b()
        };
        let none = None::<BiasGradient<'_, Tensor<'s>>>;
        ops::launch::gradients_into(step, &dy, dw, none, Some(Gradient { form, of: &weights, into: &mut dz }))?;
        step.free(dy);
        let (so_far, gains) = (back.take(&x)?, back.weights(gain)?);
        let (mut dgain, accumulate) = back.gradient_uninit(gain)?;
        let dx =
            ops::launch::rms_norm_backward(step, x.value(), &gains, &inverse_rms, &dz, so_far, &mut dgain, accumulate)?;
        step.free(dz);
        back.add(&x, dx)
    }))
}
