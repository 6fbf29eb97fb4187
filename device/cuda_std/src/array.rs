//! Arrays as kernel parameters, passed by value.
//!
//! Invariant: the GPU reads an array as the struct of its elements.

/// A kernel's parameter `[T; N]` as the GPU gets it.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Parameter<A>(pub A);
