//! Loops whose index is a constant in each turn.
//!
//! Invariant: an array that such an index selects from stays in registers, however large the body is. The compiler's own unrolling gives
//! up on large bodies.

/// Repeats a block for each index below a constant count: at most 8, or with `at most 16` or `at most 32` so many.
///
/// The compiler also compiles the copies beyond the count before it drops them, and one loop in another multiplies them. Limits twice as
/// large make a triple loop take eight times as long to compile. So a literal 2 or 4 makes no more copies than that.
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
    (@ rolled $index:ident < $count:expr $(, at most $most:literal)? => $body:block) => {{
        let mut next = 0_usize;
        while next < $count {
            let $index = next;
            $body
            next += 1;
        }
    }};
}

/// `unroll!` on the GPU. A plain loop on a CPU, where copies gain nothing and compile slowly.
#[macro_export]
macro_rules! unroll_on_gpu {
    ($($turns:tt)*) => {{
        #[cfg(target_arch = "nvptx64")]
        $crate::unroll!($($turns)*);
        #[cfg(not(target_arch = "nvptx64"))]
        $crate::unroll!(@ rolled $($turns)*);
    }};
}
