//! Gradients against central finite differences of a float64 forward pass.
//!
//! The forward pass is plain Rust in float64, next to the test of its op, and does not use the
//! library. An op's inputs are parameters too (by [`leaf`]), so that every gradient can be read.
//! Its output is weighted by random coefficients and summed, so that every output element has a
//! different gradient.
//!
//! If operands are stored as BF16, the float64 pass uses the BF16 values, and the bounds follow
//! from the writes. A number written as BF16 is off by at most 2^-8 of itself, and by 2^-15 more if
//! it is an activation ([`Roundings`]).

use crate::support::{Random, relative_l2, tolerance};
use kernels::stored::Stored as _;
use std::ops::Index;
use stepscope::ops::{self, Cast, Generator};
use stepscope::parameters::{Initializer, StackedParameters};
use stepscope::tensor::Element;
use stepscope::{
    Arena, Capacity, Device, EagerStep, Gradients, Parameter, ParameterSpec, Parameters, Result, Tape, Var, bf16,
};

/// The seeds of each test's shapes and values.
pub(crate) const SEEDS: std::ops::Range<u64> = 0..6;

/// Returns extents: all ones for seed 0, the largest for seed 1, and random ones otherwise.
pub(crate) fn extents<const N: usize>(random: &mut Random, seed: u64, most: [usize; N]) -> [usize; N] {
    most.map(|most| match seed {
        0 => 1,
        1 => most,
        _ => random.extent(1, most),
    })
}

/// Returns the longest sum of an op and its gradients. Each sum runs along one extent.
pub(crate) fn longest(extents: &[usize]) -> usize {
    extents.iter().copied().max().unwrap_or(1)
}

/// Parameters of one shape (more than one for a stack), and their values one after another.
#[derive(Clone)]
pub(crate) struct ParameterValues {
    pub(crate) count: usize,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// Returns a parameter of standard normal numbers.
pub(crate) fn normal(random: &mut Random, shape: &[usize]) -> ParameterValues {
    stack(random, 1, shape)
}

/// Returns `count` such parameters.
pub(crate) fn stack(random: &mut Random, count: usize, shape: &[usize]) -> ParameterValues {
    ParameterValues { count, shape: shape.to_vec(), values: random.normals(count * shape.iter().product::<usize>()) }
}

/// The handles of the operands, in order.
pub(crate) struct Handles {
    pub(crate) stacks: Vec<StackedParameters>,
}

impl Index<usize> for Handles {
    type Output = Parameter;

    fn index(&self, number: usize) -> &Parameter {
        &self.stacks[number].members()[0]
    }
}

/// The seed and step of the random numbers that each pass of a case draws.
pub(crate) const DRAWN: (u64, u64) = (0x0123_4567_89ab_cdef, 9);

/// The relative error of a number written as BF16, compared with the f32 result for exact operands.
pub(crate) const ROUNDING: f64 = 1.0 / (1 << 8) as f64 + 1.0 / (1 << 15) as f64;

/// The number of BF16 roundings in each result, relative to the norm of the whole, exactly or by a
/// bound.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Roundings {
    /// The roundings of the output: the numbers written one after the other, up to it.
    pub(crate) forward: f64,
    /// The roundings of a gradient.
    pub(crate) backward: f64,
    /// Further roundings of a gradient, relative to the norm of the output's gradient. They arise
    /// from a rounded result that forward kept, or from sums that may cancel.
    pub(crate) kept: f64,
}

impl Roundings {
    /// An op that writes its output and its input's gradient once. Backward reads only the input.
    pub(crate) const ONCE: Self = Self { forward: 1.0, backward: 1.0, kept: 0.0 };

    /// The roundings of `tanh`, whose derivative `1 - y^2` uses the output: off by up to `2 y^2`
    /// roundings.
    pub(crate) const TANH: Self = Self { kept: 2.0, ..Self::ONCE };
}

