//! Loops whose index is a constant in each turn.
//!
//! Invariant: what is indexed by such a constant stays in registers, however large the body is; the compiler's own unrolling
//! gives up on large ones.

/// Repeats a block for each of the indices; on the GPU with the index constant.
#[cfg(target_arch = "nvptx64")]
#[macro_export]
macro_rules! unroll {
    ($index:ident in $($at:literal)* => $body:block) => {
        $({
            let $index: usize = $at;
            $body
        })*
    };
}

/// Repeats a block for each of the indices.
#[cfg(not(target_arch = "nvptx64"))]
#[macro_export]
macro_rules! unroll {
    ($index:ident in $($at:literal)* => $body:block) => {
        for $index in [$($at as usize),*] $body
    };
}
