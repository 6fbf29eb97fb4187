//! The documented order of every reduction, written plainly: `device/src/warp.rs`, `block.rs` and
//! `kernels/reduce.rs`.
//!
//! Invariant: an order follows only from the length. The kernels must give these bits.

/// Sums one row, shared by the fewest lanes, a power of two up to 32, that leave at most four
/// vectors of four to each. Column c belongs to lane c / 4 mod lanes and to place c mod 4 of its
/// vector.
pub(crate) fn row(cols: usize, term: impl Fn(f32, usize) -> f32) -> f32 {
    let lanes = lanes(cols);
    let mut sums = vec![[0.0; 4]; lanes];
    for column in 0..cols {
        let sum = &mut sums[column / 4 % lanes][column % 4];
        *sum = term(*sum, column);
    }
    across(sums.into_iter().map(four).collect())
}

/// Returns the sequential additions of a term in [`row`]; those of zeros do not count.
pub(crate) fn row_depth(cols: usize) -> usize {
    let lanes = lanes(cols);
    cols.min(cols.div_ceil(4 * lanes) + 2 + lanes.ilog2() as usize)
}

pub(crate) fn lanes(cols: usize) -> usize {
    cols.div_ceil(16).next_power_of_two().min(32)
}

/// Sums all elements in chunks of 4096, and then the sums of the chunks, until one is left.
pub(crate) fn all(values: &[f32], term: &dyn Fn(f32, f32) -> f32) -> f32 {
    let sums: Vec<f32> = values.chunks(4096).map(|chunk| self::chunk(chunk, term)).collect();
    match *sums {
        [] => 0.0,
        [sum] => sum,
        _ => all(&sums, &|sum, value| sum + value),
    }
}

/// Returns the sequential additions of a term in [`all`]: up to 4 and then 2, 5 and 7 in each
/// chunk; those of zeros do not count.
pub(crate) fn all_depth(length: usize) -> usize {
    let own = length.min(length.div_ceil(1024).min(4) + 14);
    if length <= 4096 { own } else { own + all_depth(length.div_ceil(4096)) }
}

/// Sums one chunk: 256 threads, each with four vectors of four that are 1024 elements apart; then
/// the lanes of each warp, then the eight warps ascending.
fn chunk(values: &[f32], term: &dyn Fn(f32, f32) -> f32) -> f32 {
    let mut sums = vec![[0.0; 4]; 256];
    for (index, &value) in values.iter().enumerate() {
        let sum = &mut sums[index / 4 % 256][index % 4];
        *sum = term(*sum, value);
    }
    let threads: Vec<f32> = sums.into_iter().map(four).collect();
    block(&threads)
}

/// Sums each column over the rows: all rows up to 1024, otherwise in chunks of 128, and the sums of
/// the chunks again until one is left. `term(sum, index)` adds element `index` to a sum.
pub(crate) fn rows(rows: usize, cols: usize, term: &dyn Fn(f32, usize) -> f32) -> Vec<f32> {
    chunks(rows, cols, [if rows <= 1024 { 1024 } else { 128 }, 32], term)
}

/// Sums each column over the rows in chunks. Within a chunk every `groups`th row is summed first,
/// ascending, and then these sums. The sums of the chunks are added like [`rows`].
pub(crate) fn chunks(
    rows: usize,
    cols: usize,
    [chunk, groups]: [usize; 2],
    term: &dyn Fn(f32, usize) -> f32,
) -> Vec<f32> {
    let chunks = rows.div_ceil(chunk);
    let mut sums = vec![0.0; chunks * cols];
    for (at, sum) in sums.iter_mut().enumerate() {
        let first = at / cols * chunk;
        let end = rows.min(first + chunk);
        let group =
            |group| (first + group..end).step_by(groups).fold(0.0, |sum, row| term(sum, row * cols + at % cols));
        *sum = (0..groups).map(group).reduce(|sum, group| sum + group).expect("a group");
    }
    match chunks {
        0 => vec![0.0; cols],
        1 => sums,
        _ => self::rows(chunks, cols, &|sum, index| sum + sums[index]),
    }
}

/// Returns arguments for [`chunks`] as the backward passes of norms use them: the rows of a chunk,
/// and the number of partial sums. There is one for each row that 128 threads can share.
pub(crate) fn row_chunk([rows, cols]: [usize; 2]) -> [usize; 2] {
    let groups = 128 / lanes(cols);
    let each = (rows / (512 * groups)).clamp(2, 16);
    [(groups * each).min(256), groups]
}

/// Returns the sequential additions of a term in [`rows`].
pub(crate) fn rows_depth(rows: usize) -> usize {
    chunks_depth(rows, [if rows <= 1024 { 1024 } else { 128 }, 32])
}

/// Returns the sequential additions of a term in [`chunks`]; those of zeros do not count.
pub(crate) fn chunks_depth(rows: usize, [chunk, groups]: [usize; 2]) -> usize {
    let own = rows.min(chunk);
    let depth = own.div_ceil(groups) + own.min(groups).saturating_sub(1);
    if rows <= chunk { depth } else { depth + rows_depth(rows.div_ceil(chunk)) }
}

/// Sums one number from each thread of a block of 256.
pub(crate) fn block(threads: &[f32]) -> f32 {
    threads.chunks(32).map(|warp| across(warp.to_vec())).reduce(|sum, warp| sum + warp).expect("the block has warps")
}

fn four([a, b, c, d]: [f32; 4]) -> f32 {
    (a + b) + (c + d)
}

/// Sums lanes in pairs at distances lanes / 2, ..., 2, 1.
fn across(mut lanes: Vec<f32>) -> f32 {
    while lanes.len() > 1 {
        let upper = lanes.split_off(lanes.len() / 2);
        lanes.iter_mut().zip(upper).for_each(|(lane, other)| *lane += other);
    }
    lanes[0]
}