/// Defines tests on each device, in f32 and with BF16 in memory, from functions generic in the
/// stored type.
macro_rules! stored_as_each {
    ($($(#[$meta:meta])* fn $name:ident<$S:ident>($device:ident: &Device) $body:block)+) => {$(
        $(#[$meta])*
        mod $name {
            use super::*;

            fn of<$S: stepscope::ops::Activation>($device: &stepscope::Device) $body

            $crate::support::on_each_device! {
                fn of_f32(device: &Device) { of::<f32>(device); }

                fn of_bf16(device: &Device) { of::<stepscope::bf16>(device); }
            }
        }
    )+};
}
pub(crate) use stored_as_each;

/// Returns [`leaf`] stored as S; its gradient is exact.
pub(crate) fn leaf_as<'s, S: Cast>(tape: &Tape<'_, 's>, parameter: Parameter) -> Result<Var<'s, S>> {
    tape.stored_as(&leaf(tape, parameter)?)
}

/// Returns a parameter as a variable: a copy of its weights, whose gradient becomes the
/// parameter's.
pub(crate) fn leaf<'s>(tape: &Tape<'_, 's>, parameter: Parameter) -> Result<Var<'s>> {
    let op = tape.op("leaf", [])?;
    let value = ops::copy(tape.step(), &op.weights(parameter)?)?;
    Ok(op.record(value.save(), move |back, dy| {
        let step = back.step();
        let (mut gradient, accumulate) = back.gradient(parameter)?;
        if accumulate { ops::add_assign(step, &mut gradient, &dy) } else { ops::copy_into(step, &dy, &mut gradient) }
    }))
}

/// Returns `sum of coefficients * y`, `[1, 1]`, for coefficients `[n, 1]`.
fn project<'s>(tape: &Tape<'_, 's>, y: &Var<'s>, coefficients: Parameter) -> Result<Var<'s>> {
    let op = tape.op("project", [y])?;
    let elements = y.shape().elements();
    let row = y.value().reshape([1, elements])?;
    let sum = ops::matmul(tape.step(), &row, &op.weights(coefficients)?)?;
    let y = *y;
    Ok(op.record(sum.save(), move |back, upstream| {
        let dy = ops::matmul(back.step(), &back.weights(coefficients)?, &upstream)?;
        back.add(&y, dy.reshape(y.shape())?)
    }))
}

fn layout_of(operands: &[ParameterValues]) -> (ParameterSpec, Handles) {
    let mut spec = ParameterSpec::builder();
    let mut add = |(number, operand): (usize, &ParameterValues)| {
        let (name, start) = (|member| format!("p{number}.{member}"), Initializer::Constant(0.0));
        match *operand.shape.as_slice() {
            [a] => spec.add_stack(operand.count, name, [a], start),
            [a, b] => spec.add_stack(operand.count, name, [a, b], start),
            [a, b, c] => spec.add_stack(operand.count, name, [a, b, c], start),
            [a, b, c, d] => spec.add_stack(operand.count, name, [a, b, c, d], start),
            _ => panic!("a parameter of shape {:?}", operand.shape),
        }
    };
    let stacks = operands.iter().enumerate().map(&mut add).collect();
    (spec.build().unwrap(), Handles { stacks })
}

pub(crate) fn parameters_of(device: &Device, operands: &[ParameterValues]) -> (Parameters, Handles) {
    let (spec, handles) = layout_of(operands);
    let mut parameters = Parameters::new(device, &spec, 0).unwrap();
    for (stack, operand) in handles.stacks.iter().zip(operands) {
        let each = operand.values.len() / operand.count;
        for (member, values) in stack.members().iter().zip(operand.values.chunks_exact(each)) {
            parameters.write(*member, values).unwrap();
        }
    }
    (parameters, handles)
}

fn read(gradients: &Gradients, stack: &StackedParameters) -> Vec<f32> {
    stack.members().iter().flat_map(|member| gradients.read(*member).unwrap()).collect()
}

/// A forward pass that is checked.
type Pass<'p, S> = dyn for<'t, 's> Fn(&EagerStep<'s>, &Tape<'t, 's>, &Handles) -> Result<Var<'s, S>> + 'p;

/// One check: an op, its operands, and the length of its longest sum.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) seed: u64,
    pub(crate) length: usize,
    pub(crate) operands: Vec<ParameterValues>,
    /// The largest number of elements per operand whose gradient is checked. Smaller operands are
    /// checked fully.
    pub(crate) sample: usize,
    /// `None` if nothing is stored as BF16.
    pub(crate) roundings: Option<Roundings>,
}

impl Case {
    pub(crate) fn new(name: &'static str, seed: u64, length: usize, operands: Vec<ParameterValues>) -> Self {
        Self { name, seed, length, operands, sample: usize::MAX, roundings: None }
    }

    /// Stores the operands as S, by [`leaf_as`]. f32 is not rounded.
    pub(crate) fn stored_as<S: Cast>(mut self, roundings: Roundings) -> Self {
        if <S as Element>::NAME == <bf16 as Element>::NAME {
            self.operands.iter_mut().for_each(|operand| round(&mut operand.values));
            self.roundings = Some(roundings);
        }
        self
    }

