//! The recorded runs in `benches/runs/` that are compared with predictions.
//!
//! Each line uses the newest run whose kernels are the current ones. To use a newer run, replace
//! its name here; it appears nowhere else.

use crate::train::cli::Precision::{self, Bf16, F32, Tf32};
use crate::train::cli::Size;

/// A file written by a bench.
pub(crate) type File = &'static str;

/// The step bench, by `--precision`.
pub(crate) const STEPS: [(Precision, File); 2] =
    [(F32, "2026-11-25-h200-step.json"), (Tf32, "2026-11-21-h200-step-tf32.json")];

/// Updates of GPT-2 by `stepscope train`, on samples of 1,024 tokens.
#[derive(Clone, Copy)]
pub(crate) struct Gpt {
    pub(crate) size: Size,
    pub(crate) precision: Precision,
    pub(crate) batch: usize,
    pub(crate) recompute: bool,
}

/// A file whose `runs` are keyed by arguments and have `seconds_of_updates`.
pub(crate) const GPT2: File = "2026-11-25-h200-gpt2-mma-sync.json";

pub(crate) const GPT: [Gpt; 6] = [
    gpt(Size::Small, F32, 16, false),
    gpt(Size::Small, Tf32, 16, false),
    gpt(Size::Small, Bf16, 16, false),
    gpt(Size::Small, Bf16, 16, true),
    gpt(Size::Small, Bf16, 64, true),
    gpt(Size::Medium, Bf16, 8, false),
];

const fn gpt(size: Size, precision: Precision, batch: usize, recompute: bool) -> Gpt {
    Gpt { size, precision, batch, recompute }
}

/// A filter of a run's lines by kernel name.
type IsTaken = fn(&str) -> bool;

/// The bench of kernels.
pub(crate) const KERNELS: [(File, IsTaken); 2] = [
    ("2026-11-21-h200-kernels.json", |_| true),
    ("2026-11-23-h200-kernels-both-types.json", |name| {
        let new = ["silu", "swiglu", "layer_norm", "dropout", "embedding"];
        // LayerNorm's backward pass was rewritten later; its new measurement is below.
        !name.starts_with("layer_norm_backward")
            && (name.ends_with("_bf16") || new.iter().any(|new| name.starts_with(new)))
    }),
];

/// LayerNorm's backward pass at 2^28 elements: medians by name.
pub(crate) const LAYER_NORM_BACKWARD: File = "2026-11-23-h200-layer-norm.json";

/// The bench of products: of f32 tensors in a precision, or of BF16 tensors (`--stored bf16`).
pub(crate) const PRODUCTS: [(Factors, File); 3] = [
    (Factors::F32(F32), "2026-11-25-h200-matmul.json"),
    (Factors::F32(Tf32), "2026-11-24-h200-matmul-tf32-mma-sync.json"),
    (Factors::Bf16, "2026-11-28-h200-matmul-stored-bf16-mma-sync.json"),
];

/// The element type of a product's operands.
#[derive(Clone, Copy)]
pub(crate) enum Factors {
    F32(Precision),
    Bf16,
}

/// The bench of attention, `--stored bf16`.
pub(crate) const ATTENTION: File = "2026-11-28-h200-attention-stored-bf16-mma-sync.json";
