//! What a host needs to launch a kernel: its typed arguments, its contract, and its packed words.
//!
//! Invariant: [`Arguments`] are inert. Only a [`Contract`], written beside the kernel, turns arguments into a
//! launch, and it checks every length first; a host never chooses a grid. What a kernel takes is one of the types here: how an
//! argument is packed is nobody else's to say.

mod size;
#[doc(hidden)]
pub mod unpack;

use crate::emulator::Block;
use core::fmt;
use core::marker::PhantomData;
use core::ops::Range;
use core::panic::Location;
pub use size::Size;

/// Runs a kernel's threads on the CPU: reads its arguments from packed words, and takes threads of the block that have not
/// started, one after another, each to its end.
///
/// To be called with the words that the same kernel's [`Arguments::pack`] has written, for a block of a grid that its [`Contract`]
/// has accepted with these arguments, while their memory is borrowed; and on a processor, and in a mode, that suits the
/// [version](Versions).
pub type Threads = unsafe fn(*const u64, &Block);

/// A kernel on the CPU, compiled for several processors.
#[derive(Clone, Copy)]
pub struct Versions {
    /// For any x86-64, and for Miri; watched for races or not.
    #[cfg(any(target_arch = "x86_64", miri))]
    pub portable: Threads,
    /// For x86-64 with AVX2 and FMA, and for any other processor; not watched.
    pub fused: Threads,
    /// For x86-64 with AVX-512 as well; not watched.
    #[cfg(target_arch = "x86_64")]
    pub wide: Threads,
    /// For any other processor than x86-64, watched.
    #[cfg(not(target_arch = "x86_64"))]
    pub watched: Threads,
}

/// The typed arguments of a kernel, or of a family of kernels that take the same.
///
/// # Safety
/// `pack` must write the words that the kernels' [`Versions`] read, in order.
pub unsafe trait Arguments: fmt::Debug {
    /// The name of the kernel or of the family.
    const NAME: &'static str;
    /// The names of the parameters that are slices or pointers, in order.
    const POINTERS: &'static [&'static str];
    /// Writes the arguments as 8-byte words: two for a slice, one for anything else.
    fn pack(&self, words: &mut Words);
}

/// A kernel, made by `#[kernel]`: its name is its PTX entry.
///
/// # Safety
/// The versions read the words that `pack` writes.
pub unsafe trait Kernel: Arguments {
    /// The function on the CPU.
    const VERSIONS: Versions;
}

/// What a kernel demands of a launch and promises in return; stands beside the kernel, made by `contract!` or `family!`.
///
/// # Safety
/// When `grid` returns `Ok`, for arguments of any value, running that grid of `entry` touches nothing outside the arguments'
/// lengths, and writes only through the kernel's `*mut` parameters.
pub unsafe trait Contract: Arguments {
    /// The kernel that is launched: of a family, the one that the arguments choose.
    fn entry(&self) -> Result<&'static Entry, Violation>;
    /// The blocks of this launch, or which argument breaks the contract. No blocks: nothing to do.
    fn grid(&self) -> Result<Grid, Violation>;
}

/// A kernel without its arguments.
#[derive(Clone, Copy)]
pub struct Entry {
    /// The package that the kernel is compiled in, as `name@version`, by which a driver finds its PTX.
    pub package: &'static str,
    /// The PTX entry.
    pub name: &'static str,
    /// Threads in a block.
    pub block: u32,
    /// Bytes of dynamic shared memory a block.
    pub shared_bytes: u32,
    /// The alignment in bytes that every pointer must have.
    pub align: u64,
    /// The kernel on the CPU.
    pub versions: Versions,
    /// The names of the parameters that are slices or pointers, in order.
    pub pointers: &'static [&'static str],
}

