//! Typed windows into the block's dynamic shared memory.
//!
//! A kernel lays out its shared memory as tiles at fixed byte offsets, and its contract declares
//! their sum. On the GPU a tile is a 32-bit shared address, and every access is one unchecked
//! `ld.shared` or `st.shared`. On the CPU a tile is a pointer, and an access outside it panics with
//! the index and the tile's length. If the emulator's race detector is on, it checks every access
//! first.
//!
//! ```text
//! 32 banks of 4 bytes: the word at index i of a tile at byte 0 lies in bank i mod 32
//!   lanes that access different words of one bank conflict: their accesses take turns
//!   16 bytes a lane: eight lanes fill the 32 banks, so a warp takes at least four turns,
//!   unless lanes read the same words
//! ```
//! Invariant: a thread reads what another thread wrote only after a barrier. The tile itself orders
//! nothing.

use crate::stored::Stored;
#[cfg(not(target_arch = "nvptx64"))]
use crate::vector;
use crate::vector::F4;
use core::marker::PhantomData;
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::emulator::{Kind, access};
use cuda_std::shared;

/// A 32-bit element type of a tile.
pub trait SharedElement: Copy {
    /// Reads the value at a shared address.
    ///
    /// # Safety
    /// `address` lies inside the block's shared memory, on a 4-byte boundary.
    #[cfg(target_arch = "nvptx64")]
    unsafe fn load_shared(address: u32) -> Self;
    /// Writes the value at a shared address.
    ///
    /// # Safety
    /// The caller meets the requirements of [`load_shared`](Self::load_shared).
    #[cfg(target_arch = "nvptx64")]
    unsafe fn store_shared(self, address: u32);
    /// Reads the four values from a shared address on.
    ///
    /// # Safety
    /// The values lie inside the block's shared memory, on a 16-byte boundary.
    #[cfg(target_arch = "nvptx64")]
    unsafe fn load4_shared(address: u32) -> [Self; 4];
    /// Writes four values from a shared address on.
    ///
    /// # Safety
    /// The caller meets the requirements of [`load4_shared`](Self::load4_shared).
    #[cfg(target_arch = "nvptx64")]
    unsafe fn store4_shared(values: [Self; 4], address: u32);
}

macro_rules! element {
    ($ty:ty, $suffix:literal) => {
        impl SharedElement for $ty {
            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            unsafe fn load_shared(address: u32) -> Self {
                let value: $ty;
                // SAFETY: the trait requires that the address lies in shared memory on a 4-byte
                // boundary. Not `pure`: another thread's write may change the value.
                unsafe {
                    core::arch::asm!(
                        concat!("ld.shared.", $suffix, " {0}, [{1}];"),
                        out(reg32) value, in(reg32) address, options(nostack)
                    );
                }
                value
            }

            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            unsafe fn store_shared(self, address: u32) {
                // SAFETY: the trait requires that the address lies in shared memory on a 4-byte
                // boundary.
                unsafe {
                    core::arch::asm!(
                        concat!("st.shared.", $suffix, " [{0}], {1};"),
                        in(reg32) address, in(reg32) self, options(nostack)
                    );
                }
            }

            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            unsafe fn load4_shared(address: u32) -> [Self; 4] {
                let (a, b, c, d): ($ty, $ty, $ty, $ty);
                // SAFETY: the trait requires that the address lies in shared memory on a 16-byte
                // boundary. Not `pure`, as above.
                unsafe {
                    core::arch::asm!(
                        concat!("ld.shared.v4.", $suffix, " {{{0}, {1}, {2}, {3}}}, [{4}];"),
                        out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address, options(nostack)
                    );
                }
                [a, b, c, d]
            }

            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            unsafe fn store4_shared([a, b, c, d]: [Self; 4], address: u32) {
                // SAFETY: the trait requires that the address lies in shared memory on a 16-byte
                // boundary.
                unsafe {
                    core::arch::asm!(
                        concat!("st.shared.v4.", $suffix, " [{0}], {{{1}, {2}, {3}, {4}}};"),
                        in(reg32) address, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack)
                    );
                }
            }
        }
    };
}
element!(f32, "f32");
element!(u32, "u32");

