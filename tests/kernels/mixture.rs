//! Mixtures of experts: tokens sorted by group and back, and products of groups of rows. They are
//! compared bit for bit with the host's order and with separate products of each group.

use crate::hostile::attack;
use crate::matmul_bf16::numbers;
use crate::support::{Random, on_each_device};
use crate::trial::{Trial, assert_refused, assert_same, trial};
use kernels::matmul::{EpilogueForm, ProductExtents, TRANSPOSE_A, TRANSPOSE_B};
use kernels::matmul_bf16::OperandLayout;
use kernels::matmul_grouped::{matmul_grouped, matmul_grouped_of_bf16};
use kernels::stored::Stored as _;
use stepscope::ops::{Gemm, group_by};
use stepscope::tensor::{Saved, Source, Stored, Target};
use stepscope::{Device, DeviceKind, Error, Result, Tensor, bf16, ops};

/// The rows of the groups: one row, empty groups, several tiles, one group that has all rows, and
/// many groups.
const SIZES: [&[usize]; 5] = [&[1], &[0, 5, 0, 131, 1, 0], &[64, 64, 200], &[0, 0, 0, 150], &[3; 40]];
/// Inputs and outputs of a group: vectors and single elements, less than a tile and several.
const LAYERS: [[usize; 2]; 3] = [[8, 16], [136, 72], [33, 5]];

/// A product of groups: `y = x w`, `dx = dy w^T` or `dw = x^T dy`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Direction {
    Forward,
    ToInputs,
    ToWeights,
}

/// A launch's extents and strides. The weights are `[inputs, groups * outputs]`.
struct Form {
    extents: ProductExtents,
    lda: u32,
    ldb: u32,
    epilogue: EpilogueForm,
    /// The elements of A, B and the output.
    lengths: [usize; 3],
}

impl Form {
    fn new(direction: Direction, [inputs, outputs]: [usize; 2], sizes: &[usize], beta: f32) -> Self {
        let (rows, groups) = (sizes.iter().sum::<usize>(), sizes.len());
        let all = groups * outputs;
        let [x, y, w] = [rows * inputs, rows * outputs, inputs * all];
        let ([m, n, k], [lda, ldb, ldc], flags, lengths) = match direction {
            Direction::Forward => ([rows, outputs, inputs], [inputs, all, outputs], 0, [x, w, y]),
            Direction::ToInputs => ([rows, inputs, outputs], [outputs, all, inputs], TRANSPOSE_B, [y, w, x]),
            Direction::ToWeights => ([inputs, outputs, rows], [inputs, outputs, all], TRANSPOSE_A, [x, y, w]),
        };
        let [m, n, k, batches, lda, ldb, ldc] = [m, n, k, groups, lda, ldb, ldc].map(|extent| extent as u32);
        let extents = ProductExtents { m, n, k, k_per_split: k.max(1), batches };
        let epilogue = EpilogueForm { stride_c: outputs, stride_bias: 0, ldc, alpha: 0.5, beta, flags };
        Self { extents, lda, ldb, epilogue, lengths }
    }

    /// Returns the product of one group, of which `rows` begin at `first`, and where its operands
    /// and its output begin.
    fn of_group(&self, group: usize, first: usize, rows: usize) -> (Gemm, [usize; 3]) {
        let ProductExtents { m, n, k, .. } = self.extents;
        let [m, n, k, lda, ldb, ldc] = [m, n, k, self.lda, self.ldb, self.epilogue.ldc].map(|extent| extent as usize);
        let EpilogueForm { stride_c, alpha, beta, flags, .. } = self.epilogue;
        let by_rows = flags & TRANSPOSE_A == 0;
        let form = Gemm { lda, ldb, ldc, alpha, beta, batches: 1, ..Gemm::default() };
        if by_rows {
            let form = Gemm { m: rows, n, k, transpose_b: flags & TRANSPOSE_B != 0, ..form };
            return (form, [first * lda, group * stride_c, first * ldc]);
        }
        (Gemm { m, n, k: rows, transpose_a: true, ..form }, [first * lda, first * ldb, group * stride_c])
    }
}

