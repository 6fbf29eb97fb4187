//! What a kernel did that a GPU would leave undefined.

use std::fmt;

/// A kernel that broke the rules of the machine, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kernel's name.
    pub kernel: &'static str,
    /// The block's place in the grid.
    pub block: [u32; 3],
    /// The thread's place in the block.
    pub thread: u32,
    /// What happened.
    pub cause: Cause,
}

/// The rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The thread panicked: an index out of range, an assertion, an overflow.
    Panic {
        /// The panic's own words.
        message: String,
    },
    /// The thread waits for others that wait elsewhere or have ended.
    Divergence {
        /// Where the thread waits, as `file:line`.
        waits_at: String,
        /// The thread that is missing.
        missing: u32,
        /// Where that one is.
        found: String,
    },
    /// The block wrote outside its dynamic shared memory.
    SharedOverrun {
        /// The first byte that was hit, from the start of the shared memory; negative: before it.
        offset: i64,
        /// The bytes that the launch gave the block.
        size: usize,
    },
}

impl std::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, block: [x, y, z], thread, cause } = self;
        write!(f, "kernel `{kernel}`, block ({x}, {y}, {z}), thread {thread}: ")?;
        match cause {
            Cause::Panic { message } => write!(f, "panicked: {message}"),
            Cause::Divergence { waits_at, missing, found } => {
                write!(f, "divergent: waits at {waits_at} for thread {missing}, which {found}")
            }
            Cause::SharedOverrun { offset, size } => {
                write!(f, "this or another thread of the block wrote shared memory at byte {offset} of {size}")
            }
        }
    }
}
