//! Global memory. The emulator checks every access before it happens, and so do slices. The
//! functions on runs and prefetches exist only here, for the tiles that only a CPU runs.

use cuda_std::emulator::{Kind, access};
use half::bf16;

/// Reports a read from a slice to the emulator. The caller checks the length.
#[inline(always)]
#[track_caller]
pub fn reads_slice<T>(x: &[T], index: usize, count: usize) {
    access::slice(x, index, count);
}

/// Reports a read through a pointer to the emulator, which checks it.
#[inline(always)]
#[track_caller]
pub fn reads<T>(x: *const T, index: usize, count: usize) {
    access::global(Kind::Read, x, index, count);
}

/// Reports a write to the emulator, which checks it.
#[inline(always)]
#[track_caller]
pub fn writes<T>(out: *mut T, index: usize, count: usize) {
    access::global(Kind::Write, out, index, count);
}

/// Reports a read of `count` elements in one access to the emulator. It checks that the first lies
/// on a boundary of `count` elements.
#[inline(always)]
#[track_caller]
pub fn reads_at_once<T>(x: *const T, index: usize, count: usize) {
    access::at_once(Kind::Read, x, index, count * size_of::<T>());
}

/// Reports a write of `count` elements in one access to the emulator.
#[inline(always)]
#[track_caller]
pub fn writes_at_once<T>(out: *mut T, index: usize, count: usize) {
    access::at_once(Kind::Write, out, index, count * size_of::<T>());
}

/// Checks that `index..index + count` lies inside `len` elements.
#[inline(always)]
pub fn check_range(index: usize, count: usize, len: usize) {
    if count > 0 && (len < count || index > len - count) {
        out_of_range(index, count, len);
    }
}

#[cold]
#[inline(never)]
fn out_of_range(index: usize, count: usize, len: usize) -> ! {
    panic!("global memory: elements {index}..{} of {len}", index.wrapping_add(count))
}

#[repr(C, align(16))]
struct Quad([f32; 4]);

/// Writes four f32 in one access.
///
/// # Safety
/// `out` is valid for writes of four elements, in global memory, and lies on a 16-byte boundary.
#[inline(always)]
pub unsafe fn write4(out: *mut f32, values: [f32; 4]) {
    // SAFETY: the elements may be written, on such a boundary: the function's contract.
    unsafe { out.cast::<Quad>().write(Quad(values)) };
}

#[repr(C, align(8))]
struct Words([u32; 2]);

/// Writes four BF16, two in each word, in one access.
///
/// # Safety
/// `out` is valid for writes of four elements, in global memory, and lies on an 8-byte boundary.
#[inline(always)]
pub unsafe fn write_words(out: *mut bf16, words: [u32; 2]) {
    // SAFETY: the elements may be written, on such a boundary: the function's contract.
    unsafe { out.cast::<Words>().write(Words(words)) };
}

/// Loads `x[index..index + N]` with one check and one read. It panics if the slice is shorter.
#[inline(always)]
#[track_caller]
pub fn load_run<const N: usize>(x: &[f32], index: usize) -> [f32; N] {
    reads_slice(x, index, N);
    check_range(index, N, x.len());
    // SAFETY: the range lies inside `x`, as checked above.
    unsafe { x.as_ptr().add(index).cast::<[f32; N]>().read_unaligned() }
}

/// Loads like [`load_run`], from a pointer.
///
/// # Safety
/// `x` is valid for reads of these elements.
#[inline(always)]
#[track_caller]
pub unsafe fn load_run_raw<const N: usize>(x: *const f32, index: usize) -> [f32; N] {
    reads(x, index, N);
    // SAFETY: these elements may be read: the function's contract. The read takes any alignment.
    unsafe { x.add(index).cast::<[f32; N]>().read_unaligned() }
}

/// Writes `out[index..index + N] = values`.
///
/// # Safety
/// `out` is valid for writes of these elements.
#[inline(always)]
#[track_caller]
pub unsafe fn store_run<const N: usize>(out: *mut f32, index: usize, values: [f32; N]) {
    writes(out, index, N);
    // SAFETY: these elements may be written: the function's contract. The write takes any
    // alignment.
    unsafe { out.add(index).cast::<[f32; N]>().write_unaligned(values) };
}

/// Hints the CPU to prefetch the cache line of `x[index]`. This is not an access, so the element
/// need not exist.
#[inline(always)]
pub fn prefetch<T>(x: &[T], index: usize) {
    prefetch_raw(x.as_ptr(), index);
}

/// Prefetches like [`prefetch`], from a pointer.
#[inline(always)]
pub fn prefetch_raw<T>(x: *const T, index: usize) {
    let _place = x.wrapping_add(index);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction. It takes any address, and has no
        // visible effect.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(_place.cast()) };
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: the instruction takes any address, and has no visible effect.
    unsafe {
        core::arch::asm!("prfm pldl2keep, [{0}]", in(reg) _place, options(nostack, readonly, preserves_flags));
    }
}
