//! Copies of matrices in host memory, transposed or as they are.
//!
//! Files have the weights of an output next to each other, and parameters those of an input. All
//! processors copy, because one processor is slower than the memory.

#![forbid(unsafe_code)]

use crate::processors::for_each_part;
use crate::tensor::Stored;
use std::convert::Infallible;

/// The rows and columns of a square that is copied through the cache.
const SQUARE: usize = 64;

/// Adjacent columns of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// The first column.
    pub first: usize,
    /// All columns of the matrix.
    pub of: usize,
}

/// Overwrites `count` columns of `to` with the rows of `from`, whose columns are the rows of `to`.
///
/// # Panics
/// Panics if `from` has fewer rows, or fewer columns after its first one than `to` has rows.
pub fn transpose<T: Stored>((from, source): (&[T], Columns), (to, target): (&mut [T], Columns), count: usize) {
    let Ok(()) = for_each_part(to, SQUARE * target.of, |start, rows| {
        let (first, height) = (source.first + start / target.of, rows.len() / target.of);
        let mut square = [[T::narrow(0.0); SQUARE]; SQUARE];
        for column in (0..count).step_by(SQUARE) {
            let width = SQUARE.min(count - column);
            for (number, line) in square[..width].iter_mut().enumerate() {
                line[..height].copy_from_slice(&from[(column + number) * source.of + first..][..height]);
            }
            for (number, row) in rows.chunks_exact_mut(target.of).enumerate() {
                let row = &mut row[target.first + column..][..width];
                row.iter_mut().zip(&square).for_each(|(place, line)| *place = line[number]);
            }
        }
        Ok::<_, Infallible>(())
    });
}

/// Overwrites `count` columns of `to` with those of `from`.
///
/// # Panics
/// Panics if `from` has fewer rows than `to`.
pub fn copy<T: Stored>((from, source): (&[T], Columns), (to, target): (&mut [T], Columns), count: usize) {
    let Ok(()) = for_each_part(to, SQUARE * target.of, |start, rows| {
        let theirs = from[start / target.of * source.of..].chunks_exact(source.of);
        for (row, theirs) in rows.chunks_exact_mut(target.of).zip(theirs) {
            row[target.first..][..count].copy_from_slice(&theirs[source.first..][..count]);
        }
        Ok::<_, Infallible>(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some columns of matrices of several squares, and of less than one.
    #[test]
    fn columns_are_copied_both_ways() {
        for [rows, columns, first, count] in [[130, 200, 7, 150], [64, 64, 0, 64], [3, 5, 1, 2], [1, 300, 100, 129]] {
            let from: Vec<f32> = (0..rows * columns).map(|at| at as f32).collect();
            let part = Columns { first, of: columns };
            let mut turned = vec![-1.0; count * (rows + 2)];
            transpose((&from, part), (&mut turned, Columns { first: 1, of: rows + 2 }), rows);
            let at = |row: usize, column: usize| turned[column * (rows + 2) + 1 + row];
            assert!(
                (0..rows).all(|row| (0..count).all(|column| at(row, column) == from[row * columns + first + column]))
            );
            assert!((0..count).all(|column| turned[column * (rows + 2)] == -1.0));

            let mut same = vec![-1.0; rows * (count + 3)];
            copy((&from, part), (&mut same, Columns { first: 2, of: count + 3 }), count);
            for row in 0..rows {
                let got = &same[row * (count + 3)..][..count + 3];
                assert_eq!(got[2..count + 2], from[row * columns + first..][..count]);
                assert_eq!([got[0], got[1], got[count + 2]], [-1.0; 3]);
            }
        }
    }
}
