//! A model's parameters: their names and positions, and the flat regions of weights and gradients.

mod frozen;
mod gradients;
mod matrix;
mod nf4;
mod region;
mod scope;
mod spec;
mod weights;

pub use gradients::Gradients;
pub use matrix::MatrixWeights;
pub use nf4::Nf4Matrix;
pub use scope::Scope;
pub use spec::NOTES;
pub use spec::{FrozenType, Parameter, ParameterEntry, ParameterSpec, ParameterSpecBuilder, StackedParameters};
pub use weights::Parameters;
