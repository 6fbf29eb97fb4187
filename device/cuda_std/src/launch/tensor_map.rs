//! Tensor maps as arguments: the host's description of a kernel's
//! [`TensorMap`](crate::tensor_map::TensorMap).

use super::{Argument, Size, Slice, Violation, Words, sealed};

/// The words of a tensor map: its memory's address and length, three extents, two strides, and the
/// rows of a box.
pub(super) const WORDS: usize = 8;

/// The unit of strides, in bytes, and their limit.
const STRIDE_UNIT: usize = 16;
const MOST_STRIDE: usize = 1 << 40;

/// Matrices in the memory of a slice, from which a kernel copies boxes.
///
/// It may have any values. The kernel's contract calls [`check`](Self::check).
pub struct TensorMap<'a, T> {
    /// The memory of the matrices. It begins with the first element of the first matrix.
    pub memory: Slice<'a, T>,
    /// The elements of a row, the rows of a matrix, and the matrices.
    pub extents: [u32; 3],
    /// The elements from a row to the next, and from a matrix to the next.
    pub strides: [usize; 2],
    /// The rows of a box, as the kernel copies it.
    pub box_rows: u32,
}

impl<T> TensorMap<'_, T> {
    /// Returns Ok if every element of the matrices lies inside the memory, and the copy engine
    /// accepts the strides.
    pub fn check(&self, argument: &'static str) -> Result<(), Violation> {
        let Self { memory, extents: [elements, rows, matrices], strides, .. } = self;
        let bytes = |stride: usize| Size::of(stride).times(size_of::<T>());
        let is_stride = |stride: usize| {
            bytes(stride).at_most(MOST_STRIDE - 1)
                && bytes(stride).number().is_some_and(|bytes| bytes % STRIDE_UNIT == 0)
        };
        // The stride of what exists once is never used.
        let are_strides = (*rows < 2 || is_stride(strides[0])) && (*matrices < 2 || is_stride(strides[1]));
        let expected = "rows and matrices that begin on 16 bytes, less than 2^40 bytes apart";
        Violation::unless(are_strides, argument, expected, format_args!("{strides:?} elements apart"))?;
        if [*elements, *rows, *matrices].contains(&0) {
            return Ok(());
        }
        let [to_row, to_matrix] =
            [(rows, strides[0]), (matrices, strides[1])].map(|(count, stride)| Size::of(*count).less(1).times(stride));
        let last = to_matrix.plus(to_row).plus(*elements);
        let expected = format!(
            "{matrices} matrices of {rows} x {elements}, rows {} and matrices {} apart",
            strides[0], strides[1]
        );
        Violation::unless(last.at_most(memory.len()), argument, &expected, format_args!("{} elements", memory.len()))
    }
}

impl<T> Clone for TensorMap<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for TensorMap<'_, T> {}

impl<T> core::fmt::Debug for TensorMap<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} as {:?} by {:?}", self.memory, self.extents, self.strides)
    }
}

impl<T> sealed::Sealed for TensorMap<'_, T> {}

impl<T> Argument for TensorMap<'_, T> {
    fn pack(&self, words: &mut Words) {
        words.maps.push(PackedMap {
            word: words.words.len(),
            address: self.memory.address(),
            element_bytes: size_of::<T>(),
            extents: self.extents,
            strides: self.strides,
            box_rows: self.box_rows,
        });
        self.memory.pack(words);
        self.extents.iter().for_each(|&extent| words.push(u64::from(extent)));
        self.strides.iter().for_each(|&stride| words.push(stride as u64));
        words.push(u64::from(self.box_rows));
    }
}

/// A tensor map among the words of a launch. A driver encodes it, and passes that in place of its
/// words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedMap {
    /// The index of its first word.
    pub word: usize,
    /// The first element's address on the device.
    pub address: u64,
    /// The bytes of an element.
    pub element_bytes: usize,
    /// The elements of a row, the rows of a matrix, and the matrices.
    pub extents: [u32; 3],
    /// The elements from a row to the next, and from a matrix to the next.
    pub strides: [usize; 2],
    /// The rows of a box.
    pub box_rows: u32,
}

impl PackedMap {
    /// The number of its words.
    pub const WORDS: usize = WORDS;
}
