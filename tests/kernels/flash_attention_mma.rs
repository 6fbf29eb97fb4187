//! Tests of `ops::attention` by matrix instructions, and of its backward pass: on BF16 tensors, and
//! on f32 in a TF32 step.
//!
//! The bounds use the norm of a whole result. A rounding is off by up to u of a number, and by less
//! than u / 2 of the norm of many; u is 2^-8 for BF16, 2^-11 for TF32. The weights p are rounded
//! before they are multiplied by v or dout, and ds before it is multiplied by k or q.
//! - BF16: a result is rounded once more, and delta is computed from the rounded output. So `out`
//!   is within 2 x 2^-9, and gradients are within 4 x 2^-9; `lse` is f32.
//! - TF32: results are f32, and q, k, v and dout are rounded for each product. For a score of size
//!   1 this is two roundings, and so for its weight. So `out` is within 4 x 2^-12. Gradients also
//!   depend on dp and are within 8 x 2^-12. Each `lse` is within 4 x 2^-11 of 1 or its size.

use crate::flash_masks::{inputs, results};
use crate::flash_reference::{Inputs, PLAIN, Results, SETUPS, Setup, window};
use crate::hostile::attack;
use crate::support::{bits, on_each_device, relative_l2, tolerance};
use crate::trial::{assert_refused, trial};
use kernels::flash_attention::CAUSAL;
use kernels::flash_attention_mma::{
    FROM_SCORES_BF16, Gradient, KEYS_BF16, QUERIES_BF16, flash_bwd_dkv_ds_mma, flash_bwd_dkv_mma, flash_bwd_dq_mma,
    flash_bwd_from_scores_mma, stored_scores,
};
use kernels::qkv_layout::QkvLayout;
use kernels::stored::Stored;
use stepscope::ops::{self, AttentionConfig, AttentionElement, AttentionMask, Precision, QkNorm};
use stepscope::tensor::{Source as _, Target as _};
use stepscope::{Arena, Capacity, Device, bf16};

/// Returns the bounds of `out`, `lse` and the gradients, for BF16 or for f32 as TF32.
pub(crate) fn bounds<S: AttentionElement>(length: usize) -> [f64; 3] {
    if is_bf16::<S>() {
        [2.0 / 512.0, tolerance(length), 4.0 / 512.0]
    } else {
        [4.0 / 4096.0, 4.0 / 2048.0, 8.0 / 4096.0]
    }
}

fn is_bf16<S: AttentionElement>() -> bool {
    <S as Stored>::NAME == <bf16 as Stored>::NAME
}

/// Returns the results by matrix instructions.
fn by_tensor_cores<S: AttentionElement>(inputs: &Inputs, device: &Device) -> Results<f32> {
    results::<S>(inputs, device, Precision::Tf32)
}

/// Checks that each result is within its bound.
pub(crate) fn assert_near<S: AttentionElement>(device: &Device, setup: Setup) {
    let inputs = inputs::<S>(setup);
    let (got, want) = (by_tensor_cores::<S>(&inputs, device), inputs.in_float64());
    let limits = bounds::<S>(setup.tokens.max(setup.width));
    for ((what, limit), (got, want)) in ["out", "lse", "dqkv"].into_iter().zip(limits).zip(got.iter().zip(&want)) {
        // For a query that attends to no key, both are -infinity.
        assert!(got.iter().zip(want).all(|(got, want)| got.is_finite() == want.is_finite()), "{setup:?}: {what}");
        let finite = |at: &usize| want[*at].is_finite();
        let got: Vec<f32> = (0..want.len()).filter(finite).map(|at| got[at]).collect();
        let want: Vec<f64> = (0..want.len()).filter(finite).map(|at| want[at]).collect();
        let each = got.iter().zip(&want).map(|(&got, want)| (f64::from(got) - want).abs() / want.abs().max(1.0));
        let by_itself = what == "lse" && !is_bf16::<S>();
        let error = if by_itself { each.fold(0.0, f64::max) } else { relative_l2(&got, &want) };
        println!("{} {setup:?}: {what} {error:.2e} of {limit:.2e}", <S as Stored>::NAME);
        assert!(error <= limit, "{} {setup:?}: {what} {error:.2e} > {limit:.2e}", <S as Stored>::NAME);
    }
}

