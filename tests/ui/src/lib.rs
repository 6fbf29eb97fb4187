//! Nothing: `tests/ui.rs` builds the `programs`.
