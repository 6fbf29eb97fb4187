//! The epilogue of a matrix multiply: scale, bias, beta C, activation or gate, and the store.
//!
//! A thread brings `ROWS` rows with `GROUPS` groups of up to four neighboring columns each:
//!
//! ```text
//!              columns[0] .. + 3       columns[1] .. + 3
//! row          sums[0][0]  (16 bytes)  sums[0][1]
//! row + apart  sums[1][0]              sums[1][1]
//!
//! alpha * -> + bias -> + beta C -> pre -> gelu, silu, gate or gelu'(C) -> out
//! ```
//! Invariant: every kernel's epilogue runs these steps in this order, and rounds each once.

use super::{ACTIVATIONS, GELU, GELU_DERIVATIVE, STORE_PREACT, SWIGLU};
use crate::block::launder_reg;
use crate::stored::Stored;
use crate::vector::{F4, VectorPart};
use crate::{map4, unroll_on_gpu};

/// True if a kernel that stores S supports [`GELU_DERIVATIVE`]. Only BF16 kernels do. The f32
/// backward pass sums a bias gradient where it multiplies by the derivative, so f32 kernels would
/// carry unused code.
pub(crate) const fn differentiates<S>() -> bool {
    size_of::<S>() < size_of::<f32>()
}

/// The destination of the sums and the steps before the store. The parameters are as in the
/// [module](super).
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<'p, S> {
    pub(crate) bias: &'p [f32],
    pub(crate) bias_start: usize,
    pub(crate) c: *const S,
    pub(crate) out: *mut S,
    pub(crate) pre: *mut S,
    pub(crate) start: usize,
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) ldc: u32,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    pub(crate) flags: u32,
}

/// The extents of a product's matrices, `[m, k]` and `[k, n]`, as a launch passes them.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(cuda_std::launch::Pod, cuda_std::launch::Zeroable))]
#[repr(C)]
pub struct ProductExtents {
    /// Rows of the output.
    pub m: u32,
    /// Columns of the output.
    pub n: u32,
    /// Products in each output.
    pub k: u32,
    /// Products in each partial sum; all of them if k is not split.
    pub k_per_split: u32,
    /// Matrices.
    pub batches: u32,
}

/// The numbers of an epilogue, as a launch passes them.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(cuda_std::launch::Pod, cuda_std::launch::Zeroable))]
#[repr(C)]
pub struct EpilogueForm {
    /// Elements from one output matrix to the next.
    pub stride_c: usize,
    /// Elements from one bias to the next.
    pub stride_bias: usize,
    /// Elements from one row of the output to the next.
    pub ldc: u32,
    /// The factor of the sums.
    pub alpha: f32,
    /// The factor of C.
    pub beta: f32,
    /// The flags of the [module](super).
    pub flags: u32,
}

/// The location of a thread's sums in the output: `ROWS` rows with `GROUPS` groups of neighboring
/// columns each.
#[derive(Clone, Copy)]
pub(crate) struct Places<const GROUPS: usize> {
    /// The first row.
    pub(crate) row: u32,
    /// The distance in rows from one of the thread's rows to the next.
    pub(crate) apart: u32,
    /// The first column of each group.
    pub(crate) columns: [u32; GROUPS],
    /// The columns of a group, up to four.
    pub(crate) width: u32,
}

impl<const GROUPS: usize> Places<GROUPS> {
    /// Returns the places of consecutive rows.
    #[inline(always)]
    pub(crate) fn new(row: u32, columns: [u32; GROUPS], width: u32) -> Self {
        Self { row, apart: 1, columns, width }
    }
}

