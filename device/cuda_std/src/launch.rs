//! The host's side of a launch: a kernel's typed arguments, its contract, and its packed words.
//!
//! Invariant: [`Arguments`] are plain data. Only a [`Contract`], declared next to the kernel, turns
//! arguments into a launch, and it checks every length first. The host never chooses a grid. A
//! kernel's parameter types are limited to those in this module, which defines how each argument is
//! packed.

mod size;
mod tensor_map;
#[doc(hidden)]
pub mod unpack;

use crate::emulator::Block;
use core::fmt;
use core::marker::PhantomData;
use core::ops::Range;
use core::panic::Location;
pub use size::Size;
use smallvec::SmallVec;
pub use tensor_map::{PackedMap, TensorMap};

/// Runs a kernel's threads on the CPU. It reads the arguments from packed words, and runs the
/// block's threads that have not started, one after another, each to its end.
///
/// The caller passes the words that the same kernel's [`Arguments::pack`] has written, and a block
/// of a grid that its [`Contract`] has accepted with these arguments. Their memory is borrowed
/// during the call. The processor and the race detection mode match the [version](Versions).
pub type Threads = unsafe fn(*const u64, &Block);

/// A kernel on the CPU, compiled for several processors.
#[derive(Clone, Copy)]
pub struct Versions {
    /// The version for any x86-64, and for Miri, with or without race detection.
    #[cfg(any(target_arch = "x86_64", miri))]
    pub portable: Threads,
    /// The version for x86-64 with AVX2 and FMA, and for any other processor, without race
    /// detection.
    pub fused: Threads,
    /// The version for x86-64 with AVX-512 as well, without race detection. For
    /// `#[warpgroup_kernel]` it is `fused`.
    #[cfg(target_arch = "x86_64")]
    pub wide: Threads,
    /// The version for processors other than x86-64, with race detection.
    #[cfg(not(target_arch = "x86_64"))]
    pub watched: Threads,
}

impl Versions {
    /// Returns the version for this processor, and true if it has registers of 16 floats.
    pub(crate) fn for_processor(&self, watched: bool) -> (Threads, bool) {
        #[cfg(miri)]
        return (self.portable, false);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use std::arch::is_x86_feature_detected as has;
            if watched || !(has!("avx2") && has!("fma")) {
                return (self.portable, false);
            }
            if has!("avx512f") && has!("avx512dq") && has!("avx512bw") && has!("avx512vl") {
                return (self.wide, true);
            }
            (self.fused, false)
        }
        #[cfg(not(any(target_arch = "x86_64", miri)))]
        (if watched { self.watched } else { self.fused }, false)
    }
}

/// The typed arguments of a kernel, or of a family of kernels with the same parameters.
///
/// # Safety
/// `pack` must write the words that the kernels' [`Versions`] read, in order.
pub unsafe trait Arguments: fmt::Debug {
    /// The name of the kernel or of the family.
    const NAME: &'static str;
    /// The names of the parameters that are slices or pointers, in order.
    const POINTERS: &'static [&'static str];
    /// Writes the arguments as 8-byte words: two for a slice, one for a pointer, eight for a tensor
    /// map, and as many for plain data as its bytes fill.
    fn pack(&self, words: &mut Words);
}

/// A kernel that `#[kernel]` has expanded. Its name is its PTX entry.
///
/// # Safety
/// The versions read the words that `pack` writes.
pub unsafe trait Kernel: Arguments {
    /// The kernel's CPU versions.
    const VERSIONS: Versions;
    /// True for `#[warpgroup_kernel]`: a GPU needs `sm_90a` to run it.
    const IS_WARPGROUP: bool;
}

/// The requirements of a kernel on a launch, and its guarantees in return. `contract!` or `family!`
/// declares it next to the kernel.
///
/// # Safety
/// The arguments may have any value. If `grid` returns `Ok`, running that grid of `entry`
/// accesses nothing outside the arguments' lengths. It writes only through the kernel's `*mut`
/// parameters.
pub unsafe trait Contract: Arguments {
    /// Returns the kernel to launch. For a family, the arguments select it.
    fn entry(&self) -> Result<&'static Entry, Violation>;
    /// Returns the blocks of this launch, or the argument that breaks the contract. A grid without
    /// blocks means that there is nothing to do.
    fn grid(&self) -> Result<Grid, Violation>;
}

