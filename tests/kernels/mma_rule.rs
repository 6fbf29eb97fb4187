//! The arithmetic of tensor core instructions, `kernels::mma::rule`: its vectors against integers,
//! and integers against the exact sum.

use crate::support::Random;
use kernels::mma::rule::{RULE, Rule, add, sum};

/// Numbers with `bits` bits of significand: exponents of a range around 1, and one in `few` has any
/// bits.
fn operands<const N: usize>(random: &mut Random, bits: u32, spread: u32, few: u32) -> [f32; N] {
    std::array::from_fn(|_| {
        let any = random.next_u64() as u32;
        let kept = !0 << (24 - bits);
        if few > 0 && random.below(few) == 0 {
            let special = [0, 0x8000_0000, 1 << (24 - bits), 0x7f80_0000, 0xff80_0000, 0x7fc0_0000, any, any];
            return f32::from_bits(special[random.below(8) as usize] & kept);
        }
        let exponent = 127 + random.below(spread) - spread / 2;
        f32::from_bits((any & 0x807f_ffff | exponent << 23) & kept)
    })
}

/// Compares the vectors with the integers for `COLS` columns and `DEPTH` k.
fn check<const COLS: usize, const DEPTH: usize>(random: &mut Random, bits: u32, [spread, few]: [u32; 2]) {
    let rows: [[f32; DEPTH]; 2] = [operands(random, bits, spread, few), operands(random, bits, spread, few)];
    let mut columns: [[f32; COLS]; DEPTH] = std::array::from_fn(|_| operands(random, bits, spread, few));
    let old: [[f32; COLS]; 2] = std::array::from_fn(|_| operands(random, 24, spread, few));
    // Rows and columns of zeros, as past the end of k.
    if random.below(4) == 0 {
        columns.iter_mut().for_each(|column| column[0] = 0.0);
    }
    let zero = [0.0; DEPTH];
    let rows = [&rows[0], if random.below(4) == 0 { &zero } else { &rows[1] }];
    let old = if random.below(4) == 0 { [[0.0; COLS]; 2] } else { old };
    let mut got = old;
    add(&mut got, rows, &columns);
    for row in 0..2 {
        for column in 0..COLS {
            let want = sum(RULE, old[row][column], rows[row], |k| columns[k][column]);
            assert_eq!(got[row][column].to_bits(), want.to_bits(), "{:?} and {rows:?} x {columns:?}", old[row][column]);
        }
    }
}

#[test]
fn vectors_match_integers() {
    let mut random = Random::new(63);
    for numbers in [[4, 0], [30, 0], [30, 40], [120, 60], [250, 0], [250, 8]] {
        for _ in 0..4000 {
            check::<8, 16>(&mut random, 8, numbers);
            check::<4, 16>(&mut random, 8, numbers);
            check::<8, 8>(&mut random, 11, numbers);
            check::<4, 8>(&mut random, 11, numbers);
        }
    }
}

/// Sums that the rule defines by hand.
#[test]
fn sums_are_cut() {
    let of = |rule: Rule, old: f32, row: &[f32], column: &[f32]| {
        let at = |values: &[f32], k: usize| values.get(k).copied().unwrap_or(0.0);
        let row: [f32; 16] = std::array::from_fn(|k| at(row, k));
        sum(rule, old, &row, |k| at(column, k))
    };
    let power = |exponent: i32| 2_f32.powi(exponent);
    // 25 bits are kept below the largest: two halves of a unit add up, and quarters are lost.
    let small = [power(0), power(-24), power(-24)];
    assert_eq!(of(RULE, 0.0, &small, &[1.0; 3]), 1.0 + power(-23));
    assert_eq!(of(RULE, 1.0, &[power(-26); 16], &[1.0; 16]), 1.0);
    assert_eq!(of(RULE, 1.0, &[power(-25); 16], &[1.0; 16]), 1.0 + power(-21));
    // Each is cut toward zero by itself, and so is the sum.
    assert_eq!(of(RULE, 1.0, &[-power(-26)], &[1.0]), 1.0);
    assert_eq!(of(RULE, 1.0, &[-power(-25)], &[1.0]), 1.0 - power(-24));
    assert_eq!(of(RULE, -1.0, &[power(-25)], &[1.0]), -1.0 + power(-24));
    // Zero is +0, and a NaN has one pattern.
    assert_eq!(of(RULE, -0.0, &[-0.0], &[1.0]).to_bits(), 0);
    assert_eq!(of(RULE, 0.0, &[f32::INFINITY], &[0.0]).to_bits(), RULE.nan);
    assert_eq!(of(RULE, f32::NEG_INFINITY, &[f32::INFINITY], &[1.0]).to_bits(), RULE.nan);
    assert_eq!(of(RULE, 1.0, &[f32::INFINITY], &[-2.0]), f32::NEG_INFINITY);
    // Overflow, and subnormal results.
    assert_eq!(of(RULE, f32::MAX, &[f32::MAX], &[1.0]), f32::INFINITY);
    assert_eq!(of(RULE, 0.0, &[power(-70)], &[power(-70)]), power(-140));
    assert_eq!(of(RULE, 0.0, &[power(-75)], &[-power(-75)]).to_bits(), 0);
    assert_eq!(of(RULE, power(-149), &[power(-75)], &[power(-75)]), power(-149));
    // A rule of halves, with fewer bits: the second half is added to the first's sum.
    let halves = Rule { words: 4, fraction: 24, ..RULE };
    let mut row = [0.0; 16];
    (row[0], row[8], row[9]) = (1.0, power(-24), power(-24));
    assert_eq!(of(halves, 0.0, &row, &[1.0; 16]), 1.0 + power(-23));
    (row[0], row[8], row[9]) = (power(-24), 1.0, power(-24));
    assert_eq!(of(Rule { fraction: 23, ..halves }, 0.0, &row, &[1.0; 16]), 1.0);
    assert_eq!(of(halves, power(-25), &row, &[1.0; 16]), 1.0 + power(-23));
}