/// Tests the exponentials of the weights over all values that change a sum of weights, and for
/// arguments that are not finite.
#[test]
fn exponentials_keep_their_bounds() {
    use kernels::math::{exp2_negative, exp2_weight};
    let (mut of_negative, mut of_weight) = (0.0_f64, 0.0_f64);
    for at in 0..=134 << 14_u32 {
        let x = 8.0 - at as f32 / 16_384.0;
        let want = f64::from(x).exp2();
        let error = |got: f32| (f64::from(got) / want - 1.0).abs();
        if x <= 0.0 {
            of_negative = of_negative.max(error(exp2_negative(x)));
        }
        of_weight = of_weight.max(error(exp2_weight(x, 1.0, 0.0)));
    }
    assert!(of_negative < 2_f64.powi(-18), "exp2_negative: {of_negative:e}");
    assert!(of_weight < 2_f64.powi(-22), "exp2_weight: {of_weight:e}");
    for n in -126..=8_i32 {
        assert_eq!(exp2_weight(n as f32, 1.0, 0.0), 2_f32.powi(n));
    }
    for hidden in [f32::NEG_INFINITY, -127.0, -1e30] {
        assert_eq!(exp2_weight(hidden, 1.0, 0.0), 0.0, "{hidden}");
    }
    assert!(exp2_weight(f32::NAN, 1.0, 0.0).is_nan() && exp2_weight(0.0, 1.0, f32::NAN).is_nan());
}

/// A masked token (later, of another document, or past the end) changes no bit of a row that does
/// not attend to it.
pub(crate) fn sees_nothing_else<S: AttentionElement>(device: &Device) {
    for setup in [
        Setup { tokens: 150, heads: [2, 1], sees: AttentionMask::Causal, ..PLAIN },
        Setup { tokens: 150, width: 32, sees: window(20), ..PLAIN },
        Setup { tokens: 150, width: 80, masks: [true, false], ..PLAIN },
        Setup { batch: 2, tokens: 100, width: 128, masks: [false, true], ..PLAIN },
    ] {
        let before = inputs::<S>(setup);
        let [out, lse, dqkv] = by_tensor_cores::<S>(&before, device);
        for changed in [0, 63, 64, setup.tokens - 1] {
            let mut other = inputs::<S>(setup);
            for head in 0..setup.heads[1] {
                for part in 1..3 {
                    let place = setup.place(part, 0, changed, head);
                    other.qkv[place..][..setup.width].iter_mut().for_each(|x| *x = 7.0 - *x);
                }
            }
            let [other_out, other_lse, other_dqkv] = by_tensor_cores::<S>(&other, device);
            let mut seen = 0;
            for [sample, head, _] in setup.each_head() {
                for token in 0..setup.tokens {
                    let (at, statistic) = (setup.output(sample, token, head), setup.statistic(sample, token, head));
                    let same = bits(&out[at..][..setup.width]) == bits(&other_out[at..][..setup.width]);
                    if sample == 0 && before.sees(0, token, changed) {
                        seen += 1;
                        assert!(!same, "{setup:?}: token {token} depends on masked token {changed}");
                        continue;
                    }
                    assert!(same, "{setup:?}: token {token}, {changed}");
                    assert_eq!(lse[statistic].to_bits(), other_lse[statistic].to_bits());
                    let dq = setup.place(0, sample, token, head);
                    assert_eq!(bits(&other_dqkv[dq..][..setup.width]), bits(&dqkv[dq..][..setup.width]));
                }
            }
            assert_eq!(seen > 0, changed < before.length(0));
        }
    }
}

/// Rows past the end give 0 whatever their memory holds, and have the gradient 0.
pub(crate) fn reads_no_padding<S: AttentionElement>(device: &Device) {
    let setup = Setup { batch: 5, tokens: 70, heads: [2, 1], width: 32, masks: [false, true], ..PLAIN };
    let (clean, mut dirty) = (inputs::<S>(setup), inputs::<S>(setup));
    for sample in 0..setup.batch {
        for token in dirty.length(sample)..setup.tokens {
            for (part, head) in [(0, 0), (0, 1), (1, 0), (2, 0)] {
                dirty.qkv[setup.place(part, sample, token, head)..][..setup.width].fill(f32::NAN);
            }
            (0..2).for_each(|head| dirty.dout[setup.output(sample, token, head)..][..setup.width].fill(f32::INFINITY));
        }
    }
    let (want, got) = (by_tensor_cores::<S>(&clean, device), by_tensor_cores::<S>(&dirty, device));
    for (got, want) in got.iter().zip(&want) {
        assert_eq!(bits(got), bits(want));
    }
    for sample in 0..setup.batch {
        for token in dirty.length(sample)..setup.tokens {
            let row = |values: &[f32], place: usize| bits(&values[place..][..setup.width]);
            assert_eq!(row(&got[0], setup.output(sample, token, 1)), [0; 32]);
            assert_eq!(got[1][setup.statistic(sample, token, 1)], f32::NEG_INFINITY);
            for (part, head) in [(0, 1), (1, 0), (2, 0)] {
                assert_eq!(row(&got[2], setup.place(part, sample, token, head)), [0; 32]);
            }
        }
    }
}