/// A kernel without its arguments.
#[derive(Clone, Copy)]
pub struct Entry {
    /// The package that the kernel is compiled in, as `name@version`. A driver finds its PTX by it.
    pub package: &'static str,
    /// The name of the PTX entry.
    pub name: &'static str,
    /// The threads in a block.
    pub block: u32,
    /// The bytes of dynamic shared memory per block.
    pub shared_bytes: u32,
    /// The alignment in bytes that every pointer must have.
    pub align: u64,
    /// True for a kernel of warpgroups, whose PTX is for `sm_90a`.
    pub is_warpgroup: bool,
    /// The kernel's CPU versions.
    pub versions: Versions,
    /// The names of the parameters that are slices or pointers, in order.
    pub pointers: &'static [&'static str],
}

impl Entry {
    /// Returns the entry of kernel `K` of a package, with `block` threads and `shared_bytes` bytes
    /// of shared memory per block.
    ///
    /// # Panics
    /// Panics if a block has no threads or more than 1024, or if the alignment is not a power of
    /// two.
    pub const fn of<K: Kernel>(package: &'static str, block: u32, shared_bytes: u32, align: u64) -> Self {
        assert!(block >= 1 && block <= 1024, "a block has 1 to 1024 threads");
        assert!(align.is_power_of_two(), "an alignment is a power of two");
        Self {
            package,
            name: K::NAME,
            block,
            shared_bytes,
            align,
            is_warpgroup: K::IS_WARPGROUP,
            versions: K::VERSIONS,
            pointers: K::POINTERS,
        }
    }
}

/// A kernel with a contract, registered for [`entries`].
#[doc(hidden)]
pub struct Listed(pub &'static Entry);

#[doc(hidden)]
pub use inventory;

inventory::collect!(Listed);

/// Returns every kernel of the program that has a contract, in no particular order.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    inventory::iter::<Listed>.into_iter().map(|listed| listed.0)
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}<block {}, shared {} B>", self.name, self.block, self.shared_bytes)
    }
}

/// The number of blocks of a launch along x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// The blocks along x, up to 2^31 - 1.
    pub x: u32,
    /// The blocks along y, up to 65,535.
    pub y: u32,
    /// The blocks along z, up to 65,535.
    pub z: u32,
}

impl Grid {
    /// Returns the blocks along x that cover `items` with `per_block` each.
    pub fn cover(items: impl Into<Size>, per_block: usize) -> Result<Self, Violation> {
        Self::new(Size::of(items).div_ceil(per_block), 1, 1)
    }

    /// Returns the blocks along each axis, checked against CUDA's limits.
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

    /// Returns the coordinates of the `index`th block, x first.
    pub fn place(self, index: u64) -> [u32; 3] {
        let (x, y) = (u64::from(self.x), u64::from(self.y));
        [(index % x) as u32, (index / x % y) as u32, (index / x / y) as u32]
    }

    /// Returns the number of blocks in the grid.
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
    /// The contract's requirement.
    pub expected: String,
    /// The launch's value.
    pub got: String,
}

impl Violation {
    /// Returns the violation of an argument, with the expected and the actual value.
    pub fn new(argument: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self { argument, expected: expected.into(), got: got.into() }
    }

    /// Returns the violation of a choice that selects no kernel of a family.
    pub fn choice(argument: &'static str, family: &str, got: &impl fmt::Debug) -> Self {
        Self::new(argument, format!("one of `{family}::VARIANTS`"), format!("{got:?}"))
    }

    /// Returns Ok if `length` is `expected`.
    pub fn unless_length(argument: &'static str, expected: impl Into<Size>, length: usize) -> Result<(), Self> {
        let expected = expected.into();
        if expected.is(length) {
            return Ok(());
        }
        Err(Self::new(argument, format!("{expected} elements"), format!("{length}")))
    }

