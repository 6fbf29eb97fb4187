//! Handles: parameters, stacks and variables belong to one spec or tape, and are refused everywhere
//! else.

#![forbid(unsafe_code)]

mod optim;
mod parameter_groups;

use crate::support::{bits, on_each_device};
use stepscope::autograd::Backward;
use stepscope::nn::{Linear, Mlp, RmsNorm, SwiGlu};
use stepscope::ops;
use stepscope::parameters::{Initializer, StackedParameters};
use stepscope::prelude::*;
use stepscope::tensor::Indices;

const BATCH: usize = 2;
const TOKENS: usize = 3;
const WIDTH: usize = 64;

/// One handle or layer of each kind.
#[derive(Clone)]
struct Handles {
    linear: Linear,
    norm: RmsNorm,
    qk_norm: StackedParameters,
    mlp: Mlp,
    swiglu: SwiGlu,
}

/// Returns handles in a spec with this many parameters before them.
fn handles(before: usize) -> (Handles, ParameterSpec) {
    let mut spec = ParameterSpec::builder();
    for number in 0..before {
        spec.add(format!("before{number}"), [WIDTH], Initializer::ONE);
    }
    let handles = Handles {
        linear: Linear::new(spec.at("linear"), WIDTH, WIDTH),
        norm: RmsNorm::new(spec.at("norm"), WIDTH),
        qk_norm: spec.add_stack(2, |part| format!("qk_norm.{part}"), [WIDTH], Initializer::ONE),
        mlp: Mlp::new(spec.at("mlp"), WIDTH, WIDTH, WIDTH),
        swiglu: SwiGlu::new(spec.at("swiglu"), WIDTH, WIDTH, WIDTH),
    };
    (handles, spec.build().unwrap())
}

/// Returns handles of a spec built alike, of one with other places, and of one whose handles go
/// beyond our end.
fn strangers() -> [Handles; 3] {
    [0, 1, 50].map(|before| handles(before).0)
}

/// Returns the operation that was refused, or `None`.
fn refused<T>(result: Result<T>) -> Option<&'static str> {
    match result {
        Ok(_) => None,
        Err(Error::Misuse { op, .. }) => Some(op),
        Err(error) => panic!("{error}"),
    }
}

/// A use of a handle in a step: on a tape, with an input of it.
type Use = for<'t, 's> fn(&Tape<'t, 's>, &Var<'s>, &Handles) -> Result<Var<'s>>;

/// Runs a custom op whose backward may be refused.
fn custom<'t, 's>(
    tape: &Tape<'t, 's>,
    x: &Var<'s>,
    backward: impl FnOnce(&mut Backward<'_, 't, 's>, Tensor<'s>) -> Result<()> + 't,
) -> Var<'s> {
    tape.op("custom", [x]).unwrap().record(*x.value(), backward)
}

