//! BF16 in memory: an op on BF16 gives its f32 result for the same numbers, rounded once. An
//! activation is within 2^-15 of that.

use crate::shapes::ROWS;
use crate::support::{Random, on_each_device};
use crate::trial::{Trial, assert_same, trial};
use kernels::stored::Stored as _;
use std::cell::RefCell;
use stepscope::ops::launch::AttentionKept;
use stepscope::ops::{AttentionConfig, AttentionElement, QkNorm};
use stepscope::tensor::{Element, Shape, Source, Stored};
use stepscope::{Device, Result, Tensor, bf16, ops};

/// An op's operands and its results.
struct Case<'c, 's> {
    trial: &'c Trial<'c, 's>,
    shape: [usize; 2],
    random: RefCell<Random>,
    outputs: RefCell<Vec<Output>>,
}

/// A result of an op.
struct Output {
    values: Vec<f32>,
    /// True if stored as BF16.
    is_rounded: bool,
    /// The permitted difference between f32 and BF16 before rounding, relative and absolute.
    off_by: [f32; 2],
}

impl Output {
    /// Returns the least and the largest value that f32's `value` allows.
    fn range(&self, value: f32) -> [f32; 2] {
        let [part, anywhere] = self.off_by;
        let off_by = part * value.abs() + anywhere;
        [value - off_by, value + off_by].map(|x| if self.is_rounded { bf16::narrow(x).widen() } else { x })
    }
}

impl<'s> Case<'_, 's> {
    /// Returns values that BF16 can hold, whatever S is.
    fn of<S: Stored>(&self, shape: impl Into<Shape>) -> Result<Tensor<'s, S>> {
        let shape = shape.into();
        let values = self.random.borrow_mut().normals(shape.elements());
        self.trial.upload(&values.into_iter().map(|x| S::narrow(bf16::narrow(x).widen())).collect::<Vec<_>>(), shape)
    }

    fn x<S: Stored>(&self) -> Result<Tensor<'s, S>> {
        self.of(self.shape)
    }

    /// Returns any f32 numbers, for a gain or a bias.
    fn row(&self) -> Result<Tensor<'s>> {
        let cols = self.shape[1];
        self.trial.upload(&self.random.borrow_mut().normals(cols), [cols])
    }

    fn keep<S: Stored>(&self, tensor: &impl Source<'s, S>) -> Result<()> {
        self.keep_within(tensor, [0.0; 2])
    }

    /// Keeps the result of an activation or of its product. BF16's is within 2^-15; that of a
    /// derivative, or of a sum of several, within `anywhere`.
    fn keep_activated<S: Stored>(&self, tensor: &impl Source<'s, S>, anywhere: f32) -> Result<()> {
        self.keep_within(tensor, [2f32.powi(-15), anywhere])
    }

    fn keep_within<S: Stored>(&self, tensor: &impl Source<'s, S>, off_by: [f32; 2]) -> Result<()> {
        let values = self.trial.output(tensor)?.into_iter().map(S::widen).collect();
        self.outputs.borrow_mut().push(Output { values, is_rounded: <S as Element>::NAME == "bf16", off_by });
        Ok(())
    }
}

/// The difference between BF16's and f32's derivative of an activation, times a dy of up to 4.
const DERIVATIVE: f32 = 1.0 / (1 << 14) as f32;

/// Defines a test for each op, generic in the stored type.
macro_rules! rounded_once {
    ($($name:ident<$S:ident>: |$c:ident| $body:block)*) => {$(
        mod $name {
            use super::*;

            fn run<$S: AttentionElement>($c: &Case<'_, '_>) -> Result<()> $body

            fn check(device: &Device, shape: [usize; 2]) {
                let outputs = |run: fn(&Case<'_, '_>) -> Result<()>| {
                    trial(device, |trial| {
                        let random = RefCell::new(Random::new(29));
                        let case = Case { trial, shape, random, outputs: RefCell::default() };
                        trial.with_scratch(|| run(&case))?;
                        Ok(case.outputs.take())
                    })
                };
                let (floats, halves) = (outputs(run::<f32>), outputs(run::<bf16>));
                assert!(!floats.is_empty() && floats.len() == halves.len());
                for (want, got) in floats.iter().zip(&halves) {
                    if got.off_by == [0.0; 2] {
                        let want: Vec<f32> = want.values.iter().map(|&x| got.range(x)[0]).collect();
                        assert_same(format!("{shape:?}"), &got.values, &want);
                        continue;
                    }
                    assert_eq!(want.values.len(), got.values.len());
                    for (&want, &value) in want.values.iter().zip(&got.values) {
                        let [least, largest] = got.range(want);
                        assert!((least..=largest).contains(&value), "{shape:?}: {value:e} for {want:e}");
                    }
                }
            }

            on_each_device! {
                fn rounds_once(device: &Device) {
                    ROWS.into_iter().for_each(|shape| check(device, shape));
                }
            }
        }
    )*};
}

