//! The parameter spec: a name, a shape and a position for each parameter.
//!
//! A parameter is trained, or frozen in f32, BF16 or NF4. All trained parameters share one flat
//! region, and so do all frozen parameters of one type.
//!
//! Invariant: a spec gives every parameter a name, a shape and a 256-byte aligned position in its
//! region. A trained parameter has the same position in weights, gradients and moments. A handle
//! belongs to its spec, and every other spec rejects it.

#![forbid(unsafe_code)]

mod builder;

pub use builder::ParameterSpecBuilder;

use crate::error::{Error, Result, short};
use crate::initializer::Initializer;
use crate::non_finite::all_finite;
use crate::params::nf4;
use crate::params::region::{Position, Region};
use crate::processors::have_threads;
use crate::tensor::Shape;
use half::bf16;
use kernels::update::RUN;
pub use kernels::update::{MasterType, StateType};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// The name under which a safetensors file stores its notes. No parameter may have it.
pub const NOTES: &str = "__metadata__";

/// A handle of a parameter within its [`ParameterSpec`] and that spec's clones. Using it with any
/// other spec is [`Error::Misuse`], even if that spec was built identically. Build the spec once,
/// and clone it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parameter {
    spec: u64,
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

/// The type in which a frozen parameter is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrozenType {
    /// f32, 4 bytes for each element.
    F32,
    /// BF16, 2 bytes for each element. Kernels that compute in BF16 read it without a copy.
    Bf16,
    /// NF4 with double quantisation (Dettmers et al., "QLoRA", 2023), 0.516 bytes for each element.
    /// Each op that reads the parameter decodes it first.
    Nf4,
}

/// The type in which gradients are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientType {
    /// f32, 4 bytes for each weight.
    F32,
    /// BF16, 2 bytes for each weight. An op computes or adds its gradient in f32, and the sum is
    /// rounded to nearest, ties to even, when the op ends.
    Bf16,
    /// Not stored. A parameter is updated in the backward pass, as soon as its gradient is final,
    /// and the gradient's memory is used again; see [`Tape::backward_consumed`](crate::Tape::backward_consumed).
    Released,
}

impl GradientType {
    /// The most gradients in BF16 that an update converts to f32 at a time, a multiple of 64.
    pub const CONVERTED: usize = 4 << 20;
}

/// A parameter's name, shape and position.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterEntry {
    pub(super) name: String,
    pub(super) shape: Shape,
    pub(super) start: usize,
    /// The number of parameters that were added before.
    pub(super) number: usize,
    pub(super) initializer: Initializer,
    is_table: bool,
    /// True if the program loads the parameter, so that its initial values are zeros.
    pub(super) is_loaded: bool,
    frozen: Option<FrozenType>,
    /// The outputs of each matrix of a file that the parameter consists of; empty for one matrix.
    matrices: Vec<usize>,
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

    /// The type in which the parameter is stored if it is frozen. `None` for a trained parameter.
    pub fn frozen(&self) -> Option<FrozenType> {
        self.frozen
    }

    /// The outputs of each matrix of a file that the parameter consists of; see
    /// [`ParameterSpecBuilder::matrices`].
    pub fn matrices(&self) -> &[usize] {
        &self.matrices
    }

    /// The first element's index in the flat region of the parameter. The elements of the region
    /// for NF4 are words of 4 bytes.
    pub fn start(&self) -> usize {
        self.start
    }

    /// The elements' indices in the flat region of the parameter.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.stored_elements()
    }

    /// The number of elements of the flat region that the parameter takes.
    pub(super) fn stored_elements(&self) -> usize {
        match self.frozen {
            Some(FrozenType::Nf4) => nf4::words(self.shape.as_rows()[0], &self.matrices),
            _ => self.shape.elements(),
        }
    }

    /// The elements' byte range in the flat region of the parameter.
    pub(super) fn bytes(&self) -> Range<usize> {
        let (Range { start, end }, bytes) = (self.range(), self.element_bytes());
        start * bytes..end * bytes
    }

    /// The parameter's byte range in a flat region of trained parameters that has `run_bytes` for
    /// each 64 elements. If they are packed so that an element has no whole bytes, the range has
    /// whole runs.
    pub fn bytes_in(&self, run_bytes: usize) -> Range<usize> {
        let (start, elements) = (self.start / RUN * run_bytes, self.shape.elements());
        let whole = if run_bytes.is_multiple_of(RUN) { 1 } else { RUN };
        start..start + elements.div_ceil(whole) * whole * run_bytes / RUN
    }

    /// The bytes of an element.
    pub(super) fn element_bytes(&self) -> usize {
        if self.frozen == Some(FrozenType::Bf16) { size_of::<bf16>() } else { size_of::<f32>() }
    }
}

