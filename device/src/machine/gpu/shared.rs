//! Shared memory by 32-bit addresses, and asynchronous copies into it.

use crate::warp::Converged;
use core::marker::PhantomData;
use cuda_std::shared;

/// A 32-bit element type of shared memory.
pub trait SharedElement: Copy {
    /// Reads the value at a shared address.
    ///
    /// # Safety
    /// `address` lies inside the block's shared memory, on a 4-byte boundary.
    unsafe fn load(address: u32) -> Self;
    /// Writes the value at a shared address.
    ///
    /// # Safety
    /// The caller meets the requirements of [`load`](Self::load).
    unsafe fn store(self, address: u32);
    /// Reads the four values from a shared address on.
    ///
    /// # Safety
    /// The values lie inside the block's shared memory, on a 16-byte boundary.
    unsafe fn load4(address: u32) -> [Self; 4];
    /// Writes four values from a shared address on.
    ///
    /// # Safety
    /// The caller meets the requirements of [`load4`](Self::load4).
    unsafe fn store4(values: [Self; 4], address: u32);
}

macro_rules! element {
    ($ty:ty, $suffix:literal) => {
        impl SharedElement for $ty {
            #[inline(always)]
            unsafe fn load(address: u32) -> Self {
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

            #[inline(always)]
            unsafe fn store(self, address: u32) {
                // SAFETY: the trait requires that the address lies in shared memory on a 4-byte
                // boundary.
                unsafe {
                    core::arch::asm!(
                        concat!("st.shared.", $suffix, " [{0}], {1};"),
                        in(reg32) address, in(reg32) self, options(nostack)
                    );
                }
            }

            #[inline(always)]
            unsafe fn load4(address: u32) -> [Self; 4] {
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

            #[inline(always)]
            unsafe fn store4([a, b, c, d]: [Self; 4], address: u32) {
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

/// A part of the block's dynamic shared memory.
///
/// The methods with an `index` are unsafe. Each requires that the window lies inside the shared
/// memory of the launch, the values at `index` inside the window, and an access of several values
/// on a boundary of as many.
#[derive(Clone, Copy)]
pub struct Window<T> {
    address: u32,
    element: PhantomData<T>,
}

impl<T> Window<T> {
    /// Returns the window of `len` values that starts `byte_offset` bytes into the memory.
    #[inline(always)]
    pub fn new(byte_offset: u32, _len: u32) -> Self {
        let base = shared::dynamic_shared_mem::<u8>();
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

    #[inline(always)]
    fn at(self, index: u32) -> u32 {
        self.address + index * 4
    }

    /// Starts to copy the 16 bytes of `x` that begin with `x[from]` to `index`.
    ///
    /// # Safety
    /// See [`Window`]. The bytes lie inside `x`, on a 16-byte boundary.
    #[inline(always)]
    pub unsafe fn copy16<S>(self, index: u32, x: &[S], from: usize) {
        // SAFETY: the bytes may be read, and both addresses lie on 16-byte boundaries: the
        // function's contract.
        unsafe {
            core::arch::asm!(
                "{{ .reg .u64 %global; cvta.to.global.u64 %global, {1};",
                "cp.async.cg.shared.global [{0}], [%global], 16; }}",
                in(reg32) self.at(index), in(reg64) x.as_ptr().add(from), options(nostack)
            );
        }
    }

    /// Starts the copy of [`copy16`](Self::copy16), or writes zeros if `there` is false.
    ///
    /// # Safety
    /// See [`Window`]. If `there` is true, the bytes lie inside `x`, on a 16-byte boundary.
    #[inline(always)]
    pub unsafe fn copy16_or_zero<S>(self, index: u32, x: &[S], from: usize, there: bool) {
        // SAFETY: the bytes may be read if `there` is true, and both addresses lie on 16-byte
        // boundaries: the function's contract.
        unsafe {
            core::arch::asm!(
                "{{ .reg .u64 %global; .reg .pred %absent; setp.eq.u32 %absent, {2}, 0; cvta.to.global.u64 %global, {1};",
                "cp.async.cg.shared.global [{0}], [%global], 16, %absent; }}",
                in(reg32) self.at(index), in(reg64) x.as_ptr().wrapping_add(from), in(reg32) u32::from(there),
                options(nostack)
            );
        }
    }

    /// Starts the copy of the first `count` elements of [`copy16`](Self::copy16), with zeros in place
    /// of the others.
    ///
    /// # Safety
    /// See [`Window`]. `count` elements lie inside `x`, and if it is not 0 on a 16-byte boundary.
    #[inline(always)]
    pub unsafe fn copy16_part<S>(self, index: u32, x: &[S], from: usize, count: u32) {
        // SAFETY: as many bytes may be read, and both addresses lie on 16-byte boundaries: the
        // function's contract.
        unsafe {
            core::arch::asm!(
                "{{ .reg .u64 %global; cvta.to.global.u64 %global, {1};",
                "cp.async.cg.shared.global [{0}], [%global], 16, {2}; }}",
                in(reg32) self.at(index), in(reg64) x.as_ptr().wrapping_add(from),
                in(reg32) count * size_of::<S>() as u32, options(nostack)
            );
        }
    }

    /// Returns the shared address of the window.
    #[cfg(cuda_arch = "sm_90a")]
    #[inline(always)]
    pub(in crate::machine) fn address(self) -> u32 {
        self.address
    }
}

impl<T: SharedElement> Window<T> {
    /// Reads the value at `index`.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    pub unsafe fn read(self, index: u32) -> T {
        // SAFETY: inside shared memory, on a 4-byte boundary.
        unsafe { T::load(self.at(index)) }
    }

    /// Writes the value at `index`.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    pub unsafe fn write(self, index: u32, value: T) {
        // SAFETY: inside shared memory, on a 4-byte boundary.
        unsafe { value.store(self.at(index)) }
    }

    /// Reads the four values from `index` on.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    pub unsafe fn read4(self, index: u32) -> [T; 4] {
        // SAFETY: inside shared memory, on a 16-byte boundary.
        unsafe { T::load4(self.at(index)) }
    }

    /// Writes four values from `index` on.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    pub unsafe fn write4(self, index: u32, values: [T; 4]) {
        // SAFETY: inside shared memory, on a 16-byte boundary.
        unsafe { T::store4(values, self.at(index)) }
    }
}

impl Window<f32> {
    /// Reads the two values from `index` on.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    pub unsafe fn read2(self, index: u32) -> [f32; 2] {
        let (a, b): (f32, f32);
        // SAFETY: inside shared memory, on an 8-byte boundary.
        unsafe {
            core::arch::asm!(
                "ld.shared.v2.f32 {{{0}, {1}}}, [{2}];",
                out(reg32) a, out(reg32) b, in(reg32) self.at(index), options(nostack)
            );
        }
        [a, b]
    }

    /// Starts to copy `x[from]` to `index`.
    ///
    /// # Safety
    /// See [`Window`]. `from < x.len()`.
    #[inline(always)]
    pub unsafe fn copy4(self, index: u32, x: &[f32], from: usize) {
        // SAFETY: inside shared memory and inside `x`: the function's contract.
        unsafe {
            core::arch::asm!(
                "{{ .reg .u64 %global; cvta.to.global.u64 %global, {1};",
                "cp.async.ca.shared.global [{0}], [%global], 4; }}",
                in(reg32) self.at(index), in(reg64) x.as_ptr().add(from), options(nostack)
            );
        }
    }

    /// Starts the copy of [`copy4`](Self::copy4), or writes zero if `there` is false.
    ///
    /// # Safety
    /// See [`Window`]. If `there` is true, `from < x.len()`.
    #[inline(always)]
    pub unsafe fn copy4_or_zero(self, index: u32, x: &[f32], from: usize, there: bool) {
        // SAFETY: inside shared memory and, if `there` is true, inside `x`: the function's
        // contract.
        unsafe {
            core::arch::asm!(
                "{{ .reg .u64 %global; .reg .pred %absent; setp.eq.u32 %absent, {2}, 0; cvta.to.global.u64 %global, {1};",
                "cp.async.ca.shared.global [{0}], [%global], 4, %absent; }}",
                in(reg32) self.at(index), in(reg64) x.as_ptr().wrapping_add(from), in(reg32) u32::from(there),
                options(nostack)
            );
        }
    }
}

impl Window<u32> {
    /// Reads the two values from `index` on.
    ///
    /// # Safety
    /// See [`Window`].
    #[inline(always)]
    pub unsafe fn read_pair(self, index: u32) -> [u32; 2] {
        let (a, b): (u32, u32);
        // SAFETY: inside shared memory, on an 8-byte boundary.
        unsafe {
            core::arch::asm!(
                "ld.shared.v2.u32 {{{0}, {1}}}, [{2}];",
                out(reg32) a, out(reg32) b, in(reg32) self.at(index), options(nostack)
            );
        }
        [a, b]
    }

    /// Reads four matrices of 8 x 8 16-bit elements by `ldmatrix.x4`; see
    /// [`SharedTile::matrices`](crate::tile::SharedTile::matrices).
    ///
    /// # Safety
    /// See [`Window`]: the lane's row of four words begins at `index`. `transposed` is a constant.
    #[inline(always)]
    pub unsafe fn matrices(self, _: Converged, index: u32, transposed: bool) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the row lies inside shared memory, on a 16-byte boundary. The token shows that
        // all lanes of the warp execute this, converged.
        unsafe {
            if transposed {
                core::arch::asm!(
                    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
                    out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) self.at(index), options(nostack)
                );
            } else {
                core::arch::asm!(
                    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
                    out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) self.at(index), options(nostack)
                );
            }
        }
        [a, b, c, d]
    }
}

/// Commits the copies that this thread has started since its last group as one group.
#[inline(always)]
pub fn commit_copies() {
    // SAFETY: it only marks a point in the thread's copies.
    unsafe { core::arch::asm!("cp.async.commit_group;", options(nostack)) };
}

/// Waits until at most the `PENDING` newest groups of this thread's copies are in flight.
#[inline(always)]
pub fn wait_copies<const PENDING: u32>() {
    // SAFETY: it only waits, and the compiler moves no memory access across it.
    unsafe { core::arch::asm!("cp.async.wait_group {0};", const PENDING, options(nostack)) };
}
