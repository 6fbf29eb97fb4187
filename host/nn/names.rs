//! Nested names of parameters.

use crate::initializer::Initializer;
use crate::params::{LayoutBuilder, Parameter, Stack};
use crate::tensor::Shape;
use std::fmt::Display;

/// A place in the tree of names, to which parameters are added: `layer0.ffn1.weight` is `weight` in `ffn1` in `layer0`.
#[derive(Debug)]
pub struct Names<'l> {
    layout: &'l mut LayoutBuilder,
    /// What stands before each name, its last dot included.
    prefix: String,
}

impl LayoutBuilder {
    /// The root of the names.
    pub fn names(&mut self) -> Names<'_> {
        Names { layout: self, prefix: String::new() }
    }
}

impl Names<'_> {
    /// The place `name` below this one.
    pub fn at(&mut self, name: impl Display) -> Names<'_> {
        Names { prefix: format!("{}{name}.", self.prefix), layout: self.layout }
    }

    /// A parameter of a name here and a shape.
    pub fn add(&mut self, name: impl Display, shape: impl Into<Shape>, initializer: Initializer) -> Parameter {
        self.layout.add(format!("{}{name}", self.prefix), shape, initializer)
    }

    /// [`Names::add`] of a table, whose rows are looked up by number: see [`LayoutBuilder::add_table`].
    pub fn add_table(&mut self, name: impl Display, shape: impl Into<Shape>, initializer: Initializer) -> Parameter {
        self.layout.add_table(format!("{}{name}", self.prefix), shape, initializer)
    }

    /// `count` parameters of one shape, named here by their number.
    pub fn add_stack(
        &mut self,
        count: usize,
        name: impl Fn(usize) -> String,
        shape: impl Into<Shape>,
        initializer: Initializer,
    ) -> Stack {
        let Self { layout, prefix } = self;
        layout.add_stack(count, |number| format!("{prefix}{}", name(number)), shape, initializer)
    }
}