/// Four values on a 16-byte boundary.
#[cfg(not(target_arch = "nvptx64"))]
#[repr(C, align(16))]
struct Chunk<T>([T; 4]);

/// A tile of `len` values of type `T` in the block's shared memory.
#[derive(Clone, Copy)]
pub struct SharedTile<T> {
    #[cfg(target_arch = "nvptx64")]
    address: u32,
    #[cfg(not(target_arch = "nvptx64"))]
    pointer: *mut T,
    #[cfg(not(target_arch = "nvptx64"))]
    len: u32,
    element: PhantomData<T>,
}

impl<T: SharedElement> SharedTile<T> {
    /// Returns the tile of `len` values that starts `byte_offset` bytes into the block's dynamic
    /// shared memory. For access four values wide, `byte_offset` is a multiple of 16.
    ///
    /// # Safety
    /// The tile lies inside the shared memory that the kernel's contract declares. Tiles of
    /// different types do not overlap. Every index passed to a method lies inside the tile, and is
    /// aligned as that method requires. The CPU checks that it lies inside; the GPU checks nothing.
    #[inline(always)]
    pub unsafe fn new(byte_offset: u32, len: u32) -> Self {
        let base = shared::dynamic_shared_mem::<u8>();
        #[cfg(target_arch = "nvptx64")]
        {
            let _ = len;
            let address: u64;
            // SAFETY: a conversion between address spaces; it accesses no memory.
            unsafe {
                core::arch::asm!(
                    "cvta.to.shared.u64 {0}, {1};",
                    out(reg64) address, in(reg64) base, options(pure, nomem, nostack)
                );
            }
            Self { address: address as u32 + byte_offset, element: PhantomData }
        }
        #[cfg(not(target_arch = "nvptx64"))]
        Self { pointer: base.wrapping_add(byte_offset as usize).cast(), len, element: PhantomData }
    }

    /// Returns the value at `index`.
    #[inline(always)]
    #[track_caller]
    pub fn get(self, index: u32) -> T {
        self.reads(index, 1);
        // SAFETY: inside the tile; the caller of `new` guaranteed that the tile lies inside shared
        // memory.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            return T::load_shared(self.address + index * 4);
            #[cfg(not(target_arch = "nvptx64"))]
            self.pointer.add(index as usize).read()
        }
    }

    /// Writes `value` at `index`.
    #[inline(always)]
    #[track_caller]
    pub fn set(self, index: u32, value: T) {
        self.writes(index, 1);
        // SAFETY: inside the tile; the caller of `new` guaranteed that the tile lies inside shared
        // memory.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            value.store_shared(self.address + index * 4);
            #[cfg(not(target_arch = "nvptx64"))]
            self.pointer.add(index as usize).write(value);
        }
    }

    /// Returns the four values from `index`, a multiple of four.
    #[inline(always)]
    #[track_caller]
    pub fn chunk(self, index: u32) -> [T; 4] {
        self.reads(index, 4);
        self.reads_at_once(index, 4);
        // SAFETY: inside the tile; 16-byte aligned by the contracts of `new` and of `index`.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            return T::load4_shared(self.address + index * 4);
            #[cfg(not(target_arch = "nvptx64"))]
            self.pointer.add(index as usize).cast::<Chunk<T>>().read().0
        }
    }

    /// Writes four values from `index`, a multiple of four.
    #[inline(always)]
    #[track_caller]
    pub fn set_chunk(self, index: u32, values: [T; 4]) {
        self.writes(index, 4);
        self.writes_at_once(index, 4);
        // SAFETY: inside the tile; 16-byte aligned by the contracts of `new` and of `index`.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            T::store4_shared(values, self.address + index * 4);
            #[cfg(not(target_arch = "nvptx64"))]
            self.pointer.add(index as usize).cast::<Chunk<T>>().write(Chunk(values));
        }
    }

    /// Called before a read of `count` values from `index`.
    #[inline(always)]
    #[track_caller]
    fn reads(self, index: u32, count: u32) {
        #[cfg(not(target_arch = "nvptx64"))]
        self.check(Kind::Read, index, count);
        #[cfg(target_arch = "nvptx64")]
        let _ = (index, count);
    }

    /// Called before a write of `count` values from `index`.
    #[inline(always)]
    #[track_caller]
    fn writes(self, index: u32, count: u32) {
        #[cfg(not(target_arch = "nvptx64"))]
        self.check(Kind::Write, index, count);
        #[cfg(target_arch = "nvptx64")]
        let _ = (index, count);
    }

    /// Called before a read of `count` values in one access. It checks that the first lies on a
    /// boundary of `count` values.
    #[inline(always)]
    #[track_caller]
    fn reads_at_once(self, index: u32, count: usize) {
        #[cfg(not(target_arch = "nvptx64"))]
        access::at_once(Kind::Read, self.pointer, index as usize, count * size_of::<T>());
        #[cfg(target_arch = "nvptx64")]
        let _ = (index, count);
    }

    /// Called before a write of `count` values in one access.
    #[inline(always)]
    #[track_caller]
    fn writes_at_once(self, index: u32, count: usize) {
        #[cfg(not(target_arch = "nvptx64"))]
        access::at_once(Kind::Write, self.pointer, index as usize, count * size_of::<T>());
        #[cfg(target_arch = "nvptx64")]
        let _ = (index, count);
    }

    #[cfg(not(target_arch = "nvptx64"))]
    #[inline(always)]
    #[track_caller]
    fn check(self, kind: Kind, index: u32, count: u32) {
        access::shared(kind, self.pointer, self.len, index, count);
        if self.len < count || index > self.len - count {
            out_of_range(index, self.len);
        }
    }
}

