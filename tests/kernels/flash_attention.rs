//! Tests of `ops::attention` over any number of tokens, and of its backward pass.

use crate::flash_reference::{Inputs, PLAIN, Results, SETUPS, Setup, window};
use crate::gradients::{Case, SEEDS, leaf, longest, normal};
use crate::hostile::attack;
use crate::support::{Random, bits, on_each_device, relative_l2, tolerance};
use crate::trial::{assert_refused, assert_same, trial};
use stepscope::ops::launch::AttentionKept;
use stepscope::ops::{self, Attention, AttentionConfig, AttentionMask, QkNorm};
use stepscope::{Device, Result, Tensor};

/// Returns the results of a device.
fn results(inputs: &Inputs, device: &Device) -> Results<f32> {
    let Setup { batch, tokens, heads, width, .. } = inputs.setup;
    trial(device, |trial| {
        let form = inputs.form(|mask, shape| trial.upload(mask, shape))?;
        let qkv = trial.upload(&inputs.qkv, inputs.setup.shape())?;
        let dout = trial.upload(&inputs.dout, [batch, tokens, heads[0] * width])?;
        let made = ops::attention(trial, &qkv, None, &form)?;
        let AttentionKept::Flash { lse, normal: None } = made.kept else { panic!("{:?}", made.kept) };
        assert_eq!(made.out.shape().extents(), [batch, tokens, heads[0] * width]);
        assert_eq!(lse.shape().extents(), [batch, heads[0], tokens]);
        let (out, lse) = (trial.output(&made.out)?, trial.output(&lse)?);
        let dqkv = trial.with_scratch(|| backward(trial, &qkv, &form, &made, &dout))?;
        Ok([out, lse, trial.output(&dqkv)?])
    })
}