impl<S: Stored> Epilogue<'_, S> {
    /// True if all of these rows and columns exist, and their vectors are aligned.
    #[inline(always)]
    pub(crate) fn has_whole(&self, first: [u32; 2], extent: [u32; 2]) -> bool {
        let Self { bias, bias_start, start, m, n, ldc, .. } = *self;
        first[0] + extent[0] <= m
            && first[1] + extent[1] <= n
            && (start | ldc as usize).is_multiple_of(F4::LEN)
            && (bias.is_empty() || bias_start.is_multiple_of(F4::LEN))
    }

    /// Applies the epilogue to a thread's sums and writes them. Sums outside the output are
    /// dropped.
    ///
    /// # Safety
    /// The contract has accepted the arguments.
    #[inline(always)]
    pub(crate) unsafe fn finish<const ROWS: usize, const GROUPS: usize>(
        &self,
        places: Places<GROUPS>,
        mut sums: [[F4; GROUPS]; ROWS],
    ) {
        let Self { bias, bias_start, c, out, pre, start, m, n, ldc, alpha, beta, flags } = *self;
        let Places { row: first_row, apart, columns, width } = places;
        let first = start + first_row as usize * ldc as usize;
        let place = |row: usize, group: usize| first + row * apart as usize * ldc as usize + columns[group] as usize;
        let exists = |row: usize| first_row + row as u32 * apart < m;
        let inside = |group: usize| if columns[group] < n { (n - columns[group]).min(width) as usize } else { 0 };
        let whole = exists(ROWS - 1) && (first | ldc as usize).is_multiple_of(F4::LEN) && inside(GROUPS - 1) == F4::LEN;
        // Either all vectors lie inside the output, or each is checked. Without checks in between,
        // the reads are issued together, and so are the writes.
        macro_rules! for_each {
            (|$row:ident, $group:ident, $at:ident, $part:ident| $body:expr) => {
                if whole {
                    unroll_on_gpu!($row < ROWS => {
                        unroll_on_gpu!($group < GROUPS => {
                            let ($at, $part) = (place($row, $group), VectorPart::Whole);
                            $body
                        });
                    });
                } else {
                    unroll_on_gpu!($row < ROWS => {
                        unroll_on_gpu!($group < GROUPS => {
                            if exists($row) {
                                let $at = place($row, $group);
                                let $part = part($at, inside($group));
                                $body
                            }
                        });
                    });
                }
            };
        }
        // Loads C at a row that exists.
        macro_rules! load_c {
            ($values:ident, $row:ident) => {
                unroll_on_gpu!(group < GROUPS => {
                    let at = place($row as usize, group);
                    let part = if whole { VectorPart::Whole } else { part(at, inside(group)) };
                    $values[group] = F4::load_part_raw(c, at, part, 0.0);
                })
            };
        }
        // SAFETY: elements inside the output lie in `out`, and in `c`, `pre` and `bias` where they
        // are used: the contract has checked it.
        unsafe {
            if alpha != 1.0 {
                unroll_on_gpu!(row < ROWS => {
                    unroll_on_gpu!(group < GROUPS => { sums[row][group] = sums[row][group] * F4::splat(alpha); });
                });
            }
            if !bias.is_empty() {
                unroll_on_gpu!(group < GROUPS => {
                    let at = bias_start + columns[group] as usize;
                    let biases = F4::load_part(bias, at, part(at, inside(group)), 0.0);
                    unroll_on_gpu!(row < ROWS => { sums[row][group] = sums[row][group] + biases; });
                });
            }
            if beta != 0.0 {
                // All reads first: the compiler moves no read before a write.
                let mut old = [[F4::splat(0.0); GROUPS]; ROWS];
                for_each!(|row, group, at, part| {
                    old[row][group] = F4::load_part_raw(c, at, part, 0.0);
                });
                unroll_on_gpu!(row < ROWS => {
                    unroll_on_gpu!(group < GROUPS => {
                        sums[row][group] = sums[row][group].fma(F4::splat(beta), old[row][group]);
                    });
                });
            }
            if flags & STORE_PREACT != 0 {
                for_each!(|row, group, at, part| {
                    sums[row][group].store_part(pre, at, part);
                });
            }
            if flags & const { if differentiates::<S>() { ACTIVATIONS } else { ACTIVATIONS & !GELU_DERIVATIVE } } != 0 {
                // One row at a time; then the other rows move up. An activation is long code, so it
                // is instantiated once.
                for row in 0..launder_reg(ROWS as u32) {
                    let mut done = sums[0];
                    if flags & GELU != 0 {
                        unroll_on_gpu!(group < GROUPS => { done[group] = map4!(done[group], S::gelu); });
                    } else if const { differentiates::<S>() } && flags & GELU_DERIVATIVE != 0 {
                        let mut inputs = sums[0];
                        if exists(row as usize) {
                            load_c!(inputs, row);
                        }
                        unroll_on_gpu!(group < GROUPS => {
                            done[group] = map4!(inputs[group], S::gelu_derivative) * done[group];
                        });
                    } else {
                        let is_gated = flags & SWIGLU != 0;
                        let mut gates = sums[0];
                        if is_gated && exists(row as usize) {
                            load_c!(gates, row);
                        }
                        unroll_on_gpu!(group < GROUPS => {
                            let silu = map4!(gates[group], S::silu);
                            done[group] = if is_gated { silu * done[group] } else { silu };
                        });
                    }
                    unroll_on_gpu!(row < ROWS => {
                        sums[row] = if row + 1 < ROWS { sums[row + 1] } else { done };
                    });
                }
            }
            for_each!(|row, group, at, part| {
                sums[row][group].store_part(out, at, part);
            });
        }
    }
}

/// Selects how to move `count` elements, up to four, at `index`: in one access if they are an
/// aligned vector.
#[inline(always)]
pub(crate) fn part(index: usize, count: usize) -> VectorPart {
    if count >= F4::LEN && index.is_multiple_of(F4::LEN) { VectorPart::Whole } else { VectorPart::first(count) }
}
