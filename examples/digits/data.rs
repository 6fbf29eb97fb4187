//! 1797 handwritten digits, from `digits.bin`; `data.py` makes that file, and says where they come from.
//!
//! Invariant: an image is for training or for validation, never for both, and the same seed divides them in the same way.

use std::sync::Arc;

use stepscope::{Inputs, Loader, Result, Samples, SplitMix64};

/// Digits.
pub(crate) const CLASSES: usize = 10;
/// Pixels of an image of 8x8.
pub(crate) const PIXELS: usize = 64;
/// The largest value of a pixel.
const WHITE: f32 = 16.0;
/// Bytes of an image: its digit, and 5 bits for each pixel.
const RECORD: usize = 1 + PIXELS * 5 / 8;
/// Images for validation: a fifth.
const VALIDATION: usize = 360;

static PACKED: &[u8] = include_bytes!("digits.bin");

/// Images with their digits.
#[derive(Clone)]
pub(crate) struct Images {
    /// `[images, 64]`, 0 to 1.
    pub(crate) pixels: Vec<f32>,
    /// `[images]`.
    pub(crate) digits: Vec<u32>,
}

impl Images {
    /// All of them: those for training, and those for validation.
    pub(crate) fn load(seed: u64) -> (Self, Self) {
        let all = Self::unpack(PACKED);
        let order = shuffled(all.digits.len(), seed);
        let (validation, training) = order.split_at(VALIDATION);
        (all.choose(training), all.choose(validation))
    }

    fn unpack(packed: &[u8]) -> Self {
        let (records, rest) = packed.as_chunks::<RECORD>();
        assert!(rest.is_empty(), "digits.bin is torn");
        let pixel = |bits: &[u8], number: usize| {
            // The five bits from `5 number` on, in one or two bytes.
            let (byte, bit) = (5 * number / 8, 5 * number % 8);
            let next = bits.get(byte + 1).copied().unwrap_or(0);
            (u16::from_be_bytes([bits[byte], next]) << bit >> 11) as f32 / WHITE
        };
        let pixels = records.iter().flat_map(|[_, bits @ ..]| (0..PIXELS).map(|number| pixel(bits, number)));
        Self { pixels: pixels.collect(), digits: records.iter().map(|record| u32::from(record[0])).collect() }
    }

    /// The images of these numbers.
    pub(crate) fn choose(&self, numbers: &[usize]) -> Self {
        let image = |&number: &usize| &self.pixels[number * PIXELS..][..PIXELS];
        Self {
            pixels: numbers.iter().flat_map(image).copied().collect(),
            digits: numbers.iter().map(|&number| self.digits[number]).collect(),
        }
    }

    /// The images in an order of this epoch, in batches that are made while others are trained on.
    pub(crate) fn batches(self: &Arc<Self>, batch: usize, seed: u64) -> Result<Loader<Vec<Self>>> {
        let (images, order) = (Arc::clone(self), shuffled(self.digits.len(), seed));
        Loader::new((0..order.len().div_ceil(batch)).map(move |number| {
            let numbers = &order[number * batch..order.len().min((number + 1) * batch)];
            Ok(vec![images.choose(numbers)])
        }))
    }
}

impl Samples for Images {
    fn len(&self) -> usize {
        self.digits.len()
    }

    fn inputs(&self) -> Result<Inputs<'_>> {
        Inputs::new().with(&self.pixels, [self.len(), PIXELS])?.with(&self.digits, [self.len()])
    }
}

/// The numbers below `count` in the order that a seed names: each gets a random key.
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut random = SplitMix64::new(SplitMix64::mix(seed));
    let mut keyed: Vec<(u64, usize)> = (0..count).map(|number| (random.next_u64(), number)).collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, number)| number).collect()
}
