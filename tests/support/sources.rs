//! The kernels' sources, as they were when the test was built: it may run where they are not.
//!
//! Invariant: every file of `device/src/kernels` is here.

/// Each file's path below `device/src/kernels`, without its ending, and its text.
pub(crate) const SOURCES: [(&str, &str); 29] = [
    ("activation", include_str!("../../device/src/kernels/activation.rs")),
    ("adamw", include_str!("../../device/src/kernels/adamw.rs")),
    ("attention", include_str!("../../device/src/kernels/attention.rs")),
    ("checksum", include_str!("../../device/src/kernels/checksum.rs")),
    ("clip", include_str!("../../device/src/kernels/clip.rs")),
    ("elementwise", include_str!("../../device/src/kernels/elementwise.rs")),
    ("fill", include_str!("../../device/src/kernels/fill.rs")),
    ("guard", include_str!("../../device/src/kernels/guard.rs")),
    ("loss", include_str!("../../device/src/kernels/loss.rs")),
    ("matmul", include_str!("../../device/src/kernels/matmul.rs")),
    ("matmul/block", include_str!("../../device/src/kernels/matmul/block.rs")),
    ("matmul/checks", include_str!("../../device/src/kernels/matmul/checks.rs")),
    ("matmul/cpu", include_str!("../../device/src/kernels/matmul/cpu.rs")),
    ("matmul/epilogue", include_str!("../../device/src/kernels/matmul/epilogue.rs")),
    ("matmul/operand", include_str!("../../device/src/kernels/matmul/operand.rs")),
    ("matmul/split", include_str!("../../device/src/kernels/matmul/split.rs")),
    ("matmul/tile", include_str!("../../device/src/kernels/matmul/tile.rs")),
    ("matmul_tensor", include_str!("../../device/src/kernels/matmul_tensor.rs")),
    ("matmul_tensor/block", include_str!("../../device/src/kernels/matmul_tensor/block.rs")),
    ("matmul_tensor/operand", include_str!("../../device/src/kernels/matmul_tensor/operand.rs")),
    ("matmul_tensor/tile", include_str!("../../device/src/kernels/matmul_tensor/tile.rs")),
    ("norm", include_str!("../../device/src/kernels/norm.rs")),
    ("precision", include_str!("../../device/src/kernels/precision.rs")),
    ("reduce", include_str!("../../device/src/kernels/reduce.rs")),
    ("scalars", include_str!("../../device/src/kernels/scalars.rs")),
    ("sgd", include_str!("../../device/src/kernels/sgd.rs")),
    ("softmax", include_str!("../../device/src/kernels/softmax.rs")),
    ("tokens", include_str!("../../device/src/kernels/tokens.rs")),
    ("transpose", include_str!("../../device/src/kernels/transpose.rs")),
];