impl Entry {
    /// The kernel `K` of a package, in blocks of so many threads with so many bytes of shared memory.
    ///
    /// # Panics
    /// When a block has no threads or more than 1024, or the alignment is no power of two.
    #[allow(clippy::disallowed_methods, reason = "computed by rustc, for the host")]
    pub const fn of<K: Kernel>(package: &'static str, block: u32, shared_bytes: u32, align: u64) -> Self {
        assert!(block >= 1 && block <= 1024, "a block has 1 to 1024 threads");
        assert!(align.is_power_of_two(), "an alignment is a power of two");
        Self { package, name: K::NAME, block, shared_bytes, align, versions: K::VERSIONS, pointers: K::POINTERS }
    }
}

/// A kernel that has a contract, for [`entries`].
#[doc(hidden)]
pub struct Listed(pub &'static Entry);

#[doc(hidden)]
pub use inventory;

inventory::collect!(Listed);

/// Every kernel of the program that has a contract, in no order.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    inventory::iter::<Listed>.into_iter().map(|listed| listed.0)
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}<block {}, shared {} B>", self.name, self.block, self.shared_bytes)
    }
}

/// Blocks of a launch along x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along x, up to 2^31 - 1.
    pub x: u32,
    /// Blocks along y, up to 65,535.
    pub y: u32,
    /// Blocks along z, up to 65,535.
    pub z: u32,
}

impl Grid {
    /// As many blocks along x as cover `items` with `per_block` each.
    pub fn cover(items: impl Into<Size>, per_block: usize) -> Result<Self, Violation> {
        Self::new(Size::of(items).div_ceil(per_block), 1, 1)
    }

    /// The blocks along each axis, within CUDA's limits.
    pub fn new(x: impl Into<Size>, y: impl Into<Size>, z: impl Into<Size>) -> Result<Self, Violation> {
        let limit = |axis, blocks: Size, most: u32| {
            let fits = blocks.number().and_then(|blocks| u32::try_from(blocks).ok()).filter(|&blocks| blocks <= most);
            fits.ok_or_else(|| Violation::new(axis, format!("at most {most} blocks"), format!("{blocks} blocks")))
        };
        Ok(Self {
            x: limit("grid.x", x.into(), 0x7fff_ffff)?,
            y: limit("grid.y", y.into(), 65_535)?,
            z: limit("grid.z", z.into(), 65_535)?,
        })
    }

    /// The place of the block that is the `index`th, x first.
    pub fn place(self, index: u64) -> [u32; 3] {
        let (x, y) = (u64::from(self.x), u64::from(self.y));
        [(index % x) as u32, (index / x % y) as u32, (index / x / y) as u32]
    }

    /// All blocks of the grid.
    pub fn blocks(self) -> u64 {
        u64::from(self.x) * u64::from(self.y) * u64::from(self.z)
    }
}

/// An argument that breaks a kernel's contract.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{argument}`: expected {expected}, got {got}")]
pub struct Violation {
    /// The kernel's parameter.
    pub argument: &'static str,
    /// What the contract asks.
    pub expected: String,
    /// What the launch gave.
    pub got: String,
}

impl Violation {
    /// An argument, what was expected of it and what it was.
    pub fn new(argument: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self { argument, expected: expected.into(), got: got.into() }
    }

    /// A choice by which no kernel of a family is found.
    pub fn choice(argument: &'static str, family: &str, got: &impl fmt::Debug) -> Self {
        Self::new(argument, format!("one of `{family}::VARIANTS`"), format!("{got:?}"))
    }

    /// Ok when `length` is `expected`.
    pub fn unless_length(argument: &'static str, expected: impl Into<Size>, length: usize) -> Result<(), Self> {
        let expected = expected.into();
        if expected.is(length) {
            return Ok(());
        }
        Err(Self::new(argument, format!("{expected} elements"), format!("{length}")))
    }

    /// Ok when `value` is a multiple of `elements`. For a place, a stride, a distance or a row
    /// length from which a kernel moves so many elements in one access: on a GPU an access that is
    /// not aligned ends the process's context.
    pub fn unless_aligned(argument: &'static str, value: impl Into<Size>, elements: usize) -> Result<(), Self> {
        let value = value.into();
        let is_aligned = value.number().is_some_and(|number| number.is_multiple_of(elements));
        Self::unless(is_aligned, argument, &format!("a multiple of {elements}"), value)
    }

