//! The rule by AVX2, for eight sums at a time.
//!
//! Products of BF16 and of TF32 are exact in f32. The exponent of a product is read from the
//! product of its operands' powers of two, so the largest of them is a maximum of bits. A scale
//! of `2^(fraction - top)` makes integers of the products, and the conversion to i32 cuts them. The
//! sum of an instruction's products fits i32, and the old sum is added in f64. That sum is cut by
//! a mask, and its conversion to f32 is exact.
//!
//! Subnormal operands, infinities, NaNs, and sums near the ends of f32 are rare. Their columns are
//! computed in integers.

use super::{LEAST_FIELD, MOST_FIELD, RULE, mend};
use core::arch::x86_64::*;

/// The bits of an f32's exponent.
const EXPONENT: i32 = 0x7f80_0000;
/// Computes [`add`](super::add).
#[target_feature(enable = "avx2")]
pub(super) fn add<const COLS: usize, const DEPTH: usize>(
    sums: &mut [[f32; COLS]; 2],
    rows: [&[f32; DEPTH]; 2],
    columns: &[[f32; COLS]; DEPTH],
) {
    const { assert!((COLS == 4 || COLS == 8) && DEPTH.is_multiple_of(8)) };
    // With eight columns, a vector has a row's sums; with four, one vector has both rows'.
    if COLS == 8 {
        add_vectors::<2, COLS, DEPTH>(sums, rows, columns)
    } else {
        add_vectors::<1, COLS, DEPTH>(sums, rows, columns)
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn add_vectors<const VECTORS: usize, const COLS: usize, const DEPTH: usize>(
    sums: &mut [[f32; COLS]; 2],
    rows: [&[f32; DEPTH]; 2],
    columns: &[[f32; COLS]; DEPTH],
) {
    let exponent = _mm256_set1_epi32(EXPONENT);
    let (mut old, mut tops) = ([_mm256_setzero_ps(); VECTORS], [exponent; VECTORS]);
    for v in 0..VECTORS {
        old[v] = load_sums(sums, v);
        tops[v] = _mm256_and_si256(_mm256_castps_si256(old[v]), exponent);
    }
    let mut operands = Operands::new();
    for (k, column) in columns.iter().enumerate() {
        let column = _mm256_castps_si256(load_column(column));
        operands.add(column);
        let power = _mm256_castsi256_ps(_mm256_and_si256(column, exponent));
        for (v, top) in tops.iter_mut().enumerate() {
            let row = _mm256_castps_si256(load_row::<COLS, DEPTH>(rows, v, k));
            let product = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(row, exponent)), power);
            // Unsigned, because zero times infinity is a NaN whose sign is set.
            *top = _mm256_max_epu32(*top, _mm256_castps_si256(product));
        }
    }
    let of_rows = [row_operands(rows[0]), row_operands(rows[1])];
    let mut rare = [0; VECTORS];
    let mut scales = [_mm256_setzero_ps(); VECTORS];
    for v in 0..VECTORS {
        let [few, zero] = of_vector::<COLS>(of_rows, v);
        // Nothing is added if the old sum is 0 and a row or a column is. If all powers are too
        // small for f32, the column is rare.
        let nothing = _mm256_or_si256(tops[v], twice(_mm256_castps_si256(old[v])));
        let nothing = _mm256_cmpeq_epi32(nothing, _mm256_setzero_si256());
        let zeros = _mm256_and_si256(nothing, _mm256_or_si256(zero, operands.all_zero()));
        let top = _mm256_blendv_epi8(tops[v], _mm256_set1_epi32(127 << 23), zeros);
        let below = _mm256_cmpgt_epi32(_mm256_set1_epi32(LEAST_FIELD << 23), top);
        let above = _mm256_cmpgt_epi32(top, _mm256_set1_epi32(MOST_FIELD << 23));
        let all = _mm256_or_si256(_mm256_or_si256(below, above), _mm256_or_si256(few, operands.subnormal()));
        rare[v] = _mm256_movemask_ps(_mm256_castsi256_ps(all));
        // The field of 2^(fraction - top).
        let scale = _mm256_set1_epi32(((254 + RULE.fraction as u32) << 23) as i32);
        scales[v] = _mm256_castsi256_ps(_mm256_sub_epi32(scale, top));
        tops[v] = top;
    }
    let mut whole = [_mm256_setzero_si256(); VECTORS];
    for (k, column) in columns.iter().enumerate() {
        let column = load_column(column);
        for v in 0..VECTORS {
            let product = _mm256_mul_ps(load_row::<COLS, DEPTH>(rows, v, k), column);
            whole[v] = _mm256_add_epi32(whole[v], _mm256_cvttps_epi32(_mm256_mul_ps(product, scales[v])));
        }
    }
    for v in 0..VECTORS {
        let sum = cut(whole[v], _mm256_cvttps_epi32(_mm256_mul_ps(old[v], scales[v])), tops[v]);
        let mut new = [0.0; 8];
        // SAFETY: eight numbers have room for a vector.
        unsafe { _mm256_storeu_ps(new.as_mut_ptr(), sum) };
        if rare[v] != 0 {
            mend(&mut new, sums, rows, columns, 8 * v, rare[v] as u32);
        }
        sums.as_flattened_mut()[8 * v..][..8].copy_from_slice(&new);
    }
}