impl SharedTile<f32> {
    /// Returns the four values from `index`, a multiple of four, as a vector.
    #[inline(always)]
    #[track_caller]
    pub fn get4(self, index: u32) -> F4 {
        F4(self.chunk(index))
    }

    /// Returns the two values from `index`, a multiple of two.
    #[inline(always)]
    #[track_caller]
    pub fn get2(self, index: u32) -> [f32; 2] {
        #[cfg(target_arch = "nvptx64")]
        {
            let (a, b): (f32, f32);
            // SAFETY: inside the tile; 8-byte aligned by the contracts of `new` and of `index`.
            unsafe {
                core::arch::asm!(
                    "ld.shared.v2.f32 {{{0}, {1}}}, [{2}];",
                    out(reg32) a, out(reg32) b, in(reg32) self.address + index * 4, options(nostack)
                );
            }
            [a, b]
        }
        #[cfg(not(target_arch = "nvptx64"))]
        {
            self.reads_at_once(index, 2);
            [self.get(index), self.get(index + 1)]
        }
    }

    /// Writes `N` values from `index`, on the CPU, with one check and one write.
    #[cfg(not(target_arch = "nvptx64"))]
    #[inline(always)]
    #[track_caller]
    pub fn set_run<const N: usize>(self, index: u32, values: [f32; N]) {
        self.writes(index, N as u32);
        // SAFETY: inside the tile, as checked above; the write takes any alignment.
        unsafe { self.pointer.add(index as usize).cast::<[f32; N]>().write_unaligned(values) };
    }

    /// Writes a vector of four values from `index`, a multiple of four.
    #[inline(always)]
    #[track_caller]
    pub fn set4(self, index: u32, value: F4) {
        self.set_chunk(index, value.0);
    }
}

