//! Tensors without elements: each has a place of its own, so that none is mistaken for its
//! neighbour.

#![forbid(unsafe_code)]

use crate::support::on_each_device;
use proptest::prelude::*;
use stepscope::capture::{Output, Record};
use stepscope::memory::Overflow;
use stepscope::ops;
use stepscope::parameters::Initializer;
use stepscope::prelude::*;
use stepscope::tensor::Source;

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

/// The results of a recomputed part of a step.
#[derive(Clone, Copy, Debug)]
enum Results {
    /// One result with elements.
    One,
    /// One result with elements, among empty results in these places.
    WithEmpty { before: usize },
}

/// Returns the gradients of two weights, both of which the recomputed closure uses.
fn gradients(device: &Device, arena: &mut Arena, results: Results, nested: bool) -> Result<[Vec<f32>; 2]> {
    let mut spec = ParameterSpec::builder();
    let [a, b] = ["a", "b"].map(|name| spec.add(name, [1, 4], Initializer::Constant(1.0)));
    let weights = Parameters::new(device, &spec.build()?, 1)?;
    let mut gradients = Gradients::zeros(&weights)?;
    arena.step(|step| {
        let tape = Tape::new(step, &weights);
        let one = tape.input(step.upload(&[1.0f32], [1, 1])?);
        let (xa, xb) = (tape.linear(&one, a, None)?, tape.linear(&one, b, None)?);
        let y = match results {
            Results::One => xa.mul(2.0)?.add(xb)?,
            Results::WithEmpty { before } => {
                let parts = tape.recompute_all((xa, xb), move |tape, (xa, xb)| {
                    let empty = xa.narrow(0, 0..0)?;
                    let other = xb.narrow(0, 1..1)?;
                    let sum = if nested {
                        tape.recompute((xa, xb, empty), |_, (xa, xb, empty)| {
                            let sum = xa.mul(2.0)?.add(xb)?;
                            Var::cat(&[empty, sum], 0)
                        })?
                    } else {
                        xa.mul(2.0)?.add(xb)?
                    };
                    Ok(match before {
                        0 => [sum, empty, other],
                        1 => [empty, sum, other],
                        _ => [empty, other, sum],
                    })
                })?;
                Var::cat(&parts, 0)?
            }
        };
        let loss = tape.sum(&y)?;
        tape.backward_overwrite(&loss, &mut gradients)
    })?;
    Ok([gradients.read(a)?, gradients.read(b)?])
}

