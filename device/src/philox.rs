//! Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random
//! numbers: as easy as 1, 2, 3", 2011).
//!
//! Invariant: the numbers depend only on counter and key, in integers, so they are the same on
//! every device and for every grid.

/// Runs the 10 rounds, and returns four random words of a counter and a key.
#[inline(always)]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut round = 0;
    while round < 10 {
        let [a, b, c, d] = counter;
        let (of_a, of_c) = (0xd251_1f53 * u64::from(a), 0xcd9e_8d57 * u64::from(c));
        counter = [(of_c >> 32) as u32 ^ b ^ key[0], of_c as u32, (of_a >> 32) as u32 ^ d ^ key[1], of_a as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
        round += 1;
    }
    counter
}
