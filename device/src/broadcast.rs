//! Places in a result of up to six extents, and the elements of operands there.
//!
//! An operand is as long as the result, or has no elements and is a number, or broadcasts: it has
//! strides, which are 0 along the extents that it lacks.
//!
//! ```text
//! result [2, 3, 4]      layout: extents  1  1  1  2  3  4
//! a      [2, 3, 4]              of a     anything: a is as long as the result
//! b         [3, 1]              of b     0  0  0  0  1  0
//! c                             of c     anything: c is a number, in the last word
//! ```
//! The host merges extents that no operand distinguishes, so that most layouts have one to three.
//!
//! Invariant: a place lies inside the result, and an element that a place reads lies inside the
//! operand. Four elements move as one access if they are next to each other, on a boundary of four.

use crate::block::divide_short;
use crate::stored::Stored;
use crate::unroll;
use crate::vector::{F4, VectorPart, load};

/// The extents of a result.
pub const RANK: usize = 6;
/// The words of an operand in a layout: its strides, and the bits of a number in the last.
pub const OPERAND: usize = RANK + 1;

/// Four elements of a result next to each other, from a multiple of four on.
#[derive(Clone, Copy)]
pub struct Place {
    /// The index of the first.
    pub index: usize,
    /// The part that exists. Unless it is whole, it ends at the result's end.
    pub part: VectorPart,
    /// The coordinates of the first.
    coordinates: [u32; RANK],
    extents: [u32; RANK],
}

impl Place {
    /// Returns the place of the elements from `index` on in a result of `length` elements, whose
    /// extents begin the layout.
    ///
    /// # Safety
    /// `index` is below `length`. No extent is 0. If coordinates are used, the elements are fewer
    /// than 2^32.
    // On a CPU these functions are calls, so that each is compiled once.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
    #[allow(unused_assignments, reason = "the last copy of the body divides for nothing")]
    pub unsafe fn new<const N: usize>(layout: &[usize; N], index: usize, length: usize) -> Self {
        let left = length - index;
        let part = if left >= F4::LEN { VectorPart::Whole } else { VectorPart::First(left) };
        let (mut coordinates, mut extents) = ([0; RANK], [1; RANK]);
        let mut rest = index as u32;
        unroll!(at < RANK => {
            let extent = RANK - 1 - at;
            extents[extent] = layout[extent] as u32;
            if extents[extent] != 1 {
                // SAFETY: no extent is 0.
                (rest, coordinates[extent]) = unsafe { divide_short(rest, extents[extent]) };
            }
        });
        Self { index, part, coordinates, extents }
    }

    /// Loads an operand's four elements, with zeros for those past the result's end. `operand` is
    /// its number among those of the layout.
    ///
    /// # Safety
    /// The layout is one that [`check`] has accepted for this operand.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
    pub unsafe fn load<S: Stored, const N: usize>(
        &self,
        layout: &[usize; N],
        operand: usize,
        x: &[S],
        length: usize,
    ) -> F4 {
        let first = RANK + operand * OPERAND;
        // SAFETY: the index lies inside a result as long as the operand.
        unsafe {
            if x.len() == length {
                return F4::load_part(x, self.index, self.part, 0.0);
            }
            if x.is_empty() {
                return F4::splat(f32::from_bits(layout[first + RANK] as u32));
            }
            let mut strides = [0; RANK];
            unroll!(at < RANK => { strides[at] = layout[first + at]; });
            self.strided(x, 0, strides)
        }
    }

    /// Loads the elements of an array with these strides, whose place 0 is at `start`. Strides and
    /// sums wrap.
    ///
    /// # Safety
    /// The elements lie inside `x`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
    pub unsafe fn strided<S: Stored>(&self, x: &[S], start: usize, strides: [usize; RANK]) -> F4 {
        let first = start.wrapping_add(self.offset(strides));
        // SAFETY: the elements lie inside `x`.
        unsafe {
            if self.is_in_row() {
                let along = strides[RANK - 1];
                if along == 0 {
                    return F4::splat(load(x, first).widen());
                }
                if along == 1 && is_aligned(start, strides) {
                    return F4::load(x, first);
                }
            }
            let [a, b, c, d] = self.offsets(strides);
            let element = |at: usize, offset: usize| {
                if at < self.part.count() { load(x, start.wrapping_add(offset)).widen() } else { 0.0 }
            };
            F4([element(0, a), element(1, b), element(2, c), element(3, d)])
        }
    }

