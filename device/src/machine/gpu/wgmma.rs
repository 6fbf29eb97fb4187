//! Products of a warpgroup by wgmma: asynchronous instructions that read both operands from shared
//! memory.
//!
//! ptxas keeps the sums in registers only under three conditions. No loop over the sums may remain,
//! so every sum is an operand of the assembly. While instructions are in flight, nothing touches
//! the sums, and no branch is taken by some lanes of the warp.

use crate::tile::SharedTile;
use core::arch::asm;

/// A warpgroup's products that are in flight. On the GPU only the hardware knows them.
#[derive(Clone, Copy)]
pub struct Products;

/// Calls a macro with the numbers of the sums of 64 rows and the given tiles of 8 columns.
macro_rules! numbered {
    (8 $macro:ident $($arguments:tt)*) => {
        $macro!($($arguments)*;
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30
            31)
    };
    (16 $macro:ident $($arguments:tt)*) => {
        $macro!($($arguments)*;
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30
            31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58
            59 60 61 62 63)
    };
    (24 $macro:ident $($arguments:tt)*) => {
        $macro!($($arguments)*;
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30
            31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58
            59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86
            87 88 89 90 91 92 93 94 95)
    };
    (28 $macro:ident $($arguments:tt)*) => {
        $macro!($($arguments)*;
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30
            31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58
            59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86
            87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110
            111)
    };
    (32 $macro:ident $($arguments:tt)*) => {
        $macro!($($arguments)*;
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30
            31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58
            59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86
            87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110
            111 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126 127)
    };
}

/// Starts four instructions, 64 k, and commits them as a group. The first one adds to the sums only
/// if `$add` is true.
macro_rules! multiply {
    ($name:literal, $sums:ident, $a:ident, $b:ident, $add:ident, $along:expr; $first:literal $($i:literal)*) => {
        asm!(
            "{{ .reg .pred %add; .reg .b64 %a, %b; setp.ne.u32 %add, {add}, 0;",
            "wgmma.fence.sync.aligned;",
            concat!("wgmma.mma_async.sync.aligned.", $name, ".f32.bf16.bf16 {{{", $first, "}", $(", {", $i, "}",)* "}}, {a}, {b}, %add, 1, 1, {ta}, {tb};"),
            "add.s64 %a, {a}, {step_a}; add.s64 %b, {b}, {step_b};",
            concat!("wgmma.mma_async.sync.aligned.", $name, ".f32.bf16.bf16 {{{", $first, "}", $(", {", $i, "}",)* "}}, %a, %b, 1, 1, 1, {ta}, {tb};"),
            "add.s64 %a, %a, {step_a}; add.s64 %b, %b, {step_b};",
            concat!("wgmma.mma_async.sync.aligned.", $name, ".f32.bf16.bf16 {{{", $first, "}", $(", {", $i, "}",)* "}}, %a, %b, 1, 1, 1, {ta}, {tb};"),
            "add.s64 %a, %a, {step_a}; add.s64 %b, %b, {step_b};",
            concat!("wgmma.mma_async.sync.aligned.", $name, ".f32.bf16.bf16 {{{", $first, "}", $(", {", $i, "}",)* "}}, %a, %b, 1, 1, 1, {ta}, {tb};"),
            "wgmma.commit_group.sync.aligned; }}",
            inout(reg32) $sums[$first], $(inout(reg32) $sums[$i],)*
            a = in(reg64) $a, b = in(reg64) $b, add = in(reg32) u32::from($add),
            ta = const transposed($along[0]), tb = const transposed($along[1]),
            step_a = const step($along[0]), step_b = const step($along[1]),
            options(nostack)
        )
    };
}

/// Starts one instruction, 16 k, and commits it as a group.
macro_rules! multiply_step {
    ($name:literal, $sums:ident, $a:ident, $b:ident, $add:ident, $along:expr; $first:literal $($i:literal)*) => {
        asm!(
            "{{ .reg .pred %add; setp.ne.u32 %add, {add}, 0;",
            "wgmma.fence.sync.aligned;",
            concat!("wgmma.mma_async.sync.aligned.", $name, ".f32.bf16.bf16 {{{", $first, "}", $(", {", $i, "}",)* "}}, {a}, {b}, %add, 1, 1, {ta}, {tb};"),
            "wgmma.commit_group.sync.aligned; }}",
            inout(reg32) $sums[$first], $(inout(reg32) $sums[$i],)*
            a = in(reg64) $a, b = in(reg64) $b, add = in(reg32) u32::from($add),
            ta = const transposed($along[0]), tb = const transposed($along[1]),
            options(nostack)
        )
    };
}

