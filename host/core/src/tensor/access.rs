//! Kernel arguments made from tensors that a kernel reads or writes.
//!
//! Invariant: an argument borrows the tensor for the launch, and a writable argument borrows it
//! exclusively.

use super::element::Element;
use super::memory::Memory;
use super::shape::Shape;
use cuda_std::launch::{Pointer, PointerMut, Slice};

pub(crate) mod sealed {
    pub trait Sealed {}
}

#[diagnostic::on_unimplemented(
    message = "`{Self}` is nothing that a kernel of this step can read as `{T}`",
    note = "a kernel reads a `Tensor` or `Saved` of its own step, or what a buffer lends the step (`lend`)"
)]
/// A tensor that a kernel of the step `'s` can read: a [`Tensor`](super::Tensor), a
/// [`Saved`](super::Saved) tensor, or memory lent to the step.
pub trait Source<'s, T: Element>: sealed::Sealed {
    /// The extents.
    fn shape(&self) -> Shape;

    /// The memory, which only launches and copies of this crate access.
    fn memory(&self) -> Memory<T>;

    /// The kernel argument `&[T]`.
    fn slice(&self) -> Slice<'_, T> {
        let (owner, address, len) = self.memory().parts();
        // SAFETY: valid by `Memory`'s invariant. The borrow prevents writes while the slice exists.
        unsafe { Slice::new(owner, address, len) }
    }

    /// The kernel argument `*const T`.
    fn pointer(&self) -> Pointer<'_, T> {
        let (owner, address, len) = self.memory().parts();
        // SAFETY: valid by `Memory`'s invariant. The borrow prevents writes while the pointer
        // exists.
        unsafe { Pointer::new(owner, address, len) }
    }
}

#[diagnostic::on_unimplemented(
    message = "`{Self}` is nothing that a kernel of this step can write as `{T}`",
    note = "a `Saved` tensor is kept for the backward pass, so nothing overwrites it: write to a `Tensor` of its own"
)]
/// A tensor that a kernel of the step `'s` can write.
pub trait Target<'s, T: Element>: Source<'s, T> {
    /// The kernel argument `*mut T`.
    fn out(&mut self) -> PointerMut<'_, T> {
        let (owner, address, len) = self.memory().parts();
        // SAFETY: valid by `Memory`'s invariant. The borrow is unique.
        unsafe { PointerMut::new(owner, address, len) }
    }

    /// The kernel arguments `*const T` and `*mut T` for one memory, for a kernel that reads each
    /// element before it writes the same element.
    fn in_place(&mut self) -> (Pointer<'_, T>, PointerMut<'_, T>) {
        let (owner, address, len) = self.memory().parts();
        // SAFETY: valid by `Memory`'s invariant. The borrow is unique, and a `Pointer` may refer to
        // memory that is written.
        unsafe { (Pointer::new(owner, address, len), PointerMut::new(owner, address, len)) }
    }
}
