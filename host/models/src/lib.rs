//! Language models of Hugging Face transformers, as data.
//!
//! [`ModelConfig`] holds the settings of a `config.json`: attention, norms, positions, feed-forward
//! part, biases and tying. [`Transformer`] is the layers that it describes. [`Weights`] maps the
//! tensors of a folder to the parameters of these layers, and back.
//!
//! Invariant: a setting that this crate does not know is an error that names its key and its
//! value. Nothing falls back to a default silently.

#![forbid(unsafe_code)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod config;
mod names;
mod transformer;
mod weights;

pub use config::{Family, FeedForwardKind, LayerConfig, ModelConfig, NormKind, Residual};
pub use transformer::Transformer;
pub use weights::Weights;
