//! Helpers that all tests share: the devices, the library's seeded numbers, and error bounds.
//!
//! Invariant: a requested device that cannot be opened fails the test; nothing is skipped.

#![allow(dead_code, unused_imports, unused_macros, reason = "each test binary uses its own part")]

pub(crate) mod cable;
pub(crate) mod example;
pub(crate) mod forged;
pub(crate) mod moments;
pub(crate) mod points;
pub(crate) mod rank_threads;
pub(crate) mod tokenizer_json;
pub(crate) mod witness;

/// Turns each test into a module of two: `name::emulated`, and `name::cuda` in a build with CUDA.
/// After `also late;` there is a third, `name::late`: an emulator that works as late as a GPU may.
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
    (also late; $($(#[$meta:meta])* fn $name:ident($device:ident: &Device) $body:block)+) => {
        $(
            $(#[$meta])*
            mod $name {
                use super::*;

                fn on($device: &stepscope::Device) $body

                $crate::support::device_tests!();

                #[test]
                fn late() {
                    let late = $crate::support::builder(stepscope::DeviceKind::Emulated, true);
                    on(&late.open().unwrap_or_else(|reason| panic!("{reason}")));
                }
            }
        )+
    };
    ($($(#[$meta:meta])* fn $name:ident($device:ident: &Device) $body:block)+) => {
        $(
            $(#[$meta])*
            mod $name {
                use super::*;

                fn on($device: &stepscope::Device) $body

                $crate::support::device_tests!();
            }
        )+
    };
}
/// Runs `on` on each kind of device.
macro_rules! device_tests {
    () => {
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
    };
}
pub(crate) use device_tests;
pub(crate) use on_each_device;
pub(crate) use stepscope::check::same_bits::{Random, SPECIAL, sample};

/// Opens a device of exactly this kind.
///
/// # Panics
/// There is no such device.
pub(crate) fn open(kind: stepscope::DeviceKind) -> stepscope::Device {
    let device = builder(kind, false).open().unwrap_or_else(|reason| panic!("{reason}"));
    assert_eq!(device.description().kind, kind);
    device
}

/// Returns settings for a device, perhaps one that works late. On a busy machine a kernel of the
/// emulator may take minutes.
pub(crate) fn builder(kind: stepscope::DeviceKind, late: bool) -> stepscope::device::DeviceBuilder {
    let mut builder = stepscope::Device::builder(kind);
    if kind == stepscope::DeviceKind::Emulated {
        builder = builder.deadline(std::time::Duration::from_secs(600));
    }
    if late { builder.layer(stepscope::check::late::LateWork) } else { builder }
}

/// Returns settings for another device that works like this one.
pub(crate) fn like(device: &stepscope::Device) -> stepscope::device::DeviceBuilder {
    let described = device.description();
    builder(described.kind, described.name.ends_with(", late"))
}

/// Returns the L2 norm of `got - want`, divided by that of `want` (or by 1 if `want` is all zeros).
pub(crate) fn relative_l2(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let difference: f64 = got.iter().zip(want).map(|(&got, &want)| (f64::from(got) - want).powi(2)).sum();
    let size: f64 = want.iter().map(|want| want * want).sum();
    (difference / if size == 0.0 { 1.0 } else { size }).sqrt()
}

/// Returns the largest relative L2 error of an f32 result whose longest sum has `length` terms: `8
/// u sqrt(length)`. It is 0 for `length` 0, without a sum or any other rounding.
///
/// `u` = 2^-24 is half the distance of f32 numbers at 1. In a sum of `length` products of random
/// sign, each addition rounds a partial sum that grows as the root of its terms. The errors add up
/// as a random walk, to about `u sqrt(length / 6)` of the result. The factor 8 covers the same
/// error again in the forward pass of a gradient, and up to three such sums in sequence. It also
/// covers the 2 units in the last place of exp and tanh. A wrong term, index or sign is an error of
/// order 1. The bounds of single elements, which `tests/kernels/tolerance.rs` derives, grow with
/// the length by the same law.
pub(crate) fn tolerance(length: usize) -> f64 {
    8.0 * 2f64.powi(-24) * (length as f64).sqrt()
}

/// Returns the numbers, each rounded to S.
pub(crate) fn narrow<S: stepscope::tensor::Stored>(values: &[f32]) -> Vec<S> {
    values.iter().map(|&value| S::narrow(value)).collect()
}

/// Returns the bits of each number, for comparisons that distinguish 0 from -0 and one NaN from
/// another.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Waits, and returns the words of a buffer.
pub(crate) fn words(buffer: stepscope::parameters::AnyBuffer<'_>) -> Vec<u32> {
    let mut bytes = Vec::new();
    let mut add = |piece: &[u8]| {
        bytes.extend_from_slice(piece);
        Ok(())
    };
    buffer.for_each_piece(0..buffer.bytes(), &mut add).unwrap();
    bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}
