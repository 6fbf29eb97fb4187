//! Global memory. Nothing checks an access here, and the stores of a vector are assembly.

use half::bf16;

/// Precedes a read from a slice.
#[inline(always)]
pub fn reads_slice<T>(_: &[T], _index: usize, _count: usize) {}

/// Precedes a read through a pointer.
#[inline(always)]
pub fn reads<T>(_: *const T, _index: usize, _count: usize) {}

/// Precedes a write.
#[inline(always)]
pub fn writes<T>(_: *mut T, _index: usize, _count: usize) {}

/// Precedes a read of `count` elements in one access.
#[inline(always)]
pub fn reads_at_once<T>(_: *const T, _index: usize, _count: usize) {}

/// Precedes a write of `count` elements in one access.
#[inline(always)]
pub fn writes_at_once<T>(_: *mut T, _index: usize, _count: usize) {}

/// Precedes an access to `index..index + count` of `len` elements.
#[inline(always)]
pub fn check_range(_index: usize, _count: usize, _len: usize) {}

/// Writes four f32 in one access. LLVM would merge a plain store with the elementwise store of
/// another branch, and split both.
///
/// # Safety
/// `out` is valid for writes of four elements, in global memory, and lies on a 16-byte boundary.
#[inline(always)]
pub unsafe fn write4(out: *mut f32, [a, b, c, d]: [f32; 4]) {
    // SAFETY: the elements may be written, and the address is one of global memory: the function's
    // contract.
    unsafe {
        core::arch::asm!(
            "{{ .reg .u64 %global; cvta.to.global.u64 %global, {0};",
            "st.global.v4.f32 [%global], {{{1}, {2}, {3}, {4}}}; }}",
            in(reg64) out, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack)
        );
    }
}

/// Writes four BF16, two in each word, in one access.
///
/// # Safety
/// `out` is valid for writes of four elements, in global memory, and lies on an 8-byte boundary.
#[inline(always)]
pub unsafe fn write_words(out: *mut bf16, [low, high]: [u32; 2]) {
    // SAFETY: the elements may be written, and the address is one of global memory: the function's
    // contract.
    unsafe {
        core::arch::asm!(
            "{{ .reg .u64 %global; cvta.to.global.u64 %global, {0};",
            "st.global.v2.b32 [%global], {{{1}, {2}}}; }}",
            in(reg64) out, in(reg32) low, in(reg32) high, options(nostack)
        );
    }
}