/// Each use, and the op that refuses it.
const USES: [(&str, &str, Use); 20] = [
    ("weights", "reader", |tape, x, h| tape.op("reader", [x])?.weights(h.linear.weight).map(|_| *x)),
    ("linear, weight", "linear", |tape, x, h| tape.linear(x, h.linear.weight, None)),
    ("linear_residual, weight", "linear_residual", |tape, x, h| tape.linear_residual(x, h.linear.weight, None, x)),
    ("linear_gelu, weight", "linear_gelu", |tape, x, h| tape.linear_gelu(x, h.linear.weight, None)),
    ("linear_silu, weight", "linear_silu", |tape, x, h| tape.linear_silu(x, h.linear.weight, None)),
    ("linear_swiglu, weight", "linear_swiglu", |tape, x, h| tape.linear_swiglu(x, h.linear.weight, None, x)),
    ("rms_norm", "rms_norm", |tape, x, h| tape.rms_norm(x, h.norm.gain, 1e-6)),
    ("attention", "attention", |tape, x, h| {
        let qkv = ops::fill(tape.step(), [3, BATCH, TOKENS, WIDTH], 0.5)?;
        tape.attention(&tape.input(qkv), Some((&h.qk_norm, 1e-6)), &ops::AttentionConfig::new(1)).and(Ok(*x))
    }),
    ("qk_norm", "qk_norm", |tape, x, h| {
        let qkv = ops::fill(tape.step(), [3, BATCH, TOKENS, WIDTH], 0.5)?;
        tape.qk_norm(&tape.input(qkv), &h.qk_norm, 1e-6, &ops::AttentionConfig::new(1)).and(Ok(*x))
    }),
    ("Linear", "linear", |tape, x, h| h.linear.forward(tape, x)),
    ("Linear, residual", "linear_residual", |tape, x, h| h.linear.forward_residual(tape, x, x)),
    ("RmsNorm", "rms_norm", |tape, x, h| h.norm.forward(tape, x)),
    ("Mlp", "mlp_gelu", |tape, x, h| h.mlp.forward(tape, x)),
    ("Mlp, residual", "mlp_gelu", |tape, x, h| h.mlp.forward_residual(tape, x, x)),
    ("SwiGlu", "linear", |tape, x, h| h.swiglu.forward(tape, x)),
    ("Backward::weights", "custom", |tape, x, h| {
        let weight = h.linear.weight;
        Ok(custom(tape, x, move |back, _| back.weights(weight).map(drop)))
    }),
    ("Backward::gradient", "custom", |tape, x, h| {
        let bias = h.linear.bias.unwrap();
        Ok(custom(tape, x, move |back, _| {
            let step = back.step();
            ops::fill_into(step, &mut back.gradient(bias)?.0, 1.0)
        }))
    }),
    ("Parameters::lend", "linear", |tape, x, h| {
        let bias = h.linear.bias.unwrap();
        tape.linear(x, h.linear.weight, Some(bias))
    }),
    ("Backward::gradient, the last", "custom", |tape, x, h| {
        let last = h.mlp.down.bias.unwrap();
        Ok(custom(tape, x, move |back, _| back.gradient(last).map(drop)))
    }),
    ("Backward::weights, the last", "custom", |tape, x, h| {
        let last = h.mlp.down.bias.unwrap();
        Ok(custom(tape, x, move |back, _| back.weights(last).map(drop)))
    }),
];

/// Runs forward and backward of one use.
fn run(arena: &mut Arena, weights: &Parameters, gradients: &mut Gradients, used: Use, handles: &Handles) -> Result<()> {
    arena.step(|step| {
        let tape = Tape::new(step, weights);
        let x = tape.input(ops::fill(step, [BATCH, TOKENS, WIDTH], 0.5)?);
        let y = used(&tape, &x, handles)?;
        let rows = y.shape().elements() / WIDTH;
        let y = y.reshape([rows, WIDTH])?;
        let labels = step.upload_indices(&vec![1; rows], [rows])?;
        let loss = tape.cross_entropy_by(&y, labels, ops::LabelRules::default().weighted(1.0))?;
        tape.backward_overwrite(&loss, gradients)
    })
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap()
}

