//! `ex2.approx.ftz.f32` on the CPU, to the bit.
//!
//! The instruction turns x into a whole number of 2^-23. The integer part becomes the exponent. A
//! quadratic polynomial of the lower 17 bits, one for each of 64 segments, gives the significand.
//! Its form, with coefficients of 26, 16 and 10 bits, is that of Oberman and Siu, "A
//! high-performance area-efficient multifunction interpolator", 2005. [`square`] is cut as in
//! hardware.
//!
//! The coefficients were found from the 2^23 results for 1 to 2 of an H200 (compute capability
//! 9.0). The results for all 2^32 inputs have the digest of the instruction's
//! (`tests/kernels/ex2.rs`).

/// Returns 2^x as the instruction does. Below 2^-126 it is 0. A NaN gives the NaN `0x7fff_ffff`.
pub(crate) fn ex2(x: f32) -> f32 {
    if x.is_nan() {
        return f32::from_bits(0x7fff_ffff);
    }
    // Cut toward zero. Then a negative number that is not whole loses one more.
    let cut = (x * 8_388_608.0) as i32;
    let fixed = cut - i32::from(cut < 0 && cut & 0x7f_ffff != 0);
    let place = fixed as u32 & 0x1_ffff;
    let [constant, linear, quadratic] = SEGMENTS[(fixed >> 17 & 63) as usize].map(u64::from);
    // In units of 2^-38: 2^-15 of the last bit of the significand.
    let sum = (constant << 13) + BIAS + linear * u64::from(place) + quadratic * u64::from(square(place));
    let significand = (sum >> 15) as u32;
    match fixed >> 23 {
        128.. => f32::INFINITY,
        // The significand's first bit adds 1 to the exponent.
        exponent @ -126.. => f32::from_bits(significand + ((exponent + 126) << 23) as u32),
        _ => 0.0,
    }
}

/// Returns the square of a number of 17 bits in units of 2^19. Each product of two bits that is
/// less than a unit is left out.
fn square(place: u32) -> u32 {
    let products = |bit: u32| {
        // Twice the products with the bits below, and the bit's own square.
        let below = place & ((1 << bit) - 1);
        (below + (1 << (bit - 1))) >> (18 - bit)
    };
    (10..17).map(|bit| (place >> bit & 1) * products(bit)).sum()
}

/// The number that the instruction adds to each sum, before it cuts.
const BIAS: u64 = 6_114;

/// The polynomials of the segments: constants in units of 2^-25, and coefficients of `place` and of
/// its [`square`].
#[rustfmt::skip]
const SEGMENTS: [[u32; 3]; 64] = [
    [33_554_435, 22_713, 494], [33_919_818, 22_960, 501], [34_289_182, 23_210, 506], [34_662_565, 23_463, 511],
    [35_040_018, 23_718, 518], [35_421_577, 23_977, 521], [35_807_292, 24_238, 527], [36_197_209, 24_502, 532],
    [36_591_372, 24_768, 541], [36_989_825, 25_038, 546], [37_392_616, 25_311, 551], [37_799_797, 25_586, 559],
    [38_211_409, 25_865, 564], [38_627_504, 26_147, 568], [39_048_131, 26_431, 577], [39_473_337, 26_719, 583],
    [39_903_173, 27_010, 589], [40_337_690, 27_304, 596], [40_776_937, 27_602, 600], [41_220_970, 27_902, 609],
    [41_669_836, 28_206, 615], [42_123_592, 28_513, 622], [42_582_286, 28_824, 627], [43_045_977, 29_138, 633],
    [43_514_717, 29_455, 641], [43_988_561, 29_776, 647], [44_467_565, 30_100, 655], [44_951_786, 30_428, 661],
    [45_441_278, 30_759, 670], [45_936_101, 31_094, 677], [46_436_314, 31_432, 686], [46_941_971, 31_775, 691],
    [47_453_135, 32_121, 699], [47_969_867, 32_471, 705], [48_492_225, 32_824, 715], [49_020_269, 33_182, 721],
    [49_554_065, 33_543, 730], [50_093_674, 33_908, 739], [50_639_159, 34_277, 748], [51_190_582, 34_651, 753],
    [51_748_011, 35_028, 763], [52_311_510, 35_409, 773], [52_881_146, 35_795, 779], [53_456_983, 36_185, 787],
    [54_039_091, 36_579, 796], [54_627_538, 36_977, 806], [55_222_393, 37_380, 813], [55_823_725, 37_787, 822],
    [56_431_607, 38_198, 833], [57_046_106, 38_614, 842], [57_667_297, 39_035, 849], [58_295_254, 39_460, 858],
    [58_930_048, 39_889, 870], [59_571_754, 40_324, 877], [60_220_447, 40_763, 887], [60_876_205, 41_207, 896],
    [61_539_104, 41_655, 909], [62_209_220, 42_109, 917], [62_886_634, 42_568, 925], [63_571_424, 43_031, 938],
    [64_263_672, 43_500, 946], [64_963_458, 43_973, 959], [65_670_863, 44_452, 969], [66_385_972, 44_936, 980],
];
