//! Where parameters are: a name, a shape and a place for each.
//!
//! Invariant: a layout gives every parameter a name, a shape and a 256-byte aligned place, the same in weights,
//! gradients and moments. A handle knows its layout, and no other takes it.

#![forbid(unsafe_code)]

use crate::error::{Error, Result, short};
use crate::finite::all_finite;
use crate::initializer::Initializer;
use crate::memory::ALIGN_BYTES;
use crate::processors::have_threads;
use crate::tensor::Shape;
use crate::tensors::NOTES;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A parameter's handle within its [`Layout`] and that layout's clones. Anywhere else it is [`Error::Misuse`], also where a layout
/// was built alike: build the layout once, and clone it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parameter {
    layout: u64,
    index: usize,
}

/// Parameters of one shape at a constant distance from each other: one batched multiply serves them all. A handle as
/// [`Parameter`] is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    members: Vec<Parameter>,
}

impl Stack {
    /// The parameters in order.
    pub fn members(&self) -> &[Parameter] {
        &self.members
    }
}

/// A parameter's name, shape and place.
#[derive(Clone, Debug, PartialEq)]
pub struct LayoutEntry {
    name: String,
    shape: Shape,
    start: usize,
    pub(super) initializer: Initializer,
    is_table: bool,
}

impl LayoutEntry {
    /// The name, unique in the layout.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Whether its rows are looked up by number, so that no other layout of it is meant than `[rows, cols]`.
    pub fn is_table(&self) -> bool {
        self.is_table
    }

    /// The first element's place in a flat region of this layout.
    pub fn start(&self) -> usize {
        self.start
    }

    /// The elements' places in a flat region of this layout.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.shape.elements()
    }

    /// The same in bytes.
    pub(super) fn bytes(&self) -> Range<usize> {
        let Range { start, end } = self.range();
        start * size_of::<f32>()..end * size_of::<f32>()
    }
}

/// Collects a model's parameters; see [`Layout::builder`].
#[derive(Debug)]
pub struct LayoutBuilder {
    identity: u64,
    entries: Vec<LayoutEntry>,
    elements: usize,
    /// The first parameter with which the layout has more bytes than memory can have.
    beyond: Option<usize>,
}

impl Default for LayoutBuilder {
    fn default() -> Self {
        // Tells handles of one layout from another's.
        static LAYOUTS: AtomicU64 = AtomicU64::new(0);
        Self { identity: LAYOUTS.fetch_add(1, Ordering::Relaxed), entries: Vec::new(), elements: 0, beyond: None }
    }
}

impl LayoutBuilder {
    /// A parameter of a name and a shape. What is wrong with either is an error of [`LayoutBuilder::build`].
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
        self.entries.push(LayoutEntry { name: name.into(), shape, start, initializer, is_table: false });
        Parameter { layout: self.identity, index: self.entries.len() - 1 }
    }

    /// [`LayoutBuilder::add`] of a table whose rows are looked up by number, as an embedding's: a `state_dict` has it as it is, where
    /// other matrices are transposed.
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

    /// `count` parameters of one shape, named by their number.
    pub fn add_stack(
        &mut self,
        count: usize,
        name: impl Fn(usize) -> String,
        shape: impl Into<Shape>,
        initializer: Initializer,
    ) -> Stack {
        let shape = shape.into();
        Stack { members: (0..count).map(|number| self.add(name(number), shape, initializer)).collect() }
    }

    /// Gives the parameters so far another start, where `choose` has one for them: how a recipe such as GPT-2's is laid over layers.
    ///
    /// ```
    /// # use stepscope::{Initializer, Layout};
    /// # let mut layout = Layout::builder();
    /// # stepscope::nn::Linear::new(layout.names().at("head"), 2, 2);
    /// layout.initialize(|entry| entry.name().ends_with("weight").then_some(Initializer::Normal { deviation: 0.02 }));
    /// ```
    pub fn initialize(&mut self, choose: impl Fn(&LayoutEntry) -> Option<Initializer>) {
        for entry in &mut self.entries {
            entry.initializer = choose(entry).unwrap_or(entry.initializer);
        }
    }

    /// The finished layout.
    ///
    /// # Errors
    /// [`Error::Misuse`] for no parameter, an empty one, two of one name (as `b.c` in `a` and `c` in `a.b` are), one named `__metadata__`, as
    /// no tensor of a file can be, more bytes than memory can have, or an initializer whose values
    /// may be infinite or NaN.
    pub fn build(self) -> Result<Layout> {
        let refused = |expected: &str, got: String| Err(Error::misuse("layout", expected, got));
        let named = |entry: &LayoutEntry| format!("`{}` {}", short(&entry.name), entry.shape);
        if let Some(entry) = self.beyond.map(|first| &self.entries[first]) {
            let got = format!("{} behind {} elements", named(entry), entry.start);
            return refused("parameters that memory can hold", got);
        }
        let mut names: Vec<&str> = self.entries.iter().map(LayoutEntry::name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return refused("a different name for each parameter", format!("two named `{}`", short(pair[0])));
        }
        if names.binary_search(&NOTES).is_ok() {
            return refused("names that a file's tensors can have", format!("`{NOTES}`, where a file has its notes"));
        }
        if let Some(empty) = self.entries.iter().find(|entry| entry.shape.elements() == 0) {
            return refused("parameters with elements", named(empty));
        }
        if self.entries.is_empty() {
            return refused("at least one parameter", "none".into());
        }
        let flaw =
            |entry: &LayoutEntry| entry.initializer.flaw().map(|expected| (expected, named(entry), entry.initializer));
        if let Some((expected, named, initializer)) = self.entries.iter().find_map(flaw) {
            return refused(&format!("{expected} to start from"), format!("{initializer:?} for {named}"));
        }
        let Self { identity, entries, elements, .. } = self;
        Ok(Layout { shared: Arc::new(Shared { identity, entries, elements }) })
    }
}

