//! The 1797 handwritten digits in `digits.bin`, which `data.py` creates and documents.
//!
//! Invariant: each image is used for either training or validation, and the same seed gives the
//! same split.

use std::sync::Arc;

use stepscope::data::{Loader, SplitMix64};
use stepscope::{HostBatch, Result};

/// The number of digits.
pub(crate) const CLASSES: usize = 10;
/// Pixels per 8x8 image.
pub(crate) const PIXELS: usize = 64;
/// The largest value of a pixel.
const WHITE: f32 = 16.0;
/// Bytes per image: its digit, and 5 bits per pixel.
const RECORD: usize = 1 + PIXELS * 5 / 8;
/// Images for validation: one in five.
const VALIDATION: usize = 360;

static PACKED: &[u8] = include_bytes!("digits.bin");

/// Images with their digits.
#[derive(Clone, HostBatch)]
pub(crate) struct Images {
    /// The pixels of each image, 0 to 1.
    pub(crate) pixels: Vec<[f32; PIXELS]>,
    /// The digit of each image.
    pub(crate) digits: Vec<u32>,
}

impl Images {
    /// Returns the training images and the validation images.
    pub(crate) fn load(seed: u64) -> (Self, Self) {
        let all = Self::unpack(PACKED);
        let order = shuffled(all.digits.len(), seed);
        let (validation, training) = order.split_at(VALIDATION);
        (all.choose(training), all.choose(validation))
    }

    fn unpack(packed: &[u8]) -> Self {
        let (records, rest) = packed.as_chunks::<RECORD>();
        assert!(rest.is_empty(), "digits.bin is truncated");
        let pixel = |bits: &[u8], number: usize| {
            // The five bits from `5 * number` on, in one or two bytes.
            let (byte, bit) = (5 * number / 8, 5 * number % 8);
            let next = bits.get(byte + 1).copied().unwrap_or(0);
            (u16::from_be_bytes([bits[byte], next]) << bit >> 11) as f32 / WHITE
        };
        let pixels = records.iter().map(|[_, bits @ ..]| std::array::from_fn(|number| pixel(bits, number)));
        Self { pixels: pixels.collect(), digits: records.iter().map(|record| u32::from(record[0])).collect() }
    }

    /// Returns the images with these numbers.
    pub(crate) fn choose(&self, numbers: &[usize]) -> Self {
        Self {
            pixels: numbers.iter().map(|&number| self.pixels[number]).collect(),
            digits: numbers.iter().map(|&number| self.digits[number]).collect(),
        }
    }

    /// Returns the images in this epoch's order, in batches that are prepared while earlier ones
    /// are trained on.
    pub(crate) fn batches(self: &Arc<Self>, batch: usize, seed: u64) -> Result<Loader<Self>> {
        let (images, order) = (Arc::clone(self), shuffled(self.digits.len(), seed));
        Loader::new((0..order.len().div_ceil(batch)).map(move |number| {
            let numbers = &order[number * batch..order.len().min((number + 1) * batch)];
            Ok(images.choose(numbers))
        }))
    }
}

/// Returns the numbers below `count` in an order set by the seed, by sorting random keys.
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut random = SplitMix64::new(SplitMix64::mix(seed));
    let mut keyed: Vec<(u64, usize)> = (0..count).map(|number| (random.next_u64(), number)).collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, number)| number).collect()
}
