//! Layers. A layer consists of parameter handles and a forward function.
//!
//! A layer's constructor names its parameters within a [`Scope`] and gives them initializers. Its
//! fields are the handles, so a model may also assemble a layer itself.
//!
//! Invariant: a layer holds no memory and no state. Everything that `forward` does is on the tape.
//!
//! ```
//! use stepscope::nn::{Mlp, RmsNorm};
//! use stepscope::parameters::ParameterEntry;
//! use stepscope::prelude::*;
//!
//! # fn main() -> Result<()> {
//! let mut spec = ParameterSpec::builder();
//! let norm = RmsNorm::new(spec.at("norm"), 64);
//! let mlp = Mlp::new(spec.at("mlp"), 64, 128, 10);
//! let spec = spec.build()?;
//! let found: Vec<&str> = spec.entries().iter().map(ParameterEntry::name).collect();
//! assert_eq!(found, ["norm.gain", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias"]);
//!
//! let device = Device::open(DeviceKind::Emulated)?;
//! let weights = Parameters::new(&device, &spec, 7)?;
//! let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
//! let logits = arena.step(|step| {
//!     let tape = Tape::new(step, &weights);
//!     let x = tape.input(step.upload(&[0.5; 2 * 64], [2, 64])?);
//!     step.read(mlp.forward(&tape, &norm.forward(&tape, &x)?)?.value())
//! })?;
//! assert_eq!(logits.len(), 2 * 10);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod block;
mod cache;
mod convolution;
mod cross_attention;
mod dropout;
mod embedding;
mod group_norm;
mod layer_norm;
mod linear;
mod mixture;
mod mlp;
mod multi_head_attention;
mod norm;
mod recurrent;
mod sequential;
mod swiglu;

pub use block::{Block, FeedForward, Norm};
pub use cache::{KeyValueCache, NextTokens};
pub use convolution::{Conv1d, Conv2d, ConvTranspose2d};
pub use cross_attention::CrossAttention;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use group_norm::GroupNorm;
pub use layer_norm::LayerNorm;
pub use linear::{Adapter, AdapterPart, Linear};
pub use mixture::{ExpertAdapter, ExpertLinear, Mixture};
pub use mlp::Mlp;
pub use multi_head_attention::{MultiHeadAttention, QueryKeyNorm};
pub use norm::RmsNorm;
pub use recurrent::{Gru, Lstm};
pub use sequential::{Layer, Sequential};
pub use stepscope_core::internals::Scope;
pub use swiglu::SwiGlu;
