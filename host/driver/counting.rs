//! A driver that counts: addresses without memory, launches without kernels.
//!
//! Invariant: it never touches memory, so an arena of any size costs nothing; what is read back is zero.

use super::{Description, Driver, Pool};
use crate::error::Result;
use cuda_std::launch::{Entry, Grid, Words};
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct Counting {
    description: Description,
    next: AtomicU64,
}

impl Counting {
    pub(super) fn new(description: Description) -> Self {
        Self { description, next: AtomicU64::new(1 << 40) }
    }
}

// SAFETY: nothing is ever read or written at the addresses that it gives out; they are multiples of 256.
unsafe impl Driver for Counting {
    fn description(&self) -> &Description {
        &self.description
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(u64::MAX)
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        Ok(self.next.fetch_add((bytes as u64).next_multiple_of(256), Ordering::Relaxed))
    }

    unsafe fn free(&self, _: u64, _: usize) -> Result<()> {
        Ok(())
    }

    fn create_pool(&self) -> Result<Pool> {
        Ok(Pool(0))
    }

    fn pool_allocate(&self, _: Pool, bytes: usize) -> Result<u64> {
        self.allocate(bytes)
    }

    unsafe fn pool_free(&self, _: Pool, _: u64, _: usize) -> Result<()> {
        Ok(())
    }

    fn trim_pool(&self, _: Pool, _: usize) -> Result<()> {
        Ok(())
    }

    unsafe fn destroy_pool(&self, _: Pool) -> Result<()> {
        Ok(())
    }

    unsafe fn upload(&self, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }

    unsafe fn download(&self, _: u64, to: &mut [u8]) -> Result<()> {
        to.fill(0);
        Ok(())
    }

    unsafe fn launch(&self, _: &Entry, _: Grid, _: &Words) -> Result<()> {
        Ok(())
    }

    fn poll(&self) -> Result<bool> {
        Ok(true)
    }
}
