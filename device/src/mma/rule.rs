//! The arithmetic of a tensor core instruction, on the CPU, to the bit.
//!
//! An instruction adds its products and the old sum at once. All are exact, and are aligned to the
//! largest exponent among them. What lies below the last kept bit is cut from each, and the sum of
//! the rest is exact. So the order of k within an instruction changes nothing.
//!
//! ```text
//! top = the largest exponent of a product or of the old sum, not below `least`
//! S   = the sum of trunc(x / 2^(top - fraction)) over products and the old sum
//! new = S 2^(top - fraction), cut to f32
//! ```
//! The exponent of a product is the sum of its operands' exponents, so its significand lies in [0,
//! 4). A subnormal number has the exponent of the least normal one. Zero has none. All cuts are
//! toward zero. A result of zero is +0.
//!
//! [`sum`] is the rule in integers. [`add`] computes the same bits by the CPU's vectors (`avx2.rs`,
//! `neon.rs`), which leave rare sums to it.
//!
//! The rule was measured on an H200 (compute capability 9.0): of 214,421,624,832 results of
//! `mma.sync` and `wgmma`, of normal, cancelling, subnormal and special numbers, none differs from
//! it. Its form is that of Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor
//! cores", 2021.

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[allow(clippy::disallowed_methods, reason = "loads vectors of arrays")]
mod avx2;
#[cfg(all(target_arch = "aarch64", not(miri)))]
#[allow(clippy::disallowed_methods, reason = "loads vectors of arrays")]
mod neon;

/// The rule that the emulator follows.
pub const RULE: Rule = Rule::HOPPER;

/// The parameters of the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The words of k whose products are added at once. An instruction has
    /// [`STEP`](crate::format::STEP).
    pub words: usize,
    /// The bits that are kept below the largest exponent.
    pub fraction: i32,
    /// The least value of the largest exponent.
    pub least: i32,
    /// True if a product that is zero counts for the largest exponent, with the exponents of its
    /// operands.
    pub zeros_count: bool,
    /// The bits of a NaN.
    pub nan: u32,
}

impl Rule {
    /// The rule of compute capability 9.0.
    pub const HOPPER: Self = Self { words: 8, fraction: 25, least: -133, zeros_count: false, nan: 0x7fff_ffff };
}

/// Adds the products of two rows with `COLS` columns (4 or 8) to their sums, as one instruction
/// does by [`RULE`]. `DEPTH` is the instruction's k: 16 of BF16, 8 of TF32.
///
/// The callers are compiled once, not in each version of a kernel, so the CPU's instructions are
/// chosen here. All give the same bits.
pub fn add<const COLS: usize, const DEPTH: usize>(
    sums: &mut [[f32; COLS]; 2],
    rows: [&[f32; DEPTH]; 2],
    columns: &[[f32; COLS]; DEPTH],
) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if const { suits_vectors(RULE) } && std::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has these instructions.
        return unsafe { avx2::add(sums, rows, columns) };
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    if const { suits_vectors(RULE) } {
        // SAFETY: every aarch64 that stepscope supports has these instructions.
        return unsafe { neon::add(sums, rows, columns) };
    }
    for (sums, row) in sums.iter_mut().zip(rows) {
        for (column, new) in sums.iter_mut().enumerate() {
            *new = sum(RULE, *new, row, |k| columns[k][column]);
        }
    }
}

/// The least and the largest exponent fields of `top` for which vectors of f32 are exact: a smaller
/// product is cut to zero, and no sum is subnormal or infinite.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
const LEAST_FIELD: i32 = 127 - 100;
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
const MOST_FIELD: i32 = 127 + 120;

/// True if the vectors compute the rule.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
const fn suits_vectors(rule: Rule) -> bool {
    // Sixteen products below 4 are below 2^31 with 25 bits after the point.
    let is_exact = rule.fraction >= 23 && rule.fraction <= 25 && rule.least <= LEAST_FIELD - 127;
    is_exact && rule.words == crate::format::STEP as usize && !rule.zeros_count
}

/// Replaces the sums whose bits `rare` has, by integers. `first` is the number of the first sum.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
#[cold]
#[inline(never)]
fn mend<const COLS: usize, const DEPTH: usize>(
    new: &mut [f32],
    sums: &[[f32; COLS]; 2],
    rows: [&[f32; DEPTH]; 2],
    columns: &[[f32; COLS]; DEPTH],
    first: usize,
    rare: u32,
) {
    for (at, new) in new.iter_mut().enumerate().filter(|(at, _)| rare >> at & 1 != 0) {
        let [row, column] = [(first + at) / COLS, (first + at) % COLS];
        *new = sum(RULE, sums[row][column], rows[row], |k| columns[k][column]);
    }
}

