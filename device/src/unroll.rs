//! Loops whose index is a constant in each turn.
//!
//! Invariant: what is indexed by such a constant stays in registers, however large the body is; the compiler's own unrolling
//! gives up on large ones.

/// Repeats a block for each index below a constant count, at most 16.
#[macro_export]
macro_rules! unroll {
    ($index:ident < $count:expr => $body:block) => {
        $crate::unroll!(@ $index, $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $index:ident, $count:expr, $body:block, $($at:literal)*) => {
        $(if $at < $count {
            let $index: usize = $at;
            $body
        })*
    };
}

/// [`unroll!`] on the GPU; a loop on a CPU, which gains nothing and compiles copies for long.
#[macro_export]
macro_rules! unroll_on_gpu {
    ($index:ident < $count:expr => $body:block) => {{
        #[cfg(target_arch = "nvptx64")]
        $crate::unroll!($index < $count => $body);
        #[cfg(not(target_arch = "nvptx64"))]
        {
            let mut next = 0_usize;
            while next < $count {
                let $index = next;
                $body
                next += 1;
            }
        }
    }};
}
