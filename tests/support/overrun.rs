//! A launch with a planted bug, for tests of checked mode. Its view of a tensor is one element too
//! long, and it writes that element, which lies in the guard. The emulator itself would refuse an
//! access outside the view.

#![allow(dead_code, reason = "each test binary uses its own part")]

use cuda_std::launch::{Contract, Entry, Grid, PointerMut, Violation};
use cuda_std::prelude::*;

/// Returns a view that is one element longer than the tensor, as a wrong `unsafe` block on the host
/// could.
pub(crate) fn one_too_long<T>(out: PointerMut<'_, T>) -> PointerMut<'_, T> {
    /// Memory of any device.
    const ANY_DEVICE: u64 = u64::MAX;
    // SAFETY: none, this is the planted bug; the element past the tensor belongs to the arena.
    unsafe { PointerMut::new(ANY_DEVICE, out.address(), out.len() + 1) }
}

/// Computes out[last] = 0.
#[kernel]
pub(crate) unsafe fn zero_at(out: *mut f32, last: usize) {
    if thread::index_1d() == 0 {
        // SAFETY: the contract has checked that the element exists in the given view.
        unsafe { *out.add(last) = 0.0 };
    }
}

// SAFETY: `last` is the last element.
unsafe impl Contract for zero_at<'_> {
    fn entry(&self) -> std::result::Result<&'static Entry, Violation> {
        static ENTRY: Entry = Entry::of::<zero_at<'_>>(env!("CARGO_PKG_NAME"), 32, 0, 4);
        Ok(&ENTRY)
    }
    fn grid(&self) -> std::result::Result<Grid, Violation> {
        Violation::unless_length("out", self.last + 1, self.out.len())?;
        Grid::new(1, 1, 1)
    }
}

/// Returns a launch that writes one element too far.
pub(crate) fn one_too_far(out: PointerMut<'_, f32>) -> zero_at<'_> {
    let last = out.len();
    zero_at { out: one_too_long(out), last }
}
