//! The parameter spec: a name, a shape and a position for each parameter.
//!
//! Invariant: a spec gives every parameter a name, a shape and a 256-byte aligned position, the
//! same in weights, gradients and moments. A handle belongs to its spec, and every other spec
//! rejects it.

#![forbid(unsafe_code)]

use crate::arena::ALIGN_BYTES;
use crate::error::{Error, Result, short};
use crate::initializer::Initializer;
use crate::non_finite::all_finite;
use crate::processors::have_threads;
use crate::tensor::Shape;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The name under which a safetensors file stores its notes. No parameter may have it.
pub const NOTES: &str = "__metadata__";

/// A handle of a parameter within its [`ParameterSpec`] and that spec's clones. Using it with any
/// other spec is [`Error::Misuse`], even if that spec was built identically. Build the spec once,
/// and clone it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parameter {
    layout: u64,
    index: usize,
}

/// Parameters of one shape at a constant distance from each other, so that one batched multiply
/// serves them all. Like [`Parameter`], it is valid only for its spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackedParameters {
    members: Vec<Parameter>,
}

impl StackedParameters {
    /// The parameters in order.
    pub fn members(&self) -> &[Parameter] {
        &self.members
    }
}

/// A parameter's name, shape and position.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterEntry {
    name: String,
    shape: Shape,
    start: usize,
    pub(super) initializer: Initializer,
    is_table: bool,
}

impl ParameterEntry {
    /// The name, unique in the spec.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// True for a table whose rows are looked up by number, so that it is always `[rows, cols]` and
    /// never transposed.
    pub fn is_table(&self) -> bool {
        self.is_table
    }

    /// The first element's index in a flat region of this spec.
    pub fn start(&self) -> usize {
        self.start
    }

