//! `ops::round_bf16`: pairs of BF16 in rows of a multiple of eight.

use crate::support::{Random, SPECIAL, on_each_device};
use crate::trial::trial;
use stepscope::ops;

/// The upper half of f32, by the integers: up where the rest is more than half, or half after an odd bit.
fn bf16(x: f32) -> u32 {
    let (upper, rest) = (x.to_bits() >> 16, x.to_bits() & 0xffff);
    upper + u32::from(rest > 0x8000 || (rest == 0x8000 && upper & 1 == 1))
}

on_each_device! {
    fn rows_are_rounded_and_padded(device: &Device) {
        for [rows, cols] in [[1, 1], [3, 8], [5, 7], [2, 193], [33, 64], [0, 5], [4, 0], [300, 12]] {
            let mut x = Random::new(cols as u64).normals(rows * cols);
            x.iter_mut().zip(SPECIAL.into_iter().filter(|special| !special.is_nan())).for_each(|(x, special)| *x = special);
            let got = trial(device, |trial| {
                let rounded = ops::round_bf16(trial, &trial.upload(&x, [rows, cols])?)?;
                assert_eq!(rounded.shape().extents(), [rows, cols.div_ceil(8) * 4]);
                trial.output(&rounded)
            });
            let pitch = cols.div_ceil(8) * 8;
            for (at, word) in got.iter().enumerate() {
                for (half, found) in [word & 0xffff, word >> 16].into_iter().enumerate() {
                    let (row, col) = ((2 * at + half) / pitch, (2 * at + half) % pitch);
                    let want = if col < cols { bf16(x[row * cols + col]) } else { 0 };
                    assert_eq!(found, want, "[{rows}, {cols}]: row {row}, column {col}");
                }
            }
        }
    }

    fn a_nan_stays_one(device: &Device) {
        let nans = [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0xffc0_0000, 0x7fc0_0000, 0x7f80_ffff, 0xff80_0001, 0x7fa0_0000];
        let got = trial(device, |trial| {
            trial.output(&ops::round_bf16(trial, &trial.upload(&nans.map(f32::from_bits), [1, 8])?)?)
        });
        for half in got.iter().flat_map(|word| [word << 16, word & 0xffff_0000]) {
            assert!(f32::from_bits(half).is_nan(), "{half:#010x}");
        }
    }
}
