//! Loops whose index is a compile-time constant in each iteration.
//!
//! Invariant: an array that such an index selects from stays in registers, for a body of any size.
//! The compiler's own unrolling gives up on large bodies.

/// Repeats a block for each index below a constant count. The count is at most 8; `at most 16` or
/// `at most 32` raises the limit.
///
/// The compiler also compiles the copies past the count before it drops them, and nested loops
/// multiply them. Doubling the limits makes a triple loop take eight times as long to compile.
/// Therefore a literal 2 or 4 makes only that many copies.
#[macro_export]
macro_rules! unroll {
    ($index:ident < 2 => $body:block) => { $crate::unroll!(@ $index, 2, $body, 0 1) };
    ($index:ident < 4 => $body:block) => { $crate::unroll!(@ $index, 4, $body, 0 1 2 3) };
    ($index:ident < $count:expr => $body:block) => {
        const { assert!($count <= 8, "more copies than unroll! makes: say `at most 16`") };
        $crate::unroll!(@ $index, $count, $body, 0 1 2 3 4 5 6 7)
    };
    ($index:ident < $count:expr, at most 16 => $body:block) => {
        const { assert!($count <= 16, "more copies than unroll! makes") };
        $crate::unroll!(@ $index, $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($index:ident < $count:expr, at most 32 => $body:block) => {
        const { assert!($count <= 32, "more copies than unroll! makes") };
        $crate::unroll!(@ $index, $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
            16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
    };
    (@ $index:ident, $count:expr, $body:block, $($at:literal)*) => {
        $(if $at < $count {
            let $index: usize = $at;
            $body
        })*
    };
}
