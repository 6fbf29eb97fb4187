//! Products of BF16 tensors: every tile, each operand layout, and the batches and strides of f32.
//! They are compared with float64 sums, and bit for bit if the sums are exact.

use crate::hostile::attack;
use crate::matmul_case::{Case, VARIANTS, Variant};
use crate::reference::gelu_derivative;
use crate::support::{Random, narrow, on_each_device};
use crate::trial::{Trial, assert_refused, assert_same, trial};
use cuda_std::launch::{Contract as _, PointerMut, Slice};
use kernels::activations::Activations as _;
use kernels::matmul::{EpilogueForm, ProductExtents};
use kernels::matmul::{GELU, GELU_DERIVATIVE, STORE_PREACT, SWIGLU, TRANSPOSE_A, TRANSPOSE_B, sum_splits};
use kernels::matmul_bf16::{OperandLayout, matmul_bf16};
use kernels::stored::Stored as _;
use stepscope::tensor::{Saved, Source, Stored, Target};
use stepscope::{Arena, Capacity, Device, Result, bf16, ops};

/// Extents with tails of every kind: less than a tile, a chunk, a stage; rows of 16 bytes and
/// others.
const EXTENTS: [[usize; 3]; 8] = [
    [1, 1, 1],
    [3, 8, 5],
    [64, 64, 32],
    [65, 130, 40],
    [128, 72, 129],
    [130, 260, 96],
    [17, 300, 200],
    [256, 256, 160],
];

/// Batches and rows that begin at multiples of 16 bytes, and others. All batches share B if its
/// rows are padded. One has no alpha.
const LAYOUTS: [Variant; 4] = [
    Variant { pads: [0, 0, 0], batches: 3, scales: [0.5, 1.0], bias: true, flags: 0 },
    Variant { pads: [8, 16, 8], batches: 2, scales: [1.0, 0.0], bias: false, flags: 0 },
    Variant { pads: [3, 1, 2], batches: 2, scales: [0.3, 0.5], bias: true, flags: 0 },
    Variant { pads: [0, 0, 4], batches: 2, scales: [0.0, -0.5], bias: false, flags: 0 },
];

/// The layouts of A and B.
const FORMS: [[bool; 2]; 4] = [[false, false], [true, false], [false, true], [true, true]];

/// Returns random BF16 values, or whole ones from -4 to 4 if sums must be exact.
pub(crate) fn numbers(seed: u64, length: usize, whole: bool) -> Vec<bf16> {
    let mut random = Random::new(seed);
    let values = random.normals(length);
    values.into_iter().map(|x| bf16::narrow(if whole { (2.0 * x).round().clamp(-4.0, 4.0) } else { x })).collect()
}

/// Returns the product in float64, and the sum of the magnitudes of its terms.
fn reference([m, n, k]: [usize; 3], [across_a, across_b]: [bool; 2], a: &[bf16], b: &[bf16]) -> Vec<[f64; 2]> {
    let a = |i: usize, p: usize| f64::from(a[if across_a { p * m + i } else { i * k + p }]);
    let b = |p: usize, j: usize| f64::from(b[if across_b { j * k + p } else { p * n + j }]);
    let sum =
        |i, j| (0..k).fold([0.0; 2], |[sum, size], p| [sum + a(i, p) * b(p, j), size + (a(i, p) * b(p, j)).abs()]);
    (0..m * n).map(|at| sum(at / n, at % n)).collect()
}

pub(crate) fn form([m, n, k]: [usize; 3], [across_a, across_b]: [bool; 2], tile: ops::Bf16Tile) -> ops::Gemm {
    let form = ops::Gemm { bf16_tile: Some(tile), ..ops::Gemm::new(m, n, k) };
    let form = if across_a { form.transpose_a() } else { form };
    if across_b { form.transpose_b() } else { form }
}

