//! Captured steps on each device: they give the same bits as eager steps, use memory of their own,
//! and reach nothing else.
//!
//! Invariant: every refusal leaves the arena and the device usable. Each test runs a step
//! afterwards to show it. Driver faults during a capture are tested in
//! `tests/capture/capture_faults.rs`.

mod memory;
mod plan;

use crate::overrun::one_too_far;
use crate::support::{Random, bits, like, on_each_device};
use std::panic::{AssertUnwindSafe, catch_unwind};
use stepscope::capture::{CaptureInputs, Captured, Output, Record};
use stepscope::check::faults::{Call, FaultPlan};
use stepscope::memory::{Growth, Overflow};
use stepscope::optim::UpdateTicket;
use stepscope::parameters::Initializer;
use stepscope::tensor::{Indices, Saved, Target};
use stepscope::{
    AdamW, Arena, Buffer, Capacity, Device, DeviceKind, Error, Gradients, HostInputs, Optimizer, Parameter,
    ParameterSpec, Parameters, Result, Step, Tape, ops,
};

const ROWS: usize = 5;
const COLS: usize = 7;
const CLASSES: usize = 3;

/// A small classifier with its gradients and optimizer.
struct Model {
    w: Parameter,
    b: Parameter,
    weights: Parameters,
    gradients: Gradients,
    adamw: Optimizer<AdamW>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [COLS, CLASSES], Initializer::fan_in(COLS));
        let b = spec.add("b", [CLASSES], Initializer::Constant(0.1));
        let weights = Parameters::new(device, &spec.build().unwrap(), 3).unwrap();
        let gradients = Gradients::zeros(&weights).unwrap();
        let config = AdamW { learning_rate: 0.05, clip: Some(1.0), ..AdamW::default() };
        let adamw = Optimizer::new(&weights, config).unwrap();
        Self { w, b, weights, gradients, adamw }
    }

    /// Runs forward, backward, clipping and the update, and returns the mean loss.
    fn train<'s>(
        &mut self,
        ticket: UpdateTicket,
        step: &Step<'s>,
        x: Saved<'s>,
        labels: Indices<'s>,
    ) -> Result<Saved<'s>> {
        self.gradients.zero(step)?;
        let tape = Tape::new(step, &self.weights);
        let logits = tape.linear(&tape.input(x), self.w, Some(self.b))?;
        let loss = tape.cross_entropy(&logits, labels)?;
        tape.backward(&loss, &mut self.gradients)?;
        self.adamw.apply(ticket, step, &mut self.weights, &self.gradients)?;
        Ok(*loss.value())
    }
}

fn train<'s>(step: &mut Step<'s>, model: &mut Model, slots: &CaptureInputs<'s>) -> Result<Output> {
    let loss = model.train(UpdateTicket::each_replay(slots), step, slots.input(0)?, slots.indices(1)?)?;
    Ok(slots.output(&loss))
}

fn train_borrowed<'s>(step: &mut Step<'s>, model: &mut &mut Model, slots: &CaptureInputs<'s>) -> Result<Output> {
    train(step, model, slots)
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

/// Returns batches of different sizes; the last one is short.
fn batches() -> Vec<(Vec<f32>, Vec<u32>)> {
    let mut random = Random::new(11);
    let mut batch = |rows| (random.normals(rows * COLS), random.belows(rows, CLASSES as u32));
    [ROWS, ROWS, 2, ROWS, 2, ROWS].into_iter().map(&mut batch).collect()
}

fn inputs<'i>((x, labels): &'i (Vec<f32>, Vec<u32>)) -> HostInputs<'i> {
    HostInputs::new().with(x, [labels.len(), COLS]).unwrap().with(labels, [labels.len()]).unwrap()
}

/// Checks that a step still works.
#[track_caller]
fn works(arena: &mut Arena, len: usize) {
    let values = arena.step(|step| step.read(&ops::fill(step, [len], 2.5)?)).unwrap();
    assert_eq!(values, vec![2.5; len]);
}

