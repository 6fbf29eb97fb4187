//! A kernel is `unsafe`: nothing but its contract looks at what its pointers point to.

use cuda_std::prelude::*;

/// Writes one element.
#[kernel]
pub fn store_at(_out: *mut f32, _index: usize) {}

fn main() {}
