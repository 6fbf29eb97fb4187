//! Barriers in shared memory at which some threads arrive and others wait (mbarrier).
//!
//! A barrier counts arrivals. When all have arrived, its phase ends and the next begins. A phase
//! has a parity: 0 for the first, 1 for the second, and so on.

use super::shared::Window;
use crate::tile::SharedTile;
use crate::wgmma::BoxElement;
use cuda_std::tensor_map::TensorMap;
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
        Self(Window::<u32>::new(byte_offset, 2).address())
    }

    /// Initializes the barrier for phases of `arrivals` arrivals.
    ///
    /// # Safety
    /// The barrier lies inside the block's shared memory, which no tile uses. One thread calls it,
    /// followed by [`fence_barriers`] and a barrier of the block.
    #[inline(always)]
    pub unsafe fn init(self, arrivals: u32) {
        // SAFETY: the barrier lies inside shared memory: the function's contract.
        unsafe {
            core::arch::asm!(
                "mbarrier.init.shared::cta.b64 [{0}], {1};",
                in(reg32) self.0, in(reg32) arrivals, options(nostack)
            );
        }
    }

    /// Arrives if `condition` is true. No branch: the compiler could copy instructions of the whole
    /// warp into one.
    ///
    /// # Safety
    /// The barrier is initialized.
    #[inline(always)]
    pub unsafe fn arrive_if(self, condition: bool) {
        // SAFETY: the barrier is initialized: the function's contract.
        unsafe {
            core::arch::asm!(
                "{{ .reg .pred %p; setp.ne.u32 %p, {0}, 0;",
                "@%p mbarrier.arrive.shared::cta.b64 _, [{1}]; }}",
                in(reg32) u32::from(condition), in(reg32) self.0, options(nostack)
            );
        }
    }

    /// Arrives, and makes the present phase expect this many bytes, which
    /// [`copy_box`](Self::copy_box) brings.
    ///
    /// # Safety
    /// The barrier is initialized.
    #[inline(always)]
    pub unsafe fn arrive_expecting(self, bytes: u32) {
        // SAFETY: the barrier is initialized: the function's contract.
        unsafe {
            core::arch::asm!(
                "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{0}], {1};",
                in(reg32) self.0, in(reg32) bytes, options(nostack)
            );
        }
    }

    /// Starts to copy a box of a tensor map, from an element, a row and a matrix on, to the first
    /// words of a tile. A row of the box is 128 bytes, and the map has its number of rows. Chunks
    /// of 16 bytes are [`swizzled`](crate::mma::fragments::swizzled). What does not exist is copied
    /// as zero, and f32 is rounded to TF32. When they have come, the barrier counts the bytes of
    /// the box.
    ///
    /// # Safety
    /// The barrier is initialized. The tile lies on 1024 bytes, and nothing else accesses these
    /// words before a wait for the barrier's phase.
    #[inline(always)]
    pub unsafe fn copy_box<T: BoxElement>(
        self,
        to: SharedTile<u32>,
        map: TensorMap<T>,
        [element, row, matrix]: [u32; 3],
    ) {
        // SAFETY: the host has encoded the map, and the box has room: the function's contract.
        unsafe {
            core::arch::asm!(
                "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [{0}], [{1}, {{{2}, {3}, {4}}}], [{5}];",
                in(reg32) to.0.address(), in(reg64) map.address(), in(reg32) element, in(reg32) row, in(reg32) matrix,
                in(reg32) self.0, options(nostack)
            );
        }
    }

    /// Starts to copy so many words, a multiple of four, of `values`, from the element `from` on,
    /// to the first words of a tile. When they have come, the barrier counts their bytes.
    ///
    /// # Safety
    /// The barrier is initialized. The words lie inside the tile and `values`, both on 16 bytes.
    /// Nothing else accesses those of the tile before a wait for the barrier's phase.
    #[inline(always)]
    pub unsafe fn copy_words(self, to: SharedTile<u32>, words: u32, values: &[bf16], from: usize) {
        // SAFETY: the words lie inside both: the function's contract.
        unsafe {
            core::arch::asm!(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{0}], [{1}], {2}, [{3}];",
                in(reg32) to.0.address(), in(reg64) values.as_ptr().add(from), in(reg32) words * 4,
                in(reg32) self.0, options(nostack)
            );
        }
    }

    /// Makes the present phase last until all copies that this thread has started have ended. It
    /// is not one of the phase's arrivals.
    ///
    /// # Safety
    /// The barrier is initialized. An arrival of the present phase comes after this.
    #[inline(always)]
    pub unsafe fn await_copies(self) {
        // SAFETY: the barrier is initialized: the function's contract.
        unsafe {
            core::arch::asm!("cp.async.mbarrier.arrive.shared::cta.b64 [{0}];", in(reg32) self.0, options(nostack));
        }
    }

    /// Waits until the phase of this parity has ended. For a fresh barrier, the phase before the
    /// first has the parity 1.
    ///
    /// # Safety
    /// The barrier is initialized. All lanes of the warp call it together.
    #[inline(always)]
    #[allow(named_asm_labels, reason = "the braces make the labels local")]
    pub unsafe fn wait(self, parity: u32) {
        // SAFETY: the barrier is initialized: the function's contract.
        unsafe {
            core::arch::asm!(
                "{{ .reg .pred %ended;",
                "again: mbarrier.try_wait.parity.shared::cta.b64 %ended, [{0}], {1};",
                "@%ended bra done;",
                "bra again;",
                "done: }}",
                in(reg32) self.0, in(reg32) parity, options(nostack)
            );
        }
    }
}

/// Makes initialized barriers visible, before a barrier of the block.
#[inline(always)]
pub fn fence_barriers() {
    // SAFETY: it only orders memory accesses.
    unsafe { core::arch::asm!("fence.mbarrier_init.release.cluster;", options(nostack)) };
}
