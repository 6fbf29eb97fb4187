//! Gradients against central finite differences of a float64 forward pass.
//!
//! The forward pass is plain Rust in float64, beside the test of its op, and knows nothing of the library. An op's inputs are parameters
//! too (by [`leaf`]), so that every gradient can be read; its output is weighted by random coefficients and summed, so that every element
//! of it has another gradient.

use crate::support::{Random, relative_l2, tolerance};
use std::ops::Index;
use stepscope::ops::Generator;
use stepscope::{
    Arena, Capacity, Device, Eager, Gradients, Initializer, Layout, Parameter, Parameters, Result, Stack, Tape, Var,
    ops,
};

/// Seeds of each test's shapes and values.
pub(crate) const SEEDS: std::ops::Range<u64> = 0..6;

/// Shapes: all ones for seed 0, the largest for seed 1, else anything between.
pub(crate) fn extents<const N: usize>(random: &mut Random, seed: u64, most: [usize; N]) -> [usize; N] {
    most.map(|most| match seed {
        0 => 1,
        1 => most,
        _ => random.extent(1, most),
    })
}

/// The longest of an op's sums and its gradients', which go along one extent each.
pub(crate) fn longest(extents: &[usize]) -> usize {
    extents.iter().copied().max().unwrap_or(1)
}

/// Parameters of one shape (more than one for a stack), and what stands in them, one after another.
#[derive(Clone)]
pub(crate) struct ParameterValues {
    pub(crate) count: usize,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// A parameter of standard normal numbers.
pub(crate) fn normal(random: &mut Random, shape: &[usize]) -> ParameterValues {
    stack(random, 1, shape)
}

/// `count` of them.
pub(crate) fn stack(random: &mut Random, count: usize, shape: &[usize]) -> ParameterValues {
    ParameterValues { count, shape: shape.to_vec(), values: random.normals(count * shape.iter().product::<usize>()) }
}

/// The handles of the operands, in order.
pub(crate) struct Handles {
    pub(crate) stacks: Vec<Stack>,
}

impl Index<usize> for Handles {
    type Output = Parameter;

    fn index(&self, number: usize) -> &Parameter {
        &self.stacks[number].members()[0]
    }
}

/// Seed and step of the random numbers that each pass of a case draws.
pub(crate) const DRAWN: (u64, u64) = (0x0123_4567_89ab_cdef, 9);

/// A parameter as a variable: a copy of its weights, whose gradient becomes the parameter's.
pub(crate) fn leaf<'s>(tape: &Tape<'_, 's>, parameter: Parameter) -> Result<Var<'s>> {
    let op = tape.op("leaf", [])?;
    let value = ops::copy(tape.step(), &op.weights(parameter)?)?;
    Ok(op.record(value.save(), move |back, dy| {
        let step = back.step();
        let (mut gradient, accumulate) = back.gradient(parameter)?;
        if accumulate { ops::add_assign(step, &mut gradient, &dy) } else { ops::copy_into(step, &dy, &mut gradient) }
    }))
}

/// `sum of coefficients * y`, `[1, 1]`, for coefficients `[n, 1]`.
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

fn layout_of(operands: &[ParameterValues]) -> (Layout, Handles) {
    let mut layout = Layout::builder();
    let mut add = |(number, operand): (usize, &ParameterValues)| {
        let (name, start) = (|member| format!("p{number}.{member}"), Initializer::Constant(0.0));
        match *operand.shape.as_slice() {
            [a] => layout.add_stack(operand.count, name, [a], start),
            [a, b] => layout.add_stack(operand.count, name, [a, b], start),
            [a, b, c] => layout.add_stack(operand.count, name, [a, b, c], start),
            _ => panic!("a parameter of shape {:?}", operand.shape),
        }
    };
    let stacks = operands.iter().enumerate().map(&mut add).collect();
    (layout.build().unwrap(), Handles { stacks })
}

pub(crate) fn parameters_of(device: &Device, operands: &[ParameterValues]) -> (Parameters, Handles) {
    let (layout, handles) = layout_of(operands);
    let mut parameters = Parameters::new(device, &layout, 0).unwrap();
    for (stack, operand) in handles.stacks.iter().zip(operands) {
        let each = operand.values.len() / operand.count;
        for (member, values) in stack.members().iter().zip(operand.values.chunks_exact(each)) {
            parameters.write(*member, values).unwrap();
        }
    }
    (parameters, handles)
}

fn read(gradients: &Gradients, stack: &Stack) -> Vec<f32> {
    stack.members().iter().flat_map(|member| gradients.read(*member).unwrap()).collect()
}

/// One check: an op, its operands, the length of its longest sum.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) seed: u64,
    pub(crate) length: usize,
    pub(crate) operands: Vec<ParameterValues>,
    /// The most elements of an operand whose gradient is checked; every one when there are fewer.
    pub(crate) sample: usize,
}

impl Case {
    pub(crate) fn new(name: &'static str, seed: u64, length: usize, operands: Vec<ParameterValues>) -> Self {
        Self { name, seed, length, operands, sample: usize::MAX }
    }

    /// Fails unless `on_tape` and `reference` compute the same output, and the gradients are those of the reference.
    pub(crate) fn check(
        self,
        device: &Device,
        on_tape: impl for<'t, 's> Fn(&Eager<'s>, &Tape<'t, 's>, &Handles) -> Result<Var<'s>>,
        reference: impl Fn(&[Vec<f64>]) -> Vec<f64>,
    ) {
        let Self { name, seed, length, mut operands, sample } = self;
        let mut random = Random::new(!seed);
        let mut exact: Vec<Vec<f64>> =
            operands.iter().map(|operand| operand.values.iter().map(|&value| f64::from(value)).collect()).collect();
        let expected = reference(&exact);
        let coefficients = random.normals(expected.len());
        let loss = |values: &[Vec<f64>]| -> f64 {
            reference(values).iter().zip(&coefficients).map(|(y, &c)| y * f64::from(c)).sum()
        };
        operands.push(ParameterValues { count: 1, shape: vec![expected.len(), 1], values: coefficients.clone() });
        let (parameters, handles) = parameters_of(device, &operands);
        let mut once = Gradients::zeros(&parameters).unwrap();
        let mut twice = Gradients::zeros(&parameters).unwrap();
        let generators = [(); 4].map(|()| Generator::at(device, DRAWN.0, DRAWN.1).unwrap());
        let mut arena = Arena::builder(device).capacity(Capacity::mib(32)).build().unwrap();
        let got = arena
            .step(|step| {
                let mut output = Vec::new();
                for (pass, generator) in generators.iter().enumerate() {
                    let tape = Tape::new(step, &parameters).with_generator(generator);
                    let y = on_tape(step, &tape, &handles)?;
                    output = step.read(y.value())?;
                    let loss = project(&tape, &y, handles[exact.len()])?;
                    match pass {
                        0 => tape.backward(&loss, &mut once)?,
                        1 => tape.backward_afresh(&loss, &mut once)?,
                        _ => tape.backward(&loss, &mut twice)?,
                    }
                }
                Ok(output)
            })
            .unwrap();
        let limit = tolerance(length);
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
            // Backward adds to what is there, or overwrites it.
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

/// The central difference of `loss` by one element of one operand.
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
