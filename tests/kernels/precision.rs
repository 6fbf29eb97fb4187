//! `ops::round_to` and `ops::transpose_to`: words of TF32 or pairs of BF16, in rows of a multiple of eight elements.

use crate::support::{Random, SPECIAL, on_each_device};
use crate::trial::{assert_refused, trial};
use stepscope::ops::{self, Precision};

const PRECISIONS: [Precision; 2] = [Precision::Tf32, Precision::Bf16];

/// `x` by the integers: up where what is dropped is more than half, or half and (TF32) always or (BF16) after an odd bit.
fn rounded(precision: Precision, x: f32) -> u32 {
    let dropped = if precision == Precision::Tf32 { 13 } else { 16 };
    let (kept, rest, half) = (x.to_bits() >> dropped, x.to_bits() & ((1 << dropped) - 1), 1 << (dropped - 1));
    let tie_goes_up = precision == Precision::Tf32 || kept & 1 == 1;
    (kept + u32::from(rest > half || (rest == half && tie_goes_up))) << dropped
}

/// The elements of words, as the bits of f32.
fn elements(precision: Precision, words: &[u32]) -> Vec<u32> {
    let of = |word: &u32| if precision == Precision::Tf32 { vec![*word] } else { vec![word << 16, word & 0xffff_0000] };
    words.iter().flat_map(of).collect()
}

on_each_device! {
    fn rows_are_rounded_and_padded(device: &Device) {
        for [rows, cols] in [[1, 1], [3, 8], [5, 7], [2, 193], [33, 64], [0, 5], [4, 0], [300, 12], [65, 129], [130, 33]] {
            let mut x = Random::new(cols as u64).normals(rows * cols);
            x.iter_mut().zip(SPECIAL.into_iter().filter(|special| !special.is_nan())).for_each(|(x, special)| *x = special);
            for precision in PRECISIONS {
                let [straight, transposed] = trial(device, |trial| {
                    let x = trial.upload(&x, [rows, cols])?;
                    let straight = ops::round_to(trial, &x, precision)?;
                    let transposed = ops::transpose_to(trial, &x, precision)?;
                    let per_word = if precision == Precision::Tf32 { 1 } else { 2 };
                    assert_eq!(straight.shape().extents(), [rows, cols.next_multiple_of(8) / per_word]);
                    assert_eq!(transposed.shape().extents(), [cols, rows.next_multiple_of(8) / per_word]);
                    Ok([trial.output(&straight)?, trial.output(&transposed)?])
                });
                for (got, [outer, along], steps) in [(straight, [rows, cols], [cols, 1]), (transposed, [cols, rows], [1, cols])] {
                    let (pitch, got) = (along.next_multiple_of(8), elements(precision, &got));
                    assert_eq!(got.len(), outer * pitch);
                    for (at, found) in got.into_iter().enumerate() {
                        let (i, j) = (at / pitch, at % pitch);
                        let want = if j < along { rounded(precision, x[i * steps[0] + j * steps[1]]) } else { 0 };
                        assert_eq!(found, want, "{precision}, [{rows}, {cols}] with steps {steps:?}: row {i}, column {j}");
                    }
                }
            }
        }
    }

    fn a_nan_stays_one_in_bf16(device: &Device) {
        let nans = [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0xffc0_0000, 0x7fc0_0000, 0x7f80_ffff, 0xff80_0001, 0x7fa0_0000];
        let got = trial(device, |trial| {
            trial.output(&ops::round_to(trial, &trial.upload(&nans.map(f32::from_bits), [1, 8])?, Precision::Bf16)?)
        });
        for element in elements(Precision::Bf16, &got) {
            assert!(f32::from_bits(element).is_nan(), "{element:#010x}");
        }
    }

    fn f32_is_no_format_of_factors(device: &Device) {
        trial(device, |trial| {
            let x = trial.upload(&[1.0], [1, 1])?;
            for refused in [ops::round_to(trial, &x, Precision::Ieee), ops::transpose_to(trial, &x, Precision::Ieee)] {
                assert_refused(refused, &["tf32 or bf16", "ieee"]);
            }
            Ok(())
        });
    }
}