rounded_once! {
    add<S>: |c| { c.keep(&ops::add(c.trial, &c.x::<S>()?, &c.x()?)?) }
    add_assign<S>: |c| {
        let mut out = c.x::<S>()?;
        ops::add_assign(c.trial, &mut out, &c.x()?)?;
        c.keep(&out)
    }
    scale<S>: |c| { c.keep(&ops::scale(c.trial, &c.x::<S>()?, 0.3)?) }
    scale_by<S>: |c| { c.keep(&ops::scale_by(c.trial, &c.x::<S>()?, &c.trial.upload(&[0.7], [1])?)?) }
    scale_by_into<S>: |c| {
        let (x, mut out) = (c.x::<S>()?, c.x()?);
        ops::launch::scale_by_into(c.trial, &x, &c.trial.upload(&[0.7], [1])?, &mut out, true)?;
        c.keep(&out)
    }
    add_bias<S>: |c| { c.keep(&ops::add_bias(c.trial, &c.x::<S>()?, &c.row()?)?) }
    copy<S>: |c| { c.keep(&ops::copy(c.trial, &c.x::<S>()?)?) }
    tanh<S>: |c| { c.keep_activated(&ops::tanh(c.trial, &c.x::<S>()?)?, 0.0) }
    tanh_backward<S>: |c| { c.keep(&ops::launch::tanh_backward(c.trial, &c.x::<S>()?, &c.x()?)?) }
    gelu<S>: |c| { c.keep_activated(&ops::gelu(c.trial, &c.x::<S>()?)?, 0.0) }
    gelu_backward<S>: |c| { c.keep_activated(&ops::launch::gelu_backward(c.trial, &c.x::<S>()?, &c.x()?)?, DERIVATIVE) }
    gelu_bias_backward<S>: |c| {
        let mut db = c.row()?;
        c.keep_activated(&ops::launch::gelu_bias_backward(c.trial, &c.x::<S>()?, &c.x()?, &mut db, true)?, DERIVATIVE)?;
        c.keep_activated(&db, c.shape[0] as f32 * DERIVATIVE)
    }
    sub<S>: |c| { c.keep(&ops::sub(c.trial, &c.x::<S>()?, &c.x()?)?) }
    mul<S>: |c| { c.keep(&ops::mul(c.trial, &c.x::<S>()?, &c.x()?)?) }
    activations<S>: |c| {
        let x = c.x::<S>()?;
        c.keep(&ops::relu(c.trial, &x)?)?;
        c.keep_activated(&ops::sigmoid(c.trial, &x)?, 0.0)?;
        c.keep_activated(&ops::silu(c.trial, &x)?, 0.0)?;
        c.keep(&ops::gelu_exact(c.trial, &x)?)
    }
    activations_backward<S>: |c| {
        let (x, dy) = (c.x::<S>()?, c.x()?);
        c.keep(&ops::launch::relu_backward(c.trial, &x, &dy)?)?;
        c.keep(&ops::launch::sigmoid_backward(c.trial, &x, &dy)?)?;
        c.keep_activated(&ops::launch::silu_backward(c.trial, &x, &dy)?, DERIVATIVE)?;
        c.keep(&ops::launch::gelu_exact_backward(c.trial, &x, &dy)?)
    }
    swiglu<S>: |c| {
        let (gate, up, dy) = (c.x::<S>()?, c.x()?, c.x()?);
        c.keep_activated(&ops::swiglu(c.trial, &gate, &up)?, 0.0)?;
        let gradients = ops::launch::swiglu_backward(c.trial, &gate, &up, &dy)?;
        gradients.iter().try_for_each(|result| c.keep_activated(result, 4.0 * DERIVATIVE))
    }
    swiglu_packed<S>: |c| {
        let [rows, cols] = c.shape;
        let (x, dy) = (c.of::<S>([rows, 2 * cols])?, c.x()?);
        c.keep_activated(&ops::swiglu_packed(c.trial, &x)?, 0.0)?;
        c.keep_activated(&ops::launch::swiglu_packed_backward(c.trial, &x, &dy)?, 4.0 * DERIVATIVE)
    }
    dropout<S>: |c| {
        let (x, generator) = (c.x::<S>()?, ops::Generator::new(c.trial.device(), 3)?);
        c.keep(&ops::dropout(c.trial, &x, 0.3, &generator.draws(c.trial)?.next())?)
    }
    embedding<S>: |c| {
        let [rows, cols] = [c.shape[0] + 1, c.shape[1]];
        let (table, ids) = (c.of::<f32>([rows, cols])?, c.trial.upload_indices(&[0, rows as u32 - 1, 0], [3])?);
        c.keep(&ops::embedding::<S>(c.trial, &table, &ids)?)?;
        let mut dtable = c.of::<f32>([rows, cols])?;
        ops::launch::embedding_backward(c.trial, &c.of::<S>([3, cols])?, &ids, &mut dtable, true)?;
        c.keep(&dtable)
    }
    gather<S>: |c| {
        let [rows, cols] = [c.shape[0] + 1, c.shape[1]];
        let ids = c.trial.upload_indices(&[0, rows as u32 - 1, 0], [3])?;
        c.keep(&ops::gather(c.trial, &c.of::<S>([rows, cols])?, &ids)?)?;
        c.keep(&ops::launch::gather_backward(c.trial, &c.of::<S>([3, cols])?, &ids, rows)?)
    }
    parts<S>: |c| {
        let (x, cols) = (c.x::<S>()?, c.shape[1]);
        c.keep(&ops::slice(c.trial, &x, 1, cols / 3..cols)?)?;
        c.keep(&ops::concat(c.trial, &[&x, &x], 1)?)
    }
    transpose<S>: |c| { c.keep(&ops::transpose(c.trial, &c.x::<S>()?)?) }
    swap_extents<S>: |c| {
        let [rows, cols] = c.shape;
        c.keep(&ops::swap_extents(c.trial, &c.of::<S>([3, rows, cols])?, 0, 1)?)
    }
    log_softmax<S>: |c| { c.keep(&ops::log_softmax(c.trial, &c.x::<S>()?)?) }
    log_softmax_backward<S>: |c| {
        let y = ops::scale(c.trial, &ops::relu(c.trial, &c.x::<S>()?)?, -1.0)?;
        c.keep(&ops::launch::log_softmax_backward(c.trial, &y, &c.x()?)?)
    }
    element_losses<S>: |c| {
        let (x, target) = (c.x::<S>()?, c.of::<f32>(c.shape)?);
        let losses = [ops::squared_error(c.trial, &x, &target, Some(0.1))?, ops::binary_cross_entropy(c.trial, &x, &target, Some(0.1))?];
        losses.iter().try_for_each(|(loss, dx)| c.keep(loss).and_then(|()| c.keep(dx)))
    }
    softmax<S>: |c| { c.keep(&ops::softmax(c.trial, &c.x::<S>()?)?) }
    softmax_backward<S>: |c| { c.keep(&ops::launch::softmax_backward(c.trial, &c.x::<S>()?, &c.x()?)?) }
    attention_of_few_tokens<S>: |c| {
        let ([rows, cols], heads) = (c.shape, 2);
        let tokens = (rows + cols) % 16 + 1;
        let (qkv, dout) = (c.of::<S>([3, 3, tokens, heads * 64])?, c.of::<S>([3, tokens, heads * 64])?);
        let (gains, mut dgains) = (c.of::<f32>([2, 64])?, c.of::<f32>([2, 64])?);
        let (norm, form) = (QkNorm::new(&gains, 1e-6), AttentionConfig::new(heads));
        let made = ops::attention(c.trial, &qkv, Some(norm), &form)?;
        let AttentionKept::Short { probabilities, inverse_rms } = made.kept else { panic!("the kernel for few tokens was not chosen") };
        c.keep(&made.out)?;
        c.keep(&probabilities)?;
        c.keep(&inverse_rms)?;
        c.keep(&ops::launch::attention_backward(c.trial, &qkv, Some((norm, &mut dgains, true)), &form, &made, &dout)?)?;
        c.keep(&dgains)
    }
    rms_norm<S>: |c| {
        let (y, inverse_rms) = ops::rms_norm(c.trial, &c.x::<S>()?, &c.row()?, 1e-6)?;
        c.keep(&y)?;
        c.keep(&inverse_rms)
    }
    rms_norm_backward<S>: |c| {
        let (x, gain, mut dgain) = (c.x::<S>()?, c.row()?, c.row()?);
        let (_, inverse_rms) = ops::rms_norm(c.trial, &x, &gain, 1e-6)?;
        let so_far = Some(c.x()?);
        let dx = ops::launch::rms_norm_backward(c.trial, &x, &gain, &inverse_rms, &c.x()?, so_far, &mut dgain, true)?;
        c.keep(&dx)?;
        c.keep(&dgain)
    }
    layer_norm<S>: |c| {
        let out = ops::layer_norm(c.trial, &c.x::<S>()?, &c.row()?, &c.row()?, 1e-5)?;
        c.keep(&out.y)?;
        c.keep(&out.mean)?;
        c.keep(&out.inverse_std)
    }
    layer_norm_backward<S>: |c| {
        let (h, gain, mut sums) = (c.x::<S>()?, c.row()?, [c.row()?, c.row()?]);
        let out = ops::layer_norm(c.trial, &h, &gain, &c.row()?, 1e-5)?;
        let kept = [&out.mean, &out.inverse_std];
        let so_far = Some(c.x()?);
        let dh = ops::launch::layer_norm_backward(c.trial, &h, &gain, kept, &c.x()?, so_far, sums.each_mut(), [true, false])?;
        c.keep(&dh)?;
        sums.iter().try_for_each(|sum| c.keep(sum))
    }
    cross_entropy<S>: |c| {
        let [rows, classes] = c.shape;
        let labels: Vec<u32> = (0..rows).map(|row| (row * 7 % classes) as u32).collect();
        let (loss, dlogits) = ops::cross_entropy_by(c.trial, &c.x::<S>()?, &c.trial.upload_indices(&labels, [rows])?, ops::LabelRules::default().weighted(0.1))?;
        c.keep(&loss)?;
        c.keep(&dlogits)
    }
    max<S>: |c| {
        // An empty tensor has no maximum.
        let x = c.of::<S>([c.shape[0].max(1), c.shape[1]])?;
        c.keep(&ops::max(c.trial, &x)?)
    }
    max_columns<S>: |c| { c.keep(&ops::max_columns(c.trial, &c.x::<S>()?)?) }
    argmax_columns<S>: |c| {
        let places = c.trial.output(&ops::argmax_columns(c.trial, &c.x::<S>()?)?)?;
        let values = places.into_iter().map(|place| place as f32).collect();
        c.outputs.borrow_mut().push(Output { values, is_rounded: false, off_by: [0.0; 2] });
        Ok(())
    }
    squared_norm<S>: |c| { c.keep(&ops::squared_norm(c.trial, &c.x::<S>()?)?) }
    sum_columns<S>: |c| { c.keep(&ops::sum_columns(c.trial, &c.x::<S>()?)?) }
    sum_rows<S>: |c| { c.keep(&ops::sum_rows(c.trial, &c.x::<S>()?)?) }
    sum<S>: |c| { c.keep(&ops::sum(c.trial, &c.x::<S>()?)?) }
    mean_tokens<S>: |c| {
        let [tokens, cols] = [c.shape[0].max(1), c.shape[1]];
        c.keep(&ops::mean_tokens(c.trial, &c.of::<S>([3, tokens, cols])?)?)
    }
    mean_tokens_backward<S>: |c| {
        let [tokens, cols] = [c.shape[0].max(1), c.shape[1]];
        c.keep(&ops::launch::mean_tokens_backward(c.trial, &c.of::<S>([3, cols])?, [3, tokens, cols])?)
    }
}