/// Returns the sums of vector `v`.
#[inline]
#[target_feature(enable = "avx2")]
fn load_sums<const COLS: usize>(sums: &[[f32; COLS]; 2], v: usize) -> __m256 {
    let sums = &sums.as_flattened()[8 * v..][..8];
    // SAFETY: there are eight numbers.
    unsafe { _mm256_loadu_ps(sums.as_ptr()) }
}

/// Returns one k of the columns of a vector.
#[inline]
#[target_feature(enable = "avx2")]
fn load_column<const COLS: usize>(column: &[f32; COLS]) -> __m256 {
    // SAFETY: there are eight numbers, or four, which fill both halves.
    unsafe {
        if COLS == 8 {
            return _mm256_loadu_ps(column.as_ptr());
        }
        let column = _mm_loadu_ps(column.as_ptr());
        _mm256_set_m128(column, column)
    }
}

/// Returns one k of the row of each sum in vector `v`.
#[inline]
#[target_feature(enable = "avx2")]
fn load_row<const COLS: usize, const DEPTH: usize>(rows: [&[f32; DEPTH]; 2], v: usize, k: usize) -> __m256 {
    if COLS == 8 {
        return _mm256_broadcast_ss(&rows[v][k]);
    }
    _mm256_blend_ps::<0xf0>(_mm256_broadcast_ss(&rows[0][k]), _mm256_broadcast_ss(&rows[1][k]))
}

/// Sets bits in each sum of vector `v` that its row has in `rows`: for subnormal numbers, and for
/// zeros only.
#[inline]
#[target_feature(enable = "avx2")]
fn of_vector<const COLS: usize>(rows: [[i32; 2]; 2], v: usize) -> [__m256i; 2] {
    if COLS == 8 {
        return [_mm256_set1_epi32(rows[v][0]), _mm256_set1_epi32(rows[v][1])];
    }
    let [[few, zero], [few_below, zero_below]] = rows;
    [
        _mm256_set_m128i(_mm_set1_epi32(few_below), _mm_set1_epi32(few)),
        _mm256_set_m128i(_mm_set1_epi32(zero_below), _mm_set1_epi32(zero)),
    ]
}

/// Returns all bits set if a row has a subnormal number, and if all its numbers are zero.
#[inline]
#[target_feature(enable = "avx2")]
fn row_operands<const DEPTH: usize>(row: &[f32; DEPTH]) -> [i32; 2] {
    let mut operands = Operands::new();
    for chunk in row.chunks_exact(8) {
        // SAFETY: a chunk has eight numbers.
        operands.add(_mm256_castps_si256(unsafe { _mm256_loadu_ps(chunk.as_ptr()) }));
    }
    let few = _mm256_movemask_ps(_mm256_castsi256_ps(operands.subnormal()));
    [-i32::from(few != 0), -_mm256_testz_si256(operands.any, operands.any)]
}

/// The magnitudes of some operands.
struct Operands {
    /// The least of them, as twice its bits less 1: zero is the largest.
    least: __m256i,
    /// The bits that any has.
    any: __m256i,
}

impl Operands {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn new() -> Self {
        Self { least: _mm256_set1_epi32(-1), any: _mm256_setzero_si256() }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn add(&mut self, bits: __m256i) {
        let size = twice(bits);
        self.least = _mm256_min_epu32(self.least, _mm256_sub_epi32(size, _mm256_set1_epi32(1)));
        self.any = _mm256_or_si256(self.any, size);
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn subnormal(&self) -> __m256i {
        let most = _mm256_set1_epi32(0xff_ffff);
        _mm256_cmpeq_epi32(_mm256_max_epu32(self.least, most), most)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn all_zero(&self) -> __m256i {
        _mm256_cmpeq_epi32(self.any, _mm256_setzero_si256())
    }
}

/// Returns the bits of numbers without their signs, shifted left by one.
#[inline]
#[target_feature(enable = "avx2")]
fn twice(bits: __m256i) -> __m256i {
    _mm256_add_epi32(bits, bits)
}

/// Returns `(products + old) 2^(top - fraction)`, cut to f32.
#[inline]
#[target_feature(enable = "avx2")]
fn cut(products: __m256i, old: __m256i, top: __m256i) -> __m256 {
    // The fields of the powers as f64.
    let unit = _mm256_add_epi32(_mm256_srli_epi32::<23>(top), _mm256_set1_epi32(1023 - 127 - RULE.fraction));
    let low = cut_half(_mm256_castsi256_si128(products), _mm256_castsi256_si128(old), _mm256_castsi256_si128(unit));
    let [products, old, unit] = [
        _mm256_extracti128_si256::<1>(products),
        _mm256_extracti128_si256::<1>(old),
        _mm256_extracti128_si256::<1>(unit),
    ];
    _mm256_set_m128(cut_half(products, old, unit), low)
}

/// Computes [`cut`] of four sums. `unit` has the fields of powers of two.
#[inline]
#[target_feature(enable = "avx2")]
fn cut_half(products: __m128i, old: __m128i, unit: __m128i) -> __m128 {
    let sum = _mm256_add_pd(_mm256_cvtepi32_pd(products), _mm256_cvtepi32_pd(old));
    let kept = _mm256_and_si256(_mm256_castpd_si256(sum), _mm256_set1_epi64x(!0x1fff_ffff));
    let unit = _mm256_castsi256_pd(_mm256_slli_epi64::<52>(_mm256_cvtepu32_epi64(unit)));
    _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_castsi256_pd(kept), unit))
}
