//! An empty library: `tests/ui.rs` builds the `programs`.