#[derive(Debug)]
struct Shared {
    identity: u64,
    entries: Vec<LayoutEntry>,
    elements: usize,
}

/// Where each parameter of a model stands. Clones share it.
#[derive(Clone, Debug)]
pub struct Layout {
    shared: Arc<Shared>,
}

impl Layout {
    /// A layout without parameters so far.
    pub fn builder() -> LayoutBuilder {
        LayoutBuilder::default()
    }

    /// All parameters in order.
    pub fn entries(&self) -> &[LayoutEntry] {
        &self.shared.entries
    }

    /// The handles of all parameters in order.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = Parameter> + use<> {
        let layout = self.shared.identity;
        (0..self.entries().len()).map(move |index| Parameter { layout, index })
    }

    /// One parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle is another layout's.
    pub fn entry(&self, parameter: Parameter) -> Result<&LayoutEntry> {
        Ok(&self.entries()[self.index(parameter)?])
    }

    /// A parameter's place among the entries.
    pub(crate) fn index(&self, parameter: Parameter) -> Result<usize> {
        if parameter.layout == self.shared.identity {
            return Ok(parameter.index);
        }
        let got = format!("parameter {} of another layout", parameter.index);
        Err(Error::misuse("parameter", "a handle that this layout's builder, or that of its clones, gave", got))
    }

    /// Elements of a flat region, the space between parameters included.
    pub fn elements(&self) -> usize {
        self.shared.elements
    }

    /// Weights of the model: elements without the space between.
    pub fn weights(&self) -> usize {
        self.entries().iter().map(|entry| entry.shape.elements()).sum()
    }

    /// Whether both are the same layout, not only equal ones.
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.shared.identity == other.shared.identity
    }

    /// Writes what follows byte `offset` of a flat region: each parameter's bytes by `write`, from its entry, its place in the layout
    /// and the first byte within it, and zeros between.
    pub(super) fn fill(
        &self,
        offset: usize,
        mut place: &mut [u8],
        write: impl Fn(usize, &LayoutEntry, usize, &mut [u8]),
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

    /// The name of what holds byte `offset` of a flat region, or precedes it, and the byte's place from there on.
    pub(super) fn name_at(&self, offset: usize) -> (String, usize) {
        let entry = &self.entries()[self.entries().partition_point(|entry| entry.bytes().start <= offset) - 1];
        (entry.name.clone(), offset - entry.bytes().start)
    }

    /// The shape of each member of a stack, and the elements from one's start to the next one's.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle is another layout's, or has no members.
    pub fn stack(&self, stack: &Stack) -> Result<(Shape, usize)> {
        let head = self.head(stack)?;
        let second = stack.members.get(1).map(|second| self.entry(*second)).transpose()?;
        Ok((head.shape, second.map_or(0, |second| second.start - head.start)))
    }

    /// The places from the first element of the first member to the last of the last.
    pub(super) fn span(&self, stack: &Stack) -> Result<Range<usize>> {
        let start = self.head(stack)?.start;
        stack.members.last().map_or(Ok(start..start), |last| Ok(start..self.entry(*last)?.range().end))
    }

    /// The first member.
    fn head(&self, stack: &Stack) -> Result<&LayoutEntry> {
        let first =
            stack.members.first().ok_or_else(|| Error::misuse("stack", "a stack of at least one parameter", "none"))?;
        self.entry(*first)
    }

    /// The parameters of a flat region: the name, and whether each is finite.
    pub(crate) fn finite(&self, region: &[f32]) -> impl Iterator<Item = (String, bool)> {
        let all = |values: &[f32]| all_finite(bytemuck::cast_slice(values));
        self.entries().iter().map(move |entry| (entry.name().to_owned(), all(&region[entry.range()])))
    }

    /// The first parameter that is not finite, of each one's bytes, little-endian, once somebody asks; `prefix` stands before the name. All
    /// processors look: there may be many small ones.
    pub(crate) fn finite_bytes(&self, prefix: &str, region: &[&[u8]]) -> impl Iterator<Item = (String, bool)> {
        let first = move || match have_threads() {
            true => region.par_iter().position_first(|bytes| !all_finite(bytes)),
            false => region.iter().position(|bytes| !all_finite(bytes)),
        };
        let named = move |at: usize| (format!("{prefix}{}", self.entries()[at].name()), false);
        std::iter::once_with(first).flatten().map(named)
    }
}