/// Asynchronous copies from global memory (cp.async). After [`wait_copies`] the same thread may
/// read the copied data. After a barrier that follows, all threads of its block may. The emulator
/// copies synchronously.
impl SharedTile<f32> {
    /// Starts to copy `x[from]` to `index`.
    ///
    /// # Safety
    /// `from < x.len()`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy(self, index: u32, x: &[f32], from: usize) {
        // SAFETY: inside the tile and inside `x`.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            core::arch::asm!(
                "{{ .reg .u64 %global; cvta.to.global.u64 %global, {1};",
                "cp.async.ca.shared.global [{0}], [%global], 4; }}",
                in(reg32) self.address + index * 4, in(reg64) x.as_ptr().add(from), options(nostack)
            );
            #[cfg(not(target_arch = "nvptx64"))]
            self.set(index, vector::load(x, from));
        }
    }

    /// Starts to copy `x[from]` to `index`, or writes zero if `there` is false.
    ///
    /// # Safety
    /// If `there` is true, `from < x.len()`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy_or_zero(self, index: u32, x: &[f32], from: usize, there: bool) {
        // SAFETY: inside the tile and, if `there` is true, inside `x`, as the caller guarantees and
        // the CPU checks.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            core::arch::asm!(
                "{{ .reg .u64 %global; .reg .pred %absent; setp.eq.u32 %absent, {2}, 0; cvta.to.global.u64 %global, {1};",
                "cp.async.ca.shared.global [{0}], [%global], 4, %absent; }}",
                in(reg32) self.address + index * 4, in(reg64) x.as_ptr().wrapping_add(from), in(reg32) u32::from(there),
                options(nostack)
            );
            #[cfg(not(target_arch = "nvptx64"))]
            self.set(index, if there { vector::load(x, from) } else { 0.0 });
        }
    }

    /// Starts to copy `x[from..from + 4]` to `index`, or writes zeros if `there` is false. Both
    /// indices are multiples of four, and `x` starts on a 16-byte boundary.
    ///
    /// # Safety
    /// If `there` is true, `from + 4 <= x.len()`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy4_or_zero(self, index: u32, x: &[f32], from: usize, there: bool) {
        // SAFETY: inside the tile and, if `there` is true, inside `x`, as the caller guarantees and
        // the CPU checks. Both lie on 16-byte boundaries.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            copy16_or_zero(self.address + index * 4, x.as_ptr().wrapping_add(from), there);
            #[cfg(not(target_arch = "nvptx64"))]
            self.set4(index, if there { F4::load(x, from) } else { F4::splat(0.0) });
        }
    }

    /// Starts to copy `x[from..from + 4]` to `index`. Both indices are multiples of four, and `x`
    /// starts on a 16-byte boundary.
    ///
    /// # Safety
    /// `from + 4 <= x.len()`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy4(self, index: u32, x: &[f32], from: usize) {
        // SAFETY: inside the tile and inside `x`, as the caller guarantees and the CPU checks. Both
        // lie on 16-byte boundaries.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            copy16(self.address + index * 4, x.as_ptr().add(from));
            #[cfg(not(target_arch = "nvptx64"))]
            self.set4(index, F4::load(x, from));
        }
    }
}

impl SharedTile<u32> {
    /// Starts to copy the 16 bytes of `x` that begin with `x[from]` to the four words from `index`
    /// on. `index` is a multiple of four, and `x[from]` lies on a 16-byte boundary.
    ///
    /// # Safety
    /// The elements lie inside `x`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy_chunk<S: Stored>(self, index: u32, x: &[S], from: usize) {
        // SAFETY: inside the tile and inside `x`, as the caller guarantees and the CPU checks. Both
        // lie on 16-byte boundaries.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            copy16(self.address + index * 4, x.as_ptr().add(from));
            #[cfg(not(target_arch = "nvptx64"))]
            {
                self.writes_at_once(index, 4);
                vector::reads_at_once(x.as_ptr(), from, 16 / size_of::<S>());
                let bits = |at: usize| vector::load(x, from + at).widen().to_bits();
                let narrow = size_of::<S>() < 4;
                for word in 0..4 {
                    // The bits of a BF16 are the upper half of those of f32.
                    let value = if narrow { bits(2 * word) >> 16 | bits(2 * word + 1) } else { bits(word) };
                    self.set(index + word as u32, value);
                }
            }
        }
    }

    /// Starts the copy of [`copy_chunk`](Self::copy_chunk), or writes zeros if `there` is false.
    ///
    /// # Safety
    /// If `there` is true, the elements lie inside `x`. The CPU checks it, the GPU does not.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy_chunk_or_zero<S: Stored>(self, index: u32, x: &[S], from: usize, there: bool) {
        // SAFETY: inside the tile and, if `there` is true, inside `x`, as the caller guarantees and
        // the CPU checks. Both lie on 16-byte boundaries.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            copy16_or_zero(self.address + index * 4, x.as_ptr().wrapping_add(from), there);
            #[cfg(not(target_arch = "nvptx64"))]
            if there {
                self.copy_chunk(index, x, from);
            } else {
                (0..4).for_each(|word| self.set(index + word, 0));
            }
        }
    }

    /// Reads four matrices of 8 x 8 16-bit elements by `ldmatrix.x4`. Lane `8 q + r` supplies the
    /// address of row r of matrix q: its first word, `index`. Lane `4 g + t` gets elements 2 t and
    /// 2 t + 1 of row g of each matrix, or of column g if `transposed`.
    ///
    /// # Safety
    /// All lanes of the warp make the call, [converged](crate::warp::converge_warp). Each has a row
    /// inside the tile on a 16-byte boundary, and the same constant `transposed`.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn matrices(self, index: u32, transposed: bool) -> [u32; 4] {
        #[cfg(not(target_arch = "nvptx64"))]
        {
            self.reads_at_once(index, 4);
            let own = [0, 1, 2, 3].map(|word| self.get(index + word));
            let rows = cuda_std::emulator::lanes(&own);
            let (g, t) = (cuda_std::warp::lane_id() as usize / 4, cuda_std::warp::lane_id() as usize % 4);
            let matrices = [0, 8, 16, 24].map(|first| {
                // SAFETY: each lane's row lives until the `sync_warp` below, which all lanes reach,
                // as they reached this.
                let word = |row: usize, word: usize| unsafe { (*rows[first + row])[word] };
                let element = |row: usize| word(row, g / 2) >> (16 * (g % 2)) & 0xffff;
                if transposed { element(2 * t) | element(2 * t + 1) << 16 } else { word(g, t) }
            });
            // SAFETY: all lanes of the warp execute this, converged, as the caller guarantees.
            unsafe { cuda_std::warp::sync_warp(u32::MAX) };
            matrices
        }
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: the caller guarantees that the rows lie inside the tile, and that all lanes of
        // the warp execute this.
        unsafe {
            let (a, b, c, d): (u32, u32, u32, u32);
            if transposed {
                core::arch::asm!(
                    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
                    out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d,
                    in(reg32) self.address + index * 4, options(nostack)
                );
            } else {
                core::arch::asm!(
                    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
                    out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d,
                    in(reg32) self.address + index * 4, options(nostack)
                );
            }
            [a, b, c, d]
        }
    }
}

