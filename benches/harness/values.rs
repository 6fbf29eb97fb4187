//! Numbers for the benches' operands.

/// Returns `len` uniform random values in `[-1, 1)`. Each `seed` gives other values.
///
/// The power of a product depends on the bits of its operands, and the power limit decides its rate
/// on a data-center GPU. A peer's values therefore have the same distribution: drawn as f32, then
/// rounded to the stored type.
pub(crate) fn uniform(len: usize, seed: u32) -> Vec<f32> {
    let unit = |at: u32| (mixed(at ^ mixed(seed)) >> 8) as f32 / (1 << 24) as f32;
    (0..len as u32).map(|at| 2.0 * unit(at) - 1.0).collect()
}

/// A hash of 32 bits: `lowbias32` of Chris Wellons' hash-prospector.
fn mixed(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}
