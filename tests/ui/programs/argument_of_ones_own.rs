//! What a kernel takes is one of the library's types: how many words an argument is, a kernel's CPU form relies on.

use cuda_std::launch::{Argument, Words};

pub struct TwoWords;

impl Argument for TwoWords {
    fn pack(&self, words: &mut Words) {
        let _ = words;
    }
}

fn main() {}