/// Starts two instructions of TF32, 16 k, with A in registers, and commits them as a group. The
/// first one adds to the sums only if `$add` is true.
macro_rules! multiply_tf32 {
    ($name:literal, $sums:ident, $a:ident, $b:ident, $add:ident; $first:literal $($i:literal)*) => {
        asm!(
            "{{ .reg .pred %add; .reg .b64 %b; setp.ne.u32 %add, {add}, 0;",
            "wgmma.fence.sync.aligned;",
            concat!("wgmma.mma_async.sync.aligned.", $name, ".f32.tf32.tf32 {{{", $first, "}", $(", {", $i, "}",)* "}}, {{{a0}, {a1}, {a2}, {a3}}}, {b}, %add, 1, 1;"),
            "add.s64 %b, {b}, 2;",
            concat!("wgmma.mma_async.sync.aligned.", $name, ".f32.tf32.tf32 {{{", $first, "}", $(", {", $i, "}",)* "}}, {{{a4}, {a5}, {a6}, {a7}}}, %b, 1, 1, 1;"),
            "wgmma.commit_group.sync.aligned; }}",
            inout(reg32) $sums[$first], $(inout(reg32) $sums[$i],)*
            a0 = in(reg32) $a[0][0], a1 = in(reg32) $a[0][1], a2 = in(reg32) $a[0][2], a3 = in(reg32) $a[0][3],
            a4 = in(reg32) $a[1][0], a5 = in(reg32) $a[1][1], a6 = in(reg32) $a[1][2], a7 = in(reg32) $a[1][3],
            b = in(reg64) $b, add = in(reg32) u32::from($add), options(nostack)
        )
    };
}

/// Waits for all groups. The sums are operands, so that the compiler moves no use of them up.
macro_rules! finish {
    ($sums:ident; $($i:literal)*) => {
        asm!("wgmma.wait_group.sync.aligned 0;", concat!("//", $(" {", $i, "}",)*), $(inout(reg32) $sums[$i],)* options(nostack))
    };
}

/// Names registers, without an instruction.
macro_rules! undefined {
    ($sums:ident; $($i:literal)*) => {
        asm!(concat!("//", $(" {", $i, "}",)*), $(out(reg32) $sums[$i],)* options(nomem, nostack, preserves_flags))
    };
}

/// Returns 1 for an operand that is stored across k, else 0: the instruction's immediate.
const fn transposed(along_k: bool) -> u32 {
    if along_k { 0 } else { 1 }
}

/// Returns the distance to the next 16 k in a descriptor, in 16 bytes: 32 bytes of each row, or 16
/// rows of 128 bytes.
const fn step(along_k: bool) -> u64 {
    if along_k { 2 } else { 128 }
}

/// Returns the descriptor of an operand that begins at a shared address: rows of 128 bytes,
/// swizzled by 128 bytes. Eight rows are 1024 bytes. Across k, the next 64 rows or columns follow
/// 8192 bytes further.
#[inline(always)]
fn descriptor(address: u32, along_k: bool) -> u64 {
    const SWIZZLE_128: u64 = 1 << 62;
    const EIGHT_ROWS: u64 = (1024 >> 4) << 32;
    let next_panel: u64 = if along_k { 1 } else { 8192 >> 4 };
    SWIZZLE_128 | EIGHT_ROWS | next_panel << 16 | u64::from((address & 0x3ffff) >> 4)
}

impl Products {
    /// Returns a state without products in flight.
    #[inline(always)]
    pub fn new() -> Self {
        Self
    }

    /// Starts the products of 64 rows of A, from `first_row` of its stage on, with all columns of
    /// B. They are added to the sums, or replace them if `add` is false.
    ///
    /// # Safety
    /// All lanes of the warpgroup execute this together. The stages lie on 1024 bytes, are
    /// completely written, and this thread has passed a fence and a barrier since. They are not
    /// written, and the sums not touched, before a wait for these products. `first_row` is a
    /// multiple of 64.
    #[inline(always)]
    pub unsafe fn multiply<const A_ALONG: bool, const B_ALONG: bool, const TILES: usize>(
        &mut self,
        sums: &mut [[f32; 4]; TILES],
        a: SharedTile<u32>,
        first_row: u32,
        b: SharedTile<u32>,
        add: bool,
    ) {
        let sums = sums.as_flattened_mut();
        // 64 rows take 8192 bytes in either layout.
        let a = descriptor(a.0.address() + first_row * 128, A_ALONG);
        let b = descriptor(b.0.address(), B_ALONG);
        // SAFETY: the function's contract.
        unsafe {
            match TILES {
                8 => numbered!(8 multiply "m64n64k16", sums, a, b, add, [A_ALONG, B_ALONG]),
                16 => numbered!(16 multiply "m64n128k16", sums, a, b, add, [A_ALONG, B_ALONG]),
                24 => numbered!(24 multiply "m64n192k16", sums, a, b, add, [A_ALONG, B_ALONG]),
                28 => numbered!(28 multiply "m64n224k16", sums, a, b, add, [A_ALONG, B_ALONG]),
                _ => numbered!(32 multiply "m64n256k16", sums, a, b, add, [A_ALONG, B_ALONG]),
            }
        }
    }