    /// True if the four elements lie in one row.
    #[inline(always)]
    pub fn is_in_row(&self) -> bool {
        self.extents[RANK - 1].is_multiple_of(F4::LEN as u32)
    }

    /// Returns the offset of the first element.
    #[inline(always)]
    pub fn offset(&self, strides: [usize; RANK]) -> usize {
        offset(self.coordinates, strides)
    }

    /// Returns the offset of each of the four elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
    #[allow(unused_assignments, reason = "the last copy of the body advances for nothing")]
    pub fn offsets(&self, strides: [usize; RANK]) -> [usize; 4] {
        let mut coordinates = self.coordinates;
        let mut offsets = [0; 4];
        unroll!(at < 4 => {
            offsets[at] = offset(coordinates, strides);
            let mut carry = 1;
            unroll!(from < RANK => {
                let extent = RANK - 1 - from;
                let next = coordinates[extent] + carry;
                carry = (next == self.extents[extent]) as u32;
                coordinates[extent] = if carry == 1 { 0 } else { next };
            });
        });
        offsets
    }
}

/// True if every row begins on a boundary of four elements.
#[inline(always)]
pub fn is_aligned(start: usize, strides: [usize; RANK]) -> bool {
    let mut all = start;
    unroll!(at < RANK => { if at < RANK - 1 { all |= strides[at]; } });
    all.is_multiple_of(F4::LEN)
}

#[inline(always)]
fn offset(coordinates: [u32; RANK], strides: [usize; RANK]) -> usize {
    let mut offset = 0_usize;
    unroll!(at < RANK => { offset = offset.wrapping_add((coordinates[at] as usize).wrapping_mul(strides[at])); });
    offset
}

/// Applies a function to the elements of vectors. It is a macro, because a function passed as a
/// value may stay a call that is compiled without the CPU's fused multiply-add.
#[macro_export]
macro_rules! four {
    ($function:path, $($x:ident),+) => {
        $crate::vector::F4([
            $function($($x.0[0]),+),
            $function($($x.0[1]),+),
            $function($($x.0[2]),+),
            $function($($x.0[3]),+),
        ])
    };
}

/// Runs a block for the places of this thread's vectors, as
/// [`write_own_vectors`](crate::write_own_vectors) divides a result of `length`.
#[macro_export]
macro_rules! for_own_place {
    ($S:ty, $layout:expr, $length:expr, |$place:ident| $body:block) => {{
        let (first, _) = $crate::block::own_places::<$S>(false);
        let mut at = 0;
        while at < $crate::block::own_vectors::<$S>() {
            let index = first + at * $crate::vector::F4::LEN;
            if index < $length {
                let $place = $crate::broadcast::Place::new($layout, index, $length);
                $body
            }
            at += 1;
        }
    }};
}