    /// The elements' indices in a flat region of this spec.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.shape.elements()
    }

    /// The elements' byte range in a flat region of this spec.
    pub(super) fn bytes(&self) -> Range<usize> {
        let Range { start, end } = self.range();
        start * size_of::<f32>()..end * size_of::<f32>()
    }
}

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
        self.entries.push(ParameterEntry { name: name.into(), shape, start, initializer, is_table: false });
        Parameter { layout: self.identity, index: self.entries.len() - 1 }
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

    /// Replaces the initializers of the parameters so far for which `choose` returns one. This
    /// applies a recipe such as GPT-2's to existing layers.
    ///
    /// ```
    /// # use stepscope::{Initializer, ParameterSpec};
    /// # let mut layout = ParameterSpec::builder();
    /// # stepscope::nn::Linear::new(layout.names().at("head"), 2, 2);
    /// layout.initialize(|entry| entry.name().ends_with("weight").then_some(Initializer::Normal { deviation: 0.02 }));
    /// ```
    pub fn initialize(&mut self, choose: impl Fn(&ParameterEntry) -> Option<Initializer>) {
        for entry in &mut self.entries {
            entry.initializer = choose(entry).unwrap_or(entry.initializer);
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
    pub fn build(self) -> Result<ParameterSpec> {
        let refused = |expected: &str, got: String| Err(Error::misuse("layout", expected, got));
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
        let Self { identity, entries, elements, .. } = self;
        Ok(ParameterSpec { shared: Arc::new(Shared { identity, entries, elements }) })
    }
}

#[derive(Debug)]
struct Shared {
    identity: u64,
    entries: Vec<ParameterEntry>,
    elements: usize,
}

/// The names, shapes and positions of a model's parameters. Clones share them.
#[derive(Clone, Debug)]
pub struct ParameterSpec {
    shared: Arc<Shared>,
}

impl ParameterSpec {
    /// Makes a builder without parameters.
    pub fn builder() -> ParameterSpecBuilder {
        ParameterSpecBuilder::default()
    }

    /// All parameters in order.
    pub fn entries(&self) -> &[ParameterEntry] {
        &self.shared.entries
    }

    /// The handles of all parameters in order.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = Parameter> + use<> {
        let layout = self.shared.identity;
        (0..self.entries().len()).map(move |index| Parameter { layout, index })
    }

    /// The entry of one parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec.
    pub fn entry(&self, parameter: Parameter) -> Result<&ParameterEntry> {
        Ok(&self.entries()[self.index(parameter)?])
    }

    /// A parameter's index among the entries.
    pub(crate) fn index(&self, parameter: Parameter) -> Result<usize> {
        if parameter.layout == self.shared.identity {
            return Ok(parameter.index);
        }
        let got = format!("parameter {} of another parameter spec", parameter.index);
        Err(Error::misuse("parameter", "a handle from the builder of this parameter spec or of its clones", got))
    }

    /// The number of elements of a flat region, including padding between parameters.
    pub fn elements(&self) -> usize {
        self.shared.elements
    }

    /// The number of weights of the model: elements without padding.
    pub fn weights(&self) -> usize {
        self.entries().iter().map(|entry| entry.shape.elements()).sum()
    }

    /// True if both are the same spec, rather than merely equal ones.
    pub fn same(&self, other: &Self) -> bool {
        self.shared.identity == other.shared.identity
    }

    /// Fills `place` with the bytes of a flat region from byte `offset` on. `write` writes each
    /// parameter's bytes. It receives the parameter's index, its entry and the first byte within
    /// it. Padding is zero.
    pub(super) fn fill(
        &self,
        offset: usize,
        mut place: &mut [u8],
        write: impl Fn(usize, &ParameterEntry, usize, &mut [u8]),
    ) {
        let mut at = offset;
        let mut take = |bytes: usize| {
            let bytes = bytes.min(place.len());
            let (part, rest) = std::mem::take(&mut place).split_at_mut(bytes);
            place = rest;
            part
        };
        let first = self.entries().partition_point(|entry| entry.bytes().end <= offset);
        for (number, entry) in self.entries().iter().enumerate().skip(first) {
            let bytes = entry.bytes();
            let gap = take(bytes.start.saturating_sub(at));
            gap.fill(0);
            at += gap.len();
            let part = take(bytes.end - at);
            if part.is_empty() {
                return;
            }
            write(number, entry, at - bytes.start, part);
            at += part.len();
        }
        take(usize::MAX).fill(0);
    }

    /// Returns the name of the parameter that holds byte `offset` of a flat region, or precedes it,
    /// and the byte's offset within it.
    pub(super) fn name_at(&self, offset: usize) -> (String, usize) {
        let entry = &self.entries()[self.entries().partition_point(|entry| entry.bytes().start <= offset) - 1];
        (entry.name.clone(), offset - entry.bytes().start)
    }

    /// The shape of each member of a stack, and the number of elements from the start of one member
    /// to the start of the next.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec, or the stack has no
    /// members.
    pub fn stack(&self, stack: &StackedParameters) -> Result<(Shape, usize)> {
        let head = self.head(stack)?;
        let second = stack.members.get(1).map(|second| self.entry(*second)).transpose()?;
        Ok((head.shape, second.map_or(0, |second| second.start - head.start)))
    }

    /// The range from the first element of the first member to the last element of the last member.
    pub(super) fn span(&self, stack: &StackedParameters) -> Result<Range<usize>> {
        let start = self.head(stack)?.start;
        stack.members.last().map_or(Ok(start..start), |last| Ok(start..self.entry(*last)?.range().end))
    }

    /// The first member.
    fn head(&self, stack: &StackedParameters) -> Result<&ParameterEntry> {
        let first =
            stack.members.first().ok_or_else(|| Error::misuse("stack", "a stack of at least one parameter", "none"))?;
        self.entry(*first)
    }

    /// Iterates over the parameters of a flat region: each name, with true if all its values are
    /// finite.
    pub fn finite(&self, region: &[f32]) -> impl Iterator<Item = (String, bool)> {
        let all = |values: &[f32]| all_finite(bytemuck::cast_slice(values));
        self.entries().iter().map(move |entry| (entry.name().to_owned(), all(&region[entry.range()])))
    }

    /// Finds the first parameter that is not finite, lazily. `region` is each parameter's bytes,
    /// little-endian, and `prefix` precedes the name. All processors take part, because there may
    /// be many small parameters.
    pub fn finite_bytes(&self, prefix: &str, region: &[&[u8]]) -> impl Iterator<Item = (String, bool)> {
        let first = move || match have_threads() {
            true => region.par_iter().position_first(|bytes| !all_finite(bytes)),
            false => region.iter().position(|bytes| !all_finite(bytes)),
        };
        let named = move |at: usize| (format!("{prefix}{}", self.entries()[at].name()), false);
        std::iter::once_with(first).flatten().map(named)
    }
}
