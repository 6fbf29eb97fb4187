//! Random expressions: a few variables, ops of them and of their results, and the gradients.
//!
//! An expression begins with leaves: trained parameters, a frozen one and an input. Each further
//! value is an op of one or two values, which are chosen among all. The trace has each op as a
//! formula that a Python program evaluates, with its operands `a` and `b`:
//!
//! | name | contents |
//! |---|---|
//! | `SEED.in.NUMBER` | a leaf |
//! | `SEED.in.weights` | the weights of the last value's elements in the loss |
//! | `SEED.out.NUMBER` | a value, widened to f32 |
//! | `SEED.out.dNUMBER` | the gradient of a leaf |
//! | note `graph SEED` | a line for each value: its formula, then the numbers of its operands |
//! | note `type SEED` | the stored type |
//!
//! Invariant: a seed and its first N ops give the same expression for any larger number of ops.

use crate::case::Traced;
use crate::support::Random;
use crate::tensor_file::TensorFile;
use stepscope::ops::{Cast, GemmElement};
use stepscope::parameters::{FrozenType, Initializer};
use stepscope::tensor::{Element, Shape};
use stepscope::{
    Arena, Capacity, Device, EagerStep, Gradients, Parameter, ParameterSpec, Parameters, Result, Tape, Var, bf16,
};

mod makers;

/// The largest extent of a leaf.
const EXTENT: usize = 5;
/// The largest element of a value. An op with a larger one is taken back.
const LARGEST: f32 = 16.0;
/// The largest number of elements of a value.
const ELEMENTS: usize = 1500;

/// A value of an expression, with the limits of its elements.
#[derive(Clone, Copy)]
struct Value<'s, S: Traced> {
    var: Var<'s, S>,
    least: f32,
    most: f32,
    /// The smallest magnitude.
    nearest: f32,
}

/// An op that was made: its result, its formula in Python, and the numbers of its operands.
type Made<'s, S> = (Var<'s, S>, String, Vec<usize>);

/// A growing expression.
struct Graph<'g, 's, S: Traced> {
    step: &'g EagerStep<'s>,
    random: Random,
    values: Vec<Value<'s, S>>,
    lines: Vec<String>,
}

impl<'s, S: Traced> Graph<'_, 's, S> {
    /// Adds a value unless an element is too large or not a number, or there are too many.
    fn push(&mut self, (var, formula, operands): Made<'s, S>) -> Result<bool> {
        if var.shape().elements() > ELEMENTS {
            return Ok(false);
        }
        let elements: Vec<f32> = self.step.read(var.value())?.into_iter().map(S::widen).collect();
        if elements.is_empty() || elements.iter().any(|x| !x.is_finite() || x.abs() > LARGEST) {
            return Ok(false);
        }
        let fold = |f: fn(f32, f32) -> f32| elements.iter().copied().reduce(f).unwrap_or(0.0);
        let nearest = elements.iter().fold(f32::INFINITY, |nearest, x| nearest.min(x.abs()));
        self.values.push(Value { var, least: fold(f32::min), most: fold(f32::max), nearest });
        let numbers: String = operands.iter().map(|number| format!(" {number}")).collect();
        self.lines.push(format!("{formula};{numbers}"));
        Ok(true)
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound as u32) as usize
    }

    fn chance(&mut self) -> bool {
        self.below(2) == 1
    }

    /// Returns a value. The last ones are likelier, so that expressions are deep.
    fn pick(&mut self) -> usize {
        let count = self.values.len();
        if self.chance() { count - 1 - self.below(count.min(3)) } else { self.below(count) }
    }

    /// Returns a value among those that fit, if there is one.
    fn pick_if(&mut self, fits: impl Fn(&Value<'s, S>) -> bool) -> Option<usize> {
        let fitting: Vec<usize> = (0..self.values.len()).filter(|&number| fits(&self.values[number])).collect();
        if fitting.is_empty() { None } else { Some(fitting[self.below(fitting.len())]) }
    }

    fn shape(&self, number: usize) -> Vec<usize> {
        self.values[number].var.shape().extents().to_vec()
    }
}

/// The leaves of an expression.
struct Leaves {
    trained: Vec<Parameter>,
    frozen: Parameter,
    spec: ParameterSpec,
}

