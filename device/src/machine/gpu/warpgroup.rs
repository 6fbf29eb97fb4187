//! Products of a warpgroup by wgmma instructions, which read operands from shared memory, or A from
//! registers, while the warps do other work.
//!
//! A group of instructions begins with [`begin_products`], is committed by [`commit_products`], and
//! has ended after [`Accumulators::wait`]. Until then its accumulators and its registers of A must
//! not be touched. Each block of assembly has all instructions of 64 k, so that the compiler moves
//! no accumulator between them.

use crate::tile::SharedTile;

/// An operand in shared memory: the descriptor of a wgmma instruction. Its rows of 128 bytes, of
/// which eight begin on a boundary of 1024 bytes, have
/// [`swizzled`](crate::mma::fragments::swizzled) chunks of 16 bytes.
#[derive(Clone, Copy)]
pub struct Operand(u64);

/// 128-byte rows, swizzled, in groups of eight rows.
const SWIZZLED_ROWS: u64 = 1 << 62 | (1024 >> 4) << 32;

impl Operand {
    /// Returns the operand whose rows are m or n, from `row` of part `part` on. A part has `rows`
    /// rows of 64 k.
    #[inline(always)]
    pub fn along(tile: SharedTile<u32>, rows: u32, part: u32, row: u32) -> Self {
        Self(SWIZZLED_ROWS | 1 << 16 | u64::from(((tile.0.address() + (part * rows + row) * 128) & 0x3_ffff) >> 4))
    }

    /// Returns the operand whose rows are k, from `row` on. A part has `rows` rows of 64 n.
    #[inline(always)]
    pub fn across(tile: SharedTile<u32>, rows: u32, row: u32) -> Self {
        let next_part = u64::from(rows * 128 / 16);
        Self(SWIZZLED_ROWS | next_part << 16 | u64::from(((tile.0.address() + row * 128) & 0x3_ffff) >> 4))
    }
}

/// The distance in a descriptor to the next 16 k: 32 bytes of a row, or 16 rows.
const ALONG_STEP: u64 = 32 / 16;
const ACROSS_STEP: u64 = 16 * 128 / 16;

/// A thread's accumulators of 64 rows. Thread `4 g + t` of warp `w` has columns `8 n + 2 t` and the
/// next of rows `16 w + g` and `16 w + g + 8`, as after an mma instruction.
pub trait Accumulators {
    /// Starts to add (or, without `ADD`, to store) the products of 64 k of two operands in shared
    /// memory, whose rows are m and n.
    ///
    /// # Safety
    /// All threads of the warpgroup call it together, with the same operands, inside the block's
    /// shared memory. The accumulators are not touched until [`wait`](Self::wait).
    unsafe fn multiply_shared<const ADD: bool>(&mut self, a: Operand, b: Operand);

    /// Starts to add (or, without `ADD`, to store) the products of 64 k of A in registers, four
    /// squares of 16 x 16, with B, whose rows are k if it lies `ACROSS`, otherwise n.
    ///
    /// # Safety
    /// The requirements of [`multiply_shared`](Self::multiply_shared) hold. `a` is not changed
    /// until [`wait`](Self::wait).
    unsafe fn multiply_registers<const ADD: bool, const ACROSS: bool>(&mut self, a: &[[u32; 4]; 4], b: Operand);

    /// Waits until at most the `PENDING` newest groups are under way. These accumulators' is none
    /// of them.
    ///
    /// # Safety
    /// All threads of the warpgroup call it together.
    unsafe fn wait<const PENDING: u32>(&mut self);
}

