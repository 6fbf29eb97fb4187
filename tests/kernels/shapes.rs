//! The shapes on which every op is tested: empty, one element, odd, around each boundary of the
//! kernels, and large.

/// Lengths of flat arrays: around a vector of 4, a block of 1024 and a chunk of 4096.
pub(crate) const LENGTHS: [usize; 14] = [0, 1, 2, 3, 4, 5, 31, 255, 1023, 1024, 1025, 4097, 20_000, (1 << 20) + 3];

/// Rows and columns: around every number of lanes to a row and of rows to a chunk, with whole
/// vectors and without; the model's rows of 64, 193 and 256; long rows; many rows.
pub(crate) const ROWS: [[usize; 2]; 23] = [
    [0, 5],
    [1, 1],
    [1, 2],
    [3, 3],
    [5, 4],
    [7, 5],
    [9, 16],
    [9, 17],
    [64, 64],
    [65, 7],
    [63, 12],
    [12, 193],
    [33, 255],
    [130, 256],
    [66, 257],
    [4, 512],
    [5, 513],
    [3, 1000],
    [2, 4096],
    [1, 20_001],
    [5000, 3],
    [4100, 9],
    [1027, 256],
];