/// Large scores do not overflow, and the largest decides. A NaN reaches only its own row.
pub(crate) fn takes_extreme_scores<S: AttentionElement>(device: &Device) {
    let setup = Setup { tokens: 130, width: 8, ..PLAIN };
    let mut inputs = inputs::<S>(setup);
    inputs.qkv.iter_mut().for_each(|x| *x = bf16::from_f32(*x * 1e4).to_f32());
    let got = by_tensor_cores::<S>(&inputs, device);
    assert!(got.iter().flatten().all(|x| x.is_finite()));
    let [want, ..] = inputs.in_float64();
    assert!(relative_l2(&got[0], &want) < bounds::<S>(setup.tokens)[0]);
    for wrong in [f32::NAN, f32::INFINITY] {
        inputs.qkv[setup.place(0, 0, 100, 0)] = wrong;
        let [out, lse, dqkv] = by_tensor_cores::<S>(&inputs, device);
        assert!(out[800..808].iter().all(|x| x.is_nan()), "{wrong}");
        assert_eq!(lse.iter().filter(|x| !x.is_finite()).count(), 1, "a query affects only its own row");
        assert!(dqkv[setup.place(0, 0, 100, 0)..][..8].iter().any(|x| !x.is_finite()), "{wrong}");
    }
}