/// Returns the gradient of `qkv`, without a norm.
fn backward<'s>(
    step: &stepscope::Step<'s>,
    qkv: &Tensor<'s>,
    form: &AttentionConfig<'s>,
    made: &Attention<'s>,
    dout: &Tensor<'s>,
) -> Result<Tensor<'s>> {
    ops::launch::attention_backward(step, qkv, None::<(QkNorm<'_, 's>, &mut Tensor<'s>, bool)>, form, made, dout)
}

/// Checks that each result is as close to float64 as sums of this length allow.
fn assert_near(setup: Setup, got: &Results<f32>, want: &Results<f64>, length: usize) {
    for (what, (got, want)) in ["out", "lse", "dqkv"].into_iter().zip(got.iter().zip(want)) {
        // For a query that attends to no key, both are -infinity.
        let alike = got.iter().zip(want).all(|(got, want)| got.is_finite() == want.is_finite());
        assert!(alike, "{setup:?}: {what}");
        let of = |at: usize| want[at].is_finite();
        let got: Vec<f32> = (0..got.len()).filter(|&at| of(at)).map(|at| got[at]).collect();
        let want: Vec<f64> = (0..want.len()).filter(|&at| of(at)).map(|at| want[at]).collect();
        let (error, limit) = (relative_l2(&got, &want), tolerance(length));
        println!("{setup:?}: {what} {error:.2e} of {limit:.2e}");
        assert!(error <= limit, "{setup:?}: {what} {error:.2e} > {limit:.2e}");
    }
}

on_each_device! {
    /// The bits match a plain computation in the documented order.
    fn in_the_documented_order(device: &Device) {
        for setup in SETUPS {
            let inputs = Inputs::new(setup);
            for (what, (got, want)) in ["out", "lse", "dqkv"].iter().zip(results(&inputs, device).iter().zip(&inputs.in_order())) {
                assert_same(format_args!("{setup:?}, {what}"), got, want);
            }
        }
    }

    fn against_float64(device: &Device) {
        for setup in SETUPS {
            let inputs = Inputs::new(setup);
            assert_near(setup, &results(&inputs, device), &inputs.in_float64(), setup.tokens.max(setup.width));
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
            Setup { width: 256, sees: AttentionMask::Causal, masks: [true, true], ..long },
        ] {
            let inputs = Inputs::new(setup);
            assert_near(setup, &results(&inputs, device), &inputs.in_float64(), setup.tokens);
        }
    }

    /// A masked token (later, of another document, or past the end) changes no bit of a row that
    /// does not attend to it.
    fn masked_tokens_change_nothing(device: &Device) {
        for setup in [
            Setup { tokens: 150, heads: [2, 1], sees: AttentionMask::Causal, ..PLAIN },
            Setup { tokens: 150, width: 32, sees: window(20), ..PLAIN },
            Setup { tokens: 150, width: 80, masks: [true, false], ..PLAIN },
            Setup { batch: 2, tokens: 100, width: 128, masks: [false, true], ..PLAIN },
        ] {
            let inputs = Inputs::new(setup);
            let [out, lse, dqkv] = results(&inputs, device);
            for changed in [0, 63, 64, setup.tokens - 1] {
                let mut other = Inputs::new(setup);
                for head in 0..setup.heads[1] {
                    for part in 1..3 {
                        let place = setup.place(part, 0, changed, head);
                        other.qkv[place..][..setup.width].iter_mut().for_each(|x| *x = 7.0 - *x);
                    }
                }
                // Values that must not be read may not even be multiplied by 0.
                let exists = changed < inputs.length(0);
                for x in other.qkv.iter_mut().filter(|_| !exists) {
                    *x = if *x > 6.0 { f32::NAN } else { *x };
                }
                let [other_out, other_lse, other_dqkv] = results(&other, device);
                let mut seen = 0;
                for ([sample, head, _], token) in setup.each_head().flat_map(|head| (0..setup.tokens).map(move |token| (head, token))) {
                    let (at, statistic) = (setup.output(sample, token, head), setup.statistic(sample, token, head));
                    let same = bits(&out[at..][..setup.width]) == bits(&other_out[at..][..setup.width]);
                    if sample == 0 && inputs.sees(0, token, changed) {
                        seen += 1;
                        assert!(!same, "{setup:?}: token {token} depends on masked token {changed}");
                        continue;
                    }
                    assert!(same && lse[statistic].to_bits() == other_lse[statistic].to_bits(), "{setup:?}: token {token}, {changed}");
                    let dq = setup.place(0, sample, token, head);
                    assert_same("dq", &other_dqkv[dq..][..setup.width], &dqkv[dq..][..setup.width]);
                }
                assert_eq!(seen > 0, exists);
            }
        }
    }

    /// Rows past the end give 0 whatever their memory holds, and have the gradient 0.
    fn padding_is_never_read(device: &Device) {
        let setup = Setup { batch: 5, tokens: 70, heads: [2, 1], width: 32, masks: [false, true], ..PLAIN };
        let (clean, mut dirty) = (Inputs::new(setup), Inputs::new(setup));
        for sample in 0..setup.batch {
            for token in dirty.length(sample)..setup.tokens {
                for part in 0..3 {
                    for head in 0..setup.heads[usize::from(part > 0)] {
                        let place = setup.place(part, sample, token, head);
                        dirty.qkv[place..][..setup.width].fill(f32::NAN);
                    }
                }
                (0..2).for_each(|head| dirty.dout[setup.output(sample, token, head)..][..setup.width].fill(f32::INFINITY));
            }
        }
        let (clean, got) = (results(&clean, device), results(&dirty, device));
        assert_same("out", &got[0], &clean[0]);
        assert_same("lse", &got[1], &clean[1]);
        assert_same("dqkv", &got[2], &clean[2]);
        for sample in 0..setup.batch {
            for token in dirty.length(sample)..setup.tokens {
                let row = |values: &[f32], place: usize| bits(&values[place..][..setup.width]);
                assert_eq!(row(&got[0], setup.output(sample, token, 1)), [0; 32]);
                assert_eq!(got[1][setup.statistic(sample, token, 1)], f32::NEG_INFINITY);
                for part in 0..3 {
                    assert_eq!(row(&got[2], setup.place(part, sample, token, 0)), [0; 32]);
                }
            }
        }
    }

    /// Large scores do not overflow, and the largest decides. A NaN reaches the result.
    fn extreme_scores(device: &Device) {
        let setup = Setup { tokens: 130, width: 4, ..PLAIN };
        let mut inputs = Inputs::new(setup);
        inputs.qkv.iter_mut().for_each(|x| *x *= 1e4);
        let got = results(&inputs, device);
        assert!(got.iter().flatten().all(|x| x.is_finite()));
        // The largest score dominates by far.
        let [want, ..] = inputs.in_float64();
        assert!(relative_l2(&got[0], &want) < 1e-3);
        inputs.qkv[setup.place(0, 0, 100, 0)] = f32::NAN;
        let [out, lse, _] = results(&inputs, device);
        assert!(lse[100].is_nan() && out[400..404].iter().all(|x| x.is_nan()));
        assert!(lse.iter().filter(|x| x.is_nan()).count() == 1, "a query affects only its own row");
    }

    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let masked = seed % 2 == 1;
            let setup = Setup {
                batch: 2,
                tokens: if seed == 0 { 1 } else { random.extent(2, 9) },
                heads: [[1, 1], [4, 2], [2, 2], [3, 1], [2, 1], [2, 2]][seed as usize],
                width: [4, 8, 16, 8, 12, 4][seed as usize],
                stacked: seed % 3 == 2,
                sees: [AttentionMask::Full, AttentionMask::Causal, AttentionMask::Full, window(3), AttentionMask::Causal, window(2)][seed as usize],
                masks: [masked, masked],
            };
            let inputs = Inputs::new(setup);
            let operands = vec![normal(&mut random, &setup.shape().as_rows())];
            let case = Case::new("flash attention", seed, longest(&[setup.width, 2 * setup.tokens * setup.heads[0]]), operands);
            case.check(device, |step, tape, p| {
                let qkv = leaf(tape, p[0])?.reshape(setup.shape())?;
                tape.attention(&qkv, None, &inputs.form(|mask, shape| step.upload(mask, shape))?)
            }, |p| {
                let [out, ..] = inputs.float64(&p[0], &vec![0.0; setup.outputs()]);
                out
            });
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let form = AttentionConfig::new(4).kv_heads(2);
            macro_rules! refuse {
                ($shape:expr, $form:expr, $words:expr) => {
                    let qkv = trial.upload(&vec![1.0; $shape.iter().product()], $shape)?;
                    assert_refused(ops::attention(trial, &qkv, None, &$form), &$words);
                };
            }
            refuse!([1, 2, 36], form, ["attention", "[batch, tokens, 8 width]", "[1, 2, 36]"]);
            refuse!([3, 1, 2, 32], form, ["attention", "[batch, tokens, 8 width]", "[3, 1, 2, 32]"]);
            refuse!([2, 1, 2, 32], form.kv_heads(4), ["attention", "[3, batch, tokens, 4 width]", "[2, 1, 2, 32]"]);
            refuse!([1, 0, 32], form, ["attention", "tokens at least 1", "[1, 0, 32]"]);
            refuse!([1, 2, 48], form, ["attention", "a multiple of 4 columns", "6 columns"]);
            refuse!([1, 1, 780], AttentionConfig::new(1), ["attention", "up to 256", "260 columns"]);
            refuse!([1, 2, 32], form.kv_heads(3), ["attention", "divides", "heads 4, kv_heads 3"]);
            refuse!([1, 2, 32], form.kv_heads(0), ["attention", "divides", "heads 4, kv_heads 0"]);
            refuse!([1, 2, 32], AttentionConfig::new(0), ["attention", "at least one", "heads 0"]);
            let mask = trial.upload(&[0, 0, 0], [3])?.save();
            refuse!([1, 2, 32], form.documents(mask), ["attention", "documents of shape [1, 2]", "[3]"]);
            refuse!([1, 2, 32], form.lengths(mask), ["attention", "lengths of shape [1]", "[3]"]);
            Ok(())
        });
        backward_refuses(device);
    }
}

