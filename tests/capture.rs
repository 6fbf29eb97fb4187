//! Captured steps on each device: the same bits as eager ones, memory of their own, and nothing they should not reach.
//!
//! Invariant: every refusal leaves the arena and the device usable, which each test shows by a step afterwards.

mod support;

use stepscope::faults::{Call, Fault, FaultPlan};
use stepscope::{
    AdamW, AdamWConfig, Arena, Buffer, Capacity, Captured, Device, Error, Gradients, Initializer, Inputs, Layout,
    Output, Overflow, Parameter, Parameters, Result, Saved, Slots, Step, Tape, ops,
};
use support::{Random, on_each_device};

const ROWS: usize = 5;
const COLS: usize = 7;
const CLASSES: usize = 3;

/// A small classifier and what trains it.
struct Model {
    w: Parameter,
    b: Parameter,
    weights: Parameters,
    gradients: Gradients,
    adamw: AdamW,
}

impl Model {
    fn new(device: &Device) -> Self {
        let mut layout = Layout::builder();
        let w = layout.add("w", [COLS, CLASSES], Initializer::fan_in(COLS));
        let b = layout.add("b", [CLASSES], Initializer::Constant(0.1));
        let weights = Parameters::new(device, &layout.build().unwrap(), 3).unwrap();
        let gradients = Gradients::zeros(&weights).unwrap();
        let config = AdamWConfig { learning_rate: 0.05, clip: Some(1.0), ..AdamWConfig::default() };
        let adamw = AdamW::new(&weights, config).unwrap();
        Self { w, b, weights, gradients, adamw }
    }

    /// Forward, backward, clipping and the update; the mean loss.
    fn train<'s>(&mut self, step: &Step<'s>, x: Saved<'s>, labels: Saved<'s, u32>) -> Result<Saved<'s>> {
        self.gradients.zero(step)?;
        let tape = Tape::new(step, &self.weights);
        let logits = tape.linear(&tape.input(x), self.w, Some(self.b))?;
        let loss = tape.cross_entropy(&logits, labels, 1.0 / x.shape().extents()[0] as f32)?;
        tape.backward(&loss, &mut self.gradients)?;
        self.adamw.apply(step, &mut self.weights, &self.gradients)?;
        Ok(*loss.value())
    }
}

fn train<'s>(step: &mut Step<'s>, model: &mut Model, slots: &Slots<'s>) -> Result<Output> {
    let loss = model.train(step, slots.input(0)?, slots.input(1)?)?;
    Ok(slots.output(&loss))
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap()
}

/// Batches of different sizes, the last of which is short.
fn batches() -> Vec<(Vec<f32>, Vec<u32>)> {
    let mut random = Random::new(11);
    let mut batch = |rows| (random.normals(rows * COLS), random.belows(rows, CLASSES as u32));
    [ROWS, ROWS, 2, ROWS, 2, ROWS].into_iter().map(&mut batch).collect()
}

fn inputs<'i>((x, labels): &'i (Vec<f32>, Vec<u32>)) -> Inputs<'i> {
    Inputs::new().with(x, [labels.len(), COLS]).unwrap().with(labels, [labels.len()]).unwrap()
}

/// A step still works.
#[track_caller]
fn works(arena: &mut Arena) {
    let values = arena.step(|step| step.read(&ops::fill(step, [100], 2.5)?)).unwrap();
    assert_eq!(values, [2.5; 100]);
}

on_each_device! {
    fn a_captured_step_trains_with_the_bits_of_an_eager_one(device: &Device) {
        let mut model = Model::new(device);
        let mut eager = Vec::new();
        let mut memory = arena(device);
        for (x, labels) in &batches() {
            model.adamw.advance().unwrap();
            eager.push(memory.step(|step| {
                let x = step.upload(x, [labels.len(), COLS])?.save();
                let labels = step.upload(labels, [labels.len()])?.save();
                step.read_scalar(&model.train(step, x, labels)?)
            }).unwrap());
        }
        let digest = model.weights.sha256().unwrap();

        let mut memory = arena(device);
        let batches = batches();
        let mut captured = memory.capture(Model::new(device), &inputs(&batches[0]), train).unwrap();
        let mut losses = Vec::new();
        for batch in &batches {
            captured.state_mut().adamw.advance().unwrap();
            let replay = captured.replay(&inputs(batch)).unwrap();
            losses.push(replay.read_scalar(*replay.outputs()).unwrap());
        }
        assert_eq!(support::bits(&losses), support::bits(&eager));
        assert_eq!(captured.state().weights.sha256().unwrap(), digest);
        let report = captured.report();
        assert_eq!((report.recordings, report.replays), (2, 6), "one recording for each of two shapes");
        assert!(report.nodes > 5 && report.bytes_owned > 0 && report.record_seconds > 0.0, "{report:?}");
    }
}
