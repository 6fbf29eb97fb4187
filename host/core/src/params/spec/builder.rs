//! The builder of a spec: parameters are added by name, and checked together at the end.
//!
//! Invariant: every spec that is built has distinct names, parameters with elements, and positions
//! that memory can have.

use super::{
    FrozenType, GradientType, MasterType, NOTES, Parameter, ParameterEntry, ParameterSpec, Shared, StackedParameters,
    StateType,
};
use crate::arena::ALIGN_BYTES;
use crate::error::{Error, Result, short};
use crate::initializer::Initializer;
use crate::params::nf4;
use crate::params::region::{Position, Region};
use crate::tensor::Shape;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Collects a model's parameters; see [`ParameterSpec::builder`].
#[derive(Debug)]
pub struct ParameterSpecBuilder {
    identity: u64,
    entries: Vec<ParameterEntry>,
    elements: usize,
    /// The first parameter that makes the spec larger than memory can be.
    beyond: Option<usize>,
}

impl Default for ParameterSpecBuilder {
    fn default() -> Self {
        // Distinguishes the handles of different specs.
        static LAYOUTS: AtomicU64 = AtomicU64::new(0);
        Self { identity: LAYOUTS.fetch_add(1, Ordering::Relaxed), entries: Vec::new(), elements: 0, beyond: None }
    }
}

impl ParameterSpecBuilder {
    /// Adds a parameter with a name and a shape. [`ParameterSpecBuilder::build`] reports errors in
    /// either.
    pub fn add(&mut self, name: impl Into<String>, shape: impl Into<Shape>, initializer: Initializer) -> Parameter {
        let shape = shape.into();
        let end = shape.checked_elements().and_then(|elements| self.elements.checked_add(elements));
        let end = end.and_then(|end| end.checked_next_multiple_of(ALIGN_BYTES / size_of::<f32>()));
        let start = match end.filter(|&end| end <= isize::MAX as usize / size_of::<f32>()) {
            Some(end) => std::mem::replace(&mut self.elements, end),
            None => {
                self.beyond.get_or_insert(self.entries.len());
                self.elements
            }
        };
        let (number, name) = (self.entries.len(), name.into());
        self.entries.push(ParameterEntry {
            name,
            shape,
            start,
            number,
            initializer,
            is_table: false,
            is_loaded: false,
            frozen: None,
            matrices: Vec::new(),
        });
        Parameter { spec: self.identity, index: number }
    }

    /// Adds a table whose rows are looked up by number, such as an embedding's. A `state_dict`
    /// stores it unchanged, while other matrices are transposed.
    pub fn add_table(
        &mut self,
        name: impl Into<String>,
        shape: impl Into<Shape>,
        initializer: Initializer,
    ) -> Parameter {
        let table = self.add(name, shape, initializer);
        self.entries[table.index].is_table = true;
        table
    }

    /// Adds `count` parameters of one shape. `name` maps a number to a name.
    pub fn add_stack(
        &mut self,
        count: usize,
        name: impl Fn(usize) -> String,
        shape: impl Into<Shape>,
        initializer: Initializer,
    ) -> StackedParameters {
        let shape = shape.into();
        StackedParameters { members: (0..count).map(|number| self.add(name(number), shape, initializer)).collect() }
    }

    /// Returns the handle of the parameter with this name, if one was added so far.
    pub fn parameter(&self, name: &str) -> Option<Parameter> {
        let index = self.entries.iter().position(|entry| entry.name == name)?;
        Some(Parameter { spec: self.identity, index })
    }

    /// Replaces the initializers of the parameters so far for which `choose` returns one. This
    /// applies a recipe such as GPT-2's to existing layers.
    ///
    /// ```
    /// # use stepscope::parameters::Initializer;
    /// # use stepscope::ParameterSpec;
    /// # let mut spec = ParameterSpec::builder();
    /// # stepscope::nn::Linear::new(spec.at("head"), 2, 2);
    /// spec.initialize(|entry| entry.name().ends_with("weight").then_some(Initializer::Normal { deviation: 0.02 }));
    /// ```
    pub fn initialize(&mut self, choose: impl Fn(&ParameterEntry) -> Option<Initializer>) {
        for entry in &mut self.entries {
            entry.initializer = choose(entry).unwrap_or(entry.initializer);
        }
    }

