//! A module that forbids unsafe code cannot define a kernel, whose pointers are raw.

#![forbid(unsafe_code)]

use cuda_std::prelude::*;

/// Writes one element.
#[kernel]
pub unsafe fn store_at(_out: *mut f32, _index: usize) {}

fn main() {}
