//! Optimizer state in 8 bits: codes of a run of 64 elements, and their scale.
//!
//! ```text
//! a run of 64 elements in 17 words: | 4 codes | 4 codes | .. 16 words .. | scale, f32 |
//!
//! signed       scale = max |x|           code = round(254 x / (scale + |x|)), -127 ..= 127
//!              x = scale code / (254 - |code|)
//! squares      scale = max sqrt(x)       code = round(255 sqrt(x) / scale), 0 ..= 255
//!              x = (code scale / 255)^2, at least code 1 for x > 0
//! ```
//! The signed code is that of `2 t / (1 + |t|)` with `t = x / scale`: it gives small numbers twice
//! the resolution of large ones (FlashOptim, arXiv 2602.23349). The functions are of additions,
//! multiplications, divisions and square roots, each rounded once. `round` is to nearest, ties to
//! even.
//!
//! Invariant: the bits are the same on every device, and zeros stay zero. A run with a number that
//! is not finite gets the scale NaN and codes of zero, so it becomes NaN as a whole.

use crate::update::RUN;
use crate::vector::{F4, load_raw, store};
use crate::warp::{combine_lanes, max};
use cuda_std::{GpuFloat, warp};

/// The words of a run: its codes, and its scale.
pub const RUN_WORDS: usize = RUN / F4::LEN + 1;

/// The lanes that have a run, each a vector of it.
const LANES: u32 = (RUN / F4::LEN) as u32;

/// The bits of the scale of a run with a number that is not finite.
const NAN: u32 = 0x7fc0_0000;

/// The numbers of a state, which decide its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Numbers of either sign, such as a first moment or a velocity.
    Signed,
    /// Numbers of at least 0 whose root matters, such as a second moment.
    Squares,
}

/// Returns the integer nearest to a number of at most 2^22, ties to even, in two's complement.
#[inline(always)]
fn round(value: f32) -> u32 {
    // One and a half times 2^23: the sum's last place is 1.
    const UNIT: f32 = 12_582_912.0;
    (value + UNIT).to_bits().wrapping_sub(UNIT.to_bits())
}

impl Code {
    /// Returns the number of which the run's scale is the largest.
    #[inline(always)]
    pub fn magnitude(self, value: f32) -> f32 {
        match self {
            Self::Signed => value.abs(),
            Self::Squares => GpuFloat::sqrt(value),
        }
    }

    /// Returns the code of a number, in the lowest 8 bits, for a scale above 0.
    #[inline(always)]
    pub fn encode(self, value: f32, scale: f32) -> u32 {
        let magnitude = self.magnitude(value);
        match self {
            Self::Signed => round(254.0 * (value / (scale + magnitude))) & 0xff,
            Self::Squares => {
                let code = round(255.0 * (magnitude / scale));
                if code == 0 && value > 0.0 { 1 } else { code & 0xff }
            }
        }
    }

    /// Returns the number of a code in the lowest 8 bits.
    #[inline(always)]
    pub fn decode(self, code: u32, scale: f32) -> f32 {
        match self {
            Self::Signed => {
                let code = ((code << 24) as i32 >> 24) as f32;
                scale * (code / (254.0 - code.abs()))
            }
            Self::Squares => {
                let root = (code & 0xff) as f32 * (scale / 255.0);
                root * root
            }
        }
    }
}

/// Loads the four numbers from `index` on.
///
/// # Safety
/// `state` is valid for reads of the run of `index`, a multiple of four.
#[inline(always)]
#[track_caller]
pub unsafe fn load4(state: *const u32, index: usize, code: Code) -> F4 {
    let start = index / RUN * RUN_WORDS;
    // SAFETY: the caller guarantees that the run may be read.
    let (codes, scale) = unsafe {
        let codes = load_raw(state, start + index % RUN / F4::LEN);
        (codes, f32::from_bits(load_raw(state, start + RUN_WORDS - 1)))
    };
    F4([
        code.decode(codes, scale),
        code.decode(codes >> 8, scale),
        code.decode(codes >> 16, scale),
        code.decode(codes >> 24, scale),
    ])
}

/// Writes the four numbers from `index` on, and with the other lanes of the run its scale.
///
/// # Safety
/// `state` is valid for reads and writes of the run of `index`, a multiple of four. The lanes that
/// have the run, each the vector at its own place, call it together, after they have read the run.
#[inline(always)]
#[track_caller]
pub unsafe fn store4(values: F4, state: *mut u32, index: usize, code: Code) {
    let [a, b, c, d] = values.0;
    let magnitudes = [code.magnitude(a), code.magnitude(b), code.magnitude(c), code.magnitude(d)];
    let own = max(max(magnitudes[0], magnitudes[1]), max(magnitudes[2], magnitudes[3]));
    let mask = (u32::MAX >> (u32::BITS - LANES)) << (warp::lane_id() & !(LANES - 1));
    // SAFETY: the lanes of the mask have the run, and call this together.
    let scale = unsafe { combine_lanes(mask, LANES, own, max) };
    let codes = if scale > 0.0 && scale < f32::INFINITY {
        code.encode(a, scale) | code.encode(b, scale) << 8 | code.encode(c, scale) << 16 | code.encode(d, scale) << 24
    } else {
        0
    };
    let start = index / RUN * RUN_WORDS;
    // SAFETY: the run may be written. No lane writes the scale before all lanes have read it.
    unsafe {
        store(state, start + index % RUN / F4::LEN, codes);
        warp::sync_warp(mask);
        if index.is_multiple_of(RUN) {
            let known = scale < f32::INFINITY;
            store(state, start + RUN_WORDS - 1, if known { scale.to_bits() } else { NAN });
        }
    }
}
