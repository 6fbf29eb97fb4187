//! A model's parameters: their names and places, and the flat regions of weights and gradients.

mod layout;
mod weights;

pub use layout::{Layout, LayoutBuilder, LayoutEntry, Parameter, Stack};
pub use weights::{Gradients, Parameters};
