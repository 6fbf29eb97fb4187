//! A kernel of another package in a step that trains, eager and captured, and in a launch that its
//! contract refuses.

use downstream::{builder, leaky_relu};
use stepscope::data::SplitMix64;
use stepscope::nn::Linear;
use stepscope::tensor::{Source, Target};
use stepscope::{
    AdamW, Arena, Capacity, Device, DeviceBatch, DeviceKind, EpochProgress, Error, Gradients, HostBatch, HostInputs,
    Initializer, Model, ParameterSpec, Parameters, Result, Tape, TrainState, Trainer, Var,
};

const SLOPE: f32 = 0.25;
const UPDATES: usize = 60;

struct Classifier {
    hidden: Linear,
    head: Linear,
}

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let hidden = self.hidden.forward(tape, &tape.input(batch.input::<f32>(0)?))?;
        self.head.forward(tape, &leaky_relu(&hidden, SLOPE)?)
    }
}

/// Points of the plane, labelled by whether both coordinates have the same sign.
struct Points {
    x: Vec<f32>,
    labels: Vec<u32>,
}

impl Points {
    fn new() -> Self {
        let mut random = SplitMix64::new(5);
        let x: Vec<f32> = (0..128).map(|_| 2.0 * random.unit() - 1.0).collect();
        let labels = x.as_chunks::<2>().0.iter().map(|[a, b]| u32::from(a * b > 0.0)).collect();
        Self { x, labels }
    }
}

impl HostBatch for Points {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        HostInputs::new().with(&self.x, [self.len(), 2])?.with(&self.labels, [self.len()])
    }
}

fn state(device: &Device) -> TrainState<Classifier> {
    let mut spec = ParameterSpec::builder();
    let model = Classifier { hidden: Linear::new(spec.at("hidden"), 2, 32), head: Linear::new(spec.at("head"), 32, 2) };
    let config = AdamW { learning_rate: 0.05, ..AdamW::default() };
    TrainState::new(device, model, &spec.build().unwrap(), 7, config).unwrap()
}

/// Checks exact values, forward and backward, of only the op.
fn computes(device: &Device) {
    let mut spec = ParameterSpec::builder();
    let x = spec.add("x", [300], Initializer::ZERO);
    let mut parameters = Parameters::new(device, &spec.build().unwrap(), 0).unwrap();
    let values: Vec<f32> = (-150..150).map(|number| number as f32).collect();
    parameters.write(x, &values).unwrap();
    let mut gradients = Gradients::zeros(&parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
    let y = arena
        .step(|step| {
            let tape = Tape::new(step, &parameters);
            let y = leaky_relu(&tape.parameter(x)?, SLOPE)?;
            tape.backward(&(y * 8.0)?.sum(..)?, &mut gradients)?;
            step.read(y.value())
        })
        .unwrap();
    let dx = gradients.read(x).unwrap();
    for (at, x) in values.into_iter().enumerate() {
        let (slope, name) = if x > 0.0 { (1.0, "above") } else { (SLOPE, "below") };
        assert_eq!((y[at], dx[at]), (slope * x, 8.0 * slope), "{name} zero, at {x}");
    }
    let refused = arena.step(|step| {
        let x = step.upload(&[0.0; 4], [4])?;
        let (mut y, none) = (step.empty::<f32>([3])?, step.empty::<f32>([0])?);
        let (x, slope, layout) = (x.slice(), none.slice(), [0; 34]);
        step.launch(downstream_kernels::leaky_relu { x, slope, layout, length: 4, out: y.out() })
    });
    assert!(matches!(refused, Err(Error::Contract { kernel: "leaky_relu_f32", .. })), "{refused:?}");
}

fn trains(device: &Device) {
    let mut weights = Vec::new();
    for captured in [false, true] {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let mut trainer = match captured {
            true => Trainer::captured(&mut arena, state(device), &Points::new()).unwrap(),
            false => Trainer::eager(&mut arena, state(device)),
        };
        let mut progress = EpochProgress::default();
        trainer.fit_with((0..UPDATES).map(|_| Ok(vec![Points::new()])), &mut progress, &mut ()).unwrap();
        let loss = trainer.evaluate(&Points::new()).unwrap();
        assert!(
            loss < 0.35,
            "the loss must fall, which needs the kernel, as no line separates these points: loss {loss}"
        );
        weights.push(trainer.state().parameters.sha256().unwrap());
    }
    assert_eq!(weights[0], weights[1], "the captured run's weights differ from the eager run's");
}

mod emulated {
    use super::*;

    #[test]
    fn custom_kernel_trains() {
        let device = builder(DeviceKind::Emulated).open().unwrap();
        computes(&device);
        trains(&device);
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn custom_kernel_trains() {
        let device = builder(DeviceKind::Cuda).open().unwrap();
        computes(&device);
        trains(&device);
        // Without the package's PTX, its kernels are refused by name.
        let without = Device::open(DeviceKind::Cuda).unwrap();
        let mut arena = Arena::builder(&without).capacity(Capacity::mib(1)).build().unwrap();
        let mut trainer = Trainer::eager(&mut arena, state(&without));
        let error = trainer.update(&[Points::new()]).unwrap_err().to_string();
        assert!(error.contains("leaky_relu") && error.contains("downstream-kernels"), "{error}");
    }
}