/// Checks that another capture still works.
#[track_caller]
fn captures(arena: &mut Arena) {
    let x = [1.0f32, -2.0];
    let inputs = HostInputs::new().with(&x, [2]).unwrap();
    let record: Record<(), Output> = |step, (), slots| Ok(slots.output(&ops::scale(step, &slots.input(0)?, 3.0)?));
    let mut captured = arena.capture((), &inputs, record).unwrap();
    let replay = captured.replay(&inputs).unwrap();
    assert_eq!(replay.read(*replay.outputs()).unwrap(), [3.0, -6.0]);
}

/// Returns the loss of one replay.
#[track_caller]
fn loss(captured: &mut Captured<Model, Output>, batch: &(Vec<f32>, Vec<u32>)) -> f32 {
    let replay = captured.replay(&inputs(batch)).unwrap();
    replay.read_scalar(*replay.outputs()).unwrap()
}

const TOWER_ROWS: usize = 2;

/// A model of 25 residual blocks: 50 matrices of 256x1024, half of them stored as 1024x256.
struct Tower {
    blocks: Vec<[Parameter; 2]>,
    weights: Parameters,
    gradients: Gradients,
    adamw: Optimizer<AdamW>,
}

impl Tower {
    fn new(device: &Device) -> Self {
        let mut spec = ParameterSpec::builder();
        let mut matrix = |name, number, shape: [usize; 2]| {
            spec.add(format!("{name}{number}"), shape, Initializer::Uniform { bound: 0.02 })
        };
        let blocks =
            (0..25).map(|number| [matrix("up", number, [256, 1024]), matrix("down", number, [1024, 256])]).collect();
        let weights = Parameters::new(device, &spec.build().unwrap(), 5).unwrap();
        let gradients = Gradients::zeros(&weights).unwrap();
        let adamw = Optimizer::new(&weights, AdamW { clip: Some(1.0), ..AdamW::default() }).unwrap();
        Self { blocks, weights, gradients, adamw }
    }

    fn train<'s>(&mut self, ticket: UpdateTicket, step: &Step<'s>, x: Saved<'s>, labels: Indices<'s>) -> Result<()> {
        self.gradients.zero(step)?;
        let tape = Tape::new(step, &self.weights);
        let mut h = tape.input(x);
        for [up, down] in &self.blocks {
            h = tape.linear_residual(&tape.linear_gelu(&h, *up, None)?, *down, None, &h)?;
        }
        let loss = tape.cross_entropy(&h, labels)?;
        tape.backward(&loss, &mut self.gradients)?;
        self.adamw.apply(ticket, step, &mut self.weights, &self.gradients)
    }
}

