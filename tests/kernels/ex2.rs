//! The exponential of attention's weights on the emulator has the bits of `ex2.approx.ftz` on an
//! H200 (compute capability 9.0).

use kernels::math::exp2_weight;
use std::thread;
use stepscope::data::SplitMix64;

/// Returns the sum of the mixed pairs of input and result, modulo 2^64.
fn digest(inputs: impl Iterator<Item = u32>) -> u64 {
    let pair = |x: u32| u64::from(x) << 32 | u64::from(exp2_weight(f32::from_bits(x), 1.0, 0.0).to_bits());
    inputs.fold(0, |sum, x| sum.wrapping_add(SplitMix64::new(pair(x)).next_u64()))
}

/// Every significand, and one of 1021 inputs. The digests are those of results that had the digest
/// of [`every_input`].
#[test]
fn significands_and_a_sample() {
    assert_eq!(digest(0x3f80_0000..0x4000_0000), 0xc754_c959_c262_c582);
    assert_eq!(digest((0..=u32::MAX).step_by(1021)), 0xa425_d21c_62d1_6b3e);
}

/// All 2^32 inputs. The digest is the GPU's.
#[test]
fn every_input() {
    let cores = thread::available_parallelism().map_or(1, usize::from) as u32;
    let sum = thread::scope(|scope| {
        let of_core = |core: u32| scope.spawn(move || digest((core..=u32::MAX).step_by(cores as usize)));
        let sums: Vec<_> = (0..cores).map(of_core).collect();
        sums.into_iter().fold(0, |sum: u64, core| sum.wrapping_add(core.join().unwrap()))
    });
    assert_eq!(sum, 0x2a57_ff82_6f11_0821);
}