pub(crate) fn product<S: Stored>(device: &Device, form: &ops::Gemm, a: &[bf16], b: &[bf16]) -> Vec<f32> {
    let run = |trial: &Trial<'_, '_>| {
        let (a, b) = (trial.upload(a, [a.len()])?, trial.upload(b, [b.len()])?);
        let mut out = trial.empty::<S>([form.m, form.n])?;
        trial.with_scratch(|| ops::gemm_into(trial, form, &a, &b, None::<&Saved<'_>>, &mut out))?;
        Ok(trial.output(&out)?.into_iter().map(S::widen).collect())
    };
    trial(device, run)
}

/// Gives an f32 case whole factors from -4 to 4 and BF16 values in C. Then the order of sums does
/// not change the bits.
fn whole(case: Case) -> Case {
    let each = |values: Vec<f32>, f: fn(f32) -> f32| values.into_iter().map(f).collect();
    let factor = |x: f32| (4.0 * x).round().clamp(-4.0, 4.0);
    let [a, b] = [case.a, case.b].map(|values| each(values, factor));
    Case { a, b, old: each(case.old, |x| bf16::narrow(x).widen()), ..case }
}

/// Returns the output of a case, which held `old`, stored as S.
fn gemm<S: Stored>(device: &Device, case: &Case, tile: ops::Bf16Tile) -> Vec<f32> {
    let form = ops::Gemm { bf16_tile: Some(tile), ..case.form };
    trial(device, |trial| {
        let [a, b] = [&case.a, &case.b].map(|values| trial.upload(&narrow::<bf16>(values), [values.len()]));
        let (a, b, bias) = (a?, b?, trial.upload(&case.bias, [case.bias.len()])?);
        let mut out = trial.upload(&narrow::<S>(&case.old), [case.old.len()])?;
        let bias = (!case.bias.is_empty()).then_some(&bias);
        let ops::Gemm { m, n, k, batches, .. } = form;
        let split_k = k.div_ceil(kernels::matmul_bf16::k_per_split(m, n, k));
        trial.with_scratch(|| {
            ops::gemm_into(trial, &form, &a, &b, bias, &mut out)?;
            // The sums of splits were in memory that is freed by now: the trial must account for
            // it.
            (split_k > 1).then(|| trial.empty::<f32>([batches * split_k, m, n])).transpose()
        })?;
        Ok(trial.output(&out)?.into_iter().map(S::widen).collect())
    })
}

/// Checks that every tile gives the bits of f32's chain, and with BF16 outputs these bits rounded.
fn assert_exact(device: &Device, case: &Case) {
    let [want, _] = case.chain();
    let rounded: Vec<f32> = want.iter().map(|&x| bf16::narrow(x).widen()).collect();
    for tile in ops::BF16_TILES {
        assert_same(format_args!("{:?}, {tile:?}", case.form), &gemm::<f32>(device, case, tile), &want);
        assert_same(format_args!("{:?}, {tile:?}, BF16", case.form), &gemm::<bf16>(device, case, tile), &rounded);
    }
}

on_each_device! {
    /// Batches, one B for all of them, padded rows, alpha, beta and bias, as for f32 products; k in
    /// one split and in two.
    fn batches_strides_and_scales(device: &Device) {
        let plain = VARIANTS.into_iter().filter(|variant| variant.flags == 0);
        let variants: Vec<Variant> = plain.chain(LAYOUTS).collect();
        let shapes: [([usize; 3], &[Variant]); 5] = [
            ([1, 1, 1], &variants),
            ([3, 4, 0], &LAYOUTS),
            ([65, 40, 33], &variants),
            ([20, 136, 72], &variants),
            ([12, 20, 1056], &LAYOUTS[2..3]),
        ];
        for (shape, variants) in shapes {
            for (form, transpose) in [0, TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_A | TRANSPOSE_B].into_iter().enumerate() {
                // Each variant with each shape in two of the forms.
                for &variant in variants.iter().skip(form % 2).step_by(2) {
                    let mut case = Case::new(shape, transpose, variant);
                    if LAYOUTS.contains(&variant) {
                        // Batches no longer overlap by one element, so that rows may be read as
                        // vectors.
                        let (rows, ld) = (if case.form.transpose_a { shape[2] } else { shape[0] }, case.form.lda);
                        case.form.stride_a = rows * ld;
                        case.a = Random::new(9).uniforms(variant.batches * rows * ld, -0.5, 1.0);
                    }
                    assert_exact(device, &whole(case));
                }
            }
        }
        for shape in [[5, 9, 6], [70, 16, 64]] {
            assert_exact(device, &whole(Case::interleaved(shape, 4)));
        }
    }

    /// The old content is not read if beta is 0: a NaN there disappears.
    fn beta_zero_overwrites(device: &Device) {
        let mut case = whole(Case::new([40, 70, 17], 0, VARIANTS[0]));
        case.old.fill(f32::NAN);
        assert!(case.chain()[0].iter().all(|x| x.is_finite()));
        assert_exact(device, &case);
    }

    /// The order of sums of whole numbers does not change the bits. Every tile and layout has
    /// those of the exact sums.
    fn exact_sums_match_bits(device: &Device) {
        for extents in EXTENTS {
            let [m, n, k] = extents;
            let (a, b) = (numbers(1, m * k, true), numbers(2, k * n, true));
            for across in FORMS {
                let want: Vec<f32> = reference(extents, across, &a, &b).into_iter().map(|[sum, _]| sum as f32).collect();
                let rounded: Vec<f32> = want.iter().map(|&x| bf16::narrow(x).widen()).collect();
                for tile in ops::BF16_TILES {
                    let form = form(extents, across, tile);
                    assert_same(format!("{extents:?} {across:?} {tile:?}"), &product::<f32>(device, &form, &a, &b), &want);
                    assert_same(format!("{extents:?} {across:?} {tile:?}"), &product::<bf16>(device, &form, &a, &b), &rounded);
                }
            }
        }
    }

    /// Errors are within k 2^-22 of the sum of the magnitudes, and every tile gives the same bits.
    fn sums_are_within_the_bound(device: &Device) {
        for extents in EXTENTS {
            let [m, n, k] = extents;
            let (a, b) = (numbers(3, m * k, false), numbers(4, k * n, false));
            let want = reference(extents, [false, false], &a, &b);
            let of_tiles = ops::BF16_TILES.map(|tile| product::<f32>(device, &form(extents, [false, false], tile), &a, &b));
            for got in &of_tiles {
                assert_same(format!("{extents:?}"), got, &of_tiles[0]);
                for (&got, [sum, size]) in got.iter().zip(&want) {
                    let bound = k as f64 * f64::from(2.0f32.powi(-22)) * size;
                    assert!((f64::from(got) - sum).abs() <= bound, "{extents:?}: {got} for {sum}, bound {bound}");
                }
            }
        }
    }

    /// Bias, residual, activations and their kept inputs, a gate, and k in splits: the same as
    /// separate steps on f32 sums.
    fn epilogues_match_separate_steps(device: &Device) {
        let [m, n, k] = [48, 72, 2100];
        let (x, w) = (numbers(5, m * k, true), numbers(6, k * n, true));
        let (residual, bias) = (numbers(7, m * n, true), Random::new(8).normals(n));
        let sums: Vec<f32> = reference([m, n, k], [false, false], &x, &w).into_iter().map(|[sum, _]| sum as f32).collect();
        assert!(kernels::matmul_bf16::k_per_split(m, n, k) < k);
        let round = |x: f32| bf16::narrow(x).widen();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap();
        let [linear, kept, gelu, silu, gated] = arena
            .step(|step| {
                let (x, w) = (step.upload(&x, [m, k])?, step.upload(&w, [k, n])?);
                let (residual, bias) = (step.upload(&residual, [m, n])?, step.upload(&bias, [n])?);
                let linear = ops::linear_residual(step, &x, &w, Some(&bias), &residual)?;
                let (gelu, pre) = ops::linear_gelu(step, &x, &w, Some(&bias))?;
                let (silu, _) = ops::linear_silu(step, &x, &w, Some(&bias))?;
                let (gated, up) = ops::linear_swiglu(step, &x, &w, Some(&bias), &residual)?;
                assert_eq!(step.read(&up)?, step.read(&pre)?);
                Ok([step.read(&linear)?, step.read(&pre)?, step.read(&gelu)?, step.read(&silu)?, step.read(&gated)?])
            })
            .unwrap()
            .map(|values| values.into_iter().map(f32::from).collect::<Vec<_>>());
        let with_bias = |at: usize| sums[at] + bias[at % n];
        let of = |f: &dyn Fn(usize) -> f32| (0..m * n).map(|at| round(f(at))).collect::<Vec<f32>>();
        assert_same("linear_residual", &linear, &of(&|at| 1.0f32.mul_add(residual[at].widen(), with_bias(at))));
        assert_same("pre", &kept, &of(&with_bias));
        assert_same("gelu", &gelu, &of(&|at| bf16::gelu(with_bias(at))));
        assert_same("silu", &silu, &of(&|at| bf16::silu(with_bias(at))));
        assert_same("gated", &gated, &of(&|at| bf16::silu(residual[at].widen()) * with_bias(at)));
    }

    /// Each tile multiplies its sums by gelu' of the values at their place, here in place, in
    /// padded rows of two batches. It keeps the sums. The sums are exact, and so are the bits.
    fn gelu_derivative_epilogue_is_exact(device: &Device) {
        for ([m, n, k], pad, flags) in [([5, 9, 6], 3, 0), ([70, 132, 40], 4, STORE_PREACT), ([129, 260, 33], 0, STORE_PREACT)] {
            let (a, b) = (numbers(1, 2 * m * k, true), numbers(2, 2 * k * n, true));
            let (stride_c, bias) = (m * (n + pad), Random::new(8).normals(n));
            let old = numbers(3, 2 * stride_c, false);
            let [mut want, mut sums] = [old.clone(), old.clone()].map(|values| values.into_iter().map(f32::from).collect::<Vec<_>>());
            for z in 0..2 {
                let exact = reference([m, n, k], [false, true], &a[z * m * k..], &b[z * k * n..]);
                for (at, [sum, _]) in exact.into_iter().enumerate() {
                    let place = z * stride_c + at / n * (n + pad) + at % n;
                    let sum = sum as f32 * 0.5 + bias[at % n];
                    want[place] = bf16::narrow(bf16::gelu_derivative(old[place].widen()) * sum).widen();
                    sums[place] = if flags & STORE_PREACT == 0 { sums[place] } else { bf16::narrow(sum).widen() };
                }
            }
            for tile in ops::BF16_TILES {
                let [out, pre] = trial(device, |trial| {
                    let (a, b) = (trial.upload(&a, [a.len()])?, trial.upload(&b, [b.len()])?);
                    let (bias, mut pre) = (trial.upload(&bias, [n])?, trial.upload(&old, [old.len()])?);
                    let mut out = trial.upload(&old, [old.len()])?;
                    let (c, written) = out.in_place();
                    trial.launch(matmul_bf16 {
                        variant: (OperandLayout::Plain, tile),
                        a: a.slice(),
                        b: b.slice(),
                        bias: bias.slice(),
                        c,
                        out: written,
                        pre: pre.out(),
                        sums: PointerMut::empty(),
                        extents: ProductExtents { m: m as u32, n: n as u32, k: k as u32, k_per_split: k as u32, batches: 2 },
                        lda: k as u32,
                        ldb: k as u32,
                        stride_a: m * k,
                        stride_b: k * n,
                        epilogue: EpilogueForm { stride_c, stride_bias: 0, ldc: (n + pad) as u32, alpha: 0.5, beta: 0.0, flags: flags | TRANSPOSE_B | GELU_DERIVATIVE },
                    })?;
                    Ok([trial.output(&out)?, trial.output(&pre)?].map(|values| values.into_iter().map(f32::from).collect::<Vec<_>>()))
                });
                assert_same(format!("{m} x {n}, k {k}, {tile:?}"), &out, &want);
                assert_same(format!("{m} x {n}, k {k}, {tile:?}, kept"), &pre, &sums);
            }
        }
    }

    /// Each element is exact up to three errors: one BF16 rounding (2^-8 of it), that of its sum (k
    /// 2^-22 of the magnitudes), and that of the derivative (2^-15 of it, and 2^-18 near its root).
    /// Separate product and derivative would round three times. Runs k in one split and in several.
    fn gelu_linear_backward_rounds_once(device: &Device) {
        for [rows, hidden, n] in [[1, 1, 1], [3, 8, 5], [65, 130, 40], [33, 72, 129], [40, 36, 2100]] {
            let (dy, w) = (numbers(5, rows * n, false), numbers(6, hidden * n, false));
            let pre = numbers(7, rows * hidden, false);
            let k_per_split = kernels::matmul_bf16::k_per_split(rows, hidden, n);
            assert_eq!(k_per_split < n, n > 1024, "{rows} x {hidden}, k {n}");
            let [fused, apart] = trial(device, |trial| {
                let (dy, w) = (trial.upload(&dy, [rows, n])?, trial.upload(&w, [hidden, n])?);
                let pre = trial.upload(&pre, [rows, hidden])?;
                // Sums of splits and copies of operands for `wgmma` were in memory that is freed by
                // now.
                let account = || {
                    trial.empty::<bf16>([(rows + hidden) * n.next_multiple_of(8) + 512])?;
                    (k_per_split < n).then(|| trial.empty::<f32>([n.div_ceil(k_per_split), rows, hidden])).transpose()
                };
                let dpre = trial.with_scratch(|| {
                    let dpre = ops::launch::gelu_linear_backward(trial, &pre, &w, &dy)?;
                    account()?;
                    Ok(dpre)
                })?;
                let apart = trial.with_scratch(|| {
                    let mut dh = trial.empty([rows, hidden])?;
                    let form = ops::Gemm::new(rows, hidden, n).transpose_b();
                    ops::gemm_into(trial, &form, &dy, &w, None::<&Saved<'_>>, &mut dh)?;
                    account()?;
                    ops::launch::gelu_backward(trial, &pre, &dh)
                })?;
                Ok([trial.output(&dpre)?, trial.output(&apart)?].map(|values| values.into_iter().map(f64::from).collect::<Vec<_>>()))
            });
            let [rounding, of_sum, of_derivative, near_root] = [8, 22, 15, 18].map(|bits| 2f64.powi(-bits));
            for (at, [sum, size]) in reference([rows, hidden, n], [false, true], &dy, &w).into_iter().enumerate() {
                let derivative = gelu_derivative(pre[at].into());
                let exact = sum * derivative;
                let off = derivative.abs() * n as f64 * of_sum * size + (of_derivative * derivative.abs() + near_root) * sum.abs();
                let bound = 1.01 * off + rounding * exact.abs();
                assert!((fused[at] - exact).abs() <= bound, "{at} of {rows} x {hidden}, k {n}: {} for {exact}", fused[at]);
                let between = 3.01 * rounding * exact.abs() + 2.02 * off;
                assert!((fused[at] - apart[at]).abs() <= between, "{at} of {rows} x {hidden}, k {n}: {} and {}", fused[at], apart[at]);
            }
            // A separate rounding in between changes some number.
            assert!(rows * hidden < 100 || fused != apart, "{rows} x {hidden}, k {n}");
        }
    }

    /// The epilogue requires a BF16 product without another activation, to which nothing is added.
    /// `c` is as large as the output, and nothing follows a split's sum.
    fn gelu_derivative_needs_suitable_product(device: &Device) {
        fn launches<S: Stored>(trial: &Trial<'_, '_>, k_per_split: u32, flags: u32, beta: f32, c: usize) -> Result<[Result<()>; 2]> {
            let (halves, partials) = (trial.upload(&[bf16::ONE; 64], [64])?, trial.upload(&[1.0; 16], [16])?);
            let (c, mut out) = (trial.upload(&vec![S::narrow(1.0); c], [c])?, trial.empty::<S>([16])?);
            let product = trial.launch(matmul_bf16 {
                variant: (OperandLayout::Plain, ops::BF16_TILES[0]),
                a: halves.slice(),
                b: halves.slice(),
                bias: Slice::empty(),
                c: c.pointer(),
                out: out.out(),
                pre: PointerMut::empty(),
                sums: PointerMut::empty(),
                extents: ProductExtents { m: 2, n: 4, k: 8, k_per_split, batches: 1 },
                lda: 8,
                ldb: 4,
                stride_a: 16,
                stride_b: 32,
                epilogue: EpilogueForm { stride_c: 8, stride_bias: 4, ldc: 4, alpha: 1.0, beta, flags },
            });
            let sum = trial.launch(sum_splits {
                partials: partials.slice(),
                bias: Slice::empty(),
                c: c.pointer(),
                out: out.out(),
                pre: PointerMut::empty(),
                extents: ProductExtents { m: 2, n: 4, k: 2, k_per_split: 1, batches: 1 },
                epilogue: EpilogueForm { stride_c: 8, stride_bias: 4, ldc: 4, alpha: 1.0, beta, flags },
            });
            Ok([product, sum])
        }
        trial(device, |trial| {
            for (flags, beta, c, argument) in [
                (GELU_DERIVATIVE | GELU, 0.0, 8, "flags"),
                (GELU_DERIVATIVE | SWIGLU, 0.0, 8, "flags"),
                (GELU_DERIVATIVE, 1.0, 8, "beta"),
                (GELU_DERIVATIVE, 0.0, 7, "c"),
            ] {
                for refused in launches::<bf16>(trial, 8, flags, beta, c)? {
                    assert_refused(refused, &["_bf16`", &format!("`{argument}`: expected")]);
                }
            }
            for refused in launches::<f32>(trial, 8, GELU_DERIVATIVE, 0.0, 8)? {
                assert_refused(refused, &["_f32`", "`flags`: expected a derivative only with BF16 storage"]);
            }
            let [refused, _] = launches::<f32>(trial, 4, GELU_DERIVATIVE, 0.0, 8)?;
            assert_refused(refused, &["`k_per_split`: expected"]);
            Ok(())
        });
    }

    fn extents_must_agree(device: &Device) {
        trial(device, |trial| {
            let (pre, w) = (trial.upload(&[bf16::ONE; 12], [3, 4])?, trial.upload(&[bf16::ONE; 8], [4, 2])?);
            let dy = trial.upload(&[bf16::ONE; 6], [3, 2])?;
            const OP: &str = "gelu_linear_backward";
            assert_refused(ops::launch::gelu_linear_backward(trial, &dy, &w, &dy), &[OP, "[.., 4]", "[4, 2]", "[3, 2]"]);
            assert_refused(ops::launch::gelu_linear_backward(trial, &pre, &w, &pre), &[OP, "[3, 2]", "[3, 4]"]);
            assert_refused(ops::launch::gelu_linear_backward(trial, &pre, &w.reshape([2, 2, 2])?, &dy), &[OP, "[in, out]", "[2, 2, 2]"]);
            let (x, w) = (trial.upload(&[bf16::ONE; 12], [3, 4])?, trial.upload(&[bf16::ONE; 10], [5, 2])?);
            assert_refused(ops::linear(trial, &x, &w, None::<&Saved<'_>>), &["[.., 5]", "[3, 4]"]);
            Ok(())
        });
    }
}

attack! {
    matmul_bf16::matmul_bf16 by variant <S> {
        a: halves 98, b: halves 84, bias: f32s 12, c: stored_pointer 60, out: out_stored 60, pre: out_stored 60,
        sums: out 12, extents: product [5, 6, 7, 7, 2], lda: number 7, ldb: number 6, stride_a: number 49,
        stride_b: number 42, epilogue: epilogue ([30, 6], 6, [0.5, 1.0], 12),
    }
}