on_each_device! {
    also late;

    fn captured_training_matches_eager(device: &Device) {
        let mut model = Model::new(device);
        let mut eager = Vec::new();
        let mut memory = arena(device);
        for (x, labels) in &batches() {
            let ticket = model.adamw.advance().unwrap();
            eager.push(memory.step(|step| {
                let x = step.upload(x, [labels.len(), COLS])?.save();
                let labels = step.upload_indices(labels, [labels.len()])?;
                step.read_scalar(&model.train(ticket, step, x, labels)?)
            }).unwrap());
        }
        let digest = model.weights.sha256().unwrap();

        let mut memory = arena(device);
        let batches = batches();
        let mut captured = memory.capture(Model::new(device), &inputs(&batches[0]), train).unwrap();
        let mut losses = Vec::new();
        for batch in &batches {
            captured.state_mut().adamw.advance().unwrap().leave_to_replay();
            let replay = captured.replay(&inputs(batch)).unwrap();
            losses.push(replay.read_scalar(*replay.outputs()).unwrap());
        }
        assert_eq!(crate::support::bits(&losses), crate::support::bits(&eager));
        assert_eq!(captured.state().weights.sha256().unwrap(), digest);
        let report = captured.report();
        assert_eq!((report.recordings, report.replays), (2, 6), "each of the two shapes has one recording");
        assert!(report.nodes > 5 && report.bytes_owned > 0 && report.record_seconds > 0.0, "{report:?}");
    }

    /// The small case of bug C: a 4x4 product.
    fn small_product_matches_eager(device: &Device) {
        let (a, b) = (Random::new(1).normals(16), Random::new(2).normals(16));
        let mut memory = arena(device);
        let eager = memory.step(|step| {
            let (a, b) = (step.upload(&a, [4, 4])?, step.upload(&b, [4, 4])?);
            step.read(&ops::matmul(step, &a, &b)?)
        }).unwrap();
        let inputs = HostInputs::new().with(&a, [4, 4]).unwrap().with(&b, [4, 4]).unwrap();
        let mut captured = memory.capture((), &inputs, |step, (), slots| {
            Ok(slots.output(&ops::matmul(step, &slots.input(0)?, &slots.input(1)?)?))
        }).unwrap();
        for _ in 0..3 {
            let replay = captured.replay(&inputs).unwrap();
            assert_eq!(bits(&replay.read::<f32>(*replay.outputs()).unwrap()), bits(&eager));
        }
    }

    /// The case of bug C: 50 weights of 256x1024 are uploaded, and a captured step trains all of
    /// them. Their bits match those of eager training.
    fn fifty_uploaded_matrices_train_when_captured(device: &Device) {
        let digest = |capture: bool| {
            let mut memory = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
            let mut tower = Tower::new(device);
            let (x, labels) = (Random::new(8).normals(TOWER_ROWS * 256), [3u32, 200]);
            let inputs = HostInputs::new().with(&x, [TOWER_ROWS, 256]).unwrap().with(&labels, [TOWER_ROWS]).unwrap();
            if capture {
                let mut captured = memory.capture(tower, &inputs, |step, tower, slots| {
                    tower.train(UpdateTicket::each_replay(slots), step, slots.input(0)?, slots.indices(1)?)
                }).unwrap();
                for _ in 0..3 {
                    captured.state_mut().adamw.advance().unwrap().leave_to_replay();
                    captured.replay(&inputs).unwrap();
                }
                assert_eq!(captured.report().replays, 3);
                tower = captured.into_state();
            } else {
                for _ in 0..3 {
                    let ticket = tower.adamw.advance().unwrap();
                    memory.step(|step| {
                        let x = step.upload(&x, [TOWER_ROWS, 256])?.save();
                        let labels = step.upload_indices(&labels, [TOWER_ROWS])?;
                        tower.train(ticket, step, x, labels)
                    }).unwrap();
                }
            }
            tower.weights.sha256().unwrap()
        };
        assert_eq!(digest(true), digest(false));
    }

    fn closure_error_ends_capture(device: &Device) {
        for fails_at in 1..=2 {
            let mut memory = arena(device);
            let mut runs = 0;
            let error = memory.capture((&mut runs, fails_at), &HostInputs::new(), |step, (runs, fails_at), _| {
                **runs += 1;
                let x = ops::fill(step, [8], 1.0)?;
                if **runs == *fails_at { x.reshape([9]).map(drop) } else { Ok(()) }
            }).unwrap_err();
            assert!(matches!(error, Error::Misuse { op: "reshape", .. }), "{error}");
            assert_eq!((runs, memory.report().captured_bytes), (fails_at, 0));
            works(&mut memory, 100);
            captures(&mut memory);
        }
    }

    fn closure_panic_ends_capture(device: &Device) {
        for panics_at in 1..=2 {
            let mut memory = arena(device);
            let mut runs = 0;
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                memory.capture((&mut runs, panics_at), &HostInputs::new(), |step, (runs, panics_at), _| {
                    **runs += 1;
                    ops::fill(step, [8], 1.0)?;
                    assert!(**runs != *panics_at, "planted");
                    Ok(())
                }).map(drop)
            }));
            assert!(panicked.is_err());
            assert_eq!((runs, memory.report().captured_bytes), (panics_at, 0));
            works(&mut memory, 100);
            captures(&mut memory);
        }
    }

    /// A state may hold a device or a buffer, so the types cannot forbid these uses. They are
    /// refused at run time.
    fn recording_refuses_other_device_use(device: &Device) {
        struct Reach<'d> {
            device: &'d Device,
            buffer: Buffer<f32>,
            other: Arena,
        }
        let attempts: [(&str, Record<Reach<'_>, ()>); 5] = [
            ("allocate", |_, reach, _| Buffer::from_slice(reach.device, &[1.0f32]).map(drop)),
            ("upload", |_, reach, _| reach.buffer.write(0, &[1.0])),
            ("synchronize", |_, reach, _| reach.buffer.read().map(drop)),
            ("step", |_, reach, _| reach.other.step(|_| Ok(()))),
            ("capture", |_, reach, _| reach.other.capture((), &HostInputs::new(), |_, (), _| Ok(())).map(drop)),
        ];
        let mut memory = arena(device);
        for (call, attempt) in attempts {
            let buffer = Buffer::from_slice(device, &[4.0f32; 4]).unwrap();
            let reach = Reach { device, buffer, other: arena(device) };
            let error = memory.capture(reach, &HostInputs::new(), attempt).unwrap_err();
            assert!(matches!(error, Error::Misuse { op: "capture", .. }), "{error}");
            assert!(error.to_string().contains(&format!("`{call}` on the device")), "{error}");
            works(&mut memory, 100);
            captures(&mut memory);
        }
    }

    /// Counts driver calls: `capture` makes only those that belong to a capture.
    fn capture_makes_only_capture_calls(device: &Device) {
        let plan = FaultPlan::new();
        let device = like(device).layer(plan.clone()).open().unwrap();
        let (mut memory, model, batches) = (arena(&device), Model::new(&device), batches());
        let before = Call::ALL.map(|call| plan.count(call));
        let captured = memory.capture(model, &inputs(&batches[0]), train).unwrap();
        let nodes = captured.report().nodes as u64;
        for (call, before) in Call::ALL.into_iter().zip(before) {
            let made = plan.count(call) - before;
            match call {
                Call::Load => assert!(made > 5 && made < nodes, "each kernel loads once: {made} loads for {nodes} nodes"),
                Call::BeginCapture | Call::EndCapture | Call::GraphNodes | Call::Instantiate => assert_eq!(made, 1, "{call:?}"),
                Call::Record => assert_eq!(made, nodes),
                other => assert_eq!(made, 0, "{other:?}"),
            }
        }
        drop(captured);
        assert_eq!(plan.count(Call::DestroyGraph), 1);
    }

    fn repeat_reuses_inputs(device: &Device) {
        let mut memory = arena(device);
        let record: Record<Buffer<f32>, Output> = |step, sum, slots| {
            let mut sum = step.lend_mut(sum, [2])?;
            ops::add_assign(step, &mut sum, &slots.input(0)?)?;
            Ok(slots.output(&sum))
        };
        let (x, sum) = ([1.0f32, -2.0], Buffer::zeros(device, 2).unwrap());
        let inputs = HostInputs::new().with(&x, [2]).unwrap();
        let mut captured = memory.capture(sum, &inputs, record).unwrap();
        captured.replay(&inputs).unwrap();
        let replay = captured.repeat().unwrap();
        assert_eq!(replay.read(*replay.outputs()).unwrap(), [2.0, -4.0]);
        assert_eq!(captured.state().read().unwrap(), [2.0, -4.0]);
    }

    /// Uploads a replay's inputs while the previous replay may still run. Each input must be added
    /// exactly once, whole, and to its own sum.
    fn large_inputs_arrive_in_order(device: &Device) {
        const LEN: usize = 1 << 16;
        let mut memory = Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap();
        let record: Record<[Buffer<f32>; 2], ()> = |step, [sum, small], slots| {
            let mut sum = step.lend_mut(sum, [LEN])?;
            for _ in 0..20 {
                ops::add_assign(step, &mut sum, &slots.input(0)?)?;
            }
            ops::add_assign(step, &mut step.lend_mut(small, [1])?, &slots.input(1)?)
        };
        // The inputs are powers of two, so a sum shows which inputs it contains, and how often.
        let rounds: Vec<_> = (0..18).map(|round| (vec![(1u32 << round) as f32; LEN], [(1u32 << round) as f32])).collect();
        fn inputs((x, one): &(Vec<f32>, [f32; 1])) -> HostInputs<'_> {
            HostInputs::new().with(x, [LEN]).unwrap().with(one, [1]).unwrap()
        }
        let state = [Buffer::zeros(device, LEN).unwrap(), Buffer::zeros(device, 1).unwrap()];
        let mut captured = memory.capture(state, &inputs(&rounds[0]), record).unwrap();
        for round in &rounds {
            captured.replay(&inputs(round)).unwrap();
        }
        let total = ((1u32 << rounds.len()) - 1) as f32;
        assert_eq!(captured.state()[0].read().unwrap(), vec![20.0 * total; LEN]);
        assert_eq!(captured.state()[1].read().unwrap(), [total]);
        let [sum, _] = captured.into_state();
        works(&mut memory, LEN);
        assert_eq!(sum.read().unwrap(), vec![20.0 * total; LEN]);
    }

    fn variants_are_recorded_separately(device: &Device) {
        let mut memory = arena(device);
        let mut captured = memory.capture((), &HostInputs::new(), |step, (), slots| {
            Ok(slots.output(&ops::fill(step, [1], slots.variant() as f32)?))
        }).unwrap();
        for variant in [0u64, 7, 0, 9, 7] {
            let replay = captured.replay(&HostInputs::new().variant(variant)).unwrap();
            assert_eq!(replay.read_scalar::<f32>(*replay.outputs()).unwrap(), variant as f32);
        }
        assert_eq!(captured.report().recordings, 3);
    }

    fn slots_and_outputs_are_checked(device: &Device) {
        let mut memory = arena(device);
        let x = [1.0f32, 2.0];
        let inputs = HostInputs::new().with(&x, [2]).unwrap();
        assert!(matches!(HostInputs::new().with(&x, [3]), Err(Error::Misuse { op: "inputs", .. })));
        let absent: Record<(), ()> = |_, (), slots| slots.input::<f32>(1).map(drop);
        let other: Record<(), ()> = |_, (), slots| slots.input::<u32>(0).map(drop);
        for (record, words) in [(absent, "an input below 1"), (other, "input 0 of u32 elements")] {
            let error = memory.capture((), &inputs, record).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
        let double: Record<(), Output> = |step, (), slots| Ok(slots.output(&ops::scale(step, &slots.input(0)?, 2.0)?));
        let mut captured = memory.capture((), &inputs, double).unwrap();
        let mut another = memory.capture((), &inputs, double).unwrap();
        let foreign = *another.replay(&inputs).unwrap().outputs();
        let replay = captured.replay(&inputs).unwrap();
        assert_eq!(replay.read(*replay.outputs()).unwrap(), [2.0, 4.0]);
        assert!(matches!(replay.read(foreign), Err(Error::Misuse { op: "replay.read", .. })));
        assert!(matches!(replay.read_scalar(*replay.outputs()), Err(Error::Misuse { op: "read_scalar", .. })));
    }

    fn checked_capture_keeps_bits(device: &Device) {
        let losses = |checked: bool| -> (Vec<f32>, String) {
            let mut memory = Arena::builder(device).capacity(Capacity::mib(2)).checked(checked).build().unwrap();
            let batches = batches();
            let mut captured = memory.capture(Model::new(device), &inputs(&batches[0]), train).unwrap();
            let losses = batches.iter().map(|batch| {
                captured.state_mut().adamw.advance().unwrap().leave_to_replay();
                loss(&mut captured, batch)
            }).collect();
            (losses, captured.state().weights.sha256().unwrap())
        };
        assert_eq!(losses(true), losses(false));
    }
}

/// A write past the end of a tensor is reported by each replay that makes it.
#[test]
fn replay_reports_overrun() {
    let device = crate::support::open(DeviceKind::Emulated);
    let mut memory = Arena::builder(&device).capacity(Capacity::mib(1)).checked(true).build().unwrap();
    let inputs = [HostInputs::new(), HostInputs::new().variant(1)];
    let mut captured = memory
        .capture((), &inputs[0], |step, (), slots| {
            let mut x = ops::fill(step, [100], 1.0)?;
            if slots.variant() == 1 { step.launch(one_too_far(x.out())) } else { Ok(()) }
        })
        .unwrap();
    captured.replay(&inputs[0]).unwrap();
    for _ in 0..2 {
        let error = captured.replay(&inputs[1]).unwrap_err();
        let Error::Overrun { tensor, site, offset_bytes, .. } = &error else { panic!("{error}") };
        assert_eq!((tensor.as_str(), *offset_bytes), ("f32[100]", 400));
        assert!(site.contains("tests/capture/capture.rs"), "{site}");
        captured.replay(&inputs[0]).unwrap();
    }
}