    /// Ok when `holds`.
    pub fn unless(holds: bool, argument: &'static str, expected: &str, got: impl fmt::Display) -> Result<(), Self> {
        if holds { Ok(()) } else { Err(Self::new(argument, expected, got.to_string())) }
    }
}

macro_rules! device_memory {
    ($($(#[$doc:meta])* $name:ident, $borrow:ty, $words:literal, $written:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// It stays on its thread, as what it points to does.
        pub struct $name<'a, T> {
            owner: u64,
            address: u64,
            length: usize,
            // The raw pointer makes it neither `Send` nor `Sync`.
            borrow: PhantomData<($borrow, *mut ())>,
        }

        impl<T> $name<'_, T> {
            /// Device memory by address and length in elements, and the number that the host gives
            /// its owner.
            ///
            /// # Safety
            /// The memory must be valid on the device, for as long as a launch may use it, and aligned for `T`.
            /// If the pointer may be written, nothing else may use the memory within the launch.
            #[inline]
            pub unsafe fn new(owner: u64, address: u64, length: usize) -> Self {
                Self { owner, address, length, borrow: PhantomData }
            }

            /// No elements, of no owner: what stands for an argument that is not there.
            pub fn empty() -> Self {
                const { assert!(align_of::<T>() <= 256, "no memory of a device is aligned to more than 256 bytes") };
                // Aligned for the element, and never read.
                Self { owner: NO_OWNER, address: 256, length: 0, borrow: PhantomData }
            }

            /// Elements.
            #[inline]
            pub fn len(&self) -> usize {
                self.length
            }

            /// Whether there is no element.
            #[inline]
            pub fn is_empty(&self) -> bool {
                self.length == 0
            }

            /// The first element's address on the device.
            #[inline]
            pub fn address(&self) -> u64 {
                self.address
            }

            /// The part of these elements.
            ///
            /// # Panics
            /// When they are not inside.
            #[must_use]
            pub fn part(self, elements: Range<usize>) -> Self {
                let Range { start, end } = elements;
                assert!(start <= end && end <= self.length, "elements {start}..{end} of {}", self.length);
                Self { address: self.address + (start * size_of::<T>()) as u64, length: end - start, ..self }
            }
        }

        impl<T> fmt::Debug for $name<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}[{}]", self.address, self.length)
            }
        }

        impl<T> sealed::Sealed for $name<'_, T> {}

        impl<T> Argument for $name<'_, T> {
            #[inline]
            fn pack(&self, words: &mut Words) {
                words.push_pointer(
                    self.owner,
                    Extent {
                        address: self.address,
                        length: self.length,
                        element_bytes: size_of::<T>(),
                        written: $written,
                    },
                );
                if $words == 2 {
                    words.push(self.length as u64);
                }
            }
        }
    )*};
}

device_memory! {
    /// A kernel's `&[T]`: read by every thread, written by none.
    Slice, &'a [T], 2, false;
    /// A kernel's `*const T`. It may name the same memory as a `*mut T` of the launch, element for element.
    Pointer, &'a T, 1, false;
    /// A kernel's `*mut T`: its output, for the launch alone.
    PointerMut, &'a mut [T], 1, true;
}

macro_rules! shared {
    ($($name:ident)*) => {$(
        impl<T> Clone for $name<'_, T> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T> Copy for $name<'_, T> {}
    )*};
}

// A `PointerMut` is its launch's alone: no copy can name the same output twice.
shared! { Slice Pointer }

/// The owner of memory that is not there.
const NO_OWNER: u64 = u64::MAX;

mod sealed {
    pub trait Sealed {}
}

