//! The kernel `scalars`, by the sweep of `examples/scalars`: every 4099th bit pattern here, all of
//! them there.
//!
//! Invariant: a device's bits are the CPU's, and errors are those that `device/src/math.rs` states.
//! The sweep reports any deviation.

use crate::hostile::attack;
use crate::reference::{FUNCTIONS, Function, error_ulps};
use crate::support::{self, on_each_device};
use crate::sweep::{BLOCK, Range, Tally, sweep};
use crate::trial::{assert_refused, trial};
use kernels::scalars;
use stepscope::tensor::Target;
use stepscope::{Arena, Capacity, Device, DeviceKind};

/// A prime, so that all low bits occur.
const STRIDE: u32 = 4099;

fn swept(device: &Device, function: &Function, stride: u32, mut change: impl FnMut(Range, &mut [f32]) + Send) -> Tally {
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(4 * BLOCK)).build().expect("an arena");
    let changed = |range: Range| {
        let mut results = range.on_device(&mut arena, function)?;
        change(range, &mut results);
        Ok(results)
    };
    sweep(function, stride, changed).unwrap_or_else(|error| panic!("{error}"))
}

on_each_device! {
    fn every_4099th_input(device: &Device) {
        for function in &FUNCTIONS {
            let tally = swept(device, function, STRIDE, |_, _| ());
            println!("{}: {:.4} ulp at {:e}", function.name, tally.worst_ulps, tally.worst_input);
            assert_eq!(tally.inputs, (1u64 << 32).div_ceil(u64::from(STRIDE)));
            assert!(tally.holds(function), "{}: {tally:?}", function.name);
            assert!(tally.worst_ulps > 0.75 * function.stated_ulps, "{}: the stated error is loose", function.name);
        }
    }

    fn wrong_arguments_are_refused(device: &Device) {
        trial(device, |trial| {
            let mut y = trial.upload(&[0.0; 5], [5])?;
            let mut launch = |length, function| {
                trial.launch(scalars::scalars { y: y.out(), length, function, first: 0, stride: 1 })
            };
            assert_refused(launch(4, scalars::EXP), &["`y`", "4 elements"]);
            assert_refused(launch(5, scalars::ERF_DERIVATIVE + 1), &["`function`", "got 15"]);
            Ok(())
        });
    }
}

#[test]
fn wrong_bit_is_found_and_named() {
    let device = support::open(DeviceKind::Emulated);
    let (exp, stride, at) = (&FUNCTIONS[0], 499, 1234);
    let plant = |range: Range, results: &mut [f32]| {
        if range.first != 0 {
            results[at] = f32::from_bits(results[at].to_bits() ^ 1);
        }
    };
    let tally = swept(&device, exp, stride, plant);
    assert_eq!(tally.inputs, 8_607_149);
    // The second range is whole; the third is the last, and shorter.
    assert_eq!(tally.differences, 2);
    let input = (BLOCK + at) as u32 * stride;
    assert_eq!(tally.first_difference.expect("the results differ").input.to_bits(), input);
    assert!(!tally.holds(exp));
}

#[test]
fn excessive_error_is_found() {
    let device = support::open(DeviceKind::Emulated);
    let tally = swept(&device, &Function { stated_ulps: 0.5, ..FUNCTIONS[5] }, STRIDE, |_, _| ());
    assert_eq!(tally.differences, 0);
    assert!(!tally.holds(&Function { stated_ulps: 0.5, ..FUNCTIONS[5] }));
    assert!(tally.holds(&FUNCTIONS[5]));
}

