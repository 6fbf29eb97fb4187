//! Checks the gradients of a backward pass by finite differences, for user-defined ops and layers.
//!
//! Invariant: both sides of the comparison come only from the given function. This module assumes
//! nothing about it.

#![forbid(unsafe_code)]

use cuda_std::float_mode;
use stepscope_core::{
    Arena, Error, Gradients, Initializer, Parameter, ParameterSpec, Parameters, Result, Shape, SplitMix64, Tape, Var,
    ops,
};

/// The settings for comparing the gradients of a function with finite differences, as
/// `torch.autograd.gradcheck` does.
///
/// The function y = f(x0, x1, ..) may be any composition of tape ops. The loss is L = sum c y with
/// random c, summed in f64. For an element x of an input the difference is
/// `(8 (L(x + h) - L(x - h)) - (L(x + 2h) - L(x - 2h))) / 12 h`. Its error falls with h^4. The step
/// h is `step`, times |x| if |x| is above one. The forward pass runs four times for each element,
/// in f32. Use small inputs, away from points where f has no derivative.
///
/// ```
/// # use stepscope::check::GradCheck;
/// # use stepscope::prelude::*;
/// # fn main() -> Result<()> {
/// let device = Device::open(DeviceKind::Emulated)?;
/// let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
/// let (x, y) = ([0.3, -1.2, 0.8], [0.5, 0.1, -2.0]);
/// GradCheck::default().run(&mut arena, &[(&x, [3].into()), (&y, [3].into())], |tape, inputs| {
///     inputs[0].tanh()?.mul(&inputs[1])
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradCheck {
    /// The step of the differences (default 2^-5).
    pub step: f32,
    /// The largest allowed difference (default 1e-3), relative to the input's largest gradient or
    /// to one, whichever is larger.
    pub tolerance: f64,
    /// The largest number of elements tried per input (default 64). `seed` chooses the elements of
    /// a larger input.
    pub elements: usize,
    /// The seed of c and of the chosen elements.
    pub seed: u64,
}

impl Default for GradCheck {
    fn default() -> Self {
        Self { step: 2f32.powi(-5), tolerance: 1e-3, elements: 64, seed: 7 }
    }
}

