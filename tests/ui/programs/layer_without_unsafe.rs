//! A program without unsafe code cannot put a driver of its own under a device: it could lie about
//! memory.

#![forbid(unsafe_code)]

use std::sync::Arc;
use stepscope_core::internals::{Driver, DriverLayer};

#[derive(Debug)]
struct Liar;

impl DriverLayer for Liar {
    fn cover(&self, driver: Arc<dyn Driver>) -> Arc<dyn Driver> {
        driver
    }
}

fn main() {}
