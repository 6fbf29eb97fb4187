//! Casts of every BF16, and of f32 at and next to every rounding boundary, against integer
//! rounding.

use crate::hostile::attack;
use crate::support::on_each_device;
use crate::trial::assert_same;
use stepscope::{Arena, Capacity, bf16, ops};

/// Returns the nearest BF16, ties to even, by definition: the nearer of the two neighbours, or the
/// even one.
fn nearest(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let below = f32::from_bits(x.to_bits() & 0xffff_0000);
    let above = f32::from_bits((x.to_bits() & 0xffff_0000) + 0x1_0000);
    // The step past the largest value would be 2^128, which is infinity here.
    let step =
        |neighbour: f32| if neighbour.is_infinite() { 2f64.powi(128).copysign(x.into()) } else { neighbour.into() };
    let (down, up) = ((f64::from(x) - f64::from(below)).abs(), (step(above) - f64::from(x)).abs());
    if x.is_infinite() || down < up || down == up && below.to_bits() >> 16 & 1 == 0 { below } else { above }
}

on_each_device! {
    fn every_bf16(device: &Device) {
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let around = all.iter().flat_map(|x| {
            let bits = u32::from(x.to_bits()) << 16;
            [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(bits | low))
        });
        let around: Vec<f32> = around.collect();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap();
        let (widened, narrowed) = arena
            .step(|step| {
                let (halves, floats) = (step.upload(&all, [all.len()])?, step.upload(&around, [around.len()])?);
                let widened = step.read(&ops::to_f32(step, &halves)?)?;
                Ok((widened, step.read(&ops::to_bf16(step, &floats)?)?))
            })
            .unwrap();
        let exact: Vec<f32> = all.iter().map(|x| f32::from_bits(u32::from(x.to_bits()) << 16)).collect();
        assert_same("to_f32", &widened, &exact);
        let got: Vec<f32> = narrowed.iter().map(|x| x.to_f32()).collect();
        assert_same("to_bf16", &got, &around.iter().map(|&x| nearest(x)).collect::<Vec<_>>());
    }
}

attack! {
    cast::cast_to_bf16 { x: f32s 9, out: out_halves 9 }
    cast::cast_to_f32 { x: halves 9, out: out 9 }
}
