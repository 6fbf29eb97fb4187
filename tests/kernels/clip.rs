//! Tests of `ops::clip_factor`.

use crate::hostile::attack;
use crate::support::on_each_device;
use crate::tolerance::{Closeness, Exact};
use crate::trial::{assert_refused, trial};
use stepscope::{Device, ops};

fn factor(device: &Device, squared_norm: f32, max_norm: f32) -> f32 {
    trial(device, |trial| {
        let factor = ops::clip_factor(trial, &trial.upload(&[squared_norm], [1])?, max_norm)?;
        Ok(trial.output(&factor)?[0])
    })
}

on_each_device! {
    fn factors(device: &Device) {
        let mut seen = Closeness::new("clip_factor");
        for squared in [1e-20f32, 0.01, 0.3, 2.0, 9.0, 1e4, 1e30] {
            for most in [1e-3f32, 0.1, 0.7, 1.0, 5.0, 1e10] {
                let want = Exact::given(most) / (Exact::given(squared).sqrt() + Exact::given(1e-6f32));
                let want = if want.value > 1.0 { Exact::given(1.0) } else { want };
                seen.check(format_args!("{squared}, {most}"), &[factor(device, squared, most)], &[want]);
            }
        }
        seen.finish();
    }

    fn special_norms(device: &Device) {
        assert_eq!(factor(device, 4.0, 0.0), 1.0, "a limit of 0 disables clipping");
        assert_eq!(factor(device, 0.0, 1.0), 1.0);
        assert_eq!(factor(device, f32::INFINITY, 1.0), 0.0);
        assert!(factor(device, f32::NAN, 1.0).is_nan());
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let two = trial.upload(&[1.0; 2], [2])?;
            let mut step = None;
            trial.with_scratch(|| {
                step = Some(ops::clip_factor(trial, &two, 1.0).map(drop));
                Ok(())
            })?;
            assert_refused(step.expect("the closure ran"), &["clip_factor", "`squared_norm`", "1 elements"]);
            Ok(())
        });
    }
}

attack! {
    clip::clip_factor { squared_norm: f32s 1, max_norm: float 1.0, out: out 1 }
}