fn offsets(sizes: &[usize]) -> Vec<u32> {
    let mut next = 0;
    let mut offsets = vec![0];
    offsets.extend(sizes.iter().map(|size| {
        next += *size as u32;
        next
    }));
    offsets
}

/// Asserts that `launch` gives the bits of separate products, with elements of F and outputs of S.
fn check<F: Stored + ops::GemmElement<S>, S: Stored>(
    device: &Device,
    name: &str,
    directions: &[Direction],
    launch: impl Fn(&Trial<'_, '_>, &Form, [&Tensor<'_, F>; 2], &[u32], &mut Tensor<'_, S>) -> Result<()>,
) {
    for (&direction, sizes) in
        directions.iter().flat_map(|direction| SIZES.iter().map(move |sizes| (direction, *sizes)))
    {
        for (layer, beta) in LAYERS.into_iter().zip([0.0, 1.0, 0.5]) {
            let form = Form::new(direction, layer, sizes, beta);
            let narrow = |seed, length| -> Vec<F> {
                numbers(seed, length, false).into_iter().map(|value| F::narrow(value.widen())).collect()
            };
            let [a, b] = [narrow(3, form.lengths[0]), narrow(4, form.lengths[1])];
            let old: Vec<S> = Random::new(5).normals(form.lengths[2]).into_iter().map(S::narrow).collect();
            let [got, want] = trial(device, |trial| {
                let (a_all, b_all) = (trial.upload(&a, [a.len()])?, trial.upload(&b, [b.len()])?);
                let mut got = trial.upload(&old, [old.len()])?;
                launch(trial, &form, [&a_all, &b_all], &offsets(sizes), &mut got)?;
                let (mut want, mut first) = (old.clone(), 0);
                for (group, &rows) in sizes.iter().enumerate() {
                    let (product, starts) = form.of_group(group, first, rows);
                    let [a, b] = [&a[starts[0]..], &b[starts[1]..]].map(|values| trial.upload(values, [values.len()]));
                    let mut out = trial.upload(&want[starts[2]..], [want.len() - starts[2]])?;
                    ops::gemm_into(trial, &product, &a?, &b?, None::<&Saved<'_>>, &mut out)?;
                    want.splice(starts[2].., trial.output(&out)?);
                    first += rows;
                }
                Ok([trial.output(&got)?, want])
            });
            let [got, want] = [got, want].map(|values| values.into_iter().map(S::widen).collect::<Vec<f32>>());
            assert_same(format!("{name}, {direction:?}, {layer:?}, groups of {sizes:?}"), &got, &want);
        }
    }
}

/// Launches a kernel of groups.
macro_rules! launch {
    ($trial:ident, $kernel:ident { $choice:ident }, $form:ident, [$a:ident, $b:ident], $offsets:ident, $out:ident) => {{
        let offsets = $trial.upload($offsets, [$offsets.len()])?;
        $trial.launch($kernel {
            $choice,
            a: $a.slice(),
            b: $b.slice(),
            offsets: offsets.slice(),
            out: $out.out(),
            extents: $form.extents,
            lda: $form.lda,
            ldb: $form.ldb,
            stride_b: $form.epilogue.stride_c,
            epilogue: $form.epilogue,
        })
    }};
}

const ALL: [Direction; 3] = [Direction::Forward, Direction::ToInputs, Direction::ToWeights];

on_each_device! {
    fn f32_groups_equal_separate_products(device: &Device) {
        for &(name, tile) in matmul_grouped::VARIANTS {
            if name.ends_with("on_cpu") && device.description().kind != DeviceKind::Emulated {
                continue;
            }
            check::<f32, f32>(device, name, &ALL, |trial, form, [a, b], offsets, out| {
                launch!(trial, matmul_grouped { tile }, form, [a, b], offsets, out)
            });
        }
    }

    fn bf16_groups_equal_separate_products(device: &Device) {
        for &(name, variant, _) in matmul_grouped_of_bf16::<'_, f32>::VARIANTS {
            match variant.0 {
                OperandLayout::Plain => check::<bf16, bf16>(device, name, &ALL[..2], |trial, form, [a, b], offsets, out| {
                    launch!(trial, matmul_grouped_of_bf16 { variant }, form, [a, b], offsets, out)
                }),
                OperandLayout::Transposed => check::<bf16, f32>(device, name, &ALL[2..], |trial, form, [a, b], offsets, out| {
                    launch!(trial, matmul_grouped_of_bf16 { variant }, form, [a, b], offsets, out)
                }),
            }
        }
    }

    /// Offsets that descend, or lie past the last row, cause no access outside an argument.
    fn wrong_offsets_stay_inside(device: &Device) {
        for direction in ALL {
            for offsets in [[9, 3, 300, 2], [300, 300, 300, 300], [0, 0, 0, 0], [2, u32::MAX, 1, 70]] {
                let form = Form::new(direction, [24, 16], &[20, 30, 20], 0.0);
                let [a, b] = [0, 1].map(|at| Random::new(at as u64).normals(form.lengths[at]));
                trial(device, |trial| {
                    let (a, b) = (trial.upload(&a, [a.len()])?, trial.upload(&b, [b.len()])?);
                    let mut out = trial.upload(&vec![7.0; form.lengths[2]], [form.lengths[2]])?;
                    let offsets = &offsets[..];
                    let tile = matmul_grouped::VARIANTS[0].1;
                    launch!(trial, matmul_grouped { tile }, form, [a, b], offsets, out)?;
                    assert!(trial.output(&out)?.iter().all(|value| value.is_finite()));
                    Ok(())
                });
            }
        }
    }

    /// Rows are sorted by group, and by token within a group.
    fn groups_are_sorted_stably(device: &Device) {
        let mut random = Random::new(12);
        for [tokens, each, groups] in [[1, 1, 1], [1, 8, 128], [700, 2, 8], [90, 3, 300], [40, 1, 3]] {
            let ids = random.belows(tokens * each, groups as u32);
            let mut order: Vec<u32> = (0..ids.len() as u32).collect();
            order.sort_by_key(|&at| ids[at as usize]);
            let [got_tokens, places, offsets] = trial(device, |trial| {
                let ids = trial.upload_indices(&ids, [tokens, each])?;
                let all = trial.with_scratch(|| group_by(trial, &ids, groups))?;
                assert_eq!((all.count(), all.rows()), (groups, tokens * each));
                let [tokens, places] = [all.tokens(), all.places()].map(|indices| trial.output(indices.values()));
                Ok([tokens?, places?, trial.output(all.offsets())?])
            });
            assert!(got_tokens.iter().zip(&order).all(|(&token, &at)| token == at / each as u32));
            assert!(order.iter().enumerate().all(|(row, &at)| places[at as usize] == row as u32));
            let below = |group: u32| ids.iter().filter(|&&id| id < group).count() as u32;
            assert!((0..=groups as u32).all(|group| offsets[group as usize] == below(group)), "{offsets:?}");
        }
    }

    /// A token's rows are added in the order of its ids, and the gradients are those of the sum.
    fn tokens_get_their_rows_back(device: &Device) {
        for [tokens, each, groups, cols] in [[1, 1, 2, 4], [37, 3, 5, 33], [20, 2, 4, 132], [9, 2, 3, 1100]] {
            let mut random = Random::new(cols as u64);
            let ids = random.belows(tokens * each, groups as u32);
            let [rows, gates, dy] = [tokens * each * cols, tokens * each, tokens * cols].map(|length| random.normals(length));
            let mut order: Vec<usize> = (0..ids.len()).collect();
            order.sort_by_key(|&at| ids[at]);
            let row_of = |at: usize| order.iter().position(|&other| other == at).unwrap();
            let [y, plain, drows, dgates, x] = trial(device, |trial| {
                let ids = trial.upload_indices(&ids, [tokens, each])?;
                let groups = trial.with_scratch(|| group_by(trial, &ids, groups))?;
                let (x, g) = (trial.upload(&rows, [tokens * each, cols])?, trial.upload(&gates, [tokens, each])?);
                let dy = trial.upload(&dy, [tokens, cols])?;
                let y = trial.output(&ops::combine(trial, &x, Some(&g), &groups)?)?;
                let plain = trial.output(&ops::combine(trial, &x, None::<&Saved<'_>>, &groups)?)?;
                let (dx, dgates) = trial.with_scratch(|| ops::launch::combine_backward(trial, &x, &g, &dy, &groups))?;
                let dispatched = trial.output(&ops::dispatch(trial, &dy, &groups)?)?;
                Ok([y, plain, trial.output(&dx)?, trial.output(&dgates)?, dispatched])
            });
            for (token, column) in (0..tokens).flat_map(|token| (0..cols).map(move |column| (token, column))) {
                let value = |j: usize| rows[row_of(token * each + j) * cols + column];
                let gated = (0..each).fold(0.0f32, |sum, j| gates[token * each + j].mul_add(value(j), sum));
                let sum = (0..each).fold(0.0f32, |sum, j| sum + value(j));
                let at = token * cols + column;
                assert_eq!([y[at].to_bits(), plain[at].to_bits()], [gated.to_bits(), sum.to_bits()]);
            }
            for (row, &at) in order.iter().enumerate() {
                let own = |values: &[f32], row: usize| values[row * cols..][..cols].to_vec();
                let dy = own(&dy, at / each);
                assert_eq!(own(&x, row), dy);
                assert_same("drows", &own(&drows, row), &dy.iter().map(|dy| dy * gates[at]).collect::<Vec<_>>());
                let terms = || dy.iter().zip(&rows[row * cols..]).map(|(&dy, &x)| f64::from(dy) * f64::from(x));
                let (exact, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                assert!((f64::from(dgates[at]) - exact).abs() <= 1e-6 * size, "{} for {exact}", dgates[at]);
            }
        }
    }

    fn extents_must_agree(device: &Device) {
        trial(device, |trial| {
            let ids = trial.upload_indices(&[0, 1, 1, 0, 1, 1], [3, 2])?;
            let groups = trial.with_scratch(|| group_by(trial, &ids, 2))?;
            let (x, w) = (trial.upload(&[1.0; 24], [6, 4])?, trial.upload(&[1.0; 24], [4, 6])?);
            let gates = trial.upload(&[1.0; 6], [3, 2])?;
            for refused in [
                ops::grouped_linear(trial, &w, &x, &groups),
                ops::grouped_linear(trial, &x, &w.reshape([4, 3, 2])?, &groups),
                ops::dispatch(trial, &gates.reshape([2, 3])?, &groups),
                ops::combine(trial, &x.reshape([3, 8])?, None::<&Saved<'_>>, &groups),
            ] {
                assert_refused(refused, &["expected"]);
            }
            Ok(())
        });
        trial(device, |trial| {
            let ids = trial.upload_indices(&[0, 1, 2, 0], [4])?;
            assert_refused(group_by(trial, &ids, 3), &["group_by", "[tokens, each]"]);
            let ids = trial.upload_indices(&[0, 1, 2, 0], [2, 2])?;
            assert!(matches!(group_by(trial, &ids, 2), Err(Error::Label { .. })));
            Ok(())
        });
    }
}

attack! {
    embedding::group_places {
        ids: u32s 30, sorted: u32s 30, order: u32s 30, each: number 2, length: number 5, rows: out_u32 30,
        places: out_u32 30, offsets: out_u32 5,
    }
    mixture::combine_forward<S> {
        x: stored 48, gates: f32s 6, places: u32s 6, each: number 2, cols: number 8, length: number 24, y: out_stored 24,
    }
    mixture::combine_backward<S> {
        x: stored 48, dy: stored 24, gates: f32s 6, order: u32s 6, each: number 2, cols: number 8, dx: out_stored 48,
        dgates: out 6,
    }
    matmul_grouped::matmul_grouped by tile {
        a: f32s 35, b: f32s 84, offsets: u32s 3, out: out 30, extents: product [5, 6, 7, 7, 2], lda: number 7, ldb: number 12,
        stride_b: number 6, epilogue: epilogue ([6, 0], 6, [0.5, 1.0], 0),
    }
    matmul_grouped::matmul_grouped_of_bf16 by variant <S> {
        a: halves 25, b: halves 60, offsets: u32s 3, out: out_stored 60, extents: product [5, 6, 5, 5, 2],
        lda: number 5, ldb: number 12, stride_b: number 6, epilogue: epilogue ([30, 0], 6, [0.5, 1.0], 0),
    }
}