    /// Freezes the parameters so far for which `choose` returns a type, and trains the others.
    ///
    /// A frozen parameter is stored once, in its type. It has no gradient and no optimizer state,
    /// it does not count in the gradients' norm, and a backward pass computes nothing for it. A
    /// parameter of one extent, such as a gain or a bias, is stored in f32 whatever `choose`
    /// returns, because kernels read it in f32. A table is stored in BF16 where `choose` returns
    /// NF4, because its rows are looked up by number.
    ///
    /// ```
    /// use stepscope::nn::Linear;
    /// use stepscope::parameters::FrozenType;
    /// use stepscope::ParameterSpec;
    ///
    /// # fn main() -> stepscope::Result<()> {
    /// let mut spec = ParameterSpec::builder();
    /// Linear::new(spec.at("body"), 64, 64);
    /// Linear::new(spec.at("head"), 64, 10);
    /// spec.freeze(|entry| entry.name().starts_with("body.").then_some(FrozenType::Bf16));
    /// let spec = spec.build()?;
    /// assert_eq!(spec.entries()[0].name(), "head.weight");
    /// assert_eq!(spec.frozen(FrozenType::Bf16)[0].name(), "body.weight");
    /// assert_eq!(spec.frozen(FrozenType::F32)[0].name(), "body.bias");
    /// # Ok(())
    /// # }
    /// ```
    pub fn freeze(&mut self, choose: impl Fn(&ParameterEntry) -> Option<FrozenType>) {
        for entry in &mut self.entries {
            let is_vector = entry.shape.extents().len() < 2;
            entry.frozen = choose(entry).map(|stored| match stored {
                _ if is_vector => FrozenType::F32,
                FrozenType::Nf4 if entry.is_table => FrozenType::Bf16,
                stored => stored,
            });
        }
    }

    /// Sets the outputs of the matrices that a parameter `[inputs, outputs]` consists of, where
    /// `choose` returns them. In NF4, each matrix is quantised separately, as in a file with q, k
    /// and v. By default, a parameter is one matrix.
    pub fn matrices(&mut self, choose: impl Fn(&ParameterEntry) -> Option<Vec<usize>>) {
        for entry in &mut self.entries {
            if let Some(matrices) = choose(entry) {
                entry.matrices = matrices;
            }
        }
    }

    /// Builds the spec.
    ///
    /// # Errors
    /// [`Error::Misuse`] in these cases:
    ///
    /// - There is no parameter, or a parameter is empty.
    /// - Two parameters have the same name, as `b.c` in `a` and `c` in `a.b` do.
    /// - A parameter is named `__metadata__`, which no tensor of a file can be.
    /// - There are more bytes than memory can have.
    /// - An initializer's values may be infinite or NaN.
    /// - A parameter in NF4 is not a matrix, or its inputs, or the outputs of one of its matrices,
    ///   are not a multiple of 8 above zero.
    pub fn build(mut self) -> Result<ParameterSpec> {
        let refused = |expected: &str, got: String| Err(Error::misuse("parameter spec", expected, got));
        let named = |entry: &ParameterEntry| format!("`{}` {}", short(&entry.name), entry.shape);
        if let Some(entry) = self.beyond.map(|first| &self.entries[first]) {
            let got = format!("{} after {} elements", named(entry), entry.start);
            return refused("parameters that memory can hold", got);
        }
        let mut names: Vec<&str> = self.entries.iter().map(ParameterEntry::name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return refused("a different name for each parameter", format!("two named `{}`", short(pair[0])));
        }
        if names.binary_search(&NOTES).is_ok() {
            return refused("names that a file's tensors can have", format!("`{NOTES}`, which holds a file's notes"));
        }
        if let Some(empty) = self.entries.iter().find(|entry| entry.shape.elements() == 0) {
            return refused("parameters with elements", named(empty));
        }
        if self.entries.is_empty() {
            return refused("at least one parameter", "none".into());
        }
        let flaw = |entry: &ParameterEntry| {
            entry.initializer.flaw().map(|expected| (expected, named(entry), entry.initializer))
        };
        if let Some((expected, named, initializer)) = self.entries.iter().find_map(flaw) {
            return refused(&format!("{expected} as initializer"), format!("{initializer:?} for {named}"));
        }
        for entry in self.entries.iter_mut().filter(|entry| entry.frozen == Some(FrozenType::Nf4)) {
            let &[inputs, outputs] = entry.shape.extents() else {
                return refused("a matrix [inputs, outputs] to be frozen in NF4", named(entry));
            };
            if entry.matrices.is_empty() {
                entry.matrices = vec![outputs];
            }
            let unit = nf4::UNIT;
            let all = entry.matrices.iter().try_fold(0usize, |all, &count| {
                all.checked_add(count).filter(|_| count > 0 && count.is_multiple_of(unit))
            });
            if !inputs.is_multiple_of(unit) || all != Some(outputs) {
                let expected = format!("multiples of {unit} inputs, and of {unit} outputs in each matrix, in NF4");
                return refused(&expected, format!("{} of outputs {:?}", named(entry), entry.matrices));
            }
        }
        let mut shared = Shared {
            identity: self.identity,
            masters: MasterType::F32,
            state: StateType::F32,
            gradients: GradientType::F32,
            positions: Vec::new(),
            trained: Region::default(),
            frozen: [const { Region::new() }; 3],
        };
        for entry in self.entries {
            let position = match entry.frozen {
                None => Position::Trained(shared.trained.entries.len()),
                Some(stored) => Position::Frozen(stored, shared.frozen[stored as usize].entries.len()),
            };
            shared.positions.push(position);
            shared.region_mut(position).push(entry);
        }
        shared.trained = shared.trained.placed(shared.state);
        Ok(ParameterSpec { shared: Arc::new(shared) })
    }
}