/// Something that a launch passes to a kernel: a [`Slice`], [`Pointer`], [`PointerMut`] or [`Scalar`], and nothing else, because
/// `unsafe impl Kernel` relies on how many words each is.
pub trait Argument: sealed::Sealed {
    /// Adds its words.
    fn pack(&self, words: &mut Words);
}

/// A number that fits a word: `u32`, `i32`, `u64`, `usize` or `f32`.
pub trait Scalar: Argument + Copy {
    /// The number in the low bytes of a word.
    fn to_word(self) -> u64;
    /// The number from the low bytes of a word.
    fn from_word(word: u64) -> Self;
}

macro_rules! scalar {
    ($($ty:ty: |$value:ident| $to:expr, |$word:ident| $from:expr;)*) => {$(
        impl sealed::Sealed for $ty {}

        impl Scalar for $ty {
            #[inline(always)]
            fn to_word(self) -> u64 { let $value = self; $to }
            #[inline(always)]
            fn from_word($word: u64) -> Self { $from }
        }

        impl Argument for $ty {
            #[inline]
            fn pack(&self, words: &mut Words) { words.push(self.to_word()); }
        }
    )*};
}

scalar! {
    u32: |value| u64::from(value), |word| word as u32;
    i32: |value| u64::from(value as u32), |word| word as i32;
    u64: |value| value, |word| word;
    usize: |value| value as u64, |word| word as usize;
    f32: |value| u64::from(value.to_bits()), |word| f32::from_bits(word as u32);
}

/// The memory that one argument of a launch may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first element's address on the device.
    pub address: u64,
    /// Elements.
    pub length: usize,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Whether the kernel may write it.
    pub written: bool,
}

impl Extent {
    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.length * self.element_bytes
    }
}

/// A launch's packed arguments.
#[derive(Clone, Debug)]
pub struct Words {
    words: Vec<u64>,
    /// What the pointers among the words point to.
    extents: Vec<Extent>,
    /// The owner of each.
    owners: Vec<u64>,
    /// The line that asked for the launch.
    site: &'static Location<'static>,
}

impl Words {
    /// The arguments of a launch that the caller's line asks for.
    #[track_caller]
    pub fn of(arguments: &impl Arguments) -> Self {
        let mut words = Self {
            words: Vec::with_capacity(16),
            extents: Vec::with_capacity(8),
            owners: Vec::with_capacity(8),
            site: Location::caller(),
        };
        arguments.pack(&mut words);
        words
    }

    /// Adds a word.
    #[inline]
    fn push(&mut self, word: u64) {
        self.words.push(word);
    }

    /// Adds the address of memory of an owner.
    #[inline]
    fn push_pointer(&mut self, owner: u64, extent: Extent) {
        self.words.push(extent.address);
        self.extents.push(extent);
        self.owners.push(owner);
    }

    /// The words in order.
    pub fn as_slice(&self) -> &[u64] {
        &self.words
    }

    /// The line that asked for the launch.
    pub fn site(&self) -> &'static Location<'static> {
        self.site
    }

    /// What the pointers among the words point to, in order.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The first pointer to memory whose owner `accepts` returns false for: its place among the
    /// pointers, and the owner.
    pub fn first_of_other(&self, accepts: impl Fn(u64) -> bool) -> Option<(usize, u64)> {
        let owners = self.owners.iter().copied().enumerate();
        owners.filter(|&(_, owner)| owner != NO_OWNER).find(|&(_, owner)| !accepts(owner))
    }

    /// Ok when every address is as aligned as `entry` demands of its pointers.
    pub fn check_alignment(&self, entry: &Entry) -> Result<(), Violation> {
        let is_aligned = |extent: &Extent| extent.address.is_multiple_of(entry.align);
        let Some(at) = self.extents.iter().position(|extent| !is_aligned(extent)) else { return Ok(()) };
        let expected = format!("an address that is a multiple of {} bytes", entry.align);
        Err(Violation::new(entry.pointers[at], expected, format!("{:#x}", self.extents[at].address)))
    }
}
