//! A model's parameters: their names and positions, and the flat regions of weights and gradients.

mod scope;
mod spec;
mod weights;

pub use scope::Scope;
#[doc(hidden)]
pub use spec::NOTES;
pub use spec::{Parameter, ParameterEntry, ParameterSpec, ParameterSpecBuilder, StackedParameters};
pub use weights::{Gradients, Parameters};
