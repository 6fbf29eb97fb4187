//! What a kernel can read or write: the arguments that it takes of tensors.
//!
//! Invariant: an argument borrows the tensor for the launch, and a writable one borrows it alone.

use super::element::Element;
use super::memory::Memory;
use super::shape::Shape;
use cuda_std::launch::{Pointer, PointerMut, Slice};

pub(super) mod sealed {
    pub trait Sealed {}
}

#[diagnostic::on_unimplemented(
    message = "`{Self}` is nothing that a kernel of this step can read as `{T}`",
    note = "a kernel reads a `Tensor` or `Saved` of its own step, or what a buffer lends the step (`lend`)"
)]
/// What a kernel of the step `'s` can read: a [`Tensor`](super::Tensor), a [`Saved`](super::Saved) one, or something lent to the step.
pub trait Source<'s, T: Element>: sealed::Sealed {
    /// The extents.
    fn shape(&self) -> Shape;

    #[doc(hidden)]
    fn memory(&self) -> Memory<T>;

    /// A kernel's `&[T]`.
    fn slice(&self) -> Slice<'_, T> {
        let (owner, address, len) = self.memory().parts();
        // SAFETY: valid by `Memory`'s invariant; the borrow keeps others from writing it meanwhile.
        unsafe { Slice::new(owner, address, len) }
    }

    /// A kernel's `*const T`.
    fn pointer(&self) -> Pointer<'_, T> {
        let (owner, address, len) = self.memory().parts();
        // SAFETY: as above.
        unsafe { Pointer::new(owner, address, len) }
    }
}

#[diagnostic::on_unimplemented(
    message = "`{Self}` is nothing that a kernel of this step can write as `{T}`",
    note = "a `Saved` tensor is kept for the backward pass, so nothing overwrites it: write to a `Tensor` of its own"
)]
/// What a kernel of the step `'s` can write.
pub trait Target<'s, T: Element>: Source<'s, T> {
    /// A kernel's `*mut T`.
    fn out(&mut self) -> PointerMut<'_, T> {
        let (owner, address, len) = self.memory().parts();
        // SAFETY: valid by `Memory`'s invariant; the borrow is unique.
        unsafe { PointerMut::new(owner, address, len) }
    }

    /// The same memory as a kernel's `*const T` and its `*mut T`, for a kernel that reads an element before it writes
    /// the same one.
    fn in_place(&mut self) -> (Pointer<'_, T>, PointerMut<'_, T>) {
        let (owner, address, len) = self.memory().parts();
        // SAFETY: valid by `Memory`'s invariant; the borrow is unique, and `Pointer` may name what is written.
        unsafe { (Pointer::new(owner, address, len), PointerMut::new(owner, address, len)) }
    }
}