on_each_device! {
    fn against_float64(device: &Device) {
        for setup in SETUPS {
            if setup.width.is_multiple_of(8) {
                assert_near::<bf16>(device, setup);
            }
            if setup.width <= 128 {
                assert_near::<f32>(device, setup);
            }
        }
    }

    /// Many tiles, at every width and with every mask.
    fn against_float64_over_1000_tokens(device: &Device) {
        let long = Setup { tokens: 1000, ..PLAIN };
        for setup in [
            Setup { width: 32, heads: [2, 1], sees: AttentionMask::Causal, ..long },
            Setup { width: 64, ..long },
            Setup { width: 80, sees: window(300), ..long },
            Setup { width: 96, masks: [true, false], ..long },
            Setup { width: 128, masks: [false, true], ..long },
        ] {
            assert_near::<bf16>(device, setup);
            assert_near::<f32>(device, setup);
        }
        assert_near::<bf16>(device, Setup { width: 256, sees: AttentionMask::Causal, masks: [true, true], ..long });
    }

    /// Shapes that the TF32 kernels do not support are computed in f32, with the bits of an f32
    /// step.
    fn unsupported_tf32_falls_back(device: &Device) {
        let plain = Setup { tokens: 40, heads: [2, 1], sees: AttentionMask::Causal, ..PLAIN };
        for (width, is_f32) in [(128, false), (132, true)] {
            let inputs = inputs::<f32>(Setup { width, ..plain });
            let [tf32, exact] = [Precision::Tf32, Precision::F32]
                .map(|precision| results::<f32>(&inputs, device, precision).map(|result| bits(&result)));
            assert_eq!(tf32 == exact, is_f32, "{width} columns");
        }
    }

    fn masked_tokens_change_nothing(device: &Device) {
        sees_nothing_else::<bf16>(device);
        sees_nothing_else::<f32>(device);
    }

    fn padding_is_never_read(device: &Device) {
        reads_no_padding::<bf16>(device);
        reads_no_padding::<f32>(device);
    }

    fn extreme_scores(device: &Device) {
        takes_extreme_scores::<bf16>(device);
        takes_extreme_scores::<f32>(device);
    }

    /// The kernel that also stores ds has the bits of the one that does not, and dq from ds has
    /// those of the kernel of dq. A second launch computes all key heads but the first.
    fn stored_ds_changes_no_bit(device: &Device) {
        let causal = Setup { batch: 2, tokens: 300, heads: [4, 2], width: 128, sees: AttentionMask::Causal, ..PLAIN };
        for (setup, sees) in [
            (Setup { masks: [true, true], ..causal }, CAUSAL),
            (Setup { tokens: 200, heads: [2, 2], width: 72, stacked: true, ..causal }, 90),
            (Setup { batch: 3, tokens: 130, heads: [2, 1], masks: [false, true], ..causal }, 0),
        ] {
            let (inputs, outputs) = (inputs::<bf16>(setup), setup.outputs());
            let narrow = |values: &[f32]| values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
            let statistics: Vec<f32> = inputs.dout.iter().copied().step_by(setup.width).collect();
            let of_head = stored_scores(setup.tokens as u32, sees != 0) * (setup.heads[0] / setup.heads[1]);
            let all = setup.batch * setup.heads[1];
            let mut arena = Arena::builder(device).capacity(Capacity::mib(64)).build().unwrap();
            arena.step(|step| {
                let (qkv, dout) = (step.upload(&narrow(&inputs.qkv), setup.shape())?, step.upload(&narrow(&inputs.dout), [outputs])?);
                let documents = step.upload(&inputs.documents, [inputs.documents.len()])?;
                let lengths = step.upload(&inputs.lengths, [inputs.lengths.len()])?;
                let [lse, delta] = [&statistics, &statistics.iter().map(|x| x / 4.0).collect()]
                    .map(|values: &Vec<f32>| step.upload(values, [values.len()]));
                let (lse, delta) = (lse?, delta?);
                let unset = vec![bf16::MAX; inputs.qkv.len()];
                let [mut want, mut got] = [step.upload(&unset, setup.shape())?, step.upload(&unset, setup.shape())?];
                let [heads, kv_heads, tokens, width] =
                    [setup.heads[0], setup.heads[1], setup.tokens, setup.width].map(|size| size as u32);
                let layout = QkvLayout { tokens, heads, kv_heads, width, stacked: u32::from(setup.stacked) };
                macro_rules! launch {
                    ($kernel:ident { $($name:ident: $value:expr),* }) => {
                        step.launch($kernel {
                            qkv: qkv.slice(),
                            documents: documents.slice(),
                            lengths: lengths.slice(),
                            dout: dout.slice(),
                            layout,
                            window: sees,
                            scale: setup.scale(),
                            $($name: $value),*
                        })?
                    };
                }
                let shape = KEYS_BF16[1];
                launch!(flash_bwd_dq_mma { shape: QUERIES_BF16[1], lse: lse.slice(), delta: delta.slice(), dqkv: want.out() });
                launch!(flash_bwd_dkv_mma { shape: shape, lse: lse.slice(), delta: delta.slice(), dqkv: want.out() });
                for (before, count) in [(0, 1), (1, all - 1)] {
                    let mut ds = step.upload(&vec![bf16::MAX; count * of_head], [count * of_head])?;
                    let (before, count) = (before as u32, count as u32);
                    launch!(flash_bwd_dkv_ds_mma { shape: shape, lse: lse.slice(), delta: delta.slice(), before: before, count: count, ds: ds.out(), dqkv: got.out() });
                    launch!(flash_bwd_from_scores_mma { variant: (Gradient::Queries, FROM_SCORES_BF16[0]), scores: ds.slice(), before: before, count: count, dqkv: got.out() });
                }
                let [want, got] = [step.read(&want)?, step.read(&got)?].map(|values| values.into_iter().map(bf16::to_f32).collect::<Vec<_>>());
                assert!(want.iter().all(|x| x.abs() < 1e6), "{setup:?}");
                assert_eq!(bits(&got), bits(&want), "{setup:?}");
                Ok(())
            }).unwrap();
        }
    }

    /// The gradients on a tape, with rotary positions and QK-norm in between, are those of f32, up
    /// to BF16 rounding.
    fn tape_gradients_match_f32(device: &Device) {
        let setup = Setup { batch: 2, tokens: 80, heads: [4, 2], width: 64, sees: AttentionMask::Causal, ..PLAIN };
        let (inputs, gains) = (inputs::<bf16>(setup), vec![1.25; 2 * setup.width]);
        let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
        let [want, got] = arena.step(|step| {
            let (form, gains) = (AttentionConfig::new(4).kv_heads(2).causal(), step.upload(&gains, [2, setup.width])?);
            macro_rules! gradients {
                ($S:ty, $of:expr, $back:expr) => {{
                    let upload = |values: &[f32], shape| {
                        step.upload(&values.iter().map($of).collect::<Vec<$S>>(), shape)
                    };
                    let rows = stepscope::tensor::Shape::from([2, 80, 256]);
                    let (qkv, dout) = (upload(&inputs.qkv, setup.shape())?, upload(&inputs.dout, rows)?);
                    let rotated = ops::rotary(step, &qkv, ops::Rotary::default(), &form)?;
                    let norm = QkNorm::new(&gains, 1e-6);
                    let made = ops::attention(step, &rotated, Some(norm), &form)?;
                    let mut dgains = step.empty([2, setup.width])?;
                    let target = Some((norm, &mut dgains, false));
                    let d = ops::launch::attention_backward(step, &rotated, target, &form, &made, &dout)?;
                    let d = ops::launch::rotary_backward(step, d, ops::Rotary::default(), &form)?;
                    let back: Vec<f64> = step.read(&d)?.into_iter().map($back).collect();
                    (back, step.read(&dgains)?)
                }};
            }
            let f32s = gradients!(f32, |&x| x, f64::from);
            let bf16s = gradients!(bf16, |&x| bf16::from_f32(x), f64::from);
            Ok([f32s, bf16s])
        }).unwrap();
        let narrow: Vec<f32> = got.0.iter().map(|&x| x as f32).collect();
        // Five more roundings than `bounds` counts, from rotary positions and the norm, forward and
        // backward.
        let error = relative_l2(&narrow, &want.0);
        assert!(error < 9.0 / 512.0, "{error:.2e}");
        let want: Vec<f64> = want.1.into_iter().map(f64::from).collect();
        let error = relative_l2(&got.1, &want);
        assert!(error < 9.0 / 512.0, "{error:.2e}");
    }

    fn unsupported_inputs_are_refused(device: &Device) {
        trial(device, |trial| {
            let qkv = |shape: [usize; 3]| trial.upload(&vec![bf16::ONE; shape.iter().product()], shape);
            let form = AttentionConfig::new(1);
            assert_refused(ops::attention(trial, &qkv([1, 2, 12])?, None, &form), &["attention", "a multiple of 8 columns", "4 columns"]);
            for scale in [0.0, -1.0, f32::NAN] {
                let refused = ops::attention(trial, &qkv([1, 2, 24])?, None, &form.scale(scale));
                assert_refused(refused, &["attention", "a scale above 0", "BF16"]);
            }
            Ok(())
        });
    }
}

