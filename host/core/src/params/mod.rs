//! A model's parameters: their names and positions, and the flat regions of weights and gradients.

mod contents;
mod frozen;
mod gradients;
mod masters;
mod matrix;
mod nf4;
mod region;
mod scope;
mod spec;
mod weights;

pub use contents::{RegionContents, WriteRegion};
pub(crate) use gradients::GradientParts;
pub use gradients::{GradientConsumer, Gradients};
pub(crate) use masters::MasterArguments;
pub use masters::{LentMasters, LentState};
pub use matrix::MatrixWeights;
pub use nf4::Nf4Matrix;
pub use scope::Scope;
pub use spec::NOTES;
pub use spec::{
    FrozenType, GradientType, MasterType, Parameter, ParameterEntry, ParameterSpec, ParameterSpecBuilder,
    StackedParameters, StateType,
};
pub use weights::Parameters;