    /// Returns Ok if `value` is a multiple of `elements`. Use it for an index, a stride, a distance
    /// or a row length from which a kernel moves that many elements in one access. A misaligned
    /// access on a GPU destroys the process's context.
    pub fn unless_aligned(argument: &'static str, value: impl Into<Size>, elements: usize) -> Result<(), Self> {
        let value = value.into();
        let is_aligned = value.number().is_some_and(|number| number.is_multiple_of(elements));
        Self::unless(is_aligned, argument, &format!("a multiple of {elements}"), value)
    }

    /// Returns Ok if `holds`.
    pub fn unless(holds: bool, argument: &'static str, expected: &str, got: impl fmt::Display) -> Result<(), Self> {
        if holds { Ok(()) } else { Err(Self::new(argument, expected, got.to_string())) }
    }
}

macro_rules! device_memory {
    ($($(#[$doc:meta])* $name:ident, $borrow:ty, $words:literal, $written:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// It stays on its thread, as the memory that it points to does.
        pub struct $name<'a, T> {
            owner: u64,
            address: u64,
            length: usize,
            // The raw pointer makes the type neither `Send` nor `Sync`.
            borrow: PhantomData<($borrow, *mut ())>,
        }

        impl<T> $name<'_, T> {
            /// Returns device memory by address and length in elements, with the number by which
            /// the host identifies its owner.
            ///
            /// # Safety
            /// The memory must be valid on the device for as long as a launch may use it, and
            /// aligned for `T`. If the pointer may be written, nothing else may use the memory
            /// during the launch.
            #[inline]
            pub unsafe fn new(owner: u64, address: u64, length: usize) -> Self {
                Self { owner, address, length, borrow: PhantomData }
            }

            /// Returns memory without elements and owner, for an argument that is absent.
            pub fn empty() -> Self {
                const { assert!(align_of::<T>() <= 256, "no memory of a device is aligned to more than 256 bytes") };
                // Aligned for the element, and never read.
                Self { owner: NO_OWNER, address: 256, length: 0, borrow: PhantomData }
            }

            /// Returns the number of elements.
            #[inline]
            pub fn len(&self) -> usize {
                self.length
            }

            /// True if there is no element.
            #[inline]
            pub fn is_empty(&self) -> bool {
                self.length == 0
            }

            /// Returns the first element's address on the device.
            #[inline]
            pub fn address(&self) -> u64 {
                self.address
            }

            /// Returns a part of the memory.
            ///
            /// # Panics
            /// Panics if the elements are not inside.
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
    /// A kernel's `*const T`. It may refer to the same memory as a `*mut T` of the launch, element
    /// for element.
    Pointer, &'a T, 1, false;
    /// A kernel's `*mut T`: its output, exclusive to the launch.
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

// A `PointerMut` is exclusive to its launch: it is not `Copy`, so no two can refer to the same
// output.
shared! { Slice Pointer }

/// The owner number of absent memory.
const NO_OWNER: u64 = u64::MAX;

mod sealed {
    pub trait Sealed {}
}

/// A value that a launch passes to a kernel: a [`Slice`], [`Pointer`], [`PointerMut`],
/// [`TensorMap`], or plain data ([`Pod`]): a number, an array of numbers or a struct of numbers.
/// The trait is sealed, because `unsafe impl Kernel` relies on the number of words of each.
pub trait Argument: sealed::Sealed {
    /// Appends the argument's words.
    fn pack(&self, words: &mut Words);
}

pub use bytemuck::{Pod, Zeroable};

impl<T: Pod> sealed::Sealed for T {}

impl<T: Pod> Argument for T {
    #[inline]
    fn pack(&self, words: &mut Words) {
        const { assert!(align_of::<T>() <= align_of::<u64>() && size_of::<T>() > 0, "a value of words") };
        let (first, bytes) = (words.words.len(), bytemuck::bytes_of(self));
        for part in bytes.chunks(size_of::<u64>()) {
            let mut word = [0; size_of::<u64>()];
            word[..part.len()].copy_from_slice(part);
            words.push(u64::from_ne_bytes(word));
        }
        if size_of::<T>() > size_of::<u64>() {
            words.values.push(first..words.words.len());
        }
    }
}

/// Returns the number of words of plain data.
pub const fn words_of<T: Pod>() -> usize {
    size_of::<T>().div_ceil(size_of::<u64>())
}

/// The memory that one argument of a launch may access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first element's address on the device.
    pub address: u64,
    /// The number of elements.
    pub length: usize,
    /// The bytes of an element.
    pub element_bytes: usize,
    /// True if the kernel may write it.
    pub written: bool,
}

impl Extent {
    /// Returns the bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.length * self.element_bytes
    }
}

/// A launch's packed arguments. Up to 16 words and 8 pointers are stored without an allocation.
#[derive(Clone, Debug)]
pub struct Words {
    words: SmallVec<[u64; 16]>,
    /// The memory that the pointers among the words refer to.
    extents: SmallVec<[Extent; 8]>,
    /// The owner of each pointer's memory.
    owners: SmallVec<[u64; 8]>,
    /// The tensor maps among the words.
    maps: Vec<PackedMap>,
    /// The words of each value of several words.
    values: SmallVec<[Range<usize>; 1]>,
    /// The source line that requested the launch.
    site: &'static Location<'static>,
}

impl Words {
    /// Packs the arguments of a launch that the caller's line requests.
    #[track_caller]
    pub fn of(arguments: &impl Arguments) -> Self {
        let mut words = Self {
            words: SmallVec::new(),
            extents: SmallVec::new(),
            owners: SmallVec::new(),
            maps: Vec::new(),
            values: SmallVec::new(),
            site: Location::caller(),
        };
        arguments.pack(&mut words);
        words
    }

    /// Appends a word.
    #[inline]
    fn push(&mut self, word: u64) {
        self.words.push(word);
    }

    /// Appends the address of an owner's memory.
    #[inline]
    fn push_pointer(&mut self, owner: u64, extent: Extent) {
        self.words.push(extent.address);
        self.extents.push(extent);
        self.owners.push(owner);
    }

    /// Returns the words in order.
    pub fn as_slice(&self) -> &[u64] {
        &self.words
    }

    /// Returns the plain data whose first word is number `at`.
    ///
    /// # Panics
    /// If there are fewer words.
    pub fn value<T: Pod>(&self, at: usize) -> T {
        let words: &[u8] = bytemuck::cast_slice(&self.words[at..]);
        bytemuck::pod_read_unaligned(&words[..size_of::<T>()])
    }

    /// Returns the plain data in the last words.
    ///
    /// # Panics
    /// If there are fewer words.
    pub fn last<T: Pod>(&self) -> T {
        self.value(self.words.len() - words_of::<T>())
    }

    /// Returns the source line that requested the launch.
    pub fn site(&self) -> &'static Location<'static> {
        self.site
    }

    /// Returns the memory that the pointers among the words refer to, in order.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Returns the tensor maps among the words, in order.
    pub fn maps(&self) -> &[PackedMap] {
        &self.maps
    }

    /// Returns true for the words of a parameter after its first, which a GPU gets with the first.
    pub fn continues(&self, at: usize) -> bool {
        self.values.iter().any(|value| value.start < at && at < value.end)
            || self.maps.iter().any(|map| map.word < at && at < map.word + PackedMap::WORDS)
    }

    /// Returns the first pointer whose owner `accepts` rejects: its index among the pointers, and
    /// the owner.
    pub fn first_of_other(&self, accepts: impl Fn(u64) -> bool) -> Option<(usize, u64)> {
        let owners = self.owners.iter().copied().enumerate();
        owners.filter(|&(_, owner)| owner != NO_OWNER).find(|&(_, owner)| !accepts(owner))
    }

    /// Returns Ok if every address has the alignment that `entry` requires of its pointers.
    pub fn check_alignment(&self, entry: &Entry) -> Result<(), Violation> {
        let is_aligned = |extent: &Extent| extent.address.is_multiple_of(entry.align);
        let Some(at) = self.extents.iter().position(|extent| !is_aligned(extent)) else { return Ok(()) };
        let expected = format!("an address that is a multiple of {} bytes", entry.align);
        Err(Violation::new(entry.pointers[at], expected, format!("{:#x}", self.extents[at].address)))
    }
}
