//! The brand that binds a tensor to its step.

#![forbid(unsafe_code)]

use std::marker::PhantomData;

/// A fresh, invariant lifetime for each step. The raw pointer makes it neither `Send` nor `Sync`.
pub(crate) type Brand<'s> = PhantomData<(fn(&'s ()) -> &'s (), *mut ())>;