macro_rules! accumulators {
    ($tiles:literal, $shape:literal; $($i:literal)*) => {
        impl Accumulators for [[f32; 4]; $tiles] {
            #[inline(always)]
            unsafe fn multiply_shared<const ADD: bool>(&mut self, a: Operand, b: Operand) {
                // SAFETY: the whole warpgroup executes this, and the operands lie inside shared
                // memory: the function's contract.
                unsafe {
                    core::arch::asm!(
                        "{{ .reg .b64 %a, %b;",
                        accumulators!(instruction $shape, "{a}, {b}", "{add}", "0, 0"; $($i)*),
                        "add.s64 %a, {a}, {step}; add.s64 %b, {b}, {step};",
                        accumulators!(instruction $shape, "%a, %b", "1", "0, 0"; $($i)*),
                        "add.s64 %a, %a, {step}; add.s64 %b, %b, {step};",
                        accumulators!(instruction $shape, "%a, %b", "1", "0, 0"; $($i)*),
                        "add.s64 %a, %a, {step}; add.s64 %b, %b, {step};",
                        accumulators!(instruction $shape, "%a, %b", "1", "0, 0"; $($i)*),
                        "}}",
                        $(inout(reg32) self[$i / 4][$i % 4],)*
                        a = in(reg64) a.0, b = in(reg64) b.0, add = const ADD as u32,
                        step = const ALONG_STEP, options(nostack)
                    );
                }
            }

            #[inline(always)]
            unsafe fn multiply_registers<const ADD: bool, const ACROSS: bool>(
                &mut self,
                a: &[[u32; 4]; 4],
                b: Operand,
            ) {
                // SAFETY: as above.
                unsafe {
                    core::arch::asm!(
                        "{{ .reg .b64 %b;",
                        accumulators!(instruction $shape, "{{{a0}, {a1}, {a2}, {a3}}}, {b}", "{add}", "{across}"; $($i)*),
                        "add.s64 %b, {b}, {step};",
                        accumulators!(instruction $shape, "{{{a4}, {a5}, {a6}, {a7}}}, %b", "1", "{across}"; $($i)*),
                        "add.s64 %b, %b, {step};",
                        accumulators!(instruction $shape, "{{{a8}, {a9}, {a10}, {a11}}}, %b", "1", "{across}"; $($i)*),
                        "add.s64 %b, %b, {step};",
                        accumulators!(instruction $shape, "{{{a12}, {a13}, {a14}, {a15}}}, %b", "1", "{across}"; $($i)*),
                        "}}",
                        $(inout(reg32) self[$i / 4][$i % 4],)*
                        a0 = in(reg32) a[0][0], a1 = in(reg32) a[0][1], a2 = in(reg32) a[0][2], a3 = in(reg32) a[0][3],
                        a4 = in(reg32) a[1][0], a5 = in(reg32) a[1][1], a6 = in(reg32) a[1][2], a7 = in(reg32) a[1][3],
                        a8 = in(reg32) a[2][0], a9 = in(reg32) a[2][1], a10 = in(reg32) a[2][2], a11 = in(reg32) a[2][3],
                        a12 = in(reg32) a[3][0], a13 = in(reg32) a[3][1], a14 = in(reg32) a[3][2], a15 = in(reg32) a[3][3],
                        b = in(reg64) b.0, add = const ADD as u32, across = const ACROSS as u32,
                        step = const if ACROSS { ACROSS_STEP } else { ALONG_STEP }, options(nostack)
                    );
                }
            }

            #[inline(always)]
            unsafe fn wait<const PENDING: u32>(&mut self) {
                // The comment names the accumulators, so the compiler moves no use of them up.
                // SAFETY: the whole warpgroup executes this: the function's contract.
                unsafe {
                    core::arch::asm!(
                        "wgmma.wait_group.sync.aligned {pending};",
                        concat!("//", $(" {", $i, "}",)*),
                        $(inout(reg32) self[$i / 4][$i % 4],)* pending = const PENDING, options(nostack)
                    );
                }
            }
        }
    };
    (instruction $shape:literal, $operands:literal, $add:literal, $transposed:literal; $first:literal $($i:literal)*) => {
        concat!(
            "wgmma.mma_async.sync.aligned.", $shape, "k16.f32.bf16.bf16 {{{", $first, "}", $(", {", $i, "}",)*
            "}}, ", $operands, ", ", $add, ", 1, 1, ", $transposed, ";"
        )
    };
}
accumulators! { 8, "m64n64"; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 }
accumulators! { 16, "m64n128";
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41
    42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
}
accumulators! { 32, "m64n256";
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41
    42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80
    81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114
    115 116 117 118 119 120 121 122 123 124 125 126 127
}

/// Precedes the first product of a group: orders it after this thread's accesses to the registers.
///
/// # Safety
/// All threads of the warpgroup call it together.
#[inline(always)]
pub unsafe fn begin_products() {
    // SAFETY: the whole warpgroup executes this: the function's contract.
    unsafe { core::arch::asm!("wgmma.fence.sync.aligned;", options(nostack)) };
}

/// Waits until at most the `PENDING` newest groups are under way. Their accumulators stay as they
/// are.
///
/// # Safety
/// All threads of the warpgroup call it together.
#[inline(always)]
pub unsafe fn wait_products<const PENDING: u32>() {
    // SAFETY: the whole warpgroup executes this: the function's contract.
    unsafe { core::arch::asm!("wgmma.wait_group.sync.aligned {0};", const PENDING, options(nostack)) };
}

/// Keeps the assembler from moving later waits before the computation of `value`, which is not
/// below 0, by a store that never happens.
#[inline(always)]
pub fn hold(value: f32) {
    // SAFETY: the store's condition is false.
    unsafe {
        core::arch::asm!(
            "{{ .reg .pred %never; .reg .b32 %place; setp.lt.f32 %never, {0}, 0f00000000; mov.b32 %place, 0; @%never st.shared.f32 [%place], {0}; }}",
            in(reg32) value, options(nostack)
        );
    }
}

/// Commits the products that the warpgroup has started since its last group as one group.
///
/// # Safety
/// All threads of the warpgroup call it together.
#[inline(always)]
pub unsafe fn commit_products() {
    // SAFETY: the whole warpgroup executes this: the function's contract.
    unsafe { core::arch::asm!("wgmma.commit_group.sync.aligned;", options(nostack)) };
}

/// Changes the registers of this warpgroup's threads to `COUNT`, a multiple of 8. `MORE` if they
/// become more.
///
/// # Safety
/// All threads of the warpgroup call it together, and all warpgroups of the block make such a call.
/// Their sum suits the multiprocessor.
#[inline(always)]
pub unsafe fn registers<const COUNT: u32, const MORE: bool>() {
    // SAFETY: the whole warpgroup executes this: the function's contract.
    unsafe {
        if MORE {
            core::arch::asm!("setmaxnreg.inc.sync.aligned.u32 {0};", const COUNT, options(nostack));
        } else {
            core::arch::asm!("setmaxnreg.dec.sync.aligned.u32 {0};", const COUNT, options(nostack));
        }
    }
}
