//! Models of ops that are called on variables: an LSTM and a layer of attention, written in plain
//! lines. Captured, recomputed and eager steps have the same bits, and frozen parameters no work.

use crate::launches::launched;
use crate::support::{Random, bits, on_each_device};
use std::collections::BTreeSet;
use stepscope::parameters::{FrozenType, Initializer};
use stepscope::{
    Arena, Capacity, Device, Gradients, HostInputs, Parameter, ParameterSpec, Parameters, Result, Tape, Var,
};

const STEPS: usize = 4;
const BATCH: usize = 3;
const INPUTS: usize = 5;
const WIDTH: usize = 8;

/// The parameters of an LSTM cell and of a head of attention over its states.
#[derive(Clone, Copy)]
struct Model {
    input: Parameter,
    state: Parameter,
    bias: Parameter,
    query: Parameter,
}

/// Returns c and h after one element of the sequence.
fn cell<'s>([input, state, bias]: [&Var<'s>; 3], x: &Var<'s>, [c, h]: [Var<'s>; 2]) -> Result<[Var<'s>; 2]> {
    let gates = ((x.matmul(input)? + h.matmul(state)?)? + bias)?;
    let [i, f, g, o] = gates.chunks::<4>(-1)?;
    let c = ((f.sigmoid()? * c)? + (i.sigmoid()? * g.tanh()?)?)?;
    Ok([c, (o.sigmoid()? * c.tanh()?)?])
}

/// Returns the mean squared attention of the last state over all states.
fn attention<'s>(states: &Var<'s>, query: &Var<'s>) -> Result<Var<'s>> {
    let last = states.narrow(1, STEPS - 1..STEPS)?.matmul(query)?;
    let scores = (last.matmul(&states.transpose(1, 2)?)? / (WIDTH as f32).sqrt())?;
    let weights = (scores - scores.logsumexp(-1)?.unsqueeze(-1)?)?.exp()?;
    weights.matmul(states)?.square()?.mean(..)
}

impl Model {
    fn new(frozen: bool) -> (Self, ParameterSpec) {
        let mut spec = ParameterSpec::builder();
        let mut add = |name: &str, shape: [usize; 2]| spec.add(name, shape, Initializer::fan_in(shape[0]));
        let model = Self {
            input: add("input", [INPUTS, 4 * WIDTH]),
            state: add("state", [WIDTH, 4 * WIDTH]),
            bias: add("bias", [1, 4 * WIDTH]),
            query: add("query", [WIDTH, WIDTH]),
        };
        if frozen {
            spec.freeze(|entry| (entry.name() != "query").then_some(FrozenType::F32));
        }
        (model, spec.build().unwrap())
    }

    /// Returns the loss for x, `[BATCH, STEPS, INPUTS]`.
    fn loss<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s>, recompute: bool) -> Result<Var<'s>> {
        let [input, state, bias] = [self.input, self.state, self.bias].map(|parameter| tape.parameter(parameter));
        let (input, state, bias) = (input?, state?, bias?);
        let zero = (x.narrow(1, 0..1)?.narrow(2, 0..1)?.broadcast_to([BATCH, 1, WIDTH])? * 0.0)?.squeeze(1)?;
        let (mut carried, mut states) = ([zero, zero], Vec::new());
        for x in x.split(1, 1)? {
            let x = x.squeeze(1)?;
            carried = match recompute {
                true => tape
                    .recompute_all((input, state, bias, x, carried), |_, (input, state, bias, x, carried)| {
                        cell([&input, &state, &bias], &x, carried)
                    })?,
                false => cell([&input, &state, &bias], &x, carried)?,
            };
            states.push(carried[1]);
        }
        attention(&Var::stack(&states, 1)?, &tape.parameter(self.query)?)
    }

    fn gradients<'s>(&self, tape: Tape<'_, 's>, x: &Var<'s>, gradients: &mut Gradients, recompute: bool) -> Result<()> {
        let loss = self.loss(&tape, x, recompute)?;
        tape.backward_overwrite(&loss, gradients)
    }
}

/// Returns the gradients of the parameters that have one.
fn read(gradients: &Gradients, model: &Model, frozen: bool) -> Vec<Vec<u32>> {
    let all = [model.input, model.state, model.bias, model.query];
    all[if frozen { 3 } else { 0 }..].iter().map(|&of| bits(&gradients.read(of).unwrap())).collect()
}

fn x() -> Vec<f32> {
    Random::new(4).normals(BATCH * STEPS * INPUTS)
}

/// Returns the gradients of an eager step, and the kernels that it launched.
fn eager(device: &Device, recompute: bool, frozen: bool) -> (Vec<Vec<u32>>, BTreeSet<String>) {
    let (model, spec) = Model::new(frozen);
    let parameters = Parameters::new(device, &spec, 3).unwrap();
    let mut gradients = Gradients::zeros(&parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
    let ran = launched(|| {
        arena
            .step(|step| {
                let tape = Tape::new(step, &parameters);
                let x = tape.input(step.upload(&x(), [BATCH, STEPS, INPUTS])?);
                model.gradients(tape, &x, &mut gradients, recompute)
            })
            .unwrap();
    });
    (read(&gradients, &model, frozen), ran)
}

on_each_device! {
    fn recomputed_equals_eager(device: &Device) {
        let (want, _) = eager(device, false, false);
        assert!(want.iter().flatten().any(|&word| word != 0));
        assert_eq!(eager(device, true, false).0, want);
    }

    fn captured_equals_eager(device: &Device) {
        let (model, spec) = Model::new(false);
        let parameters = Parameters::new(device, &spec, 3).unwrap();
        let gradients = Gradients::zeros(&parameters).unwrap();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
        let values = x();
        let inputs = HostInputs::new().with(&values, [BATCH, STEPS, INPUTS]).unwrap();
        let mut captured = arena
            .capture((model, parameters, gradients), &inputs, |step, (model, parameters, gradients), slots| {
                let tape = Tape::new(step, parameters);
                let x = tape.input(slots.input::<f32>(0)?);
                model.gradients(tape, &x, gradients, false)
            })
            .unwrap();
        for _ in 0..2 {
            captured.replay(&inputs).unwrap();
        }
        let (model, _, gradients) = captured.into_state();
        assert_eq!(read(&gradients, &model, false), eager(device, false, false).0);
    }

    /// The gradient of the trained parameter is the same, and that of frozen ones is not computed.
    fn frozen_parameters_have_no_work(device: &Device) {
        let (want, _) = eager(device, false, false);
        let (got, ran) = eager(device, false, true);
        assert_eq!(got, want[3..]);
        assert!(ran.contains("sigmoid_forward_f32") || ran.contains("activation_forward_f32"), "{ran:?}");
        assert!(!ran.contains("tanh_backward_f32") && !ran.contains("activation_backward_f32"), "{ran:?}");
    }
}
