//! Tests of `ops::{fill, fill_into, copy, copy_into}`: they move bits, and never compute with them.

use crate::hostile::attack;
use crate::shapes::LENGTHS;
use crate::support::{Random, SPECIAL, bits, on_each_device};
use crate::trial::{assert_refused, trial};
use stepscope::ops;

/// A NaN with unusual bits.
const NAN: f32 = f32::from_bits(0xffc1_2345);

on_each_device! {
    fn fill(device: &Device) {
        for (length, value) in LENGTHS.into_iter().zip([2.5, -0.0, NAN, f32::from_bits(1)].into_iter().cycle()) {
            let got = trial(device, |trial| {
                let mut old = trial.upload(&Random::new(3).normals(length), [length])?;
                ops::fill_into(trial, &mut old, value)?;
                Ok([trial.output(&ops::fill(trial, [length], value)?)?, trial.output(&old)?])
            });
            for got in got {
                assert_eq!(bits(&got), vec![value.to_bits(); length], "{length}");
            }
        }
    }

    fn copy(device: &Device) {
        for length in LENGTHS {
            let mut x = Random::new(length as u64).normals(length);
            x.iter_mut().skip(1).zip(SPECIAL.into_iter().chain([NAN])).for_each(|(x, special)| *x = special);
            let got = trial(device, |trial| {
                let x = trial.upload(&x, [length])?;
                let mut old = trial.upload(&vec![7.0; length], [length])?;
                ops::copy_into(trial, &x, &mut old)?;
                Ok([trial.output(&ops::copy(trial, &x)?)?, trial.output(&old)?])
            });
            for got in got {
                assert_eq!(bits(&got), bits(&x), "{length}");
            }
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (a, mut b) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[1.0; 6], [6])?);
            assert_refused(ops::copy_into(trial, &a, &mut b), &["copy", "[2, 3]", "[6]"]);
            Ok(())
        });
    }
}

attack! {
    fill::fill<S> { out: out_stored 9, length: number 9, value: float 1.0 }
    fill::copy<S> { x: stored 9, out: out_stored 9 }
}