    /// Checks that `on_tape` and `reference` compute the same output, and that the gradients match
    /// the reference.
    pub(crate) fn check<S: Cast>(
        self,
        device: &Device,
        on_tape: impl for<'t, 's> Fn(&EagerStep<'s>, &Tape<'t, 's>, &Handles) -> Result<Var<'s, S>>,
        reference: impl Fn(&[Vec<f64>]) -> Vec<f64>,
    ) {
        self.check_pass(device, &on_tape, &reference);
    }

    /// Makes [`Self::check`]. It is compiled once for all cases of a stored type.
    fn check_pass<S: Cast>(self, device: &Device, on_tape: &Pass<'_, S>, reference: &dyn Fn(&[Vec<f64>]) -> Vec<f64>) {
        let Self { name, seed, length, mut operands, sample, roundings } = self;
        let mut random = Random::new(!seed);
        let mut exact: Vec<Vec<f64>> =
            operands.iter().map(|operand| operand.values.iter().map(|&value| f64::from(value)).collect()).collect();
        let expected = reference(&exact);
        let mut coefficients = random.normals(expected.len());
        if roundings.is_some() {
            round(&mut coefficients);
        }
        let Roundings { forward, backward, kept } = roundings.unwrap_or_default();
        let loss = |values: &[Vec<f64>]| -> f64 {
            reference(values).iter().zip(&coefficients).map(|(y, &c)| y * f64::from(c)).sum()
        };
        operands.push(ParameterValues { count: 1, shape: vec![expected.len(), 1], values: coefficients.clone() });
        let (mut parameters, handles) = parameters_of(device, &operands);
        if roundings.is_some() {
            parameters = parameters.with_bf16_copy().unwrap();
        }
        let mut once = Gradients::zeros(&parameters).unwrap();
        let mut twice = Gradients::zeros(&parameters).unwrap();
        let generators = [(); 4].map(|()| Generator::at(device, DRAWN.0, DRAWN.1).unwrap());
        let mut arena = Arena::builder(device).capacity(Capacity::mib(32)).build().unwrap();
        let got = arena
            .step(|step| {
                let mut output = Vec::new();
                for (pass, generator) in generators.iter().enumerate() {
                    let tape = Tape::new(step, &parameters).with_generator(generator);
                    let y = tape.to_f32(&on_tape(step, &tape, &handles)?)?;
                    output = step.read(y.value())?;
                    let loss = project(&tape, &y, handles[exact.len()])?;
                    match pass {
                        0 => tape.backward(&loss, &mut once)?,
                        1 => tape.backward_overwrite(&loss, &mut once)?,
                        _ => tape.backward(&loss, &mut twice)?,
                    }
                }
                Ok(output)
            })
            .unwrap();
        let limit = tolerance(length) + forward * ROUNDING;
        let error = relative_l2(&got, &expected);
        assert!(error <= limit, "{name}, seed {seed}: forward {error:.2e} > {limit:.2e}");
        for number in 0..exact.len() {
            let len = exact[number].len();
            let places: Vec<usize> = if len <= sample {
                (0..len).collect()
            } else {
                (0..sample).map(|_| random.extent(0, len - 1)).collect()
            };
            let wanted: Vec<f64> = places.iter().map(|&place| difference(&mut exact, number, place, &loss)).collect();
            let of_output = if kept == 0.0 {
                0.0
            } else {
                kept * norm(coefficients.iter().map(|&x| x.into())) / norm(wanted.iter().copied())
            };
            let limit = tolerance(length) + (backward + of_output) * ROUNDING;
            // Backward adds to the existing gradient, or overwrites it.
            for (gradients, times) in [(&once, 1.0), (&twice, 2.0)] {
                let all = read(gradients, &handles.stacks[number]);
                let got: Vec<f32> = places.iter().map(|&place| all[place]).collect();
                let wanted: Vec<f64> = wanted.iter().map(|wanted| times * wanted).collect();
                let error = relative_l2(&got, &wanted);
                let shape = &operands[number].shape;
                println!("{name}, parameter {number} {shape:?}, {times} times: {error:.2e} of {limit:.2e}");
                assert!(error <= limit, "{name}, seed {seed}, parameter {number} {shape:?}: {error:.2e} > {limit:.2e}");
            }
        }
    }
}

/// Rounds the values to BF16.
fn round(values: &mut [f32]) {
    values.iter_mut().for_each(|x| *x = bf16::narrow(*x).widen());
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

/// Returns the central difference of `loss` by one element of one operand.
fn difference(values: &mut [Vec<f64>], number: usize, place: usize, loss: &impl Fn(&[Vec<f64>]) -> f64) -> f64 {
    const H: f64 = 1e-5;
    let value = values[number][place];
    let mut at = |moved| {
        values[number][place] = moved;
        loss(values)
    };
    let difference = at(value + H) - at(value - H);
    values[number][place] = value;
    difference / (2.0 * H)
}
