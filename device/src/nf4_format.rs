//! Matrices in NF4 with double quantisation (Dettmers et al., "QLoRA", 2023), with the numbers of
//! bitsandbytes.
//!
//! ```text
//! weights of a matrix [outputs, inputs], row by row
//!   64 weights       a block: each weight is NF4[code] times the block's scale
//!   256 blocks       a group: each scale is DYNAMIC[code] times the group's factor, plus the offset
//!   all groups       one offset, the mean of the scales
//!
//! words of u32       8 codes a word  | 4 scales a word | a factor a word, f32 | the offset, f32
//!                    from 0          | from `scales`   | from `factors`       | at `offset`
//! ```
//! The codes of weights 2 i and 2 i + 1 are the high and the low half of byte i. Bytes have
//! ascending addresses, as in the files of bitsandbytes. The words are filled up to a multiple of
//! 16 bytes.
//!
//! Invariant: a weight is decoded as f32: a product and a sum for the scale, and a product for the
//! weight, each rounded. These are the operations of bitsandbytes.

/// The weights that share a scale.
pub const BLOCK: usize = 64;
/// The scales that share a factor.
pub const GROUP: usize = 256;
/// The codes in a word.
pub const PER_WORD: usize = 8;

/// The values of the codes of weights.
#[rustfmt::skip]
pub const NF4: [f32; 16] = [
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
];

/// The values of the codes of scales from [`ZERO_SCALE`] on. Those below have the same magnitudes
/// (Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2015).
#[rustfmt::skip]
pub const DYNAMIC: [f32; 129] = [
    0.0, 5.5000004e-7, 3.2500002e-6, 7.75e-6, 2.1249998e-5, 4.375e-5, 6.625e-5, 8.875e-5,
    1.5625001e-4, 2.6875004e-4, 3.8125002e-4, 4.9375003e-4, 6.062501e-4, 7.1875006e-4, 8.3125e-4,
    9.437501e-4, 0.0012812499, 0.00184375, 0.00240625, 0.00296875, 0.0035312497, 0.00409375,
    0.0046562497, 0.0052187503, 0.00578125, 0.00634375, 0.00690625, 0.00746875, 0.00803125,
    0.00859375, 0.009156249, 0.00971875, 0.01140625, 0.01421875, 0.01703125, 0.019843752,
    0.02265625, 0.02546875, 0.028281251, 0.03109375, 0.03390625, 0.036718752, 0.03953125,
    0.042343747, 0.04515625, 0.04796875, 0.05078125, 0.05359375, 0.05640625, 0.059218753,
    0.06203125, 0.06484375, 0.067656256, 0.070468746, 0.07328125, 0.07609375, 0.07890625,
    0.08171876, 0.08453125, 0.08734375, 0.09015625, 0.092968754, 0.09578126, 0.09859375,
    0.107031256, 0.12109375, 0.13515624, 0.14921875, 0.16328125, 0.17734376, 0.19140625,
    0.20546874, 0.21953125, 0.23359375, 0.24765624, 0.26171875, 0.27578127, 0.28984374, 0.30390626,
    0.31796873, 0.33203125, 0.34609374, 0.36015624, 0.37421876, 0.38828123, 0.40234375, 0.41640624,
    0.43046874, 0.44453126, 0.45859373, 0.47265625, 0.4867187, 0.50078124, 0.5148437, 0.5289062,
    0.54296875, 0.5570313, 0.5710938, 0.58515626, 0.5992187, 0.61328125, 0.6273438, 0.6414063,
    0.65546876, 0.6695312, 0.68359375, 0.6976563, 0.7117188, 0.72578126, 0.7398437, 0.75390625,
    0.7679688, 0.78203124, 0.79609376, 0.8101562, 0.82421875, 0.8382813, 0.85234374, 0.86640626,
    0.8804687, 0.89453125, 0.9085938, 0.92265624, 0.93671876, 0.9507812, 0.96484375, 0.9789063,
    0.99296874, 1.0,
];
/// The code of a scale that equals the offset.
pub const ZERO_SCALE: u32 = 127;

/// The place of each part in the words of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The first word with scales.
    pub scales: usize,
    /// The first word with a factor.
    pub factors: usize,
    /// The word with the offset.
    pub offset: usize,
    /// The number of words.
    pub words: usize,
}

impl Layout {
    /// Returns the layout of a matrix of this many weights.
    #[inline(always)]
    pub const fn new(weights: usize) -> Self {
        let blocks = weights.div_ceil(BLOCK);
        let scales = weights.div_ceil(PER_WORD);
        let factors = scales + blocks.div_ceil(4);
        let offset = factors + blocks.div_ceil(GROUP);
        Self { scales, factors, offset, words: (offset + 1).next_multiple_of(4) }
    }
}

/// Returns the position of a weight's code in its word: the first of its four bits.
#[inline(always)]
pub const fn shift(weight: usize) -> u32 {
    4 * ((weight % PER_WORD) ^ 1) as u32
}

/// Returns a block's scale.
#[inline(always)]
pub fn scale(code: u32, factor: f32, offset: f32) -> f32 {
    let code = code % 256;
    let magnitude = DYNAMIC[code.abs_diff(ZERO_SCALE) as usize];
    let value = if code < ZERO_SCALE { -magnitude } else { magnitude };
    value * factor + offset
}

/// Returns a weight.
#[inline(always)]
pub fn weight(code: u32, scale: f32) -> f32 {
    NF4[(code % 16) as usize] * scale
}
