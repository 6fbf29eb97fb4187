//! Faults: behavior of a kernel that is undefined on a GPU.

use std::fmt;
use std::ops::Range;
use std::panic::Location;

/// A kernel's violation of the machine's rules, and its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kernel's name.
    pub kernel: &'static str,
    /// The line that launched it. For a captured launch, the line that recorded it.
    pub launched_at: &'static Location<'static>,
    /// The block's index in the grid. Zeros if the launch as a whole is at fault
    /// ([`Cause::Overrun`]).
    pub block: [u32; 3],
    /// The thread's index in the block.
    pub thread: u32,
    /// The cause.
    pub cause: Cause,
}

/// The rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The thread panicked: an index out of range, an assertion, an overflow.
    Panic {
        /// The panic's message.
        message: String,
    },
    /// The thread waits for others that wait elsewhere or have ended.
    Divergence {
        /// The line at which the thread waits, as `file:line`.
        waits_at: String,
        /// The thread that did not arrive.
        missing: u32,
        /// The location of that thread.
        found: String,
    },
    /// The block wrote outside its dynamic shared memory.
    SharedOverrun {
        /// The first byte that was hit, counted from the start of the shared memory. Negative if it
        /// lies before it.
        offset: i64,
        /// The bytes that the launch gave the block.
        size: usize,
    },
    /// A write that bypassed the emulator's checks changed bytes next to an argument. They have
    /// been restored.
    Overrun {
        /// The argument's name.
        name: &'static str,
        /// The element that was hit, counted from the argument's start. Negative if it lies before
        /// it.
        element: i64,
        /// The number of the argument's elements.
        length: usize,
    },
    /// The thread's frames need more stack than the emulator gives a thread.
    StackOverflow {
        /// The bytes that the emulator gives.
        bytes: usize,
    },
    /// The thread dereferenced a pointer to unmapped memory.
    NoMemory {
        /// The place, as an element of the nearest argument. None if the processor does not report
        /// the address.
        place: Option<MemoryLocation>,
    },
    /// Two threads accessed the same memory, at least one of them wrote, and nothing orders the
    /// two.
    Race {
        /// The memory that both accessed.
        place: MemoryLocation,
        /// The access that happened first in this run.
        earlier: Box<Access>,
        /// The access of the faulting thread.
        later: Access,
    },
    /// The thread accessed memory outside its tensor, or outside its part of the shared memory.
    OutOfBounds {
        /// The place that it accessed.
        place: MemoryLocation,
        /// The range that it may access: elements of an argument, or bytes of shared memory.
        bounds: Range<i64>,
        /// The access.
        access: Access,
    },
    /// The thread moved several elements in one access at a misaligned address.
    Misaligned {
        /// The place at which the access began.
        place: MemoryLocation,
        /// The required alignment of its address in bytes.
        align: usize,
        /// The access.
        access: Access,
    },
    /// The thread read shared memory that no thread of its block had written.
    Unwritten {
        /// The place that was read.
        place: MemoryLocation,
        /// The read.
        access: Access,
    },
}

/// A place in memory, in terms of the kernel's arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryLocation {
    /// An element of a parameter.
    Argument {
        /// The parameter's name.
        name: &'static str,
        /// The number of elements from its start. Negative if it lies before it.
        element: i64,
    },
    /// The block's dynamic shared memory.
    Shared {
        /// The number of bytes from its start. Negative if it lies before it.
        byte: i64,
    },
    /// Global memory that belongs to no argument of the launch.
    Address(u64),
}

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A read.
    Read,
    /// A write.
    Write,
}

/// One memory access of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The kind: a read or a write.
    pub kind: Kind,
    /// The block's index in the grid.
    pub block: [u32; 3],
    /// The thread's index in the block.
    pub thread: u32,
    /// The number of barriers that the block had passed.
    pub epoch: u32,
    /// The source line. If several lanes of a warp read the same memory, the line of one of them.
    pub location: &'static Location<'static>,
}

impl std::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, launched_at, block: [x, y, z], thread, cause } = self;
        write!(f, "kernel `{kernel}`, launched at {launched_at}")?;
        if !matches!(cause, Cause::Overrun { .. }) {
            write!(f, ", block ({x}, {y}, {z}), thread {thread}")?;
        }
        f.write_str(": ")?;
        match cause {
            Cause::Panic { message } => write!(f, "panicked: {message}"),
            Cause::Divergence { waits_at, missing, found } => {
                write!(f, "divergent: waits at {waits_at} for thread {missing}, which {found}")
            }
            Cause::SharedOverrun { offset, size } => {
                write!(f, "this or another thread of the block wrote shared memory at byte {offset} of {size}")
            }
            Cause::Overrun { name, element, length } => write!(
                f,
                "out of bounds: `{name}`[{element}] of {length} elements written by some thread through a raw pointer"
            ),
            Cause::StackOverflow { bytes } => write!(
                f,
                "stack overflow: its frames need more than the {bytes} bytes of a thread; large arrays belong to shared memory"
            ),
            Cause::NoMemory { place: Some(place) } => write!(f, "out of bounds: {place}, where there is no memory"),
            Cause::NoMemory { place: None } => f.write_str("out of bounds: an address at which no memory can be"),
            Cause::Race { place, earlier, later } => {
                write!(f, "race on {place}: {later}; before that {earlier}; ")?;
                f.write_str(if earlier.block == later.block { "no barrier between" } else { "nothing orders blocks" })
            }
            Cause::OutOfBounds { place: place @ MemoryLocation::Argument { .. }, bounds, access } => {
                write!(f, "out of bounds: {place} of {} elements {access}", bounds.end)
            }
            Cause::OutOfBounds { place: place @ MemoryLocation::Shared { .. }, bounds, access } => {
                write!(
                    f,
                    "out of bounds: {place}, outside the tile of bytes {}..{}, {access}",
                    bounds.start, bounds.end
                )
            }
            Cause::OutOfBounds { place, access, .. } => write!(f, "out of bounds: {place} {access}"),
            Cause::Misaligned { place, align, access } => {
                write!(
                    f,
                    "misaligned: {place} is no multiple of {align} bytes, {access}; on a GPU this access would fail"
                )
            }
            Cause::Unwritten { place, access } => write!(f, "never written: {place} {access}"),
        }
    }
}

impl fmt::Display for MemoryLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument { name, element } => write!(f, "`{name}`[{element}]"),
            Self::Shared { byte } => write!(f, "shared byte {byte}"),
            Self::Address(address) => write!(f, "{address:#x}, which is in no argument,"),
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, block: [x, y, z], thread, epoch, location } = self;
        let done = match kind {
            Kind::Read => "read",
            Kind::Write => "written",
        };
        write!(f, "{done} by thread {thread} of block ({x}, {y}, {z}) in epoch {epoch} at {location}")
    }
}
