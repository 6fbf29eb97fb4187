//! Tests of `ops::qk_norm` and its backward pass, and of attention after a norm.

use crate::gradients::{Case, SEEDS, leaf, longest, normal, stack};
use crate::hostile::attack;
use crate::support::{Random, on_each_device, relative_l2, tolerance};
use crate::trial::{assert_refused, assert_same, trial};
use crate::{flash_reference, norm};
use stepscope::Tensor;
use stepscope::ops::launch::AttentionKept;
use stepscope::ops::{self, AttentionConfig, QkNorm};
use stepscope::tensor::Shape;

const EPSILON: f32 = 1e-5;

/// Heads and key heads, width, batch and tokens, and the stacked flag. Rows take one lane up to 16,
/// one chunk of rows and several.
const FORMS: [([usize; 2], usize, [usize; 2], bool); 7] = [
    ([1, 1], 4, [1, 1], false),
    ([2, 1], 32, [3, 5], false),
    ([1, 1], 64, [2, 3], true),
    ([4, 2], 80, [1, 30], false),
    ([2, 2], 128, [2, 40], true),
    ([6, 1], 256, [1, 50], false),
    ([3, 3], 64, [0, 4], true),
];

fn shape_of([heads, kv_heads]: [usize; 2], width: usize, [batch, tokens]: [usize; 2], stacked: bool) -> Shape {
    if stacked {
        [3, batch, tokens, heads * width].into()
    } else {
        [batch, tokens, (heads + 2 * kv_heads) * width].into()
    }
}

/// Returns the part of a row: q (0), k or v.
fn part([heads, kv_heads]: [usize; 2], stacked: bool, rows: usize, row: usize) -> usize {
    if stacked {
        return row / (rows / 3);
    }
    let head = row % (heads + 2 * kv_heads);
    usize::from(head >= heads) + usize::from(head >= heads + kv_heads)
}

/// Computes the norms in float64.
fn in_float64(x: &[f64], gains: &[f64], heads: [usize; 2], width: usize, stacked: bool, epsilon: f64) -> Vec<f64> {
    let row = |(row, values): (usize, &[f64])| match part(heads, stacked, x.len() / width, row) {
        2 => values.to_vec(),
        part => norm::in_float64(values, &gains[part * width..][..width], epsilon),
    };
    x.chunks_exact(width).enumerate().flat_map(row).collect()
}

