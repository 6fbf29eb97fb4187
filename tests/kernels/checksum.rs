//! Tests of `checksum`: exact sums of weighted words, chunk by chunk.

use crate::hostile::attack;
use crate::shapes::LENGTHS;
use crate::support::{Random, on_each_device};
use crate::trial::assert_refused;
use kernels::checksum::{CHUNK, checksum};
use stepscope::tensor::{Source, Target};
use stepscope::{Arena, Capacity, Device, Result};

/// Returns the sum of each chunk by the documented formula, in 128 bits.
fn expected(words: &[u32]) -> Vec<u64> {
    let sum = |chunk: &[u32]| -> u128 { (0u128..).zip(chunk).map(|(i, &word)| u128::from(word) * (2 * i + 1)).sum() };
    words.chunks(CHUNK).map(|chunk| sum(chunk).try_into().expect("a sum below 2^64")).collect()
}

/// Returns the kernel's sums, and checks that memory past the last one is unchanged.
fn sums(device: &Device, words: &[u32]) -> Result<Vec<u64>> {
    let mut arena = Arena::builder(device).capacity(Capacity::mib(8)).build()?;
    arena.step(|step| {
        let length = 2 * words.len().div_ceil(CHUNK);
        let x = step.upload(words, [words.len()])?;
        let mut out = step.upload(&vec![7; length], [length])?;
        let neighbour = step.upload(&[7u32; 64], [64])?;
        step.launch(checksum { x: x.slice(), first: u32::MAX, last: u32::MAX, out: out.out() })?;
        assert_eq!(step.read(&neighbour)?, [7; 64]);
        assert_eq!(step.read(&x)?, words);
        Ok(step.read(&out)?.chunks(2).map(|sum| u64::from(sum[1]) << 32 | u64::from(sum[0])).collect())
    })
}

on_each_device! {
    fn sums_are_exact(device: &Device) {
        for length in LENGTHS.into_iter().chain([CHUNK - 1, CHUNK, CHUNK + 1, 8 * CHUNK, 8 * CHUNK + 1]) {
            let mut random = Random::new(length as u64);
            let words: Vec<u32> = (0..length).map(|_| random.next_u64() as u32).collect();
            assert_eq!(sums(device, &words).unwrap(), expected(&words), "{length}");
        }
        // The largest possible sum.
        let largest = vec![u32::MAX; 2 * CHUNK];
        assert_eq!(sums(device, &largest).unwrap(), expected(&largest));
    }

    fn flips_and_swaps_change_sums(device: &Device) {
        let mut random = Random::new(5);
        let words: Vec<u32> = (0..3 * CHUNK as u32 + 100).map(|word| word ^ random.below(2)).collect();
        let sound = sums(device, &words).unwrap();
        for bit in 0..32 {
            let at = random.below(words.len() as u32) as usize;
            let mut flipped = words.clone();
            flipped[at] ^= 1 << bit;
            let got = sums(device, &flipped).unwrap();
            let differ: Vec<usize> = (0..got.len()).filter(|&chunk| got[chunk] != sound[chunk]).collect();
            assert_eq!(differ, [at / CHUNK], "flipping bit {bit} of word {at} must change only its chunk's sum");
            // Within one chunk and across two. Words further apart than one bit of noise are
            // different.
            let other = if at < CHUNK { at + 2 * CHUNK } else { at - 2 };
            let mut swapped = words.clone();
            swapped.swap(at, other);
            assert_ne!(sums(device, &swapped).unwrap(), sound, "swapping words {at} and {other} must change the sums");
        }
    }

    fn chunk_sums_are_placed_correctly(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        arena.step(|step| {
            let x = step.upload(&[1u32; 10], [10])?;
            for length in [0, 1, 3, 4] {
                let mut out = step.upload(&vec![0u32; length], [length])?;
                assert_refused(step.launch(checksum { x: x.slice(), first: u32::MAX, last: u32::MAX, out: out.out() }), &["checksum", "out", "2"]);
            }
            Ok(())
        }).unwrap();
    }
}

attack! {
    checksum::checksum { x: u32s 5000, first: number 7, last: number 9, out: out_u32 4 }
}