impl Leaves {
    fn new(random: &mut Random) -> Result<Self> {
        let mut spec = ParameterSpec::builder();
        let count = random.extent(1, 3);
        let mut add = |name: String, random: &mut Random| {
            let start = Initializer::Normal { deviation: 1.0 };
            let [a, b, c] = [(); 3].map(|()| random.extent(1, EXTENT));
            match random.below(4) {
                0 => spec.add(name, [a], start),
                1 => spec.add(name, [a, b, c], start),
                _ => spec.add(name, [a, b], start),
            }
        };
        let trained = (0..count).map(|number| add(format!("trained{number}"), random)).collect();
        let frozen = add("frozen".into(), random);
        spec.freeze(|entry| (entry.name() == "frozen").then_some(FrozenType::F32));
        Ok(Self { trained, frozen, spec: spec.build()? })
    }
}

/// Traces the expressions of seeds, each with up to `ops` ops.
pub(crate) fn trace(device: &Device, file: &mut TensorFile, graphs: u64, ops: usize) -> Result<()> {
    let mut arena = Arena::builder(device).capacity(Capacity::mib(64)).build()?;
    for seed in 0..graphs {
        match seed % 4 {
            3 => trace_one::<bf16>(device, &mut arena, file, seed, ops)?,
            _ => trace_one::<f32>(device, &mut arena, file, seed, ops)?,
        }
    }
    Ok(())
}

fn trace_one<S: Traced + Cast + GemmElement<S>>(
    device: &Device,
    arena: &mut Arena,
    file: &mut TensorFile,
    seed: u64,
    ops: usize,
) -> Result<()> {
    let mut random = Random::new(seed);
    let leaves = Leaves::new(&mut random)?;
    let parameters = Parameters::new(device, &leaves.spec, seed)?;
    let mut gradients = Gradients::zeros(&parameters)?;
    let lines = arena.step(|step| {
        let tape = Tape::new(step, &parameters);
        let mut graph = Graph::<S> { step, random, values: Vec::new(), lines: Vec::new() };
        for parameter in leaves.trained.iter().chain([&leaves.frozen]) {
            let leaf = tape.stored_as::<S>(&tape.parameter(*parameter)?)?;
            graph.push((leaf, "leaf".into(), Vec::new()))?;
        }
        let shape: Shape = [graph.random.extent(1, EXTENT)].into();
        let input: Vec<S> = graph.random.normals(shape.elements()).into_iter().map(S::narrow).collect();
        graph.push((tape.input(step.upload(&input, shape)?), "leaf".into(), Vec::new()))?;

        let all = graph.values.len() + ops;
        while graph.values.len() < all {
            if let Some(made) = makers::make(&mut graph)? {
                graph.push(made)?;
            }
        }
        let Graph { mut random, values, lines, .. } = graph;
        for (number, (value, line)) in values.iter().zip(&lines).enumerate() {
            let way = if line.starts_with("leaf") { "in" } else { "out" };
            add(file, step, seed, &format!("{way}.{number}"), &value.var)?;
        }
        let last = tape.to_f32(&values[values.len() - 1].var)?;
        let weights = random.normals(last.shape().elements());
        let weights = tape.input(step.upload(&weights, last.shape())?);
        add(file, step, seed, "in.weights", &weights)?;
        let loss = (last * weights)?.sum(..)?;
        if loss.wants_gradient() {
            tape.backward_overwrite(&loss, &mut gradients)?;
        }
        Ok(lines)
    })?;
    for (number, parameter) in leaves.trained.iter().enumerate() {
        let gradient = gradients.read(*parameter)?;
        file.add(format!("{seed}.out.d{number}"), [gradient.len()], &gradient);
    }
    file.note(format!("graph {seed}"), lines.join("\n"));
    file.note(format!("type {seed}"), <S as Element>::NAME);
    Ok(())
}

/// Adds a variable's elements, widened to f32.
fn add<'s, S: Traced>(
    file: &mut TensorFile,
    step: &EagerStep<'s>,
    seed: u64,
    name: &str,
    var: &Var<'s, S>,
) -> Result<()> {
    let values: Vec<f32> = step.read(var.value())?.into_iter().map(S::widen).collect();
    file.add(format!("{seed}.{name}"), var.shape(), &values);
    Ok(())
}
