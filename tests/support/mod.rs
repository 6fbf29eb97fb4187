//! What the tests and `examples/same_bits` share: the devices to run on, seeded random numbers, and the numbers at which
//! kernels go wrong.
//!
//! Invariant: a device that was asked for and cannot be opened fails the test; nothing is skipped. A seed names one
//! stream of numbers, the same on every machine.

#![allow(dead_code, unused_imports, unused_macros, reason = "each test binary uses its own part")]

pub(crate) mod example;
pub(crate) mod forged;
pub(crate) mod sources;

/// Makes each test a module of two: `name::emulated`, and `name::cuda` in a build with CUDA.
///
/// ```ignore
/// on_each_device! {
///     fn copies_are_equal(device: &Device) {
///         let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
///         ..
///     }
/// }
/// ```
macro_rules! on_each_device {
    ($($(#[$meta:meta])* fn $name:ident($device:ident: &Device) $body:block)+) => {
        $(
            $(#[$meta])*
            mod $name {
                use super::*;

                fn on($device: &stepscope::Device) $body

                #[test]
                fn emulated() {
                    on(&$crate::support::open(stepscope::DeviceKind::Emulated));
                }

                #[cfg(feature = "cuda")]
                #[test]
                #[ignore = "needs an NVIDIA GPU"]
                fn cuda() {
                    on(&$crate::support::open(stepscope::DeviceKind::Cuda));
                }
            }
        )+
    };
}
pub(crate) use on_each_device;

/// The device, of just this kind.
///
/// # Panics
/// When there is none.
pub(crate) fn open(kind: stepscope::DeviceKind) -> stepscope::Device {
    let device = stepscope::Device::open(kind).unwrap_or_else(|reason| panic!("{reason}"));
    assert_eq!(device.description().kind, kind);
    device
}

/// Numbers for tests, from the library's generator.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    bits: stepscope::SplitMix64,
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self { bits: stepscope::SplitMix64::new(seed) }
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.bits.next_u64()
    }

    /// In `0..bound`, `bound` above zero.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        ((u64::from(bound) * (self.next_u64() >> 32)) >> 32) as u32
    }

    /// In `from..=to`.
    pub(crate) fn extent(&mut self, from: usize, to: usize) -> usize {
        from + self.below((to - from + 1) as u32) as usize
    }

    /// In `[0, 1)`, a multiple of 2^-24.
    pub(crate) fn unit(&mut self) -> f32 {
        self.bits.unit()
    }

    /// In `[low, high)`.
    pub(crate) fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.unit()
    }

    /// Mean 0, variance 1, within 6 of zero: the sum of twelve uniform numbers, less 6 (additions alone, so the same
    /// bits everywhere).
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }

    /// `len` of [`Random::uniform`].
    pub(crate) fn uniforms(&mut self, len: usize, low: f32, high: f32) -> Vec<f32> {
        (0..len).map(|_| self.uniform(low, high)).collect()
    }

    /// `len` of [`Random::normal`].
    pub(crate) fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }

    /// `len` of [`Random::below`].
    pub(crate) fn belows(&mut self, len: usize, bound: u32) -> Vec<u32> {
        (0..len).map(|_| self.below(bound)).collect()
    }
}

/// Numbers at the ends of f32 and of the functions' domains.
pub(crate) const SPECIAL: [f32; 20] = [
    0.0,
    -0.0,
    f32::from_bits(1),
    -f32::from_bits(1),
    f32::from_bits(0x007f_ffff),
    f32::MIN_POSITIVE,
    -f32::MIN_POSITIVE,
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    1.0,
    -1.0,
    0.625,
    -104.0,
    89.0,
    88.722_84,
    12.0,
    -12.0,
];

/// Every magnitude of either sign alike, infinities and NaNs among them; then the range `from..to` densely; then
/// [`SPECIAL`].
pub(crate) fn sample(seed: u64, from: f32, to: f32) -> Vec<f32> {
    let mut random = Random::new(seed);
    let stratum = 1 << 14;
    let mut values: Vec<f32> =
        (0..1u32 << 18).map(|high| f32::from_bits(high * stratum + random.below(stratum))).collect();
    values.extend(random.uniforms(1 << 18, from, to));
    values.extend(SPECIAL);
    values
}

/// The L2 norm of `got - want`, over that of `want` (over 1 when `want` is nothing but zeros).
pub(crate) fn relative_l2(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let difference: f64 = got.iter().zip(want).map(|(&got, &want)| (f64::from(got) - want).powi(2)).sum();
    let size: f64 = want.iter().map(|want| want * want).sum();
    (difference / if size == 0.0 { 1.0 } else { size }).sqrt()
}

/// The largest relative L2 error of an f32 result whose longest sum has `length` terms: `8 u sqrt(length)`; none without
/// a sum or any other rounding, for `length` 0.
///
/// `u` = 2^-24 is half the distance of f32 numbers at 1. In a sum of `length` products of random sign each addition
/// rounds a partial sum that grows as the root of its terms; the errors add up as a random walk, to about
/// `u sqrt(length / 6)` of the result. The factor 8 leaves room for the same again in the forward pass that a gradient
/// is taken at, for up to three such sums in a row, and for the 2 units in the last place of exp and tanh. A wrong term,
/// index or sign is an error of order 1. The bounds of single elements, which `tests/kernels/tolerance.rs` derives, grow
/// with the length by the same law.
pub(crate) fn tolerance(length: usize) -> f64 {
    8.0 * 2f64.powi(-24) * (length as f64).sqrt()
}

/// The bits of each number, for comparisons that tell 0 from -0 and one NaN from another.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
