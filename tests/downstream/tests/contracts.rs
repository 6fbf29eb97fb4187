//! Contracts in a build without overflow checks, as a stranger's release build is: what they multiply and add must not wrap there either.
//!
//! `tests/kernels` attacks every kernel of the library with overflow checks on, where a sum that wraps panics. Without them it would give a
//! number, which the contract could take for the length of a buffer. So some kernels are attacked here too, one for each kind of
//! arithmetic in a contract: lengths alone, rows and chunks, strides of batches, splits. Invariant: this package is compiled without
//! overflow checks; see its `Cargo.toml`.

#![forbid(unsafe_code)]

#[path = "../../kernels/hostile.rs"]
mod hostile;

use hostile::{attack, attacked};

attack! {
    matmul::matmul by tile {
        a: f32s 70, b: f32s 84, bias: f32s 12, c: pointer 60, out: out 60, pre: out 60, m: number 5, n: number 6, k: number 7,
        lda: number 7, ldb: number 6, ldc: number 6, chunk: number 7, batches: number 2, stride_a: number 35,
        stride_b: number 42, stride_c: number 30, stride_bias: number 6, alpha: float 0.5, beta: float 1.0, flags: number 12,
    }
    matmul::sum_splits<S> {
        partials: f32s 180, splits: number 3, bias: f32s 12, c: stored_pointer 60, out: out_stored 60, pre: out_stored 60, m: number 5, n: number 6,
        ldc: number 6, batches: number 2, stride_c: number 30, stride_bias: number 6, alpha: float 0.5, beta: float 1.0, flags: number 12,
    }
    elementwise::add<S> { a: stored 9, b: stored 9, out: out_stored 9 }
    norm::rms_norm_backward<S> {
        x: stored 24, gain: f32s 8, inverse_rms: f32s 3, dy: stored 48, parts: number 2, cols: number 8,
        chunk: number kernels::row_chunk::chunk_of(3, 8), add: number 3, dx: out_stored 24, dgain: out 8,
    }
}

#[test]
fn kernels_of_each_kind_are_attacked() {
    let attacked = attacked();
    let tiles = kernels::matmul::matmul::VARIANTS.iter().map(|(name, _)| *name);
    let families = ["add_f32", "add_bf16", "rms_norm_backward_f32", "rms_norm_backward_bf16", "sum_splits_f32", "sum_splits_bf16"];
    let wanted = families.into_iter().chain(tiles).collect();
    assert_eq!(attacked, wanted);
}

#[test]
fn this_package_has_no_overflow_checks() {
    assert_eq!(
        std::hint::black_box(usize::MAX).wrapping_add(1),
        std::hint::black_box(usize::MAX) + std::hint::black_box(1)
    );
}
