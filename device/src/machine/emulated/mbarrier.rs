//! Barriers in shared memory at which some threads arrive and others wait, as objects of the
//! emulator.

use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use crate::tile::SharedTile;
use crate::vector::load_raw;
use crate::wgmma::{BoxElement, CHUNKS};
use cuda_std::emulator::mbarrier;
use cuda_std::tensor_map::{BOX_BYTES, TensorMap};
use half::bf16;

/// The bytes of a barrier.
pub const BARRIER_BYTES: u32 = 8;

/// A barrier in the block's shared memory.
#[derive(Clone, Copy)]
pub struct Barrier(u32);

impl Barrier {
    /// Returns the barrier that lies `byte_offset` bytes, a multiple of 8, into shared memory.
    #[inline(always)]
    pub fn new(byte_offset: u32) -> Self {
        Self(byte_offset)
    }

    /// Initializes the barrier for phases of `arrivals` arrivals.
    ///
    /// # Safety
    /// See the GPU's version. The emulator checks it.
    pub unsafe fn init(self, arrivals: u32) {
        mbarrier::init(self.0, arrivals);
    }

    /// Arrives if `condition` is true.
    ///
    /// # Safety
    /// See the GPU's version. The emulator checks it.
    pub unsafe fn arrive_if(self, condition: bool) {
        if condition {
            mbarrier::arrive(self.0);
        }
    }

    /// Arrives, and makes the present phase expect this many bytes.
    ///
    /// # Safety
    /// See the GPU's version. The emulator checks it.
    pub unsafe fn arrive_expecting(self, bytes: u32) {
        mbarrier::arrive_expecting(self.0, bytes);
    }

    /// Copies a box of a tensor map, as on the GPU. Race detection sees accesses of the copy
    /// engine.
    ///
    /// # Safety
    /// See the GPU's version. The emulator checks it.
    #[track_caller]
    pub unsafe fn copy_box<T: BoxElement>(self, to: SharedTile<u32>, map: TensorMap<T>, first: [u32; 3]) {
        mbarrier::bring(self.0, map.box_rows() * BOX_BYTES, || {
            for (row, chunk) in (0..map.box_rows()).flat_map(|row| (0..CHUNKS).map(move |chunk| (row, chunk))) {
                let words = core::array::from_fn(|word| {
                    let elements = 4 / size_of::<T>() as u32;
                    let element = elements * (CHUNK_WORDS * chunk + word as u32);
                    (0..elements).fold(0, |word, at| word | bits(map, first, [element + at, row]) << (16 * at))
                });
                to.set_chunk(swizzled(CHUNKS, row, chunk) * CHUNK_WORDS, words);
            }
        });
    }

    /// Copies words, as on the GPU. Race detection sees accesses of the copy engine.
    ///
    /// # Safety
    /// See the GPU's version. The emulator checks it.
    #[track_caller]
    pub unsafe fn copy_words(self, to: SharedTile<u32>, words: u32, values: &[bf16], from: usize) {
        mbarrier::bring(self.0, words * 4, || {
            for chunk in 0..words / CHUNK_WORDS {
                // SAFETY: the function's contract, which the emulator checks.
                unsafe { to.copy_chunk(chunk * CHUNK_WORDS, values, from + (chunk * 2 * CHUNK_WORDS) as usize) };
            }
        });
    }

    /// Does nothing: copies have ended.
    ///
    /// # Safety
    /// See the GPU's version.
    pub unsafe fn await_copies(self) {}

    /// Waits until the phase of this parity has ended.
    ///
    /// # Safety
    /// See the GPU's version. The emulator checks it.
    #[track_caller]
    pub unsafe fn wait(self, parity: u32) {
        mbarrier::wait(self.0, parity);
    }
}

/// Does nothing: barriers are visible at once.
pub fn fence_barriers() {}

/// Returns the bits of an element of a box, or 0 if it does not exist.
#[inline(always)]
#[track_caller]
fn bits<T: BoxElement>(map: TensorMap<T>, [element, row, matrix]: [u32; 3], [right, down]: [u32; 2]) -> u32 {
    let place = [element + right, row + down, matrix];
    if place.iter().zip(map.extents()).any(|(at, extent)| *at >= extent) {
        return 0;
    }
    // SAFETY: the contract has checked that the map's matrices lie inside its memory. The emulator
    // checks the access.
    unsafe { load_raw(map.memory().0, map.index(place)) }.bits()
}
