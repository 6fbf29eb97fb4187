//! The kernels that round operands of a multiply: each element to TF32 or BF16, at its place in a fragment, zeros around.

use crate::support::{Random, SPECIAL, on_each_device};
use crate::trial::{Trial, assert_refused, trial};
use cuda_std::launch::{PointerMut, Slice};
use kernels::matmul::{TRANSPOSE_A, TRANSPOSE_B};
use kernels::precision::{round_to_bf16, round_to_tf32};
use stepscope::ops::Precision;
use stepscope::{Result, Source, Target};

const PRECISIONS: [Precision; 2] = [Precision::Tf32, Precision::Bf16];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    A,
    B,
}

/// `batches` of `rows` of `k` elements, row by row or transposed, without space between.
#[derive(Clone, Copy, Debug)]
struct Form {
    side: Side,
    rows: usize,
    k: usize,
    batches: usize,
    transposed: bool,
}

/// `x` by the integers: up where what is dropped is more than half, or half and (TF32) always or (BF16) after an odd bit.
fn rounded(precision: Precision, x: f32) -> u32 {
    let dropped = if precision == Precision::Tf32 { 13 } else { 16 };
    let (kept, rest, half) = (x.to_bits() >> dropped, x.to_bits() & ((1 << dropped) - 1), 1 << (dropped - 1));
    let tie_goes_up = precision == Precision::Tf32 || kept & 1 == 1;
    (kept + u32::from(rest > half || (rest == half && tie_goes_up))) << dropped
}

fn per_word(precision: Precision) -> usize {
    if precision == Precision::Tf32 { 1 } else { 2 }
}

impl Form {
    fn words(self, precision: Precision) -> usize {
        self.batches * self.rows.div_ceil(32) * self.k.div_ceil(8 * per_word(precision)) * 256
    }

    /// The kernel on `x`, with `words` for its output.
    fn round(self, trial: &Trial<'_, '_>, precision: Precision, x: &[f32], words: usize) -> Result<Vec<u32>> {
        let Self { side, rows, k, batches, transposed } = self;
        let (x, mut out) = (trial.upload(x, [x.len()])?, trial.empty::<u32>([words])?);
        let (ld, stride) = (if transposed { rows } else { k }, rows * k);
        let (nothing, nowhere) = (Slice::empty(), PointerMut::empty());
        macro_rules! round {
            ($kernel:ident) => {
                match side {
                    Side::A => trial.launch($kernel {
                        a: x.slice(),
                        b: nothing,
                        a_out: out.out(),
                        b_out: nowhere,
                        m: rows,
                        n: 0,
                        k,
                        lda: ld,
                        ldb: 0,
                        batches_a: batches,
                        batches_b: 0,
                        stride_a: stride,
                        stride_b: 0,
                        flags: if transposed { TRANSPOSE_A } else { 0 },
                    })?,
                    Side::B => trial.launch($kernel {
                        a: nothing,
                        b: x.slice(),
                        a_out: nowhere,
                        b_out: out.out(),
                        m: 0,
                        n: rows,
                        k,
                        lda: 0,
                        ldb: ld,
                        batches_a: 0,
                        batches_b: batches,
                        stride_a: 0,
                        stride_b: stride,
                        flags: if transposed { 0 } else { TRANSPOSE_B },
                    })?,
                }
            };
        }
        if precision == Precision::Tf32 {
            round!(round_to_tf32);
        } else {
            round!(round_to_bf16);
        }
        trial.output(&out)
    }

    /// What the kernel must make of `x`, element by element.
    fn expected(self, precision: Precision, x: &[f32]) -> Vec<u32> {
        let Self { side, rows, k, batches, transposed } = self;
        let (per_word, mut words) = (per_word(precision), vec![0; self.words(precision)]);
        let steps = k.div_ceil(8 * per_word);
        for batch in 0..batches {
            for row in 0..rows {
                for p in 0..k {
                    let (word, part) = (p / per_word, p % per_word);
                    let fragment = (batch * rows.div_ceil(32) + row / 32) * steps + word / 8;
                    let lane = 4 * (row % 32 / 4) + word % 8 / 2;
                    let [upper, later] = [row % 2, word % 2];
                    let in_quad = if side == Side::A { 2 * later + upper } else { 2 * upper + later };
                    let at = fragment * 256 + row % 4 / 2 * 128 + lane * 4 + in_quad;
                    let own = if transposed { p * rows + row } else { row * k + p };
                    let bits = rounded(precision, x[batch * rows * k + own]);
                    words[at] |= if precision == Precision::Tf32 { bits } else { bits >> (16 - 16 * part) };
                }
            }
        }
        words
    }
}

on_each_device! {
    fn elements_are_rounded_into_fragments(device: &Device) {
        for [rows, k] in [[1, 1], [3, 8], [5, 7], [2, 193], [33, 64], [0, 5], [4, 0], [300, 12], [65, 129], [130, 33], [31, 16]] {
            for (side, transposed) in [(Side::A, false), (Side::A, true), (Side::B, false), (Side::B, true)] {
                let form = Form { side, rows, k, batches: 1 + rows % 2, transposed };
                let mut x = Random::new(k as u64).normals(form.batches * rows * k);
                x.iter_mut().zip(SPECIAL.into_iter().filter(|special| !special.is_nan())).for_each(|(x, special)| *x = special);
                for precision in PRECISIONS {
                    let got = trial(device, |trial| form.round(trial, precision, &x, form.words(precision)));
                    let want = form.expected(precision, &x);
                    let different = got.iter().zip(&want).position(|(got, want)| got != want);
                    assert_eq!(different, None, "{precision}, {form:?}: first at this word");
                    assert_eq!(got.len(), want.len());
                }
            }
        }
    }

    fn a_nan_stays_one_in_bf16(device: &Device) {
        let nans = [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0xffc0_0000, 0x7fc0_0000, 0x7f80_ffff, 0xff80_0001, 0x7fa0_0000];
        let form = Form { side: Side::B, rows: 1, k: 8, batches: 1, transposed: false };
        let got = trial(device, |trial| form.round(trial, Precision::Bf16, &nans.map(f32::from_bits), 256));
        let found = got.iter().flat_map(|word| [word << 16, word & 0xffff_0000]).filter(|&bits| f32::from_bits(bits).is_nan());
        assert_eq!(found.count(), nans.len());
    }

    fn too_little_room_is_refused(device: &Device) {
        let form = Form { side: Side::A, rows: 33, k: 9, batches: 1, transposed: false };
        trial(device, |trial| {
            for precision in PRECISIONS {
                let refused = trial.with_scratch(|| Ok(form.round(trial, precision, &[0.0; 33 * 9], 256)))?;
                assert_refused(refused, &["a_out", "256"]);
            }
            Ok(())
        });
    }
}