on_each_device! {
    fn recomputed_results(device: &Device) {
        let mut checked = Arena::builder(device).capacity(Capacity::mib(1)).checked(true).build().unwrap();
        for arena in [&mut arena(device), &mut checked] {
            let expected = gradients(device, arena, Results::One, false).unwrap();
            assert_eq!(expected, [vec![2.0; 4], vec![1.0; 4]]);
            for (before, nested) in [(0, false), (1, false), (2, false), (0, true), (1, true), (2, true)] {
                let found = gradients(device, arena, Results::WithEmpty { before }, nested).unwrap();
                assert_eq!(found, expected, "{before} results before the empty one, nested: {nested}");
            }
        }
    }

    /// Empty labels do not label the inputs that follow them, of any type. The labels of other
    /// inputs are checked as before.
    fn labels_of_a_captured_step(device: &Device) {
        let mut arena = arena(device);
        let record: Record<(), [Output; 2]> = |step, (), slots| {
            let (nothing, _) = ops::cross_entropy_by(step, &slots.input::<f32>(0)?, &slots.indices(1)?, ops::LabelRules::default().weighted(1.0))?;
            let last = 3 + usize::from(slots.variant() == 3);
            let (loss, _) = ops::cross_entropy_by(step, &slots.input::<f32>(last)?, &slots.indices(last + 1)?, ops::LabelRules::default().weighted(1.0))?;
            Ok([slots.output(&nothing), slots.output(&loss)])
        };
        let inputs = |labels: &'static [u32; 2], neighbour: u64| -> Result<HostInputs<'static>> {
            const NONE: [u32; 0] = [];
            const NO: [f32; 0] = [];
            const X: [f32; 3] = [1.0, -2.0, 3.0];
            const HALVES: [bf16; 3] = [bf16::NEG_ONE; 3];
            const IDS: [u32; 3] = [7, 8, 9];
            const LOGITS: [f32; 10] = [0.5; 10];
            let inputs = HostInputs::new().with(&NO, [0, 5])?.with(&NONE, [0])?;
            let inputs = match neighbour {
                0 => inputs.with(&X, [3])?,
                1 => inputs.with(&HALVES, [3])?,
                2 => inputs.with(&IDS, [3])?,
                _ => inputs.with(&NONE, [0])?.with(&NONE, [0, 3])?,
            };
            Ok(inputs.with(&LOGITS, [2, 5])?.with(labels, [2])?.variant(neighbour))
        };
        for neighbour in 0..4 {
            let sound = inputs(&[4, 0], neighbour).unwrap();
            let mut captured = arena.capture((), &sound, record).unwrap();
            let replay = captured.replay(&sound).unwrap();
            let [nothing, loss] = *replay.outputs();
            assert_eq!((replay.read_scalar(nothing).unwrap(), replay.read_scalar(loss).unwrap() > 3.0), (0.0, true));
            let error = captured.replay(&inputs(&[0, 5], neighbour).unwrap()).err();
            assert_eq!(error, Some(Error::Label { sample: 1, label: 5, classes: 5 }), "neighbour {neighbour}");
        }
    }

    /// An output is kept until a replay is read; an empty one keeps only itself.
    fn outputs_of_a_captured_step(device: &Device) {
        let mut arena = arena(device);
        let record: Record<(), [Output; 3]> = |step, (), slots| {
            let empty = step.empty::<f32>([0, 3])?;
            let freed = ops::fill(step, [64], 1.0)?;
            let outputs = [slots.output(&empty), slots.output(&ops::sum(step, &freed)?)];
            step.free(freed);
            let next = ops::fill(step, [64], 2.0)?;
            Ok([outputs[0], outputs[1], slots.output(&next)])
        };
        let mut captured = arena.capture((), &HostInputs::new(), record).unwrap();
        // The sum, and the freed tensor's memory, which is reused.
        assert_eq!(captured.report().bytes_owned, 512);
        let replay = captured.repeat().unwrap();
        let read = replay.outputs().map(|output| replay.read(output).unwrap());
        assert_eq!(read, [vec![], vec![64.0], vec![2.0; 64]]);
    }

    /// The last place of an arena goes to an empty tensor like to any other. After it comes the
    /// pool, or an error.
    fn the_last_tensor_of_an_arena(device: &Device) {
        let capacity = Capacity::Bytes(512);
        let mut full = Arena::builder(device).capacity(capacity).build().unwrap();
        full.step(|step| {
            let (_first, _last) = (step.empty::<f32>([64])?, step.empty::<f32>([0])?);
            let error = step.empty::<u32>([2, 0]).unwrap_err();
            assert!(matches!(error, Error::ArenaFull { requested_bytes: 256, used_bytes: 512, .. }), "{error}");
            Ok(())
        })
        .unwrap();
        let mut pooled = Arena::builder(device).capacity(capacity).overflow(Overflow::pool(1 << 20)).build().unwrap();
        pooled
            .step(|step| {
                let tensors = [64, 0, 0, 0, 64, 0].map(|len| step.empty::<f32>([len]).unwrap());
                unique(&tensors.each_ref().map(|tensor| (tensor.slice().address(), tensor.shape().elements())));
                Ok(())
            })
            .unwrap();
    }
}

/// Checks that addresses differ and that no two tensors of these lengths overlap.
fn unique(tensors: &[(u64, usize)]) {
    let mut sorted = tensors.to_vec();
    sorted.sort_unstable();
    for pair in sorted.windows(2) {
        let [(first, len), (second, _)] = [pair[0], pair[1]];
        assert!(first < second && first + 4 * len as u64 <= second, "{tensors:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Tests a step and its nested scopes, whatever is freed in between.
    #[test]
    fn addresses_of_live_tensors_differ(lens in prop::collection::vec((0usize..3, any::<bool>()), 1..40), checked: bool) {
        let device = crate::support::open(DeviceKind::Emulated);
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).checked(checked).build().unwrap();
        arena.step(|step| {
            let mut live: Vec<Tensor<'_>> = Vec::new();
            for &(len, frees) in &lens {
                if frees && !live.is_empty() {
                    step.free(live.swap_remove(0));
                }
                live.push(step.empty([40 * len])?);
            }
            let outer: Vec<_> = live.iter().map(|tensor| (tensor.slice().address(), tensor.shape().elements())).collect();
            unique(&outer);
            step.scratch(|inner| {
                let live: Vec<Tensor<'_>> = lens.iter().map(|(len, _)| inner.empty([40 * len])).collect::<Result<_>>()?;
                let inner = live.iter().map(|tensor| (tensor.slice().address(), tensor.shape().elements()));
                unique(&outer.iter().copied().chain(inner).collect::<Vec<_>>());
                Ok(())
            })
        }).unwrap();
    }
}
