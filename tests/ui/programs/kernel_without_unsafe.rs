//! A kernel is `unsafe`, because only its contract checks its pointers.

use cuda_std::prelude::*;

/// Writes one element.
#[kernel]
pub fn store_at(_out: *mut f32, _index: usize) {}

fn main() {}