/// Compares the references with mpmath's values at 72 digits, rounded to float64. The inputs are
/// the worst of 252,000, those next to the root of gelu's derivative, and the ends.
#[test]
fn references_match_mpmath() {
    let values: [(&str, &[(u32, f64)]); 15] = [
        (
            "exp",
            &[
                (0x42b1_7217, 3.4027985374118487e38),
                (0xc2ce_0000, 1.8521167695179754e-45),
                (0x3ebb_91cc, 1.4424552795591088),
                (0x3380_0000, 1.0000000596046466),
            ],
        ),
        (
            "log",
            &[
                (0x3f7f_ffff, -5.960464655174753e-8),
                (0x3f80_0001, 1.1920928244535446e-7),
                (0x3fcb_8b20, 0.4638492662300006),
                (0x0000_0001, -103.27892990343184),
            ],
        ),
        (
            "tanh",
            &[
                (0x1e3c_e508, 9.999999682655225e-21),
                (0x3f20_0000, 0.5545997223493823),
                (0xbe4c_1a54, -0.19672093878636163),
                (0x4110_0000, 0.999999969540041),
            ],
        ),
        (
            "gelu",
            &[
                (0xc11e_6640, -1.1650919263840226e-36),
                (0xbf40_a150, -0.17004075057125403),
                (0x4040_0000, 2.996362607918227),
                (0xc170_0000, -1.5584769937274055e-114),
            ],
        ),
        (
            "gelu_derivative",
            &[
                (0xbf40_a14f, 2.0773268398776437e-8),
                (0xbf40_a150, -4.880576990954944e-9),
                (0xbf40_a151, -3.0534419627202154e-8),
                (0xbf40_e2d8, -0.0004299862897987602),
                (0xbf40_5fc8, 0.00043075145296618984),
                (0xc11e_6640, -2.618551101884836e-35),
                (0x3f00_0000, 0.8673699035346423),
            ],
        ),
        ("rsqrt", &[(0x3980_ffbe, 63.75170422134342), (1, 2.671373890628154e22), (0x7f7f_ffff, 5.421011023986243e-20)]),
        (
            "sigmoid",
            &[
                (0xc2ce_0000, 1.8521167695179754e-45),
                (0x4182_d725, 0.9999999210973576),
                (0xbe80_0000, 0.4378234991142019),
                (0x3727_c5ac, 0.5000024999999368),
            ],
        ),
        (
            "silu",
            &[
                (0xc185_b938, -9.19803180670192e-7),
                (0xbfa3_a4ba, -0.2784645427610738),
                (0x4020_0000, 2.310354549946891),
                (0xc2d2_0000, -2.631895849694951e-44),
            ],
        ),
        (
            "gelu_exact",
            &[
                (0xc14c_66a0, -1.443505209220313e-36),
                (0xbfb5_c63f, -0.11046695382985776),
                (0xbc4c_cccd, -0.00618766698322416),
                (0x4040_0000, 2.99595030590511),
                (0xc160_0000, -1.091095154686992e-43),
            ],
        ),
        (
            "ex2",
            &[
                (0x3f00_0000, std::f64::consts::SQRT_2),
                (0xbf80_0000, 0.5),
                (0x42fe_0000, 1.7014118346046923e38),
                (0xc2fc_0000, 1.1754943508222875e-38),
            ],
        ),
        (
            "sin",
            &[
                (0x4049_0fdb, -8.742278000372475e-08),
                (0x3f80_0000, 0.8414709848078965),
                (0x7f7f_ffff, -0.5218765233336585),
                (0x4519_4c7a, 0.7201908006858934),
            ],
        ),
        (
            "cos",
            &[
                (0x3fc9_0fdb, -4.371139000186241e-08),
                (0x3f80_0000, 0.5403023058681398),
                (0x7f7f_ffff, 0.8530210398303042),
                (0x5f37_59df, -0.8739392484081531),
            ],
        ),
        (
            "log1p",
            &[
                (0xb3c0_0000, -8.940697115988906e-08),
                (0x3f80_0000, std::f64::consts::LN_2),
                (0xbf7f_ffff, -16.635532333438686),
                (0x7149_f2ca, 69.07755280486883),
            ],
        ),
        (
            "erf",
            &[
                (0x3f73_ad9e, 0.8217440956033973),
                (0xbf87_601b, -0.8652684422553909),
                (0x3380_0000, 6.725663942667909e-08),
                (0x4040_0000, 0.9999779095030014),
            ],
        ),
        (
            "erf_derivative",
            &[
                (0x40df_9a6b, 7.036441854188194e-22),
                (0x3f80_0000, 0.4151074974205947),
                (0xc0f7_9558, 1.1355627623249061e-26),
                (0x4120_0000, 4.197656231354417e-44),
            ],
        ),
    ];
    for (function, (name, values)) in FUNCTIONS.iter().zip(values) {
        assert_eq!(function.name, name);
        for &(bits, want) in values {
            let got = (function.reference)(f64::from(f32::from_bits(bits)));
            let ulps = (got - want).abs() / (want.abs() * f64::from(f32::EPSILON));
            assert!(ulps < 1e-5, "{name}({bits:#010x}) is {got:e}, {ulps:e} ulp from {want:e}");
        }
    }
}

#[test]
fn ulp_errors_are_counted_correctly() {
    assert_eq!(error_ulps(1.0, 1.0), 0.0);
    assert_eq!(error_ulps(1.0 + f32::EPSILON, 1.0), 1.0);
    assert_eq!(error_ulps(f32::from_bits(1), 0.0), 1.0);
    assert_eq!(error_ulps(f32::INFINITY, 1e300), 0.0);
    assert_eq!(error_ulps(f32::INFINITY, f64::from(f32::MAX)), 1.0);
    assert_eq!(error_ulps(f32::NEG_INFINITY, 1e300), 2f64.powi(25));
    assert_eq!(error_ulps(f32::NAN, f64::NAN), 0.0);
    assert!(
        error_ulps(f32::NAN, 1.0).is_infinite()
            && error_ulps(1.0, f64::NAN).is_infinite()
            && error_ulps(1.0, f64::INFINITY).is_infinite()
    );
}

attack! {
    scalars::scalars { y: out 9, length: number 9, function: number 0, first: number 0, stride: number 1 }
}