    /// Starts the part of [`multiply`](Self::multiply) with 16 k, the `step`th of the stage.
    ///
    /// # Safety
    /// See [`multiply`](Self::multiply).
    #[inline(always)]
    pub unsafe fn multiply_step<const A_ALONG: bool, const B_ALONG: bool, const TILES: usize>(
        &mut self,
        sums: &mut [[f32; 4]; TILES],
        a: SharedTile<u32>,
        first_row: u32,
        b: SharedTile<u32>,
        at: u32,
        add: bool,
    ) {
        let sums = sums.as_flattened_mut();
        let a = descriptor(a.0.address() + first_row * 128, A_ALONG) + u64::from(at) * step(A_ALONG);
        let b = descriptor(b.0.address(), B_ALONG) + u64::from(at) * step(B_ALONG);
        // SAFETY: the function's contract.
        unsafe {
            match TILES {
                8 => numbered!(8 multiply_step "m64n64k16", sums, a, b, add, [A_ALONG, B_ALONG]),
                24 => numbered!(24 multiply_step "m64n192k16", sums, a, b, add, [A_ALONG, B_ALONG]),
                16 => numbered!(16 multiply_step "m64n128k16", sums, a, b, add, [A_ALONG, B_ALONG]),
                _ => numbered!(32 multiply_step "m64n256k16", sums, a, b, add, [A_ALONG, B_ALONG]),
            }
        }
    }

    /// Starts the products of a warp's 16 rows of A, two instructions of TF32 in registers, with
    /// all columns of B, which is stored along k, over 16 k from `first_k` of its stage on. They
    /// are added to the sums, or replace them if `add` is false.
    ///
    /// # Safety
    /// The requirements of [`multiply`](Self::multiply) hold for B and the sums, and `a` is not
    /// changed before a wait for these products. `first_k` is a multiple of 16.
    #[inline(always)]
    pub unsafe fn multiply_tf32<const TILES: usize>(
        &mut self,
        sums: &mut [[f32; 4]; TILES],
        a: [[u32; 4]; 2],
        b: SharedTile<u32>,
        first_k: u32,
        add: bool,
    ) {
        let sums = sums.as_flattened_mut();
        let b = descriptor(b.0.address() + first_k * 4, true);
        // SAFETY: the function's contract.
        unsafe {
            match TILES {
                8 => numbered!(8 multiply_tf32 "m64n64k8", sums, a, b, add),
                16 => numbered!(16 multiply_tf32 "m64n128k8", sums, a, b, add),
                _ => numbered!(32 multiply_tf32 "m64n256k8", sums, a, b, add),
            }
        }
    }

    /// Waits until at most the `PENDING` newest groups are in flight.
    #[inline(always)]
    pub fn wait<const PENDING: u32>(&mut self) {
        // SAFETY: it only waits, and all lanes of the warp execute it, as they started the
        // products.
        unsafe { asm!("wgmma.wait_group.sync.aligned {0};", const PENDING, options(nostack)) };
    }

    /// Waits for all products. Then the sums may be read.
    #[inline(always)]
    pub fn finish<const TILES: usize>(&mut self, sums: &mut [[f32; 4]; TILES]) {
        let sums = sums.as_flattened_mut();
        // SAFETY: it only waits, and all lanes of the warp execute it, as they started the
        // products.
        unsafe {
            match TILES {
                8 => numbered!(8 finish sums),
                16 => numbered!(16 finish sums),
                24 => numbered!(24 finish sums),
                28 => numbered!(28 finish sums),
                _ => numbered!(32 finish sums),
            }
        }
    }
}

/// Returns zeros. Not `[0.0; N]`: that is a loop, which LLVM unrolls too late to keep the sums in
/// registers.
#[inline(always)]
pub fn no_sums<const TILES: usize>() -> [[f32; 4]; TILES] {
    // SAFETY: zeros are floats.
    unsafe { core::mem::zeroed() }
}

/// Returns sums of any value, for products that replace them.
#[inline(always)]
pub fn undefined_sums<const TILES: usize>() -> [[f32; 4]; TILES] {
    let mut all = no_sums();
    let sums = all.as_flattened_mut();
    // SAFETY: the assembly has no instruction. It only makes the compiler keep no zeros.
    unsafe {
        match TILES {
            8 => numbered!(8 undefined sums),
            16 => numbered!(16 undefined sums),
            24 => numbered!(24 undefined sums),
            28 => numbered!(28 undefined sums),
            _ => numbered!(32 undefined sums),
        }
    }
    all
}

/// Makes this thread's writes to shared memory, asynchronous copies included, visible to wgmma.
#[inline(always)]
pub fn fence_async() {
    // SAFETY: a memory fence.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) };
}

// Stages begin on 1024 bytes, which the swizzle needs. The symbol names the same memory as that of
// `cuda_std`.
core::arch::global_asm!(".extern .shared .align 1024 .b8 stepscope_stages[];");

/// Aligns the block's dynamic shared memory to 1024 bytes.
#[inline(always)]
pub fn align_stages() {
    // SAFETY: it names the symbol, and accesses no memory.
    unsafe { asm!("{{ .reg .u32 %stages; mov.u32 %stages, stepscope_stages; }}", options(nomem, nostack)) };
}
