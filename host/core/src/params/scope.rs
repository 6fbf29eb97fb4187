//! Nested names of parameters.

use crate::initializer::Initializer;
use crate::params::{Parameter, ParameterSpecBuilder, StackedParameters};
use crate::tensor::Shape;
use std::fmt::Display;

/// A scope in the tree of names, to which parameters are added: `layer0.ffn1.weight` is `weight` in
/// `ffn1` in `layer0`.
#[derive(Debug)]
pub struct Scope<'l> {
    spec: &'l mut ParameterSpecBuilder,
    /// The prefix of each name, including its last dot.
    prefix: String,
}

impl ParameterSpecBuilder {
    /// The scope `name`. Parameters without a scope are added to the builder itself.
    pub fn at(&mut self, name: impl Display) -> Scope<'_> {
        Scope { prefix: format!("{name}."), spec: self }
    }
}

impl Scope<'_> {
    /// The scope `name` in this one.
    pub fn at(&mut self, name: impl Display) -> Scope<'_> {
        Scope { prefix: format!("{}{name}.", self.prefix), spec: self.spec }
    }

    /// Adds a parameter with this name and shape.
    pub fn add(&mut self, name: impl Display, shape: impl Into<Shape>, initializer: Initializer) -> Parameter {
        self.spec.add(format!("{}{name}", self.prefix), shape, initializer)
    }

    /// Adds a table, whose rows are looked up by number; see [`ParameterSpecBuilder::add_table`].
    pub fn add_table(&mut self, name: impl Display, shape: impl Into<Shape>, initializer: Initializer) -> Parameter {
        self.spec.add_table(format!("{}{name}", self.prefix), shape, initializer)
    }

    /// Adds `count` parameters of one shape. `name` maps a number to a name in this scope.
    pub fn add_stack(
        &mut self,
        count: usize,
        name: impl Fn(usize) -> String,
        shape: impl Into<Shape>,
        initializer: Initializer,
    ) -> StackedParameters {
        let Self { spec, prefix } = self;
        spec.add_stack(count, |number| format!("{prefix}{}", name(number)), shape, initializer)
    }
}