on_each_device! {
    /// The norm after a residual, and its backward, use the sum as it is stored.
    fn stored_sum_is_normalised(device: &Device) {
        for shape in ROWS {
            trial(device, |trial| {
                let case = Case { trial, shape, random: RefCell::new(Random::new(31)), outputs: RefCell::default() };
                let (x, residual, gain, bias) = (case.x::<bf16>()?, case.x()?, case.row()?, case.row()?);
                let (h, out) = ops::layer_norm_residual(trial, &x, &residual, &gain, &bias, 1e-5)?;
                let sum = ops::add(trial, &x, &residual)?;
                let (rms_h, rms_y, scale) = ops::rms_norm_residual(trial, &x, &residual, &gain, 1e-6)?;
                let (of_rms, of_scale) = ops::rms_norm(trial, &sum, &gain, 1e-6)?;
                assert_same("scale", &trial.output(&scale)?, &trial.output(&of_scale)?);
                let of_sum = ops::layer_norm(trial, &sum, &gain, &bias, 1e-5)?;
                for [got, want] in [[&h, &sum], [&out.y, &of_sum.y], [&rms_h, &sum], [&rms_y, &of_rms]] {
                    let [got, want] = [trial.output(got)?, trial.output(want)?].map(|x| x.into_iter().map(f32::from).collect::<Vec<_>>());
                    assert_same(format!("{shape:?}"), &got, &want);
                }
                for [got, want] in [[&out.mean, &of_sum.mean], [&out.inverse_std, &of_sum.inverse_std]] {
                    assert_same(format!("{shape:?}"), &trial.output(got)?, &trial.output(want)?);
                }
                Ok(())
            });
        }
    }
}
