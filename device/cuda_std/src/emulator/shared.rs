//! A block's shared memory on the host.
//!
//! ```text
//! on a cache line:
//!   | 256 bytes red zone | the launch's bytes, as NaN | 256 bytes red zone, and up to 15 more |
//! ```
//! Invariant: a write past either end is found when the block has ended, if it hits a red zone.

use super::fault::Cause;

/// The bytes before and after the shared memory that no thread may change.
const RED_ZONE_BYTES: usize = 256;
const RED_ZONE: u8 = 0xa5;
/// The fill of fresh shared memory, which then reads as NaN.
const POISON: u8 = 0xff;

/// A cache line. Memory that begins on one is accessed with the fewest lines per vector.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// The shared memory of the blocks that run on one OS thread, one after another.
#[derive(Default)]
pub(super) struct SharedMemory(Vec<Line>);

impl SharedMemory {
    /// Returns poisoned shared memory of `bytes` between two red zones.
    pub(super) fn fresh(&mut self, bytes: usize) -> *mut u8 {
        let total = bytes.next_multiple_of(16) + 2 * RED_ZONE_BYTES;
        self.0.resize(self.0.len().max(total.div_ceil(size_of::<Line>())), Line([0; _]));
        let start = self.0.as_mut_ptr().cast::<u8>();
        // SAFETY: the vector holds at least `total` bytes, and the three parts follow each other
        // within them.
        unsafe {
            start.write_bytes(RED_ZONE, RED_ZONE_BYTES);
            start.add(RED_ZONE_BYTES).write_bytes(POISON, bytes);
            start.add(RED_ZONE_BYTES + bytes).write_bytes(RED_ZONE, total - RED_ZONE_BYTES - bytes);
            start.add(RED_ZONE_BYTES)
        }
    }

    /// Returns the first change of a red zone around the `bytes` that [`fresh`](Self::fresh) has
    /// returned last.
    ///
    /// # Safety
    /// No thread accesses the memory any more.
    pub(super) unsafe fn check_red_zones(&self, bytes: usize) -> Result<(), Cause> {
        let total = bytes.next_multiple_of(16) + 2 * RED_ZONE_BYTES;
        // SAFETY: the vector holds at least `total` initialized bytes, and no thread of the block
        // is left.
        let memory = unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<u8>(), total) };
        for zone in [0..RED_ZONE_BYTES, RED_ZONE_BYTES + bytes..total] {
            // Compares a whole zone at once, and searches for the byte only if it was hit.
            let intact = [RED_ZONE; RED_ZONE_BYTES + 16];
            if memory[zone.clone()] != intact[..zone.len()] {
                let hit = memory[zone.clone()]
                    .iter()
                    .position(|&byte| byte != RED_ZONE)
                    .expect("a byte of the red zone was overwritten");
                let offset = (zone.start + hit) as i64 - RED_ZONE_BYTES as i64;
                return Err(Cause::SharedOverrun { offset, size: bytes });
            }
        }
        Ok(())
    }
}
