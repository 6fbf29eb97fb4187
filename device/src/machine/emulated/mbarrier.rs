//! Barriers in shared memory at which some threads arrive and others wait, as objects of the
//! emulator.

use cuda_std::emulator::mbarrier;

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

    /// Arrives: this thread's copies have ended.
    ///
    /// # Safety
    /// See the GPU's version. The emulator checks it.
    pub unsafe fn arrive_after_copies(self) {
        mbarrier::arrive(self.0);
    }

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
