//! Every kernel's contract is attacked. The attacks stand next to the tests of its op, see
//! `hostile.rs`; those of declared ops follow from their declaration, see `declared.rs`.

use crate::hostile::attacked;
use std::collections::BTreeSet;

#[test]
fn every_kernel_is_attacked() {
    let known: BTreeSet<&str> = kernels::entries().map(|entry| entry.name).collect();
    assert!(known.contains("fill_bf16"), "{known:?}");
    assert_eq!(known, attacked(), "each kernel needs an `attack!` or a declaration");
}

/// A contract that wraps panics in a debug build. It would not in a release build, which
/// `cargo xtask long` also runs.
#[cfg(debug_assertions)]
#[test]
fn overflow_is_checked() {
    assert!(std::panic::catch_unwind(|| std::hint::black_box(usize::MAX) + std::hint::black_box(1)).is_err());
}