on_each_device! {
    /// Tests foreign parameters on a tape, forward and backward, and through layers.
    fn tapes_refuse_foreign_parameters(device: &Device) {
        let (own, spec) = handles(0);
        let weights = Parameters::new(device, &spec, 7).unwrap();
        let mut gradients = Gradients::zeros(&weights).unwrap();
        let mut arena = arena(device);
        for (name, op, used) in USES {
            run(&mut arena, &weights, &mut gradients, used, &own).unwrap_or_else(|error| panic!("{name}: {error}"));
            for (number, foreign) in strangers().iter().enumerate() {
                let got = refused(run(&mut arena, &weights, &mut gradients, used, foreign));
                assert_eq!(got, Some(op), "{name}, stranger {number}");
            }
        }
        // Only one member of a pair.
        for foreign in strangers() {
            let uses: [(&str, Linear); 2] = [
                ("bias", Linear { bias: foreign.linear.bias, ..own.linear }),
                ("weight", Linear { weight: foreign.linear.weight, ..own.linear }),
            ];
            for (name, linear) in uses {
                let mixed = Handles { linear, mlp: Mlp { up: linear, down: own.mlp.down }, ..own.clone() };
                for (used, op, run_it) in [USES[9], USES[10], USES[12]] {
                    let got = refused(run(&mut arena, &weights, &mut gradients, run_it, &mixed));
                    assert_eq!(got, Some(op), "{used}, {name}");
                }
            }
        }
    }

    /// Reads and writes by handle.
    fn buffers_refuse_foreign_parameters(device: &Device) {
        let (own, spec) = handles(0);
        let mut weights = Parameters::new(device, &spec, 7).unwrap();
        let mut gradients = Gradients::zeros(&weights).unwrap();
        let before = weights.sha256().unwrap();
        let mut arena = arena(device);
        let mut check = |handle: Parameter| {
            let values = [0.25; WIDTH];
            let stepped = arena.step(|step| {
                Ok([refused(weights.lend(step, handle)), refused(gradients.lend_mut(step, handle))])
            });
            let [lent, lent_mut] = stepped.unwrap();
            let read = [refused(spec.entry(handle)), refused(weights.read(handle)), refused(gradients.read(handle))];
            [&read[..], &[lent, lent_mut, refused(weights.write(handle, &values))]].concat()
        };
        for foreign in strangers() {
            assert_eq!(check(foreign.norm.gain), [Some("parameter"); 6]);
        }
        assert_eq!(check(own.norm.gain), [None; 6]);
        let gain = weights.read(own.norm.gain).unwrap();
        assert_eq!(gain, [0.25; WIDTH]);
        weights.write(own.norm.gain, &[1.0; WIDTH]).unwrap();
        assert_eq!(weights.sha256().unwrap(), before, "a refused write changed the weights");
        assert_eq!(refused(weights.write(own.norm.gain, &[1.0; WIDTH + 1])), Some("write"));
    }

    /// Clones of a spec are equal: a model may have several sets of weights.
    fn handles_work_for_cloned_specs(device: &Device) {
        let (own, spec) = handles(0);
        let [one, other] = [&spec, &spec.clone()].map(|spec| Parameters::new(device, spec, 7).unwrap());
        let read = |weights: &Parameters| bits(&weights.read(own.linear.weight).unwrap());
        assert_eq!(read(&one), read(&other));
        let mut gradients = Gradients::zeros(&one).unwrap();
        run(&mut arena(device), &other, &mut gradients, USES[1].2, &own).unwrap();
        assert_ne!(own.linear.weight, handles(0).0.linear.weight, "a handle of an equal spec must differ");
    }

    /// Every op, in each place where it takes a variable, and the backward pass.
    fn foreign_variables_are_refused(device: &Device) {
        type Op = for<'t, 's> fn(&Tape<'t, 's>, &Var<'s>, &Var<'s>, &Handles) -> Result<Var<'s>>;
        const OPS: [(&str, Op); 19] = [
            ("add", |_, own, x, _| own.add(x)),
            ("add", |_, own, x, _| x.add(own)),
            ("sum", |tape, _, x, _| tape.sum(x)),
            ("mean", |tape, _, x, _| tape.mean(x)),
            ("mean_tokens", |tape, _, x, _| tape.mean_tokens(x)),
            ("linear", |tape, _, x, h| tape.linear(x, h.linear.weight, None)),
            ("linear_gelu", |tape, _, x, h| tape.linear_gelu(x, h.linear.weight, None)),
            ("mlp_gelu", |tape, _, x, h| h.mlp.forward(tape, x)),
            ("mlp_gelu", |tape, own, x, h| h.mlp.forward_residual(tape, own, x)),
            ("linear_silu", |tape, _, x, h| tape.linear_silu(x, h.linear.weight, None)),
            ("linear_swiglu", |tape, own, x, h| tape.linear_swiglu(x, h.linear.weight, None, own)),
            ("linear_swiglu", |tape, own, x, h| tape.linear_swiglu(own, h.linear.weight, None, x)),
            ("linear_residual", |tape, own, x, h| tape.linear_residual(x, h.linear.weight, None, own)),
            ("linear_residual", |tape, own, x, h| tape.linear_residual(own, h.linear.weight, None, x)),
            ("rms_norm", |tape, _, x, h| tape.rms_norm(x, h.norm.gain, 1e-6)),
            ("attention", |tape, _, x, h| tape.attention(x, Some((&h.qk_norm, 1e-6)), &ops::AttentionConfig::new(1))),
            ("qk_norm", |tape, _, x, h| tape.qk_norm(x, &h.qk_norm, 1e-6, &ops::AttentionConfig::new(1))),
            ("rotary", |tape, _, x, _| tape.rotary(x, ops::Rotary::default(), &ops::AttentionConfig::new(1))),
            ("cross_entropy", |tape, _, x, _| {
                let labels = Indices::on_device(tape.step().empty([BATCH])?.save());
                tape.cross_entropy_by(x, labels, ops::LabelRules::default().weighted(1.0))
            }),
        ];
        let (own, spec) = handles(0);
        let weights = Parameters::new(device, &spec, 7).unwrap();
        let mut gradients = Gradients::zeros(&weights).unwrap();
        arena(device).step(|step| {
            for (name, op) in OPS {
                let (tape, other) = (Tape::new(step, &weights), Tape::new(step, &weights));
                let x = ops::fill(step, [BATCH, TOKENS, WIDTH], 0.5)?.save();
                let (own_x, foreign) = (tape.input(x), other.input(x));
                let made = foreign.tanh()?;
                for foreign in [foreign, made] {
                    assert_eq!(refused(op(&tape, &own_x, &foreign, &own)), Some(name));
                }
            }
            // A variable outlives its tape's backward pass, and is still refused by other tapes.
            let dead = Tape::new(step, &weights);
            let loss = dead.parameter(own.norm.gain)?.mean(..)?;
            dead.backward(&loss, &mut gradients)?;
            for afresh in [false, true] {
                let tape = Tape::new(step, &weights);
                let backward = if afresh { Tape::backward_overwrite } else { Tape::backward };
                assert_eq!(refused(backward(tape, &loss, &mut gradients)), Some("backward"));
            }
            Ok(())
        }).unwrap();
    }

    /// Gradients, moments and models of other specs.
    fn objects_of_another_spec_are_refused(device: &Device) {
        let ((own, spec), (_, alike)) = (handles(0), handles(0));
        let [mut weights, mut others] = [&spec, &alike].map(|spec| Parameters::new(device, spec, 7).unwrap());
        let [mut gradients, mut others_gradients] = [&weights, &others].map(|weights| Gradients::zeros(weights).unwrap());
        let mut optimizer = Optimizer::new(&weights, AdamW::default()).unwrap();
        let mut arena = arena(device);
        assert_eq!(refused(run(&mut arena, &weights, &mut others_gradients, USES[1].2, &own)), Some("backward"));
        arena.step(|step| {
            let ticket = optimizer.advance()?;
            assert_eq!(refused(optimizer.apply(ticket, step, &mut others, &gradients)), Some("adamw"));
            let ticket = optimizer.advance()?;
            assert_eq!(refused(optimizer.apply(ticket, step, &mut weights, &others_gradients)), Some("adamw"));
            let ticket = optimizer.advance()?;
            optimizer.apply(ticket, step, &mut weights, &gradients)
        }).unwrap();
        assert_eq!(optimizer.updates(), 1, "a refused update must not count");

        // An equal spec on another device.
        let elsewhere = crate::support::open(device.description().kind);
        let far = Parameters::new(&elsewhere, &spec, 7).unwrap();
        let mut far_gradients = Gradients::zeros(&far).unwrap();
        assert_eq!(refused(run(&mut arena, &weights, &mut far_gradients, USES[1].2, &own)), Some("lend"));
        assert_eq!(refused(run(&mut arena, &far, &mut gradients, USES[1].2, &own)), Some("linear"));
    }

    /// Stacks without a member are refused, and nothing panics.
    fn an_empty_stack_is_refused(device: &Device) {
        let mut spec = ParameterSpec::builder();
        spec.add("gain", [WIDTH], Initializer::ONE);
        let none = spec.add_stack(0, |_| unreachable!(), [WIDTH, WIDTH], Initializer::ONE);
        let weights = Parameters::new(device, &spec.build().unwrap(), 7).unwrap();
        arena(device).step(|step| {
            let tape = Tape::new(step, &weights);
            let qkv = tape.input(ops::fill(step, [3, BATCH, TOKENS, WIDTH], 0.5)?);
            assert_eq!(refused(tape.attention(&qkv, Some((&none, 1e-6)), &ops::AttentionConfig::new(1))), Some("attention"));
            assert_eq!(refused(tape.qk_norm(&qkv, &none, 1e-6, &ops::AttentionConfig::new(1))), Some("qk_norm"));
            Ok(())
        }).unwrap();
    }
}
