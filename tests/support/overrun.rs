//! A kernel with a planted bug, for tests of checked mode: it writes one element behind its tensor, into the guard.

use cuda_std::launch::{Contract, Grid, Violation};
use cuda_std::prelude::*;

/// out[length] = 0: one element too far.
#[kernel]
pub(crate) unsafe fn one_too_far(out: *mut f32, length: usize) {
    if thread::index_1d() == 0 {
        // SAFETY: none, this is the planted bug; the word lies in the tensor's guard.
        unsafe { *out.add(length) = 0.0 };
    }
}

// SAFETY: deliberately wrong, and harmless: the word past the tensor is the arena's own.
unsafe impl Contract for one_too_far<'_> {
    const PACKAGE: &'static str = env!("CARGO_PKG_NAME");
    const BLOCK: u32 = 32;
    const SHARED_BYTES: u32 = 0;
    const ALIGN: u64 = 4;
    fn grid(&self) -> std::result::Result<Grid, Violation> {
        Grid::new(1, 1, 1)
    }
}
