//! Language models of Hugging Face transformers, as data.
//!
//! [`ModelConfig`] holds the settings of a `config.json`: attention, norms, positions, feed-forward
//! part, biases and tying. [`Transformer`] holds the layers that it describes. [`Weights`] maps the
//! tensors of a folder to the parameters of these layers, and back. [`WeightFiles`] loads a folder
//! tensor by tensor. [`Lora`] adds adapters, in the files of PEFT.
//!
//! Invariant: a setting that could change the computation, and that this crate does not know, is an
//! error that names its key and its value. Nothing falls back to a default silently.

#![forbid(unsafe_code)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod config;
mod files;
mod lora;
mod names;
mod quantized;
mod transformer;
mod weights;

pub use config::{Family, FeedForwardKind, LayerConfig, MixtureConfig, ModelConfig, NormKind, QkNormKind, Residual};
pub use files::WeightFiles;
pub use lora::{Lora, Targets};
pub use transformer::Transformer;
pub use weights::Weights;
