//! The handwritten digits of examples/digits/digits.bin, whose format data.py there documents, for
//! the examples of the Rust peers.

use rand::Rng;
use rand::seq::SliceRandom;

pub(crate) const CLASSES: usize = 10;
/// Pixels per 8x8 image.
pub(crate) const PIXELS: usize = 64;
/// Bytes per image: its digit, and 5 bits per pixel.
const RECORD: usize = 1 + PIXELS * 5 / 8;
/// Images for validation: one in five.
const VALIDATION: usize = 360;

static PACKED: &[u8] = include_bytes!("../../examples/digits/digits.bin");

/// Images with their digits.
pub(crate) struct Images {
    /// The pixels of all images, 0 to 1.
    pub(crate) pixels: Vec<f32>,
    #[allow(dead_code, reason = "the diffusion model has no labels")]
    pub(crate) digits: Vec<u32>,
}

impl Images {
    /// Returns the training images and the validation images.
    pub(crate) fn load(random: &mut impl Rng) -> [Self; 2] {
        let mut records: Vec<&[u8]> = PACKED.chunks_exact(RECORD).collect();
        records.shuffle(random);
        let (validation, training) = records.split_at(VALIDATION);
        [training, validation].map(|records| Self {
            pixels: records.iter().flat_map(|record| (0..PIXELS).map(|at| pixel(&record[1..], at))).collect(),
            digits: records.iter().map(|record| u32::from(record[0])).collect(),
        })
    }
}

/// Reads the five bits from `5 * number` on, in one or two bytes.
fn pixel(bits: &[u8], number: usize) -> f32 {
    let (byte, bit) = (5 * number / 8, 5 * number % 8);
    let next = bits.get(byte + 1).copied().unwrap_or(0);
    f32::from((u16::from_be_bytes([bits[byte], next]) << bit) >> 11) / 16.0
}
