//! Kernel arguments have library types, because a kernel's CPU form relies on their sizes in words.

use cuda_std::launch::{Argument, Words};

pub struct TwoWords;

impl Argument for TwoWords {
    fn pack(&self, words: &mut Words) {
        let _ = words;
    }
}

fn main() {}