impl GradCheck {
    /// Compares the gradients of all inputs. Returns the largest relative difference (see
    /// [`GradCheck::tolerance`]).
    ///
    /// # Errors
    /// [`Error::Gradient`], which names the first element that differs by more than the tolerance.
    /// [`Error::Misuse`] for an input whose number of values differs from its shape.
    pub fn run(
        &self,
        arena: &mut Arena,
        inputs: &[(&[f32], Shape)],
        function: impl for<'t, 's> Fn(&Tape<'t, 's>, &[Var<'s>]) -> Result<Var<'s>>,
    ) -> Result<f64> {
        float_mode::in_default(|| self.run_all(arena, inputs, function))
    }

    fn run_all(
        &self,
        arena: &mut Arena,
        inputs: &[(&[f32], Shape)],
        function: impl for<'t, 's> Fn(&Tape<'t, 's>, &[Var<'s>]) -> Result<Var<'s>>,
    ) -> Result<f64> {
        let mut checked = Checked::new(arena, inputs, &function)?;
        let outputs = checked.forward()?.len();
        let mut random = SplitMix64::new(self.seed);
        let factors: Vec<f32> = (0..outputs).map(|_| 2.0 * random.unit() - 1.0).collect();
        let gradients = checked.gradients(&factors)?;
        let mut worst = 0f64;
        for (input, gradient) in gradients.iter().enumerate() {
            let largest = gradient.iter().fold(1f64, |largest, x| largest.max(f64::from(x.abs())));
            for element in self.chosen(gradient.len(), &mut random) {
                let difference = checked.difference(input, element, self.step, &factors)?;
                let share = (f64::from(gradient[element]) - difference).abs() / largest;
                // Not `share > tolerance`, because a NaN must fail.
                let agree = share <= self.tolerance;
                if !agree {
                    let (backward, tolerance) = (gradient[element], self.tolerance * largest);
                    return Err(Error::Gradient { input, element, backward, difference, tolerance });
                }
                worst = worst.max(share);
            }
        }
        Ok(worst)
    }

    /// The elements of an input to try.
    fn chosen(&self, elements: usize, random: &mut SplitMix64) -> Vec<usize> {
        if elements <= self.elements {
            return (0..elements).collect();
        }
        (0..self.elements).map(|_| (random.next_u64() % elements as u64) as usize).collect()
    }
}

/// A function, and its inputs as parameters.
struct Checked<'a, F> {
    arena: &'a mut Arena,
    function: &'a F,
    inputs: Vec<Parameter>,
    values: Parameters,
}

impl<'a, F> Checked<'a, F>
where
    F: for<'t, 's> Fn(&Tape<'t, 's>, &[Var<'s>]) -> Result<Var<'s>>,
{
    fn new(arena: &'a mut Arena, inputs: &[(&[f32], Shape)], function: &'a F) -> Result<Self> {
        let mut spec = ParameterSpec::builder();
        let place = |(number, &(_, shape)): (usize, &(&[f32], Shape))| {
            spec.add(format!("input {number}"), shape, Initializer::Constant(0.0))
        };
        let places: Vec<_> = inputs.iter().enumerate().map(place).collect();
        let mut values = Parameters::new(arena.device(), &spec.build()?, 0)?;
        for (&place, &(given, _)) in places.iter().zip(inputs) {
            values.write(place, given)?;
        }
        Ok(Self { arena, function, inputs: places, values })
    }

    /// The elements of y.
    fn forward(&mut self) -> Result<Vec<f32>> {
        let Self { arena, function, inputs, values } = self;
        arena.step(|step| {
            let tape = Tape::new(step, values);
            let y = function(&tape, &leaves(&tape, inputs)?)?;
            step.read(y.value())
        })
    }

    /// The gradients of L with respect to the inputs.
    fn gradients(&mut self, factors: &[f32]) -> Result<Vec<Vec<f32>>> {
        let Self { arena, function, inputs, values } = self;
        let mut gradients = Gradients::zeros(values)?;
        arena.step(|step| {
            let tape = Tape::new(step, values);
            let y = function(&tape, &leaves(&tape, inputs)?)?;
            let factors = step.upload(factors, y.shape())?;
            let value = ops::fill(step, [1], 0.0)?.save();
            let loss = tape.op("gradcheck", [&y])?.record_scalar(value, &y, move |_| Ok(factors))?;
            tape.backward(&loss, &mut gradients)
        })?;
        inputs.iter().map(|&input| gradients.read(input)).collect()
    }

    /// The derivative of L with respect to an element, by finite differences.
    fn difference(&mut self, input: usize, element: usize, step: f32, factors: &[f32]) -> Result<f64> {
        let place = self.inputs[input];
        let given = self.values.read(place)?;
        let x = given[element];
        let h = step * x.abs().max(1.0);
        let mut loss = |steps: f32| -> Result<(f64, f64)> {
            let mut moved = given.clone();
            moved[element] = x + steps * h;
            self.values.write(place, &moved)?;
            let y = self.forward()?;
            let sum = y.iter().zip(factors).map(|(&y, &factor)| f64::from(y) * f64::from(factor)).sum();
            Ok((sum, f64::from(moved[element])))
        };
        // Divides by the actual change of x, because x + h is rounded.
        let mut slope = |steps: f32| -> Result<f64> {
            let ((above, high), (below, low)) = (loss(steps)?, loss(-steps)?);
            Ok((above - below) / (high - low))
        };
        let (near, far) = (slope(1.0)?, slope(2.0)?);
        self.values.write(place, &given)?;
        Ok((4.0 * near - far) / 3.0)
    }
}

/// Puts the inputs on the tape as variables that want gradients.
fn leaves<'s>(tape: &Tape<'_, 's>, inputs: &[Parameter]) -> Result<Vec<Var<'s>>> {
    let leaf = |&input: &Parameter| {
        let op = tape.op("input", [])?;
        let value = ops::copy(tape.step(), &op.weights(input)?)?.save();
        Ok(op.record(value, move |back, gradient| {
            let step = back.step();
            let (mut sum, accumulate) = back.gradient_uninit(input)?;
            if accumulate {
                ops::add_assign(step, &mut sum, &gradient)
            } else {
                ops::copy_into(step, &gradient, &mut sum)
            }
        }))
    };
    inputs.iter().map(leaf).collect()
}
