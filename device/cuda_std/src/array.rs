//! Arrays as kernel parameters, passed by value.
//!
//! Invariant: the GPU reads the elements from consecutive words.

/// A kernel's parameter `[usize; N]` as the GPU gets it.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Parameter<const N: usize>(pub [usize; N]);