fn backward_refuses(device: &Device) {
    trial(device, |trial| {
        let form = AttentionConfig::new(1);
        let [qkv, short] = [[1, 2, 192], [1, 1, 192]].map(|shape| trial.upload(&vec![1.0; shape[1] * 192], shape));
        let [dout, other] = [[1, 2, 64], [2, 1, 64]].map(|shape| trial.upload(&[1.0; 128], shape));
        let (qkv, short, dout, other) = (qkv?, short?, dout?, other?);
        let out = trial.upload(&[1.0; 128], [1, 2, 64])?.save();
        let [lse, few] = [2, 1].map(|tokens| trial.upload(&vec![1.0; tokens], [1, 1, tokens]));
        let (lse, few) = (lse?.save(), few?.save());
        let made = |lse| Attention { out, kept: AttentionKept::Flash { lse, normal: None } };
        macro_rules! refuse {
            ($qkv:expr, $form:expr, $made:expr, $dout:expr, $words:expr) => {
                assert_refused(backward(trial, $qkv, &$form, &$made, $dout), $words)
            };
        }
        refuse!(&qkv, form, made(lse), &other, &["attention_backward", "[1, 2, 64]", "[2, 1, 64]"]);
        refuse!(&short, form, made(lse), &dout, &["attention_backward", "[1, 1, 64]", "[1, 2, 64]"]);
        refuse!(&qkv, form, made(few), &dout, &["attention_backward", "[1, 1, 2]", "[1, 1, 1]"]);
        let kept = AttentionKept::Short { probabilities: lse, inverse_rms: lse };
        refuse!(&qkv, form, Attention { out, kept }, &dout, &["attention_backward", "without a norm", "Short"]);
        let normal = Some((out, lse));
        let kept = AttentionKept::Flash { lse, normal };
        refuse!(&qkv, form, Attention { out, kept }, &dout, &["attention_backward", "without a norm", "normal"]);
        let mut dgains = trial.upload(&[1.0; 128], [2, 64])?;
        let gains = trial.upload(&[1.0; 128], [2, 64])?;
        let norm = Some((QkNorm::new(&gains, 0.1), &mut dgains, false));
        let refused = ops::launch::attention_backward(trial, &qkv, norm, &form, &made(lse), &dout);
        assert_refused(refused, &["attention_backward", "with a norm", "normal: None"]);
        Ok(())
    });
}

attack! {
    flash_attention::flash_forward by shape {
        qkv: f32s 128, documents: u32s 8, lengths: u32s 0, layout: qkv [4, 2, 1, 4, 0], window: number 3, scale: float 0.5, out: out 64, lse: out 16,
    }
    flash_attention::flash_bwd_dq by shape {
        qkv: f32s 128, documents: u32s 8, lengths: u32s 0, lse: f32s 16, delta: f32s 16, dout: f32s 64, layout: qkv [4, 2, 1, 4, 0], window: number 3, scale: float 0.5, dqkv: out 128,
    }
    flash_attention::flash_bwd_dkv by shape {
        qkv: f32s 128, documents: u32s 8, lengths: u32s 0, lse: f32s 16, delta: f32s 16, dout: f32s 64, layout: qkv [4, 2, 1, 4, 0], window: number 3, scale: float 0.5, dqkv: out 128,
    }
    flash_attention::flash_delta <S> {
        out: stored 64, dout: stored 64, tokens: number 4, heads: number 2, width: number 4, delta: out 16,
    }
}