/// Declares a family that applies a function to the elements of operands that broadcast: its
/// documentation, its name, the kernel of each stored type, the words of its layout, the function,
/// and the operands. The arguments are these, `layout`, `length` and `out`.
#[macro_export]
macro_rules! broadcast_family {
    ([$($doc:literal)*] $name:ident { $f32:ident, $bf16:ident } $words:literal, $function:path, $($x:ident)+) => {
        $crate::family! {
            $(#[doc = $doc])*
            ///
            /// The operands broadcast to the `length` elements of `out`. Overwrites `out`.
            $name<S: Stored> { $f32: f32; $bf16: $crate::bf16; }
            unsafe fn($($x: &[S],)+ layout: [usize; $words], length: usize, out: *mut S) {
                // SAFETY: the contract has checked the layout. The vector lies inside `out`, and
                // inside operands that are as long.
                #[allow(clippy::macro_metavars_in_unsafe, reason = "a path calls no unsafe function here")]
                unsafe {
                    if true $(&& $x.len() == length)+ {
                        $crate::write_own_vectors!(
                            S, length, out, [$($x),+] |_index| $crate::four!($function, $($x),+)
                        );
                    } else {
                        $crate::for_own_place!(S, &layout, length, |place| {
                            let mut operand = 0;
                            $(
                                let $x = place.load(&layout, operand, $x, length);
                                operand += 1;
                            )+
                            let _ = operand;
                            $crate::four!($function, $($x),+).store_part(out, place.index, place.part);
                        });
                    }
                };
            }
            // SAFETY: a thread accesses only its own vectors inside `out`, and the operands'
            // elements at their places, which lie inside them.
            contract unsafe { block: $crate::block::BLOCK, shared: 0 } |k| {
                Violation::unless_length("out", k.length, k.out.len())?;
                if k.length > 0 {
                    $crate::broadcast::check(&k.layout, k.length, &[$((stringify!($x), k.$x.len())),+])?;
                }
                $crate::block::own_grid::<S>(k.length)
            }
        }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
pub use host::{check, check_apart, check_extents, check_inside};

#[cfg(not(target_arch = "nvptx64"))]
mod host {
    use super::{OPERAND, RANK};
    use cuda_std::launch::{Size, Violation};

    /// Returns Ok if the layout's extents have `length` elements, and the elements of each operand
    /// that broadcasts lie inside it.
    pub fn check<const N: usize>(
        layout: &[usize; N],
        length: usize,
        operands: &[(&'static str, usize)],
    ) -> Result<(), Violation> {
        // Then no place is computed.
        if operands.iter().all(|&(_, len)| len == length) {
            return Ok(());
        }
        check_extents(&layout[..RANK], length)?;
        let words = layout[RANK..].chunks_exact(OPERAND);
        operands
            .iter()
            .zip(words)
            .filter(|((_, len), _)| *len != length && *len != 0)
            .try_for_each(|(&(name, len), words)| check_inside(name, &layout[..RANK], 0, &words[..RANK], len))
    }

    /// Returns Ok if the extents have `length` elements, fewer than 2^32.
    pub fn check_extents(extents: &[usize], length: usize) -> Result<(), Violation> {
        let elements = extents.iter().fold(Size::of(1), |all, &extent| all.times(extent));
        Violation::unless(elements.is(length), "layout", &std::format!("extents of {length} elements"), elements)?;
        Violation::unless(u32::try_from(length).is_ok(), "layout", "fewer than 2^32 elements", length)
    }

    /// Returns Ok if no two places share an element: each stride is positive, and exceeds the reach
    /// of those after it.
    pub fn check_apart(extents: &[usize], strides: &[usize]) -> Result<(), Violation> {
        let mut reach = Size::of(0);
        for (&extent, &stride) in extents.iter().zip(strides).rev().filter(|(extent, _)| **extent > 1) {
            let is_beyond = reach.plus(1).at_most(stride) && isize::try_from(stride).is_ok();
            Violation::unless(is_beyond, "layout", "strides of `out` that keep places apart", stride)?;
            reach = reach.plus(Size::of(extent).less(1).times(stride));
        }
        Ok(())
    }

    /// Returns Ok if the elements at `start` plus each extent's indices times its stride, which is
    /// signed, lie inside an array of `len`. No extent is 0.
    pub fn check_inside(
        name: &'static str,
        extents: &[usize],
        start: usize,
        strides: &[usize],
        len: usize,
    ) -> Result<(), Violation> {
        let ends = extents.iter().zip(strides).try_fold(
            (start as i128, start as i128),
            |(least, most), (&extent, &stride)| {
                let reach = (extent as i128).checked_sub(1)?.checked_mul(stride as isize as i128)?;
                Some((least.checked_add(reach.min(0))?, most.checked_add(reach.max(0))?))
            },
        );
        match ends {
            Some((least, most)) if least >= 0 && most < len as i128 => Ok(()),
            _ => Err(Violation::new(
                name,
                std::format!("elements from {start} on, by {strides:?}, of extents {extents:?}"),
                std::format!("{len} elements"),
            )),
        }
    }
}
