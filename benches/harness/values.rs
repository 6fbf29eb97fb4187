//! Numbers for the benches' operands.

/// Returns `len` evenly spread values in `[-1, 1)`: fractional parts of multiples of the golden
/// ratio. Each `seed` 1, 2, .. gives other values.
pub(crate) fn spread(len: usize, seed: u32) -> Vec<f32> {
    let unit = |at: u32| (at.wrapping_mul(0x9e37_79b9).wrapping_mul(seed) >> 8) as f32 / (1 << 24) as f32;
    (0..len as u32).map(|at| 2.0 * unit(at) - 1.0).collect()
}