on_each_device! {
    /// The bits are those of RMSNorm over the rows of q and over those of k; v is unchanged.
    fn qk_norm_matches_two_norms(device: &Device) {
        for (heads, width, batch, stacked) in FORMS {
            let shape = shape_of(heads, width, batch, stacked);
            let mut random = Random::new(width as u64);
            let (x, dy) = (random.normals(shape.elements()), random.normals(shape.elements()));
            let gains = random.uniforms(2 * width, 0.5, 1.5);
            let rows = shape.elements() / width;
            let (y, scales, dx, dgains) = trial(device, |trial| {
                let form = AttentionConfig::new(heads[0]).kv_heads(heads[1]);
                let (x, gains) = (trial.upload(&x, shape)?, trial.upload(&gains, [2, width])?);
                let (dy, mut dgains) = (trial.upload(&dy, shape)?, trial.upload(&vec![f32::NAN; 2 * width], [2, width])?);
                let norm = QkNorm::new(&gains, EPSILON);
                let (y, scales) = ops::qk_norm(trial, &x, norm, &form)?;
                let (y, inverse_rms) = (trial.output(&y)?, trial.output(&scales)?);
                let dx = trial.with_scratch(|| {
                    ops::launch::qk_norm_backward(trial, &x, norm, &form, &scales, dy, &mut dgains, false)
                })?;
                Ok((y, inverse_rms, trial.output(&dx)?, trial.output(&dgains)?))
            });
            for wanted in 0..3 {
                let of = |values: &[f32], each: usize| -> Vec<f32> {
                    let rows = (0..rows).filter(|&row| part(heads, stacked, rows, row) == wanted);
                    rows.flat_map(|row| values[row * each..][..each].to_vec()).collect()
                };
                let what = format!("{shape}, part {wanted}");
                if wanted == 2 {
                    assert_same(&what, &of(&y, width), &of(&x, width));
                    assert_same(&what, &of(&dx, width), &of(&dy, width));
                    continue;
                }
                let own = of(&scales, 1).len();
                let gain = &gains[wanted * width..][..width];
                let [want_y, want_scales, want_dx, want_dgain] = trial(device, |trial| {
                    let (x, gain) = (trial.upload(&of(&x, width), [own, width])?, trial.upload(gain, [width])?);
                    let dy = trial.upload(&of(&dy, width), [own, width])?;
                    let mut dgain = trial.upload(&vec![0.0; width], [width])?;
                    let (y, scales) = ops::rms_norm(trial, &x, &gain, EPSILON)?;
                    let (y, inverse_rms) = (trial.output(&y)?, trial.output(&scales)?);
                    let dx = trial.with_scratch(|| {
                        ops::launch::rms_norm_backward(trial, &x, &gain, &scales, &dy, None, &mut dgain, false)
                    })?;
                    Ok([y, inverse_rms, trial.output(&dx)?, trial.output(&dgain)?])
                });
                assert_same(&what, &of(&y, width), &want_y);
                assert_same(&what, &of(&scales, 1), &want_scales);
                assert_same(&what, &of(&dx, width), &want_dx);
                // The rows are summed in another order.
                let want: Vec<f64> = want_dgain.iter().map(|&x| f64::from(x)).collect();
                assert!(relative_l2(&dgains[wanted * width..][..width], &want) <= tolerance(rows), "{what}");
            }
        }
    }

    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let (heads, width, batch, stacked) = FORMS[seed as usize];
            let shape = shape_of(heads, width, batch, stacked);
            let operands = vec![normal(&mut random, &shape.as_rows()), stack(&mut random, 2, &[width])];
            let case = Case { sample: 50, ..Case::new("qk_norm", seed, longest(&[width, shape.elements() / width]), operands) };
            case.check(device, |_, tape, p| {
                let qkv = leaf(tape, p[0])?.reshape(shape)?;
                tape.qk_norm(&qkv, &p.stacks[1], 0.1, &AttentionConfig::new(heads[0]).kv_heads(heads[1]))
            }, |p| in_float64(&p[0], &p[1], heads, width, stacked, f64::from(0.1f32)));
        }
    }

    /// Attention with a norm, in shapes that the kernel for few tokens does not support.
    fn gradient_with_attention(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let (heads, width) = [([1, 1], 4), ([2, 1], 32), ([2, 2], 8)][seed as usize % 3];
            let (batch, stacked) = ([2, random.extent(1, 5)], seed % 3 == 2);
            let shape = shape_of(heads, width, batch, stacked);
            let operands = vec![normal(&mut random, &shape.as_rows()), stack(&mut random, 2, &[width])];
            let length = longest(&[width, shape.elements() / width]);
            let case = Case { sample: 60, ..Case::new("attention with a norm", seed, length, operands) };
            case.check(device, |_, tape, p| {
                let qkv = leaf(tape, p[0])?.reshape(shape)?;
                let form = AttentionConfig::new(heads[0]).kv_heads(heads[1]).causal();
                tape.attention(&qkv, Some((&p.stacks[1], 0.1)), &form)
            }, |p| {
                let normed = in_float64(&p[0], &p[1], heads, width, stacked, f64::from(0.1f32));
                flash_reference::causal_in_float64(&normed, heads, width, batch, stacked)
            });
        }
    }

    /// The kernel for few tokens agrees with those for any number. The config decides which one
    /// runs.
    fn short_kernel_agrees(device: &Device) {
        let shape = [3, 2, 12, 128];
        let mut random = Random::new(5);
        let (x, gains) = (random.normals(shape.iter().product()), random.uniforms(128, 0.5, 1.5));
        let (dout, lengths) = (random.normals(2 * 12 * 128), [12, 12]);
        let run = |masked: bool| {
            trial(device, |trial| {
                let (x, gains) = (trial.upload(&x, shape)?, trial.upload(&gains, [2, 64])?);
                let (dout, mut dgains) = (trial.upload(&dout, [2, 12, 128])?, trial.upload(&[0.0; 128], [2, 64])?);
                let lengths = trial.upload(&lengths, [2])?;
                let form = AttentionConfig::new(2);
                let form = if masked { form.lengths(lengths) } else { form };
                let norm = QkNorm::new(&gains, EPSILON);
                trial.with_scratch(|| {
                    let made = ops::attention(trial, &x, Some(norm), &form)?;
                    assert_eq!(matches!(made.kept, AttentionKept::Short { .. }), !masked);
                    let norm = Some((norm, &mut dgains, false));
                    let dqkv = ops::launch::attention_backward(trial, &x, norm, &form, &made, &dout)?;
                    let copies: [Tensor<'_>; 2] = [ops::copy(trial, &made.out)?, dqkv];
                    Ok(copies)
                })
                .and_then(|copies| Ok([trial.output(&copies[0])?, trial.output(&copies[1])?, trial.output(&dgains)?]))
            })
        };
        for (short, long) in run(false).iter().zip(run(true)) {
            let want: Vec<f64> = long.iter().map(|&x| f64::from(x)).collect();
            assert!(relative_l2(short, &want) <= tolerance(64), "{}", relative_l2(short, &want));
            assert!(*short != long, "the short and the long form must use different kernels");
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let form = AttentionConfig::new(2);
            let x = trial.upload(&[1.0; 48], [1, 1, 48])?;
            let [gains, few] = [16, 15].map(|length| trial.upload(&vec![1.0; length], [length]));
            let (gains, few) = (gains?, few?);
            let norm = |gains| QkNorm::new(gains, EPSILON);
            assert_refused(ops::qk_norm(trial, &x, norm(&few), &form), &["qk_norm", "16 gains", "[15]"]);
            let far = QkNorm { distance: Some(7), ..norm(&few) };
            assert_refused(ops::qk_norm(trial, &x, far, &form), &["qk_norm", "7 elements after", "[15]"]);
            let five = AttentionConfig::new(5);
            assert_refused(ops::qk_norm(trial, &x, norm(&gains), &five), &["qk_norm", "15 width", "[1, 1, 48]"]);
            let [scales, three] = [6, 3].map(|length| trial.upload(&vec![1.0; length], [length]));
            let (scales, three) = (scales?, three?);
            let mut dgains = trial.upload(&[1.0; 16], [16])?;
            for (gains, scales, dy, words) in [
                (&few, &scales, [1, 1, 48], ["qk_norm_backward", "16 gains", "[15]"]),
                (&gains, &three, [1, 1, 48], ["qk_norm_backward", "[6]", "[3]"]),
                (&gains, &scales, [1, 48, 1], ["qk_norm_backward", "[1, 1, 48]", "[1, 48, 1]"]),
            ] {
                let dy = trial.upload(&[1.0; 48], dy)?;
                let refused = ops::launch::qk_norm_backward(trial, &x, norm(gains), &form, scales, dy, &mut dgains, false);
                assert_refused(refused, &words);
            }
            Ok(())
        });
    }
}

attack! {
    qk_norm::qk_norm_forward <S> {
        x: stored 64, gains: f32s 12, layout: qkv [1, 2, 1, 4, 0], distance: number 8,
        epsilon: float 0.1, y: out_stored 64, inverse_rms: out 16,
    }
    qk_norm::qk_norm_backward <S> {
        x: stored 64, gains: f32s 12, inverse_rms: f32s 16, layout: qkv [1, 2, 1, 4, 0], distance: number 8, chunk: number kernels::row_chunk::chunk_of(16, 4), dx: out_stored 64, dgains: out 12,
    }
}