/// Returns `old` plus the products of a row with a column, as one instruction computes it, for any
/// numbers. The operands are BF16 or TF32, widened to f32.
pub fn sum<const DEPTH: usize>(rule: Rule, old: f32, row: &[f32; DEPTH], column: impl Fn(usize) -> f32) -> f32 {
    let at_once = DEPTH * rule.words / crate::format::STEP as usize;
    (0..DEPTH).step_by(at_once).fold(old, |sum, first| {
        let products = (first..first + at_once).map(|k| [row[k], column(k)]);
        sum_at_once(rule, sum, products)
    })
}

/// Adds the products to `old` at once.
fn sum_at_once(rule: Rule, old: f32, products: impl Iterator<Item = [f32; 2]> + Clone) -> f32 {
    if let Some(special) = special(rule, old, products.clone()) {
        return special;
    }
    let parts = || products.clone().map(|[a, b]| Part::of(a).times(Part::of(b)));
    let old = Part::of(old);
    let exponents = parts().filter(|part| rule.zeros_count || part.significand != 0).map(|part| part.exponent);
    let top = exponents.fold(rule.least, i32::max).max(if old.significand == 0 { rule.least } else { old.exponent });
    let unit = top - rule.fraction;
    let sum = parts().fold(old.cut_to(unit), |sum, part| sum + part.cut_to(unit));
    cut(sum, unit)
}

/// Returns the result if it is infinite or NaN because an operand or `old` is.
fn special(rule: Rule, old: f32, products: impl Iterator<Item = [f32; 2]>) -> Option<f32> {
    let infinities = products.map(|[a, b]| if a.is_finite() && b.is_finite() { 0.0 } else { a * b });
    // The sum of infinities of both signs is a NaN.
    let all = infinities.fold(if old.is_finite() { 0.0 } else { old }, |all, one| all + one);
    if all.is_nan() {
        return Some(f32::from_bits(rule.nan));
    }
    all.is_infinite().then_some(all)
}

/// A number, or a product: `significand 2^(exponent - bits)`.
#[derive(Clone, Copy)]
struct Part {
    significand: i64,
    exponent: i32,
    /// The bits below the point.
    bits: i32,
}

impl Part {
    fn of(x: f32) -> Self {
        let (field, fraction) = (x.to_bits() >> 23 & 0xff, i64::from(x.to_bits() & 0x7f_ffff));
        let size = if field == 0 { fraction } else { fraction | 1 << 23 };
        let significand = if x.is_sign_negative() { -size } else { size };
        Self { significand, exponent: field.max(1) as i32 - 127, bits: 23 }
    }

    fn times(self, other: Self) -> Self {
        Self {
            significand: self.significand * other.significand,
            exponent: self.exponent + other.exponent,
            bits: self.bits + other.bits,
        }
    }

    /// Returns the number in units of `2^unit`, cut toward zero.
    fn cut_to(self, unit: i32) -> i64 {
        match self.exponent - self.bits - unit {
            // The exponent of zero is not below the largest.
            _ if self.significand == 0 => 0,
            more if more >= 0 => self.significand << more,
            less => self.significand / (1 << (-less).min(62)),
        }
    }
}

/// Returns `sum 2^unit`, cut to f32: to 24 bits, or below 2^-126 to a multiple of 2^-149.
fn cut(sum: i64, unit: i32) -> f32 {
    if sum == 0 {
        return 0.0;
    }
    let power = |exponent: i32| f64::from_bits(((1023 + exponent) as u64) << 52);
    // Exact: a sum has fewer bits than f64.
    let size = sum.unsigned_abs();
    let exponent = ((size as f64).to_bits() >> 52) as i32 - 1023;
    // The places below the last that f32 keeps.
    let dropped = (exponent - 23).max(-149 - unit);
    let kept = if dropped > 0 { size >> dropped.min(63) << dropped.min(63) } else { size };
    // Infinite from 2^128 on.
    let value = (kept as f64 * power(unit)) as f32;
    if sum < 0 && kept != 0 { -value } else { value }
}