attack! {
    flash_attention_mma::flash_forward_mma by shape<S> {
        qkv: stored 256, documents: u32s 8, lengths: u32s 0, layout: qkv [4, 2, 1, 8, 0], window: number 3, scale: float 0.5, out: out_stored 128, lse: out 16,
    }
    flash_attention_mma::flash_bwd_dq_mma by shape<S> {
        qkv: stored 256, documents: u32s 8, lengths: u32s 0, lse: f32s 16, delta: f32s 16, dout: stored 128, layout: qkv [4, 2, 1, 8, 0], window: number 3, scale: float 0.5, dqkv: out_stored 256,
    }
    flash_attention_mma::flash_bwd_dkv_mma by shape<S> {
        qkv: stored 256, documents: u32s 8, lengths: u32s 0, lse: f32s 16, delta: f32s 16, dout: stored 128, layout: qkv [4, 2, 1, 8, 0], window: number 3, scale: float 0.5, dqkv: out_stored 256,
    }
    flash_attention_mma::flash_bwd_dkv_ds_mma by shape<S> {
        qkv: stored 256, documents: u32s 8, lengths: u32s 0, lse: f32s 16, delta: f32s 16, dout: stored 128, layout: qkv [4, 2, 1, 8, 0], window: number 3, scale: float 0.5,
        before: number 1, count: number 1, ds: out_stored 32768, dqkv: out_stored 256,
    }
    flash_attention_mma::flash_bwd_scores_mma by shape<S> {
        qkv: stored 256, documents: u32s 8, lengths: u32s 0, lse: f32s 16, delta: f32s 16, dout: stored 128, layout: qkv [4, 2, 1, 8, 0], window: number 3, scale: float 0.5,
        before: number 1, count: number 1, p: out_stored 32768, ds: out_stored 32768,
    }
    flash_attention_mma::flash_bwd_from_scores_mma by variant<S> {
        qkv: stored 256, documents: u32s 8, lengths: u32s 0, scores: stored 32768, dout: stored 128, layout: qkv [4, 2, 1, 8, 0], window: number 3, scale: float 0.5,
        before: number 1, count: number 1, dqkv: out_stored 256,
    }
}