#[derive(Clone, Debug)]
struct Shared {
    identity: u64,
    masters: MasterType,
    state: StateType,
    gradients: GradientType,
    /// Each parameter's position, in the order in which they were added.
    positions: Vec<Position>,
    trained: Region,
    /// The frozen parameters of each [`FrozenType`].
    frozen: [Region; 3],
}

impl Shared {
    fn region_mut(&mut self, position: Position) -> &mut Region {
        match position {
            Position::Trained(_) => &mut self.trained,
            Position::Frozen(stored, _) => &mut self.frozen[stored as usize],
        }
    }

    fn entry(&self, position: Position) -> &ParameterEntry {
        match position {
            Position::Trained(index) => &self.trained.entries[index],
            Position::Frozen(stored, index) => &self.frozen[stored as usize].entries[index],
        }
    }
}

/// The names, shapes and positions of a model's parameters. Clones share them.
///
/// A flat region of a spec, such as the gradients, has the trained parameters only.
#[derive(Clone, Debug)]
pub struct ParameterSpec {
    shared: Arc<Shared>,
}

impl ParameterSpec {
    /// Makes a builder without parameters.
    pub fn builder() -> ParameterSpecBuilder {
        ParameterSpecBuilder::default()
    }

    /// Sets the type in which trained weights are stored. The default is [`MasterType::F32`].
    ///
    /// [`MasterType::Split`] takes 3 bytes for each weight, instead of 4, or of 6 with a BF16 copy.
    /// Products read the BF16 half. An update computes in f32, and rounds the weight to 24 bits.
    /// Kernels that read f32 get all 24 bits, converted into memory of the step. An embedding of a
    /// table reads the BF16 half.
    ///
    /// ```
    /// use stepscope::parameters::{Initializer, MasterType};
    /// use stepscope::prelude::*;
    ///
    /// # fn main() -> Result<()> {
    /// # let device = Device::open(DeviceKind::Emulated)?;
    /// let mut spec = ParameterSpec::builder();
    /// let w = spec.add("w", [2], Initializer::Constant(0.1));
    /// let spec = spec.build()?.with_masters(MasterType::Split);
    /// let weights = Parameters::new(&device, &spec, 7)?;
    /// assert_eq!(weights.read_as::<bf16>(w)?, [bf16::from_f32(0.1); 2]);
    /// assert!((weights.read(w)?[0] / 0.1 - 1.0).abs() < 1.6e-5);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn with_masters(self, masters: MasterType) -> Self {
        Self { shared: Arc::new(Shared { masters, ..Arc::unwrap_or_clone(self.shared) }) }
    }

    /// Sets the type in which an optimizer keeps its state, such as moments. The default is
    /// [`StateType::F32`]. [`StateType::Bits8`] takes 1.0625 bytes instead of 4, for each weight
    /// and each part of the state.
    #[must_use]
    pub fn with_state(self, state: StateType) -> Self {
        let shared = Arc::unwrap_or_clone(self.shared);
        Self { shared: Arc::new(Shared { state, trained: shared.trained.placed(state), ..shared }) }
    }

    /// Sets the type in which gradients are stored. The default is [`GradientType::F32`]. A group
    /// of ranks refuses [`GradientType::Released`].
    #[must_use]
    pub fn with_gradients(self, gradients: GradientType) -> Self {
        Self { shared: Arc::new(Shared { gradients, ..Arc::unwrap_or_clone(self.shared) }) }
    }

    /// Starts the parameters for which `is_loaded` returns true at zero, because the program loads
    /// them. Drawing the initial values of a large model takes longer than reading its files. All
    /// other parameters start as they do without this call.
    #[must_use]
    pub fn with_loaded(self, is_loaded: impl Fn(&ParameterEntry) -> bool) -> Self {
        let mut shared = Arc::unwrap_or_clone(self.shared);
        let entries =
            [&mut shared.trained].into_iter().chain(&mut shared.frozen).flat_map(|region| &mut region.entries);
        entries.for_each(|entry| entry.is_loaded = is_loaded(entry));
        Self { shared: Arc::new(shared) }
    }

    /// The type in which trained weights are stored; see [`ParameterSpec::with_masters`].
    pub fn masters(&self) -> MasterType {
        self.shared.masters
    }

    /// The type in which optimizers keep their state; see [`ParameterSpec::with_state`].
    pub fn state(&self) -> StateType {
        self.shared.state
    }

    /// The type in which gradients are stored; see [`ParameterSpec::with_gradients`].
    pub fn gradients(&self) -> GradientType {
        self.shared.gradients
    }

    /// True if the weights of a parameter are stored as BF16: frozen in BF16, or trained as split
    /// masters.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec.
    pub fn is_bf16(&self, parameter: Parameter) -> Result<bool> {
        Ok(match self.entry(parameter)?.frozen {
            Some(stored) => stored == FrozenType::Bf16,
            None => self.shared.masters == MasterType::Split,
        })
    }

    /// All trained parameters in order.
    pub fn entries(&self) -> &[ParameterEntry] {
        &self.shared.trained.entries
    }

    /// All parameters that are frozen in this type, in order.
    pub fn frozen(&self, stored: FrozenType) -> &[ParameterEntry] {
        &self.shared.frozen[stored as usize].entries
    }

    /// All parameters, trained and frozen, with their handles, in the order in which they were
    /// added.
    pub fn iter(&self) -> impl Iterator<Item = (Parameter, &ParameterEntry)> {
        let Shared { identity, ref positions, .. } = *self.shared;
        let handle = move |index| Parameter { spec: identity, index };
        positions.iter().enumerate().map(move |(index, &position)| (handle(index), self.shared.entry(position)))
    }

    /// True if a parameter is frozen.
    pub fn has_frozen(&self) -> bool {
        self.shared.frozen.iter().any(|region| !region.entries.is_empty())
    }

    /// The handles of all trained parameters in order.
    pub(crate) fn trained_parameters(&self) -> impl Iterator<Item = Parameter> + use<> {
        let number = |entry: &ParameterEntry| entry.number;
        let (spec, numbers): (_, Vec<usize>) = (self.shared.identity, self.entries().iter().map(number).collect());
        numbers.into_iter().map(move |index| Parameter { spec, index })
    }

    pub(super) fn trained(&self) -> &Region {
        &self.shared.trained
    }

    pub(super) fn frozen_region(&self, stored: FrozenType) -> &Region {
        &self.shared.frozen[stored as usize]
    }

    /// The entry of one parameter, trained or frozen.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec.
    pub fn entry(&self, parameter: Parameter) -> Result<&ParameterEntry> {
        Ok(self.shared.entry(self.position(parameter)?))
    }

    /// The entry of one trained parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec, or the parameter is
    /// frozen.
    pub fn trained_entry(&self, parameter: Parameter) -> Result<&ParameterEntry> {
        Ok(&self.entries()[self.index(parameter)?])
    }

    /// A trained parameter's index among the entries.
    pub(crate) fn index(&self, parameter: Parameter) -> Result<usize> {
        match self.position(parameter)? {
            Position::Trained(index) => Ok(index),
            position @ Position::Frozen(..) => {
                let got = format!("`{}`, which is frozen", short(self.shared.entry(position).name()));
                Err(Error::misuse("parameter", "a trained parameter, which has a gradient", got))
            }
        }
    }

    fn position(&self, parameter: Parameter) -> Result<Position> {
        if parameter.spec == self.shared.identity {
            return Ok(self.shared.positions[parameter.index]);
        }
        let got = format!("parameter {} of another parameter spec", parameter.index);
        Err(Error::misuse("parameter", "a handle from the builder of this parameter spec or of its clones", got))
    }

    /// The number of elements of a flat region of trained parameters, including padding between
    /// them.
    pub fn elements(&self) -> usize {
        self.shared.trained.elements
    }

    /// The number of weights of the model, trained and frozen: elements without padding.
    pub fn weights(&self) -> usize {
        self.iter().map(|(_, entry)| entry.shape.elements()).sum()
    }

    /// The number of trained weights: elements without padding.
    pub fn trained_weights(&self) -> usize {
        self.entries().iter().map(|entry| entry.shape.elements()).sum()
    }

    /// The bytes that frozen parameters take on a device, without a BF16 copy of those in f32.
    pub fn frozen_bytes(&self) -> u64 {
        let [f32, bf16, nf4] = &self.shared.frozen;
        (size_of::<f32>() * f32.elements + size_of::<bf16>() * bf16.elements + size_of::<u32>() * nf4.elements) as u64
    }

    /// The bytes that trained weights take on a device, without a BF16 copy.
    pub fn masters_bytes(&self) -> u64 {
        let each = match self.masters() {
            MasterType::F32 => size_of::<f32>(),
            MasterType::Split => size_of::<bf16>() + size_of::<i8>(),
        };
        (each * self.elements()) as u64
    }

    /// The bytes that each part of an optimizer's state takes on a device.
    pub fn state_bytes(&self) -> u64 {
        (self.elements() / RUN * self.state().run_words() * size_of::<u32>()) as u64
    }

    /// The bytes that gradients take on a device.
    pub fn gradients_bytes(&self) -> u64 {
        let each = match self.gradients() {
            GradientType::F32 => size_of::<f32>(),
            GradientType::Bf16 => size_of::<bf16>(),
            GradientType::Released => 0,
        };
        (each * self.elements()) as u64
    }

    /// The bytes of a step into which an update converts gradients that are stored in BF16.
    pub fn converted_bytes(&self) -> usize {
        match self.gradients() {
            GradientType::Bf16 => GradientType::CONVERTED.min(self.elements()) * size_of::<f32>(),
            GradientType::F32 | GradientType::Released => 0,
        }
    }

    /// True if both are the same spec, rather than merely equal ones, with the same types of
    /// weights, state and gradients.
    pub fn same(&self, other: &Self) -> bool {
        let key = |spec: &Self| {
            let Shared { identity, masters, state, gradients, .. } = *spec.shared;
            (identity, masters, state, gradients)
        };
        key(self) == key(other)
    }

    /// The shape of each member of a stack, and the number of elements from the start of one member
    /// to the start of the next.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec, when the stack has no
    /// members, or when its members are neither all trained nor all frozen in one type.
    pub fn stack(&self, stack: &StackedParameters) -> Result<(Shape, usize)> {
        let head = self.head(stack)?;
        let second = stack.members.get(1).map(|second| self.entry(*second)).transpose()?;
        Ok((head.shape, second.map_or(0, |second| second.start - head.start)))
    }

    /// The range from the first element of the first member to the last element of the last member,
    /// and the type in which they are stored if they are frozen.
    pub(super) fn span(&self, stack: &StackedParameters) -> Result<(Range<usize>, Option<FrozenType>)> {
        let head = self.head(stack)?;
        let last = stack.members.last().map_or(Ok(head), |last| self.entry(*last))?;
        Ok((head.start..last.range().end, head.frozen))
    }

    /// The range of a stack of trained parameters; see [`ParameterSpec::span`].
    pub(super) fn trained_span(&self, stack: &StackedParameters) -> Result<Range<usize>> {
        let (span, frozen) = self.span(stack)?;
        if frozen.is_some() {
            let got = format!("`{}`, which is frozen", short(self.head(stack)?.name()));
            return Err(Error::misuse("stack", "trained parameters, which have gradients", got));
        }
        Ok(span)
    }

    /// The indices of the trained parameters of which elements lie in a range of the flat region.
    pub(crate) fn indices(&self, range: &Range<usize>) -> Range<usize> {
        let entries = self.entries();
        let first = entries.partition_point(|entry| entry.range().end <= range.start);
        first..entries.partition_point(|entry| entry.start < range.end)
    }

    /// The first member.
    pub(crate) fn head(&self, stack: &StackedParameters) -> Result<&ParameterEntry> {
        let first =
            stack.members.first().ok_or_else(|| Error::misuse("stack", "a stack of at least one parameter", "none"))?;
        let head = self.entry(*first)?;
        for member in &stack.members {
            let entry = self.entry(*member)?;
            if entry.frozen != head.frozen {
                let got = format!("`{}` and `{}`", short(&head.name), short(&entry.name));
                return Err(Error::misuse("stack", "members that are all trained, or all frozen in one type", got));
            }
        }
        Ok(head)
    }

    /// Iterates over the trained parameters of a flat region: each name, with true if all its
    /// values are finite.
    pub fn finite(&self, region: &[f32]) -> impl Iterator<Item = (String, bool)> {
        let all = |values: &[f32]| all_finite(bytemuck::cast_slice(values));
        self.entries().iter().map(move |entry| (entry.name().to_owned(), all(&region[entry.range()])))
    }

    /// Finds the first trained parameter that is not finite, lazily. `region` is each parameter's
    /// bytes, little-endian, and `prefix` precedes the name. All processors take part, because
    /// there may be many small parameters.
    pub fn finite_bytes(&self, prefix: &str, region: &[&[u8]]) -> impl Iterator<Item = (String, bool)> {
        let first = move || match have_threads() {
            true => region.par_iter().position_first(|bytes| !all_finite(bytes)),
            false => region.iter().position(|bytes| !all_finite(bytes)),
        };
        let named = move |at: usize| (format!("{prefix}{}", self.entries()[at].name()), false);
        std::iter::once_with(first).flatten().map(named)
    }
}