/// Starts to copy 16 bytes to a shared address.
///
/// # Safety
/// The bytes can be read, and both addresses lie on 16-byte boundaries.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
unsafe fn copy16<S>(to: u32, from: *const S) {
    // SAFETY: the caller guarantees it.
    unsafe {
        core::arch::asm!(
            "{{ .reg .u64 %global; cvta.to.global.u64 %global, {1};",
            "cp.async.cg.shared.global [{0}], [%global], 16; }}",
            in(reg32) to, in(reg64) from, options(nostack)
        );
    }
}

/// Starts the copy of [`copy16`], or writes zeros if `there` is false.
///
/// # Safety
/// If `there` is true, the bytes can be read. Both addresses lie on 16-byte boundaries.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
unsafe fn copy16_or_zero<S>(to: u32, from: *const S, there: bool) {
    // SAFETY: the caller guarantees it.
    unsafe {
        core::arch::asm!(
            "{{ .reg .u64 %global; .reg .pred %absent; setp.eq.u32 %absent, {2}, 0; cvta.to.global.u64 %global, {1};",
            "cp.async.cg.shared.global [{0}], [%global], 16, %absent; }}",
            in(reg32) to, in(reg64) from, in(reg32) u32::from(there), options(nostack)
        );
    }
}

/// Commits the copies that this thread has started since its last group as one group.
#[inline(always)]
pub fn commit_copies() {
    // SAFETY: it only marks a point in the thread's copies.
    #[cfg(target_arch = "nvptx64")]
    unsafe {
        core::arch::asm!("cp.async.commit_group;", options(nostack));
    }
}

/// Waits until at most the `PENDING` newest groups of this thread's copies are in flight.
#[inline(always)]
pub fn wait_copies<const PENDING: u32>() {
    // SAFETY: it only waits, and the compiler moves no memory access across it.
    #[cfg(target_arch = "nvptx64")]
    unsafe {
        core::arch::asm!("cp.async.wait_group {0};", const PENDING, options(nostack));
    }
}

#[cfg(not(target_arch = "nvptx64"))]
#[cold]
#[inline(never)]
fn out_of_range(index: u32, len: u32) -> ! {
    panic!("shared memory: index {index} of {len}")
}
